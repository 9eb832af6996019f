"""The decoder: one loop for plain and speculative decoding of one request; `decode.batch` drives many of them at once.

A round proposes a draft tree, runs the target once over the last committed token and all nodes, keeps the path that
the target agrees with plus one token of the target's own, and commits exactly those rows. With no drafter the tree is
empty and the same loop is plain decoding, so the two are comparable by construction.

Run: python scripts/chat.py --target smollm2-135m --drafter runs/smollm2-eagle3
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from decode.sampling import SamplingParams, distribution, draw, greedy_choice, penalize
from decode.tree import block_mask, deepest, layout, walk
from decode.verify import verify_sampled_chain
from drafters.base import Drafter, DraftSettings, DraftTree, Outcome
from drafters.cache import KVCache
from drafters.errors import UserError
from drafters.lazy import Lazy
from drafters.target import Features, Target

__all__ = ["DraftSettings", "Generation", "Request", "Round", "SamplingParams", "generate"]

Prompt = str | Sequence[dict[str, str]] | Sequence[int] | Tensor


@dataclass(frozen=True)
class Round:
    """One target forward after the prefill."""

    drafted: int
    """Nodes sent to the target."""
    depth: int
    """Longest drafted path."""
    accepted: int
    """Drafted tokens that were emitted."""
    tokens: int
    """Tokens emitted: accepted ones plus the target's own, unless the output ended before it."""
    draft_s: float
    verify_s: float
    other_s: float
    settings: DraftSettings | None = None
    """What the drafter was asked for; shorter than what was chosen where the output's end is near."""
    requests: int = 1
    """So many shared the target step; the seconds are those of all of them."""

    @property
    def total_s(self) -> float:
        """Seconds of the whole round."""
        return self.draft_s + self.verify_s + self.other_s


class Policy(Protocol):
    """Chooses how much to draft, round by round; a fixed `DraftSettings` may stand in its place.

    A policy may also have `judging`, how many of the last tokens it wants judged after `choose`, and `judged(right,
    seen)`, which takes how many of them the drafter would have drafted.
    """

    name: str
    nodes: int
    """The most nodes that any of its settings proposes."""
    rows: int
    """The most rows that a drafter writes into its own cache under any of them."""

    def choose(self, requests: int = 1, waiting: int = 0) -> DraftSettings:
        """Settings of the next round, for every one of so many requests that share its target step.

        Before any of them can draft, their drafter has `waiting` rows to read.
        """

    def observe(self, rounds: Sequence[Round]) -> None:
        """Takes what the last step brought and cost: a round for each request that it chose for."""


@dataclass(frozen=True)
class Request:
    """What is to be decoded, and how; `generate` explains the fields."""

    prompt: Prompt
    max_new_tokens: int = 128
    settings: DraftSettings | Policy | None = None
    sampling: SamplingParams = SamplingParams()
    stop: str | Sequence[str] = ()
    eos_token_ids: Sequence[int] | None = None


@dataclass(frozen=True)
class Block:
    """The rows that a request adds to a forward: the last committed token and the nodes drafted after it."""

    ids: Tensor
    """(n + 1,)"""
    tree: DraftTree
    slots: Tensor | None
    """(n + 1, n + 1) bool, the ancestors of each slot, itself included; None where n is 0."""
    depths: Tensor | None
    """(n + 1,), None where n is 0."""


@dataclass(frozen=True)
class Verdict:
    """What the target made of a block."""

    emitted: list[int]
    accepted: int
    """So many of them were drafted."""
    path: list[int]
    """Nodes that the target agreed with, from the root down; the last may lie behind the end of the output."""
    choices: list[int] | None
    """The target's token after every slot; None after a sampled chain."""
    depth: int
    """Longest drafted path."""

    @property
    def rows(self) -> list[int]:
        """Rows of the block to commit."""
        return [0, *(node + 1 for node in self.path)]


