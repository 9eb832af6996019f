"""A drafter that is paid for only when it drafts: committed tokens wait until the next proposal is asked for."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from drafters.base import Drafter, DraftSettings, DraftTree
from drafters.target import Features

ROWS = 512  # waiting features are bounded: reading so many rows at once costs little a row


@dataclass
class LazyState:
    """The drafter's own state, and what it has not read yet."""

    inner: Any
    tokens: list[Tensor] = field(default_factory=list)
    features: list[Features] = field(default_factory=list)
    rows: int = 0
    device: torch.device = torch.device("cpu")


class Lazy:
    """Wraps a drafter for a decoder that may turn speculation off.

    EAGLE's `extend` is a forward of its layer for every committed token; while nothing is drafted that is pure loss.
    The rows that wait are read in one go, so that the drafter's state is the same as if it had read them one by one.
    Drafters that learn from outcomes (`observe`) are cheap to extend and must not be wrapped.
    """

    def __init__(self, drafter: Drafter):
        self.drafter, self.kind, self.taps = drafter, drafter.kind, drafter.taps
        self.meta: dict[str, Any] = drafter.meta
        self.default_settings: DraftSettings | None = None

    def begin(self, capacity: int) -> LazyState:
        """See `Drafter.begin`."""
        return LazyState(self.drafter.begin(capacity))

    def extend(self, state: LazyState, tokens: Tensor, features: Features) -> None:
        """See `Drafter.extend`: only takes note, unless too much waits already."""
        state.tokens.append(tokens)
        state.features.append(features)
        state.rows, state.device = state.rows + len(tokens), tokens.device
        if state.rows > ROWS:
            self._catch_up(state)

    def propose(
        self, state: LazyState, settings: DraftSettings, temperature: float, generator: torch.Generator | None
    ) -> DraftTree:
        """See `Drafter.propose`."""
        if settings.length == 0:
            return DraftTree.empty(state.device)
        self._catch_up(state)
        return self.drafter.propose(state.inner, settings, temperature, generator)

    def _catch_up(self, state: LazyState) -> None:
        if not state.rows:
            return
        final = torch.cat([f.final for f in state.features], dim=1)  # (1, M, D)
        taps = [f.taps for f in state.features if f.taps is not None]
        features = Features(final, torch.cat(taps, dim=1) if taps else None)
        self.drafter.extend(state.inner, torch.cat(state.tokens), features)
        state.tokens, state.features, state.rows = [], [], 0
