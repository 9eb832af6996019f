"""Prepacked and compiled products: the same numbers within rounding, and the unpacked ones stay reachable."""

import pytest
import torch
import torch.nn.functional as F

from drafters import packing
from drafters.packing import compiled, native_bf16, pack_linears, product
from drafters.target import resolve_dtype, wrap_target
from tests.tiny import make_model, make_tokenizer

CPU = torch.device("cpu")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_a_packed_target_gives_the_same_logits(dtype, tolerance):
    model = make_model(layers=2, attention_bias=True, hidden_act="gelu").to(dtype)  # no fast loop for these
    target = wrap_target(model, make_tokenizer(), "tiny")
    ids = torch.randint(512, (1, 9), generator=torch.Generator().manual_seed(0))
    outs = []
    for _ in range(2):
        for rows in (1, 2, 9):
            features = target.forward(ids[:, :rows], torch.arange(rows)[None])
            outs.append(target.head(features.final).float())
        target.pack()
    assert target.packed and target.fast is None
    for plain, fast in zip(outs[:3], outs[3:], strict=True):
        assert (plain - fast).abs().max() <= tolerance * plain.abs().max()


def test_nothing_to_pack():
    assert not pack_linears(torch.nn.LayerNorm(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(7, 5), (64, 48), (33, 40)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("pack", [False, True])
def test_a_product_is_the_linear_layer(dtype, inputs, outputs, bias, pack):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    added = torch.randn(outputs, generator=generator).to(dtype) if bias else None
    run = product(weight, added, pack)
    for rows in (1, 2, 5, 6, 7, 13, 30):
        x = torch.randn(2, rows, inputs, generator=generator).to(dtype)
        expected = F.linear(x.double(), weight.double(), None if added is None else added.double())
        out = run(x)
        assert out.dtype == dtype and out.shape == expected.shape
        assert (out - expected).abs().max() <= (2e-5 if dtype == torch.float32 else 1e-2) * expected.abs().max()


@pytest.mark.skipif(compiled() is None, reason="no C compiler")
def test_the_compiled_product_is_exact_and_does_not_depend_on_neighbouring_rows():
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(50, 96, generator=generator).bfloat16()
    x = torch.randn(17, 96, generator=generator)
    run = packing._compiled_product(weight, None)
    together = run(x)
    assert torch.equal(together, torch.cat([run(row[None]) for row in x]))
    assert (together - x @ weight.float().T).abs().max() < 1e-4
    assert run(x[:, None].transpose(0, 1)).shape == (1, 17, 50)  # strided input


def test_without_a_compiler_products_stay_right_and_auto_takes_float32(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    compiled.cache_clear()
    try:
        assert compiled() is None
        assert resolve_dtype("auto", "cpu") == (torch.bfloat16 if native_bf16(CPU) else torch.float32)
        weight = torch.randn(8, 16).bfloat16()
        x = torch.randn(3, 16)
        assert torch.allclose(product(weight)(x), x.bfloat16().float() @ weight.float().T, atol=0.1, rtol=0.02)
    finally:
        compiled.cache_clear()
