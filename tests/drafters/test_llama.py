"""The fast loop for Llama-shaped models gives what the model's own modules give."""

import pytest
import torch

from drafters import llama
from drafters.llama import is_supported
from drafters.target import wrap_target
from tests.tiny import make_model, make_tokenizer

SHAPES = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("mistral", {}),
]


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "extra"), SHAPES)
def test_hidden_states_taps_and_logits_are_the_models_own(family, extra, dtype, pack, monkeypatch):
    if not pack:  # as on CUDA: fused weights that the modules share, and torch's operators
        monkeypatch.setattr("drafters.llama.can_pack", lambda weights: False)
        monkeypatch.setattr("drafters.llama.compiled", lambda: None)
    target = wrap_target(make_model(family, layers=3, **extra).to(dtype), make_tokenizer(), "tiny")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(512, (2, 70), generator=generator)
    tree = torch.ones(5, 26, dtype=torch.bool).tril(21)
    tree[3, 23] = False  # a node beside another
    calls = [(20, None), (1, None), (5, tree[None, None]), (40, None)]

    def run():
        cache, out, at = target.new_cache(80), [], 0
        for rows, mask in calls:
            positions = torch.arange(at, at + rows).expand(2, -1)
            features = target.forward(ids[:, at : at + rows], positions, cache, mask, taps=(0, 2, 3))
            out += [features.final, features.taps, target.head(features.final)]
            at += 0 if mask is not None else rows
            cache.commit(at - cache.length)
        features = target.forward(ids, torch.arange(70).expand(2, -1), taps=(1,))
        return [*out, features.final, features.taps]

    with torch.inference_mode():
        expected = run()
        assert target.pack().fast is not None
        got = run()
    for a, b in zip(expected, got, strict=True):
        limit = 2e-5 if dtype == torch.float32 else 0.2  # what bfloat16 itself is off by in this random model
        assert (a.float() - b.float()).norm() <= limit * a.float().norm()


@pytest.mark.parametrize(("family", "extra"), [*SHAPES, ("mistral", {"sliding_window": 16})])
def test_all_blocks_in_one_call_give_what_they_give_one_by_one(family, extra):
    target = wrap_target(make_model(family, layers=3, **extra).bfloat16(), make_tokenizer(), "tiny").pack()
    if target.fast is None or target.fast.dtype != torch.float32:
        pytest.skip("no C compiler, or a CPU that computes in bfloat16")
    assert (target.fast.blocks is None) == ("mlp_bias" in extra)
    ids = torch.randint(512, (2, 40), generator=torch.Generator().manual_seed(0))
    tree = torch.ones(5, 25, dtype=torch.bool).tril(20)
    tree[3, 22] = False  # a node beside another

    def run():
        cache, out, at = target.new_cache(48), [], 0
        for rows, mask in ((20, None), (5, tree[None, None]), (3, None), (1, None)):
            positions = torch.arange(at, at + rows).expand(2, -1)
            features = target.forward(ids[:, at : at + rows], positions, cache, mask, taps=(0, 2, 3))
            out += [features.final, features.taps]
            at += 0 if mask is not None else rows
            cache.commit(at - cache.length)
        return out + [buffer[:, :, :at] for buffer in (*cache.keys, *cache.values)]

    with torch.inference_mode():
        together = run()
        target.fast.blocks = None
        for a, b in zip(together, run(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_cache_that_does_not_fit_the_call_is_refused():
    target = wrap_target(make_model(layers=2).bfloat16(), make_tokenizer(), "tiny")
    ids, caches = torch.arange(5)[None], [target.new_cache(9) for _ in range(2)]
    with torch.inference_mode():
        target.forward(ids, ids, caches[0])  # by the modules, in bfloat16
        target.pack()
        if target.fast is None or not target.fast.blocks:
            pytest.skip("no C compiler, or a CPU that computes in bfloat16")
        target.forward(ids, ids, caches[1])
        for cache, rows in zip(caches, (1, 3), strict=True):  # another dtype, another batch
            cache.commit(5)
            with pytest.raises(RuntimeError):
                target.forward(torch.zeros(rows, 1, dtype=torch.long), torch.full((rows, 1), 5), cache)


def test_fused_weights_that_modules_share_still_take_gradients(monkeypatch):
    """Medusa-2 trains an adapter through the modules of a packed target."""
    monkeypatch.setattr("drafters.llama.can_pack", lambda weights: False)
    target = wrap_target(make_model(), make_tokenizer(), "tiny").pack()
    assert target.fast is not None
    embeds = torch.randn(1, 5, target.hidden_size, requires_grad=True)
    target.model(inputs_embeds=embeds).logits.sum().backward()
    assert embeds.grad.abs().max() > 0


def test_what_the_loop_cannot_read_stays_with_the_modules():
    for family, extra in (("gemma2", {}), ("llama", {"hidden_act": "gelu"})):
        model = make_model(family, layers=2, **extra)
        assert not is_supported(model.get_decoder(), model.config)
    model = make_model(layers=2)
    assert is_supported(model.get_decoder(), model.config)

    class Adapted(torch.nn.Linear):
        """Such as an adapter's layer: a linear that does more than its weight says."""

    model.get_decoder().layers[1].mlp.up_proj = Adapted(64, 96)
    assert not is_supported(model.get_decoder(), model.config)


def test_a_loop_that_differs_is_not_used(monkeypatch):
    target = wrap_target(make_model(layers=2), make_tokenizer(), "tiny")
    heads = llama.FastDecoder._heads
    monkeypatch.setattr(llama.FastDecoder, "_heads", lambda *args: [x * 1.1 for x in heads(*args)])
    assert target.pack().fast is None and target.packed
