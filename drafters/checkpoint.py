"""A drafter's folder: the portable raw layout that servers load, plus `headstart.json` with what no server reads.

EAGLE-3 and EAGLE-1 follow SafeAILab's raw layout, Medusa the reference names that vLLM (>= 0.26) reads; Hydra has
Medusa's names and a wider first block, and is for this decoder only: no server loads it. Saving re-opens the files,
compares every name, shape and dtype with an exact table, rebuilds the drafter from them alone and compares logits
before it reports success.
"""

import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from torch import Tensor
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from drafters.adapter import ADAPTER, read_adapter
from drafters.base import DraftSettings
from drafters.build import TrainedDrafter, pack_drafter
from drafters.eagle import NORMS, EagleConfig, EagleDrafter
from drafters.errors import UserError
from drafters.files import (
    CONFIG,
    META,
    WEIGHTS,
    partial_folder,
    read_folder,
    read_json,
    read_weights,
    write_json,
    write_weights,
)
from drafters.hydra import HydraDrafter
from drafters.medusa import MedusaConfig, MedusaDrafter
from drafters.readers import TAPS, Checkpoint, kind_of, norms_of, read_checkpoint
from drafters.target import Features, Target, weights_digest
from drafters.vocab import from_offsets, to_offsets

Table = dict[str, tuple[tuple[int, ...], torch.dtype]]  # tensor name -> shape, dtype


