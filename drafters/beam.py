"""EAGLE-2's dynamic draft tree (arXiv 2406.16858), for any drafter whose next guess depends on the path.

Shapes: w beams, Vd draft vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from drafters.base import DraftSettings, DraftTree


def dynamic_tree(
    logits: Tensor,
    advance: Callable[[int, Tensor, Tensor], Tensor],
    to_target: Callable[[Tensor], Tensor],
    settings: DraftSettings,
) -> DraftTree:
    """A tree by cumulative log probability: expand the best `top_k` nodes a level, keep the best `total` of all.

    Args:
        logits: (1, Vd), for the children of the root.
        advance: (level, target tokens (w,) of the nodes to expand, the beam (w,) each grew from) -> (w, Vd) logits for
            their children. Level 0 expands the root's children.
        to_target: draft ids to target ids.
        settings: of kind "tree", at least one level.
    """
    device = logits.device
    width = min(settings.top_k, logits.shape[-1])
    scores, tokens, parents = [], [], []  # per level: every candidate
    beam_score = torch.zeros(1, device=device)  # (w,)
    beam_index = torch.full((1,), -1, device=device)  # each beam's index among all candidates; -1 = the root
    count = 0
    for level in range(settings.length):
        best = torch.log_softmax(logits.float(), dim=-1).topk(width, dim=-1)  # (w, width)
        level_scores = (beam_score[:, None] + best.values).flatten()  # (w * width,)
        level_tokens = to_target(best.indices.flatten())
        scores.append(level_scores)
        tokens.append(level_tokens)
        parents.append(beam_index.repeat_interleave(width))
        if level + 1 == settings.length:
            break
        kept = level_scores.topk(min(width, len(level_scores))).indices
        beam_score, beam_index = level_scores[kept], count + kept
        count += len(level_scores)
        logits = advance(level, level_tokens[kept], kept // width)
    return best_subtree(torch.cat(scores), torch.cat(tokens), torch.cat(parents), settings.total)


def best_subtree(scores: Tensor, tokens: Tensor, parents: Tensor, total: int) -> DraftTree:
    """The `total` best candidates; a child never scores above its parent, so with ties broken by age it is a tree."""
    order = torch.sort(scores, descending=True, stable=True).indices[
        :total
    ]  # stable: parents come before equal children
    kept = order.sort().values  # ascending: parents precede children
    index = torch.full((len(scores) + 1,), -1, device=scores.device)
    index[kept] = torch.arange(len(kept), device=scores.device)
    return DraftTree(tokens[kept], index[parents[kept]])  # parent -1 reads the last slot, which stays -1
