"""Training goes on from any checkpoint that can be read: its weights, its vocabulary map, its taps."""

import json
from pathlib import Path

import pytest
import torch

from drafters.build import build_eagle, build_medusa
from drafters.checkpoint import load_drafter, save_drafter
from drafters.export import export
from drafters.target import wrap_target
from tests.tiny import make_model, make_target, make_tokenizer
from tests.train.small import small_recipe
from train.build import make_drafter
from train.loop import train

SOME = torch.arange(30, 90)


def made(kind, target, ids):
    if kind == "medusa":
        return build_medusa(target, ids, heads=2)
    return build_eagle(target, ids, version=int(kind[-1]), taps=(1, 2) if kind == "eagle3" else None)


@pytest.mark.parametrize(("kind", "server"), [("eagle3", "speculators"), ("eagle1", "sglang"), ("medusa", "medusa")])
def test_training_goes_on_from_an_export(target, tmp_path, spy, kind, server):
    ids = None if kind == "medusa" else SOME
    run = save_drafter(made(kind, target, ids), tmp_path / "first", target, {})
    out = export(run, server, tmp_path / "exported", target)
    recipe = small_recipe(tmp_path, kind, drafter={"init": str(out), "draft_vocab": 64}, train={"epochs": 1})
    train(recipe, target)
    first = load_drafter(run, target, pack=False)
    assert all(torch.equal(w, spy.start[n]) for n, w in first.named_parameters())
    again = load_drafter(recipe.output, target, pack=False)
    assert (again.draft_ids is None) == (ids is None) and (ids is None or torch.equal(again.draft_ids, ids))
    assert again.taps == first.taps and not all(
        torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True)
    )
    assert "layout" not in json.loads((Path(recipe.output) / "headstart.json").read_text())


def test_another_target_of_the_same_shape_is_a_warning(target, tmp_path, spy, capsys):
    """A fine-tuned target: same config, other weights."""
    run = save_drafter(made("eagle3", target, SOME), tmp_path / "first", target, {})
    tuned = make_target(layers=3, seed=9)
    recipe = small_recipe(tmp_path, drafter={"init": str(run)}, train={"epochs": 1})
    train(recipe, tuned)
    assert "weights differ" in capsys.readouterr().err
    assert load_drafter(recipe.output, tuned).meta["warnings"] == []  # it belongs to the new one now


def test_master_weights_are_not_rounded_to_the_targets_dtype(target, tmp_path):
    run = save_drafter(made("eagle3", target, SOME), tmp_path / "first", target, {})
    half = wrap_target(make_model(layers=3).to(torch.bfloat16), make_tokenizer(), "half")
    recipe = small_recipe(tmp_path, drafter={"init": str(run)})

    class Rows:
        def supervised_counts(self, vocab_size):
            return torch.ones(vocab_size)

    drafter, _ = make_drafter(recipe, half, Rows(), None)
    exact = load_drafter(run, target, pack=False)
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), exact.parameters(), strict=True))
    assert all(p.requires_grad and p.dtype == torch.float32 for p in drafter.parameters())
