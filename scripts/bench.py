"""What a step costs: the target alone, under verification, in batches; the engine, the drafter, synthesis, training.

    python scripts/bench.py --target smollm2-135m --dtype bfloat16 --out runs/bench

All ratios come from one run whose parts take turns. Medians; the machine's load is recorded beside them. With a trained
drafter (that of `make demo`, if there is one) also what adaptation is worth, speculation beside transformers' own
(`bench_arms.py`), and speculation in batches (`bench_batch.py`). Where `make serve-check` has built vLLM's environment,
also plain decoding beside vLLM's.
"""

import argparse
import functools
import json
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from decode.cost import CONTEXT, Continuation, filled_cache, measure_target, try_drafts
from decode.engine import DraftSettings, generate
from decode.environment import environment, load_average
from drafters.build import TrainedDrafter, build_eagle, pack_drafter
from drafters.checkpoint import load_drafter
from drafters.errors import cli
from drafters.packing import native_bf16
from drafters.target import Target, load_target
from train.features import target_features
from train.objectives import Objective, position_weights
from train.recipe import recipe_from_dict
from train.synthesis import Block, Shard

PROMPT = "Explain how a bicycle stays upright while it moves, and what the rider does without noticing."
DEFAULT, DEMO = "smollm2-135m", Path("runs/demo/eagle3")
ROWS = (1, 2, 4, 8, 16, 32, 64)
VLLM = Path(".venv-serve/bin/python")


def parser() -> argparse.ArgumentParser:
    """Builds the command line."""
    p = argparse.ArgumentParser(description="Benchmark steps of the target, the engine, the drafter and the trainer.")
    p.add_argument("--target", default=DEFAULT, help="hub id, folder or GGUF file of the target")
    p.add_argument("--drafter", help="drafter folder; default: make demo's, or else an untrained EAGLE-3 drafter")
    p.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32", "auto"))
    p.add_argument("--tokens", type=int, default=48, help="tokens of each timed generation")
    p.add_argument("--batch", type=int, default=96, help="rows of the synthesis benchmark")
    p.add_argument("--out", default="runs/bench", help="folder for bench.json")
    return p