@dataclass
class Generation:
    """What `generate` returns."""

    tokens: list[int]
    """New token ids, the end token included if one was emitted."""
    text: str = ""
    finish: str = "length"
    """"eos", "stop" or "length"; in a batch also "cancelled" or "error"."""
    prompt_tokens: int = 0
    rounds: list[Round] = field(default_factory=list)
    """Rounds after the prefill, which gives the first token."""
    ttft_s: float = 0.0
    decode_s: float = 0.0
    error: str = ""
    """In a batch: why this request failed."""

    @property
    def acceptance_length(self) -> float:
        """Tokens per target step, the target's own token included (tau); the prefill's token is not counted."""
        return sum(r.tokens for r in self.rounds) / len(self.rounds) if self.rounds else 1.0


@torch.inference_mode()
def generate(
    target: Target,
    drafter: Drafter | None,
    prompt: Prompt,
    *,
    max_new_tokens: int = 128,
    settings: DraftSettings | Policy | None = None,
    sampling: SamplingParams | None = None,
    stop: str | Sequence[str] = (),
    callback: Callable[[list[int], int], None] | None = None,
    eos_token_ids: Sequence[int] | None = None,
    profile: bool = False,
) -> Generation:
    """Decodes one prompt; the output is the target's own, whatever the drafter.

    Args:
        target: from `load_target`.
        drafter: from `load_drafter`, or None for plain decoding.
        prompt: a user message, a list of messages (both go through the chat template), or token ids.
        max_new_tokens: at most so many, end token included.
        settings: how much to draft, or a policy that decides it each round; None: the drafter's `default_settings`,
            else a chain of 4.
        sampling: None: greedy.
        stop: a string, or several, that end the output; `.text` ends before the first of them.
        callback: called once a round with the emitted tokens, the first n of which were drafted, and n.
        eos_token_ids: None: the target's own.
        profile: synchronize the device between phases, so that the cost split is true on CUDA.

    Raises:
        UserError: several prompts, an empty one, ids outside the vocabulary, or more positions than the target has.
    """
    request = Request(prompt, max_new_tokens, settings, sampling or SamplingParams(), stop, eos_token_ids)
    run = Decoding(target, lazy_where_off(drafter, settings), request)
    run.begin()
    clock = _synchronized_clock if profile and target.device.type == "cuda" else time.perf_counter
    cache = target.new_cache(run.capacity)
    emitted = _prefill(run, cache, clock)
    if callback:
        callback(emitted, 0)
    while not run.done:
        emitted, accepted = _round(run, cache, clock)
        if callback:
            callback(emitted, accepted)
    return run.finish()


def _prefill(run: "Decoding", cache: KVCache, clock: Callable[[], float]) -> list[int]:
    """Reads the prompt; the target's own choice after it is the first token."""
    start = clock()
    ids = torch.tensor([run.prompt], device=run.target.device)
    features = run.target.forward(ids, torch.arange(ids.shape[1], device=ids.device)[None], cache, taps=run.taps)
    cache.commit(ids.shape[1])
    logits = run.target.head(features.final[0, -1:]).float()  # (1, V): predicts the first new token
    emitted = run.first(run.choose(None, logits).tolist())
    run.out.ttft_s = clock() - start
    if run.drafter is not None and not run.done:
        tokens = torch.tensor(run.prompt[1:] + emitted, device=ids.device)  # x[t+1] for every prompt position t
        run.drafter.extend(run.state, tokens, features)
    run.out.decode_s = clock() - start - run.out.ttft_s
    return emitted


