"""EAGLE-2's dynamic tree (arXiv 2406.16858) for any drafter that drafts step by step with a cache of its own."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from drafters.base import DraftSettings, DraftTree

Advance = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""(tokens (w,), origin (w,), seen (w, drafted), level) -> (w, Vd) log probabilities after each token.

`origin` is the row of the level before that each token continues; `seen` says which drafted rows lie on its path.
"""


def grow_tree(first: Tensor, settings: DraftSettings, advance: Advance) -> DraftTree:
    """Expands the `top_k` candidates of greatest cumulative log probability a level, and keeps `total` of all.

    Args:
        first: (1, Vd) log probabilities after the last committed token.
        settings: a tree of at least one level.
        advance: runs the drafter over the candidates that are expanded at a level (0 is the root's children).

    Returns:
        A tree over the drafter's own vocabulary; of fewer levels where the best path falls below `min_confidence`.
    """
    device, width = first.device, min(settings.top_k, first.shape[1])
    logp = first
    scores, tokens, parents = [], [], []  # per level: every candidate
    beam_score = torch.zeros(1, device=device)  # (w,)
    beam_index = torch.full((1,), -1, device=device)  # each beam's index among all candidates; -1 = the root
    beam_seen = torch.zeros(1, 0, dtype=torch.bool, device=device)  # (w, draft rows so far): own branch
    count = 0
    for level in range(settings.length):
        best = logp.topk(width, dim=-1)
        level_scores = (beam_score[:, None] + best.values).flatten()  # (w * width,)
        if settings.min_confidence and float(level_scores.max()) < math.log(settings.min_confidence):
            break
        level_tokens = best.indices.flatten()
        scores.append(level_scores)
        tokens.append(level_tokens)
        parents.append(beam_index.repeat_interleave(width))
        if level + 1 == settings.length:
            break
        kept = level_scores.topk(min(width, len(level_scores))).indices  # (w',)
        origin = kept // width  # the beam each kept candidate grew from
        beam_score, beam_index = level_scores[kept], count + kept
        count += len(level_scores)
        # rows this level writes: visible to themselves and to their own descendants
        own = torch.eye(len(kept), dtype=torch.bool, device=device)
        beam_seen = torch.cat([beam_seen[origin], own], dim=1)
        logp = advance(level_tokens[kept], origin, beam_seen, level)
    if not tokens:
        return DraftTree.empty(device)
    if len(tokens) == 1:  # the best come first already
        return DraftTree(tokens[0][: settings.total], parents[0][: settings.total])
    return _best_subtree(torch.cat(scores), torch.cat(tokens), torch.cat(parents), settings.total)


def _best_subtree(scores: Tensor, tokens: Tensor, parents: Tensor, total: int) -> DraftTree:
    """The `total` best candidates; a child never scores above its parent, so with ties broken by age it is a tree."""
    order = torch.sort(scores, descending=True, stable=True).indices[
        :total
    ]  # stable: parents come before equal children
    kept = order.sort().values  # ascending: parents precede children
    index = torch.full((len(scores) + 1,), -1, device=scores.device)
    index[kept] = torch.arange(len(kept), device=scores.device)
    return DraftTree(tokens[kept], index[parents[kept]])  # parent -1 reads the last slot, which stays -1
