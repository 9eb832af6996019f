"""EAGLE-1 and EAGLE-3 drafters: one decoder layer over target features, two input contracts.

EAGLE-1/2 (arXiv 2401.15077, 2406.16858) reads the final normed hidden state, `fc([embedding; hidden])`.
EAGLE-3 (arXiv 2503.01840) reads three tapped layers through `fc`; the layer sees `[embedding; fused]` normed. EAGLE-3.1
norms each tap (`fc_norm`) and what a step hands to the next (`norm_output`), which otherwise grows with depth.

Alignment: row t pairs token x[t+1] with the target features of position t, stands at rotary position t, and predicts
x[t+2]; draft step j pairs x[t+1+j] with the layer's own previous output, at position t+j, and predicts x[t+2+j].

Shapes: B batch, T rows, H drafter width, D target width, K key/value heads, G query heads per KV head,
Vd draft vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding, apply_rotary_pos_emb

from drafters import lockstep
from drafters.attention import FUSED_FROM, headstart_attention
from drafters.base import DraftSettings, DraftTree, draw_draft
from drafters.beam import grow_tree
from drafters.cache import Place
from drafters.kernels import compiled, decode, rotate
from drafters.packing import Product, compiled_blocks, product
from drafters.rotary import Angles
from drafters.target import Features, Target

NORMS = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")
"""Norms that an EAGLE-3 drafter may have beside its usual ones, by their keys in `config.json`."""


@dataclass(frozen=True)
class EagleConfig:
    """Shapes of an EAGLE drafter; `llama` carries the decoder layer's."""

    version: int  # 1 or 3
    llama: Any  # LlamaConfig, whose own annotations are all optional
    target_hidden_size: int
    draft_vocab_size: int
    taps: tuple[int, ...] = ()
    norm_before_fc: bool = False  # over all taps at once
    fc_norm: bool = False  # over each tap
    norm_before_residual: bool = False
    norm_output: bool = False
    fc_bias: bool = False  # EAGLE-1: some published ones have it; vLLM drops it, so none is trained here

    @property
    def norms(self) -> tuple[str, ...]:
        """Those of `NORMS` that it has."""
        return tuple(name for name in NORMS if getattr(self, name))


class Rotary(LlamaRotaryEmbedding):
    """Rotary angles whose frequencies stay float32: rounded to bfloat16 they would misplace every token."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rotary":
        exact = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            setattr(self, name, buffer.to(getattr(self, name).device))
        return self


class EagleAttention(nn.Module):
    """Projections of the layer's attention; the input is 2 H wide in EAGLE-3."""

    def __init__(self, config: Any, width: int):
        super().__init__()
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q_proj = nn.Linear(width, heads * dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, config.hidden_size, bias=False)


class EagleLayer(nn.Module):
    """The decoder layer. Names are those of the portable checkpoint."""

    def __init__(self, config: Any, version: int):
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        if version == 3:
            self.input_layernorm = nn.RMSNorm(H, eps)  # norms the token embedding
            self.hidden_norm = nn.RMSNorm(H, eps)  # norms the fused features
        self.self_attn = EagleAttention(config, 2 * H if version == 3 else H)
        self.post_attention_layernorm = nn.RMSNorm(H, eps)
        self.mlp = LlamaMLP(config)


