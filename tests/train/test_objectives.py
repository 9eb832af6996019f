"""Alignment by brute force, chunks against a dense loop, and independence from batch and padding."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from drafters.build import build_eagle, build_medusa
from drafters.target import Features
from tests.train.small import encoded_rows
from train.data import collate
from train.features import target_features
from train.objectives import Objective, position_weights, step_weights, supervised
from train.recipe import ObjectiveOptions

KINDS = ("medusa", "hydra", "eagle1", "eagle3")
HEADS = ("medusa", "hydra")
LOSSES = {
    "medusa": {"ce": 0.5, "kl": 1.0, "tv": 0.3},
    "hydra": {"ce": 0.5, "kl": 1.0},
    "eagle1": {"smooth_l1": 1.0, "kl": 0.1, "topk": 0.1},  # with several steps: HASS
    "eagle3": {"kl": 1.0, "ce": 0.2},
}


def build(target, kind, ids=None, warm_layer=True):
    torch.manual_seed(3)
    if kind in HEADS:
        drafter = build_medusa(target, ids, heads=3, zero_blocks=False, kind=kind)
    else:
        drafter = build_eagle(target, ids, version=int(kind[-1]), warm_layer=warm_layer)
    return drafter.train()


def options(kind, **changes):
    values = {"losses": LOSSES[kind], "steps": 3, "decay": 0.8, "decay_reduction": "mean", "top_k": 7, **changes}
    return ObjectiveOptions(**values)


def rows_for(target, count=4, seed=0):
    return collate(encoded_rows(count, seed), 0)


def run(objective, target, batch, weights, noise=None):
    """One forward and backward; returns the output and the gradient of every parameter."""
    features = target_features(target, batch["input_ids"], objective.drafter.taps)
    objective.zero_grad(set_to_none=True)
    out = objective(batch["input_ids"], batch["loss_mask"], features, weights, noise)
    out["loss"].backward()
    return out, {name: p.grad for name, p in objective.drafter.named_parameters()}


def close(one, two, tolerance=1e-6):
    """Within `tolerance` of each tensor's own size."""
    for name in one:
        gap = (one[name] - two[name]).abs().max() / two[name].abs().max().clamp(min=1.0)
        assert gap <= tolerance, (name, gap.item())


@pytest.fixture(scope="module")
def some_ids(target):
    """A draft vocabulary that lacks most of the text's tokens."""
    torch.manual_seed(5)
    return torch.randperm(target.vocab_size)[:150].sort().values


def test_step_weights():
    assert step_weights(3, 0.5, "sum") == [1.0, 0.5, 0.25]
    assert step_weights(3, 0.5, "mean") == pytest.approx([4 / 7, 2 / 7, 1 / 7])


@pytest.mark.parametrize("normalization", ["per_token", "per_sequence"])
def test_position_weights_sum_to_one_over_the_global_batch(normalization):
    masks = [torch.tensor(row["loss_mask"]) for row in encoded_rows(5)] + [torch.tensor([0, 0, 1, 0])]  # step 0 only
    counts = [[sum(1 for s in range(2 + j, len(m)) if m[s]) for j in range(3)] for m in masks]
    parts = [position_weights(masks, 3, normalization, slice(start, start + 2)) for start in (0, 2, 4)]
    weights = torch.cat(parts)
    total = (weights * torch.tensor(counts)).sum(0)
    torch.testing.assert_close(total, torch.ones(3))
    if normalization == "per_token":
        assert all(torch.equal(row, weights[0]) for row in weights)
    else:
        rows = weights * torch.tensor(counts)
        torch.testing.assert_close(rows[:5, 1], torch.full((5,), 1 / 5))
        assert rows[5].tolist() == pytest.approx([1 / 6, 0, 0])


def test_supervised_pairs_by_brute_force():  # pitfalls 21, 22
    batch = collate(encoded_rows(4, seed=7), 0)
    mask, steps = batch["loss_mask"], 3
    where, has_row = supervised(mask, steps)
    found = {
        (b, s - 2 - j, j) for (b, s), rows in zip(where.tolist(), has_row, strict=True) for j in range(steps) if rows[j]
    }
    B, T = mask.shape
    expected = {
        (b, t, j) for b in range(B) for t in range(T) for j in range(steps) if t + 2 + j < T and mask[b, t + 2 + j]
    }
    assert found == expected and len(expected) > 50