def _round(run: "Decoding", cache: KVCache, clock: Callable[[], float]) -> tuple[list[int], int]:
    """One draft, one target forward, one commit; returns the emitted tokens and how many were drafted."""
    started = clock()
    tree = run.propose()
    drafted_at = clock()
    block = run.prepare(tree)
    # rotary position: committed length + depth
    depths = torch.zeros_like(block.ids) if block.depths is None else block.depths
    positions = depths + cache.length
    mask = None if block.slots is None else block_mask(block.slots, cache.length)
    features = run.target.forward(block.ids[None], positions[None], cache, mask, run.taps)
    logits = run.target.head(features.final[0]).float()  # (n + 1, V): slot s predicts what follows it
    chosen = run.choose(block, logits)
    flat = chosen.tolist()
    verified_at = clock()

    verdict = run.settle(block, flat)
    cache.commit(len(verdict.rows), verdict.rows)
    extended = 0.0
    if run.drafter is not None and not run.done:
        before = clock()
        tokens, kept = (chosen, features) if block.slots is None else run.committed(features, verdict)
        run.drafter.extend(run.state, tokens, kept)
        extended = clock() - before
    total, draft, verify = clock() - started, drafted_at - started + extended, verified_at - drafted_at
    round = run.record(block, verdict, draft, verify, total)
    if run.policy is not None:
        run.policy.observe([round])
    return verdict.emitted, verdict.accepted


