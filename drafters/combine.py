"""Several drafters as one: whose features are whose, which settings fit into which, and one tree out of many.

A free drafter (n-gram, suffix) and a trained one are right at different places. `Merged` lets the target verify the
union of their candidates in one forward; a prefix that they share is drafted once. Tokens that were chosen without
looking at the verification's draws are one-hot proposals, whoever chose them, so any such union is exact.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from drafters.base import Drafter, DraftSettings, DraftTree, Outcome
from drafters.errors import UserError
from drafters.target import Features


def union_taps(drafters: Sequence[Drafter]) -> tuple[int, ...]:
    """The layers that any of them taps, ascending."""
    return tuple(sorted({k for drafter in drafters for k in drafter.taps}))


def own_features(features: Features, have: Sequence[int], want: Sequence[int]) -> Features:
    """The features as a drafter that taps the layers `want` expects them, out of those of the layers `have`.

    Args:
        features: final (1, M, D) and taps (1, M, A * D) of the layers `have`.
        have: ascending.
        want: some of them, ascending; none gives no taps.
    """
    if tuple(have) == tuple(want) or features.taps is None:
        return features
    if not want:
        return Features(features.final, None)
    D = features.final.shape[-1]
    parts = features.taps.split(D, dim=-1)
    return Features(features.final, torch.cat([parts[list(have).index(k)] for k in want], dim=-1))


def within(own: DraftSettings, allowed: DraftSettings, nodes: int | None = None) -> DraftSettings:
    """A drafter's own settings, cut to the depth that is allowed and to as many nodes (None: as `allowed` has)."""
    nodes = allowed.nodes if nodes is None else nodes
    length = min(own.length, allowed.length, nodes)
    return replace(own, length=length, total=max(1, min(own.total, nodes)))


def envelope(settings: Sequence[DraftSettings], nodes: int) -> DraftSettings:
    """Settings that allow every one of `settings`, and so many nodes."""
    length, top_k = max(s.length for s in settings), max(s.top_k for s in settings)
    if all(s.kind == "chain" for s in settings) and nodes <= length:
        return DraftSettings("chain", length)
    return DraftSettings("tree", length, top_k, max(1, nodes))


def own_settings(drafter: Drafter) -> DraftSettings | None:
    """The drafter's own `default_settings`, if it has any."""
    return getattr(drafter, "default_settings", None)


def check_several(kind: str, drafters: Mapping[str, Drafter]) -> None:
    """Raises `UserError` unless there are two or more to combine, all for the target as it is."""
    if len(drafters) < 2:
        raise UserError(f"{kind}: two drafters or more are needed, got {', '.join(drafters) or 'none'}")
    for name, drafter in drafters.items():
        if getattr(drafter, "adapter", None) is not None:
            raise UserError(
                f"{kind}: {name} changes the target (adapter); it can't share one with others, use it alone"
            )


def merge(trees: Sequence[DraftTree]) -> tuple[DraftTree, list[list[int]]]:
    """The union of trees on one device: nodes with the same path are one node, and those of earlier trees come first.

    How the tokens were drawn does not matter any more: the union is verified as one-hot proposals.

    Returns:
        The union, and for each tree the node of the union that each of its slots became: the root (-1), then its nodes.
    """
    some = [tree for tree in trees if len(tree.tokens)]
    if len(some) < 2:
        one = some[0] if some else trees[0]
        return DraftTree(one.tokens, one.parents), [list(range(-1, len(tree.tokens))) for tree in trees]
    # one transfer to the host; the free drafters' candidates come from there anyway
    flat = torch.cat([part for tree in trees for part in (tree.tokens, tree.parents)]).tolist()
    index: dict[tuple[int, int], int] = {}  # (parent, token) -> node
    places: list[list[int]] = []
    start = 0
    for tree in trees:
        n = len(tree.tokens)
        place = [-1]
        for token, parent in zip(flat[start : start + n], flat[start + n : start + 2 * n], strict=True):
            place.append(index.setdefault((place[parent + 1], token), len(index)))
        places.append(place)
        start += 2 * n
    nodes = torch.tensor([*index], device=some[0].tokens.device)  # (n, 2): in order of making, so parents come first
    return DraftTree(nodes[:, 1], nodes[:, 0]), places


