"""The decoder of a Llama-shaped model as one short loop: fused products, one rotary table, no machinery between.

transformers' modules spend as long between the products of a one-row step as in them. Any model still runs through
them; this loop replaces them where the model is one of `FAMILIES` and a comparison shows the same hidden states.

Shapes: B batch, N new rows, S visible rows, D width, H query heads, K key/value heads, G = H / K, d head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.attention import FUSED_FROM
from drafters.cache import KVCache, Place
from drafters.kernels import attend, can_attend, compiled, decode, rotate
from drafters.packing import Product, can_pack, compiled_blocks, native_bf16, product, rms_norm
from drafters.rotary import Angles

FAMILIES = {"llama", "mistral", "qwen2", "qwen3"}


@dataclass(frozen=True)
class Layer:
    """One block's frozen weights, ready to use."""

    attention_norm: Tensor
    qkv: Product
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Product
    mlp_norm: Tensor
    gate_up: Product
    down: Product


class FastDecoder:
    """Embedding, blocks and final norm of a Llama-shaped model.

    Activations and keys are in the weights' dtype, but float32 on a CPU that would only emulate bfloat16: nearer to the
    exact result, and faster there.

    Args:
        decoder: the HF decoder; see `is_supported`.
        config: its text config.
    """

    def __init__(self, decoder: Any, config: Any):
        weight = decoder.embed_tokens.weight
        self.embedding, self.angles, self.eps = weight, Angles(decoder.rotary_emb), config.rms_norm_eps
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        widened = weight.dtype == torch.bfloat16 and not native_bf16(weight.device) and compiled() is not None
        self.dtype = torch.float32 if widened else weight.dtype
        fits = self.dtype == torch.float32 and weight.device.type == "cpu" and self.head_dim % 16 == 0
        self.compiled = fits and compiled() is not None
        self.inner = config.intermediate_size
        self.pack = can_pack(m.weight for m in decoder.modules() if type(m) is nn.Linear)
        self.layers = [self._layer(block) for block in decoder.layers]
        self.norm = self._norm(decoder.norm)
        self.blocks: Any = compiled_blocks(map(_block, self.layers)) if self.compiled else None

    def _norm(self, module: Any) -> Tensor:
        return module.weight.detach().to(self.dtype)

    def _layer(self, block: Any) -> Layer:
        attention, mlp = block.self_attn, block.mlp
        q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        return Layer(
            self._norm(block.input_layernorm),
            _fused([attention.q_proj, attention.k_proj, attention.v_proj], self.pack),
            None if q_norm is None else self._norm(q_norm),
            None if k_norm is None else self._norm(k_norm),
            _fused([attention.o_proj], self.pack),
            self._norm(block.post_attention_layernorm),
            _fused([mlp.gate_proj, mlp.up_proj], self.pack),
            _fused([mlp.down_proj], self.pack),
        )

    def __call__(
        self, ids: Tensor, positions: Tensor, cache: KVCache | None, mask: Tensor | None, taps: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Final hidden states (B, N, D) and the tapped ones (B, N, A * D); arguments as in `Target.forward`."""
        hidden = F.embedding(ids, self.embedding).to(self.dtype)
        cos, sin = self.angles(hidden, positions.expand(len(ids), -1))  # (B, N, d)
        if self.compiled:
            place = cache.place(*ids.shape) if cache is not None and ids.shape[1] < FUSED_FROM else None
            if self.blocks and cache is not None and place is not None:
                return self._decode(hidden, cos, sin, cache, place, mask, taps)
        else:  # rotating a head is x * cos + (its halves exchanged) * (-sin, sin)
            half = self.head_dim // 2
            cos, sin = cos[:, :, None], torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)[:, :, None]
        folded = None if self.compiled else self._folded(mask, ids.shape[1])
        tapped: dict[int, Tensor] = {0: hidden}
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(hidden, norm=layer.attention_norm, eps=self.eps)
            q, k, v = self._heads(layer, qkv, cos, sin)
            if cache is not None:
                k, v = cache.update(k, v, index)
            hidden = layer.out(self._attend(q, k, v, mask, folded), residual=hidden)
            gate_up = layer.gate_up(hidden, norm=layer.mlp_norm, eps=self.eps)
            hidden = layer.down(gate_up, gated=True, residual=hidden)
            if index + 1 in taps:
                tapped[index + 1] = hidden
        final = rms_norm(hidden, self.norm, self.eps)
        return final, torch.cat([tapped[k] for k in taps], dim=-1) if taps else None

    def _decode(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, cache: KVCache, place: Place, mask: Tensor | None,
        taps: Sequence[int],
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """All blocks in one call: one by one, a one-row step would spend a fifth of its time on calling operators."""
        owner, filled = cache.blocks
        blocks = self.blocks.for_one_call(filled if owner is self.blocks else None)
        if blocks[0].keys != cache.keys[0].data_ptr():  # else all is where it was: buffers are made once
            for block, keys, values in zip(blocks, cache.keys, cache.values, strict=True):
                block.keys, block.values = keys.data_ptr(), values.data_ptr()
            cache.blocks = self.blocks, bytes(blocks)
        tapped = hidden.new_empty(len(taps), *hidden.shape)  # (A, B, N, D)
        for tap, k in zip(tapped, taps, strict=True):
            if k:
                blocks[k - 1].tap = tap.data_ptr()
            else:
                tap.copy_(hidden)
        decode(blocks, hidden, cos, sin, cache.keys[0], place, mask, self.heads, self.inner, self.eps)
        return rms_norm(hidden, self.norm, self.eps), tapped.permute(1, 2, 0, 3).flatten(2) if taps else None

    def _heads(self, layer: Layer, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries (B, N, H, d) and keys (B, K, N, d), and values (B, K, N, d)."""
        B, N, _ = qkv.shape
        H, K, d = self.heads, self.kv_heads, self.head_dim
        qkv = qkv.view(B, N, H + 2 * K, d)
        qk = qkv[:, :, : H + K]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk.split([H, K], dim=2)
            normed = [rms_norm(q, layer.q_norm, self.eps), rms_norm(k, layer.k_norm, self.eps)]
            qk = torch.cat(normed, dim=2)
        if self.compiled:
            rotate(qk.flatten(0, 1), cos, sin)
        else:
            qk = torch.addcmul(qk * cos, qk.roll(d // 2, dims=-1), sin)
        return qk[:, :, :H], qk[:, :, H:].transpose(1, 2), qkv[:, :, H + K :].transpose(1, 2)

    def _folded(self, mask: Tensor | None, N: int) -> Tensor | None:
        """The mask as a folded attention adds it to its scores: (B or 1, 1, G * N, S), made once for all layers."""
        if N >= FUSED_FROM or (mask is None and N == 1):
            return None
        if mask is None:
            mask = torch.ones(1, 1, N, N, dtype=torch.bool, device=self.embedding.device).tril()
        G = self.heads // self.kv_heads
        added = torch.zeros(mask.shape, dtype=self.dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
        return added.repeat(1, 1, G, 1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, folded: Tensor | None) -> Tensor:
        """(B, N, H, d) queries -> (B, N, H * d); the query heads of one KV head share its keys, see `attention.py`."""
        B, N, H, d = q.shape
        if N >= FUSED_FROM:
            causal = mask is None
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2), k, v, attn_mask=mask, is_causal=causal, enable_gqa=self.kv_heads != H
            )
            return out.transpose(1, 2).reshape(B, N, H * d)
        if self.compiled and can_attend(q, k, v):
            return attend(q, k, v, mask, d**-0.5)
        folded = self._folded(mask, N) if self.compiled else folded
        K, G = self.kv_heads, H // self.kv_heads
        q = q.view(B, N, K, G, d).permute(0, 2, 3, 1, 4).reshape(B, K, G * N, d)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=folded)
        return out.view(B, K, G, N, d).permute(0, 3, 1, 2, 4).reshape(B, N, H * d)


def is_supported(decoder: Any, config: Any) -> bool:
    """Whether `FastDecoder` can read this decoder: its family, plain linear layers, and nothing hooked into them."""
    if config.model_type not in FAMILIES or getattr(config, "hidden_act", None) != "silu":
        return False
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    linears = [m for name, m in decoder.named_modules() if name.endswith(names)]
    return len(linears) == len(names) * config.num_hidden_layers and all(type(m) is nn.Linear for m in linears)


def _block(layer: Layer) -> tuple[tuple[Tensor | None, ...], tuple[Product, ...]]:
    bias = getattr(layer.qkv, "bias", None)
    norms = None, layer.attention_norm, bias, layer.q_norm, layer.k_norm, layer.mlp_norm
    return norms, (layer.qkv, layer.out, layer.gate_up, layer.down)


def _fused(linears: list[Any], pack: bool) -> Product:
    """The products of several linears over one input as one; side by side in the last dimension."""
    if len(linears) == 1:
        return product(linears[0].weight, linears[0].bias, pack)
    weight = torch.cat([m.weight.detach() for m in linears])
    biases = [m.bias for m in linears]
    bias = None
    if any(b is not None for b in biases):
        filled = [
            m.weight.new_zeros(len(m.weight)) if b is None else b.detach() for m, b in zip(linears, biases, strict=True)
        ]
        bias = torch.cat(filled)
    if not pack:  # the modules read the fused weight too, so that it exists once
        for module, part in zip(linears, weight.split([len(m.weight) for m in linears]), strict=True):
            module.weight.data = part
    return product(weight, bias, pack)
