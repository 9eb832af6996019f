"""What a step costs on this machine, and what drafting is worth because of it.

Speedup of a setting: S = E / (v(n + 1) + d / T1), with E the tokens a step yields, n its nodes, v(m) the cost of a
target step over m rows in plain steps T1, d the time spent drafting (`reference/decoding.md`, section h). v and d are
timed; E is counted by letting the drafter alone guess at the target's own greedy continuations: at a few places with
every setting, and at all places for the first token, where the drafter can say that in one go. Not drafting is always a
candidate.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decode.batch import Request, generate_batch
from decode.engine import generate
from decode.environment import environment
from decode.evaluate import identity
from decode.prompts import Prompt, load_prompts
from decode.sampling import SamplingParams, greedy_choice
from decode.stats import context_bucket
from decode.tree import ancestors, block_mask, walk
from drafters.adapter import adapted
from drafters.base import Drafter, DraftSettings, DraftTree
from drafters.cache import KVCache
from drafters.combine import Merged
from drafters.errors import UserError
from drafters.files import replacing
from drafters.locate import cache_folder
from drafters.medusa import static_tree
from drafters.router import Router
from drafters.target import Features, Target

CONTEXT = 192
OFF = DraftSettings("chain", 0)
TREES = ((2, 1, 2), (4, 1, 4), (4, 2, 3), (6, 2, 4), (8, 3, 4), (12, 4, 4), (16, 5, 4), (32, 6, 8))
CANDIDATES = (
    OFF,
    *(DraftSettings("chain", k) for k in (1, 2, 3, 4, 6, 8)),
    *(DraftSettings("tree", depth, top_k, total) for total, depth, top_k in TREES),
)
ROWS = (1, 2, 3, 5, 9, 17)  # where v is timed; in between and beyond it is taken to be straight
SECONDS = {"target": 0.6, "drafter": 1.0, "derived": 0.4}  # what the measurements may take
TOKENS = 32  # of every calibration text
WORTH = 0.75  # share of a draft's longest path that can be hoped for
DEPTH = max(s.length for s in CANDIDATES)


@dataclass(frozen=True)
class Continuation:
    """A prompt with the target's greedy answer, and the features of all but the last token."""

    ids: Tensor
    """(T,)"""
    prompt_tokens: int
    features: Features


@dataclass(frozen=True)
class Curve:
    """Milliseconds of a target step by its rows, straight between the measured ones and on from the last two."""

    ms: dict[int, float]

    def __call__(self, rows: float) -> float:
        ends = sorted(self.ms)[-2:]
        if rows > ends[-1] and len(ends) > 1:
            slope = (self.ms[ends[1]] - self.ms[ends[0]]) / (ends[1] - ends[0])
            return self.ms[ends[1]] + max(0.0, slope) * (rows - ends[1])
        return float(np.interp(rows, sorted(self.ms), [self.ms[n] for n in sorted(self.ms)]))


@dataclass(frozen=True)
class Trial:
    """One setting tried on calibration text."""

    survival: tuple[float, ...]
    """Share of drafts accepted at least to depth 1, 2, ..., `settings.length`."""
    nodes: tuple[int, ...]
    """Nodes proposed each time."""
    draft_ms: float
    """Median time of a round's drafting: committed tokens come in, a proposal goes out."""
    read_ms: float = 0.0
    """A row, where the drafter reads many at once: a prompt, or what waited while nothing was drafted."""


@dataclass(frozen=True)
class Candidate:
    """One draft setting and what it is expected to be worth here."""

    settings: DraftSettings
    survival: tuple[float, ...]
    verify_ms: float
    draft_ms: float
    other_ms: float
    curve: Curve
    speedup: float = 1.0
    read_ms: float = 0.0
    """See `Trial`."""

    @property
    def tau(self) -> float:
        """Tokens a step, the target's own included."""
        return 1 + sum(self.survival)

    @property
    def ms(self) -> float:
        """Expected time of a round."""
        return self.verify_ms + self.draft_ms + self.other_ms

    def of(self, drafted: float, requests: int = 1) -> float:
        """Expected milliseconds of a round in which each of so many requests sends `drafted` nodes to the target.

        Of a batch only the target's step is known, from as many rows of one request; drafters that read many requests
        at once are taken to gain by it what the target gains, and the engine's own work to grow with the requests.
        """
        together = self.curve(requests) / self.curve(1)
        return self.curve(requests * (drafted + 1)) + together * self.draft_ms + requests * self.other_ms


