"""A drafter that is paid for only when it drafts: committed tokens wait until the next proposal is asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from drafters.base import Drafter, DraftSettings, DraftTree
from drafters.target import Features

CONTEXT = 16  # rows before those that are judged; one seed, 1,920 places: 28.5 % right, and 29.8 % with all rows
ROWS = 512  # waiting features are bounded: reading so many rows at once costs little a row


@dataclass
class LazyState:
    """The drafter's own state, and what it has not read yet."""

    capacity: int
    inner: Any = None
    """Made when it is first needed, for it takes memory."""
    tokens: list[Tensor] = field(default_factory=list)
    features: list[Features] = field(default_factory=list)
    rows: int = 0
    device: torch.device = torch.device("cpu")

    def take(self) -> tuple[Tensor, Features]:
        """What waits, which then waits no longer."""
        waiting = torch.cat(self.tokens), Features.join(self.features)
        self.tokens, self.features, self.rows = [], [], 0
        return waiting

    def last(self, rows: int) -> tuple[Tensor, Features]:
        """The last so many rows of what waits, or all of it; they go on waiting."""
        first, seen = len(self.tokens), 0
        while first and seen < rows:
            first, seen = first - 1, seen + len(self.tokens[first - 1])
        skip = slice(max(0, seen - rows), None)
        return torch.cat(self.tokens[first:])[skip], Features.join(self.features[first:]).rows(skip)


class Lazy:
    """Wraps a drafter for a decoder that may turn it off.

    EAGLE's `extend` is a forward of its layer for every committed token; while nothing is drafted that is pure loss.
    The rows that wait are read in one go, so that the drafter's state is the same as if it had read them one by one.
    Whoever passes outcomes on (`observe`) calls `read` first.

    Args:
        drafter: what drafts.
        most: rows that may wait.
    """

    def __init__(self, drafter: Drafter, most: int = ROWS):
        self.drafter, self.kind, self.taps, self.most = drafter, drafter.kind, drafter.taps, most
        self.meta: dict[str, Any] = drafter.meta
        self.default_settings = drafter.default_settings

    def begin(self, capacity: int) -> LazyState:
        """See `Drafter.begin`."""
        return LazyState(capacity)

    def extend(self, state: LazyState, tokens: Tensor, features: Features) -> None:
        """See `Drafter.extend`: only takes note, unless too much waits already."""
        state.tokens.append(tokens)
        state.features.append(features)
        state.rows, state.device = state.rows + len(tokens), tokens.device
        if state.rows > self.most:
            self.read(state)

    def propose(
        self, state: LazyState, settings: DraftSettings, temperature: float, generator: torch.Generator | None
    ) -> DraftTree:
        """See `Drafter.propose`."""
        if settings.length == 0:
            return DraftTree.empty(state.device)
        return self.drafter.propose(self.read(state), settings, temperature, generator)

    def propose_batch(
        self,
        states: Sequence[LazyState],
        settings: Sequence[DraftSettings],
        temperatures: Sequence[float],
        generators: Sequence[torch.Generator],
    ) -> list[DraftTree]:
        """See `Drafter.propose_batch`: together where the drafter can and more than one request drafts."""
        asked = list(zip(states, settings, temperatures, generators, strict=True))
        drafting = [one for one in asked if one[1].length]
        together: Any = getattr(self.drafter, "propose_batch", None)
        if together is None or len(drafting) < 2:
            return [self.propose(*one) for one in asked]
        behind = [state for state, *_ in drafting if state.rows]
        read: Any = getattr(self.drafter, "extend_batch", None)
        if read is not None and len(behind) > 1:
            inner, waiting = [self._begun(state) for state in behind], [state.take() for state in behind]
            read(inner, *map(list, zip(*waiting, strict=True)))
        trees = iter(together(*zip(*((self.read(state), *rest) for state, *rest in drafting), strict=True)))
        return [next(trees) if wanted.length else DraftTree.empty(state.device) for state, wanted, *_ in asked]

    def fork(self, state: LazyState, rows: int, capacity: int) -> LazyState:
        """See `Drafter.fork`."""
        inner = self.drafter.fork(self.read(state), rows, capacity)  # type: ignore[attr-defined]
        return LazyState(capacity, inner, device=state.device)

    def judge(self, state: LazyState, rows: int) -> tuple[int, int]:
        """Of the first drafts before the last rows that wait, how many would have been right, and of how many.

        That costs far less than to draft and to verify each; (0, 0) for a drafter that can't say. It is not worth
        reading all that waits, a prompt maybe: with the last few rows alone EAGLE is right nearly as often.
        """
        rows = min(rows, state.rows - 1)
        if rows < 1 or not hasattr(self.drafter, "first_drafts"):
            return 0, 0
        tokens, features = state.last(rows + CONTEXT)
        scratch = self.drafter.begin(len(tokens) + 1)
        drafts = self.drafter.first_drafts(scratch, tokens, features, rows + 1)  # the last one's token is yet to come
        return int((drafts[:-1] == tokens[-rows:]).sum()), rows

    @staticmethod
    def waiting(state: LazyState) -> int:
        """Rows that it would have to read before it drafts."""
        return state.rows

    def read(self, state: LazyState) -> Any:
        """Lets the drafter read all that waits; returns its own state."""
        inner = self._begun(state)
        if state.rows:
            self.drafter.extend(inner, *state.take())
        return inner

    def _begun(self, state: LazyState) -> Any:
        if state.inner is None:
            state.inner = self.drafter.begin(state.capacity)
        return state.inner
