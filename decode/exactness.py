"""Is an arm's greedy output the target's own? Token equality, and where it fails, how near the tie was.

In fp32 speculative and plain decoding agree token by token. In bf16 a step over k tokens and one over a single token
round differently, so two nearly equal logits may swap without any error in the decoder (vLLM #7627, HF #39421). Each
first divergence is therefore judged by one teacher-forced forward: how far below the top logit is the token that the
arm emitted? At most epsilon is a near tie; more is a FAIL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessorList, MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from decode.arms import Run
from decode.sampling import SamplingParams
from drafters.adapter import adapted
from drafters.target import Target

FP32_EPSILON = 1e-3


def first_divergence(reference: Sequence[int], tokens: Sequence[int]) -> int | None:
    """Index of the first token that differs (a missing token differs too), None if the outputs are the same."""
    for index, (a, b) in enumerate(zip(reference, tokens, strict=False)):
        if a != b:
            return index
    return None if len(reference) == len(tokens) else min(len(reference), len(tokens))


@torch.inference_mode()
def teacher_forced_logits(target: Target, ids: Sequence[int], last: int) -> torch.Tensor:
    """fp32 logits at the last `last` positions of `ids`, in one forward; each row predicts the next token, (last, V)"""
    inputs = torch.tensor([list(ids)], device=target.device)  # (1, T)
    positions = torch.arange(len(ids), device=target.device)[None]
    features = target.forward(inputs, positions)
    return target.head(features.final[0, -last:]).float()


def logit_gap(target: Target, prompt: Sequence[int], tokens: Sequence[int], at: int, sampling: SamplingParams) -> float:
    """How far the emitted token `tokens[at]` lies below the target's top logit, after the greedy processors."""
    ids = [*prompt, *tokens[:at]]
    scores: Any = teacher_forced_logits(target, ids, last=1)  # (1, V)
    read: Any = torch.tensor([ids], device=target.device)
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.min_new_tokens and target.eos_token_ids:
        eos = list(target.eos_token_ids)
        processors.append(
            MinNewTokensLengthLogitsProcessor(len(prompt), sampling.min_new_tokens, eos, device=str(target.device))
        )
    scores = processors(read, scores)
    return float(scores.max() - scores[0, tokens[at]])


@torch.inference_mode()
def calibrate_epsilon(target: Target, samples: Sequence[tuple[list[int], list[int]]], tokens: int = 32) -> float:
    """Largest logit gap that rounding alone explains: 1e-3 in fp32, measured in lower precision.

    The measurement is the target against itself: logits of plain outputs read one token at a time with a cache, against
    the same positions in one forward. With d the largest difference among the top ten logits of any position, two
    tokens that swap places in one of the two are at most 2 d apart in the other; that is epsilon.

    Args:
        samples: (prompt ids, plain output) pairs; the first `tokens` of each output are used.
    """
    if target.dtype == torch.float32:
        return FP32_EPSILON
    worst = 0.0
    for prompt, output in samples:
        output = output[:tokens]
        whole = teacher_forced_logits(target, [*prompt, *output[:-1]], last=len(output))  # (n, V)
        stepped, cache = [], None
        with target.attention_backend("sdpa"):
            for chunk in ([*prompt], *([t] for t in output[:-1])):
                inputs = torch.tensor([chunk], device=target.device)
                step = target.model(inputs, cache=cache, use_cache=True, logits_to_keep=1)
                cache = step.cache
                stepped.append(step.logits[0, -1].float())
        top = whole.topk(min(10, whole.shape[-1]), dim=-1).indices  # (n, 10)
        difference = whole.gather(1, top) - torch.stack(stepped).gather(1, top)
        worst = max(worst, float(difference.abs().max()))
    return max(2 * worst, FP32_EPSILON)


@torch.inference_mode()
def target_kl(target: Target, drafter: Any, samples: Sequence[tuple[list[int], list[int]]]) -> float:
    """How far a drafter's adapter moves the target: KL(original || adapted), mean over output tokens, in nats.

    Args:
        target: the original.
        drafter: whose adapter it is.
        samples: (prompt ids, the original's plain output) pairs.
    """
    total, count = 0.0, 0
    for prompt, output in samples:
        ids = [*prompt, *output[:-1]]
        log_p = teacher_forced_logits(target, ids, len(output)).log_softmax(-1)  # (n, V)
        with adapted(drafter):
            log_q = teacher_forced_logits(target, ids, len(output)).log_softmax(-1)
        total += float((log_p.exp() * (log_p - log_q)).sum())
        count += len(output)
    return total / max(1, count)


def compare(
    target: Target,
    sampling: SamplingParams,
    cases: Sequence[tuple[str, list[int], Run, Run]],
    epsilon: float,
) -> dict[str, Any]:
    """Judge one arm's greedy outputs against plain decoding's.

    Args:
        cases: (prompt id, prompt ids, plain run, arm run).

    Returns:
        `rate` of equal outputs; `first_divergence` [{prompt, index, logit_gap, plain_token, token}]; the largest
        `logit_gap`; `verdict` "exact", "near-tie" (every gap within epsilon) or "FAIL".
    """
    divergences: list[dict[str, Any]] = []
    for prompt_id, ids, plain, run in cases:
        at = first_divergence(plain.tokens, run.tokens)
        if at is None:
            continue
        shorter = at >= min(len(plain.tokens), len(run.tokens))
        divergences.append(
            {
                "prompt": prompt_id,
                "index": at,
                # one output is the beginning of the other: a broken stop rule, which no tie explains
                "logit_gap": None if shorter else logit_gap(target, ids, run.tokens, at, sampling),
                "plain_token": None if shorter else plain.tokens[at],
                "token": None if shorter else run.tokens[at],
            }
        )
    gaps = [d["logit_gap"] for d in divergences]
    known = [g for g in gaps if g is not None]
    if not divergences:
        verdict = "exact"
    else:
        verdict = "near-tie" if len(known) == len(gaps) and max(known) <= epsilon else "FAIL"
    return {
        "rate": 1 - len(divergences) / len(cases) if cases else None,
        "first_divergence": divergences,
        "logit_gap": max(known, default=None),
        "verdict": verdict,
    }
