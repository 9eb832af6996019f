"""Reads a drafter folder, ours or a published one, into our native form: config keys, tensor names, notes.

Known layouts: SafeAILab's EAGLE 1, 2 and 3, SpecForge, speculators (eagle, eagle3), Medusa in the reference's names and
in vLLM's; as safetensors, `.bin` or `.pt` (tensors only, never code), in one file or sharded. Nothing is dropped in
silence: what is renamed, assumed or left out is a note, what looks wrong is a warning, and a tensor with no place here
stays in the result under its own name, where `load_drafter` refuses it.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters.eagle import NORMS
from drafters.errors import UserError
from drafters.files import CONFIG, RawFolder, is_native
from drafters.target import Target
from drafters.vocab import to_offsets

TAPS = "eagle_aux_hidden_state_layer_ids"
LLAMA_KEYS = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")  # without them: no shapes


@dataclass
class Checkpoint:
    """A drafter in our native form: what `load_drafter` builds from."""

    kind: str
    layout: str
    config: dict[str, Any]
    weights: dict[str, Tensor]
    meta: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    """What was renamed, assumed or left out on purpose."""
    warnings: list[str] = field(default_factory=list)
    """What looks wrong."""


def read_checkpoint(raw: RawFolder, target: Target | None = None) -> Checkpoint:
    """Brings a folder into native form.

    Args:
        raw: from `read_folder`.
        target: the model it serves: fills in what the format leaves to the target (default taps, shared head), and
            tells whether an embedding that came along is the target's own. None: such gaps become warnings.

    Raises:
        UserError: a layout that is not known here, or keys that are missing.
    """
    if is_native(raw.meta) or raw.config.get("model_type") == "hydra":  # Hydra has no layout but ours
        return Checkpoint(kind_of(raw.folder, raw.config), "headstart", raw.config, raw.weights, raw.meta)
    names = set(raw.weights)
    spec = raw.config.get("speculators_model_type")
    if spec not in (None, "eagle", "eagle3"):
        raise UserError(
            f"{raw.folder / CONFIG}: speculators_model_type={spec!r} is not read here; eagle3 and eagle are"
        )
    if any(re.match(r"(medusa_heads?\.|heads\.)?\d+\.\d+\.|blocks\.\d+\.layers\.", n) for n in names):
        return _medusa(raw, target)
    if any(n.endswith("hidden_norm.weight") for n in names):
        return _eagle(raw, 3, "speculators" if spec else "raw EAGLE-3", target)
    if any(n.removeprefix("model.") in ("fc.weight", "fusion_fc.weight") for n in names):
        return _eagle(raw, 1, "speculators" if spec else "raw EAGLE-1", target)
    shown = ", ".join(sorted(names)[:6])
    raise UserError(
        f"{raw.folder}: no layout known here; found {len(names)} tensors such as {shown}. "
        "EAGLE has fc.weight, EAGLE-3 also midlayer.hidden_norm.weight, Medusa 0.0.linear.weight or blocks.0.layers.0.*"
    )


def kind_of(folder: Path, config: dict[str, Any]) -> str:
    """The kind of drafter that a native config describes; raises `UserError` where it is none."""
    if config.get("model_type") in ("medusa", "hydra"):
        return config["model_type"]
    names = config.get("architectures") or []
    names = names if isinstance(names, list) else [names]
    if "LlamaForCausalLMEagle3" in names:
        return "eagle3"
    if config.get("model_type") == "llama" and config.get("num_hidden_layers") == 1:
        return "eagle1"
    raise UserError(
        f"{folder / CONFIG}: model_type={config.get('model_type')!r}, architectures={names} is no drafter known here"
    )


# ---- EAGLE


def _eagle(raw: RawFolder, version: int, layout: str, target: Target | None) -> Checkpoint:
    out = Checkpoint(f"eagle{version}", layout, {}, {}, dict(raw.meta))
    llama = raw.config.get("transformer_layer_config", raw.config)
    missing = [k for k in LLAMA_KEYS if not isinstance(llama.get(k), int)]
    if missing:
        raise UserError(f"{raw.folder / CONFIG}: key {missing[0]!r} is missing or not a whole number")
    out.weights = _eagle_names(raw.weights, version, out)
    _drop_embedding(out, target)
    if version == 1:
        _drop_zero_bias(out, raw.config)
        _drop_shared_head(out, target)
    out.config = _llama_config(raw, llama, out)
    if version == 1:
        bias = "fc.bias" in out.weights
        out.config |= {"architectures": ["LlamaForCausalLM"], "bias": bias}
    else:
        taps = _taps(raw.config, out, target)
        _eagle3_vocabulary(raw, out, target)
        flags = _eagle_flags(raw.config, out)
        out.config |= {"architectures": ["LlamaForCausalLMEagle3"], TAPS: taps, **flags}
    out.meta = {"kind": out.kind, "made_for": _made_for(raw.config), **out.meta}
    return out


def _eagle_names(weights: dict[str, Tensor], version: int, out: Checkpoint) -> dict[str, Tensor]:
    layer = "midlayer." if version == 3 else "layers.0."
    named = {}
    for name, weight in weights.items():
        new = name.removeprefix("model.")
        new = re.sub(r"^(layers\.0\.|midlayer\.|transformer\.)", layer, new).replace("fusion_fc.", "fc.")
        if new.endswith("rotary_emb.inv_freq") or new.startswith(("verifier_norm.", "verifier_lm_head.")):
            out.notes.append(f"left out {name}: it follows from the config or is the target's")
            continue
        if new in named:
            raise UserError(f"{name} and another tensor both stand for {new}")
        named[new] = weight
    renamed = sum(new not in weights for new in named)
    if renamed:
        out.notes.append(f"{renamed} of {len(weights)} tensors renamed to our names ({layer}*)")
    return named


def _drop_embedding(out: Checkpoint, target: Target | None) -> None:
    """EAGLE drafters share the target's embedding, as SGLang does; a copy of it in the file only takes space."""
    own = out.weights.pop("embed_tokens.weight", None)
    if own is None:
        return
    if target is None:
        out.notes.append(f"embed_tokens.weight {tuple(own.shape)} left out: the target's is shared (not compared)")
    elif own.shape == target.embedding.shape and _close(own, target.embedding):
        out.notes.append("embed_tokens.weight left out: it equals the target's, which is shared")
    else:
        out.warnings.append(
            "embed_tokens.weight differs from the target's; the target's is used, as SGLang does (vLLM keeps this one)"
        )


