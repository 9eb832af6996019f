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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [7, 64, 33])
def test_what_goes_before_and_after_a_product_can_be_part_of_it(dtype, inputs):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(20, inputs, generator=generator).to(dtype)
    added, norm = torch.randn(20, generator=generator), torch.randn(inputs, generator=generator)
    run = product(weight, added.to(dtype))
    for rows in (1, 4, 13):
        x = torch.randn(2, rows, 2 * inputs, generator=generator) * 4
        residual = torch.randn(2, rows, 20, generator=generator)
        gate, up = x.double().chunk(2, dim=-1)
        normed = F.rms_norm(gate, (inputs,), norm.double(), 1e-5)
        w, b = weight.double(), added.to(dtype).double()
        cases = [
            (run(x, gated=True), F.linear(F.silu(gate) * up, w, b)),
            (run(x[..., :inputs], norm=norm, eps=1e-5), F.linear(normed, w, b)),
            (run(x[..., :inputs], residual=residual), F.linear(gate, w, b) + residual),
            (run(x, gated=True, residual=residual), F.linear(F.silu(gate) * up, w, b) + residual),
        ]
        for out, expected in cases:
            assert out.dtype == torch.float32 and out.shape == expected.shape
            emulated = dtype == torch.bfloat16 and compiled() is None
            assert (out - expected).abs().max() <= (2e-2 if emulated else 1e-5) * expected.abs().max()


@pytest.mark.skipif(compiled() is None, reason="no C compiler")
def test_gates_of_any_size_stay_numbers():
    run = packing.CompiledProduct(torch.eye(16).bfloat16(), None)
    gate = torch.tensor([0.0, -0.0, 1e-30, 50, -50, 100, -100, 1e30, -1e30, 3e38, -3e38, 0.5, -0.5, 2, -2, 20.0])
    out = run(torch.cat([gate, torch.ones(16)])[None], gated=True)
    torch.testing.assert_close(out[0], F.silu(gate), rtol=1e-6, atol=1e-30)


@pytest.mark.skipif(compiled() is None, reason="no C compiler")
def test_the_compiled_product_is_exact_and_does_not_depend_on_neighbouring_rows():
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(50, 96, generator=generator).bfloat16()
    x = torch.randn(17, 96, generator=generator)
    run = packing.CompiledProduct(weight, None)
    together = run(x)
    assert torch.equal(together, torch.cat([run(row[None]) for row in x]))
    norm = torch.randn(96, generator=generator)
    normed = [run(rows, norm=norm, eps=1e-6) for rows in (x, *x[:, None])]
    assert torch.equal(normed[0], torch.cat(normed[1:]))
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