class Decoding:
    """One request while it is decoded: what it drafts, keeps and emits; forwards and caches belong to its driver.

    Raises:
        UserError: see `generate`.
    """

    def __init__(self, target: Target, drafter: Drafter | None, request: Request):
        self.target, self.drafter, self.sampling = target, drafter, request.sampling
        settings = request.settings or getattr(drafter, "default_settings", None) or DraftSettings()
        self.policy = None if isinstance(settings, DraftSettings) else settings
        self.settings = settings if isinstance(settings, DraftSettings) else DraftSettings()
        self.asked: DraftSettings | None = None
        self.prompt = prompt_ids(target, request.prompt)
        stop = (request.stop,) if isinstance(request.stop, str) else request.stop
        self.max_new_tokens, self.stop = request.max_new_tokens, tuple(s for s in stop if s)
        self.observer = getattr(drafter, "observe", None)
        nodes = settings.nodes if drafter is not None else 0
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens={self.max_new_tokens}: at least 1 is allowed")
        if len(self.prompt) + self.max_new_tokens > target.max_positions:
            raise UserError(
                f"prompt of {len(self.prompt)} tokens + max_new_tokens={self.max_new_tokens} exceed the target's "
                f"{target.max_positions} positions; lower max_new_tokens or shorten the prompt"
            )
        self.eos = frozenset(target.eos_token_ids if request.eos_token_ids is None else request.eos_token_ids)
        self.eos_tensor = torch.tensor(sorted(self.eos), device=target.device, dtype=torch.long)
        self.generator = torch.Generator(target.device).manual_seed(self.sampling.seed)
        self.capacity = len(self.prompt) + self.max_new_tokens + nodes + 1
        self.draft_rows = len(self.prompt) + self.max_new_tokens + settings.rows
        self.state: Any = None
        self.judgements = 0
        self.taps = drafter.taps if drafter is not None else ()
        self.seen: Tensor | None = None  # (V,) tokens of the committed prefix, for the repetition penalty
        if self.sampling.repetition_penalty != 1.0:
            self.seen = torch.zeros(target.vocab_size, dtype=torch.bool, device=target.device)
            self.seen[torch.tensor(self.prompt, device=target.device)] = True
        self.out = Generation([], prompt_tokens=len(self.prompt))
        self.done = False

    def begin(self) -> None:
        """Makes the drafter's state; not before the request is served, for it takes memory."""
        if self.drafter is not None:
            self.state = self.drafter.begin(self.draft_rows)

    @property
    def waiting(self) -> int:
        """Rows that the drafter has put off reading."""
        return self.drafter.waiting(self.state) if isinstance(self.drafter, Lazy) else 0

    def judge(self, rows: int) -> tuple[int, int]:
        """Of the last tokens written, how many the drafter would have drafted, and of how many; see `Lazy.judge`."""
        rows, self.judgements = min(rows, len(self.out.tokens) - 1), self.judgements + 1
        return self.drafter.judge(self.state, rows) if isinstance(self.drafter, Lazy) else (0, 0)

    def propose(self) -> DraftTree:
        """The drafter's guesses for the next round."""
        if self.drafter is None:
            return DraftTree.empty(self.target.device)
        settings = self.draft_settings(None if self.policy is None else ask(self.policy, [self], 1))
        return self.drafter.propose(self.state, settings, self.sampling.temperature, self.generator)

    def draft_settings(self, chosen: DraftSettings | None) -> DraftSettings:
        """How much to draft in the next round: what a policy chose, if there is one."""
        self.settings = chosen or self.settings
        # the target adds a token of its own: drafts past the limit could never be emitted
        room = min(self.settings.length, self.max_new_tokens - len(self.out.tokens) - 1)
        self.asked = self.settings if room == self.settings.length else replace(self.settings, length=max(0, room))
        return self.asked

    def prepare(self, tree: DraftTree) -> Block:
        """The rows that verify this tree."""
        root = torch.tensor(self.out.tokens[-1:], device=self.target.device)
        if not len(tree.tokens):
            return Block(root, tree, None, None)
        slots, depths = layout(tree.parents, min(len(tree.tokens), self.settings.length))
        return Block(torch.cat([root, tree.tokens]), tree, slots, depths)

    def choose(self, block: Block | None, logits: Tensor) -> Tensor:
        """Verifies a block on the device; the result goes to the host in one transfer and then to `settle`.

        Args:
            block: None after the prompt.
            logits: (n + 1, V) float32; slot s predicts what follows it.
        """
        ids, slots, depths = (None, None, None) if block is None else (block.ids, block.slots, block.depths)
        logits = self._penalized(logits, ids, slots, depths)
        if block is not None and block.tree.q is not None and not self.sampling.greedy:
            p = distribution(logits, self.sampling)
            count, bonus = verify_sampled_chain(block.tree.tokens, block.tree.q.float(), p, self.generator)
            return torch.cat([count, bonus, block.tree.tokens])
        greedy = self.sampling.greedy
        choices = greedy_choice(logits) if greedy else draw(distribution(logits, self.sampling), self.generator)
        if block is None or slots is None:
            return choices
        return torch.cat([choices, block.tree.tokens, block.tree.parents])

    def first(self, flat: list[int]) -> list[int]:
        """Emits the target's token after the prompt."""
        return self._emit(flat)

    def settle(self, block: Block, flat: list[int]) -> Verdict:
        """Emits what the target agreed with and its own token after it; `flat` is what `choose` gave."""
        n = len(block.tree.tokens)
        if block.tree.q is not None and not self.sampling.greedy:
            kept, bonus, *tokens = flat
            path, choices, depth = list(range(kept)), None, n
        else:
            choices, tokens, parents = flat[: n + 1], flat[n + 1 : 2 * n + 1], flat[2 * n + 1 :]
            path, bonus = walk(choices, tokens, parents)
            depth = deepest(parents)
        emitted = self._emit([tokens[node] for node in path] + [bonus])
        return Verdict(emitted, min(len(path), len(emitted)), path, choices, depth)

    def committed(self, features: Features, verdict: Verdict) -> tuple[Tensor, Features]:
        """What the drafter is told: the emitted tokens, and the block's features of the position before each."""
        rows = verdict.rows
        if len(rows) < features.final.shape[1]:
            features = features.rows(slice(0, len(rows)) if rows == list(range(len(rows))) else rows)
        return torch.tensor(verdict.emitted, device=self.target.device), features

    def record(
        self, block: Block, verdict: Verdict, draft_s: float, verify_s: float, total_s: float, requests: int = 1
    ) -> Round:
        """Notes a round, and tells the drafter what came of it."""
        drafted, accepted, emitted = len(block.tree.tokens), verdict.accepted, len(verdict.emitted)
        other = total_s - draft_s - verify_s
        times = draft_s, verify_s, other
        round = Round(drafted, verdict.depth, accepted, emitted, *times, self.asked, requests)
        self.out.rounds.append(round)
        self.out.decode_s += total_s
        if self.observer is not None:
            self.observer(self.state, Outcome(block.tree, verdict.choices, verdict.path[:accepted], total_s))
        return round

    def finish(self) -> Generation:
        """The result, with its text."""
        tokens = self.out.tokens[:-1] if self.out.finish == "eos" else self.out.tokens
        text = str(self.target.tokenizer.decode(tokens, skip_special_tokens=True))
        ends = [text.index(s) for s in self.stop if s in text]
        self.out.text = text[: min(ends)] if ends and self.out.finish == "stop" else text
        return self.out

    def _penalized(self, logits: Tensor, ids: Tensor | None, slots: Tensor | None, depths: Tensor | None) -> Tensor:
        """Penalties by each slot's own prefix: the committed tokens and its path in the tree."""
        seen = None
        if self.seen is not None:
            seen = self.seen.expand(logits.shape[0], -1)
            if slots is not None and ids is not None:
                seen = seen.clone()
                slot, ancestor = slots.nonzero(as_tuple=True)
                seen[slot, ids[ancestor]] = True
        too_early = None
        written = len(self.out.tokens)
        if written < self.sampling.min_new_tokens:
            depths = torch.zeros(logits.shape[0], device=logits.device) if depths is None else depths
            too_early = written + depths < self.sampling.min_new_tokens
        return penalize(logits, self.sampling, seen, too_early, self.eos_tensor)

    def _emit(self, tokens: list[int]) -> list[int]:
        """Appends tokens up to the first that ends the output; returns those appended."""
        start = len(self.out.tokens)
        for token in tokens:
            self.out.tokens.append(token)
            if token in self.eos:
                self.out.finish, self.done = "eos", True
            elif self.stop and self._stopped():
                self.out.finish, self.done = "stop", True
            elif len(self.out.tokens) >= self.max_new_tokens:
                self.done = True
            if self.done:
                break
        emitted = self.out.tokens[start:]
        if self.seen is not None:
            self.seen[torch.tensor(emitted, device=self.seen.device)] = True
        return emitted

    def _stopped(self) -> bool:
        tail = max(map(len, self.stop)) + 8  # a token is at least a byte of text, save for a few that are none
        text = self.target.tokenizer.decode(self.out.tokens[-tail:], skip_special_tokens=True)
        return any(s in text for s in self.stop)


