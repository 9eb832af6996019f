"""Medusa heads: each its own, warm from the target, and a static tree of the likeliest paths."""

import itertools

import pytest
import torch

from drafters.base import DraftSettings
from drafters.build import build_medusa
from drafters.medusa import default_rank_hits, static_tree
from drafters.target import Features

SOME = torch.randperm(512, generator=torch.Generator().manual_seed(1))[:100].sort().values
HIDDEN = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def medusa(target):
    torch.manual_seed(0)
    drafter = build_medusa(target, SOME, heads=3, layers=2, zero_blocks=False)
    for weight in drafter.parameters():
        weight.data.normal_(0, 0.3)
    return drafter


def state_of(drafter, hidden=HIDDEN):
    state = drafter.begin(9)
    drafter.extend(state, torch.tensor([1, 2, 3]), Features(hidden, None))
    return state


@pytest.mark.parametrize("draft_ids", [None, SOME])
@torch.no_grad()
def test_a_warm_head_is_the_targets_own(target, draft_ids):
    drafter = build_medusa(target, draft_ids, heads=3, layers=2)
    expected = target.lm_head(HIDDEN)
    for k in range(3):
        own = expected if draft_ids is None else expected[..., draft_ids]
        torch.testing.assert_close(drafter.logits(k, HIDDEN), own)
        torch.testing.assert_close(drafter.trunk(k, HIDDEN) @ drafter.head_weight(k).T, own)


@torch.no_grad()
def test_every_block_of_every_head_is_its_own(medusa):
    before = [medusa.logits(k, HIDDEN) for k in range(3)]
    for k, j in itertools.product(range(3), range(2)):
        medusa.heads[k][j].linear.bias.add_(1.0)
        changed = [not torch.equal(medusa.logits(i, HIDDEN), before[i]) for i in range(3)]
        assert changed == [i == k for i in range(3)]
        medusa.heads[k][j].linear.bias.sub_(1.0)
        before = [medusa.logits(i, HIDDEN) for i in range(3)]


@torch.no_grad()
def test_a_chain_is_each_heads_choice_from_the_newest_state(medusa):
    chain = medusa.propose(state_of(medusa), DraftSettings("chain", length=9))
    expected = [int(SOME[medusa.logits(k, HIDDEN[0, -1]).argmax()]) for k in range(3)]
    assert chain.tokens.tolist() == expected and chain.parents.tolist() == [-1, 0, 1]
    assert medusa.propose(state_of(medusa), DraftSettings(length=2)).tokens.tolist() == expected[:2]
    assert len(medusa.propose(state_of(medusa), DraftSettings(length=0)).tokens) == 0


@torch.no_grad()
def test_a_sampled_chain_reports_its_q(medusa):
    settings, generator = DraftSettings("chain", length=2, sample=True), torch.Generator().manual_seed(0)
    chain = medusa.propose(state_of(medusa), settings, 0.5, generator)
    expected = torch.zeros(512).scatter(0, SOME, (medusa.logits(1, HIDDEN[0, -1]) / 0.5).softmax(-1))
    torch.testing.assert_close(chain.q[1], expected)
    assert (chain.q.gather(1, chain.tokens[:, None]) > 0).all()


@torch.no_grad()
def test_a_tree_holds_the_heads_ranks(medusa):
    tree = medusa.propose(state_of(medusa), DraftSettings("tree", length=3, top_k=4, total=20))
    ranked = [SOME[medusa.logits(k, HIDDEN[0, -1]).topk(4).indices].tolist() for k in range(3)]
    assert len(tree.tokens) == 20 and tree.q is None
    depths = []
    for i, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
        assert -1 <= parent < i
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        assert token in ranked[depths[-1]]
    siblings = list(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    assert len(set(siblings)) == 20 and max(depths) == 2
    medusa.meta["rank_hits"] = [[0.9, 0.0, 0.0], [0.9, 0.0, 0.0], [0.9, 0.0, 0.0]]  # measured: rank 0 is always right
    tree = medusa.propose(state_of(medusa), DraftSettings("tree", length=3, top_k=3, total=3))
    assert tree.tokens.tolist() == [row[0] for row in ranked] and tree.parents.tolist() == [-1, 0, 1]


def test_static_tree_is_the_best_of_all_trees():
    hits = ((0.5, 0.2, 0.1), (0.4, 0.3, 0.05))
    paths = static_tree(hits, 7)
    assert len(set(paths)) == 7
    for i, path in enumerate(paths):
        assert len(path) == 1 or path[:-1] in paths[:i]

    def worth(path):
        value = 1.0
        for k, rank in enumerate(path):
            value *= hits[k][rank]
        return value

    every = [(r,) for r in range(3)] + list(itertools.product(range(3), repeat=2))
    best = sorted(map(worth, every), reverse=True)[:7]
    assert sum(map(worth, paths)) == pytest.approx(sum(best))
    assert len(static_tree(hits, 100)) == 12
    assert default_rank_hits(2, 3)[0][0] > default_rank_hits(2, 3)[1][0] > default_rank_hits(2, 3)[1][1] > 0
