"""A suffix automaton that grows token by token: every substring of the texts in linear memory.

Each state stands for substrings that end at the same places. Blumer et al., "The smallest automaton recognizing the
subwords of a text" (1985); several texts may be added one after another.
"""

from heapq import nlargest

CHAIN = 32
"""Suffixes whose counts a new token updates at most; texts that repeat one token over and over have thousands."""


class SuffixAutomaton:
    """Substrings of one or more texts, what follows each and how often. State 0 is the empty substring.

    A token costs amortised constant time: the automaton's own, plus at most `CHAIN` counts.
    """

    def __init__(self) -> None:
        self.following: list[dict[int, int]] = [{}]  # state -> token -> state
        self.link = [-1]  # the state of the longest suffix that occurs at more places
        self.length = [0]  # of the state's longest substring
        self.count = [0]  # occurrences; those past the first CHAIN suffixes of a place are not counted
        self.newest = [0]  # when it last occurred
        self.last = 0  # the state of the whole text so far
        self.size = 0  # tokens

    def begin_text(self) -> None:
        """The next token begins another text."""
        self.last = 0

    def append(self, token: int) -> None:
        """Adds a token to the end of the current text."""
        self.size += 1
        known = self.following[self.last].get(token)
        if known is not None:  # only where another text already holds this one's beginning
            self.last = self._of_length(self.last, token, known)
        else:
            state = self._new(self.length[self.last] + 1, {}, 0)
            place = self.last
            while place >= 0 and token not in self.following[place]:
                self.following[place][token] = state
                place = self.link[place]
            self.link[state] = self._of_length(place, token, self.following[place][token]) if place >= 0 else 0
            self.last = state
        place, steps = self.last, 0
        while place > 0 and steps < CHAIN:
            self.count[place] += 1
            self.newest[place] = self.size
            place, steps = self.link[place], steps + 1

    def seen_before(self) -> tuple[int, int]:
        """State and length of the current text's longest suffix that occurred earlier."""
        place = max(0, self.link[self.last])
        return place, self.length[place]

    def follow(self, place: int, match: int, token: int) -> tuple[int, int]:
        """State and length of the longest known suffix of a foreign text, once it goes on with `token`."""
        while place and token not in self.following[place]:
            place = self.link[place]
            match = self.length[place]
        following = self.following[place].get(token)
        return (0, 0) if following is None else (following, match + 1)

    def continuations(self, place: int, most: int) -> list[tuple[float, int, int]]:
        """What follows a state, the most frequent first: (share, token, state); of equals the most recent first.

        Where the state stands at the end of a text only, its longest suffix that goes on speaks for it.
        """
        while place and not self.following[place]:
            place = self.link[place]
        if place == 0:
            return []
        found = self.following[place]
        if len(found) == 1:
            [(token, state)] = found.items()
            return [(1.0, token, state)]
        total = sum(self.count[state] or 1 for state in found.values())
        ranked = nlargest(most, found.items(), key=lambda item: (self.count[item[1]], self.newest[item[1]]))
        return [((self.count[state] or 1) / total, token, state) for token, state in ranked]

    def _of_length(self, place: int, token: int, state: int) -> int:
        """The state that `place` followed by `token` is the longest substring of: split off if it is shorter."""
        if self.length[state] == self.length[place] + 1:
            return state
        clone = self._new(self.length[place] + 1, dict(self.following[state]), self.link[state])
        self.count[clone], self.newest[clone] = self.count[state], self.newest[state]
        self.link[state] = clone
        while place >= 0 and self.following[place].get(token) == state:
            self.following[place][token] = clone
            place = self.link[place]
        return clone

    def _new(self, length: int, following: dict[int, int], link: int) -> int:
        self.following.append(following)
        self.link.append(link)
        self.length.append(length)
        self.count.append(0)
        self.newest.append(0)
        return len(self.link) - 1
