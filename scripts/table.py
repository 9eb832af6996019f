"""Every method on one target, one text and one budget, measured in one interleaved run.

    make table
    python scripts/table.py --tokens 60000 --epochs 3 --prompts 20

Trains each recipe of `RECIPES` on the same text for the same number of epochs, then decodes the same prompts with all
of them and with the drafters that need no training. Prints the table, writes it as table.md, table.json and table.png
beside the full report, and goes on where it was when it is run again.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from decode.cost import CANDIDATES, OFF, continuations, cost_cache, profile, try_drafts
from decode.evaluate import evaluate
from decode.prompts import load_prompts
from decode.report import write_report
from decode.validation import acceptance_length
from drafters.adapter import adapted
from drafters.base import DraftSettings
from drafters.checkpoint import load_drafter
from drafters.combine import Merged
from drafters.errors import UserError, cli
from drafters.files import replacing
from drafters.lookahead import LookaheadDrafter
from drafters.lookup import LookupDrafter, SuffixDrafter
from drafters.router import Router
from drafters.target import Target, load_target
from train.loop import train
from train.recipe import load_recipe
from train.synthesis import synthesize

RECIPES = ("medusa1", "hydra", "eagle1", "hass", "eagle3", "eagle3.1", "medusa2")
FOLDER = Path(__file__).resolve().parents[1] / "recipes"
PLAN = "plan.json"
COLUMNS = ("method", "parameters", "training", "tau, chain of 4", "drafted", "tau", "survival", "speedup", "output")


def parser() -> argparse.ArgumentParser:
    """Builds the command line."""
    p = argparse.ArgumentParser(description="Compare all drafters on one target, one text and one budget.")
    p.add_argument("--target", default="smollm2-135m", help="hub id, folder or GGUF file of the target")
    p.add_argument("--dtype", default="auto", choices=("bfloat16", "float16", "float32", "auto"))
    p.add_argument("--tokens", type=int, default=25_000, help="tokens of the target's own text to train on")
    p.add_argument("--epochs", type=float, default=2.0, help="passes over that text, for every method")
    p.add_argument("--prompts", type=int, default=12, help="prompts to measure on")
    p.add_argument("--max-new-tokens", type=int, default=48)
    p.add_argument("--methods", nargs="+", default=list(RECIPES), choices=RECIPES, help="trained methods to compare")
    p.add_argument("--out", default="runs/table")
    return p


def main() -> None:
    """Trains, chooses what to draft, measures, writes the table."""
    args = parser().parse_args()
    out = Path(args.out)
    plan = _plan(out, args)
    target = load_target(args.target, args.dtype)
    for name in args.methods:
        print(f"\n{name}", flush=True)
        shared = [
            f"target.name={args.target}", f"target.dtype={args.dtype}", f"synthesis.folder={out / 'text'}",
            f"synthesis.tokens={args.tokens}", f"train.features={out / 'features'}", f"train.epochs={args.epochs}",
            "train.decode_every=0", f"output={out / name}",
        ]  # fmt: skip
        recipe = load_recipe(FOLDER / f"smollm2-{name}.yaml", shared)
        synthesize(recipe, target)  # all methods' text is no method's time
        start = time.monotonic()
        train(recipe, target, acceptance_length)
        plan["seconds"][name] = plan["seconds"].get(name, 0) + time.monotonic() - start
        _save(out, plan)
    drafters = _drafters(out, target, args.methods)
    settings = _settings(out, plan, target, drafters)
    prompts = load_prompts("headstart", limit=args.prompts)
    report = evaluate(
        target, drafters, prompts, settings=settings, max_new_tokens=args.max_new_tokens, runs=2,
        raw_path=out / "report" / "raw.jsonl", prompts_name="headstart",
    )  # fmt: skip
    page = write_report(report, report["outputs"], out / "report")
    rows = [_row(arm, report, plan, drafters) for arm in report["arms"]]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in (COLUMNS, ("---",) * len(COLUMNS), *rows))
    (out / "table.md").write_text(text + "\n")
    (out / "table.json").write_text(json.dumps({"plan": plan, "arms": report["arms"]}, indent=1, default=str))
    _plot(report["arms"], plan, out / "table.png")
    print(f"\n{text}\n\nwrote {out / 'table.md'}, {out / 'table.json'}, {out / 'table.png'}\nreport: {page}")


def _plan(out: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What this table was begun with, the seconds spent so far and the settings chosen; one folder, one table."""
    path, asked = out / PLAN, {k: v for k, v in vars(args).items() if k != "methods"}
    if not path.is_file():
        return {"asked": asked, "seconds": {}, "draft": {}, "tau4": {}}
    plan = json.loads(path.read_text())
    for key, value in asked.items():
        if plan["asked"].get(key) != value:
            raise UserError(
                f"{out} was begun with {key}={plan['asked'].get(key)}, not {value}; choose another --out or delete it"
            )
    return plan