def save_drafter(drafter: TrainedDrafter, folder: str | Path, target: Target, meta: dict[str, Any]) -> Path:
    """Writes a drafter folder and proves it before it takes the final name.

    Args:
        drafter: bound to `target`, float32 master weights.
        folder: made if missing; other files in it are left alone.
        target: the model the drafter was made for; its fingerprint is stored.
        meta: what goes into `headstart.json` beside it (recipe, data counts, results, versions).

    Returns:
        The folder.

    Raises:
        UserError: the written files do not give back the drafter.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with partial_folder(folder) as temporary:
        write_weights(temporary / WEIGHTS, native_tensors(drafter))
        write_json(temporary / CONFIG, native_config(drafter, target))
        sidecar = {"kind": drafter.kind, "target": target.fingerprint, **meta}
        if drafter.kind == "eagle1" and drafter.draft_ids is not None:
            # servers know no draft vocabulary in this layout, and refuse tensors they do not know
            sidecar["draft_ids"] = drafter.draft_ids.tolist()
        adapter = getattr(drafter, "adapter", None)
        if adapter is not None:
            adapter.save(temporary / ADAPTER)
            sidecar["adapter"] = ADAPTER
        write_json(temporary / META, sidecar)
        _prove(drafter, temporary, target)
        _replace(temporary, folder)
    return folder


def load_drafter(
    folder: str | Path, target: Target, pack: bool = True, dtype: torch.dtype | None = None
) -> TrainedDrafter:
    """Rebuilds a drafter from its folder alone, ready to decode: on the target's device.

    Args:
        folder: written by `save_drafter` or `drafters.export`, or a published checkpoint (see `drafters.readers`).
            An adapter in it is read too, and applied by `drafters.adapter.adapted`.
        target: the model it will serve. Another fingerprint is a warning (on stderr, and in `meta["warnings"]`).
        pack: prepack its linear products if the target's are; not for training, which would go past them.
        dtype: of its weights; None: the target's. Training and export keep float32.

    Raises:
        UserError: missing or unreadable files, unknown, missing or misshaped tensors, another width or vocabulary.
    """
    folder = Path(folder)
    found = read_checkpoint(read_folder(folder), target)
    config, meta, weights = found.config, found.meta, found.weights
    _check_sizes(folder, config, meta, target)
    kind = kind_of(folder, config)
    draft_ids = _draft_ids(kind, weights, meta, target.vocab_size)
    for key in ("medusa_num_heads", "medusa_num_layers"):
        if (config.get(key) or 0) > len(weights):  # before so many are built
            raise UserError(f"{folder / CONFIG}: {key}={config[key]}, but there are only {len(weights)} tensors")
    drafter = _skeleton(kind, config, draft_ids, folder)
    _compare(weights, expected_tensors(drafter), folder)
    if kind == "eagle3":
        target.check_taps(drafter.taps)
    state = {_module_name(kind, name): w for name, w in weights.items() if name not in ("d2t", "t2d", "token_map")}
    drafter.load_state_dict(state, strict=True)
    drafter.digest = weights_digest(state | ({} if draft_ids is None else {"draft_ids": draft_ids}))
    drafter.to(device=target.device, dtype=dtype or target.compute_dtype)  # the id buffer keeps its integers
    drafter.eval().requires_grad_(False)
    drafter.meta = meta
    drafter.default_settings = draft_settings(meta, folder) or drafter.default_settings
    drafter.bind(target)
    if target.is_packed and pack:
        pack_drafter(drafter, target.dtype)  # EAGLE-1's head too, which is the target's
    meta["warnings"] = found.warnings + _mismatches(meta.get("target"), target)
    if isinstance(drafter, MedusaDrafter) and (meta.get("adapter") or (folder / ADAPTER).is_dir()):
        drafter.adapter = read_adapter(folder / ADAPTER, target)
        meta["adapter"] = drafter.adapter.digest()
        drafter.digest += f"+{meta['adapter']}"
        if (meta.get("target") or {}).get("weights") != target.fingerprint["weights"]:
            meta["warnings"].append("its adapter was trained on other weights than this target's; expect poor text")
    for line in meta["warnings"]:
        print(f"warning: {folder}: {line}", file=sys.stderr)
    return drafter


def draft_settings(meta: dict[str, Any], folder: Path) -> DraftSettings | None:
    """The settings that `headstart.json` asks for, if any; raises `UserError` where they are none."""
    if "draft" not in meta:
        return None
    try:
        return DraftSettings(**meta["draft"])
    except TypeError as error:
        raise UserError(f"{folder / META}: draft={meta['draft']!r} are no draft settings ({error})") from error


def expected_tensors(drafter: TrainedDrafter) -> Table:
    """The exact table of tensors a checkpoint of this drafter holds, derived from its config alone."""
    table: dict[str, tuple[int, ...]] = {}
    extra: Table = {}
    if isinstance(drafter, MedusaDrafter):
        c = drafter.config
        for i in range(c.heads):
            for j in range(c.layers):
                inputs = drafter.slots(i) if j == 0 else 1
                table[f"{i}.{j}.linear.weight"] = (c.hidden_size, inputs * c.hidden_size)
                table[f"{i}.{j}.linear.bias"] = (c.hidden_size,)
            table[f"{i}.{c.layers}.weight"] = (c.draft_vocab_size, c.hidden_size)
        if c.draft_vocab_size != c.vocab_size:
            extra["token_map"] = ((c.draft_vocab_size,), torch.int64)
    else:
        e, c = drafter.config, drafter.config.llama
        H, d, inner = c.hidden_size, c.head_dim, c.intermediate_size
        nq, nkv = c.num_attention_heads * d, c.num_key_value_heads * d
        layer, width = ("midlayer", 2 * H) if e.version == 3 else ("layers.0", H)
        table |= {
            "fc.weight": (H, len(e.taps) * e.target_hidden_size if e.version == 3 else 2 * H),
            f"{layer}.self_attn.q_proj.weight": (nq, width),
            f"{layer}.self_attn.k_proj.weight": (nkv, width),
            f"{layer}.self_attn.v_proj.weight": (nkv, width),
            f"{layer}.self_attn.o_proj.weight": (H, nq),
            f"{layer}.post_attention_layernorm.weight": (H,),
            f"{layer}.mlp.gate_proj.weight": (inner, H),
            f"{layer}.mlp.up_proj.weight": (inner, H),
            f"{layer}.mlp.down_proj.weight": (H, inner),
        }
        if e.fc_bias:
            table["fc.bias"] = (H,)
        if e.version == 3:
            table |= {
                f"{layer}.input_layernorm.weight": (H,),
                f"{layer}.hidden_norm.weight": (H,),
                "norm.weight": (H,),
                "lm_head.weight": (e.draft_vocab_size, H),
            }
            if e.norm_before_fc:
                table["input_norm.weight"] = (len(e.taps) * e.target_hidden_size,)
            if e.fc_norm:
                table |= {f"fc_norm.{i}.weight": (e.target_hidden_size,) for i in range(len(e.taps))}
            if e.draft_vocab_size != c.vocab_size:
                extra = {"d2t": ((e.draft_vocab_size,), torch.int64), "t2d": ((c.vocab_size,), torch.bool)}
    return {name: (shape, torch.float32) for name, shape in table.items()} | extra


def table_of(found: Checkpoint, folder: Path) -> Table:
    """`expected_tensors` of a folder that no target is at hand for; raises `UserError` like `load_drafter`."""
    config = dict(found.config)
    if config.get(TAPS, 0) is None:  # left to the target; their number shows in fc
        config[TAPS] = list(range(found.weights["fc.weight"].shape[1] // config["hidden_size"]))
    kind = kind_of(folder, config)
    ids = _draft_ids(kind, found.weights, found.meta, config.get("vocab_size") or 0)
    with torch.device("meta"):
        return expected_tensors(_skeleton(kind, config, ids, folder))


def native_tensors(drafter: TrainedDrafter) -> dict[str, Tensor]:
    """What `model.safetensors` holds: float32 weights by name, and the vocabulary map."""
    prefix = "heads." if isinstance(drafter, MedusaDrafter) else ""
    state = {k: v for k, v in drafter.state_dict().items() if not k.startswith("adapter.")}
    tensors = {k.removeprefix(prefix): v.detach().float().cpu().contiguous() for k, v in state.items()}
    if isinstance(drafter, EagleDrafter) and drafter.embed_scale != 1.0:  # only training knows of it
        fc, H = tensors["fc.weight"].clone(), drafter.config.llama.hidden_size
        fc[:, :H] *= drafter.embed_scale
        tensors["fc.weight"] = fc
    ids = drafter.draft_ids
    if ids is not None and isinstance(drafter, MedusaDrafter):
        tensors["token_map"] = ids.cpu().long()
    elif ids is not None and isinstance(drafter, EagleDrafter) and drafter.kind == "eagle3":
        tensors["d2t"] = to_offsets(ids.cpu().long())
        t2d = torch.zeros(drafter.config.llama.vocab_size, dtype=torch.bool)
        t2d[ids.cpu()] = True
        tensors["t2d"] = t2d
    return tensors


def native_config(drafter: TrainedDrafter, target: Target) -> dict[str, Any]:
    """What `config.json` holds."""
    if isinstance(drafter, MedusaDrafter):
        # vLLM rewrites any key with "num" and "heads" in it: only its two may be here. TGI wants no architectures.
        c = drafter.config
        config = {
            "model_type": drafter.kind,
            "medusa_num_heads": c.heads,
            "medusa_num_layers": c.layers,
            "base_model_name_or_path": target.name,
            "hidden_size": c.hidden_size,
            "vocab_size": c.vocab_size,
            "medusa_fc_bias": True,
            "torch_dtype": "float32",
        }
        return config if c.draft_vocab_size == c.vocab_size else config | {"truncated_vocab_size": c.draft_vocab_size}
    e, c = drafter.config, drafter.config.llama
    rope = dict(c.rope_parameters)
    scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
    own_limit = rope.get("rope_type") in ("dynamic", "longrope")  # whose angles follow from it
    config = {
        "architectures": ["LlamaForCausalLMEagle3" if e.version == 3 else "LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "hidden_act": c.hidden_act,
        "rms_norm_eps": c.rms_norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        # servers end their rotary cache there, or refuse longer contexts
        "max_position_embeddings": c.max_position_embeddings if own_limit else target.max_positions,
        # legacy keys: older servers read nothing else and silently fall back to 10000
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else scaling,
        "vocab_size": c.vocab_size,
        "tie_word_embeddings": False,  # copied as true from a tied target, it would overwrite the drafter's head
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }
    if e.version == 1:
        return config | {"bias": e.fc_bias}
    nested = {"norm_before_fc": "norm_before_fc", "norm_output": "return_hidden_post_norm"}  # TensorRT-LLM's places
    return config | {
        "draft_vocab_size": e.draft_vocab_size,
        **{name: name in e.norms for name in NORMS},  # written even when false: readers' defaults differ
        "num_aux_hidden_states": len(e.taps),
        "eagle_aux_hidden_state_layer_ids": list(e.taps),  # vLLM, llama.cpp: index into hidden_states
        "eagle_config": {  # SGLang: id of the layer whose output it is
            "eagle_aux_hidden_state_layer_ids": [k - 1 for k in e.taps],
            "use_aux_hidden_state": True,
            **{nested[name]: True for name in e.norms if name in nested},
        },
    }


def _skeleton(kind: str, config: dict[str, Any], draft_ids: Tensor | None, folder: Path) -> TrainedDrafter:
    try:
        if kind in ("medusa", "hydra"):
            size = config["vocab_size"] if draft_ids is None else len(draft_ids)
            shape = (
                config["medusa_num_heads"],
                config["medusa_num_layers"],
                config["hidden_size"],
                config["vocab_size"],
                size,
            )
            return (HydraDrafter if kind == "hydra" else MedusaDrafter)(MedusaConfig(*shape), draft_ids)
        rope = {"rope_type": "default"} | (config.get("rope_scaling") or {}) | {"rope_theta": config["rope_theta"]}
        _check_known(folder, "hidden_act", config.get("hidden_act", "silu"), ACT2FN)
        _check_known(folder, "rope_type", rope["rope_type"], ("default", *ROPE_INIT_FUNCTIONS))
        skip = ("rope_theta", "rope_scaling", "architectures", "eagle_config", "model_type")
        llama = LlamaConfig(**{k: v for k, v in config.items() if k not in skip}, rope_parameters=rope)
        size = llama.vocab_size if draft_ids is None else len(draft_ids)
        taps = tuple(int(k) for k in config["eagle_aux_hidden_state_layer_ids"]) if kind == "eagle3" else ()
        norms = dict.fromkeys(norms_of(config) if kind == "eagle3" else (), True)
        bias = kind == "eagle1" and config.get("bias") is True
        eagle = EagleConfig(int(kind[-1]), llama, llama.hidden_size, size, taps, fc_bias=bias, **norms)
        return EagleDrafter(eagle, draft_ids)
    except StrictDataclassError as error:
        raise UserError(f"{folder / CONFIG}: {' '.join(str(error).split())}") from error
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"{folder / CONFIG}: key {error} is missing or of the wrong kind") from error


def _check_known(folder: Path, key: str, value: Any, known: Iterable[str]) -> None:
    if value not in list(known):
        raise UserError(
            f"{folder / CONFIG}: {key}={value!r} is not known; one of {', '.join(sorted(known))} is allowed"
        )


def _draft_ids(kind: str, weights: dict[str, Tensor], meta: dict[str, Any], vocab_size: int) -> Tensor | None:
    if kind == "eagle3":
        if "d2t" not in weights:
            return None
        ids = from_offsets(weights["d2t"], vocab_size)
        listed = weights["t2d"].nonzero()[:, 0] if "t2d" in weights else ids
        if not torch.equal(ids, listed):  # an absolute map may still ascend within the vocabulary
            raise UserError(
                "d2t and t2d name different target ids (d2t: target id = draft id + offset); one was remade"
            )
        return ids
    if kind in ("medusa", "hydra"):
        mapped = weights["token_map"].long() if "token_map" in weights else None
    else:
        mapped = torch.tensor(meta["draft_ids"]) if meta.get("draft_ids") else None
    return None if mapped is None else from_offsets(to_offsets(mapped), vocab_size)


def _module_name(kind: str, name: str) -> str:
    return f"heads.{name}" if kind in ("medusa", "hydra") else name


def _check_sizes(folder: Path, config: dict[str, Any], meta: dict[str, Any], target: Target) -> None:
    for key, size in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if config.get(key) != size:
            made_for = (meta.get("target") or {}).get("name") or meta.get("made_for") or "another model"
            raise UserError(
                f"{folder}: {key}={config.get(key)}, but target {target.name!r} has {size}; made for {made_for}"
            )


def _mismatches(stored: dict[str, Any] | None, target: Target) -> list[str]:
    if not isinstance(stored, dict) or not stored:
        return ["no target fingerprint; whether it was made for this target is unknown"]
    parts = [p for p in ("config", "tokenizer", "template", "weights") if stored.get(p) != target.fingerprint[p]]
    if not parts:
        return []
    verb = "differ" if len(parts) > 1 or parts == ["weights"] else "differs"
    return [
        f"made for {stored.get('name')!r}, whose {', '.join(parts)} {verb} from {target.name!r}; "
        "output is exact, speed may fall"
    ]


def _compare(weights: dict[str, Tensor], table: Table, folder: Path) -> None:
    found: Table = {name: (tuple(w.shape), w.dtype) for name, w in weights.items()}
    problems = [f"missing {n} {table[n][0]}" for n in table if n not in found]
    problems += [f"unknown {n} {found[n][0]}" for n in found if n not in table]
    problems += [f"{n} is {found[n][0]}, not {table[n][0]}" for n in table if n in found and found[n][0] != table[n][0]]
    problems += [f"{n} holds NaN or infinity" for n, w in weights.items() if not torch.isfinite(w).all()]
    if problems:
        raise UserError(f"{folder / WEIGHTS}: {'; '.join(problems[:6])}{' ...' if len(problems) > 6 else ''}")


@torch.no_grad()
def _prove(drafter: TrainedDrafter, folder: Path, target: Target) -> None:
    """Gate two of DESIGN.md, decision 11: the drafter rebuilt from its files alone gives the trainer's logits."""
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        names = {n: (tuple(file.get_slice(n).get_shape()), file.get_tensor(n).dtype) for n in file.keys()}  # noqa: SIM118
    table = expected_tensors(drafter)
    if names != table:
        raise UserError(
            f"{folder}: wrote {sorted(set(names.items()) ^ set(table.items()))[:4]}, which is not what was meant"
        )
    config, meta = read_json(folder / CONFIG), read_json(folder / META)
    weights = read_weights(folder / WEIGHTS)
    kind = kind_of(folder, config)
    rebuilt = _skeleton(kind, config, _draft_ids(kind, weights, meta, target.vocab_size), folder)
    state = {_module_name(kind, n): w for n, w in weights.items() if n not in ("d2t", "t2d", "token_map")}
    rebuilt.load_state_dict(state, strict=True)
    rebuilt.to(target.device).bind(target)
    mine, theirs = probe_logits(drafter, target), probe_logits(rebuilt, target)
    gap = float((mine - theirs).abs().max())
    if not gap <= 1e-4 * max(1.0, float(mine.abs().max())):  # also refuses NaN
        raise UserError(
            f"{folder}: the drafter rebuilt from its files differs from the trained one by {gap:.2e} in its logits"
        )


