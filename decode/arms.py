"""What an evaluation times: the same prompt through each arm, under the same rules.

"plain" and every drafter run the same engine, cache, sampler and stop rules, so that the ratio of their times is the
drafter's doing. "hf_generate" runs `transformers`' own `generate` beside them, so that a slow engine can't flatter.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from decode import engine
from decode.sampling import SamplingParams
from drafters.adapter import adapted
from drafters.base import DraftSettings
from drafters.target import Target

PLAIN = "plain"
HF = "hf_generate"


def is_plain(name: str) -> bool:
    """Plain decoding, of the target or (as "plain+NAME") of the one that drafter NAME's adapter makes of it."""
    return name == PLAIN or name.startswith(f"{PLAIN}+")


@dataclass(frozen=True)
class Run:
    """One timed request: the raw measurement, before any statistics.

    `rounds` has rows (drafted, depth, accepted, tokens, draft_s, verify_s, other_s, total_s), one a target step.
    """

    tokens: list[int]
    rounds: list[list[float]]
    prompt_tokens: int
    ttft_s: float
    decode_s: float
    finish: str
    peak_memory_mb: float
    asked: list[str] = field(default_factory=list)
    """What a policy asked the drafter for, round by round; empty for fixed settings."""

    @property
    def seconds(self) -> float:
        """End-to-end time: prefill and decoding."""
        return self.ttft_s + self.decode_s


@dataclass(frozen=True)
class Arm:
    """One competitor: `drafter` None is plain decoding (or `generate`, by the name "hf_generate").

    A drafter with an adapter brings the adapted target with it; it is compared with that target's own plain decoding.
    """

    name: str
    drafter: Any = None
    settings: DraftSettings | engine.Policy = DraftSettings()
    """A policy learns on from request to request, as it would in use."""
    adapts: Any = None
    """The drafter whose adapter is on."""

    @property
    def reference(self) -> str:
        """The arm that this one is compared with: plain decoding of the same target."""
        if self.adapts is None:
            return PLAIN
        return self.name if self.drafter is None else f"{PLAIN}+{self.name}"

    def run(self, target: Target, ids: list[int], sampling: SamplingParams, max_new_tokens: int) -> Run:
        """Time one request on prompt `ids`."""
        _reset_peak(target)
        if self.name == HF:
            return run_hf(target, ids, sampling, max_new_tokens)
        with adapted(self.adapts):
            result = engine.generate(
                target,
                self.drafter,
                ids,
                max_new_tokens=max_new_tokens,
                settings=self.settings,
                sampling=sampling,
                profile=True,  # a true split of draft and verify on CUDA, for a synchronization or two a step
            )
        rounds = [
            [r.drafted, r.depth, r.accepted, r.tokens, r.draft_s, r.verify_s, r.other_s, r.total_s]
            for r in result.rounds
        ]
        return Run(
            tokens=list(result.tokens),
            rounds=rounds,
            prompt_tokens=result.prompt_tokens,
            ttft_s=result.ttft_s,
            decode_s=result.decode_s,
            finish=result.finish,
            peak_memory_mb=_peak_mb(target),
            asked=[]
            if isinstance(self.settings, DraftSettings)
            else [r.settings.describe() for r in result.rounds if r.settings],
        )


class _FirstToken(StoppingCriteria):
    """Notes when `generate` has its first token; never stops it."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.at: float | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> Any:
        if self.at is None:
            synchronize(self.target)
            self.at = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def run_hf(target: Target, ids: list[int], sampling: SamplingParams, max_new_tokens: int, **options: Any) -> Run:
    """Time one request through `generate` of the model as loaded; `options` go to `generate`."""
    clock = _FirstToken(target)
    model: Any = target.model
    inputs = torch.tensor([ids], device=target.device)  # (1, T)
    torch.manual_seed(sampling.seed)
    with target.as_loaded(), _generation_config(target, sampling, max_new_tokens), torch.inference_mode():
        synchronize(target)
        start = time.perf_counter()
        output = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), stopping_criteria=StoppingCriteriaList([clock]), **options
        )
        synchronize(target)
        end = time.perf_counter()
    tokens = output[0, len(ids) :].tolist()
    first = clock.at if clock.at is not None else end
    finish = "eos" if tokens and tokens[-1] in target.eos_token_ids else "length"
    return Run(tokens, [], len(ids), first - start, end - first, finish, _peak_mb(target))


@contextmanager
def _generation_config(target: Target, sampling: SamplingParams, max_new_tokens: int) -> Iterator[None]:
    """Replace the model's generation config: `generate` fills what a call leaves out from it, top_k=50 for one."""
    eos = list(target.eos_token_ids)
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": sampling.min_new_tokens or None,
        "eos_token_id": eos or None,
        "pad_token_id": eos[0] if eos else 0,
        "repetition_penalty": sampling.repetition_penalty,
        "do_sample": sampling.temperature > 0,
        "use_cache": True,
    }
    if sampling.temperature > 0:
        options |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        options |= {"min_p": sampling.min_p or None}
    before = target.model.generation_config
    target.model.generation_config = GenerationConfig(**options)
    try:
        yield
    finally:
        target.model.generation_config = before


def synchronize(target: Target) -> None:
    """Wait for the device, so that a clock read after it means something."""
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)


def _reset_peak(target: Target) -> None:
    if target.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(target.device)
        return
    clear = Path("/proc/self/clear_refs")
    if os.access(clear, os.W_OK):  # where it is not, `_peak_mb` reads the peak since the process began
        clear.write_text("5")  # Linux: reset the peak resident size of this process


def _peak_mb(target: Target) -> float:
    """Peak memory since `_reset_peak`: the allocator's on CUDA, the process's resident size (weights in it) on CPU."""
    if target.device.type == "cuda":
        return torch.cuda.max_memory_allocated(target.device) / 2**20
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**10
    return psutil.Process().memory_info().rss / 2**20
