"""Medusa heads (arXiv 2401.10774): head k reads the final hidden state of position t and predicts x[t+2+k].

Shapes: M supervised rows, D hidden width, K heads, Vd draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.base import DraftSettings, DraftTree, draw_draft
from drafters.target import Features, Target


@dataclass(frozen=True)
class MedusaConfig:
    """Shapes of a Medusa drafter."""

    heads: int
    layers: int
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b). With W = b = 0 it is the identity, which is where a warm start begins.

    Where x is wider than the output (Hydra's first block), only its first `width` numbers are carried on.
    """

    def __init__(self, width: int, inputs: int | None = None):
        super().__init__()
        self.linear = nn.Linear(inputs or width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x[..., : self.linear.out_features] + F.silu(self.linear(x))


class MedusaDrafter(nn.Module):
    """K independent heads over one hidden state.

    Args:
        config: shapes.
        draft_ids: (Vd,) ascending target ids the heads may propose; None: the full vocabulary.
    """

    kind = "medusa"
    taps: tuple[int, ...] = ()

    heads: Any  # a ModuleList of Sequentials; type checkers see plain modules
    draft_ids: Tensor | None

    def __init__(self, config: MedusaConfig, draft_ids: Tensor | None = None):
        super().__init__()
        self.config = config
        self.meta: dict[str, Any] = {}
        self.digest = ""  # of the weights (and adapter) it was loaded with, the same in every layout
        self.adapter: Any = None  # Medusa-2's: a drafters.adapter.Adapter, in training a train.joint.Backbone
        self.default_settings: DraftSettings | None = None
        D = config.hidden_size
        # Each block of a head is its own: the reference repeats one block, which only one-layer checkpoints can't show.
        self.heads = nn.ModuleList(
            nn.Sequential(
                *(ResidualBlock(D, self.slots(k) * D if j == 0 else D) for j in range(config.layers)),
                nn.Linear(D, config.draft_vocab_size, bias=False),
            )
            for k in range(config.heads)
        )
        self.register_buffer("draft_ids", draft_ids, persistent=False)

    @staticmethod
    def slots(k: int) -> int:
        """How many vectors of width D head k reads: the hidden state alone."""
        return 1

    def bind(self, target: Target) -> Self:
        """Medusa shares nothing with the target."""
        return self

    def unroll(self, ids: Tensor, features: Features, steps: int) -> list[Tensor]:
        """What each head's output layer reads, for every row at once; row t of head k predicts x[t+2+k].

        Args:
            ids: (B, T) tokens x; Medusa does not read them.
            features: of the same positions.
            steps: number of heads.

        Returns:
            `steps` tensors (B, T, D).
        """
        return [self.trunk(k, features.final) for k in range(steps)]

    def trunk(self, k: int, hidden: Tensor) -> Tensor:
        """Head k up to its output layer, (..., slots * D) -> (..., D)."""
        return self.heads[k][:-1](hidden.to(self.head_weight(k).dtype))

    def head_weight(self, k: int) -> Tensor:
        """(Vd, D), the output layer of head k."""
        return self.heads[k][-1].weight

    def logits(self, k: int, hidden: Tensor) -> Tensor:
        """(..., slots * D) -> (..., Vd): from h[t], scores for x[t+2+k]."""
        return self.heads[k][-1](self.trunk(k, hidden))

    def begin(self, capacity: int) -> "MedusaState":
        """See `Drafter.begin`."""
        return MedusaState(self.head_weight(0).new_zeros(self.config.hidden_size))

    def extend(self, state: "MedusaState", tokens: Tensor, features: Features) -> None:
        """See `Drafter.extend`: only the newest hidden state counts."""
        state.hidden = features.final[0, -1]  # (D,)

    def first_drafts(self, state: "MedusaState", tokens: Tensor, features: Features, rows: int) -> Tensor:
        """Like `extend`; says which token it would have drafted first after each of the last rows, (rows,)."""
        self.extend(state, tokens, features)
        return self._to_target(self.logits(0, features.final[0, -rows:]).argmax(-1))

    def propose(
        self,
        state: "MedusaState",
        settings: DraftSettings,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> DraftTree:
        """See `Drafter.propose`: a chain of the heads' choices, or a static tree over their ranks."""
        K = min(settings.length, self.config.heads)
        device = self.heads[0][-1].weight.device
        if K == 0:
            return DraftTree.empty(device)
        logits = torch.stack([self.logits(k, state.hidden) for k in range(K)])  # (K, Vd)
        return self._proposal(logits, settings, temperature, generator)

    def propose_batch(
        self,
        states: Sequence["MedusaState"],
        settings: Sequence[DraftSettings],
        temperatures: Sequence[float],
        generators: Sequence[torch.Generator],
    ) -> list[DraftTree]:
        """See `Drafter`: every head reads all requests in one product."""
        hidden = torch.stack([state.hidden for state in states])  # (B, D)
        most = min(max(wanted.length for wanted in settings), self.config.heads)
        logits = torch.stack([self.logits(k, hidden) for k in range(most)], dim=1) if most else None  # (B, K, Vd)
        trees = []
        for b, wanted in enumerate(settings):
            if logits is None or wanted.length == 0:
                trees.append(DraftTree.empty(hidden.device))
            else:
                trees.append(self._proposal(logits[b, : wanted.length], wanted, temperatures[b], generators[b]))
        return trees

    def fork(self, state: "MedusaState", rows: int, capacity: int) -> "MedusaState":
        """See `Drafter`: nothing but the newest hidden state counts, which `extend` brings."""
        return self.begin(capacity)

    def _proposal(
        self, logits: Tensor, settings: DraftSettings, temperature: float, generator: torch.Generator | None
    ) -> DraftTree:
        """A chain or tree from the heads' logits (K, Vd)."""
        K, device = len(logits), logits.device
        if settings.kind == "tree":
            hits = self.meta.get("rank_hits") or default_rank_hits(K, settings.top_k)
            ranks, parents = _tree_plan(_freeze(hits[:K], settings.top_k), settings.total)
            depths, order = zip(*((len(path) - 1, path[-1]) for path in ranks), strict=True)
            best = self._to_target(logits.topk(min(settings.top_k, logits.shape[1]), dim=-1).indices)  # (K, top_k)
            return DraftTree(best[list(depths), list(order)], torch.tensor(parents, device=device))
        if settings.sample and temperature > 0:
            draft, q = draw_draft(logits, temperature, generator)
            return DraftTree.chain(self._to_target(draft), self._scatter(q))
        return DraftTree.chain(self._to_target(logits.argmax(-1)))

    def _to_target(self, draft: Tensor) -> Tensor:
        return draft if self.draft_ids is None else self.draft_ids[draft]

    def _scatter(self, q: Tensor) -> Tensor:
        if self.draft_ids is None:
            return q
        return q.new_zeros(len(q), self.config.vocab_size).index_copy_(1, self.draft_ids, q)


@dataclass
class MedusaState:
    """The newest committed position's final hidden state, (D,)."""

    hidden: Tensor


def default_rank_hits(heads: int, ranks: int) -> list[list[float]]:
    """A guess at how often the rank-r choice of head k is right, for heads never measured: geometric in both."""
    return [[0.5 * 0.6**k * 0.4**r for r in range(ranks)] for k in range(heads)]


def static_tree(rank_hits: tuple[tuple[float, ...], ...], total: int) -> list[tuple[int, ...]]:
    """The `total` rank paths most likely to be accepted, when heads are taken as independent.

    The search of Medusa's paper, section 2.3.3: keep taking the path whose product of marginal hit rates is greatest.

    Args:
        rank_hits: [k][r], how often head k's choice of rank r is the target's token.
        total: number of nodes.

    Returns:
        Paths of ranks, each preceded by its prefix; path (0, 2) is head 1's third choice after head 0's first.
    """
    chosen: list[tuple[int, ...]] = []
    frontier: dict[tuple[int, ...], float] = {(r,): hit for r, hit in enumerate(rank_hits[0])}
    while frontier and len(chosen) < total:
        best = max(frontier, key=lambda path: (frontier[path], -len(path), [-r for r in path]))
        score = frontier.pop(best)
        chosen.append(best)
        if len(best) < len(rank_hits):
            frontier.update({(*best, r): score * hit for r, hit in enumerate(rank_hits[len(best)])})
    return chosen


_PLANS: dict[tuple, tuple[list[tuple[int, ...]], list[int]]] = {}  # one search a tree shape, not one a step


def _tree_plan(rank_hits: tuple[tuple[float, ...], ...], total: int) -> tuple[list[tuple[int, ...]], list[int]]:
    key = (rank_hits, total)
    if key not in _PLANS:
        paths = static_tree(rank_hits, total)
        index = {path: i for i, path in enumerate(paths)}
        _PLANS[key] = paths, [index.get(path[:-1], -1) for path in paths]
    return _PLANS[key]


def _freeze(hits: list[list[float]], ranks: int) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row[:ranks]) for row in hits)
