"""Medusa-2: stages, base losses by hand, exact resume, what moves and what does not, and the adapter's way to disk."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from decode.engine import DraftSettings, generate
from drafters.adapter import adapted
from drafters.build import build_medusa
from drafters.checkpoint import load_drafter
from drafters.errors import UserError
from tests.tiny import make_target
from tests.train.small import encoded_rows, metrics, small_recipe, target_hash
from train.data import collate
from train.features import target_features
from train.joint import Backbone, JointObjective, head_weight
from train.loop import train
from train.objectives import position_weights
from train.recipe import BackboneOptions, recipe_from_dict
from train.state import read_state

LOOP = sys.modules["train.loop"]
JOINT = {"r": 4, "heads_only": 0.5, "dropout": 0.1, "head_lr_multiple": 2.0, "head_weight": 0.5}


@pytest.fixture
def own():
    """A target that a test may spoil."""
    return make_target(layers=3)


def joint_recipe(folder, name="run", **sections):
    base = {"backbone": JOINT, "drafter": {"kind": "medusa", "heads": 2, "draft_vocab": 100}}
    return small_recipe(folder, "medusa", name=name, **(base | sections))


def objective_for(target, folder, kind="medusa", **options):
    recipe = joint_recipe(folder, backbone=JOINT | {"dropout": 0.0} | options, drafter={"kind": kind, "heads": 2})
    torch.manual_seed(0)
    drafter = build_medusa(target, None, heads=2, zero_blocks=False, kind=kind).train()
    drafter.adapter = Backbone(target, recipe.backbone)
    for name, weight in drafter.adapter.named_parameters():
        if ".B." in name:
            weight.data.normal_(0, 0.1)
    return JointObjective(drafter, target, recipe)


def forward(objective, target, batch, progress):
    objective.progress = progress
    features = target_features(target, batch["input_ids"], ())
    weights = position_weights(list(batch["loss_mask"]), 2, "per_token", slice(0, len(batch["input_ids"])))
    objective.zero_grad(set_to_none=True)
    out = objective(batch["input_ids"], batch["loss_mask"], features, weights)
    out["loss"].backward()
    return out, {name: p.grad.clone() for name, p in objective.drafter.named_parameters()}


# ---- the loop


@pytest.mark.parametrize("lost_after", [2, 5])  # in the first stage, in the second
def test_resumed_equals_uninterrupted(own, tmp_path, monkeypatch, lost_after):
    before, shape = target_hash(own), [name for name, _ in own.model.named_modules()]
    every = {"train": {"save_every_seconds": 1e-9, "eval_every": 2}}
    whole = joint_recipe(tmp_path, "whole", **every)
    train(whole, own)
    killed = joint_recipe(tmp_path, "killed", **every)
    right, calls = LOOP._accumulate, []

    def die(*args):
        calls.append(args)
        if len(calls) > lost_after:
            raise KeyboardInterrupt
        return right(*args)

    monkeypatch.setattr(LOOP, "_accumulate", die)
    with pytest.raises(KeyboardInterrupt):
        train(killed, own)
    monkeypatch.setattr(LOOP, "_accumulate", right)
    assert read_state(Path(killed.output))[1]["step"] == lost_after
    train(killed, own)
    one, two = (read_state(Path(recipe.output)) for recipe in (whole, killed))
    assert one[0].keys() == two[0].keys() and all(torch.equal(t, two[0][n]) for n, t in one[0].items())
    assert any("lora" not in n and n.startswith("optimizer/0/adapter.") for n in one[0])
    assert one[1]["history"] == two[1]["history"] and metrics(whole) == metrics(killed)
    folders = [Path(recipe.output) for recipe in (whole, killed)]
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        a, b = (load_file(folder / file) for folder in folders)
        assert a.keys() == b.keys() and all(torch.equal(t, b[n]) for n, t in a.items())
    # the target is given back as it was, also after the interrupt
    assert target_hash(own) == before and [name for name, _ in own.model.named_modules()] == shape
    assert not any(p.requires_grad for p in own.model.parameters())


def test_stage_one_moves_no_adapter_and_stage_two_moves_all(own, tmp_path, monkeypatch, spy):
    seen, right = [], LOOP._accumulate

    def watch(run, rows):
        seen.append({n: p.detach().clone() for n, p in run.drafter.named_parameters()})
        return right(run, rows)

    monkeypatch.setattr(LOOP, "_accumulate", watch)
    recipe = joint_recipe(tmp_path)
    train(recipe, own)
    assert len(seen) == 6
    tuned = [n for n in seen[0] if n.startswith("adapter.")]
    assert len(tuned) == 3 * 7 * 2 and all(torch.equal(seen[0][n], seen[3][n]) for n in tuned)
    heads = [n for n in seen[0] if n not in tuned]
    assert all(not torch.equal(seen[0][n], seen[3][n]) for n in heads)
    end = {n.removeprefix("weight/"): t for n, t in read_state(Path(recipe.output))[0].items()}
    # B starts at zero, so A has a gradient from the step after B's first
    assert all(not torch.equal(seen[3][n], end[n]) for n in [*tuned, *heads])
    rates = {g["peak_lr"] for g in spy.run.optimizers[0].param_groups}
    assert rates == {1e-3, 5e-4}
    results = json.loads((Path(recipe.output) / "headstart.json").read_text())["results"]
    assert results["target_kl"] > 0


def test_validation_reads_the_adapted_target(own, tmp_path, monkeypatch):
    finals = []
    right = LOOP.validate

    def watch(drafter, target, rows, features, recipe):
        ids = torch.arange(20, 30)[None]
        finals.append(features.target.forward(ids, torch.arange(10)[None]).final)
        return right(drafter, target, rows, features, recipe)

    monkeypatch.setattr(LOOP, "validate", watch)
    train(joint_recipe(tmp_path, train={"eval_every": 3, "lr": 0.05}), own)
    plain = own.forward(torch.arange(20, 30)[None], torch.arange(10)[None]).final
    torch.testing.assert_close(finals[0], plain)  # after stage 1
    assert (finals[1] - plain).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"backbone": {"dropout": 0.1}}, "backbone.dropout=0.1 has no effect without backbone.r"),
        ({"backbone": {"r": 4}, "drafter": {"kind": "eagle3"}}, "with the heads of medusa or hydra, not with eagle3"),
        ({"backbone": {"r": 4, "loss": "tv"}}, "backbone.loss=tv must be one of ce, kl"),
    ],
)
def test_recipes_that_contradict_themselves(change, expected):
    raw = {"output": "x", "drafter": {"kind": "medusa"}} | change
    with pytest.raises(UserError, match=expected):
        recipe_from_dict(raw)


@pytest.mark.parametrize("modules", [("nowhere",), ("lm_head",), ("embed_tokens",)])
def test_modules_that_cannot_be_adapted(own, modules):
    names = [name for name, _ in own.model.named_modules()]
    with pytest.raises(UserError, match="backbone.modules="):
        Backbone(own, BackboneOptions(r=2, modules=modules))
    assert [name for name, _ in own.model.named_modules()] == names


def test_emulated_bfloat16_is_widened_for_the_time_being(own, tmp_path, monkeypatch):
    own.model.to(torch.bfloat16)
    before = {n: w.clone() for n, w in own.model.state_dict().items()}
    dtypes, right = set(), LOOP._accumulate

    def watch(run, rows):
        dtypes.add(own.blocks[0].mlp.up_proj.base_layer.weight.dtype)
        return right(run, rows)

    monkeypatch.setattr(LOOP, "_accumulate", watch)
    monkeypatch.setattr(sys.modules["train.joint"], "native_bf16", lambda device: False)
    train(joint_recipe(tmp_path, target={"device": "cpu", "dtype": "bfloat16"}), own)
    assert dtypes == {torch.float32}
    after = own.model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(w, after[n]) for n, w in before.items())
    assert own.dtype == torch.bfloat16
    load_drafter(tmp_path / "run", own)


# ---- the objective


def test_head_weight_rises_along_a_sine():
    options = BackboneOptions(r=1, heads_only=0.5, head_weight=0.2, head_warmup=0.5)
    found = [head_weight(p, options) for p in (0.5, 0.625, 0.75, 0.9)]
    assert found == pytest.approx([0.0, 0.2 * math.sin(math.pi / 4), 0.2, 0.2])
    assert head_weight(0.5, BackboneOptions(r=1, heads_only=0.5, head_warmup=0.0)) == pytest.approx(0.2)


@pytest.mark.parametrize("loss", ["ce", "kl"])
@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_loss_by_hand(own, tmp_path, kind, loss):
    batch = collate(encoded_rows(2), 0)
    objective = objective_for(own, tmp_path, kind, loss=loss, head_warmup=0.0)
    out, gradients = forward(objective, own, batch, progress=0.75)
    ids, drafter = batch["input_ids"], objective.drafter
    positions = torch.arange(ids.shape[1])[None].expand(len(ids), -1)
    before = own.forward(ids, positions).final.detach()
    objective.zero_grad(set_to_none=True)
    with drafter.adapter.on():
        after = own.forward(ids, positions).final
    outs = drafter.unroll(ids, type("F", (), {"final": after}), 2)
    places = [(b, s) for b, s in batch["loss_mask"].nonzero().tolist() if s >= 2]
    base, heads = 0.0, 0.0
    for b, s in places:
        logq = own.head(after[b, s - 1]).log_softmax(-1)
        p = own.head(before[b, s - 1]).softmax(-1)
        base = base + (-logq[ids[b, s]] if loss == "ce" else (p * (p.log() - logq)).sum()) / len(places)
    for k, weight in enumerate((1 / 1.8, 0.8 / 1.8)):
        own_places = [(b, s) for b, s in places if s >= 2 + k]
        for b, s in own_places:
            logq = (outs[k][b, s - 2 - k] @ drafter.head_weight(k).T).log_softmax(-1)
            p = own.head(after[b, s - 1]).detach().softmax(-1)  # heads learn from the adapted target
            heads = heads + weight * (p * (p.log() - logq)).sum() / len(own_places)
    expected = base + 0.5 * heads
    expected.backward()
    torch.testing.assert_close(out["loss"], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out["base"], base.detach(), rtol=1e-5, atol=1e-5)
    for name, weight in drafter.named_parameters():
        torch.testing.assert_close(gradients[name], weight.grad, rtol=1e-4, atol=1e-5)
        assert gradients[name].abs().max() > 0
    assert all(p.grad is None for n, p in own.model.named_parameters() if "lora" not in n)


def test_stage_one_is_medusa_1_on_the_original_target(own, tmp_path):
    batch = collate(encoded_rows(2), 0)
    objective = objective_for(own, tmp_path)
    out, gradients = forward(objective, own, batch, progress=0.25)
    features = target_features(own, batch["input_ids"], ())
    weights = position_weights(list(batch["loss_mask"]), 2, "per_token", slice(0, 2))
    plain = super(JointObjective, objective).forward(batch["input_ids"], batch["loss_mask"], features, weights)
    assert torch.equal(out["loss"], plain["loss"]) and "base" not in out
    assert all(bool(g.any()) != n.startswith("adapter.") for n, g in gradients.items())  # zeros, but there


@pytest.mark.parametrize("progress", [0.25, 0.75])
def test_padding_changes_nothing_and_an_empty_mask_is_a_finite_zero(own, tmp_path, progress):
    batch = collate(encoded_rows(2), 0)
    objective = objective_for(own, tmp_path)
    one, gradients = forward(objective, own, batch, progress)
    pad = torch.nn.functional.pad
    padded = {"input_ids": pad(batch["input_ids"], (0, 9), value=7), "loss_mask": pad(batch["loss_mask"], (0, 9))}
    two, same = forward(objective, own, padded, progress)
    torch.testing.assert_close(one["loss"], two["loss"], rtol=1e-5, atol=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, same[name], rtol=1e-4, atol=1e-5)
    batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    out, gradients = forward(objective, own, batch, progress)
    assert out["loss"].item() == 0.0 and not any(g.any() for g in gradients.values())


# ---- on disk and in the decoder


@pytest.mark.parametrize("pack", [False, True])
def test_the_saved_adapter_is_the_trained_one(own, tmp_path, monkeypatch, pack):
    if pack:  # the loop that passes the modules by must not pass the adapter by
        assert own.pack().fast is not None
    fast = own.fast
    probe, trained = torch.arange(20, 40)[None], {}
    positions = torch.arange(20)[None]
    right = LOOP.save_drafter

    def watch(drafter, *rest):
        drafter.eval()  # no dropout
        with adapted(drafter):
            trained["final"] = own.forward(probe, positions).final
        return right(drafter, *rest)

    monkeypatch.setattr(LOOP, "save_drafter", watch)
    recipe = joint_recipe(
        tmp_path, train={"lr": 0.03}, data={"source": str(tmp_path / "rows-12.jsonl"), "validation_rows": 0}
    )
    train(recipe, own)
    drafter = load_drafter(recipe.output, own)
    before = own.forward(probe, positions).final
    with adapted(drafter):
        after = own.forward(probe, positions).final
        plain = generate(own, None, [5, 6, 7], max_new_tokens=12, eos_token_ids=()).tokens
        for settings in (DraftSettings(length=2), DraftSettings("tree", 2, 3, 6)):
            out = generate(own, drafter, [5, 6, 7], max_new_tokens=12, settings=settings, eos_token_ids=())
            assert out.tokens == plain  # lossless for the adapted target
    torch.testing.assert_close(after, trained["final"], rtol=1e-4, atol=1e-4)
    assert (after - before).abs().max() > 1e-2 and torch.equal(own.forward(probe, positions).final, before)
    assert own.fast is fast
    assert sorted(p.name for p in (Path(recipe.output) / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