def draft_logits(drafter, features, outs, ids, j, b, t):
    """Step j's draft from row t; heads are asked as the decoder asks them."""
    if drafter.kind == "medusa":
        return drafter.logits(j, features.final[b, t])
    if drafter.kind == "hydra":
        return drafter.logits(j, drafter.reads(features.final[b, t], ids[b, t + 1 : t + 2 + j]))
    return drafter.logits(outs[j][b, t])


def naive(objective, target, batch):
    """The objective again, dense and position by position."""
    drafter, opts, steps = objective.drafter, objective.options, objective.steps
    ids, mask = batch["input_ids"], batch["loss_mask"]
    features = target_features(target, ids, drafter.taps)
    everything = torch.arange(target.vocab_size) if drafter.draft_ids is None else drafter.draft_ids
    outs = drafter.unroll(ids, features, steps)
    weight = [opts.decay**j / sum(opts.decay**i for i in range(steps)) for j in range(steps)]
    total, unweighted, hits = 0.0, [0.0] * steps, [0.0] * steps
    for j in range(steps):
        pairs = [
            (b, t) for b, t in (~mask * 0).add(1).nonzero().tolist() if t + 2 + j < mask.shape[1] and mask[b, t + 2 + j]
        ]
        for b, t in pairs:
            s = t + 2 + j
            draft = draft_logits(drafter, features, outs, ids, j, b, t)
            teacher = target.head(features.final[b, s - 1])[everything]
            value = 0.0
            if opts.losses.get("ce") and ids[b, s] in everything:
                value = value - opts.losses["ce"] * F.log_softmax(draft, -1)[(everything == ids[b, s]).nonzero()[0, 0]]
            if opts.losses.get("kl"):
                cross = F.kl_div(F.log_softmax(draft, -1), F.log_softmax(teacher, -1), log_target=True, reduction="sum")
                value = value + opts.losses["kl"] * cross
            p, log_q = teacher.softmax(-1), F.log_softmax(draft, -1)
            if opts.losses.get("tv"):
                value = value + opts.losses["tv"] * (p - log_q.exp()).abs().sum() / 2
            if opts.losses.get("topk"):
                value = value - opts.losses["topk"] * sum(p[v] * log_q[v] for v in p.topk(7).indices)
            if opts.losses.get("smooth_l1"):
                value = value + opts.losses["smooth_l1"] * F.smooth_l1_loss(outs[j][b, t], features.final[b, s - 1])
            total = total + weight[j] * value / len(pairs)
            unweighted[j] += value.item() / len(pairs)
            hits[j] += float(draft.argmax() == teacher.argmax()) / len(pairs)
    return total, unweighted, hits


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_equal_a_dense_loop(target, some_ids, kind):
    batch = rows_for(target, count=2)
    objective = Objective(build(target, kind, some_ids), target, options(kind))
    expected, steps, hits = naive(objective, target, batch)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in objective.drafter.named_parameters()}
    weights = position_weights(list(batch["loss_mask"]), 3, "per_token", slice(0, 2))
    for chunk in (1, 7, 10_000):
        objective.options = options(kind, chunk=chunk)
        out, found = run(objective, target, batch, weights)
        torch.testing.assert_close(out["loss"], expected, rtol=1e-5, atol=1e-6)
        assert out["steps"].tolist() == pytest.approx(steps, rel=1e-4) and out["hits"].tolist() == pytest.approx(hits)
        close(found, gradients)


