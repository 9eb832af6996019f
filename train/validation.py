"""What a drafter would be accepted, estimated on held-out text: joint prefixes, never products of marginals.

Greedy decoding follows the target's argmax. A window starts at row t and is at risk at depth j while the text itself
followed the target's argmax and every draft before j was right; a depth where the text left the argmax ends the window
without a verdict (Kaplan-Meier). Tokens outside the draft vocabulary are misses.

Shapes: B rows, T positions, n depths, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.adapter import adapted
from drafters.build import TrainedDrafter
from drafters.medusa import MedusaDrafter
from drafters.target import Target
from train.data import EncodedData
from train.features import FeatureStore, target_features
from train.recipe import Recipe

TREE_RANKS = 4
DEPTHS = 5


@dataclass(frozen=True)
class Estimate:
    """Acceptance estimated from teacher-forced drafts."""

    conditional: list[float]
    """By depth: share right among windows where all before was right."""
    tree_conditional: list[float]
    """The same when any of the first `TREE_RANKS` choices counts as right."""
    rank_hits: list[list[float]]
    """[depth][rank]: how often the choice of that rank is the target's token, whatever came before."""

    @property
    def survival(self) -> list[float]:
        """Share of windows accepted at least so deep."""
        return _running_product(self.conditional)

    @property
    def tau(self) -> float:
        """Tokens per target step of a chain as deep as measured, the target's own included."""
        return 1.0 + sum(self.survival)

    @property
    def tree_tau(self) -> float:
        """The same for a tree that holds every combination of the first choices: an upper bound for smaller trees."""
        return 1.0 + sum(_running_product(self.tree_conditional))

    def survival_text(self) -> str:
        """For a log line."""
        return " ".join(f"{s:.3f}" for s in self.survival)

    def to_dict(self) -> dict:
        """For `headstart.json`."""
        return {
            "tau_estimate": self.tau,
            "tree_tau_estimate": self.tree_tau,
            "survival_estimate": self.survival,
            "conditional_estimate": self.conditional,
        }


def _running_product(values: list[float]) -> list[float]:
    out, product = [], 1.0
    for value in values:
        product *= value
        out.append(product)
    return out


@torch.no_grad()
def validate(
    drafter: TrainedDrafter, target: Target, rows: EncodedData, features: FeatureStore, recipe: Recipe
) -> Estimate:
    """Estimates acceptance on held-out rows.

    Args:
        drafter: in evaluation mode.
        target: for its argmax over the whole vocabulary.
        rows: held-out rows.
        features: of those rows.
        recipe: `train.micro_batch` and the unroll depth are read.
    """
    depths = drafter.config.heads if isinstance(drafter, MedusaDrafter) else max(DEPTHS, recipe.objective.steps)
    counts = torch.zeros(3, depths, dtype=torch.float64)  # windows at risk, right by first choice, ... by any rank
    tree_at_risk = torch.zeros(depths, dtype=torch.float64)
    ranks = torch.zeros(depths, TREE_RANKS + 1, dtype=torch.float64)
    size = recipe.train.micro_batch
    for start in range(0, len(rows), size):
        picked = list(range(start, min(start + size, len(rows))))
        batch = rows.batch(picked, features.pad_id)
        ids, mask = batch["input_ids"].to(target.device), batch["loss_mask"].to(target.device)
        taught = features.get(picked, ids)
        outs = drafter.unroll(ids, taught, depths)
        argmax = _argmax(target, taught.final, mask)  # (B, T): the target's choice for x[t], -1 where not supervised
        b, t = ((argmax[:, 2:] >= 0) & (argmax[:, 1:-1] == ids[:, 1:-1])).nonzero(
            as_tuple=True
        )  # root x[t+1] on its path
        alive, tree_alive = torch.ones_like(t, dtype=torch.bool), torch.ones_like(t, dtype=torch.bool)
        followed = torch.ones_like(alive)
        for j in range(depths):
            s = t + 2 + j  # step j predicts x[s] from row t
            inside = s < ids.shape[1]
            wanted = torch.where(inside, argmax[b, s.clamp(max=ids.shape[1] - 1)], -1)
            followed &= wanted >= 0
            rank = _rank(drafter, outs[j][b, t], j, wanted)  # (W,), TREE_RANKS when not among them
            at_risk, tree_risk = followed & alive, followed & tree_alive
            right, any_right = rank == 0, rank < TREE_RANKS
            counts[0, j] += at_risk.sum().item()
            counts[1, j] += (at_risk & right).sum().item()
            tree_at_risk[j] += tree_risk.sum().item()
            counts[2, j] += (tree_risk & any_right).sum().item()
            ranks[j] += torch.bincount(rank[followed], minlength=TREE_RANKS + 1).cpu().double()
            alive, tree_alive = alive & right, tree_alive & any_right
            followed &= wanted == ids[b, s.clamp(max=ids.shape[1] - 1)]  # else the text goes its own way from here
    conditional = (counts[1] / counts[0].clamp(min=1)).tolist()
    tree_conditional = (counts[2] / tree_at_risk.clamp(min=1)).tolist()
    hits = (ranks / ranks.sum(1, keepdim=True).clamp(min=1))[:, :TREE_RANKS].tolist()
    return Estimate(conditional, tree_conditional, hits)


