"""Drafters that copy: the text so far, or a reference text, has been here before and went on like this.

- N-gram (prompt) lookup: the most recent place where the last n tokens stood, n as large as possible.
- Suffix decoding (arXiv 2411.04975): the longest suffix of the text that occurred before, however long, and what
  followed it how often.

Both keep plain Python integers: no tensor is touched per token, and a proposal is one small tensor at the end.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from drafters.automaton import SuffixAutomaton
from drafters.base import DraftSettings, DraftTree
from drafters.errors import UserError
from drafters.target import Features

LONGEST = 256
"""Tokens in an n-gram of lookup, each size of which has a table of its own."""


@dataclass
class LookupState:
    """The text of one request, its first token left out, and where each n-gram in it went on."""

    device: torch.device
    tokens: list[int] = field(default_factory=list)
    last: dict[tuple[int, ...], int] = field(default_factory=dict)
    """n-gram -> the position after its most recent occurrence."""
    before: dict[int, list[int]] = field(default_factory=dict)
    """n -> for each position, the one before it with the same n-gram, or -1."""


class LookupDrafter:
    """N-gram lookup: a chain from the most recent match, or a tree of the `top_k` most recent ones.

    Args:
        longest: n-gram tried first.
        shortest: n-gram tried last; without a match of it nothing is proposed, and the step is plain decoding.

    Raises:
        UserError: sizes below 1 or out of order.
    """

    kind = "lookup"
    taps: tuple[int, ...] = ()

    def __init__(self, longest: int = 4, shortest: int = 2):
        if not 1 <= shortest <= longest <= LONGEST:
            raise UserError(
                f"lookup: longest={longest}, shortest={shortest}; 1 <= shortest <= longest <= {LONGEST} is allowed"
            )
        self.longest, self.shortest = longest, shortest
        self.meta: dict[str, Any] = {}
        self.default_settings: DraftSettings | None = DraftSettings("chain", 8)

    def begin(self, capacity: int) -> LookupState:
        """See `Drafter.begin`."""
        sizes = range(self.shortest, self.longest + 1)
        return LookupState(torch.device("cpu"), before={n: [] for n in sizes})

    def extend(self, state: LookupState, tokens: Tensor, features: Features) -> None:
        """See `Drafter.extend`. Costs one look at a dictionary for each n and token."""
        state.device = tokens.device
        text, last = state.tokens, state.last
        for token in tokens.tolist():
            position = len(text)  # of this token: what its n-grams before were followed by
            for n, before in state.before.items():
                if position < n:
                    before.append(-1)
                    continue
                gram = tuple(text[position - n :])
                before.append(last.get(gram, -1))
                last[gram] = position
            text.append(token)

    def propose(
        self,
        state: LookupState,
        settings: DraftSettings,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> DraftTree:
        """See `Drafter.propose`."""
        trie = Trie()
        wanted = 1 if settings.kind == "chain" else settings.top_k
        for position in self._matches(state, wanted):
            # a match may end where the text does: what follows is then the draft itself, a text that repeats
            period = len(state.tokens) - position
            node = -1
            for i in range(settings.length):
                if len(trie.tokens) == settings.nodes:
                    break
                node = trie.add(node, state.tokens[position + i % period])
        return trie.tree(state.device)

    def _matches(self, state: LookupState, wanted: int) -> list[int]:
        """Positions after the matches: the longest n-grams first, of these the most recent first."""
        found: list[int] = []
        for n in range(self.longest, self.shortest - 1, -1):
            position = state.last.get(tuple(state.tokens[-n:]), -1) if len(state.tokens) >= n else -1
            while position >= 0 and len(found) < wanted:
                if position not in found:
                    found.append(position)
                position = state.before[n][position]
        return found


@dataclass
class SuffixState:
    """The text of one request, its first token left out, and where it stands in the reference texts."""

    device: torch.device
    text: SuffixAutomaton
    place: tuple[int, int] = (0, 0)
    """State of the references' automaton and length of the match."""


