"""Statistics of speculative decoding as pure functions: no model, no clock.

Names: a *step* is one target forward after prefill. It emits its accepted draft tokens and one token of the target's
own, the bonus. `accepted_per_step` leaves the bonus out, `tau` counts it (EAGLE#146 mixed the two up).
*Survival* at depth i is the share of steps that accepted at least i; *conditional acceptance* at depth i is the share
among those that accepted i-1 and had drafted a token at depth i. The first falls with depth by itself.

Steps cut short: the last step of a request may end in the middle of its accepted draft, by an end token or the length
limit. What would have come after is not known, it is not a rejection. Such a step is *cut* (censored): it counts as
accepted at each depth it reached and then leaves the sample, as in a product-limit (Kaplan-Meier) estimate. It has no
place in the rejection histogram. `tau` and `accepted_per_step` keep it with the tokens it really emitted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class Step(NamedTuple):
    """One target forward: what was drafted, what was accepted, what it cost."""

    accepted: int
    tokens: int
    depth: int
    cut: bool = False
    context: int = 0  # tokens committed before the step
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0


def steps_of(rounds: Sequence[Sequence[float]], prompt_tokens: int, finish: str) -> list[Step]:
    """Turn one request's raw rounds into steps.

    Args:
        rounds: rows (drafted, depth, accepted, tokens, draft_s, verify_s, other_s, total_s).
        prompt_tokens: length of the prompt; the first new token comes from prefill and precedes the first round.
        finish: "eos", "length" or "stop".
    """
    steps: list[Step] = []
    context = prompt_tokens + 1
    deepest = max((int(row[1]) for row in rounds), default=0)
    for index, (_, depth, accepted, tokens, draft_s, verify_s, other_s, _) in enumerate(rounds):
        accepted = min(int(accepted), int(tokens))  # accepted but never emitted is not accepted
        last = index == len(rounds) - 1
        # no token of the target's own came out, or the draft was shortened to fit the length limit and passed whole
        shortened = finish == "length" and int(depth) < deepest and accepted >= int(depth)
        cut = last and (int(tokens) <= accepted or shortened)
        steps.append(Step(accepted, int(tokens), int(depth), cut, context, draft_s, verify_s, other_s))
        context += int(tokens)
    return steps


def accepted_per_step(steps: Sequence[Step]) -> float:
    """Accepted draft tokens per target step, bonus left out."""
    return sum(s.accepted for s in steps) / len(steps) if steps else 0.0


def tau(steps: Sequence[Step]) -> float:
    """Tokens per target step, bonus included: the acceptance length of the papers. 1.0 is plain decoding."""
    return sum(s.tokens for s in steps) / len(steps) if steps else 1.0


def survival(steps: Sequence[Step]) -> list[float]:
    """Share of steps that accepted at least i tokens, i = 1, 2, ... up to the deepest draft; see the module's note."""
    shares: list[float] = []
    alive = 1.0
    for depth in range(1, _deepest(steps) + 1):
        at_risk = _at_risk(steps, depth)
        if not at_risk and alive > 0:
            break  # every step that got here was cut: unknown, not zero
        alive *= sum(s.accepted >= depth for s in at_risk) / max(len(at_risk), 1)
        shares.append(alive)
    return shares


def conditional_acceptance(steps: Sequence[Step]) -> list[float | None]:
    """Share accepted at depth i among steps that accepted i-1 and drafted a token at depth i; None where none did."""
    shares: list[float | None] = []
    for depth in range(1, _deepest(steps) + 1):
        at_risk = [s for s in _at_risk(steps, depth) if s.depth >= depth]
        shares.append(sum(s.accepted >= depth for s in at_risk) / len(at_risk) if at_risk else None)
    return shares


def rejection_histogram(steps: Sequence[Step]) -> dict[str, int]:
    """Accepted count -> steps, cut steps left out (nothing was rejected in them)."""
    counts = Counter(s.accepted for s in steps if not s.cut)
    return {str(k): counts[k] for k in range(max(counts, default=-1) + 1)}


def context_bucket(position: int) -> str:
    """Name the context bucket of a step: 0-256, 256-512, then doubling."""
    low, high = 0, 256
    while position >= high:
        low, high = high, high * 2
    return f"{low}-{high}"


def acceptance_by_context(steps: Sequence[Step]) -> dict[str, dict[str, float]]:
    """Acceptance by position: a drafter trained on short text fades in long contexts (speculators PR #684)."""
    groups: dict[str, list[Step]] = {}
    for step in sorted(steps, key=lambda s: s.context):
        groups.setdefault(context_bucket(step.context), []).append(step)
    return {
        bucket: {"steps": len(members), "accepted_per_step": accepted_per_step(members), "tau": tau(members)}
        for bucket, members in groups.items()
    }


def cost_split(steps: Sequence[Step]) -> dict[str, dict[str, float]] | None:
    """Where a step's time goes: {draft, verify, other} -> {share, ms} (ms per step). None without steps."""
    if not steps:
        return None
    seconds = {part: sum(getattr(s, f"{part}_s") for s in steps) for part in ("draft", "verify", "other")}
    total = sum(seconds.values()) or 1.0
    return {part: {"share": s / total, "ms": 1e3 * s / len(steps)} for part, s in seconds.items()}


def percentiles(values: Iterable[float]) -> dict[str, float | None]:
    """p50, p95 and p99; None without values."""
    data = np.asarray(list(values), dtype=float)
    return {f"p{q}": float(np.percentile(data, q)) if data.size else None for q in (50, 95, 99)}


def speedup(
    base_time: Sequence[float], base_tokens: Sequence[int], arm_time: Sequence[float], arm_tokens: Sequence[int]
) -> float:
    """Ratio of time per token, base over arm, pooled over prompts: (sum t_base / sum n_base) / (sum t_arm / sum n_arm).

    Per token, because outputs may differ in length under sampling; with equal tokens it is sum t_base / sum t_arm.
    """
    return float((np.sum(base_time) / np.sum(base_tokens)) / (np.sum(arm_time) / np.sum(arm_tokens)))


def paired_bootstrap(
    base_time: Sequence[float],
    base_tokens: Sequence[int],
    arm_time: Sequence[float],
    arm_tokens: Sequence[int],
    *,
    resamples: int = 10_000,
    level: float = 0.95,
    seed: int = 0,
) -> list[float] | None:
    """Percentile interval of `speedup` by resampling prompts, the same prompts for both arms (Efron 1979).

    Pairing cancels how hard each prompt is. Returns [low, high], or None for fewer than two prompts.
    """
    count = len(base_time)
    if count < 2:
        return None
    weights = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=resamples)  # (R, prompts)
    sums = [weights @ np.asarray(v, dtype=float) for v in (base_time, base_tokens, arm_time, arm_tokens)]
    ratios = (sums[0] / sums[1]) / (sums[2] / sums[3])
    tail = 50 * (1 - level)
    return [float(q) for q in np.percentile(ratios, (tail, 100 - tail))]


def _deepest(steps: Sequence[Step]) -> int:
    return max((s.depth for s in steps), default=0)


def _at_risk(steps: Sequence[Step], depth: int) -> list[Step]:
    """Steps that accepted depth-1 tokens and were seen to go on from there."""
    return [s for s in steps if s.accepted >= depth or (s.accepted == depth - 1 and not s.cut)]