def _drop_zero_bias(out: Checkpoint, config: dict[str, Any]) -> None:
    bias = out.weights.get("fc.bias")
    if bias is not None and not bias.any():
        del out.weights["fc.bias"]
        out.notes.append("fc.bias is all zero and left out")
    elif bias is None and config.get("bias", config.get("fusion_bias")):
        out.warnings.append("config says bias: true but there is no fc.bias; taken as none")


def _drop_shared_head(out: Checkpoint, target: Target | None) -> None:
    head = out.weights.get("lm_head.weight")
    if head is None or target is None:
        return
    if head.shape == target.lm_head.weight.shape and _close(head, target.lm_head.weight):
        del out.weights["lm_head.weight"]
        out.notes.append("lm_head.weight left out: it equals the target's, which EAGLE-1 shares")


def _close(own: Tensor, theirs: Tensor) -> bool:
    """Equal up to the coarser of the two dtypes."""
    coarse = min(own.dtype, theirs.dtype, key=lambda d: torch.finfo(d).bits)
    return torch.equal(own.to(theirs.device, coarse), theirs.detach().to(coarse))


def _llama_config(raw: RawFolder, llama: dict[str, Any], out: Checkpoint) -> dict[str, Any]:
    heads = llama["num_attention_heads"]
    rope = dict(llama.get("rope_parameters") or {})
    scaling = dict(llama.get("rope_scaling") or {k: v for k, v in rope.items() if k != "rope_theta"})
    kind = scaling.pop("type", None)
    scaling["rope_type"] = scaling.get("rope_type") or kind or "default"
    theta = llama.get("rope_theta", rope.get("rope_theta"))
    if theta is None:
        out.notes.append("no rope_theta: 10000, as every server assumes")
    layers = llama.get("num_hidden_layers", 1)
    if layers != 1:
        out.warnings.append(f"num_hidden_layers={layers}; drafters here have one")
    return {
        "model_type": "llama",
        **{k: llama[k] for k in LLAMA_KEYS},
        "num_hidden_layers": 1,
        "num_key_value_heads": llama.get("num_key_value_heads") or heads,
        "head_dim": llama.get("head_dim") or llama["hidden_size"] // heads,
        "hidden_act": llama.get("hidden_act", "silu"),
        "rms_norm_eps": llama.get("rms_norm_eps", 1e-6),  # LlamaConfig's own default
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": llama.get("max_position_embeddings", 2048),
        "rope_theta": 10000.0 if theta is None else float(theta),
        "rope_scaling": None if scaling["rope_type"] == "default" else scaling,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
    }