@torch.no_grad()
def target_kl(drafter: TrainedDrafter, target: Target, rows: EncodedData, micro_batch: int, chunk: int = 256) -> float:
    """How far the adapter moves the target: mean KL(original || adapted) over held-out supervised tokens, in nats."""
    total, count = 0.0, 0
    for start in range(0, len(rows), micro_batch):
        picked = list(range(start, min(start + micro_batch, len(rows))))
        batch = rows.batch(picked, target.tokenizer.pad_token_id or 0)
        ids = batch["input_ids"].to(target.device)
        where = batch["loss_mask"].to(target.device).nonzero()
        b, s = where[where[:, 1] >= 1].unbind(1)
        before = target_features(target, ids, ()).final[b, s - 1]  # (P, D): what predicts x[s]
        with adapted(drafter):
            after = target_features(target, ids, ()).final[b, s - 1]
        for p, q in zip(before.split(chunk), after.split(chunk), strict=True):
            log_p, log_q = (target.head(x).float().log_softmax(-1) for x in (p, q))
            total += float((log_p.exp() * (log_p - log_q)).sum())
        count += len(b)
    return total / max(1, count)


def _argmax(target: Target, final: Tensor, mask: Tensor, chunk: int = 512) -> Tensor:
    """(B, T): the target's most likely token at t given the text before, -1 where token t is not supervised."""
    out = torch.full(mask.shape, -1, device=mask.device)
    where = mask.nonzero()
    where = where[where[:, 1] >= 1]
    for part in where.split(chunk):
        out[part[:, 0], part[:, 1]] = target.head(final[part[:, 0], part[:, 1] - 1]).argmax(-1)
    return out


def _rank(drafter: TrainedDrafter, hidden: Tensor, j: int, wanted: Tensor, chunk: int = 1024) -> Tensor:
    """Rank of the wanted token among the drafter's first choices, (W,); `TREE_RANKS` when it is not there."""
    parts = []
    for h, w in zip(hidden.split(chunk), wanted.split(chunk), strict=True):
        logits = F.linear(h, drafter.head_weight(j)) if isinstance(drafter, MedusaDrafter) else drafter.logits(h)
        best = logits.topk(min(TREE_RANKS, logits.shape[-1]), dim=-1).indices  # (C, ranks)
        best = best if drafter.draft_ids is None else drafter.draft_ids[best]
        hit = best == w[:, None]
        parts.append(torch.where(hit.any(1), hit.int().argmax(1), TREE_RANKS))
    return torch.cat(parts) if parts else wanted.new_zeros(0)
