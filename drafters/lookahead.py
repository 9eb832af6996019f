"""Lookahead decoding (arXiv 2402.02057): Jacobi iterations and the n-grams they leave behind, in one target step.

The draft tree holds a window of W columns and N - 1 levels. Level 0 is a chain below the root, column i at depth i + 1;
level l of a column hangs below its level l - 1. What the target says after the last level is the column's next level,
the oldest level falls out, and the N tokens of the column so far are an n-gram for the pool. Beside the window stand,
as guesses, the pool's n-grams that begin with the last committed token. A tree chosen before the target draws is exact
with one-hot verification, whatever stands in it, so the window needs no mask or rule of its own.
"""

import math
import random
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from drafters.base import DraftSettings, DraftTree, Outcome
from drafters.errors import UserError
from drafters.lookup import Trie
from drafters.target import Features

POOL = 1 << 16
"""Tokens that n-grams are kept for; the least recently used fall out."""


@dataclass
class LookaheadState:
    """One request's text, its first token left out, the n-grams known and the window."""

    device: torch.device
    random: random.Random
    text: list[int] = field(default_factory=list)
    pool: "OrderedDict[int, OrderedDict[tuple[int, ...], None]]" = field(default_factory=OrderedDict)
    """First token -> what followed it, the most recent last."""
    window: list[list[int]] = field(default_factory=list)
    """Levels of W tokens, the oldest first."""
    nodes: list[int] = field(default_factory=list)
    """Where the newest level's columns stand in the tree just proposed; empty if the window was left out."""
    levels: int = 0


class LookaheadDrafter:
    """Drafts with the target's own parallel guesses: no second model, no training, and wider target steps.

    Args:
        window: columns W; 0: as many as the draft settings have room for, after guesses.
        ngram: N; 0: by the draft settings, 5 at most.
        guesses: n-grams G tried in a step and kept for a token; 0: as many as columns.
        from_text: whether the pool also takes the n-grams of prompt and output.

    Raises:
        UserError: numbers out of range.
    """

    kind = "lookahead"
    taps: tuple[int, ...] = ()

    def __init__(self, window: int = 0, ngram: int = 0, guesses: int = 0, *, from_text: bool = True):
        if min(window, guesses) < 0 or ngram not in (0, *range(2, 17)):
            raise UserError(
                f"lookahead: window={window}, ngram={ngram}, guesses={guesses}; "
                "window and guesses of at least 1 and an ngram of 2 to 16 are allowed (0: chosen by the draft settings)"
            )
        self.window, self.ngram, self.guesses, self.from_text = window, ngram, guesses, from_text
        self.meta: dict[str, Any] = {}
        W, L = window or 5, (ngram or 4) - 1
        self.default_settings: DraftSettings | None = DraftSettings("tree", W + L - 1, 1, (W + (guesses or W)) * L)

    def shape(self, settings: DraftSettings) -> tuple[int, int, int]:
        """Columns W, levels N - 1 and guesses G that fit the nodes and the depth of these settings."""
        nodes, depth = settings.nodes, settings.length
        L = min(depth, nodes, self.ngram - 1 if self.ngram else max(1, min(4, math.isqrt(nodes // 2))))
        W = min(self.window or nodes // (2 * L), nodes // L, depth - L + 1)
        G = min(self.guesses or max(1, W), nodes // L - W)
        return W, L, G

    def begin(self, capacity: int) -> LookaheadState:
        """See `Drafter.begin`."""
        return LookaheadState(torch.device("cpu"), random.Random(0))

    def extend(self, state: LookaheadState, tokens: Tensor, features: Features) -> None:
        """See `Drafter.extend`."""
        state.device = tokens.device
        known = len(state.text)
        state.text += tokens.tolist()
        if self.from_text:
            L = (self.ngram or 5) - 1
            for i in range(max(0, known - L), len(state.text) - L):
                self._remember(state, state.text[i], tuple(state.text[i + 1 : i + 1 + L]))

    def propose(
        self,
        state: LookaheadState,
        settings: DraftSettings,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> DraftTree:
        """See `Drafter.propose`: the guesses and the window as one tree, a chain's length being its nodes."""
        state.nodes = []
        if not settings.length or not state.text:
            return DraftTree.empty(state.device)
        W, L, G = self.shape(settings)
        trie = Trie()
        guesses = state.pool.get(state.text[-1], ())
        for guess in islice(reversed(guesses), G):
            node = -1
            for token in guess[:L]:
                node = trie.add(node, token)
        if W:
            self._fit(state, W, L)
            column = -1
            for i in range(W):
                column = node = trie.add(column, state.window[0][i])
                for level in state.window[1:]:
                    node = trie.add(node, level[i])
                state.nodes.append(node)
        return trie.tree(state.device)

    def observe(self, state: LookaheadState, outcome: Outcome) -> None:
        """Moves the window by what the target said after its newest level, and keeps the n-grams that this makes."""
        if not state.nodes or outcome.choices is None:
            return
        newest = [outcome.choices[node + 1] for node in state.nodes]
        state.window.append(newest)
        if len(state.window) > state.levels:
            for gram in zip(*state.window, strict=True):
                self._remember(state, gram[0], gram[1:])
            state.window.pop(0)

    def _fit(self, state: LookaheadState, W: int, L: int) -> None:
        """Makes the window W wide and at most L levels high; new columns begin with tokens of the text, by chance."""
        state.levels = L
        if not state.window or len(state.window[0]) < W:
            state.window = [state.random.choices(state.text, k=W)]
        state.window = [level[:W] for level in state.window[-L:]]

    def _remember(self, state: LookaheadState, token: int, tail: tuple[int, ...]) -> None:
        """Enters an n-gram as the most recent of its first token; the oldest beyond the bounds are forgotten."""
        tails = state.pool.setdefault(token, OrderedDict())
        tails[tail] = None
        tails.move_to_end(tail)
        if len(tails) > (self.guesses or 16):
            tails.popitem(last=False)
        state.pool.move_to_end(token)
        if len(state.pool) > POOL:
            state.pool.popitem(last=False)
