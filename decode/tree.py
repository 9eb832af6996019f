"""Draft trees as tensors: who is whose ancestor, how deep, and which path the target agreed with.

A verification block has n + 1 slots: slot 0 is the root (the last committed token), slot i + 1 is draft node i.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

REMEMBERED = 32  # nodes of a tree whose layout is kept: making it anew takes a hundredth of a step


def layout(parents: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """`ancestors` and how deep every slot lies, (n + 1,); not to be written to, for the next tree alike gets the same.

    Args:
        parents: as for `ancestors`.
        depth: no node is deeper than this.
    """
    if parents.device.type == "cpu" and len(parents) <= REMEMBERED:
        return _remembered(tuple(parents.tolist()))
    slots = ancestors(parents, depth)
    return slots, slots.sum(1) - 1


@functools.lru_cache(maxsize=1024)
def _remembered(parents: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    slots = ancestors(torch.tensor(parents), len(parents))
    return slots, slots.sum(1) - 1


def ancestors(parents: Tensor, depth: int) -> Tensor:
    """Boolean (n + 1, n + 1): row i marks slot i itself and every slot on its path from the root.

    Args:
        parents: (n,) parent of each draft node, -1 for children of the root.
        depth: no node is deeper than this.
    """
    own = torch.eye(len(parents) + 1, dtype=torch.bool, device=parents.device)
    parent_slot = torch.cat([parents.new_zeros(1), parents + 1])  # the root is its own parent
    mask = own
    for _ in range(depth):
        mask = own | mask[parent_slot]
    return mask


def block_mask(tree_mask: Tensor, committed: int) -> Tensor:
    """(1, 1, n + 1, committed + n + 1): every slot sees all committed rows and its own path."""
    return F.pad(tree_mask, (committed, 0), value=True)[None, None]


def walk(choices: list[int], tokens: list[int], parents: list[int]) -> tuple[list[int], int]:
    """Follows the target's choices down the tree.

    With `choices[s]` the target's argmax after slot s this is greedy verification; with a draw from the target's
    processed distribution it is the exact rule for any tree chosen without looking at the draws (one-hot proposals,
    `reference/decoding.md`, section a): if the draw is a child, descend, else emit it.

    Args:
        choices: the target's token after each slot, n + 1 of them.
        tokens: of the n draft nodes.
        parents: of the n draft nodes, -1 the root; parents precede children.

    Returns:
        Accepted node indices from the root down, and the bonus token: the target's own choice after the last of them.
    """
    path: list[int] = []
    node = -1
    for i, parent in enumerate(parents):
        if parent == node and tokens[i] == choices[node + 1]:
            node = i
            path.append(i)
    return path, choices[node + 1]


def deepest(parents: list[int]) -> int:
    """Length of the longest path; parents precede children."""
    depths = [0]  # of each slot
    for parent in parents:
        depths.append(depths[parent + 1] + 1)
    return max(depths)
