"""Makes a new drafter for a target, warm-started from the target's own weights (DESIGN.md, decision 5)."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from drafters.eagle import EagleConfig, EagleDrafter
from drafters.errors import UserError
from drafters.hydra import HydraDrafter
from drafters.medusa import MedusaConfig, MedusaDrafter
from drafters.packing import pack_linears
from drafters.target import Target

OWN_SCORE = 10.0  # of a row with its own token, before the softmax; other tokens have about 0
# times the target's own weights, for the token to be heard beside the hidden state
TOKEN_GAIN, MLP_SHARE = 6.0, 0.1
QUIET = 0.25  # times the target's values and MLP, for EAGLE-1's zero projections to move its sum less a step

READS = tuple(f"self_attn.{part}_proj.weight" for part in "qkv")

TrainedDrafter = EagleDrafter | MedusaDrafter  # HydraDrafter is a MedusaDrafter


def build_medusa(
    target: Target,
    draft_ids: Tensor | None,
    heads: int = 4,
    layers: int = 1,
    warm_head: bool = True,
    zero_blocks: bool = True,
    kind: str = "medusa",
) -> MedusaDrafter:
    """Medusa or Hydra heads; warm, head k starts as the target's own head.

    Args:
        target: what they will serve.
        draft_ids: (Vd,) draft vocabulary or None.
        heads: K.
        layers: residual blocks a head.
        warm_head: copy the target's head rows into every head.
        zero_blocks: start every residual block as the identity on the hidden state.
        kind: "medusa" or "hydra".
    """
    drafter_class = HydraDrafter if kind == "hydra" else MedusaDrafter
    Vd = target.vocab_size if draft_ids is None else len(draft_ids)
    drafter = drafter_class(MedusaConfig(heads, layers, target.hidden_size, target.vocab_size, Vd), draft_ids)
    with torch.no_grad():
        for head in drafter.heads:
            for block in head[:-1] if zero_blocks else ():
                block.linear.weight.zero_()
                block.linear.bias.zero_()
            if warm_head:
                head[-1].weight.copy_(_head_rows(target, draft_ids))
    return drafter.float().bind(target)


def build_eagle(
    target: Target,
    draft_ids: Tensor | None,
    version: int = 3,
    taps: Sequence[int] | None = None,
    intermediate_size: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    warm_head: bool = True,
    warm_layer: bool = True,
    norms: Sequence[str] = (),
) -> EagleDrafter:
    """An EAGLE drafter of the target's width.

    Args:
        target: what it will serve.
        draft_ids: (Vd,) draft vocabulary or None.
        version: 1 (final hidden state) or 3 (tapped layers).
        taps: tapped layers (EAGLE-3 only); None: `target.default_taps()`.
        intermediate_size: MLP width; None: the target's.
        num_heads: attention heads; None: the target's.
        num_kv_heads: key/value heads; None: the target's.
        warm_head: head rows and final norm from the target (EAGLE-3; EAGLE-1 always uses the target's head).
        warm_layer: the layer from the target's last block, where the shapes agree; `fc` starts by passing on the
            hidden state (EAGLE-1) or the deepest tap (EAGLE-3). Half of EAGLE-3's heads start on their own row's token.
        norms: further norms of EAGLE-3, of `drafters.eagle.NORMS`.

    Raises:
        UserError: shapes that cannot be.
    """
    llama = _llama_config(target, intermediate_size, num_heads, num_kv_heads)
    taps = target.check_taps(tuple(taps) if taps is not None else target.default_taps()) if version == 3 else ()
    Vd = target.vocab_size if draft_ids is None else len(draft_ids)
    drafter = EagleDrafter(
        EagleConfig(version, llama, target.hidden_size, Vd, taps, **dict.fromkeys(norms, True)), draft_ids
    )
    with torch.no_grad():
        for weight in drafter.parameters():
            if weight.dim() == 2:  # the rest are norms, which start at one
                weight.normal_(0.0, 0.02)
        if warm_head and version == 3:
            drafter.lm_head.weight.copy_(_head_rows(target, draft_ids))
            final = _final_norm(target)
            drafter.norm.weight.copy_(drafter.norm.weight if final is None else final)
        if warm_layer:
            _warm_layer(drafter, target)
    return drafter.float().bind(target)


def pack_drafter(drafter: nn.Module, dtype: torch.dtype) -> None:
    """Makes a drafter decode faster where `pack_linears` can; its weights are read in `dtype` then.

    To be called again when they change.
    """
    if pack_linears(drafter, dtype) and isinstance(drafter, EagleDrafter):
        drafter.fuse_layer(dtype)


def _llama_config(target: Target, intermediate: int | None, heads: int | None, kv_heads: int | None) -> LlamaConfig:
    config = target.config
    nq = heads or config.num_attention_heads
    nkv = kv_heads or getattr(config, "num_key_value_heads", None) or nq
    if heads is None and getattr(config, "head_dim", None):
        dim = config.head_dim
    elif target.hidden_size % nq:
        raise UserError(f"drafter.num_heads={nq} does not divide the target's hidden size {target.hidden_size}")
    else:
        dim = target.hidden_size // nq
    if nq % nkv:
        raise UserError(f"drafter.num_kv_heads={nkv} does not divide num_heads={nq}")
    width = intermediate or getattr(config, "intermediate_size", None) or 4 * target.hidden_size
    return LlamaConfig(
        hidden_size=target.hidden_size,
        intermediate_size=width[-1] if isinstance(width, list) else width,
        num_hidden_layers=1,
        num_attention_heads=nq,
        num_key_value_heads=nkv,
        head_dim=dim,
        hidden_act="silu",
        rms_norm_eps=getattr(config, "rms_norm_eps", None) or 1e-5,
        max_position_embeddings=target.max_positions,
        vocab_size=target.vocab_size,
        tie_word_embeddings=False,
        rope_parameters=_rope(config, dim),
    )


def _rope(config: Any, dim: int) -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0}
    rope = rope.get("full_attention", rope)  # Gemma keeps one a layer type
    if any(len(factors) != dim // 2 for factors in (rope.get("long_factor"), rope.get("short_factor")) if factors):
        return {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)}  # those of heads of another size
    return {k: v for k, v in rope.items() if k != "partial_rotary_factor"}


def _head_rows(target: Target, draft_ids: Tensor | None) -> Tensor:
    rows = target.lm_head.weight.detach()
    rows = (rows if draft_ids is None else rows[draft_ids.to(rows.device)]).float()
    return rows if target.logit_scale == 1.0 else rows * target.logit_scale


def _final_norm(target: Target) -> Tensor | None:
    norms = (getattr(target.decoder, name, None) for name in ("norm", "ln_f", "final_layernorm"))
    return next((_norm_weight(norm, target) for norm in norms if norm is not None), None)


def _norm_weight(norm: Any, target: Target) -> Tensor | None:
    """What a norm of the target multiplies by, (D,); in Gemma that is one more than its weight."""
    weight = getattr(norm, "weight", None)
    if weight is None or weight.shape != (target.hidden_size,):
        return None
    ones = norm(torch.ones_like(weight)[None])[0].float()
    weight = weight.float()
    return weight + 1 if (ones - weight - 1).abs().sum() < (ones - weight).abs().sum() else weight


def _warm_layer(drafter: EagleDrafter, target: Target) -> None:
    """The target's last block into the drafter's layer, tensor by tensor where names and shapes agree."""
    source: dict[str, Tensor] = dict(target.blocks[-1].named_parameters())
    norms = {f"{name}.weight": _norm_weight(module, target) for name, module in target.blocks[-1].named_children()}
    source |= {name: weight for name, weight in norms.items() if weight is not None}
    if "pre_feedforward_layernorm.weight" in source:  # Gemma's name for it; the other one norms what attention gave
        source["post_attention_layernorm.weight"] = source["pre_feedforward_layernorm.weight"]
    elif "input_layernorm.weight" not in source:  # OLMo 2 norms only what its parts give
        source.pop("post_attention_layernorm.weight", None)
    if drafter.config.version == 1:
        _read_the_final_norm(source, target)
    layer, H, head_dim = drafter.layer, target.hidden_size, drafter.config.llama.head_dim
    theirs_dim = getattr(target.config, "head_dim", None) or H // target.config.num_attention_heads
    for name, weight in layer.named_parameters():
        theirs = source.get("input_layernorm.weight" if name == "hidden_norm.weight" else name)
        if name == "input_layernorm.weight" or theirs is None:
            continue  # EAGLE-3 norms the embedding there, which the target does not
        if drafter.config.version == 1 and name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            weight.zero_()  # EAGLE-1's head reads the sum without a norm: untrained weights there would be noise
            continue
        if name.startswith("self_attn.") and head_dim != theirs_dim:
            continue  # of the same shape it would still be rows of other heads
        groups, rest = divmod(len(weight), len(theirs))
        if name in READS[1:] and groups > 1 and not rest + len(theirs) % head_dim:
            # more KV heads than the target has: each of the target's serves several
            theirs = theirs.view(-1, head_dim, H).repeat_interleave(groups, dim=0).flatten(0, 1)
        if theirs.shape == weight.shape:
            weight.copy_(theirs.float())
        elif name in READS and theirs.shape == (weight.shape[0], H):
            weight[:, -H:].copy_(theirs.float())  # input is [embedding; hidden]: the hidden half
    drafter.fc.weight.zero_()  # the other inputs start silent; noise there gave the same acceptance (1.187, now 1.185)
    drafter.fc.weight[:, -H:] = torch.eye(H, device=drafter.fc.weight.device)
    if drafter.config.version == 3:
        _hear_the_token(drafter)
        if drafter.config.fc_norm or drafter.config.norm_before_fc:
            # a normed tap is far smaller than the stream that the target's block, and now this layer, adds to
            ids = torch.arange(min(64, target.max_positions, target.vocab_size), device=target.device)[None]
            taps = target.forward(ids, torch.arange(ids.shape[1], device=target.device)[None], taps=drafter.taps).taps
            assert taps is not None
            drafter.fc.weight *= float(taps[0, :, -H:].float().square().mean(-1).sqrt().median())


def _read_the_final_norm(source: dict[str, Tensor], target: Target) -> None:
    """Puts norms into the weights of the target's last block, for EAGLE-1's layer to start from.

    That layer has no norm before its attention, and reads what the target's final norm has scaled, where the block had
    its own norm: SmolLM2's attention scores would be 20 times too large and its values 5 times. And nothing norms its
    output, which starts as the hidden state that it reads; what the layer adds to it before it has learned is noise.
    SmolLM2, 35k tokens twice, one seed: 25 % of the first drafts are right where 15 % were, at lr 1e-3 and 5e-4.
    """
    final, before, after = (
        _final_norm(target), source.get("input_layernorm.weight"), source.get("post_attention_layernorm.weight")
    )  # fmt: skip
    if final is None or before is None or after is None:
        return
    undo = torch.where(final.abs() > 1e-3, 1 / final, 0.0).to(before.device)
    source["post_attention_layernorm.weight"] = after * undo
    for name in READS:
        if name in source:
            source[name] = source[name].float() * before * undo
    for name in ("self_attn.v_proj.weight", "mlp.up_proj.weight"):
        if name in source:
            source[name] = source[name] * QUIET


def _hear_the_token(drafter: EagleDrafter) -> None:
    """Lets half of the heads of a warm EAGLE-3 layer read the token of their own row.

    The token x[t+1] reaches the layer's output through attention alone, and the target's last block hardly looks at its
    own row: most of its heads look at the first one. So the drafter would learn for long to predict without the token.
    The heads given here make query and key alike of the embedding, and pass a random part of it on. SmolLM2, 35k tokens
    twice, one seed: the loss of the last steps is 1.56 where it was 1.89; a chain of 3 on 30 prompts that were not
    trained on gives 1.29 tokens a step where it gave 1.27.
    """
    attention, llama, H = drafter.layer.self_attn, drafter.config.llama, drafter.config.llama.hidden_size
    d, group = llama.head_dim, llama.num_attention_heads // llama.num_key_value_heads
    first = llama.num_key_value_heads - llama.num_key_value_heads // 2  # of the KV heads that are given away
    for head in range(first, llama.num_key_value_heads):
        rows = slice(head * d, (head + 1) * d)
        # rows of length 1: of a normed embedding, each gives about 1, and d of them squared a score of sqrt(d)
        key, value = F.normalize(torch.randn(2 * d, H, device=drafter.fc.weight.device), dim=1).split(d)
        key = key * (OWN_SCORE / d**0.5) ** 0.5
        for weight, part in ((attention.k_proj.weight, key), (attention.v_proj.weight, value)):
            weight[rows] = 0
            weight[rows, :H] = part
        for query in range(head * group, (head + 1) * group):
            rows = slice(query * d, (query + 1) * d)
            attention.q_proj.weight[rows] = 0
            attention.q_proj.weight[rows, :H] = key
            attention.o_proj.weight[:, rows] *= TOKEN_GAIN
    drafter.layer.mlp.down_proj.weight *= MLP_SHARE