def main() -> None:
    """Runs every benchmark, prints a table and writes bench.json."""
    args = parser().parse_args()
    if args.drafter is None and args.target == DEFAULT and (DEMO / "headstart.json").is_file():
        args.drafter = str(DEMO)
        print(f"drafter: {DEMO}")
    before, out = load_average(), Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    target = load_target(args.target, args.dtype)
    ids = torch.arange(target.vocab_size)[:: target.vocab_size // 8192][:8192].to(target.device)
    drafter = load_drafter(args.drafter, target) if args.drafter else _untrained(target, ids)
    results: dict[str, Any] = {}
    parts: list[tuple[str, Callable[[], dict[str, float]]]] = [
        ("plain decoding against HF generate", lambda: plain_against_hf(target, args.tokens)),
        ("verification cost", lambda: verification(target)),
        ("engine and drafter", lambda: engine(target, drafter, args.tokens)),
        ("batched steps", lambda: batched(target)),
        ("synthesis", lambda: synthesis(target, args.batch)),
        ("training", lambda: training(target, ids)),
    ]
    if args.drafter:
        import bench_batch  # a script sees its own folder, not the one above
        from bench_arms import arms

        batches = functools.partial(bench_batch.speculation, target, drafter, args.tokens)

        parts.append(("adaptation and transformers' own speculation", lambda: arms(target, drafter)))
        parts.append(("batches against HF generate", lambda: bench_batch.plain_against_hf(target, args.tokens // 2)))
        parts.append(("batches, speculative", batches))
    if VLLM.is_file():
        parts.append(("plain decoding against vLLM", lambda: plain_against_vllm(args.target, target, out)))
    for name, part in parts:
        start = time.perf_counter()
        results |= part()
        (out / "bench.json").write_text(json.dumps(results, indent=2) + "\n")  # half an hour's work is not lost
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    results["peak_memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if target.device.type == "cuda":
        results["peak_memory_mb"] = torch.cuda.max_memory_allocated() / 2**20
    results["native_bf16"] = native_bf16(target.device)
    results |= {"environment": environment(target) | {"load_before": before, "load_after": load_average()}}
    (out / "bench.json").write_text(json.dumps(results, indent=2) + "\n")
    if args.drafter:
        bench_batch.plot(results, out / "batches.png")
    table = Table(
        title=f"{args.target}, {results['environment']['dtype']}, {results['environment']['threads']} threads"
    )
    table.add_column("what")
    table.add_column("value", justify="right")
    for key, value in results.items():
        if isinstance(value, int | float):
            table.add_row(key, str(value) if isinstance(value, bool) else f"{value:.3f}")
    Console().print(table)
    print(f"wrote {out / 'bench.json'}")


def plain_against_hf(target: Target, tokens: int) -> dict[str, float]:
    """Our plain decoding and the stock model's `generate`, in turns; milliseconds per token after the first."""
    ids = target.render([{"role": "user", "content": PROMPT}])
    prompt = torch.tensor([ids], device=target.device)

    def hf(count: int) -> float:
        start = time.perf_counter()
        with target.as_loaded(), torch.inference_mode():
            settings = {"do_sample": False, "max_new_tokens": count, "min_new_tokens": count, "pad_token_id": 0}
            target.model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)  # type: ignore[operator]
        return time.perf_counter() - start

    hf(4)
    generate(target, None, ids, max_new_tokens=4, eos_token_ids=())
    theirs, ours = [], []
    for _ in range(3):
        theirs.append((hf(tokens) - hf(1)) / (tokens - 1) * 1e3)
        ours.append(generate(target, None, ids, max_new_tokens=tokens, eos_token_ids=()).decode_s / (tokens - 1) * 1e3)
    return {
        "plain_ms_per_token": median(ours),
        "hf_ms_per_token": median(theirs),
        "plain_vs_hf_b1": median(theirs) / median(ours),
    }


def plain_against_vllm(name: str, target: Target, out: Path) -> dict[str, float]:
    """Tokens per second at batch 1, prefill included, over those of a vLLM server: compiled, and eager."""
    import serve_check  # beside this script

    dtype = "float32" if target.dtype == torch.float32 else "bfloat16"
    asked = ["--target", name, "--prompts", "4", "--max-new-tokens", "32", "--python", str(VLLM)]
    row = serve_check.time_plain(serve_check.parser().parse_args(asked), out, dtype)
    return {
        "vs_vllm_plain": row["ours"] / row["vllm_compiled"],
        "vs_vllm_plain_eager": row["ours"] / row["vllm_eager"],
    }


def verification(target: Target) -> dict[str, float]:
    """v(n): cost of a step over n rows in steps over one."""
    ms = measure_target(target, ROWS).ms
    return {"step_ms": ms[1]} | {f"v{n}": ms[n] / ms[1] for n in ROWS}


def engine(target: Target, drafter: TrainedDrafter, tokens: int) -> dict[str, float]:
    """Share of a speculative step spent outside target and drafter, and what drafting costs."""
    ids = target.render([{"role": "user", "content": PROMPT}])
    settings = DraftSettings("chain", 4)
    inside = [0.0]
    undo = [_timed(owner, name, inside) for owner in (target,) for name in ("forward", "head")]
    undo += [_timed(drafter, name, inside) for name in ("propose", "extend")]
    generate(target, drafter, ids, max_new_tokens=8, settings=settings, eos_token_ids=())
    inside[0] = 0.0
    start = time.perf_counter()
    out = generate(target, drafter, ids, max_new_tokens=tokens, settings=settings, eos_token_ids=())
    total = time.perf_counter() - start
    for restore in undo:
        restore()
    text = _text(target, drafter)
    chains = [DraftSettings("chain", k) for k in (1, 2, 4)]
    draft = try_drafts(drafter, [text], chains, seconds=3.0)
    return {
        "overhead_share": (total - inside[0]) / total,
        "speculative_step_ms": out.decode_s / len(out.rounds) * 1e3,
        **{f"draft_ms_{s.length}": draft[s].draft_ms for s in chains},
    }


def batched(target: Target) -> dict[str, float]:
    """A plain decode step (one new token a row) over 64 rows in steps over one row, at the same context."""
    steps: dict[int, Callable[[], None]] = {}
    for rows in (1, 64):
        steps[rows] = functools.partial(_decode_step, target, filled_cache(target, rows, CONTEXT, 1), rows)
    times: dict[int, list[float]] = {1: [], 64: []}
    for repeat in range(8):
        for rows, step in steps.items():
            start = time.perf_counter()
            step()
            if repeat >= 2:
                times[rows].append((time.perf_counter() - start) * 1e3)
    return {"b64_step_ms": median(times[64]), "b64_vs_b1_step": median(times[64]) / median(times[1])}


def synthesis(target: Target, batch: int) -> dict[str, float]:
    """Sampled tokens per second of one block."""
    recipe = recipe_from_dict(
        {"output": "-", "drafter": {"kind": "medusa"}, "synthesis": {"batch": batch, "columns": 160, "turns": 1}}
    )
    with tempfile.TemporaryDirectory():
        shard = Shard("bench")
        block = Block(recipe.synthesis, target, 0, 0, None, shard)
        sampled = [0]
        start = time.perf_counter()
        block.run(lambda count: sampled.__setitem__(0, sampled[0] + count))
        seconds = time.perf_counter() - start
    return {"synthesis_tokens_per_s": shard.tokens / seconds}


def training(target: Target, draft_ids: torch.Tensor, rows: int = 4, length: int = 256) -> dict[str, float]:
    """Tokens per second of target features and of an EAGLE-3 step (3 unrolled steps, KL, AdamW) on given features."""
    drafter = build_eagle(target, draft_ids, 3)
    recipe = recipe_from_dict({"output": "-", "drafter": {"kind": "eagle3"}})
    objective = Objective(drafter, target, recipe.objective)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-5)
    ids = torch.arange(rows * length, device=target.device).view(rows, length) * 7 % target.vocab_size
    mask = torch.ones_like(ids, dtype=torch.bool)
    weights = position_weights(list(mask.cpu()), 3, "per_token", slice(0, rows)).to(target.device)
    features_s, train_s = [], []
    for _ in range(3):
        start = time.perf_counter()
        features = target_features(target, ids, drafter.taps)
        middle = time.perf_counter()
        with torch.autocast(target.device.type, torch.bfloat16, enabled=native_bf16(target.device)):
            objective(ids, mask, features, weights)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        features_s.append(middle - start)
        train_s.append(time.perf_counter() - middle)
    tokens = rows * length
    return {"feature_tokens_per_s": tokens / median(features_s), "train_tokens_per_s": tokens / median(train_s)}


def _untrained(target: Target, ids: torch.Tensor) -> TrainedDrafter:
    drafter = (
        build_eagle(target, ids, 3).to(target.device, target.compute_dtype).bind(target).eval().requires_grad_(False)
    )
    if target.is_packed:
        pack_drafter(drafter, target.dtype)
    return drafter


@torch.inference_mode()
def _text(target: Target, drafter: TrainedDrafter) -> Continuation:
    ids = torch.arange(CONTEXT, device=target.device)[None] % target.vocab_size
    return Continuation(ids[0], 8, target_features(target, ids, drafter.taps))


@torch.inference_mode()
def _decode_step(target: Target, cache: Any, rows: int) -> None:
    ids = torch.full((rows, 1), 7, device=target.device)
    positions = torch.full((rows, 1), CONTEXT, device=target.device)
    target.head(target.forward(ids, positions, cache).final).argmax(-1).tolist()


def _timed(owner: Any, name: str, seconds: list[float]) -> Callable[[], None]:
    """Adds the time spent in a method to `seconds`; returns what undoes it."""
    method = getattr(owner, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            seconds[0] += time.perf_counter() - start

    setattr(owner, name, run)
    return lambda: delattr(owner, name)


if __name__ == "__main__":
    cli(main)()