def own_outcome(outcome: Outcome, tree: DraftTree, place: list[int]) -> Outcome:
    """What became of one of the trees of a union.

    Args:
        outcome: of the union.
        tree: one of its parts.
        place: the union's node of each slot of `tree`, from `merge`.
    """
    choices = outcome.choices
    node_of = {at: slot - 1 for slot, at in enumerate(place)}
    return Outcome(
        tree,
        None if choices is None else [choices[at + 1] for at in place],
        [node_of[node] for node in outcome.accepted if node in node_of],
        outcome.seconds,
    )


@dataclass
class MergedState:
    """The drafters' own states by name, and this round's proposals."""

    inner: dict[str, Any]
    trees: list[DraftTree] = field(default_factory=list)
    places: list[list[int]] = field(default_factory=list)


class Merged:
    """Proposes the union of what several drafters propose.

    Args:
        drafters: two or more, by name. Those without weights are asked first and take at most half of the nodes that
            are left; the last one gets the rest.
        settings: how much each proposes, by name; one that is missing is asked for what the engine asks for.

    Raises:
        UserError: fewer than two drafters.
    """

    kind = "merged"

    def __init__(self, drafters: Mapping[str, Drafter], settings: Mapping[str, DraftSettings] | None = None):
        check_several(self.kind, drafters)
        free_first = sorted(drafters.items(), key=lambda item: isinstance(item[1], nn.Module))
        self.drafters = dict(free_first)
        self.taps = union_taps(list(drafters.values()))
        self.meta: dict[str, Any] = {"warnings": inner_warnings(drafters)}
        self.default_settings: DraftSettings | None = None
        self.use(settings or {})

    def use(self, settings: Mapping[str, DraftSettings]) -> None:
        """Sets how much each drafts; `default_settings` has room for all, unless one has no settings of its own."""
        self.settings = dict(settings)
        known = [own for name in self.drafters if (own := self._own(name))]
        whole = len(known) == len(self.drafters)
        self.default_settings = envelope(known, sum(s.nodes for s in known)) if whole else None

    def begin(self, capacity: int) -> MergedState:
        """See `Drafter.begin`."""
        inner = {}
        for name, drafter in self.drafters.items():  # a beam may write more rows than the engine's settings foresee
            own = self._own(name)
            inner[name] = drafter.begin(capacity + (own.rows if own else 0))
        return MergedState(inner)

    def extend(self, state: MergedState, tokens: Tensor, features: Features) -> None:
        """See `Drafter.extend`."""
        for name, drafter in self.drafters.items():
            drafter.extend(state.inner[name], tokens, own_features(features, self.taps, drafter.taps))

    def propose(
        self,
        state: MergedState,
        settings: DraftSettings,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> DraftTree:
        """See `Drafter.propose`: never more nodes or longer paths than `settings` allows."""
        state.trees = []
        left = settings.nodes
        for rank, (name, drafter) in enumerate(self.drafters.items()):
            last = rank + 1 == len(self.drafters)
            own = self._own(name) or settings
            asked = within(replace(own, sample=False), settings, left if last else (left + 1) // 2)
            state.trees.append(drafter.propose(state.inner[name], asked, temperature, generator))
            left -= len(state.trees[-1].tokens)
        union, state.places = merge(state.trees)
        return union

    def observe(self, state: MergedState, outcome: Outcome) -> None:
        """Tells each drafter that wants to hear it what became of its own candidates."""
        for (name, drafter), tree, place in zip(self.drafters.items(), state.trees, state.places, strict=True):
            listener: Any = drafter
            if hasattr(listener, "observe"):
                listener.observe(state.inner[name], own_outcome(outcome, tree, place))

    def _own(self, name: str) -> DraftSettings | None:
        return self.settings.get(name) or own_settings(self.drafters[name])


def inner_warnings(drafters: Mapping[str, Drafter]) -> list[str]:
    """What the drafters' files warn of, by drafter."""
    return [f"{name}: {line}" for name, drafter in drafters.items() for line in drafter.meta.get("warnings", ())]
