"""Our attention against a plain one that repeats the heads, on every path through it."""

import pytest
import torch

from drafters.attention import FUSED_FROM, headstart_attention


def reference(q, k, v, mask, scaling=None, softcap=None, sinks=None):
    """The textbook, in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        column = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ v).transpose(1, 2).float()


def inputs(N, S, heads=4, kv_heads=2, batch=2, dim=8, value_dim=8):
    g = torch.Generator().manual_seed(N * 100 + S)
    shapes = ((batch, heads, N, dim), (batch, kv_heads, S, dim), (batch, kv_heads, S, value_dim))
    return [torch.randn(shape, generator=g) * 2 for shape in shapes]


def tree_like(N, S, batch=1):
    """A mask that is not causal, with every row seeing itself."""
    mask = torch.rand(batch, 1, N, S, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[..., torch.arange(N), torch.arange(S - N, S)] = True
    return mask


@pytest.mark.parametrize("N", [1, 5, FUSED_FROM, FUSED_FROM + 3])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("batch", [1, 2])
def test_masks_and_head_groups(N, heads, kv_heads, batch):
    S = N + 7
    q, k, v = inputs(N, S, heads, kv_heads)
    mask = tree_like(N, S, batch)
    out, weights = headstart_attention(None, q, k, v, mask)
    assert out.shape == (2, N, heads, 8) and out.is_contiguous() and weights is None
    torch.testing.assert_close(out, reference(q, k, v, mask), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("N", [1, 5, FUSED_FROM])
def test_without_a_mask_it_is_causal(N):
    q, k, v = inputs(N, N)
    mask = torch.ones(N, N, dtype=torch.bool).tril()
    torch.testing.assert_close(
        headstart_attention(None, q, k, v, None)[0], reference(q, k, v, mask), atol=1e-5, rtol=1e-5
    )


def test_one_row_without_a_mask_sees_everything():
    q, k, v = inputs(1, 9)
    torch.testing.assert_close(
        headstart_attention(None, q, k, v, None)[0], reference(q, k, v, None), atol=1e-5, rtol=1e-5
    )


def test_several_rows_over_a_longer_cache_need_a_mask():
    with pytest.raises(ValueError, match="3 query rows over 9 keys"):
        headstart_attention(None, *inputs(3, 9), None)


@pytest.mark.parametrize("N", [1, 5, FUSED_FROM])
@pytest.mark.parametrize("extra", ["scaling", "softcap", "sinks", "all"])
def test_scaling_softcap_and_sinks(N, extra):
    q, k, v = inputs(N, N + 4, value_dim=6)
    mask = tree_like(N, N + 4)
    scaling = 0.7 if extra in ("scaling", "all") else None
    softcap = 2.0 if extra in ("softcap", "all") else None
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]) if extra in ("sinks", "all") else None
    out, _ = headstart_attention(None, q, k, v, mask, scaling=scaling, softcap=softcap, s_aux=sinks)
    torch.testing.assert_close(out, reference(q, k, v, mask, scaling, softcap, sinks), atol=1e-5, rtol=1e-5)


def test_views_into_a_larger_cache():
    q, k, v = inputs(4, 20)
    mask = tree_like(4, 12)
    out, _ = headstart_attention(None, q, k[:, :, :12], v[:, :, :12], mask)
    torch.testing.assert_close(out, reference(q, k[:, :, :12], v[:, :, :12], mask), atol=1e-5, rtol=1e-5)
