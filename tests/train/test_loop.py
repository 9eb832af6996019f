"""The loop: exact resume, schedules, what is trained, what is kept, and what is refused."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from drafters.checkpoint import load_drafter
from drafters.errors import UserError
from drafters.files import alone_in
from drafters.target import Features
from tests.tiny import make_target
from tests.train.small import metrics, small_recipe, target_hash
from train.build import check_before_data
from train.loop import _batches, lr_factor, total_steps, train
from train.recipe import recipe_from_dict
from train.state import read_state
from train.validation import Estimate

KINDS = ("medusa", "hydra", "eagle1", "eagle3")
LOOP = sys.modules["train.loop"]


def final_weights(recipe):
    return {n: t for n, t in read_state(Path(recipe.output))[0].items() if n.startswith("weight/")}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("eagle3", {"optimizer": "adamw"}),
        ("medusa", {"optimizer": "muon"}),
        ("eagle1", {"cache_features": False}),
        ("hydra", {}),
    ],
)
@pytest.mark.parametrize("lost", ["in the step", "before the save", "in the validation"])
def test_resumed_equals_uninterrupted(target, tmp_path, monkeypatch, kind, options, lost):  # pitfalls 28, 38
    every = {"train": {**options, "save_every_seconds": 1e-9, "eval_every": 2}, "objective": {"feature_noise": 0.1}}
    whole = small_recipe(tmp_path, kind, rows=14, name="whole", **every)  # 11 rows: 3 steps an epoch
    train(whole, target)
    killed = small_recipe(tmp_path, kind, rows=14, name="killed", **every)
    name = {"in the step": "_accumulate", "before the save": "_save", "in the validation": "save_drafter"}[lost]
    right, steps = getattr(LOOP, name), []

    def die(*args):
        steps.append(args[0])
        if len(steps) == (5 if name != "save_drafter" else 1):
            raise KeyboardInterrupt
        return right(*args)

    monkeypatch.setattr(LOOP, name, die)
    with pytest.raises(KeyboardInterrupt):
        train(killed, target)
    monkeypatch.setattr(LOOP, name, right)
    state = read_state(Path(killed.output))
    assert state[1]["step"] == (1 if name == "save_drafter" else 4)
    train(killed, target)
    one, two = (read_state(Path(recipe.output)) for recipe in (whole, killed))
    assert one[0].keys() == two[0].keys() and any(n.startswith("optimizer/") for n in one[0])
    assert all(torch.equal(tensor, two[0][n]) for n, tensor in one[0].items())
    assert one[1]["step"] == two[1]["step"] == 6 and one[1]["history"] == two[1]["history"]
    assert metrics(whole) == metrics(killed)  # no step twice
    steps = [line["step"] for line in metrics(killed) if "train/lr" in line]
    assert steps == [1, 2, 3, 4, 5, 6]
    best = [load_file(Path(recipe.output) / "model.safetensors") for recipe in (whole, killed)]
    assert all(torch.equal(tensor, best[1][n]) for n, tensor in best[0].items())


def test_a_state_without_a_scale_goes_on_without_one(target, tmp_path, monkeypatch):
    """As runs saved them before EAGLE-1's embeddings were scaled: its weights stand for another drafter else."""
    recipe = small_recipe(tmp_path, "eagle1", train={"save_every_seconds": 1e-9})
    save = LOOP.save_state

    def before(folder, drafter, optimizers, facts):
        if facts["step"] == 2:
            drafter.scale_embeddings(1.0)
            save(folder, drafter, optimizers, {k: v for k, v in facts.items() if k != "embed_scale"})
            raise KeyboardInterrupt
        save(folder, drafter, optimizers, facts)

    monkeypatch.setattr(LOOP, "save_state", before)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, target)
    monkeypatch.setattr(LOOP, "save_state", save)
    train(recipe, target)
    assert read_state(Path(recipe.output))[1]["embed_scale"] == 1.0
    weight = load_file(Path(recipe.output) / "model.safetensors")["fc.weight"]
    assert torch.equal(weight, final_weights(recipe)["weight/fc.weight"])


