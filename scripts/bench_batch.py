"""What batches bring: plain decoding beside HF `generate`, and speculation at batch 1 to 16.

    python scripts/bench.py --target smollm2-135m --drafter runs/smollm2-eagle3

Every arm decodes the same prompts to the same length, no end token; arms take turns. Decoding time only: prefills
differ by what they batch, not by how they decode.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure
from torch.nn.utils.rnn import pad_sequence

from decode.adapt import build_policy
from decode.batch import generate_batch
from decode.engine import DraftSettings, Policy, Request
from decode.prompts import load_prompts
from drafters.base import Drafter
from drafters.target import Target

SIZES = (1, 2, 4, 8, 16)
CHAINS = (1, 2, 4)
TURNS = 3
PROMPTS = 4  # at least, one batch after another


def prompts(target: Target, count: int) -> list[list[int]]:
    """Token ids of so many built-in prompts, of different lengths."""
    texts = load_prompts("headstart")
    return [target.render(texts[i % len(texts)].messages) for i in range(count)]


def decode_seconds(
    target: Target, drafter: Drafter | None, ids: list[list[int]], tokens: int, settings: DraftSettings | Policy | None
) -> float:
    """Seconds from the last prefill to the end of the batch."""
    requests = [Request(prompt, tokens, settings, eos_token_ids=()) for prompt in ids]
    return max(out.decode_s for out in generate_batch(target, drafter, requests, max_batch=len(requests)))


def plain_against_hf(target: Target, tokens: int, size: int = 16) -> dict[str, float]:
    """Our plain decoding and the stock model's `generate` over left-padded rows; tokens per second of both."""
    ids = prompts(target, size)
    rows = [torch.tensor(prompt).flip(0) for prompt in ids]
    batch = pad_sequence(rows, batch_first=True).flip(1).to(target.device)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).flip(1).to(target.device)

    def hf(count: int) -> float:
        start = time.perf_counter()
        settings = {"do_sample": False, "max_new_tokens": count, "min_new_tokens": count, "pad_token_id": 0}
        with target.as_loaded(), torch.inference_mode():
            target.model.generate(batch, attention_mask=mask, **settings)  # type: ignore[operator]
        return time.perf_counter() - start

    hf(2)
    decode_seconds(target, None, ids, 2, None)
    theirs, ours = [], []
    for _ in range(TURNS):
        theirs.append(hf(tokens) - hf(1))
        ours.append(decode_seconds(target, None, ids, tokens, None))
    made = size * (tokens - 1)
    return {
        f"plain_tokens_per_s_b{size}": made / median(ours),
        f"hf_tokens_per_s_b{size}": made / median(theirs),
        f"plain_vs_hf_b{size}": median(theirs) / median(ours),
    }


def speculation(
    target: Target,
    drafter: Drafter,
    tokens: int,
    sizes: Sequence[int] = SIZES,
) -> dict[str, float]:
    """Speedup over plain decoding in the same engine, batch by batch: each chain, and the adaptive policy.

    `batch_speedup_N` is the policy's; `batch_adaptive_vs_best_N` sets it against the best of the chains and of plain
    decoding, which is known only afterwards: its noise counts for it.

    Args:
        target: as it will decode.
        drafter: what drafts.
        tokens: of every request.
        sizes: batches.
    """
    arms: dict[str, Any] = {f"chain{k}": DraftSettings("chain", k) for k in CHAINS}
    arms["adaptive"] = build_policy("adaptive", target, drafter)
    results: dict[str, float] = {}
    for size in sizes:
        ids = prompts(target, max(size, PROMPTS))
        batches = [ids[i : i + size] for i in range(0, len(ids), size)]
        times: dict[str, list[float]] = {name: [] for name in ("plain", *arms)}
        for turn in range(TURNS + 1):
            for name in times:
                last = tokens if turn else 4
                used = drafter if name in arms else None
                seconds = sum(decode_seconds(target, used, batch, last, arms.get(name)) for batch in batches)
                if turn:  # the first one warms up
                    times[name].append(seconds)
        speedup = {name: median(times["plain"]) / median(times[name]) for name in arms}
        results |= {f"batch_speedup_{size}_{name}": value for name, value in speedup.items()}
        adaptive = results[f"batch_speedup_{size}"] = speedup.pop("adaptive")
        results[f"batch_adaptive_vs_best_{size}"] = adaptive / max(1.0, *speedup.values())
        results[f"plain_tokens_per_s_b{size}"] = len(ids) * (tokens - 1) / median(times["plain"])
    return results


def plot(results: dict[str, Any], path: Path) -> None:
    """Speedup by batch size, an arm a line."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    sizes = [size for size in SIZES if f"batch_speedup_{size}" in results]
    for name in ("adaptive", *(f"chain{k}" for k in CHAINS)):
        line = [results[f"batch_speedup_{size}_{name}"] for size in sizes]
        axes.plot(sizes, line, marker="o", label=name, linewidth=2.5 if name == "adaptive" else 1)
    axes.axhline(1.0, color="gray", linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set(xlabel="requests in a batch", ylabel="speedup over plain decoding")
    axes.legend()
    figure.savefig(path, dpi=150)