class Largest(TorchDispatchMode):
    """Records the most elements that any floating result had."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_all_positions_never_exist(target, kind):  # pitfall 30
    rows = [{"input_ids": [20 + i for i in range(48)], "loss_mask": [0, 0] + [1] * 46}] * 4
    batch = collate(rows, 0)
    objective = Objective(build(target, kind), target, options(kind, chunk=16))
    features = target_features(target, batch["input_ids"], objective.drafter.taps)
    weights = position_weights(list(batch["loss_mask"]), 3, "per_token", slice(0, 4))
    positions = int(batch["loss_mask"].sum())
    with Largest() as largest:
        objective(batch["input_ids"], batch["loss_mask"], features, weights)["loss"].backward()
    assert 0 < largest.numel < positions * target.vocab_size * 0.6  # Hydra's last head reads 4 x 64 numbers a row


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(target, some_ids, kind):
    batch = rows_for(target)
    padded = {"input_ids": F.pad(batch["input_ids"], (0, 9), value=7), "loss_mask": F.pad(batch["loss_mask"], (0, 9))}
    objective = Objective(build(target, kind, some_ids), target, options(kind))
    weights = position_weights(list(batch["loss_mask"]), 3, "per_token", slice(0, 4))
    one, gradients = run(objective, target, batch, weights)
    two, same = run(objective, target, padded, weights)
    torch.testing.assert_close(one["loss"], two["loss"], rtol=1e-5, atol=1e-6)
    close(gradients, same)


@pytest.mark.parametrize("normalization", ["per_token", "per_sequence"])
@pytest.mark.parametrize("kind", KINDS)
def test_batch_splits_give_equal_gradients(target, some_ids, kind, normalization):  # pitfall 36
    rows = encoded_rows(4)
    rows[1]["loss_mask"] = [0] * (len(rows[1]["input_ids"]) - 2) + [1, 0]  # one token only
    masks = [torch.tensor(row["loss_mask"]) for row in rows]
    objective = Objective(build(target, kind, some_ids), target, options(kind))
    seen = []
    for size in (4, 2, 1):
        total, gradients = 0.0, {}
        for start in range(0, 4, size):
            part = slice(start, start + size)
            out, found = run(objective, target, collate(rows[part], 0), position_weights(masks, 3, normalization, part))
            total = total + out["loss"].detach()
            gradients = {name: gradients.get(name, 0) + grad for name, grad in found.items()}
        seen.append((total, gradients))
    for total, gradients in seen[1:]:
        torch.testing.assert_close(total, seen[0][0], rtol=1e-5, atol=1e-6)
        close(gradients, seen[0][1])


@pytest.mark.parametrize("kind", KINDS)
def test_fully_masked_batch_is_a_finite_zero(target, kind):  # pitfalls 27, 33
    batch = rows_for(target)
    masks = [torch.zeros_like(mask) for mask in batch["loss_mask"]]
    batch["loss_mask"] = torch.stack(masks)
    objective = Objective(build(target, kind), target, options(kind))
    out, gradients = run(objective, target, batch, position_weights(masks, 3, "per_token", slice(0, 4)))
    assert out["loss"].item() == 0.0 and not out["steps"].any()
    assert all(grad is not None and not grad.any() for grad in gradients.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", range(3))
def test_every_step_gives_gradient(target, kind, step):  # pitfall 26
    batch = rows_for(target)
    # not warm: EAGLE-1's layer is silent then, and what feeds its output weights waits for them
    objective = Objective(build(target, kind, warm_layer=False), target, options(kind))
    objective.step_weights = [float(j == step) for j in range(3)]
    _, gradients = run(
        objective, target, batch, position_weights(list(batch["loss_mask"]), 3, "per_token", slice(0, 4))
    )
    mine = {n: g for n, g in gradients.items() if kind not in HEADS or n.startswith(f"heads.{step}.")}
    assert mine and all(grad.abs().max() > 0 for grad in mine.values())
    assert all(not grad.any() for name, grad in gradients.items() if name not in mine)


def test_noise_reaches_inputs_only(target):
    batch = rows_for(target)
    objective = Objective(build(target, "eagle1"), target, options("eagle1"))
    features = target_features(target, batch["input_ids"], ())
    weights = position_weights(list(batch["loss_mask"]), 3, "per_token", slice(0, 4))
    noise = torch.rand(features.final.shape) - 0.5
    arguments = batch["input_ids"], batch["loss_mask"], features, weights
    plain, noisy = objective(*arguments)["loss"].item(), objective(*arguments, noise)["loss"].item()
    assert plain != noisy
    fixed = objective._outputs(batch["input_ids"], features)
    read: list[Features] = []
    objective._outputs = lambda ids, seen: read.append(seen) or fixed
    assert objective(*arguments, noise)["loss"].item() == plain
    torch.testing.assert_close(read[0].final, features.final + noise)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_detached_steps_are_the_same_but_train_apart(target, kind):
    batch, drafter = rows_for(target), build(target, kind, warm_layer=False)
    features = target_features(target, batch["input_ids"], drafter.taps)
    plain = drafter.unroll(batch["input_ids"], features, 3)
    apart = drafter.unroll(batch["input_ids"], features, 3, detach=True)
    assert all(torch.equal(one, two) for one, two in zip(plain, apart, strict=True))
    assert torch.autograd.grad(plain[1].sum(), plain[0], retain_graph=True)[0].any()
    assert torch.autograd.grad(apart[1].sum(), apart[0], retain_graph=True, allow_unused=True) == (None,)
    assert all(g.any() for g in torch.autograd.grad(apart[1].sum(), list(drafter.layer.self_attn.parameters())))
    asked = []
    drafter.unroll = lambda ids, seen, steps, detach: asked.append(detach) or plain
    Objective(drafter, target, options(kind, detach=True))._outputs(batch["input_ids"], features)
    assert asked == [True]
