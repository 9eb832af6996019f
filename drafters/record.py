"""Keeps what live requests committed, as rows that a drafter can be trained on: tokens, features and who wrote what.

Shapes: M positions of a row, D target width, A tapped layers.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from drafters.base import Drafter, DraftSettings, DraftTree, Outcome
from drafters.combine import own_settings
from drafters.target import Features


@dataclass(frozen=True)
class Row:
    """One request, or its last part.

    Attributes:
        ids: (M,) tokens x. The first of a request is never seen by a drafter, and stands here as 0: nothing reads it.
        written: (M,), True where the target wrote the token, False in the prompt.
        accepted: (M,), True where it was drafted too; elsewhere in the answer a draft was rejected, or ended.
        features: final (1, M, D) and taps (1, M, A * D) of the same positions.
    """

    ids: Tensor
    written: Tensor
    accepted: Tensor
    features: Features


@dataclass
class RecorderState:
    """The wrapped drafter's state, and the parts of the request so far."""

    inner: Any
    tokens: list[Tensor] = field(default_factory=list)
    features: list[Features] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    """Accepted drafts of each `extend`, always its first tokens."""
    extended: bool = False
    """Whether this round's tokens came in; the last round's of a request do not."""


class Recorder:
    """A drafter that also keeps the newest requests, whatever the drafter inside.

    Committed positions are kept with the features that verification computed anyway; those where a draft was rejected
    are among them, with the target's own token. Rejected tokens themselves are not: the text did not go that way.

    Args:
        drafter: does the drafting.
        capacity: positions kept over all rows; the oldest rows go first.
        max_length: of a row; of a longer request the last part is kept.

    Attributes:
        rows: finished requests, the oldest first.
        finished: number of requests ever finished.
        steps, tokens: target steps with a proposal since `reset`, and tokens that they yielded.
    """

    def __init__(self, drafter: Drafter, capacity: int = 20_000, max_length: int = 1024):
        self.drafter, self.capacity, self.max_length = drafter, capacity, min(max_length, capacity)
        self.kind, self.taps, self.meta = drafter.kind, drafter.taps, drafter.meta
        self.default_settings: DraftSettings | None = own_settings(drafter)
        self.rows: deque[Row] = deque()
        self.finished = 0
        self._current: RecorderState | None = None
        self.reset()

    def reset(self) -> None:
        """Begins to count anew."""
        self.steps = self.tokens = 0

    def begin(self, capacity: int) -> RecorderState:
        """See `Drafter.begin`; ends the row of the request before."""
        self.finish()
        self._current = RecorderState(self.drafter.begin(capacity))
        return self._current

    def extend(self, state: RecorderState, tokens: Tensor, features: Features) -> None:
        """See `Drafter.extend`."""
        self.drafter.extend(state.inner, tokens, features)
        if state is self._current:
            state.tokens.append(tokens)
            state.features.append(_last(features, self.max_length))
            state.accepted.append(0)
            state.extended = True

    def propose(
        self,
        state: RecorderState,
        settings: DraftSettings,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> DraftTree:
        """See `Drafter.propose`."""
        state.extended = False
        return self.drafter.propose(state.inner, settings, temperature, generator)

    def observe(self, state: RecorderState, outcome: Outcome) -> None:
        """Notes how far the proposal was right."""
        accepted = len(outcome.accepted)
        if len(outcome.tree.tokens):
            self.steps, self.tokens = self.steps + 1, self.tokens + accepted + 1
        if state.extended:
            state.accepted[-1] = accepted
        inner: Any = self.drafter
        if hasattr(inner, "observe"):
            inner.observe(state.inner, outcome)

    def finish(self) -> None:
        """Turns the request so far into a row; `begin` does so too."""
        state, self._current = self._current, None
        if state is None or not state.tokens:
            return
        device = state.tokens[0].device
        prompt = len(state.tokens[0])  # x[1] to the first token of the answer
        ids = torch.cat([state.tokens[0].new_zeros(1), *state.tokens])[:-1]  # (M,): of the last one no feature is known
        accepted = torch.zeros(len(ids) + 1, dtype=torch.bool, device=device)
        start = 1 + prompt
        for tokens, count in zip(state.tokens[1:], state.accepted[1:], strict=True):
            accepted[start : start + count] = True
            start += len(tokens)
        written = torch.arange(len(ids), device=device) >= prompt
        features = _last(Features.join(state.features), self.max_length)
        part = slice(-features.final.shape[1], None)
        self.rows.append(Row(ids[part], written[part], accepted[:-1][part], features))
        self.finished += 1
        while sum(len(row.ids) for row in self.rows) > self.capacity:
            self.rows.popleft()


def _last(features: Features, rows: int) -> Features:
    """The last rows, cut free from what they were a view of."""
    final = features.final[:, -rows:].clone()
    return Features(final, None if features.taps is None else features.taps[:, -rows:].clone())
