"""Several resident drafters and, each round, a choice among them by measured tokens per second.

Every drafter, and not drafting at all, is an arm of a bandit: discounted UCB (arXiv 0805.3415) on tokens per second.
A request starts from what earlier ones measured, weakened, and goes its own way from there. A drafter may tell how
sure it is with `confidence(state) -> int`, such as the length of a suffix match: where that is high it goes first,
until it proves slower than the best arm. The choice never looks at the draws of the verification to come, so the
output is the target's own whatever is chosen. Clocks decide, so the *order* of choices is not reproducible; at
temperature 0 the text does not depend on it.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters.base import Drafter, DraftSettings, DraftTree, Outcome
from drafters.combine import (
    Merged,
    check_several,
    envelope,
    inner_warnings,
    own_features,
    own_settings,
    union_taps,
    within,
)
from drafters.errors import UserError
from drafters.lazy import ROWS, Lazy, LazyState
from drafters.target import Features

OFF = "off"
CHEAP_ROWS = 32  # a round whose drafter had to read more rows first does not count: that is the price of a switch
CARRIED_ROUNDS = 8.0  # weight of earlier requests in a new one


@dataclass(frozen=True)
class Tally:
    """What an arm brought; older rounds weigh less."""

    rounds: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0

    def scaled(self, factor: float) -> "Tally":
        """All of it weighing `factor` of what it did."""
        return Tally(self.rounds * factor, self.tokens * factor, self.seconds * factor)


@dataclass
class Bandit:
    """Discounted upper confidence bounds on tokens per second.

    Args:
        explore: width of the bound, as a share of the best arm's rate.
        discount: weight of a round against the one after it; 0.99 remembers about a hundred.
    """

    explore: float = 0.3
    discount: float = 0.99
    tallies: dict[str, Tally] = field(default_factory=dict)

    def rate(self, arm: str) -> float:
        """Tokens per second; 0 where nothing was measured."""
        tally = self.tallies.get(arm, Tally())
        return tally.tokens / tally.seconds if tally.seconds else 0.0

    def bound(self, arm: str) -> float:
        """The rate it may plausibly have, infinite where nothing was measured."""
        rounds = self.tallies.get(arm, Tally()).rounds
        if not rounds:
            return math.inf
        total = sum(tally.rounds for tally in self.tallies.values())
        best = max(map(self.rate, self.tallies))
        return self.rate(arm) + self.explore * best * math.sqrt(math.log(max(total, 1.0)) / rounds)

    def record(self, arm: str, tokens: int, seconds: float) -> None:
        """Takes a round's result."""
        self.tallies = {name: tally.scaled(self.discount) for name, tally in self.tallies.items()}
        old = self.tallies.get(arm, Tally())
        self.tallies[arm] = Tally(old.rounds + 1, old.tokens + tokens, old.seconds + seconds)

    def weakened(self, rounds: float) -> "Bandit":
        """A copy in which no arm weighs more than so many rounds."""
        tallies = {name: tally.scaled(min(1.0, rounds / tally.rounds)) for name, tally in self.tallies.items()}
        return Bandit(self.explore, self.discount, tallies)


@dataclass
class RouterState:
    """One request: its bandit, and the drafters' own states by name."""

    bandit: Bandit
    inner: dict[str, LazyState]
    name: str | None = None
    """Of the drafter chosen this round, or `OFF`; None where there was no choice."""
    arm: str = OFF
    """The name its result is counted under."""
    counted: bool = True


