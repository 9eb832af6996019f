"""Each loss by hand, against its formula, at its minimum, and its gradient."""

import math
from functools import partial
from typing import get_args

import pytest
import torch

from train.losses import LOGIT_LOSSES, ce, kl, lk, nla, smooth_l1, topk
from train.recipe import Loss

P, Q = (0.25, 0.75), (0.5, 0.5)  # the target's and the drafter's distribution
ALPHA = 0.75  # 0.25 + 0.5
KL = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
WEIGHT = math.exp(-3 * ALPHA)
M = (0.375, 0.625)
BY_HAND = {
    "ce": -math.log(0.5),
    "kl": KL,
    "reverse_kl": 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75),
    "js": 0.5 * sum(p * math.log(p / m) + q * math.log(q / m) for p, q, m in zip(P, Q, M, strict=True)),
    "tv": 0.25,
    "nla": -math.log(ALPHA),
    "lk": WEIGHT * KL + (1 - WEIGHT) * (1 - ALPHA),
    "topk": -math.log(0.5),  # k = 10 is all: -sum p log q
}
DISTANCES = ("kl", "reverse_kl", "js", "tv", "nla", "lk")


def logits(*rows):
    return torch.tensor(rows, dtype=torch.float64).log() + 3.0  # logits of the same distribution


def random_logits(rows=4, size=12, seed=0, scale=1.5):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(rows, size, generator=generator, dtype=torch.float64)


def test_every_loss_of_a_recipe_is_there():
    assert {*LOGIT_LOSSES, "smooth_l1"} == set(get_args(Loss)) and BY_HAND.keys() == LOGIT_LOSSES.keys()


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name):
    one_hot = logits((1 - 1e-12, 1e-12))
    loss = LOGIT_LOSSES[name](torch.cat([logits(Q), one_hot]), torch.cat([logits(P), one_hot]), torch.tensor([1, 0]))
    assert loss.tolist() == pytest.approx([BY_HAND[name], 0.0], abs=1e-9)  # and 0 where both are sure of one token


def test_ce_skips_what_the_draft_vocabulary_lacks():
    found = ce(logits(P, P, Q), logits(Q, Q, Q), torch.tensor([1, 0, -1]))
    assert found.tolist() == pytest.approx([-math.log(0.75), -math.log(0.25), 0.0])


def test_topk_takes_the_targets_likeliest_only():
    p, q = (0.1, 0.5, 0.1, 0.3), (0.4, 0.3, 0.2, 0.1)
    found = topk(logits(q), logits(p), torch.tensor([0]), k=2)
    assert found.item() == pytest.approx(-0.5 * math.log(0.3) - 0.3 * math.log(0.1))


def test_smooth_l1_by_hand():
    distance = smooth_l1(torch.tensor([[0.5, -2.0], [1.0, 1.0]]), torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    assert distance.tolist() == pytest.approx([(0.5 * 0.25 + 1.5) / 2, 0.0])


@pytest.mark.parametrize("name", DISTANCES)
def test_the_target_itself_is_the_minimum(name):
    target = random_logits()
    draft = (target + 7.0).requires_grad_()
    loss = LOGIT_LOSSES[name](draft, target, torch.zeros(4, dtype=torch.long))
    loss.sum().backward()
    assert loss.abs().max() < 1e-9
    assert draft.grad.abs().max() < 1e-9 or name in ("tv", "nla", "lk")  # these have a kink there
    for seed in range(1, 20):  # near and far, it only grows
        other = target + 0.3 * seed * random_logits(seed=seed)
        assert (LOGIT_LOSSES[name](other, target, torch.zeros(4, dtype=torch.long)) > 1e-4).all(), seed


def test_topk_is_least_at_the_target_within_its_first_k():
    target = logits((0.1, 0.5, 0.1, 0.3))
    best = torch.tensor([[1e-9, 0.5, 1e-9, 0.3]]).double().log().requires_grad_()
    topk(best, target, torch.tensor([0]), k=2).sum().backward()
    assert best.grad.abs().max() < 1e-6
    assert topk(target, target, torch.tensor([0]), k=2) > topk(best, target, torch.tensor([0]), k=2)


@pytest.mark.parametrize("name", LOGIT_LOSSES)
def test_gradients(name):
    draft, target = random_logits(seed=1).requires_grad_(), random_logits(seed=2)
    loss = partial(LOGIT_LOSSES[name], target_logits=target, labels=torch.tensor([0, 3, -1, 11]))
    if name == "lk":  # its weight is not differentiated, so hold it while the numbers are taken
        weight = torch.exp(-3 * torch.minimum(draft.softmax(-1), target.softmax(-1)).sum(-1)).detach()

        def held(x):
            q, p = x.softmax(-1), target.softmax(-1)
            return weight * (p * (p.log() - q.log())).sum(-1) + (1 - weight) * (1 - torch.minimum(p, q).sum(-1))

        torch.testing.assert_close(loss(draft), held(draft))
        mine, theirs = (torch.autograd.grad(f(draft).sum(), draft)[0] for f in (loss, held))
        torch.testing.assert_close(mine, theirs)
        loss = held
    assert torch.autograd.gradcheck(loss, draft)


def test_nla_has_a_gradient_where_no_token_would_be_accepted():
    draft = torch.tensor([[0.0, 200.0]], requires_grad=True)  # float32: the overlap itself underflows
    loss = nla(draft, -draft.detach(), torch.tensor([0]))
    loss.sum().backward()
    assert loss.item() == pytest.approx(200.0 - math.log(2), rel=1e-5) and draft.grad.abs().max() > 0.4


def test_lk_goes_from_kl_to_the_rejections():
    target, none = logits(P), torch.tensor([0])
    assert torch.equal(lk(logits(Q), target, none, eta=0.0), kl(logits(Q), target, none))
    assert lk(logits(Q), target, none, eta=100.0).item() == pytest.approx(1 - ALPHA)
