"""Our own operators against torch's, and what they promise beyond: a row's numbers do not depend on its neighbours."""

import pytest
import torch
import torch.nn.functional as F

from decode.tree import ancestors, block_mask
from drafters.kernels import attend, can_attend, compiled, rotate
from drafters.packing import CompiledProduct, rms_norm
from drafters.target import wrap_target
from tests.tiny import make_model, make_tokenizer

pytestmark = pytest.mark.skipif(compiled() is None, reason="no C compiler")


@pytest.mark.parametrize("d", [16, 64, 80, 128])
@pytest.mark.parametrize(("B", "N", "S"), [(1, 1, 1), (1, 1, 37), (2, 5, 40), (1, 9, 9), (3, 1, 20)])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_torchs(d, B, N, S, masked):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(B, N, 14, d, generator=generator)[:, :, :6]  # as a slice of q, k and v side by side
    k, v = (torch.randn(B, 2, S + 3, d, generator=generator)[:, :, :S] for _ in range(2))  # a view of a cache
    mask = (
        torch.rand(B, 1, N, S, generator=generator) > 0.5 if masked else torch.ones(N, S).tril(S - N).bool()[None, None]
    )
    mask = mask | (torch.arange(S) == S - 1) if masked else mask
    assert can_attend(q, k, v)
    out = attend(q, k, v, mask if masked else None, 0.3)
    expected = F.scaled_dot_product_attention(
        q.transpose(1, 2).double(), k.double(), v.double(), attn_mask=mask, scale=0.3, enable_gqa=True
    )
    assert (out.view(B, N, 6, d).transpose(1, 2) - expected).abs().max() < 1e-5


def test_scores_of_any_size_stay_numbers():
    q, v = torch.ones(1, 1, 1, 16), torch.arange(3.0)[None, None, :, None].expand(1, 1, 3, 16).contiguous()
    for keys, expected in (([0, 0, 1e4], 2), ([-1e4, 0, -1e4], 1), ([1e30, -1e30, 0], 0), ([5e4, 5e4, 5e4], 1)):
        k = torch.tensor(keys)[None, None, :, None].expand(1, 1, 3, 16).contiguous()
        assert (attend(q, k, v, None, 0.25) - expected).abs().max() < 1e-30


@pytest.mark.parametrize("change", ["bfloat16", "gradient", "gradient of v", "width", "layout"])
def test_what_it_does_not_take(change):
    q, k, v = torch.randn(1, 2, 4, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16)
    assert can_attend(q, k, v)
    if change == "bfloat16":
        q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    elif change == "gradient":
        q.requires_grad_()
    elif change == "gradient of v":  # an adapter on v_proj alone
        v.requires_grad_()
    elif change == "width":
        q, k, v = q[..., :8], k[..., :8], v[..., :8]
    else:
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert not can_attend(q, k, v)


def test_wrong_shapes_are_refused_before_memory_is_read():
    q, k = torch.randn(1, 2, 4, 16), torch.randn(1, 2, 9, 16)
    with pytest.raises(ValueError, match="got a mask"):
        attend(q, k, k, torch.ones(1, 1, 2, 8, dtype=torch.bool), 0.25)
    with pytest.raises(ValueError, match="not bool"):
        attend(q, k, k, torch.ones(1, 1, 2, 9), 0.25)
    with pytest.raises(ValueError, match="2 rows over 1 columns"):
        attend(q, k[:, :, :1], k[:, :, :1], None, 0.25)
    run = CompiledProduct(torch.randn(8, 16).bfloat16(), None)
    for x, gated in ((torch.randn(2, 15), False), (torch.randn(2, 16), True)):
        with pytest.raises(ValueError, match="a product of 16 inputs"):
            run(x, gated=gated)


def test_rotation_and_norm_are_torchs():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 7, 16, generator=generator)
    angles = torch.randn(5, 8, generator=generator).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    halves = torch.cat([-x[..., 8:], x[..., :8]], dim=-1)
    expected = x * cos[:, None] + halves * sin[:, None]
    expected[:, 4:] = x[:, 4:]
    rotate(x[:, :4], cos, sin)
    torch.testing.assert_close(x, expected)
    weight = torch.randn(16, generator=generator)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), F.rms_norm(x, (16,), weight, 1e-6))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_drafted_token_has_bit_for_bit_what_plain_decoding_gives_it(family):
    """In a bfloat16 target, whose near-ties would otherwise change places with the shape of the step."""
    target = wrap_target(make_model(family, layers=3).bfloat16(), make_tokenizer(), "tiny").pack()
    if target.fast is None or target.fast.dtype != torch.float32:
        pytest.skip("this CPU computes in bfloat16")
    ids = torch.randint(512, (1, 40), generator=torch.Generator().manual_seed(2))
    parents = torch.tensor([-1, -1, 0, 1, 1, 2])
    tokens = torch.tensor([7, 8, 9, 10, 11, 12])

    def step(cache, new, positions, mask):
        features = target.forward(new[None], positions[None], cache, mask, taps=(0, 2, 3))
        return torch.cat([features.final, features.taps, target.head(features.final)], dim=-1)[0]

    with torch.inference_mode():
        caches = [target.new_cache(60) for _ in range(2)]
        for cache in caches:
            target.forward(ids, torch.arange(40)[None], cache)
            cache.commit(40)
        slots = ancestors(parents, 3)
        together = step(
            caches[0], torch.cat([ids[0, -1:], tokens]), 40 + slots.sum(1) - 1, block_mask(slots, caches[0].length)
        )
        for path in ([0, 2, 5], [1, 4], [1, 3]):
            caches[1].rollback(40)
            for depth, slot in enumerate([-1, *path]):
                new = ids[0, -1:] if slot < 0 else tokens[slot : slot + 1]
                alone = step(caches[1], new, torch.tensor([40 + depth]), None)
                caches[1].commit(1)
                assert torch.equal(alone[0], together[slot + 1])