class EagleDrafter(nn.Module):
    """A trained EAGLE drafter.

    Args:
        config: shapes.
        draft_ids: (Vd,) ascending target ids the drafter may propose; None: the full vocabulary.
    """

    draft_ids: Tensor | None
    layers: Any  # a ModuleList of one EagleLayer (EAGLE-1); EAGLE-3 calls it midlayer

    def __init__(self, config: EagleConfig, draft_ids: Tensor | None = None):
        super().__init__()
        self.config, self.kind = config, f"eagle{config.version}"
        self.taps = config.taps
        self.meta: dict[str, Any] = {}
        self.digest = ""  # of the weights (and adapter) it was loaded with, the same in every layout
        self.default_settings: DraftSettings | None = None
        llama, H = config.llama, config.llama.hidden_size
        layer = EagleLayer(llama, config.version)
        if config.version == 3:
            D, eps = config.target_hidden_size, llama.rms_norm_eps
            if config.norm_before_fc:
                self.input_norm = nn.RMSNorm(len(config.taps) * D, eps)
            if config.fc_norm:
                self.fc_norm = nn.ModuleList(nn.RMSNorm(D, eps) for _ in config.taps)
            self.fc = nn.Linear(len(config.taps) * D, H, bias=False)
            self.midlayer = layer
            self.norm = nn.RMSNorm(H, eps)
            self.lm_head = nn.Linear(H, config.draft_vocab_size, bias=False)
        else:
            self.fc = nn.Linear(2 * H, H, bias=config.fc_bias)
            self.layers = nn.ModuleList([layer])
        self.rotary = Rotary(llama)
        self.angles = Angles(self.rotary)
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self._shared: dict[
            str, Tensor
        ] = {}  # the target's embedding and, for EAGLE-1, head rows: never saved or trained
        self.embed_scale = 1.0  # while it is trained; see `scale_embeddings`
        self.fused: tuple[Product, Product, Product, Product] | None = None
        self.block: Any = None  # the layer in one compiled call, where there is one
        self.fused_head: Product | None = None

    @property
    def layer(self) -> EagleLayer:
        """The one decoder layer, whatever its name on disk."""
        return self.midlayer if self.config.version == 3 else self.layers[0]

    def bind(self, target: Target) -> "EagleDrafter":
        """Shares the target's frozen embedding (and head, for EAGLE-1) with the drafter."""
        self._shared["embedding"] = target.embedding.detach()
        if self.config.version == 1:
            rows = target.lm_head.weight.detach()
            rows = rows if self.draft_ids is None else rows[self.draft_ids.to(rows.device)]
            if target.logit_scale != 1.0:  # else they stay shared, not copied
                rows = rows * target.logit_scale  # a server that leaves it out drafts the same: the order stays
            self._shared["head"], self.fused_head = rows.to(self.fc.weight.dtype), None
        return self

    def fuse_layer(self, dtype: torch.dtype) -> None:
        """Lets decoding read copies of the layer's weights (q, k, v as one, gate, up as one) and of its head."""
        attention, mlp = self.layer.self_attn, self.layer.mlp
        parts = [attention.q_proj, attention.k_proj, attention.v_proj], [attention.o_proj], [mlp.gate_proj, mlp.up_proj]
        weights = [torch.cat([m.weight.detach() for m in linears]).to(dtype) for linears in (*parts, [mlp.down_proj])]
        qkv, out, gate_up, down = map(product, weights)
        self.fused = qkv, out, gate_up, down
        self.fused_head = product(self.head_weight.detach().to(dtype))
        layer, own = self.layer, self.config.version == 3
        before = (layer.input_layernorm.weight, layer.hidden_norm.weight) if own else (None, None)
        norms = *before, None, None, None, layer.post_attention_layernorm.weight
        plain = self.fc.weight.dtype == torch.float32 and self.config.llama.head_dim % 16 == 0
        plain = plain and not self.config.norm_before_residual
        self.block = compiled_blocks([(norms, self.fused)]) if plain else None

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings of the target, (..., H); at `embed_scale` in EAGLE-1."""
        rows = F.embedding(ids, self._shared["embedding"])
        # in the drafter's own precision: a half one would round what `fc` then reads differently from the saved drafter
        return rows if self.embed_scale == 1.0 else rows.to(self.fc.weight.dtype) * self.embed_scale

    @torch.no_grad()
    def scale_embeddings(self, scale: float) -> None:
        """Lets EAGLE-1 read embeddings at so many times their size, and `fc` take that back: its output stays the same.

        The embeddings are often tiny beside the hidden state, and an optimizer moves all weights equally far a step:
        `fc` would need very long to hear the token. With SmolLM2 (15 times smaller), unscaled, 21 % of the first drafts
        were right where scaled 26 % are.
        """
        self.fc.weight[:, : self.config.llama.hidden_size] *= self.embed_scale / scale
        self.embed_scale = scale

    def fuse(self, features: Features) -> Tensor:
        """What the layer reads beside the token: fused taps (EAGLE-3) or the final hidden state, (B, T, H)."""
        dtype = self.fc.weight.dtype  # training keeps float32 weights beside a bfloat16 target
        if self.config.version == 1:
            return features.final.to(dtype)
        assert features.taps is not None
        taps = features.taps.to(dtype)  # (B, T, A * D)
        if self.config.norm_before_fc:
            taps = self.input_norm(taps)
        if self.config.fc_norm:
            each = taps.chunk(len(self.fc_norm), dim=-1)
            taps = torch.cat([norm(tap) for norm, tap in zip(self.fc_norm, each, strict=True)], dim=-1)
        return self.fc(taps)

    @property
    def head_weight(self) -> Tensor:
        """(Vd, H), trained (EAGLE-3) or the target's rows (EAGLE-1)."""
        return self.lm_head.weight if self.config.version == 3 else self._shared["head"]

    def normed(self, out: Tensor) -> Tensor:
        """An output of `outputs` as the head reads it."""
        return out if self.config.version == 1 or self.config.norm_output else self.norm(out)

    def logits(self, out: Tensor) -> Tensor:
        """(..., H) -> (..., Vd): row t of step j predicts x[t+2+j]."""
        if self.fused_head is None:
            return F.linear(self.normed(out), self.head_weight)
        plain = self.config.version == 1 or self.config.norm_output
        return self.fused_head(out, None if plain else self.norm.weight, self.config.llama.rms_norm_eps)

    def inputs(self, tokens: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Residual (B, T, H) and rotated q (B, heads, T, d), k, v (B, K, T, d) for token/feature pairs."""
        embeds = self.embed(tokens).to(hidden.dtype)
        layer, attention = self.layer, self.layer.self_attn
        if self.config.version == 3:
            normed = layer.hidden_norm(hidden)
            residual = normed if self.config.norm_before_residual else hidden
            x = torch.cat([layer.input_layernorm(embeds), normed], dim=-1)  # (B, T, 2H)
        else:
            residual = x = self.fc(torch.cat([embeds, hidden], dim=-1))
        B, T = tokens.shape
        d = self.config.llama.head_dim
        if self.fused is not None:
            return residual, *self._rotated(self.fused[0](x).view(B, T, -1, d), positions)
        q = attention.q_proj(x).view(B, T, -1, d).transpose(1, 2)
        k = attention.k_proj(x).view(B, T, -1, d).transpose(1, 2)
        v = attention.v_proj(x).view(B, T, -1, d).transpose(1, 2)
        cos, sin = self.rotary(x, positions)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return residual, q, k, v

    def _rotated(self, qkv: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of a fused product (B, T, all heads, d), rotated in place."""
        B, T, _, d = qkv.shape
        heads, kv_heads = self.config.llama.num_attention_heads, self.config.llama.num_key_value_heads
        cos, sin = self.angles(qkv, positions.expand(B, -1))
        q, k, v = qkv.transpose(1, 2).split([heads, kv_heads, kv_heads], dim=1)
        if qkv.dtype != torch.float32 or qkv.device.type != "cpu" or compiled() is None:
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
        else:
            rotate(qkv[:, :, : heads + kv_heads].flatten(0, 1), cos, sin)
        return q, k, v

    def outputs(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer: attended (B, T, heads * d) -> (B, T, H), what the next step reads.

        It is before the final norm, or with `norm_output` after it.
        """
        layer = self.layer
        if self.fused is not None:
            _, project, gate_up, down = self.fused
            norm = layer.post_attention_layernorm
            hidden = project(attended, residual=residual)
            out = down(gate_up(hidden, norm=norm.weight, eps=norm.eps or 1e-6), gated=True, residual=hidden)
            return self.norm(out) if self.config.norm_output else out
        hidden = residual + layer.self_attn.o_proj(attended)
        out = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.norm(out) if self.config.norm_output else out

    def unroll(self, ids: Tensor, features: Features, steps: int, detach: bool = False) -> list[Tensor]:
        """Training-time test: `steps` teacher-forced draft steps on every row at once.

        Step j's query at row t sees what the decoder's step j would: the committed rows 0..t of step 0, and of the
        later steps only its own branch (the diagonal).

        Args:
            ids: (B, T) tokens x.
            features: of the same positions.
            steps: number of draft steps n.
            detach: stop the gradient between steps (HASS).

        Returns:
            n tensors (B, T, H), as `normed` takes them; row t of step j predicts x[t+2+j]. Rows whose tokens lie past
            the end of x hold nothing of use and must not be supervised.
        """
        B, T = ids.shape
        hidden = self.fuse(features)
        rows = torch.arange(T, device=ids.device)[None]
        outs: list[Tensor] = []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for j in range(steps):
            tokens = F.pad(ids[:, 1 + j :], (0, min(1 + j, T)))  # (B, T): row t reads x[t+1+j]
            residual, q, k, v = self.inputs(tokens, hidden, rows + j)
            keys.append(k)
            values.append(v)
            outs.append(self.outputs(residual, _unrolled_attention(q, keys, values)))
            hidden = outs[-1].detach() if detach else outs[-1]
        return outs

    # ---- decoding

    def begin(self, capacity: int) -> "EagleState":
        """See `Drafter.begin`."""
        llama, weight = self.config.llama, self.fc.weight
        shape = (1, llama.num_key_value_heads, capacity, llama.head_dim)
        out = weight.new_zeros(1, 1, llama.hidden_size)
        return EagleState(weight.new_zeros(shape), weight.new_zeros(shape), out)

    def extend(self, state: "EagleState", tokens: Tensor, features: Features) -> None:
        """See `Drafter.extend`: the drafter's cache keeps rows made from true target features only.

        Keys and values of the one layer need no attention, so only the last row goes through all of it.
        """
        self._read(state, tokens, features, 1)

    def first_drafts(self, state: "EagleState", tokens: Tensor, features: Features, rows: int) -> Tensor:
        """Like `extend`; says which token it would have drafted first after each of the last rows, (rows,)."""
        return self.to_target(self.logits(self._read(state, tokens, features, rows)[0]).argmax(-1))

    def _read(self, state: "EagleState", tokens: Tensor, features: Features, last: int) -> Tensor:
        """Commits the rows; outputs of the last ones, (1, last, H)."""
        M, end = len(tokens), state.length + len(tokens)
        positions = torch.arange(state.length, end, device=tokens.device)[None]
        mask = None
        if last > 1:  # each of them sees what came before it
            mask = torch.ones(last, end, dtype=torch.bool, device=tokens.device).tril(end - last)[None, None]
        out = self._cached(state, tokens[None], self.fuse(features), positions, mask, state.length, last)
        state.out = out[:, -1:]
        state.length += M
        return out

    def propose(
        self,
        state: "EagleState",
        settings: DraftSettings,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> DraftTree:
        """See `Drafter.propose`: a greedy or sampled chain, or EAGLE-2's dynamic tree."""
        if settings.length == 0:
            return DraftTree.empty(self.fc.weight.device)
        if settings.kind == "tree":
            return self._propose_tree(state, settings)
        sampled, cut = settings.sample and temperature > 0, settings.min_confidence
        out, tokens, dists = state.out, [], []
        confidence: Tensor | float = 1.0
        for j in range(settings.length):
            logits = self.logits(out[0, -1])  # (Vd,)
            if cut:
                p = torch.softmax(logits.float() / (temperature if sampled else 1.0), dim=-1)
                if float(confidence * p.max()) < cut:
                    break  # decided before this token is drawn, so that drafts still follow q
            if sampled:
                draft, q = draw_draft(logits[None], temperature, generator)
                dists.append(self.scatter(q[0]))
            else:
                draft = logits.argmax(-1, keepdim=True)
            tokens.append(self.to_target(draft))
            confidence = confidence * p[draft[0]] if cut else confidence
            if j + 1 < settings.length:
                # draft step j+1 pairs x[t+2+j] with its own previous output at position t+1+j; t = length - 1
                position = torch.full((1, 1), state.length + j, device=draft.device)
                out = self._cached(state, tokens[-1][None], out, position, None, state.length + j)
        if not tokens:
            return DraftTree.empty(out.device)
        return DraftTree.chain(torch.cat(tokens), torch.stack(dists) if sampled else None)

    def _propose_tree(self, state: "EagleState", settings: DraftSettings) -> DraftTree:
        """EAGLE-2's dynamic tree by cumulative log probability."""
        out = state.out  # (1, w, H), of the beams

        def advance(tokens: Tensor, origin: Tensor, seen: Tensor, level: int) -> Tensor:
            nonlocal out
            w, drafted = seen.shape
            mask = F.pad(seen, (state.length, 0), value=True)[None, None]  # all committed rows are visible
            positions = torch.full((1, w), state.length + level, device=tokens.device)
            at = state.length + drafted - w
            out = self._cached(state, self.to_target(tokens)[None], out[:, origin], positions, mask, at)
            return torch.log_softmax(self.logits(out[0]).float(), dim=-1)

        tree = grow_tree(torch.log_softmax(self.logits(out[0]).float(), dim=-1), settings, advance)
        return DraftTree(self.to_target(tree.tokens), tree.parents)

    def _cached(
        self,
        state: "EagleState",
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        at: int,
        last: int = 0,
    ) -> Tensor:
        """One forward that writes its keys at row `at` of the cache and attends to everything before.

        With a window W in `meta`, attention reads the last W committed rows and what is drafted after them. `last`:
        only so many rows at the end go on past keys and values; 0 all.
        """
        end = at + tokens.shape[1]
        committed = end if last else state.length  # `extend` commits what it writes
        seen = slice(max(0, committed - self.meta["window"]) if self.meta.get("window") else 0, end)
        if self.block is not None and tokens.shape[1] < min(FUSED_FROM, end - seen.start + 1):
            mask = None if mask is None or last else mask[..., seen]
            return self._compiled(state, tokens, hidden, positions, mask, at, seen.start)[:, -last:]
        residual, q, k, v = self.inputs(tokens, hidden, positions)
        state.keys[:, :, at:end] = k
        state.values[:, :, at:end] = v
        mask = None if mask is None else mask[..., seen]
        attended, _ = headstart_attention(self, q[:, :, -last:], state.keys[:, :, seen], state.values[:, :, seen], mask)
        return self.outputs(residual[:, -last:], attended.flatten(2))

    def _compiled(
        self, state: "EagleState", tokens: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor | None, at: int,
        first: int,
    ) -> Tensor:  # fmt: skip
        """`_cached` for a few rows as one call; attention begins at row `first`."""
        embeds, llama = self.embed(tokens).to(hidden.dtype), self.config.llama
        if self.config.version == 3:
            out = hidden.clone(memory_format=torch.contiguous_format)  # it is computed in place
        else:
            out = self.fc(torch.cat([embeds, hidden], dim=-1))
        end = at + tokens.shape[1]
        if end > state.keys.shape[2] or state.keys.dtype != torch.float32:  # it would be written past its end
            raise ValueError(f"a {state.keys.dtype} cache of {state.keys.shape[2]} rows cannot take row {end}")
        block = self.block.for_one_call()
        block[0].keys, block[0].values = state.keys.data_ptr(), state.values.data_ptr()
        place = Place(torch.arange(at, end), first, 0, end - first)
        cos, sin = self.angles(out, positions)
        heads, inner = llama.num_attention_heads, llama.intermediate_size
        decode(block, out, cos, sin, state.keys, place, mask, heads, inner, llama.rms_norm_eps, embeds)
        return self.norm(out) if self.config.norm_output else out

    def fork(self, state: "EagleState", rows: int, capacity: int) -> "EagleState":
        """See `Drafter`: the first rows are copied."""
        copy = self.begin(capacity)
        copy.keys[:, :, :rows], copy.values[:, :, :rows] = state.keys[:, :, :rows], state.values[:, :, :rows]
        copy.length = rows
        return copy

    def extend_batch(
        self, states: Sequence["EagleState"], tokens: Sequence[Tensor], features: Sequence[Features]
    ) -> None:
        """See `Drafter`."""
        lockstep.extend_batch(self, states, tokens, features)

    def propose_batch(
        self,
        states: Sequence["EagleState"],
        settings: Sequence[DraftSettings],
        temperatures: Sequence[float],
        generators: Sequence[torch.Generator],
    ) -> list[DraftTree]:
        """See `Drafter`."""
        return lockstep.propose_batch(self, states, settings, temperatures, generators)

    def to_target(self, draft: Tensor) -> Tensor:
        """Target ids of draft ids."""
        return draft if self.draft_ids is None else self.draft_ids.take(draft)

    def scatter(self, q: Tensor) -> Tensor:
        """A distribution over the draft vocabulary as one over the target's."""
        if self.draft_ids is None:
            return q
        return q.new_zeros(self.config.llama.vocab_size).scatter_(0, self.draft_ids, q)


@dataclass
class EagleState:
    """Cache of one request: `length` rows made from true features; what lies behind them is draft scratch."""

    keys: Tensor
    values: Tensor
    out: Tensor  # (1, 1, H), the last committed row's output: its logits are the first draft's
    length: int = 0


def _unrolled_attention(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of the last draft step in `EagleDrafter.unroll`, (B, heads, T, d) -> (B, T, heads * d)."""
    B, heads, T, d = q.shape
    K = keys[0].shape[1]
    if len(keys) == 1:
        out = F.scaled_dot_product_attention(q, keys[0], values[0], is_causal=True, enable_gqa=heads != K)
        return out.transpose(1, 2).flatten(2)
    q = q.reshape(B, K, heads // K, T, d)
    scores = torch.matmul(q.flatten(2, 3), keys[0].transpose(2, 3)).view(B, K, -1, T, T)  # step 0: causal block
    causal = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
    scores = scores.masked_fill(~causal, float("-inf"))
    own = [(q * k.unsqueeze(2)).sum(-1, keepdim=True) for k in keys[1:]]  # later steps: the diagonal, (B, K, G, T, 1)
    weights = torch.softmax(torch.cat([scores, *own], dim=-1).float() / math.sqrt(d), dim=-1).to(q.dtype)
    out = torch.matmul(weights[..., :T].flatten(2, 3), values[0]).view(B, K, -1, T, d)
    for i, v in enumerate(values[1:]):
        out = out + weights[..., T + i, None] * v.unsqueeze(2)
    return out.view(B, heads, T, d).transpose(1, 2).flatten(2)