def test_finished_run_is_left_alone(target, tmp_path, monkeypatch, capsys):
    recipe = small_recipe(tmp_path)
    train(recipe, target)
    before = {path: path.read_bytes() for path in Path(recipe.output).glob("*.*")}
    monkeypatch.setattr(LOOP, "_accumulate", None)
    train(recipe, target)
    assert {path: path.read_bytes() for path in before} == before and "trained 6 steps" in capsys.readouterr().out


def test_an_interrupt_in_the_last_validation_loses_no_step(target, tmp_path, monkeypatch, capsys):
    recipe, right = small_recipe(tmp_path), LOOP._validate

    def die(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(LOOP, "_validate", die)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, target)
    monkeypatch.setattr(LOOP, "_validate", right)
    monkeypatch.setattr(LOOP, "_accumulate", None)  # would fail if a step were trained again
    train(recipe, target)
    assert "trained 6 steps" in capsys.readouterr().out and load_drafter(recipe.output, target)


def test_order_of_rows_is_a_function_of_seed_and_step(target, tmp_path, spy):
    train(small_recipe(tmp_path, rows=14), target)
    run = spy.run
    run.step = 0
    every = list(_batches(run, 6))
    assert sorted(sum(every[:3], [])) == sorted(sum(every[3:], [])) == list(range(11)) and every[:3] != every[3:]
    for step in range(6):
        run.step = step
        assert list(_batches(run, 6)) == every[step:]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"train": {"lr": 2e-3}}, "train.lr=0.001, not 0.002"),
        ({"train": {"epochs": 3}}, "train.epochs=2.0, not 3.0"),
        ({"drafter": {"train_head": False}}, "drafter.train_head=True, not False"),  # pitfall 42
        ({"seed": 1}, "seed=0, not 1"),
    ],
)
def test_changed_recipe_is_refused(target, tmp_path, change, key):
    train(small_recipe(tmp_path, train={"epochs": 2, "max_steps": 1}), target)
    raw = small_recipe(tmp_path).to_dict()
    raw["train"]["max_steps"] = 1
    for section, values in change.items():
        raw[section] = {**raw[section], **values} if isinstance(values, dict) else values
    with pytest.raises(UserError, match=f"holds a run with {key}; choose another output"):
        train(recipe_from_dict(raw), target)


def test_a_folder_that_is_no_run_is_left_alone(target, tmp_path):
    recipe = small_recipe(tmp_path, "medusa", rows=8)
    train(recipe, target)
    folder, published = Path(recipe.output), tmp_path / "published"
    published.mkdir()
    for name in ("model.safetensors", "config.json", "headstart.json"):
        (published / name).write_bytes((folder / name).read_bytes())
    (folder / "state.safetensors").unlink()
    before = {path: path.read_bytes() for path in (*published.iterdir(), folder / "model.safetensors")}
    for name, init in (("published", None), ("published", str(published)), ("run", str(folder))):
        with pytest.raises(UserError, match="holds a model that this run would overwrite"):
            train(small_recipe(tmp_path, "medusa", rows=8, name=name, drafter={"init": init}), target)
    assert {path: path.read_bytes() for path in before} == before
    train(recipe, target)  # a run without a state begins anew


def test_a_folder_that_another_run_writes_is_left_to_it(target, tmp_path):
    recipe = small_recipe(tmp_path, kind="medusa")
    with alone_in(Path(recipe.output), ""), pytest.raises(UserError, match="in use by another run"):
        train(recipe, target)


def test_what_changes_no_number_may_change(target, tmp_path):
    train(small_recipe(tmp_path, train={"max_steps": 1}), target)
    folder = train(small_recipe(tmp_path, train={"max_steps": 1, "log_every": 7, "trackers": []}), target)
    state = read_state(folder)
    assert state is not None and state[1]["step"] == 1 and state[1]["recipe"]["train"]["max_steps"] == 1


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
@pytest.mark.parametrize(("warmup", "steps"), [(0.2, 2), (3, 3), (0, 0), (1, 1)])
def test_schedule(tmp_path, schedule, warmup, steps):
    recipe = small_recipe(tmp_path, train={"schedule": schedule, "warmup": warmup, "min_lr": 0.1})
    factors = [lr_factor(step, 10, recipe) for step in range(10)]
    assert factors[:steps] == pytest.approx([(k + 1) / steps for k in range(steps)]) and factors[steps] == 1.0
    left = 10 - steps
    shapes = {
        "linear": lambda x: 0.1 + 0.9 * (1 - x),
        "cosine": lambda x: 0.1 + 0.9 * (1 + math.cos(math.pi * x)) / 2,
        "constant": lambda x: 1.0,
    }
    assert factors[steps:] == pytest.approx([shapes[schedule](k / left) for k in range(left)])
    assert lr_factor(10, 10, recipe) == pytest.approx(1.0 if schedule == "constant" else 0.1)