def _synchronized_clock() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def ask(policy: Policy, runs: Sequence[Decoding], requests: int) -> DraftSettings:
    """What the policy of these requests, out of so many that share a step, gives them; answers what it wants to know.

    Of the requests, the one that was asked least often is asked.
    """
    settings = policy.choose(requests, sum(run.waiting for run in runs))
    if tokens := getattr(policy, "judging", 0):
        run = min(runs, key=lambda run: run.judgements)
        policy.judged(*run.judge(tokens))  # type: ignore[attr-defined]
    return settings


def lazy_where_off(drafter: Drafter | None, settings: DraftSettings | Policy | None) -> Drafter | None:
    """The drafter, wrapped where rounds may draft nothing: those should not pay for it."""
    off = settings.length == 0 if isinstance(settings, DraftSettings) else settings is not None
    return Lazy(drafter) if drafter is not None and off and not hasattr(drafter, "observe") else drafter


def prompt_ids(target: Target, prompt: Prompt) -> list[int]:
    """Token ids of a prompt in any of its forms.

    Raises:
        UserError: empty, several prompts at once, or ids the target does not have.
    """
    if isinstance(prompt, str):
        ids = target.render([{"role": "user", "content": prompt}])
    else:
        items: list[Any] = prompt.tolist() if isinstance(prompt, Tensor) else list(prompt)
        if items and all(isinstance(item, dict) for item in items):
            ids = target.render(items)
        elif all(isinstance(item, int) for item in items):
            ids = items
        else:
            raise UserError(
                "prompt: one text, one list of messages or one list of token ids; call generate once a prompt"
            )
    if not ids:
        raise UserError("prompt is empty; at least one token is needed")
    if min(ids) < 0 or max(ids) >= target.vocab_size:
        raise UserError(f"prompt: token ids must lie in 0..{target.vocab_size - 1}, found {min(ids)}..{max(ids)}")
    return ids