class SuffixDrafter:
    """Suffix decoding: the longest suffix of the text that occurred before says what comes next, and how surely.

    Looks in the request's own text and, if given, in texts known beforehand (a document, a template, an earlier
    answer), and follows the one that expects more tokens. A long match is trusted further than a short one.

    Args:
        references: texts as token ids.
        factor: drafts are at most `factor` times as long as the match.
        min_probability: drafts end where the path's probability, by counts, falls below this.
        shortest: matches of fewer tokens propose nothing, and the step is plain decoding.

    Raises:
        UserError: numbers out of range.
    """

    kind = "suffix"
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        references: Sequence[Sequence[int]] = (),
        factor: float = 1.0,
        min_probability: float = 0.1,
        shortest: int = 1,
    ):
        if not factor > 0 or not 0 <= min_probability <= 1 or shortest < 1:
            raise UserError(
                f"suffix: factor={factor}, min_probability={min_probability}, shortest={shortest}; "
                "above 0, from 0 to 1 and at least 1 are allowed"
            )
        self.factor, self.min_probability, self.shortest = factor, min_probability, shortest
        self.references = SuffixAutomaton()
        self.meta: dict[str, Any] = {}
        self.default_settings: DraftSettings | None = DraftSettings("chain", 8)
        for reference in references:
            self.learn(reference)

    def learn(self, tokens: Sequence[int]) -> None:
        """Adds a text to those known beforehand, such as an answer that is done; for requests that begin later."""
        self.references.begin_text()
        for token in tokens:
            self.references.append(token)

    def begin(self, capacity: int) -> SuffixState:
        """See `Drafter.begin`."""
        return SuffixState(torch.device("cpu"), SuffixAutomaton())

    def extend(self, state: SuffixState, tokens: Tensor, features: Features) -> None:
        """See `Drafter.extend`."""
        state.device = tokens.device
        for token in tokens.tolist():
            state.text.append(token)
            state.place = self.references.follow(*state.place, token)

    def propose(
        self,
        state: SuffixState,
        settings: DraftSettings,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> DraftTree:
        """See `Drafter.propose`: the most frequent continuation, or the several likeliest."""
        own = self._grow(state.text, *state.text.seen_before(), settings)
        other = self._grow(self.references, *state.place, settings)
        return max(own, other, key=lambda trie: trie.score).tree(state.device)

    def confidence(self, state: SuffixState) -> int:
        """Length of the longest match: a router lets a long one go first."""
        return max(state.text.seen_before()[1], state.place[1])

    def _grow(self, automaton: SuffixAutomaton, place: int, match: int, settings: DraftSettings) -> "Trie":
        """Takes the likeliest continuation not yet taken, again and again; a chain goes on from the last one only."""
        trie = Trie()
        depth = min(settings.length, int(self.factor * match)) if match >= self.shortest else 0
        branches = 1 if settings.kind == "chain" else settings.top_k
        order = 0  # equally likely nodes are taken in the order they were found
        frontier: list[tuple[float, int, int, int, int, int]] = []

        def look(probability: float, place: int, parent: int, level: int) -> None:
            nonlocal order
            for share, token, following in automaton.continuations(place, branches) if level < depth else ():
                if share * probability >= self.min_probability:
                    heapq.heappush(frontier, (-share * probability, order, token, following, parent, level + 1))
                    order += 1

        look(1.0, place, -1, 0)
        while frontier and len(trie.tokens) < settings.nodes:
            minus, _, token, following, parent, level = heapq.heappop(frontier)
            trie.score -= minus
            look(-minus, following, trie.add(parent, token), level)
        return trie


class Trie:
    """A draft tree in the making: equal tokens below one node are one node."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.score = 0.0  # tokens expected to be accepted, where its maker knows
        self._index: dict[tuple[int, int], int] = {}

    def add(self, parent: int, token: int) -> int:
        """The node of `token` below `parent` (-1: the root), made if there is none."""
        if (parent, token) not in self._index:
            self._index[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
        return self._index[parent, token]

    def tree(self, device: torch.device) -> DraftTree:
        """As tensors, one transfer."""
        tokens, parents = torch.tensor([self.tokens, self.parents], dtype=torch.long, device=device)
        return DraftTree(tokens, parents)