class _Notes:
    """Drafts nothing, and keeps what a drafter with these taps is given to read."""

    kind = "notes"
    meta: dict[str, Any] = {}
    default_settings: DraftSettings | None = OFF

    def __init__(self, taps: Sequence[int]):
        self.taps = tuple(taps)
        self.states: list[list[tuple[Tensor, Features]]] = []

    def begin(self, capacity: int) -> list[tuple[Tensor, Features]]:
        """See `Drafter.begin`."""
        self.states.append([])
        return self.states[-1]

    def extend(self, state: list[tuple[Tensor, Features]], tokens: Tensor, features: Features) -> None:
        """See `Drafter.extend`."""
        state.append((tokens, features))

    def propose(self, state: Any, *_: Any) -> DraftTree:
        """See `Drafter.propose`."""
        return DraftTree.empty(state[0][0].device)

    def observe(self, state: Any, outcome: Any) -> None:
        """Has it read at once, not when it drafts, which is never."""


@torch.inference_mode()
def continuations(
    target: Target, prompts: Sequence[Prompt], taps: Sequence[int], max_new_tokens: int = TOKENS
) -> list[Continuation]:
    """Decodes the prompts plainly and together, once, and keeps what a drafter with these taps would read.

    Raises:
        UserError: prompts that the target has no room for.
    """
    notes = _Notes(taps)
    sampling = SamplingParams(min_new_tokens=min(4, max_new_tokens))  # an answer of one token shows no draft
    requests = [Request(prompt.messages, max_new_tokens, OFF, sampling) for prompt in prompts]
    failed = [g.error for g in generate_batch(target, notes, requests, max_batch=len(requests)) if g.error]
    if failed:
        raise UserError(f"calibration: {failed[0]}")
    out = []
    for prompt, state in zip(prompts, notes.states, strict=True):
        tokens, features = torch.cat([t for t, _ in state]), Features.join([f for _, f in state])
        first = torch.tensor(target.render(prompt.messages)[:1], device=tokens.device)
        out.append(Continuation(torch.cat([first, tokens]), len(state[0][0]), features))
    return out


@torch.inference_mode()
def filled_cache(target: Target, rows: int, context: int, room: int) -> KVCache:
    """A cache of so many committed columns and room for more; what stands there costs the same, whatever it is."""
    cache = target.new_cache(context + room)
    zero = torch.zeros(rows, 1, dtype=torch.long, device=target.device)
    target.forward(zero, zero, cache)
    for buffer in (*cache.keys, *cache.values):
        buffer[:, :, :context] = buffer[:, :, :1].clone()
    if cache.positions is not None:
        cache.positions[:, :context] = torch.arange(context, device=target.device)
    cache.commit(context)
    return cache


@torch.inference_mode()
def measure_target(
    target: Target, rows: Sequence[int], taps: Sequence[int] = (), context: int = CONTEXT, seconds: float = 60.0
) -> Curve:
    """Times target steps (forward and head) over so many rows of a draft; medians of interleaved runs."""
    cache = filled_cache(target, 1, context, max(rows))

    def step(n: int) -> None:
        block = torch.arange(n, device=target.device)
        mask = block_mask(ancestors(block[:-1] - 1, n - 1), context) if n > 1 else None  # as the engine builds it
        features = target.forward(block[None], block[None] + context, cache, mask, taps)
        greedy_choice(target.head(features.final[0]).float()).tolist()

    return Curve(_time({n: partial(step, n) for n in rows}, seconds))


