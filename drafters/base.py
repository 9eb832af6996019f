"""What every drafter is to the decoder: it reads committed tokens and true target features, and proposes a tree."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from drafters.errors import UserError
from drafters.target import Features


@dataclass(frozen=True)
class DraftTree:
    """Proposed continuations of the last committed token (the root, which is not a node).

    Attributes:
        tokens: (N,) target token ids.
        parents: (N,) index of each node's parent, -1 for children of the root; parents precede their children.
        q: (N, V) the distribution each token of a *sampled chain* was drawn from, or None for tokens chosen without
            chance or by rank (then verification treats them as one-hot proposals, which is exact for any tree).
    """

    tokens: Tensor
    parents: Tensor
    q: Tensor | None = None

    @staticmethod
    def empty(device: torch.device) -> "DraftTree":
        """No draft: the next step is plain decoding."""
        nothing = torch.empty(0, dtype=torch.long, device=device)
        return DraftTree(nothing, nothing)

    @staticmethod
    def chain(tokens: Tensor, q: Tensor | None = None) -> "DraftTree":
        """A path: each token continues the one before."""
        return DraftTree(tokens, torch.arange(-1, len(tokens) - 1, device=tokens.device), q)


def draw_draft(logits: Tensor, temperature: float, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """One draft a row from the drafter's own distribution: (N, Vd) logits -> (N,) draft ids, and that q, (N, Vd)."""
    q = torch.softmax(logits.float() / temperature, dim=-1)
    noise = torch.empty_like(q).exponential_(generator=generator)
    return (q / noise).argmax(-1), q


MOST = 4096
"""Nodes in a round; their mask alone takes the square of it."""


@dataclass(frozen=True)
class DraftSettings:
    """How much a drafter proposes each round."""

    kind: str = "chain"
    """"chain" or "tree"."""
    length: int = 4
    """Longest path: chain length or tree depth. 0 turns speculation off."""
    top_k: int = 4
    """Tree: children looked at per node, and nodes expanded per level."""
    total: int = 16
    """Tree: nodes sent to the target."""
    sample: bool = False
    """Chain at temperature > 0: draw from the drafter's distribution (rule min(1, p/q)) instead of its argmax."""
    min_confidence: float = 0.0
    """Stop deepening where even the best path falls below this probability by the drafter's own estimate (EAGLE
    only; OPT-Tree, arXiv 2406.17276, stops so too). 0 never stops early and spares one transfer to the host a level."""

    def __post_init__(self) -> None:
        if self.kind not in ("chain", "tree"):
            raise UserError(f"draft kind={self.kind!r}: chain or tree is allowed")
        sizes = (self.length, self.top_k, self.total)
        if self.length < 0 or min(sizes[1:]) < 1 or max(sizes) > MOST:
            raise UserError(
                f"draft length={self.length}, top_k={self.top_k}, total={self.total}: "
                f"0, 1 and 1 are the least, {MOST} the most"
            )
        if not 0 <= self.min_confidence < 1:
            raise UserError(f"draft min_confidence={self.min_confidence}: a probability below 1 is needed, 0 for none")
        if self.sample and self.kind == "tree":
            raise UserError("sampled drafts are exact on chains only; use a chain, or a tree with sample=False")

    @staticmethod
    def from_flags(chain: str | int | None, tree: str | None) -> "DraftSettings | None":
        """Reads `--chain LENGTH` or `--tree TOTAL,DEPTH,TOPK`; None where neither is given.

        Raises:
            UserError: not whole numbers, or out of range.
        """
        try:
            if chain is not None:
                return DraftSettings("chain", int(chain))
            if tree is not None:
                total, depth, top_k = (int(number) for number in tree.split(","))
                return DraftSettings("tree", depth, top_k, total)
        except ValueError as error:
            given = f"--chain {chain}" if chain is not None else f"--tree {tree}"
            reason = f" ({error})" if isinstance(error, UserError) else ""
            raise UserError(
                f"{given}{reason}: write --chain LENGTH or --tree TOTAL,DEPTH,TOPK in whole numbers, such as 16,4,4"
            ) from error
        return None

    def describe(self) -> str:
        """For people."""
        if self.length == 0:
            return "off"
        cut = f", while above {self.min_confidence:.2g}" if self.min_confidence else ""
        if self.kind == "chain":
            return f"chain of {self.length}" + (", sampled" if self.sample else "") + cut
        return f"tree of {self.total} (depth {self.length}, top {self.top_k})" + cut

    @property
    def nodes(self) -> int:
        """The most nodes a proposal may have."""
        return self.length if self.kind == "chain" else (self.total if self.length else 0)

    @property
    def rows(self) -> int:
        """The most rows a drafter writes into its own cache while it drafts; a beam writes more than it proposes."""
        return self.length if self.kind == "chain" else self.length * self.top_k


@dataclass(frozen=True)
class Outcome:
    """What became of a proposal; for drafters that learn from it while they decode."""

    tree: DraftTree
    choices: list[int] | None
    """The target's own token after the root and after each node, N + 1 of them; None after a sampled chain."""
    accepted: list[int]
    """Nodes that were emitted, from the root down."""
    seconds: float
    """Time of the whole round."""


class Drafter(Protocol):
    """The contract. One drafter serves many requests, each through a state of its own.

    A drafter may also have

    - `observe(state, outcome)`, which the engine calls last in every round;
    - `propose_batch(states, settings, temperatures, generators)` and `extend_batch(states, tokens, features)`, which do
      for many requests at once, lists in the same order, what `propose` and `extend` do for one;
    - `first_drafts(state, tokens, features, rows)`, which does what `extend` does and returns which token it would have
      drafted first after each of the last rows, (rows,): how it would fare is then known while it is off;
    - `fork(state, rows, capacity)`: a new state that has read the first `rows` tokens and features that `state` has
      read, so that requests with a common prompt prefix can share the target's work on it.
    """

    kind: str
    taps: tuple[int, ...]
    meta: dict[str, Any]
    default_settings: DraftSettings | None

    def begin(self, capacity: int) -> Any:
        """A fresh state for a request of at most `capacity` tokens, drafts included."""

    def extend(self, state: Any, tokens: Tensor, features: Features) -> None:
        """Takes newly committed tokens, each with the target features of the position *before* it.

        Args:
            state: from `begin`.
            tokens: (M,), x[t+1] for M consecutive positions t, continuing where the last call ended.
            features: final (1, M, D) and taps (1, M, A * D) of the positions t.
        """

    def propose(
        self, state: Any, settings: DraftSettings, temperature: float, generator: torch.Generator | None
    ) -> DraftTree:
        """Drafts what follows the last committed token; never changes what `extend` built."""
