"""What a step costs on this machine, and how much to draft because of it.

Speedup of a setting: S = E / (v(n + 1) + d / T1), with E the tokens a step yields, n its nodes, v(m) the cost of a
target step over m rows in plain steps T1, d the time spent drafting (`reference/decoding.md`, section h). v and d are
measured; E is counted by walking the target's own greedy continuations with the drafter alone. Not drafting is always a
candidate.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from decode.engine import generate
from decode.prompts import Prompt, load_prompts
from decode.tree import walk
from drafters.adapter import adapted
from drafters.base import Drafter, DraftSettings
from drafters.combine import Merged
from drafters.router import Router
from drafters.target import Features, Target

CONTEXT = 192
OFF = DraftSettings("chain", 0)
TREES = (
    (2, 1, 2),
    (3, 1, 3),
    (4, 1, 4),
    (3, 2, 2),
    (4, 2, 3),
    (6, 2, 4),
    (8, 3, 4),
    (12, 4, 4),
    (16, 5, 4),
    (32, 6, 8),
)
CANDIDATES = (
    OFF,
    *(DraftSettings("chain", k) for k in (1, 2, 3, 4, 6)),
    *(DraftSettings("tree", depth, top_k, total) for total, depth, top_k in TREES),
)


@dataclass(frozen=True)
class Continuation:
    """A prompt with the target's greedy answer and the features of all of it."""

    ids: Tensor
    """(T,)"""
    prompt_tokens: int
    features: Features


@dataclass(frozen=True)
class Candidate:
    """One draft setting and what it is expected to be worth here."""

    settings: DraftSettings
    tau: float
    """Tokens a step, the target's own included."""
    verify_ms: float
    draft_ms: float
    speedup: float


@torch.inference_mode()
def continuations(
    target: Target, prompts: Sequence[Prompt], taps: Sequence[int], max_new_tokens: int = 40
) -> list[Continuation]:
    """Decodes the prompts plainly, once, and keeps what a drafter with these taps would read."""
    out = []
    for prompt in prompts:
        answer = generate(target, None, prompt.messages, max_new_tokens=max_new_tokens)
        ids = torch.tensor([target.render(prompt.messages) + answer.tokens], device=target.device)
        features = target.forward(ids, torch.arange(ids.shape[1], device=ids.device)[None], taps=taps)
        out.append(Continuation(ids[0], answer.prompt_tokens, features))
    return out


@torch.inference_mode()
def count_tau(drafter: Drafter, texts: Sequence[Continuation], settings: DraftSettings) -> float:
    """Tokens a greedy step would yield: at each stop draft from true features, keep what the text confirms, go on."""
    steps = tokens = 0
    for text in texts:
        T = len(text.ids)
        state = drafter.begin(T + settings.rows + 2)
        read, last = 0, text.prompt_tokens  # rows the drafter has read; index of the last committed token
        while last + 1 < T:
            part = slice(read, last)
            taps = None if text.features.taps is None else text.features.taps[:, part]
            drafter.extend(state, text.ids[read + 1 : last + 1], Features(text.features.final[:, part], taps))
            read = last
            tree = drafter.propose(state, settings, 0.0, None)
            truth = text.ids[last + 1 :].tolist()
            path = _follow(tree.tokens.tolist(), tree.parents.tolist(), truth)
            steps, tokens, last = steps + 1, tokens + path + 1, last + path + 1
    return tokens / max(1, steps)


def _follow(tokens: list[int], parents: list[int], truth: list[int]) -> int:
    """How many tokens of the text the tree holds along one path, the last token of the text left to the target."""
    depth = [0] * (len(tokens) + 1)  # slot s = node s - 1
    for node, parent in enumerate(parents):
        depth[node + 1] = depth[parent + 1] + 1
    choices = [truth[d] if d < len(truth) else -1 for d in depth]
    return min(len(walk(choices, tokens, parents)[0]), len(truth) - 1)


