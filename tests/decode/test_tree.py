"""Draft trees as tensors, on a tree drawn here and on random ones."""

import random

import pytest
import torch

from decode.tree import REMEMBERED, ancestors, block_mask, layout, walk

# root -> 0, 1; 0 -> 2, 3; 3 -> 4; 1 -> 5
PARENTS = [-1, -1, 0, 0, 3, 1]
TOKENS = [10, 11, 12, 13, 14, 15]


def test_ancestors_of_a_known_tree():
    # slot 0 is the root, slot i + 1 is node i
    expected = [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 1, 4}, {0, 1, 4, 5}, {0, 2, 6}]
    mask = ancestors(torch.tensor(PARENTS), depth=3)
    assert [set(row.nonzero()[:, 0].tolist()) for row in mask] == expected
    assert torch.equal(mask, ancestors(torch.tensor(PARENTS), depth=9))
    assert torch.equal(ancestors(torch.tensor([], dtype=torch.long), 0), torch.ones(1, 1, dtype=torch.bool))


@pytest.mark.parametrize("seed", range(3))
def test_ancestors_of_random_trees(seed):
    rng = random.Random(seed)
    parents = [rng.randrange(-1, i) for i in range(20)]
    mask = ancestors(torch.tensor(parents), depth=20)
    for i in range(20):
        slots, node = {0}, i
        while node >= 0:
            slots.add(node + 1)
            node = parents[node]
        assert set(mask[i + 1].nonzero()[:, 0].tolist()) == slots


@pytest.mark.parametrize("nodes", [0, 5, REMEMBERED, REMEMBERED + 1])
def test_the_layout_of_a_tree_is_its_own_remembered_or_not(nodes):
    rng = random.Random(nodes)
    for _ in range(3):
        parents = torch.tensor([rng.randrange(-1, i) for i in range(nodes)], dtype=torch.long)
        for _ in range(2):
            slots, depths = layout(parents, depth=max(1, nodes))
            assert torch.equal(slots, ancestors(parents, depth=max(1, nodes)))
            assert torch.equal(depths, slots.sum(1) - 1)


def test_block_mask_sees_the_committed_rows_and_the_path():
    tree = ancestors(torch.tensor([-1, 0, 0]), depth=2)
    mask = block_mask(tree, committed=5)
    assert mask.shape == (1, 1, 4, 9)
    assert mask[..., :5].all()
    assert torch.equal(mask[0, 0, :, 5:], tree)


@pytest.mark.parametrize(
    ("choices", "path", "bonus"),
    [
        ({-1: 99}, [], 99),  # no child
        ({-1: 10, 0: 12, 2: 7}, [0, 2], 7),  # down to a leaf
        ({-1: 10, 0: 13, 3: 14, 4: 8}, [0, 3, 4], 8),
        ({-1: 11, 1: 12}, [1], 12),  # 12 is a child of another node
        ({-1: 14}, [], 14),  # in the tree, but no child of the root
    ],
)
def test_walk(choices, path, bonus):
    by_slot = [choices.get(slot - 1, 0) for slot in range(len(TOKENS) + 1)]
    assert walk(by_slot, TOKENS, PARENTS) == (path, bonus)


def test_walk_takes_one_of_two_equal_siblings():
    assert walk([5, 6, 7], [5, 5], [-1, -1]) == ([0], 6)
