"""Hydra heads: what training unrolls is what decoding does, and guesses follow the path they are on."""

import pytest
import torch

from drafters.base import DraftSettings
from drafters.build import build_medusa
from drafters.target import Features

HEADS, T = 3, 10
IDS = torch.randint(512, (2, T), generator=torch.Generator().manual_seed(0))
SOME = torch.randperm(512, generator=torch.Generator().manual_seed(1))[:100].sort().values
HIDDEN = torch.randn(2, T, 64, generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def hydra(target):
    torch.manual_seed(0)
    drafter = build_medusa(target, SOME, heads=HEADS, layers=2, zero_blocks=False, kind="hydra")
    for weight in drafter.parameters():
        weight.data.normal_(0, 0.3)
    return drafter


def state_of(hydra, row=0, t=T - 2):
    """With x[0..t+1] committed."""
    state = hydra.begin(T + 5)
    hydra.extend(state, IDS[row, 1 : t + 2], Features(HIDDEN[row : row + 1, : t + 1], None))
    return state


def step_logits(hydra, state, path):
    """The decoder's logits after these drafts."""
    tokens = torch.cat([state.token, torch.tensor(path, dtype=torch.long)])
    return hydra.logits(len(path), hydra.reads(state.hidden, tokens))


@pytest.mark.parametrize("draft_ids", [None, SOME])
@torch.no_grad()
def test_a_warm_head_is_the_targets_own(target, draft_ids):
    drafter = build_medusa(target, draft_ids, heads=HEADS, layers=2, kind="hydra")
    expected = target.lm_head(HIDDEN)
    expected = expected if draft_ids is None else expected[..., draft_ids]
    for k, out in enumerate(drafter.unroll(IDS, Features(HIDDEN, None), HEADS)):
        torch.testing.assert_close(out @ drafter.head_weight(k).T, expected)


@torch.no_grad()
def test_teacher_forced_training_equals_decoding(hydra):
    outs = hydra.unroll(IDS, Features(HIDDEN, None), HEADS)
    compared = 0
    for row in range(2):
        for t in range(T - 1):
            state = state_of(hydra, row, t)
            for k in range(min(HEADS, T - 1 - t)):  # fed the true tokens instead of its own
                found = step_logits(hydra, state, IDS[row, t + 2 : t + 2 + k].tolist())
                expected = outs[k][row, t] @ hydra.head_weight(k).T
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
                compared += 1
    assert compared == 2 * sum(min(HEADS, T - 1 - t) for t in range(T - 1))


@torch.no_grad()
def test_head_k_reads_the_tokens_up_to_its_own_and_no_other(hydra):
    before = hydra.unroll(IDS, Features(HIDDEN, None), HEADS)
    changed = IDS.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 512
    after = hydra.unroll(changed, Features(HIDDEN, None), HEADS)
    for k in range(HEADS):  # row t of head k reads x[t+1] .. x[t+1+k]
        moved = (before[k] != after[k]).any(-1)[0].nonzero()[:, 0].tolist()
        assert moved == list(range(4 - k, 5))


@torch.no_grad()
def test_a_chain_is_the_step_by_step_choice(hydra):
    state, path = state_of(hydra), []
    for _ in range(HEADS):
        path.append(int(SOME[step_logits(hydra, state, path).argmax()]))
    chain = hydra.propose(state, DraftSettings("chain", length=9))
    assert chain.tokens.tolist() == path and chain.parents.tolist() == [-1, 0, 1] and chain.q is None
    assert hydra.propose(state, DraftSettings(length=1)).tokens.tolist() == path[:1]
    assert len(hydra.propose(state, DraftSettings(length=0)).tokens) == 0


@torch.no_grad()
def test_a_sampled_chain_reports_the_q_it_was_drawn_from(hydra):
    settings, generator = DraftSettings("chain", length=HEADS, sample=True), torch.Generator().manual_seed(0)
    state = state_of(hydra)
    chain = hydra.propose(state, settings, 0.5, generator)
    tokens = chain.tokens.tolist()
    for k in range(HEADS):
        q = (step_logits(hydra, state, tokens[:k]) / 0.5).softmax(-1)
        torch.testing.assert_close(chain.q[k], torch.zeros(512).scatter(0, SOME, q))
    assert (chain.q.gather(1, chain.tokens[:, None]) > 0).all()
    assert hydra.propose(state, settings, 0.0, generator).q is None


@torch.no_grad()
def test_a_tree_follows_each_nodes_own_path(hydra):
    state = state_of(hydra)
    tree = hydra.propose(state, DraftSettings("tree", length=HEADS, top_k=3, total=100))
    parents, tokens = tree.parents.tolist(), tree.tokens.tolist()
    paths, depths = [], set()
    for token, parent in zip(tokens, parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    for node in {-1, *parents}:
        path = paths[node] if node >= 0 else []
        best = SOME[step_logits(hydra, state, path).topk(3).indices].tolist()
        assert {tokens[i] for i, p in enumerate(parents) if p == node} == set(best)
        depths.add(len(path))
    assert depths == {0, 1, 2} and len(tokens) == 3 + 9 + 9
    few = hydra.propose(state, DraftSettings("tree", length=9, top_k=1, total=9))
    assert few.tokens.tolist() == hydra.propose(state, DraftSettings(length=9)).tokens.tolist()