@pytest.mark.parametrize(
    ("epochs", "max_steps", "rows", "expected"), [(2, None, 9, 6), (0.5, None, 16, 2), (0.1, None, 4, 1), (3, 5, 16, 5)]
)
def test_number_of_steps(tmp_path, epochs, max_steps, rows, expected):
    assert total_steps(small_recipe(tmp_path, train={"epochs": epochs, "max_steps": max_steps}), rows) == expected


def test_learning_rate_of_each_step_is_logged(target, tmp_path):
    recipe = small_recipe(tmp_path, train={"epochs": 1.5, "warmup": 2, "optimizer": "muon", "matrix_lr": 1.0})
    train(recipe, target)
    rates = [line["train/lr"] for line in metrics(recipe) if "train/lr" in line]
    total = total_steps(recipe, 9)
    assert len(rates) == total and rates == pytest.approx([1e-3 * lr_factor(k, total, recipe) for k in range(total)])


@pytest.mark.parametrize(("kind", "optimizer"), [*((kind, "adamw") for kind in KINDS), ("eagle3", "muon")])
def test_only_the_drafter_is_trained(target, tmp_path, spy, kind, optimizer):  # pitfalls 20, 29
    before = target_hash(target)
    steps = 50 if optimizer == "adamw" else 10
    changes = {"epochs": 50, "max_steps": steps, "lr": 1e-4, "matrix_lr": 1e-4, "optimizer": optimizer}
    recipe = small_recipe(tmp_path, kind, rows=9, train={**changes, "mixed_precision": "bf16"})
    train(recipe, target)
    run = spy.run
    held = [id(p) for o in run.optimizers for group in o.param_groups for p in group["params"]]
    named = dict(run.drafter.named_parameters())
    assert sorted(held) == sorted(id(p) for p in named.values() if p.requires_grad)
    assert len(run.optimizers) == (2 if optimizer == "muon" else 1)
    assert target_hash(target) == before and not any(p.requires_grad for p in target.model.parameters())
    for name, weight in named.items():  # norms, which a bfloat16 update would leave at 1, too
        assert weight.dtype == torch.float32 and not torch.equal(weight, spy.start[name]), name


def test_frozen_head_stays(target, tmp_path, spy):
    train(small_recipe(tmp_path, "medusa", drafter={"kind": "medusa", "train_head": False, "draft_vocab": 50}), target)
    moved = {name for name, p in spy.run.drafter.named_parameters() if not torch.equal(p, spy.start[name])}
    assert moved == {n for n in spy.start if ".0.linear." in n}


def test_modes_and_real_decode(target, tmp_path, monkeypatch):  # pitfall 28
    modes, decoded = [], []
    right = LOOP._accumulate

    def watch(run, rows):
        modes.append(run.objective.training and run.drafter.training)
        return right(run, rows)

    def decode(drafter, served, prompts):
        assert not drafter.training and served is target and prompts == 3
        decoded.append(len(modes))
        return 1.0 + len(decoded)

    monkeypatch.setattr(LOOP, "_accumulate", watch)
    recipe = small_recipe(tmp_path, train={"eval_every": 1, "decode_every": 4, "decode_prompts": 3})
    train(recipe, target, decode)
    assert modes == [True] * 6 and decoded == [4, 6]
    results = json.loads((Path(recipe.output) / "headstart.json").read_text())["results"]
    assert results["tau_decoded"] == 3.0 and results["step"] == 6