@torch.no_grad()
def probe_logits(drafter: TrainedDrafter, target: Target) -> Tensor:
    """Draft logits on fixed made-up features, (rows, Vd) float32: two drafters that agree here are the same."""
    generator = torch.Generator().manual_seed(0)
    D, device = target.hidden_size, target.device
    ids = torch.randint(target.vocab_size, (1, 6), generator=generator).to(device)
    final = torch.randn(1, 6, D, generator=generator).to(device)
    taps = torch.randn(1, 6, max(1, len(drafter.taps)) * D, generator=generator).to(device)
    was_training = drafter.training
    drafter.eval()
    if isinstance(drafter, MedusaDrafter):
        outs = drafter.unroll(ids, Features(final, None), drafter.config.heads)
        logits = torch.cat([F.linear(out[0], drafter.head_weight(k)) for k, out in enumerate(outs)])
    else:
        outs = drafter.unroll(ids, Features(final, taps), 2)
        logits = torch.cat([drafter.logits(out[0]) for out in outs])
    drafter.train(was_training)
    return logits.float()


def _replace(temporary: Path, folder: Path) -> None:
    """Puts the finished files in place one by one: a run folder also holds state and logs to keep."""
    folder.mkdir(exist_ok=True)
    if (temporary / ADAPTER).is_dir():
        shutil.rmtree(folder / ADAPTER, ignore_errors=True)
        (temporary / ADAPTER).replace(folder / ADAPTER)
    for name in (WEIGHTS, CONFIG, META):
        (temporary / name).replace(folder / name)
