"""The decoder: one loop for plain and speculative decoding of one request.

A round proposes a draft tree, runs the target once over the last committed token and all nodes, keeps the path that
the target agrees with plus one token of the target's own, and commits exactly those rows. With no drafter the tree is
empty and the same loop is plain decoding, so the two are comparable by construction.

Run: python scripts/chat.py --target smollm2-135m --drafter runs/smollm2-eagle3
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from decode.sampling import SamplingParams, distribution, draw, penalize
from decode.tree import ancestors, block_mask, walk
from decode.verify import verify_sampled_chain
from drafters.base import Drafter, DraftSettings, DraftTree, Outcome
from drafters.cache import KVCache
from drafters.errors import UserError
from drafters.target import Features, Target

__all__ = ["DraftSettings", "Generation", "Round", "SamplingParams", "generate"]

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

    @property
    def total_s(self) -> float:
        """Seconds of the whole round."""
        return self.draft_s + self.verify_s + self.other_s


class Policy(Protocol):
    """Chooses how much to draft, round by round; a fixed `DraftSettings` may stand in its place."""

    nodes: int
    """The most nodes that any of its settings proposes."""
    rows: int
    """The most rows that a drafter writes into its own cache under any of them."""

    def choose(self) -> DraftSettings:
        """Settings of the next round."""

    def observe(self, round: Round) -> None:
        """Takes what the last round brought and cost."""


@dataclass
class Generation:
    """What `generate` returns."""

    tokens: list[int]
    """New token ids, the end token included if one was emitted."""
    text: str = ""
    finish: str = "length"
    """"eos", "stop" or "length"."""
    prompt_tokens: int = 0
    rounds: list[Round] = field(default_factory=list)
    """Rounds after the prefill, which gives the first token."""
    ttft_s: float = 0.0
    decode_s: float = 0.0

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
    stop: Sequence[str] = (),
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
        stop: strings that end the output; `.text` ends before the first of them.
        callback: called once a round with the emitted tokens, the first n of which were drafted, and n.
        eos_token_ids: None: the target's own.
        profile: synchronize the device between phases, so that the cost split is true on CUDA.

    Raises:
        UserError: several prompts, an empty one, ids outside the vocabulary, or more positions than the target has.
    """
    settings = settings or getattr(drafter, "default_settings", None) or DraftSettings()
    run = _Run(
        target, drafter, prompt, max_new_tokens, settings, sampling or SamplingParams(), stop, eos_token_ids, profile
    )
    emitted = run.prefill()
    if callback:
        callback(emitted, 0)
    while not run.done:
        emitted, accepted = run.round()
        if callback:
            callback(emitted, accepted)
    return run.finish()


