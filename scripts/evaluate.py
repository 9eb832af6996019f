"""Measure what drafters are worth: speed against plain decoding, acceptance, exactness, cost; as a table and a page.

    python scripts/evaluate.py --target smollm2-135m --drafter runs/smollm2-eagle3 --out results
    python scripts/evaluate.py --target smollm2-135m --drafter lookup --drafter suffix:document.txt
    python scripts/evaluate.py --target smollm2-135m --drafter mine=runs/a --drafter other=runs/b \
        --prompts spec_bench.jsonl --limit 60 --chain 5

An interrupted evaluation goes on where it was when the same command is run again.
"""

import argparse
from pathlib import Path
from typing import Any

from decode.adapt import POLICIES, build_policy
from decode.evaluate import evaluate
from decode.prompts import load_prompts
from decode.report import print_table, write_report
from decode.sampling import SamplingParams
from drafters.base import DraftSettings
from drafters.errors import UserError, cli
from drafters.named import is_name, make_drafter
from drafters.target import Target, load_target


def parser() -> argparse.ArgumentParser:
    """Builds the command line."""
    p = argparse.ArgumentParser(description="Measure drafters against plain decoding and transformers' generate.")
    p.add_argument("--target", default="smollm2-135m", help="hub id, folder or GGUF file of the target")
    p.add_argument(
        "--drafter",
        action="append",
        default=[],
        metavar="[NAME=]DRAFTER",
        help="folder, lookup, suffix[:FILE], lookahead, model:NAME_OR_DIR, router:A+B or merged:A+B; repeatable",
    )
    p.add_argument("--prompts", default="headstart", help='"headstart" (built in) or a .jsonl or .txt file')
    p.add_argument("--limit", type=int, help="use this many prompts, taken in turn from each category")
    p.add_argument("--temperature", type=float, default=0.0, help="0 is greedy and checks exactness")
    p.add_argument("--top-k", type=int, default=0, help="0 keeps the whole vocabulary")
    p.add_argument("--top-p", type=float, default=1.0)
    p.add_argument("--min-p", type=float, default=0.0)
    p.add_argument("--repetition-penalty", type=float, default=1.0)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--max-new-tokens", type=int, default=128)
    p.add_argument("--dtype", default="auto", choices=("bfloat16", "float16", "float32", "auto"))
    p.add_argument("--attention", default="headstart", help="headstart, sdpa or eager")
    p.add_argument("--policy", choices=POLICIES, help="how much to draft; default: adaptive, fixed with a shape")
    shape = p.add_mutually_exclusive_group()
    shape.add_argument("--chain", type=int, metavar="LENGTH", help="draft chains of LENGTH")
    shape.add_argument("--tree", metavar="TOTAL,DEPTH,TOPK", help="draft a tree of TOTAL nodes")
    p.add_argument("--draft-window", type=int, metavar="ROWS", help="EAGLE: attend to the last ROWS committed tokens")
    p.add_argument("--runs", type=int, default=2, help="passes over the arms per prompt, there and back")
    p.add_argument("--out", default="runs/eval", help="folder for report.html, report.json and raw.jsonl")
    p.add_argument("--no-hf", action="store_true", help="leave transformers' generate out")
    p.add_argument("--trust-remote-code", action="store_true", help="run model code that ships with the weights")
    return p


def load_drafters(arguments: list[str], target: Target) -> dict[str, Any]:
    """Loads `NAME=DRAFTER` or `DRAFTER` arguments: a folder, by whose name it goes, or a name (`make_drafter`)."""
    drafters: dict[str, Any] = {}
    for argument in arguments:
        name, equals, spec = argument.partition("=")
        if not equals or is_name(argument) or Path(argument).is_dir():  # a folder or file may have "=" in its name
            name, spec = argument if is_name(argument) else Path(argument).resolve().name, argument
        if not name or name in drafters:
            raise UserError(f"--drafter {argument}: the name {name!r} is empty or taken; use NAME={argument}")
        drafters[name] = make_drafter(spec, target)
    return drafters


def limit_window(drafter: Any, rows: int) -> None:
    """Lets an EAGLE drafter attend to the last `rows` committed tokens only; output does not depend on it."""
    if rows < 1 or not drafter.kind.startswith("eagle"):
        raise UserError(f"--draft-window {rows} for {drafter.kind}: at least 1, and EAGLE drafters only")
    drafter.meta["window"] = rows


def main() -> None:
    """Loads everything, measures, prints the table and writes the report."""
    args = parser().parse_args()
    fixed = DraftSettings.from_flags(args.chain, args.tree)  # mistakes should show before the models load
    prompts = load_prompts(args.prompts, limit=args.limit)
    sampling = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
    )
    target = load_target(
        args.target, dtype=args.dtype, attention=args.attention, trust_remote_code=args.trust_remote_code
    )
    out = Path(args.out)
    drafters = load_drafters(args.drafter, target)
    if args.draft_window is not None:
        for drafter in drafters.values():
            limit_window(drafter, args.draft_window)
    lengths = sorted(len(target.render(p.messages)) for p in prompts)
    context = lengths[len(lengths) // 2] + args.max_new_tokens // 2
    settings = {name: build_policy(args.policy, target, d, fixed, context) for name, d in drafters.items()}
    report = evaluate(
        target,
        drafters,
        prompts,
        settings=settings,
        sampling=sampling,
        max_new_tokens=args.max_new_tokens,
        runs=args.runs,
        hf_generate=not args.no_hf,
        raw_path=out / "raw.jsonl",
        prompts_name=args.prompts,
    )
    page = write_report(report, report["outputs"], out)
    print_table(report)
    print(f"report: {page}")


if __name__ == "__main__":
    cli(main)()
