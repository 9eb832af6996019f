"""Draft vocabulary: the subset of the target's tokens a drafter may propose."""

import torch
from torch import Tensor

from drafters.errors import UserError

PRIOR = 0.1


def choose_draft_vocab(counts: Tensor, size: int | float | None, always: tuple[int, ...] = ()) -> Tensor | None:
    """Chooses the tokens a drafter may propose by how often they are supervised (FR-Spec, arXiv 2502.14856).

    Args:
        counts: (V,) how often each token is a supervised target in the training text.
        size: number of tokens; or a share in (0, 1) of the supervised tokens that must be covered; None: all.
        always: ids that are kept whatever their count (end of turn).

    Returns:
        (Vd,) ascending token ids, or None for the full vocabulary.

    Raises:
        UserError: a size that is not in 1..V.
    """
    V = len(counts)
    if size is None or size == V:
        return None
    if isinstance(size, float) and not 0 < size < 1 or not isinstance(size, float) and not 1 <= size <= V:
        raise UserError(f"drafter.draft_vocab={size}: a size of 1..{V}, a share between 0 and 1, or null is allowed")
    # Rare tokens are counted badly in a small text. BPE numbers its tokens in the order of their merges, so the id is a
    # weak prior: for SmolLM2 it raised the share of other prompts' tokens covered from .81 to .82 (4k) at 50k tokens.
    prior = 1.0 / (torch.arange(V, dtype=torch.float64) + 200)
    ranked = counts.double() + PRIOR * counts.sum() * prior
    ranked[list(always)] = 2.0 * float(counts.sum()) + 1.0
    order = torch.argsort(ranked, descending=True, stable=True)  # ties: the lower id, so that the choice is repeatable
    if isinstance(size, float):
        covered = counts[order].double().cumsum(0) / counts.sum().clamp(min=1)
        size = max(int((covered < size).sum()) + 1, len(always), 1)
    return order[: int(size)].sort().values


def to_offsets(ids: Tensor) -> Tensor:
    """(Vd,) ascending target ids -> int64 offsets: target id = draft id + offset (`d2t` on disk)."""
    return ids - torch.arange(len(ids), device=ids.device)


def from_offsets(d2t: Tensor, vocab_size: int) -> Tensor:
    """Offsets -> ascending target ids.

    Raises:
        UserError: ids that are not ascending, distinct and within the vocabulary (an absolute map, say).
    """
    ids = d2t.long() + torch.arange(len(d2t), device=d2t.device)
    if bool((ids[1:] <= ids[:-1]).any()) or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise UserError(
            f"d2t does not hold offsets of ascending target ids below {vocab_size} "
            "(target id = draft id + offset); is it an absolute map?"
        )
    return ids


def coverage(counts: Tensor, ids: Tensor | None) -> float:
    """Share of the supervised tokens that the draft vocabulary can propose."""
    return 1.0 if ids is None else float(counts[ids].sum() / counts.sum().clamp(min=1))