class _Run:
    """State of one request."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        prompt: Prompt,
        max_new_tokens: int,
        settings: DraftSettings | Policy,
        sampling: SamplingParams,
        stop: Sequence[str],
        eos_token_ids: Sequence[int] | None,
        profile: bool,
    ):
        self.target, self.drafter, self.sampling = target, drafter, sampling
        self.policy = None if isinstance(settings, DraftSettings) else settings
        self.settings = settings if isinstance(settings, DraftSettings) else DraftSettings()
        self.prompt = prompt_ids(target, prompt)
        self.max_new_tokens, self.stop = max_new_tokens, tuple(s for s in stop if s)
        self.observer = getattr(drafter, "observe", None)
        nodes = settings.nodes if drafter is not None else 0
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens={max_new_tokens}: at least 1 is allowed")
        if len(self.prompt) + max_new_tokens > target.max_positions:
            raise UserError(
                f"prompt of {len(self.prompt)} tokens + max_new_tokens={max_new_tokens} exceed the target's "
                f"{target.max_positions} positions; lower max_new_tokens or shorten the prompt"
            )
        self.eos = frozenset(target.eos_token_ids if eos_token_ids is None else eos_token_ids)
        self.eos_tensor = torch.tensor(sorted(self.eos), device=target.device, dtype=torch.long)
        self.generator = torch.Generator(target.device).manual_seed(sampling.seed)
        self.capacity = len(self.prompt) + max_new_tokens + nodes + 1
        self.cache: KVCache = target.new_cache(self.capacity)
        rows = len(self.prompt) + max_new_tokens + settings.rows
        self.state: Any = drafter.begin(rows) if drafter is not None else None
        self.taps = drafter.taps if drafter is not None else ()
        self.seen: Tensor | None = None  # (V,) tokens of the committed prefix, for the repetition penalty
        self.out = Generation([], prompt_tokens=len(self.prompt))
        self.done = False
        on_cuda = profile and target.device.type == "cuda"
        self.clock = _synchronized_clock if on_cuda else time.perf_counter

    def prefill(self) -> list[int]:
        """Reads the prompt; the target's own choice after it is the first token."""
        start = self.clock()
        ids = torch.tensor([self.prompt], device=self.target.device)
        if self.sampling.repetition_penalty != 1.0:
            self.seen = torch.zeros(self.target.vocab_size, dtype=torch.bool, device=ids.device)
            self.seen[ids[0]] = True
        features = self.target.forward(
            ids, torch.arange(ids.shape[1], device=ids.device)[None], self.cache, taps=self.taps
        )
        self.cache.commit(ids.shape[1])
        logits = self.target.head(features.final[0, -1:]).float()  # (1, V): predicts the first new token
        choice = self._choose(logits, None, None)
        emitted = self._emit(choice.tolist())
        self.out.ttft_s = self.clock() - start
        if self.drafter is not None and not self.done:
            tokens = torch.cat([ids[0, 1:], choice])  # x[t+1] for every prompt position t
            self.drafter.extend(self.state, tokens, features)
        self.out.decode_s = self.clock() - start - self.out.ttft_s
        return emitted

    def round(self) -> tuple[list[int], int]:
        """One draft, one target forward, one commit; returns the emitted tokens and how many were drafted."""
        started = self.clock()
        tree = self._propose()
        drafted_at = self.clock()
        device = self.target.device
        root = torch.tensor(self.out.tokens[-1:], device=device)
        ids = torch.cat([root, tree.tokens])  # (n + 1,)
        mask = depths = slots = None
        if len(ids) > 1:
            slots = ancestors(tree.parents, min(len(tree.tokens), self.settings.length))
            mask = block_mask(slots, self.cache.length)
            depths = slots.sum(1) - 1
        positions = torch.full(
            (len(ids),), self.cache.length, device=device
        )  # rotary position: committed length + depth
        positions = positions if depths is None else positions + depths
        features = self.target.forward(ids[None], positions[None], self.cache, mask, self.taps)
        logits = self.target.head(features.final[0]).float()  # (n + 1, V): slot s predicts what follows it
        path, bonus, choices = self._verify(logits, tree, ids, slots, depths)
        verified_at = self.clock()

        emitted = self._emit([tokens for _, tokens in path] + [bonus])
        rows = [0, *(node + 1 for node, _ in path)]
        self.cache.commit(len(rows), rows)
        extended = 0.0
        if self.drafter is not None and not self.done:
            before = self.clock()
            kept = slice(0, len(rows)) if rows == list(range(len(rows))) else rows
            taps = None if features.taps is None else features.taps[:, kept]
            tokens = torch.tensor(emitted, device=device)
            self.drafter.extend(self.state, tokens, Features(features.final[:, kept], taps))
            extended = self.clock() - before
        accepted = min(len(path), len(emitted))
        total, draft, verify = self.clock() - started, drafted_at - started + extended, verified_at - drafted_at
        depth = 0 if depths is None else int(depths.max())
        round = Round(len(tree.tokens), depth, accepted, len(emitted), draft, verify, total - draft - verify)
        self.out.rounds.append(round)
        self.out.decode_s += total
        if self.policy is not None:
            self.policy.observe(round)
        if self.observer is not None:
            self.observer(self.state, Outcome(tree, choices, [node for node, _ in path[:accepted]], total))
        return emitted, accepted

    def finish(self) -> Generation:
        """The result, with its text."""
        tokens = self.out.tokens[:-1] if self.out.finish == "eos" else self.out.tokens
        text = str(self.target.tokenizer.decode(tokens, skip_special_tokens=True))
        ends = [text.index(s) for s in self.stop if s in text]
        self.out.text = text[: min(ends)] if ends and self.out.finish == "stop" else text
        return self.out

    def _propose(self) -> DraftTree:
        if self.drafter is None:
            return DraftTree.empty(self.target.device)
        if self.policy is not None:
            self.settings = self.policy.choose()
        # the target adds a token of its own: drafts past the limit could never be emitted
        room = min(self.settings.length, self.max_new_tokens - len(self.out.tokens) - 1)
        settings = self.settings if room == self.settings.length else _shortened(self.settings, room)
        return self.drafter.propose(self.state, settings, self.sampling.temperature, self.generator)

    def _verify(
        self, logits: Tensor, tree: DraftTree, ids: Tensor, slots: Tensor | None, depths: Tensor | None
    ) -> tuple[list[tuple[int, int]], int, list[int] | None]:
        """Accepted (node, token) pairs from the root down, the bonus token, and the target's choice at every slot.

        One transfer to the host.
        """
        if tree.q is not None and not self.sampling.greedy:
            p = distribution(self._penalized(logits, ids, slots, depths), self.sampling)
            count, bonus = verify_sampled_chain(tree.tokens, tree.q.float(), p, self.generator)
            kept, last, *tokens = torch.cat([count, bonus, tree.tokens]).tolist()
            return list(enumerate(tokens[:kept])), last, None
        n = len(tree.tokens)
        choices = self._choose(self._penalized(logits, ids, slots, depths))
        flat = torch.cat([choices, tree.tokens, tree.parents]).tolist() if n else choices.tolist()
        tokens = flat[n + 1 : 2 * n + 1]
        path, last = walk(flat[: n + 1], tokens, flat[2 * n + 1 :])
        return [(node, tokens[node]) for node in path], last, flat[: n + 1]

    def _choose(self, logits: Tensor, ids: Tensor | None = None, slots: Tensor | None = None) -> Tensor:
        if ids is None and slots is None and len(self.out.tokens) == 0:
            logits = self._penalized(logits, None, None, None)
        if self.sampling.greedy:
            return logits.argmax(-1)
        return draw(distribution(logits, self.sampling), self.generator)

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


def _shortened(settings: DraftSettings, length: int) -> DraftSettings:
    return DraftSettings(settings.kind, max(0, length), settings.top_k, settings.total, settings.sample)


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