@pytest.mark.parametrize(
    ("kind", "weight", "named"),
    [("medusa", "heads.2.0.linear.bias", "head [2]"), ("eagle3", "fc.weight", "step [0, 1, 2]")],
)
def test_loss_that_is_not_finite(target, tmp_path, monkeypatch, kind, weight, named):  # pitfall 27
    recipe = small_recipe(tmp_path, kind, train={"save_every_seconds": 1e-9})
    right = LOOP._set_lr

    def spoil(run, total):
        right(run, total)
        if run.step == 3:
            with torch.no_grad():
                run.drafter.get_parameter(weight).view(-1)[0] = math.nan

    monkeypatch.setattr(LOOP, "_set_lr", spoil)
    with pytest.raises(UserError) as caught:
        train(recipe, target)
    assert f"loss of {named} is not finite in optimizer step 4, rows [" in str(caught.value)
    tensors, facts = read_state(Path(recipe.output))
    assert facts["step"] == 3 and all(torch.isfinite(t).all() for t in tensors.values() if t.is_floating_point())
    monkeypatch.setattr(LOOP, "_set_lr", right)
    train(recipe, target)


def test_gradient_that_is_not_finite(target, tmp_path, monkeypatch):
    right = LOOP._accumulate

    def spoil(run, rows):
        result = right(run, rows)
        run.drafter.fc.weight.grad.view(-1)[0] = math.inf
        return result

    monkeypatch.setattr(LOOP, "_accumulate", spoil)
    recipe = small_recipe(tmp_path, train={"clip": None})
    with pytest.raises(UserError, match=r"the gradient is not finite in optimizer step 1, rows \["):
        train(recipe, target)
    assert read_state(Path(recipe.output)) is None


def scripted(monkeypatch, taus):
    """Validation answers with these acceptance lengths; returns the weights seen at each."""
    seen = []

    def validate(drafter, *rest):
        seen.append({name: weight.detach().clone() for name, weight in drafter.named_parameters()})
        return Estimate([taus[len(seen) - 1] - 1.0], [0.5], [[0.5] * 4])

    monkeypatch.setattr(LOOP, "validate", validate)
    return seen


def test_the_best_drafter_is_kept(target, tmp_path, monkeypatch):
    seen = scripted(monkeypatch, [1.2, 1.6, 1.1, 1.6, 1.3, 1.4])
    recipe = small_recipe(tmp_path, train={"eval_every": 1})
    train(recipe, target)
    saved = load_file(Path(recipe.output) / "model.safetensors")
    assert all(torch.equal(saved[name], weight) for name, weight in seen[1].items())
    meta = json.loads((Path(recipe.output) / "headstart.json").read_text())
    assert meta["results"]["step"] == 2 and meta["results"]["tau_estimate"] == pytest.approx(1.6)
    assert meta["data"]["samples"] == 9 and meta["recipe"] == recipe.to_dict() and meta["rank_hits"] == [[0.5] * 4]


def test_without_validation_rows_the_latest_is_kept(target, tmp_path):
    recipe = small_recipe(
        tmp_path, train={"eval_every": 2}, data={"source": str(tmp_path / "rows-12.jsonl"), "validation_rows": 0}
    )
    train(recipe, target)
    saved = load_file(Path(recipe.output) / "model.safetensors")
    assert all(torch.equal(saved[n.removeprefix("weight/")], t) for n, t in final_weights(recipe).items())


def test_a_draft_vocabulary_smaller_than_a_tree_is_wide(target, tmp_path):
    recipe = small_recipe(tmp_path, "medusa", drafter={"draft_vocab": 2}, train={"max_steps": 1})
    train(recipe, target)
    assert len(load_drafter(recipe.output, target).draft_ids) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_is_continued_with_its_own_vocabulary(tmp_path, spy, kind):  # pitfall 40
    target = make_target(layers=3)
    target.model.to(torch.bfloat16)
    first = small_recipe(tmp_path, kind, name="first", train={"max_steps": 1}, target={"dtype": "bfloat16"})
    train(first, target)
    raw = small_recipe(tmp_path, kind, rows=13, name="second", train={"max_steps": 1}).to_dict()
    raw["drafter"] |= {"init": first.output, "draft_vocab": 64}
    train(recipe_from_dict(raw), target)
    assert len(spy.run.drafter.draft_ids) == 100 and all(p.requires_grad for p in spy.run.drafter.parameters())
    saved = load_drafter(first.output, target, dtype=torch.float32)
    if kind == "eagle1":
        saved.scale_embeddings(spy.run.drafter.embed_scale)
    for name, weight in spy.start.items():
        torch.testing.assert_close(weight, dict(saved.named_parameters())[name])
    assert torch.equal(spy.run.drafter.draft_ids, saved.draft_ids)
    raw["drafter"] |= {"kind": next(k for k in KINDS if k != kind)}
    raw |= {"output": str(tmp_path / "third"), "objective": {}}
    with pytest.raises(UserError, match=f"is {kind}, not drafter.kind="):
        train(recipe_from_dict(raw), target)


