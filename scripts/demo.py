"""The main job, end to end: the target writes its own text, drafters are trained on it, and measured.

    python scripts/demo.py

Everything lies in runs/demo. Interrupted anywhere, the same command goes on from there. How much text is written is
timed on this machine first (plan.json keeps it), so that the whole takes under twenty minutes on two CPU cores.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from decode.adapt import build_policy
from decode.cost import filled_cache
from decode.evaluate import evaluate
from decode.prompts import load_prompts
from decode.report import print_table, write_report
from decode.validation import acceptance_length
from drafters.checkpoint import load_drafter
from drafters.errors import UserError, cli
from drafters.files import replacing
from drafters.target import Target, load_target
from train.loop import train
from train.recipe import Recipe, load_recipe

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
SYNTHESIS_SECONDS = 270
# A small model begins most conversations alike. The prompts it is measured on are not among these.
OPENERS = (
    "", "Write a Python function that", "Explain", "Solve this problem step by step:", "Shorten this text:\n\n",
    "How do I", "Improve this paragraph", "What is the difference between", "Find all", "Write a", "Give me three",
    "What does this code do?\n\n```python\n", "Why", "A shop sells", "", "Turn these notes into",
)  # fmt: skip
PLAN = "plan.json"


def parser() -> argparse.ArgumentParser:
    """Builds the command line."""
    p = argparse.ArgumentParser(description="Train and measure an EAGLE-3 drafter and Medusa heads for SmolLM2-135M.")
    p.add_argument("--target", default="smollm2-135m", help="hub id, folder or GGUF file of the target")
    p.add_argument("--dtype", default="auto", choices=("bfloat16", "float16", "float32", "auto"))
    p.add_argument("--out", default="runs/demo", help="folder for text, drafters and report")
    p.add_argument(
        "--tokens", type=int, help="tokens the target writes; default: what this machine writes in some minutes"
    )
    p.add_argument("--prompts", type=int, default=20, help="prompts to measure on")
    return p


def main() -> None:
    """Plan, train twice, measure, report."""
    args = parser().parse_args()
    start = time.monotonic()
    out = Path(args.out)
    target = load_target(args.target, args.dtype)
    print(f"target {args.target} in {str(target.dtype).removeprefix('torch.')} on {target.device}")
    if target.dtype == torch.float32:
        print("(float32: this CPU has no bfloat16 instructions, and there is no C compiler)")
    plan = _plan(out, target, args)
    for kind, recipe in _recipes(out, args.target, args.dtype, plan).items():
        print(f"\n[{_clock(start)}] {kind}", flush=True)
        train(recipe, target, acceptance_length)
    print(f"\n[{_clock(start)}] measuring", flush=True)
    drafters = {kind: load_drafter(out / kind, target) for kind in ("eagle3", "medusa")}
    settings = {kind: build_policy(None, target, drafter) for kind, drafter in drafters.items()}
    prompts = load_prompts("headstart", limit=plan["prompts"])
    folder = out / "report"
    report = evaluate(
        target, drafters, prompts, settings=settings, max_new_tokens=plan["max_new_tokens"], runs=1,
        raw_path=folder / "raw.jsonl", prompts_name="headstart",
    )  # fmt: skip
    page = write_report(report, report["outputs"], folder)
    print_table(report)
    print(f"[{_clock(start)}] done\nreport: {page}")
    print(f"chat with it: python scripts/chat.py --target {args.target} --drafter {out / 'eagle3'}")


def _plan(out: Path, target: Target, args: argparse.Namespace) -> dict[str, Any]:
    """Sizes of this demo, decided once."""
    path = out / PLAN
    asked = {"target": args.target, "dtype": args.dtype, "prompts": args.prompts}
    if path.is_file():
        plan = json.loads(path.read_text())
        for key, value in {**asked, "tokens": args.tokens}.items():
            if value is not None and plan[key] != value:
                raise UserError(
                    f"{out} was begun with {key}={plan[key]}, not {value}; choose another --out or delete it"
                )
        return plan
    tokens = args.tokens or max(10_000, min(200_000, int(_synthesis_rate(target) * SYNTHESIS_SECONDS) // 1000 * 1000))
    plan = {**asked, "tokens": tokens, "max_new_tokens": 80}
    print(f"plan: {tokens} tokens of the target's own text")
    _save_plan(out, plan)
    return plan


def _save_plan(out: Path, plan: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with replacing(out / PLAN) as file:
        file.write_text(json.dumps(plan, indent=1))


@torch.inference_mode()
def _synthesis_rate(target: Target, rows: int = 32, steps: int = 30) -> float:
    """Tokens per second of a decode step over `rows` rows, less what templates, sampling and last columns take."""
    cache = filled_cache(target, rows, 128, steps + 2)
    ids = torch.full((rows, 1), 7, device=target.device)
    for step in range(steps + 2):
        if step == 2:
            start = time.perf_counter()
        positions = torch.full((rows, 1), cache.length, device=target.device)
        target.head(target.forward(ids, positions, cache).final).argmax(-1).tolist()
        cache.commit(1)
    return 0.8 * rows * steps / (time.perf_counter() - start)


def _recipes(out: Path, target: str, dtype: str, plan: dict[str, Any]) -> dict[str, Recipe]:
    shared = [
        f"target.name={target}",
        f"target.dtype={dtype}",
        f"synthesis.folder={out / 'text'}",
        f"synthesis.tokens={plan['tokens']}",
        f"synthesis.openers={json.dumps(OPENERS)}",
        f"train.features={out / 'features'}",
        "train.eval_every=300",
    ]
    files = {"eagle3": "smollm2-eagle3.yaml", "medusa": "smollm2-medusa1.yaml"}
    return {kind: load_recipe(RECIPES / file, [*shared, f"output={out / kind}"]) for kind, file in files.items()}


def _clock(start: float) -> str:
    seconds = int(time.monotonic() - start)
    return f"{seconds // 60}:{seconds % 60:02d}"


if __name__ == "__main__":
    cli(main)()