@torch.inference_mode()
def try_drafts(
    drafter: Drafter, texts: Sequence[Continuation], settings: Sequence[DraftSettings], seconds: float = 60.0
) -> dict[DraftSettings, Trial]:
    """Drafts with every setting at the same places of the texts, from true features; counts and times.

    Args:
        drafter: what drafts.
        texts: from `continuations`, longer than the deepest draft.
        settings: to be tried.
        seconds: stop after so long, but not before each text was tried at two places.
    """
    accepted: dict[DraftSettings, list[int]] = {s: [] for s in settings}
    nodes: dict[DraftSettings, list[int]] = {s: [] for s in settings}
    times: dict[DraftSettings, list[float]] = {s: [] for s in settings}
    extends: list[float] = []
    reads: list[float] = []  # the prompts, a row
    for text in texts:
        deadline = time.perf_counter() + seconds / len(texts)
        state = drafter.begin(len(text.ids) + max(s.rows for s in settings) + 2)
        read, depth = 0, max(s.length for s in settings)
        stops = range(text.prompt_tokens, max(text.prompt_tokens + 1, len(text.ids) - depth), 2)
        for i, last in enumerate(stops):  # `last` is the index of the last committed token
            start = time.perf_counter()
            drafter.extend(state, text.ids[read + 1 : last + 1], text.features.rows(slice(read, last)))
            took = time.perf_counter() - start
            if i:
                extends.append(took)
            else:  # the whole prompt
                reads.append(took / last)
            read, truth = last, text.ids[last + 1 :].tolist()
            for s in settings:
                start = time.perf_counter()
                tree = drafter.propose(state, s, 0.0, None)
                tokens = tree.tokens.tolist()  # waits for the device
                times[s].append(time.perf_counter() - start)
                accepted[s].append(_follow(tokens, tree.parents.tolist(), truth))
                nodes[s].append(len(tokens))
            if i >= 1 and time.perf_counter() > deadline:
                break
    extend = median(extends or [0.0])
    return {
        s: Trial(
            tuple(fmean(a >= d for a in accepted[s]) for d in range(1, s.length + 1)),
            tuple(nodes[s]),
            (median(times[s]) + extend) * 1e3,
            median(reads) * 1e3,
        )
        for s in settings
    }


@torch.inference_mode()
def first_hits(drafter: Drafter, texts: Sequence[Continuation]) -> tuple[int, int]:
    """Of the first drafts at every place of the answers, how many are right; and of how many, 0 if it can't say."""
    right = seen = 0
    first_drafts: Any = getattr(drafter, "first_drafts", None)
    for text in texts if first_drafts is not None else ():
        T, rows = len(text.ids), len(text.ids) - text.prompt_tokens
        # h[0..T-2] with x[1..T-1]; the last row predicts x[T], which is not there
        drafts = first_drafts(drafter.begin(T + 1), text.ids[1:], text.features.rows(slice(T - 1)), rows)
        right += int((drafts[:-1] == text.ids[T - rows + 1 :]).sum())
        seen += rows - 1
    return right, seen


def profile(
    target: Target,
    drafter: Drafter,
    *,
    texts: Sequence[Continuation] | None = None,
    settings: Sequence[DraftSettings] = CANDIDATES,
    context: int = CONTEXT,
    cache: Path | None = None,
) -> list[Candidate]:
    """Draft settings by expected speedup on this machine, best first; a few seconds, once per drafter and machine.

    Args:
        target: as it will decode (packed or not).
        drafter: what drafts.
        texts: from `continuations`, on prompts that are not measured later; None: the calibration prompts.
        settings: candidates; more are derived from what these cost (`_derived`).
        context: tokens committed before a step, as far as its cost goes.
        cache: folder that keeps results; None: nothing is kept.
    """
    bucket = context_bucket(context)
    facts = [environment(target) | {"python": None, "headstart": None, "code": _code_hash(), "bucket": bucket}]
    key = [facts, target.fingerprint, target.is_packed, identity(drafter), [asdict(s) for s in settings]]
    file = cache and cache / (hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:24])
    if file and (kept := _kept(file)):
        return kept
    if texts is None:
        texts = continuations(target, load_prompts("calibration"), drafter.taps)
    drafting = [s for s in settings if s.nodes]
    curve = measure_target(target, ROWS, drafter.taps, context, SECONDS["target"])
    # a draft that does not pay even if three of four tokens along its longest path come true, none of its others
    drafting = [s for s in drafting if curve(s.nodes + 1) < WORTH * (1 + s.length) * curve(1)] or drafting[:1]
    trials = try_drafts(drafter, texts, drafting, SECONDS["drafter"])
    if derived := _derived(drafter, curve, trials):
        trials |= try_drafts(drafter, texts, derived, SECONDS["derived"])
    trials = _corrected(trials, first_hits(drafter, texts))
    idle, other = (_overhead(target, drafter, texts[0], s) for s in (OFF, DraftSettings("chain", 2)))
    plain = Candidate(OFF, (), curve(1), 0.0, idle, curve)
    out = [plain]
    for s, trial in trials.items():
        verify = fmean(curve(n + 1) for n in trial.nodes)
        candidate = Candidate(s, trial.survival, verify, trial.draft_ms, other, curve, read_ms=trial.read_ms)
        out.append(replace(candidate, speedup=candidate.tau * plain.ms / candidate.ms))
    out.sort(key=lambda c: -c.speedup)
    if file:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file) as partial:
                partial.write_text(json.dumps([asdict(c) for c in out]))
        except OSError as error:
            print(f"warning: what was timed cannot be kept for the next run ({error})")
    return out


