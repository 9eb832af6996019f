"""Serve a stream of prompts while the drafter learns from it, between requests; shows what that brings.

    python scripts/online.py --drafter runs/smollm2-eagle3 --prompts traffic --out runs/smollm2-adapted

Prompts come in their file's order, category by category in the built-in ones, so that the topic shifts. Every
`--window` requests the drafter is updated, and the update before is judged on the requests since: the better weights
stay. The text is the target's own all along.
"""

import argparse
import statistics
from pathlib import Path

from decode.engine import DraftSettings, generate
from decode.prompts import load_prompts
from decode.sampling import SamplingParams
from drafters.checkpoint import load_drafter, save_drafter
from drafters.errors import UserError, cli
from drafters.record import Recorder
from drafters.target import load_target
from train.online import Online
from train.recipe import recipe_from_dict


def parser() -> argparse.ArgumentParser:
    """Builds the command line."""
    p = argparse.ArgumentParser(description="Decode a stream of prompts with a drafter that learns from it.")
    p.add_argument("--target", default="smollm2-135m", help="hub id, folder or GGUF file of the target")
    p.add_argument("--drafter", required=True, help="drafter folder to start from; it is not changed")
    p.add_argument(
        "--prompts", default="headstart", help='"headstart" or "traffic" (built in) or a .jsonl or .txt file'
    )
    p.add_argument("--limit", type=int, help="use this many prompts, taken in turn from each category")
    p.add_argument("--window", type=int, default=4, help="requests between updates")
    p.add_argument("--steps", type=int, default=8, help="optimizer steps an update")
    p.add_argument("--batch", type=int, default=4, help="recorded requests in an optimizer step")
    p.add_argument("--lr", type=float, default=3e-4, help="learning rate; halved by an update that hurt")
    p.add_argument("--memory", type=int, default=20_000, help="tokens of past requests that are kept to learn from")
    p.add_argument("--chain", type=int, default=4, metavar="LENGTH", help="draft chains of LENGTH tokens")
    p.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    p.add_argument("--max-new-tokens", type=int, default=128)
    p.add_argument("--dtype", default="auto", choices=("bfloat16", "float16", "float32", "auto"))
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", help="folder for the drafter as it is in the end; default: it is not kept")
    return p


def main() -> None:
    """Serves the stream; prints a line a window."""
    args = parser().parse_args()
    if args.window < 1 or args.chain < 1:
        raise UserError(f"--window {args.window}, --chain {args.chain}: at least 1 is allowed")
    prompts = load_prompts(args.prompts, limit=args.limit)
    target = load_target(args.target, dtype=args.dtype)
    live = load_drafter(args.drafter, target)
    recipe = recipe_from_dict(
        {
            "output": args.out or "none",
            "drafter": {"kind": live.kind},
            "train": {"lr": args.lr, "micro_batch": args.batch},
            "seed": args.seed,
        }
    )
    recorder = Recorder(live, capacity=args.memory)
    online = Online(live, target, recipe, steps=args.steps)
    start = Online(live, target, recipe)  # what the drafter would have done unchanged
    settings, sampling = DraftSettings("chain", args.chain), SamplingParams(args.temperature, seed=args.seed)
    print("requests  topic            tau decoded   estimated   unchanged drafter   last update")
    gains = []
    for begun in range(0, len(prompts), args.window):
        window = prompts[begun : begun + args.window]
        recorder.reset()
        for prompt in window:
            generate(
                target,
                recorder,
                prompt.messages,
                max_new_tokens=args.max_new_tokens,
                settings=settings,
                sampling=sampling,
            )
        recorder.finish()
        rows = list(recorder.rows)
        fresh = min(len(window), len(rows))
        unchanged = start.acceptance(rows[-fresh:])
        update = online.update(rows, fresh)
        gains.append(update.now / unchanged)
        verdict = "its first" if update.before is None else "taken back" if update.restored else "kept"
        if update.before is not None:
            verdict += f" ({update.before:.2f} without it)"
        topic = ", ".join(sorted({prompt.category or "-" for prompt in window}))
        tau = recorder.tokens / max(1, recorder.steps)
        print(
            f"{begun + len(window):8}  {topic:15}  {tau:11.2f} {update.now:11.2f} {unchanged:19.2f}   {verdict}",
            flush=True,
        )
    print(f"{online.updates} updates, {online.restored} taken back; acceptance length over the unchanged drafter's,")
    if gains[1:]:
        print(f"mean of windows after the first: {statistics.fmean(gains[1:]):.3f}x")
    else:
        print("not measured: the first window is decoded before any update; use more prompts")
    if args.out:
        meta = {k: v for k, v in live.meta.items() if k not in ("warnings", "results", "kind", "target", "draft_ids")}
        save_drafter(online.learner, Path(args.out), target, {**meta, "adapted_from": str(args.drafter)})
        print(f"adapted drafter: {args.out}")


if __name__ == "__main__":
    cli(main)()
