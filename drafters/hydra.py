"""Hydra heads (arXiv 2402.05109): Medusa heads that also read the tokens drafted before them.

Head k reads h[t] and the target's frozen embeddings of x[t+1] .. x[t+1+k], and predicts x[t+2+k]: the last committed
token and every draft before its own. The first block of a head mixes them into the hidden state; with zero weights it
passes the hidden state on, so a warm start is the target's own head, as in Medusa. Guesses depend on the path, so trees
are dynamic, like EAGLE-2's.

Shapes: B batch, T rows, D hidden width, K heads, w beams, Vd draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.base import DraftSettings, DraftTree, draw_draft
from drafters.beam import grow_tree
from drafters.medusa import MedusaConfig, MedusaDrafter
from drafters.target import Features, Target


class HydraDrafter(MedusaDrafter):
    """K heads in sequence. Arguments as for `MedusaDrafter`; `bind` it to its target before use."""

    kind = "hydra"

    def __init__(self, config: MedusaConfig, draft_ids: Tensor | None = None):
        super().__init__(config, draft_ids)
        self._shared: dict[str, Tensor] = {}  # the target's embedding: never saved or trained

    @staticmethod
    def slots(k: int) -> int:
        """Vectors that head k reads: h[t] and the embeddings of x[t+1] .. x[t+1+k]."""
        return k + 2

    def bind(self, target: Target) -> Self:
        """Shares the target's frozen embedding with the drafter."""
        self._shared["embedding"] = target.embedding.detach()
        return self

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings of the target at unit scale, (..., D): beside the normed h[t] they are often tiny."""
        rows = F.embedding(ids, self._shared["embedding"]).to(self.head_weight(0).dtype)
        return F.rms_norm(rows, rows.shape[-1:], eps=1e-6)

    def reads(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """What head k reads: h[t] (..., D) and x[t+1] .. x[t+1+k] (..., k+1) -> (..., (k+2) * D)."""
        return torch.cat([hidden.to(self.head_weight(0).dtype), self.embed(tokens).flatten(-2)], dim=-1)

    def unroll(self, ids: Tensor, features: Features, steps: int) -> list[Tensor]:
        """See `MedusaDrafter.unroll`: teacher-forced, so head k reads the text's own tokens as its path.

        Rows whose tokens lie past the end of x hold nothing of use and must not be supervised.
        """
        T = ids.shape[1]
        following = [F.pad(ids[:, 1 + i :], (0, min(1 + i, T))) for i in range(steps)]  # row t: x[t+1+i]
        path = torch.stack(following, dim=-1)  # (B, T, K)
        return [self.trunk(k, self.reads(features.final, path[..., : k + 1])) for k in range(steps)]

    def begin(self, capacity: int) -> "HydraState":  # type: ignore[override]
        """See `Drafter.begin`."""
        hidden = self.head_weight(0).new_zeros(self.config.hidden_size)
        return HydraState(hidden, torch.zeros(1, dtype=torch.long, device=hidden.device))

    def extend(self, state: "HydraState", tokens: Tensor, features: Features) -> None:  # type: ignore[override]
        """See `Drafter.extend`: only the newest pair of hidden state and token counts."""
        state.hidden, state.token = features.final[0, -1], tokens[-1:]

    def first_drafts(  # type: ignore[override]
        self, state: "HydraState", tokens: Tensor, features: Features, rows: int
    ) -> Tensor:
        """See `MedusaDrafter.first_drafts`."""
        self.extend(state, tokens, features)
        reads = self.reads(features.final[0, -rows:], tokens[-rows:, None])
        return self._to_target(self.logits(0, reads).argmax(-1))

    def propose(  # type: ignore[override]
        self,
        state: "HydraState",
        settings: DraftSettings,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> DraftTree:
        """See `Drafter.propose`: a greedy or sampled chain, or a dynamic tree."""
        K = min(settings.length, self.config.heads)
        if K == 0:
            return DraftTree.empty(state.token.device)
        if settings.kind == "tree":
            return self._propose_tree(state, settings, K)
        sampled = settings.sample and temperature > 0
        path, dists = state.token, []  # (1 + drafts,)
        for k in range(K):
            logits = self.logits(k, self.reads(state.hidden, path))[None]  # (1, Vd)
            if sampled:
                draft, q = draw_draft(logits, temperature, generator)
                dists.append(self._scatter(q))
            else:
                draft = logits.argmax(-1)
            path = torch.cat([path, self._to_target(draft)])
        return DraftTree.chain(path[1:], torch.cat(dists) if sampled else None)

    def propose_batch(  # type: ignore[override]
        self,
        states: Sequence["HydraState"],
        settings: Sequence[DraftSettings],
        temperatures: Sequence[float],
        generators: Sequence[torch.Generator],
    ) -> list[DraftTree]:
        """See `Drafter`: one by one, for each request is on a path of its own."""
        return [self.propose(*each) for each in zip(states, settings, temperatures, generators, strict=True)]

    def fork(self, state: "HydraState", rows: int, capacity: int) -> "HydraState":  # type: ignore[override]
        """See `Drafter`: nothing counts but the newest pair, which `extend` brings."""
        return self.begin(capacity)

    def _propose_tree(self, state: "HydraState", settings: DraftSettings, depth: int) -> DraftTree:
        paths = state.token[None]  # (w, 1 + drafts): each beam's tokens

        def log_probabilities(head: int) -> Tensor:
            logits = self.logits(head, self.reads(state.hidden.expand(len(paths), -1), paths))
            return torch.log_softmax(logits.float(), dim=-1)

        def advance(tokens: Tensor, origin: Tensor, seen: Tensor, level: int) -> Tensor:
            nonlocal paths
            paths = torch.cat([paths[origin], self._to_target(tokens)[:, None]], dim=1)
            return log_probabilities(level + 1)

        tree = grow_tree(log_probabilities(0), replace(settings, length=depth), advance)
        return DraftTree(self._to_target(tree.tokens), tree.parents)


@dataclass
class HydraState:
    """The newest committed position's final hidden state, (D,), and the token after it, (1,)."""

    hidden: Tensor
    token: Tensor