def cost_cache() -> Path:
    """Where measured costs are kept between runs."""
    return cache_folder() / "costs"


def tuned_settings(target: Target, drafter: Drafter) -> DraftSettings:
    """The fixed setting of greatest expected speedup here; prints what it chose.

    A drafter that learns from what the target says (`observe`) can't be counted on a text that is already there: it
    keeps its own default. Of a router or a merged drafter each part is tuned for itself.
    """
    if isinstance(drafter, Router | Merged):
        drafter.use({name: tuned_settings(target, part) for name, part in drafter.drafters.items()})
        assert drafter.default_settings is not None
        return drafter.default_settings
    if hasattr(drafter, "observe") and drafter.default_settings:
        print(f"draft setting for {drafter.kind}: {drafter.default_settings.describe()}, its own default")
        return drafter.default_settings
    with adapted(drafter):
        best = profile(target, drafter, cache=cost_cache())[0]
    print(
        f"draft setting for {drafter.kind}: {best.settings.describe()}; "
        f"expected {best.tau:.2f} tokens a step, {best.speedup:.2f}x plain"
    )
    return best.settings


def best_static_tree(rank_hits: Sequence[Sequence[float]], cost: Callable[[int, int], float], most: int = 64) -> Any:
    """The static tree of most expected tokens per time, for heads whose choices are right independently.

    Sequoia (arXiv 2402.12374) finds the best tree of each size and depth by dynamic programming, then picks the size by
    hardware cost. With acceptance a product along the path no child beats its parent, so the best tree of n nodes and
    bounded depth is simply the n best paths: `static_tree` grows them all in one run, and only size and depth are left.

    Args:
        rank_hits: [k][r], how often head k's choice of rank r is the target's token.
        cost: time of a round by (nodes, depth), in any unit.
        most: nodes at most.

    Returns:
        Its settings; and expected tokens per unit of time.
    """
    best = (1 / cost(0, 0), OFF)
    for depth in range(1, len(rank_hits) + 1):
        hits = tuple(tuple(row) for row in rank_hits[:depth])
        tokens, top_k = 1.0, 1
        for n, path in enumerate(static_tree(hits, most), start=1):
            tokens += float(np.prod([hits[d][r] for d, r in enumerate(path)]))
            top_k = max(top_k, path[-1] + 1)
            best = max(best, (tokens / cost(n, depth), DraftSettings("tree", depth, top_k, n)), key=lambda b: b[0])
    return best[1], best[0]