def test_a_continued_drafter_keeps_its_shape(target, tmp_path):
    for kind, key, value in (("medusa", "heads", 2), ("eagle3", "taps", [0])):
        first = small_recipe(tmp_path, kind, name=f"first-{kind}", train={"max_steps": 1})
        train(first, target)
        asked = {"kind": kind, "init": first.output, key: value}
        with pytest.raises(UserError, match=rf"first-{kind} has drafter.{key}=.*, not .*; remove one of them"):
            train(small_recipe(tmp_path, kind, name="second", drafter=asked), target)


def test_further_norms_come_from_the_recipe_or_the_continued_drafter(target, tmp_path):
    options = {"drafter": {"fc_norm": True, "norm_output": True}, "objective": {"losses": {"lk": 1.0}}}
    recipe = small_recipe(tmp_path, name="first", train={"max_steps": 1}, **options)
    train(recipe, target)
    assert load_drafter(recipe.output, target).config.norms == ("fc_norm", "norm_output")
    check_before_data(small_recipe(tmp_path, name="second", drafter={"init": recipe.output}), target, processes=1)
    other = small_recipe(tmp_path, name="third", drafter={"init": recipe.output, "norm_before_residual": True})
    with pytest.raises(UserError, match="was made without drafter.norm_before_residual=true"):
        check_before_data(other, target, processes=1)


def test_feature_noise_is_uniform_and_of_its_step(tmp_path):
    recipe = small_recipe(tmp_path, "eagle1", objective={"feature_noise": 0.1})
    features, accelerator = Features(torch.zeros(4, 100, 8), None), SimpleNamespace(process_index=0)
    one, again, later = (
        LOOP._noise(SimpleNamespace(recipe=recipe, step=step, accelerator=accelerator), features, 0)
        for step in (3, 3, 4)
    )
    assert torch.equal(one, again) and not torch.equal(one, later) and one.shape == (4, 100, 8)
    assert 0.098 < one.abs().max() <= 0.1 and one.mean().abs() < 0.01 and abs(one.std() - 0.0577) < 0.003


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"train": {"global_batch": 4}}, "train.global_batch=4 is not a multiple of train.micro_batch=4 x 2 processes"),
        ({"data": {"max_length": 600}}, "data.max_length=600 exceeds the target's 512 positions"),
        ({"drafter": {"draft_vocab": 600}}, "drafter.draft_vocab=600 exceeds the target's 512 tokens"),
        ({"drafter": {"num_heads": 7}}, "drafter.num_heads=7 does not divide"),
        ({"drafter": {"init": "nowhere"}}, "nowhere/config.json: no such file"),
        ({"drafter": {"taps": [1, 4]}}, r"drafter.taps=\[1, 4\]: distinct ascending layers of 0..3"),
    ],
)
def test_shapes_are_checked_before_data_is_made(target, tmp_path, change, expected):  # pitfall 84
    raw = small_recipe(tmp_path, train={"global_batch": 8, "micro_batch": 4}).to_dict()
    for section, values in change.items():
        raw[section] |= values
    with pytest.raises(UserError, match=expected):
        check_before_data(recipe_from_dict(raw), target, processes=2)


def test_tensorboard_needs_no_question(target, tmp_path):
    recipe = small_recipe(tmp_path, train={"max_steps": 2, "trackers": ["tensorboard", "jsonl"]})
    train(recipe, target)
    assert list(Path(recipe.output).rglob("events.out.tfevents.*")) and metrics(recipe)


def test_wandb_offline_needs_no_question(target, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    recipe = small_recipe(tmp_path, train={"max_steps": 2, "trackers": ["wandb"]})
    train(recipe, target)
    assert list(Path(recipe.output).glob("wandb/offline-run-*"))