class Router:
    """A choice among drafters, per request and per step.

    Args:
        drafters: two or more, by name.
        settings: how much each drafts, by name; one that is missing does what the engine asks for.
        override: confidence from which a drafter that tells it goes first.
        bandit: None: a new one.
        patience: most rows that a drafter may be behind.

    Attributes:
        counts: rounds by arm; "NAME, sure" are those it got by its confidence.

    Raises:
        UserError: fewer than two drafters.
    """

    kind = "router"

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        settings: Mapping[str, DraftSettings] | None = None,
        override: int = 6,
        bandit: Bandit | None = None,
        patience: int = ROWS,
    ):
        check_several(self.kind, drafters)
        self.drafters = dict(drafters)
        self.default_settings: DraftSettings | None = None
        self.use(settings or {})
        self.taps = union_taps(list(drafters.values()))
        self.meta: dict[str, Any] = {"warnings": inner_warnings(drafters)}
        self.override = override
        self.lazy = {name: Lazy(drafter, patience) for name, drafter in drafters.items()}
        self.bandit = bandit or Bandit()
        self.counts: Counter[str] = Counter()

    def use(self, settings: Mapping[str, DraftSettings]) -> None:
        """Sets how much each drafts; `default_settings` has room for any, unless one has no settings of its own."""
        self.settings = dict(settings)
        known = [own for name in self.drafters if (own := self._own(name))]
        whole = len(known) == len(self.drafters)
        self.default_settings = envelope(known, max(s.nodes for s in known)) if whole else None

    def begin(self, capacity: int) -> RouterState:
        """See `Drafter.begin`."""
        rows = {name: own.rows if (own := self._own(name)) else 0 for name in self.drafters}
        inner = {name: lazy.begin(capacity + rows[name]) for name, lazy in self.lazy.items()}
        return RouterState(self.bandit.weakened(CARRIED_ROUNDS), inner)

    def extend(self, state: RouterState, tokens: Tensor, features: Features) -> None:
        """See `Drafter.extend`: kept until a drafter needs it."""
        for name, lazy in self.lazy.items():
            lazy.extend(state.inner[name], tokens, own_features(features, self.taps, lazy.taps))

    def propose(
        self,
        state: RouterState,
        settings: DraftSettings,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> DraftTree:
        """See `Drafter.propose`: what the chosen drafter proposes."""
        state.name, state.counted = None, True
        device = next(iter(state.inner.values())).device
        if settings.length == 0:
            return DraftTree.empty(device)
        name, state.arm = self._choose(state)
        state.name = name
        self.counts[state.arm] += 1
        if name == OFF:
            return DraftTree.empty(device)
        state.counted = state.inner[name].rows <= CHEAP_ROWS
        own = self._own(name)
        asked = settings if own is None else within(own, settings)
        return self.lazy[name].propose(state.inner[name], asked, temperature, generator)

    def observe(self, state: RouterState, outcome: Outcome) -> None:
        """Learns from the round, and lets the drafter that was chosen learn."""
        name = state.name
        if name is None:
            return
        if state.counted:
            for bandit in (state.bandit, self.bandit):
                bandit.record(state.arm, len(outcome.accepted) + 1, outcome.seconds)
        drafter: Any = self.drafters.get(name)
        if hasattr(drafter, "observe"):
            # as the engine has it: first the tokens, then what became of the proposal
            drafter.observe(self.lazy[name].read(state.inner[name]), outcome)

    def _choose(self, state: RouterState) -> tuple[str, str]:
        """The drafter (or `OFF`), and the name it is counted under."""
        bandit = state.bandit
        best = max([*self.drafters, OFF], key=bandit.bound)  # the first of those never tried
        sure: list[tuple[int, str]] = []
        for name, drafter in self.drafters.items():
            if hasattr(drafter, "confidence"):
                sure.append((drafter.confidence(self.lazy[name].read(state.inner[name])), name))
        match, name = max(sure, default=(0, ""))
        if sure and match >= self.override and bandit.bound(f"{name}, sure") >= bandit.rate(best):
            return name, f"{name}, sure"
        return best, best

    def _own(self, name: str) -> DraftSettings | None:
        return self.settings.get(name) or own_settings(self.drafters[name])


def combined(kind: str, argument: str, make: Callable[[str], Drafter]) -> "Router | Merged":
    """The drafter that `router:A+B` or `merged:A+B` names.

    Args:
        kind: "router" or "merged".
        argument: "A+B", two or more.
        make: makes the drafter that each of them names.

    Raises:
        UserError: fewer than two, or two of one name.
    """
    specs = argument.split("+") if argument else []
    drafters = {Path(spec).name: make(spec) for spec in specs if spec}
    if len(drafters) < max(2, len(specs)):
        raise UserError(f"drafter {kind}:{argument}: write {kind}:A+B, two or more drafters that differ in name")
    return Router(drafters) if kind == "router" else Merged(drafters)