def _derived(drafter: Drafter, curve: Curve, trials: dict[DraftSettings, Trial]) -> list[DraftSettings]:
    """Candidates that only the measured costs suggest: static trees by size, and a confidence cut for EAGLE."""
    chains = {s.length: t for s, t in trials.items() if s.kind == "chain"}
    if len(chains) < 2:
        return []
    short, long = min(chains), max(chains)
    level = max(0.0, (chains[long].draft_ms - chains[short].draft_ms) / (long - short))  # ms a level
    hits = drafter.meta.get("rank_hits")
    eagle = drafter.kind.startswith("eagle")
    if hits and not eagle:  # static trees, for text as hard as the training's, and for easier and harder text

        def cost(nodes: int, depth: int) -> float:
            return curve(nodes + 1) + (chains[short].draft_ms + level * (depth - short) if depth else 0.0)

        bent = ([[hit**difficulty for hit in row] for row in hits] for difficulty in (0.4, 1.0, 2.0))
        found = [best_static_tree(rows, cost)[0] for rows in bent]
        return [s for s in dict.fromkeys(found) if s.nodes and s not in trials]
    if not eagle:
        return []
    # deepen while the level's expected token is worth its time at the best speed known: p / ms > tokens / ms
    speed = max((1 + sum(t.survival)) / (fmean(map(curve, t.nodes)) + t.draft_ms) for t in trials.values())
    cut = round(max(speed, 1 / curve(1)) * (level + (curve(long + 1) - curve(2)) / max(1, long - 1)), 2)
    if not 0.01 <= cut < 0.9:
        return []
    return [DraftSettings("chain", 8, min_confidence=cut), DraftSettings("tree", 6, 4, 12, min_confidence=cut)]


def _corrected(trials: dict[DraftSettings, Trial], hits: tuple[int, int]) -> dict[DraftSettings, Trial]:
    """Survival as if the first token had been tried at all places, where it was at a few only.

    A draft of several first tokens is like as many tries of one, so it is the number of tries that is set right.
    """
    right, seen = hits
    chains = [t for s, t in trials.items() if s.kind == "chain" and s.length and not s.min_confidence]
    if not seen or not chains:
        return trials

    def smooth(share: float, places: int) -> float:
        return (share * places + 1) / (places + 2)

    tried = smooth(chains[0].survival[0], len(chains[0].nodes))
    tries = math.log1p(-smooth(right / seen, seen)) / math.log1p(-tried)
    out = {}
    for s, trial in trials.items():
        first = smooth(trial.survival[0], len(trial.nodes))
        scale = (1 - (1 - first) ** tries) / max(trial.survival[0], first)
        out[s] = replace(trial, survival=tuple(min(1.0, x * scale) for x in trial.survival))
    return out


def _overhead(target: Target, drafter: Drafter, text: Continuation, settings: DraftSettings) -> float:
    """Milliseconds of a round outside target and drafter."""
    prompt = text.ids[: text.prompt_tokens][-4:]
    out = generate(target, drafter, prompt, max_new_tokens=6, settings=settings, eos_token_ids=())
    return median(r.other_s for r in out.rounds) * 1e3


def _follow(tokens: list[int], parents: list[int], truth: list[int]) -> int:
    """How many tokens of the text the tree holds along one path, the last token of the text left to the target."""
    depth = [0] * (len(tokens) + 1)  # slot s = node s - 1
    for node, parent in enumerate(parents):
        depth[node + 1] = depth[parent + 1] + 1
    choices = [truth[d] if d < len(truth) else -1 for d in depth]
    return min(len(walk(choices, tokens, parents)[0]), len(truth) - 1)


def _time(jobs: dict[int, Callable[[], None]], seconds: float, repeats: int = 5) -> dict[int, float]:
    """Milliseconds of each job, medians of interleaved runs: up to `repeats`, at least two."""
    times: dict[int, list[float]] = {job: [] for job in jobs}
    for run in jobs.values():  # warm up
        run()
    deadline = time.perf_counter() + seconds
    for repeat in range(repeats):
        if repeat >= 2 and time.perf_counter() > deadline:
            break
        for job, run in jobs.items():
            start = time.perf_counter()
            run()  # ends with a transfer to the host, which waits for the device
            times[job].append((time.perf_counter() - start) * 1e3)
    return {job: median(values) for job, values in times.items()}


def _code_hash() -> str:
    """Of the code whose speed is measured."""
    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, Path(__file__).parent.parent / "drafters"):
        for file in sorted((*folder.glob("*.py"), *folder.glob("*.c"))):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _kept(file: Path) -> list[Candidate]:
    """What an earlier run timed; nothing where there is none, or a damaged one."""
    out = []
    try:
        for row in json.loads(file.read_text()):
            curve = Curve({int(n): ms for n, ms in row["curve"]["ms"].items()})
            values = {"settings": DraftSettings(**row["settings"]), "survival": tuple(row["survival"]), "curve": curve}
            out.append(Candidate(**(row | values)))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return []
    return out
