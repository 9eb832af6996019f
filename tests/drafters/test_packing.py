"""Prepacked products: the same numbers within rounding, and the unpacked ones stay reachable."""

import pytest
import torch

from drafters.packing import pack_linears
from drafters.target import wrap_target
from tests.tiny import make_model, make_tokenizer


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_a_packed_target_gives_the_same_logits(dtype, tolerance):
    target = wrap_target(make_model(layers=2, attention_bias=True).to(dtype), make_tokenizer(), "tiny")
    ids = torch.randint(512, (1, 9), generator=torch.Generator().manual_seed(0))
    outs = []
    for _ in range(2):
        for rows in (1, 2, 9):
            features = target.forward(ids[:, :rows], torch.arange(rows)[None])
            outs.append(target.head(features.final).float())
        packed = target.pack().packed
    assert packed
    for plain, fast in zip(outs[:3], outs[3:], strict=True):
        assert (plain - fast).abs().max() <= tolerance * plain.abs().max()


def test_nothing_to_pack():
    assert not pack_linears(torch.nn.LayerNorm(4))