@torch.inference_mode()
def measure_target(target: Target, rows: Sequence[int], taps: Sequence[int] = (), repeats: int = 5) -> dict[int, float]:
    """Milliseconds of a target step (forward and head) over so many rows, medians of interleaved runs."""
    ids = torch.arange(CONTEXT, device=target.device)[None] % target.vocab_size
    cache = target.new_cache(CONTEXT + max(rows))
    target.forward(ids, torch.arange(CONTEXT, device=target.device)[None], cache, taps=taps)
    cache.commit(CONTEXT)

    def step(n: int) -> None:
        block = torch.arange(n, device=target.device)[None]
        target.head(target.forward(block, block + CONTEXT, cache, taps=taps).final).argmax(-1).tolist()

    return _time({n: partial(step, n) for n in rows}, repeats)


@torch.inference_mode()
def measure_drafter(
    drafter: Drafter, text: Continuation, settings: Sequence[DraftSettings], repeats: int = 5
) -> dict[DraftSettings, float]:
    """Milliseconds of a round's drafting: two committed tokens come in, a proposal goes out."""
    rows = min(len(text.ids) - 1, CONTEXT)
    most = max(s.rows for s in settings)
    state = drafter.begin(rows + most + 4)
    features = text.features
    drafter.extend(state, text.ids[1 : rows - 1], _rows(features, slice(0, rows - 2)))
    kept = getattr(state, "length", None)

    def draft(wanted: DraftSettings) -> None:
        drafter.extend(state, text.ids[rows - 1 : rows + 1], _rows(features, slice(rows - 2, rows)))
        drafter.propose(state, wanted, 0.0, None).tokens.tolist()
        if kept is not None:
            state.length = kept  # the next timing starts from the same state

    return _time({s: partial(draft, s) for s in settings}, repeats)


def tuned_settings(target: Target, drafter: Drafter, prompts: int = 3) -> DraftSettings:
    """The setting of greatest expected speedup here, by `tune` on the calibration prompts; prints what it chose.

    A drafter that learns from what the target says (`observe`) can't be counted on a text that is already there: it
    keeps its own default. Of a router or a merged drafter each part is tuned for itself.
    """
    if isinstance(drafter, Router | Merged):
        drafter.use({name: tuned_settings(target, part, prompts) for name, part in drafter.drafters.items()})
        assert drafter.default_settings is not None
        return drafter.default_settings
    if hasattr(drafter, "observe") and drafter.default_settings:
        print(f"draft setting for {drafter.kind}: {drafter.default_settings.describe()}, its own default")
        return drafter.default_settings
    with adapted(drafter):
        texts = continuations(target, load_prompts("calibration", limit=prompts), drafter.taps)
        best = tune(target, drafter, texts)[0]
    print(
        f"draft setting for {drafter.kind}: {best.settings.describe()}; "
        f"expected {best.tau:.2f} tokens a step, {best.speedup:.2f}x plain"
    )
    return best.settings


def tune(
    target: Target, drafter: Drafter, texts: Sequence[Continuation], candidates: Sequence[DraftSettings] = CANDIDATES
) -> list[Candidate]:
    """Candidates by expected speedup on this machine, best first; takes seconds.

    Args:
        target: as it will decode (packed or not).
        drafter: what drafts.
        texts: from `continuations`, on prompts that are not measured later.
        candidates: settings to choose from.
    """
    drafting = [s for s in candidates if s.nodes]
    target_ms = measure_target(target, sorted({1, *(s.nodes + 1 for s in drafting)}), drafter.taps)
    draft_ms = measure_drafter(drafter, texts[0], drafting)
    out = [Candidate(OFF, 1.0, target_ms[1], 0.0, 1.0)]
    for s in drafting:
        tau, verify = count_tau(drafter, texts, s), target_ms[s.nodes + 1]
        out.append(Candidate(s, tau, verify, draft_ms[s], tau * target_ms[1] / (verify + draft_ms[s])))
    return sorted(out, key=lambda c: -c.speedup)


def _rows(features: Features, rows: slice) -> Features:
    return Features(features.final[:, rows], None if features.taps is None else features.taps[:, rows])


def _time(jobs: dict[Any, Callable[[], None]], repeats: int) -> dict[Any, float]:
    times: dict[Any, list[float]] = {job: [] for job in jobs}
    for repeat in range(repeats + 2):
        for job, run in jobs.items():
            start = time.perf_counter()
            run()  # ends with a transfer to the host, which waits for the device
            if repeat >= 2:  # the first rounds warm up
                times[job].append((time.perf_counter() - start) * 1e3)
    return {job: median(values) for job, values in times.items()}
