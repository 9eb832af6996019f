"""Targets that are LoRA adapters or quantized: merged, or refused in one line; and a drafter adapted to one."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from drafters.build import build_eagle
from drafters.checkpoint import load_drafter, save_drafter
from drafters.errors import UserError
from drafters.target import load_target
from tests.tiny import make_model, make_tokenizer


@pytest.fixture
def base(tmp_path):
    folder = tmp_path / "base"
    make_model(layers=2).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def adapter(base, folder, **options):
    torch.manual_seed(2)
    tuned = get_peft_model(make_model(layers=2), LoraConfig(r=4, target_modules=["q_proj", "down_proj"], **options))
    for name, weight in tuned.named_parameters():
        if "lora_" in name:
            weight.data.normal_(0, 0.2)
    tuned.save_pretrained(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(base)}))
    return tuned.eval()


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("options", [{}, {"use_rslora": True, "lora_alpha": 3}])
def test_a_lora_target_is_its_merged_model(base, tmp_path, capsys, options):
    tuned = adapter(base, tmp_path / "lora", **options)
    target = load_target(str(tmp_path / "lora"), "float32", pack=False)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        expected = tuned(input_ids=ids).logits
        ours = target.head(target.forward(ids, ids).final)
    assert torch.allclose(ours, expected, atol=1e-4) and target.tokenizer.chat_template
    # a drafter of the base goes on for it, with a warning that says why
    plain = load_target(str(base), "float32", pack=False)
    run = save_drafter(build_eagle(plain, torch.arange(9, 99), version=3), tmp_path / "run", plain, {})
    again = load_drafter(run, target)
    assert "weights differ" in again.meta["warnings"][0] and torch.equal(again.draft_ids, torch.arange(9, 99))


def test_other_adapters_are_refused(base, tmp_path):
    adapter(base, tmp_path / "lora")
    edit(tmp_path / "lora" / "adapter_config.json", peft_type="PREFIX_TUNING")
    with pytest.raises(UserError, match="PREFIX_TUNING.*merge it and save it first"):
        load_target(str(tmp_path / "lora"))


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "nonesuch"}, "'nonesuch' is not one that transformers knows"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors"),
    ],
)
def test_a_quantized_target_that_can_not_be_loaded(base, quantization, message):
    edit(base / "config.json", quantization_config=quantization)
    with pytest.raises(UserError, match=message) as error:
        load_target(str(base))
    assert "\n" not in str(error.value)


def test_weights_that_are_not_there_are_not_made_up(base):
    weights = load_file(base / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="lack 1 weights of the model, such as model.layers.1.mlp.up_proj.weight"):
        load_target(str(base))