def _save(out: Path, plan: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with replacing(out / PLAN) as file:
        file.write_text(json.dumps(plan, indent=1))


def _drafters(out: Path, target: Target, methods: Sequence[str]) -> dict[str, Any]:
    """All arms: EAGLE-2 is EAGLE-1's weights with a dynamic tree; router and merged tree add suffix decoding."""
    drafters: dict[str, Any] = {name: load_drafter(out / name, target) for name in methods}
    if "eagle1" in drafters:
        drafters["eagle2"] = load_drafter(out / "eagle1", target)
    drafters |= {"lookup": LookupDrafter(), "suffix": SuffixDrafter(), "lookahead": LookaheadDrafter()}
    best = "eagle3" if "eagle3" in methods else next((m for m in methods if m != "medusa2"), None)
    if best is not None:
        both = [{"suffix": SuffixDrafter(), best: load_drafter(out / best, target)} for _ in range(2)]
        drafters |= {"router": Router(both[0]), "merged": Merged(both[1])}
    return drafters


@torch.inference_mode()
def _settings(out: Path, plan: dict[str, Any], target: Target, drafters: dict[str, Any]) -> dict[str, DraftSettings]:
    """The setting expected to pay most, not drafting aside, and how far a chain of four gets; decided once."""
    chosen: dict[str, DraftSettings] = {}
    for name, drafter in drafters.items():
        if name in ("router", "merged"):  # each part as it is chosen alone
            drafter.use({part: chosen[part] for part in drafter.drafters})
            chosen[name] = drafter.default_settings
            continue
        if name not in plan["draft"]:
            kinds = {"eagle1": "chain", "hass": "chain", "eagle2": "tree"}
            asked = [s for s in CANDIDATES if s is OFF or s.kind == kinds.get(name, s.kind)]
            with adapted(drafter):
                texts = continuations(target, load_prompts("calibration"), drafter.taps)
                best = drafter.default_settings
                if not hasattr(drafter, "observe"):
                    ranked = profile(target, drafter, texts=texts, settings=asked, cache=cost_cache())
                    best = next(c.settings for c in ranked if c.settings.nodes)
                four = DraftSettings("chain", 4)
                plan["tau4"][name] = 1 + sum(try_drafts(drafter, texts, [four])[four].survival)
            plan["draft"][name] = vars(best)
            print(f"{name}: {best.describe()}; a chain of 4 gives {plan['tau4'][name]:.2f} tokens a step", flush=True)
            _save(out, plan)
        chosen[name] = DraftSettings(**plan["draft"][name])
    return chosen


def _row(arm: dict[str, Any], report: dict[str, Any], plan: dict[str, Any], drafters: dict[str, Any]) -> list[str]:
    name = arm["name"]
    drafter, facts = drafters.get(name), report["drafters"].get(name) or {}
    weights = sum(p.numel() for p in drafter.parameters()) if isinstance(drafter, torch.nn.Module) else 0
    seconds, tokens = plan["seconds"].get(name), facts.get("training_tokens")
    low, high = arm["speedup_ci95"]
    return [
        name,
        f"{weights / 1e6:.1f} M" if weights else "",
        f"{tokens} tokens, {seconds / 60:.1f} min" if seconds and tokens else "",
        f"{plan['tau4'][name]:.2f}" if name in plan["tau4"] else "",
        DraftSettings(**plan["draft"][name]).describe() if name in plan["draft"] else "",
        f"{arm['tau']:.2f}",
        " ".join(f"{s:.2f}" for s in arm["survival"][:4]),
        f"{arm['speedup']:.2f}x ({low:.2f} to {high:.2f})",
        str(arm["exact_match"]["verdict"]) if arm.get("exact_match") else "",
    ]


def _plot(arms: list[dict[str, Any]], plan: dict[str, Any], path: Path) -> None:
    """Speedup with its interval, and the acceptance length of every arm."""
    figure = Figure(figsize=(8, 0.35 * len(arms) + 1.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = [arm["name"] for arm in arms]
    speed = [arm["speedup"] for arm in arms]
    errors = [[s - a["speedup_ci95"][0] for s, a in zip(speed, arms, strict=True)],
              [a["speedup_ci95"][1] - s for s, a in zip(speed, arms, strict=True)]]  # fmt: skip
    left.errorbar(speed, names, xerr=errors, fmt="o")
    left.axvline(1.0, color="gray", linewidth=0.8)
    left.set_xlabel("speedup over plain decoding, 95 % interval")
    right.plot([arm["tau"] for arm in arms], names, "o", label="as drafted")
    right.plot([plan["tau4"].get(n, float("nan")) for n in names], names, "x", label="chain of 4, calibration")
    right.set_xlabel("tokens a target step")
    right.legend()
    left.invert_yaxis()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    cli(main)()