def _taps(config: dict[str, Any], out: Checkpoint, target: Target | None) -> list[int] | None:
    """Tapped layers as indices into hidden_states: written at the top, or nested and one lower, or by convention."""
    nested = (config.get("eagle_config") or {}).get(TAPS)
    top = config.get(TAPS)
    if top:
        if nested and [k + 1 for k in nested] != list(top):
            out.warnings.append(f"{TAPS} at the top {top} and nested {nested} (one lower) name different layers")
        taps = list(top)
    elif nested:
        out.notes.append(f"taps from eagle_config, one lower by SpecForge's convention: {nested}")
        taps = [k + 1 for k in nested]
    elif target is None:
        out.notes.append("no tap ids: 2, L // 2 and L - 3 of the target's L layers, as every server assumes")
        return None
    else:
        L = target.num_layers
        taps = [2, L // 2, L - 3]
        out.notes.append(f"no tap ids: {taps} of the target's {L} layers, as every server assumes")
    if taps != sorted(taps):
        out.warnings.append(f"tap ids {taps} do not ascend; servers read them in ascending order, and so do we")
    return sorted(taps)


def norms_of(config: dict[str, Any]) -> tuple[str, ...]:
    """The further norms of an EAGLE-3 config, by any of the keys that published checkpoints say them with."""
    nested = config.get("eagle_config")
    nested = nested if isinstance(nested, dict) else {}
    also = {
        "fc_norm": config.get("use_aux_norm"),  # SGLang's older name
        "norm_output": nested.get("return_hidden_post_norm"),  # TensorRT-LLM's name
    }
    return tuple(name for name in NORMS if config.get(name) or nested.get(name) or also.get(name))


def _eagle_flags(config: dict[str, Any], out: Checkpoint) -> dict[str, bool]:
    if out.layout == "speculators" and "norm_before_residual" not in config:
        out.warnings.append("norm_before_residual is not written: false, speculators' default; vLLM assumes true")
    return {name: name in norms_of(config) for name in NORMS}


def _eagle3_vocabulary(raw: RawFolder, out: Checkpoint, target: Target | None) -> None:
    """`d2t` as int64 offsets of ascending ids with its `t2d`, or neither; the head beside it."""
    V, w = out.config["vocab_size"], out.weights
    if "lm_head.weight" not in w and raw.config.get("draft_vocab_size") in (None, V):
        if target is None:
            out.notes.append("no lm_head.weight: the target's head is used")
        else:
            w["lm_head.weight"] = target.lm_head.weight.detach().float().cpu()
            out.notes.append("no lm_head.weight and no smaller vocabulary: the target's head is used")
    if "lm_head.weight" not in w:
        out.warnings.append("no lm_head.weight")
        return
    size = len(w["lm_head.weight"])
    out.config["draft_vocab_size"] = size
    if raw.config.get("draft_vocab_size") not in (None, size):
        out.warnings.append(f"draft_vocab_size={raw.config['draft_vocab_size']}, but lm_head.weight has {size} rows")
    if "d2t" not in w:
        if size < V:
            raise UserError(f"{raw.folder}: lm_head.weight has {size} of {V} rows, and no d2t says for which tokens")
        return
    if w["d2t"].shape != (size,):
        raise UserError(f"{raw.folder}: d2t has shape {tuple(w['d2t'].shape)}, but lm_head.weight has {size} rows")
    offsets = w["d2t"].long()
    if size == V and not offsets.any():
        for name in ("d2t", "t2d"):
            w.pop(name, None)
        out.notes.append("d2t is the identity on the full vocabulary and left out")
        return
    ids = offsets + torch.arange(size)
    if "t2d" not in w and size > 1 and bool((offsets[1:] > offsets[:-1]).all()):
        out.warnings.append("every d2t entry is greater than the one before: this looks like absolute ids, not offsets")
    ids = _ascending(ids, ["lm_head.weight"], out)
    w["d2t"] = to_offsets(ids)
    if "t2d" not in w:
        out.notes.append("t2d made from d2t")
        w["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, ids.clamp(0, V - 1), True)
    w["t2d"] = w["t2d"].bool()


def _ascending(ids: Tensor, heads: Iterable[str], out: Checkpoint) -> Tensor:
    """Sorted ids, the rows of the heads in their order; ids below 0 or double are left for the strict loader."""
    if bool((ids[1:] > ids[:-1]).all()) or len(ids.unique()) < len(ids) or int(ids.min()) < 0:
        return ids
    order = ids.argsort()
    for name in heads:
        out.weights[name] = out.weights[name][order].contiguous()
    out.notes.append("draft ids put in ascending order, and the rows of the head with them")
    return ids[order]


# ---- Medusa


def _medusa(raw: RawFolder, target: Target | None) -> Checkpoint:
    out = Checkpoint("medusa", "Medusa, reference names", {}, {}, dict(raw.meta))
    rest = _medusa_names(raw.weights, out)
    keys = [re.match(r"(\d+)\.(\d+)\.linear\.weight$", n) for n in out.weights]
    found = [(int(m[1]), int(m[2])) for m in keys if m]
    heads, layers = 1 + max(i for i, _ in found), 1 + max(j for _, j in found)
    hidden = out.weights["0.0.linear.weight"].shape[0] if "0.0.linear.weight" in out.weights else 0
    for key, count in (("medusa_num_heads", heads), ("medusa_num_layers", layers)):
        if raw.config.get(key) not in (None, count):
            out.warnings.append(f"{key}={raw.config[key]}, but the file holds {count}")
    _medusa_biases(raw.config, heads, layers, out)
    shared = rest.pop("lm_head.weight", None)
    if shared is None and not any(n in out.weights for n in (f"{i}.{layers}.weight" for i in range(heads))):
        out.notes.append("no heads of their own: the target's head is used for all")
        shared = None if target is None else target.lm_head.weight.detach().float().cpu()
    elif shared is not None:
        out.notes.append("original_lm_head: one lm_head.weight for all heads")
    if shared is not None:
        out.weights |= {f"{i}.{layers}.weight": shared.clone() for i in range(heads)}
    head = out.weights.get(f"0.{layers}.weight")
    rows = 0 if head is None else len(head)
    vocab = raw.config.get("vocab_size") or (target.vocab_size if target and "token_map" in rest else rows)
    if "token_map" in rest:
        names = [f"{i}.{layers}.weight" for i in range(heads) if f"{i}.{layers}.weight" in out.weights]
        out.weights["token_map"] = _ascending(rest.pop("token_map").long(), names, out)
        out.config["truncated_vocab_size"] = rows
    elif out.meta.get("layout") and out.meta.get("draft_ids"):  # our export for vLLM: rows of the whole vocabulary
        ids = torch.tensor(out.meta.pop("draft_ids"))
        out.weights |= {f"{i}.{layers}.weight": out.weights[f"{i}.{layers}.weight"][ids] for i in range(heads)}
        out.weights["token_map"] = ids
        out.config["truncated_vocab_size"] = len(ids)
    out.weights |= rest  # unknown here: the strict loader names them
    base = raw.config.get("base_model_name_or_path")
    out.config |= {
        "model_type": "medusa",
        "medusa_num_heads": heads,
        "medusa_num_layers": layers,
        "base_model_name_or_path": base,
        "hidden_size": hidden,
        "vocab_size": vocab,
        "medusa_fc_bias": True,
    }
    out.meta = {"kind": "medusa", "made_for": base, **out.meta}
    return out


def _medusa_names(weights: dict[str, Tensor], out: Checkpoint) -> dict[str, Tensor]:
    """Fills in the heads' tensors by reference names; returns what is none of them."""
    layers = max((1 + int(n.split(".")[3]) for n in weights if re.match(r"blocks\.\d+\.layers\.\d+\.", n)), default=0)
    rest: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if layers:
            new = re.sub(r"^blocks\.(\d+)\.layers\.(\d+)\.", r"\1.\2.linear.", name)
            new = re.sub(r"^lm_heads\.(\d+)\.", rf"\g<1>.{layers}.", new)
        else:
            new = re.sub(r"^(medusa_heads?|heads)\.", "", name)
        (out.weights if re.match(r"\d+\.\d+\.", new) else rest)[new] = weight
    if layers:
        out.layout = "Medusa, vLLM names"
    return rest


def _medusa_biases(config: dict[str, Any], heads: int, layers: int, out: Checkpoint) -> None:
    names = [f"{i}.{j}.linear" for i in range(heads) for j in range(layers) if f"{i}.{j}.linear.weight" in out.weights]
    bare = [n for n in names if f"{n}.bias" not in out.weights]
    for name in bare:
        out.weights[f"{name}.bias"] = torch.zeros(len(out.weights[f"{name}.weight"]))
    if bare:
        out.notes.append(f"{len(bare)} blocks without a bias: zero")
    elif config.get("medusa_fc_bias") is False:
        out.warnings.append("medusa_fc_bias is false, but the file holds biases; they are used here, vLLM drops them")


def _made_for(config: dict[str, Any]) -> str | None:
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    return verifier.get("name_or_path") or config.get("base_model_name_or_path") or config.get("target_model")
