"""A drafter's forward pass written a second time, from the files alone, the way servers compute it.

It shares no code with the drafters, so that a mistake in an export (a flag, a name, a rope key) can't hide in both.
EAGLE as in SafeAILab's and vLLM's code: pairs (x[t+1], feature of t) at position t; a draft step reads its own output.
Slow, and meant to be.

Shapes: T tokens, D target width, H drafter width, A tapped layers, n rows, V vocabulary, Vd draft vocabulary.
"""

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

Weights = dict[str, Tensor]


def rebuilt_logits(
    config: dict[str, Any], weights: Weights, ids: Tensor, final: Tensor, taps: Tensor, embedding: Tensor, head: Tensor
) -> list[Tensor]:
    """Draft logits from a server folder's config and tensors.

    Args:
        config: `config.json` as it lies there.
        weights: every tensor, by the names in the file.
        ids: (T,) tokens x.
        final: (T, D) the target's hidden states after its final norm.
        taps: (T, A * D) its tapped layers.
        embedding: (V, D) the target's.
        head: (V, D) the target's.

    Returns:
        Medusa: one (T, Vd) a head; row t predicts x[t+2+k]. EAGLE: first step (T-1, Vd), second step (T-2, Vd); row t
        of step j predicts x[t+2+j].
    """
    weights = {name: w.to(ids.device) for name, w in weights.items()}
    weights = {name: w.float() if w.is_floating_point() else w for name, w in weights.items()}
    if config.get("model_type") == "medusa":
        return _medusa(config, weights, final)
    fused: Tensor | None = None
    if "norm.weight" in weights:
        head, fused = weights["lm_head.weight"], _fuse(config, weights, taps)
    return _eagle(
        config, weights, ids, final, fused, weights.get("embed_tokens.weight", embedding).float(), head.float()
    )


def _medusa(config: dict[str, Any], weights: Weights, final: Tensor) -> list[Tensor]:
    layers, out = config["medusa_num_layers"], []
    vllm = any(name.startswith("blocks.") for name in weights)
    for i in range(config["medusa_num_heads"]):
        x = final
        for j in range(layers):
            block = f"blocks.{i}.layers.{j}" if vllm else f"{i}.{j}.linear"
            bias = weights[f"{block}.bias"] if config.get("medusa_fc_bias") or not vllm else 0.0
            x = x + F.silu(x @ weights[f"{block}.weight"].T + bias)
        out.append(x @ weights[f"lm_heads.{i}.weight" if vllm else f"{i}.{layers}.weight"].T)
    return out


def _flag(config: dict[str, Any], name: str) -> bool:
    return bool(config.get(name))


def _norm(x: Tensor, weight: Tensor, llama: dict[str, Any]) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + llama["rms_norm_eps"]) * weight


def _fuse(config: dict[str, Any], weights: Weights, taps: Tensor) -> Tensor:
    llama = config.get("transformer_layer_config", config)
    if _flag(config, "norm_before_fc"):
        taps = _norm(taps, weights["input_norm.weight"], llama)
    if _flag(config, "fc_norm"):
        count = sum(bool(re.match(r"fc_norm\.\d+\.weight", name)) for name in weights)
        parts = taps.chunk(count, dim=-1)
        taps = torch.cat([_norm(x, weights[f"fc_norm.{i}.weight"], llama) for i, x in enumerate(parts)], dim=-1)
    return taps @ weights["fc.weight"].T


def _eagle(
    config: dict[str, Any],
    weights: Weights,
    ids: Tensor,
    final: Tensor,
    fused: Tensor | None,
    embedding: Tensor,
    head: Tensor,
) -> list[Tensor]:
    llama = config.get("transformer_layer_config", config)
    prefix = "midlayer." if any(name.startswith("midlayer.") for name in weights) else "layers.0."
    part = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
    heads, kv_heads, dim = llama["num_attention_heads"], llama["num_key_value_heads"], llama["head_dim"]
    rotary = _rotary(llama)

    def turn(x: Tensor, positions: Tensor) -> Tensor:  # (n, heads, dim)
        cos, sin = (a.float()[0].unsqueeze(1) for a in rotary(x[None].cpu(), positions[None].cpu()))
        half = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], dim=-1)
        return x * cos.to(x.device) + half * sin.to(x.device)

    def rows(tokens: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        embeds = embedding[tokens]
        if fused is not None:
            normed = _norm(hidden, part["hidden_norm.weight"], llama)
            x = torch.cat([_norm(embeds, part["input_layernorm.weight"], llama), normed], dim=-1)
            residual = normed if _flag(config, "norm_before_residual") else hidden
        else:
            residual = x = torch.cat([embeds, hidden], dim=-1) @ weights["fc.weight"].T + weights.get("fc.bias", 0.0)
        q, k, v = (x @ part[f"self_attn.{name}_proj.weight"].T for name in "qkv")
        k, v = (a.view(len(tokens), kv_heads, dim) for a in (k, v))
        return residual, turn(q.view(len(tokens), heads, dim), positions), turn(k, positions), v

    def finish(residual: Tensor, attended: Tensor) -> Tensor:
        x = residual + attended.flatten(1) @ part["self_attn.o_proj.weight"].T
        y = _norm(x, part["post_attention_layernorm.weight"], llama)
        inner = F.silu(y @ part["mlp.gate_proj.weight"].T) * (y @ part["mlp.up_proj.weight"].T)
        return x + inner @ part["mlp.down_proj.weight"].T

    def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:  # one row: (heads, dim) over (s, kv_heads, dim)
        keys, values = (a.repeat_interleave(heads // kv_heads, dim=1) for a in (keys, values))
        scores = torch.einsum("hd,shd->hs", q, keys) / dim**0.5
        return torch.einsum("hs,shd->hd", scores.softmax(-1), values)

    n = len(ids) - 1
    positions = torch.arange(n, device=ids.device)
    residual, q, k, v = rows(ids[1:], (final if fused is None else fused)[:n], positions)
    out = finish(residual, torch.stack([attend(q[t], k[: t + 1], v[: t + 1]) for t in range(n)]))
    normed = out if fused is None else _norm(out, weights["norm.weight"], llama)
    feedback = normed if _flag(config, "norm_output") else out
    # the second draft step: x[t+2] beside the first step's own output, one position on; it sees rows 0..t and itself
    residual, q, k2, v2 = rows(ids[2:], feedback[: n - 1], positions[1:])
    seen = [(torch.cat([k[: t + 1], k2[t : t + 1]]), torch.cat([v[: t + 1], v2[t : t + 1]])) for t in range(n - 1)]
    second = finish(residual, torch.stack([attend(q[t], *seen[t]) for t in range(n - 1)]))
    second = second if fused is None else _norm(second, weights["norm.weight"], llama)
    return [normed @ head.T, second @ head.T]


def _rotary(llama: dict[str, Any]) -> LlamaRotaryEmbedding:
    """From the legacy keys, which is all that older servers read."""
    keys = ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings", "rope_theta", "rope_scaling")
    return LlamaRotaryEmbedding(LlamaConfig(**{key: llama[key] for key in keys}))
