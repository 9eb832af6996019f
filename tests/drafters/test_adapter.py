"""An adapter on and off: merged exactly, packed or not, and off the target is what it was, bit for bit."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from drafters.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapted, read_adapter
from drafters.build import build_medusa
from drafters.checkpoint import META, load_drafter, save_drafter
from drafters.combine import Merged
from drafters.describe import describe
from drafters.errors import UserError
from drafters.lookup import LookupDrafter
from drafters.router import Router
from tests.tiny import make_target

IDS, POSITIONS = torch.arange(20, 32)[None], torch.arange(12)[None]
NAMES = ("model.layers.0.self_attn.q_proj", "model.layers.2.mlp.down_proj")


@pytest.fixture
def own():
    return make_target(layers=3)


@pytest.fixture
def folder(own, tmp_path):
    """Peft's files, made by hand: rank 2, alpha 6."""
    tensors, modules = {}, dict(own.model.named_modules())
    generator = torch.Generator().manual_seed(0)
    for name in NAMES:
        out, width = modules[name].weight.shape
        for part, shape in (("A", (2, width)), ("B", (out, 2))):
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = torch.randn(shape, generator=generator) * 0.1
    (tmp_path / "adapter").mkdir()
    save_file(tensors, tmp_path / "adapter" / ADAPTER_WEIGHTS)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "bias": "none"}
    (tmp_path / "adapter" / ADAPTER_CONFIG).write_text(json.dumps(config))
    return tmp_path / "adapter"


def final(target):
    return target.forward(IDS, POSITIONS).final


@pytest.mark.parametrize(("family", "pack"), [("llama", False), ("llama", True), ("gemma2", True)])
def test_on_and_off(folder, family, pack):
    own, reference = make_target(family, layers=3), make_target(family, layers=3)
    if pack:
        own.pack()
        assert (own.fast is not None) == (family == "llama")  # the loop of its own, or prepacked products
        if not own.is_packed:
            pytest.skip("this CPU packs nothing")
    before = final(own)
    weights = {n: w.clone() for n, w in own.model.state_dict().items()}
    tensors, modules = load_file(folder / ADAPTER_WEIGHTS), dict(reference.model.named_modules())
    for name in NAMES:
        A, B = (tensors[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
        modules[name].weight.data += 3.0 * B @ A
    adapter = read_adapter(folder, own)
    with adapter.on():
        torch.testing.assert_close(final(own), final(reference), atol=1e-4, rtol=1e-4)
        assert (final(own) - before).abs().max() > 0.01
        with own.as_loaded():  # as transformers would run it: the adapter stays on
            logits = own.model(input_ids=IDS).logits
        torch.testing.assert_close(logits, reference.head(final(reference)), atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(final(own), final(reference), atol=1e-4, rtol=1e-4)
    assert torch.equal(final(own), before)
    assert all(torch.equal(w, weights[n]) for n, w in own.model.state_dict().items())
    with pytest.raises(RuntimeError), adapter.on():
        raise RuntimeError
    assert torch.equal(final(own), before)


def test_a_drafter_carries_its_adapter(own, folder, tmp_path):
    drafter = build_medusa(own, None, heads=2)
    drafter.adapter = read_adapter(folder, own)
    save_drafter(drafter, tmp_path / "run", own, {})
    save_drafter(drafter, tmp_path / "run", own, {})  # over an older one
    again = load_drafter(tmp_path / "run", own)
    with adapted(drafter):
        expected = final(own)
    with adapted(again):
        assert torch.equal(final(own), expected)
    assert again.meta["adapter"] == drafter.adapter.digest()
    with adapted(None), adapted(build_medusa(own, None, heads=1)):
        assert not torch.equal(final(own), expected)
    for file in (tmp_path / "run" / "adapter").iterdir():
        file.unlink()
    assert any("broken: missing" in line and ADAPTER_WEIGHTS in line for line in describe(tmp_path / "run"))
    with pytest.raises(UserError, match="no adapter of peft's"):
        load_drafter(tmp_path / "run", own)
    (tmp_path / "run" / "adapter").rmdir()
    assert json.loads((tmp_path / "run" / META).read_text())["adapter"]
    with pytest.raises(UserError, match="no adapter of peft's"):
        load_drafter(tmp_path / "run", own)


def test_a_drafter_that_changes_the_target_stays_alone(own, folder):
    drafter = build_medusa(own, None, heads=2)
    both = {"medusa": drafter, "lookup": LookupDrafter()}
    Router(both)
    drafter.adapter = read_adapter(folder, own)
    for combined in (Router, Merged):
        with pytest.raises(UserError, match="medusa changes the target"):
            combined(both)


def test_an_adapter_on_other_weights_is_named(own, folder, tmp_path):
    drafter = build_medusa(own, None, heads=2)
    drafter.adapter = read_adapter(folder, own)
    save_drafter(drafter, tmp_path / "run", own, {})
    other = load_drafter(tmp_path / "run", make_target(layers=3, seed=9))
    assert any("adapter was trained on other weights" in line for line in other.meta["warnings"])


def rename(tensors):
    tensors["base_model.model.model.layers.9.mlp.up_proj.lora_A.weight"] = torch.zeros(2, 64)


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        ({"use_dora": True}, None, "only plain LoRA without bias can be applied, not use_dora"),
        ({"bias": "all"}, None, "only plain LoRA"),
        ({"r": 0}, None, "no adapter of peft's"),
        ({"r": 9}, None, "has rank 2 and 2, but its config says r=9"),
        ({}, rename, "layers.9.mlp.up_proj is no linear layer"),
        ({}, lambda t: t.update(extra=torch.zeros(1)), "extra is not understood"),
        ({}, lambda t: t.clear(), "empty file is not understood"),
        ({}, lambda t: next(iter(t.values())).fill_(float("nan")), "NaN"),
    ],
)
def test_what_is_refused(own, folder, config, change, message):
    path = folder / ADAPTER_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if change is not None:
        tensors = load_file(folder / ADAPTER_WEIGHTS)
        change(tensors)
        save_file(tensors, folder / ADAPTER_WEIGHTS)
    with pytest.raises(UserError, match=message) as error:
        read_adapter(folder, own)
    assert "\n" not in str(error.value)


def test_a_bfloat16_target_gets_the_sum_rounded_once(folder):
    target = make_target(layers=3)
    module: nn.Linear = target.model.get_submodule(NAMES[0])
    exact = module.weight.detach().to(torch.bfloat16).float()
    target.model.to(torch.bfloat16)
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    A, B = (tensors[f"base_model.model.{NAMES[0]}.lora_{part}.weight"] for part in "AB")
    with read_adapter(folder, target).on():
        assert torch.equal(module.weight, (exact + 3.0 * B @ A).to(torch.bfloat16))
