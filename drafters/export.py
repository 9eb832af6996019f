"""Writes a drafter in the exact layout that a server loads, and proves what was written from the files alone.

Raw layout (vLLM, SGLang, TensorRT-LLM, SafeAILab), speculators' format, Medusa by server; `drafters.servers` says which
pairs exist. What a server reads in silence when it is wrong is written out: both conventions of tap ids, legacy rope
keys, an untied head, every flag, offsets as int64, one weight file.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters.adapter import ADAPTER
from drafters.build import TrainedDrafter
from drafters.checkpoint import Table, load_drafter, native_config, native_tensors
from drafters.eagle import NORMS, EagleDrafter
from drafters.errors import UserError
from drafters.files import (
    CONFIG,
    META,
    WEIGHTS,
    RawFolder,
    partial_folder,
    read_json,
    read_weights,
    write_json,
    write_weights,
)
from drafters.locate import resolve_path
from drafters.medusa import MedusaDrafter
from drafters.readers import TAPS
from drafters.rebuild import rebuilt_logits
from drafters.servers import HOT_TOKENS, NAMES, check_pair, findings, homes
from drafters.target import Features, Target
from drafters.vocab import from_offsets

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCE = 1e-4


def export(run: str | Path, server: str, out: str | Path, target: Target, dtype: str = "float32") -> Path:
    """Writes `run`'s drafter for a server into the new folder `out`, and checks it.

    Args:
        run: a drafter folder, ours or any that `load_drafter` reads.
        server: a key of `drafters.servers.SUPPORT`.
        out: made here; must not hold anything yet.
        target: the model it serves.
        dtype: of the weights; "float32" keeps them bit for bit, "bfloat16" halves the file.

    Raises:
        UserError: a pair that does not exist, a drafter that the server would load wrongly, or a failed check.
    """
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype}: {' or '.join(DTYPES)} is allowed")
    with new_folder(out) as folder:
        drafter = load_drafter(run, target, pack=False, dtype=torch.float32)
        check_pair(server, *native_form(drafter, target))
        for weight in drafter.parameters():
            weight.data = weight.data.to(DTYPES[dtype]).float()  # what is exported is what is checked
        if server == "speculators" and isinstance(drafter, EagleDrafter):  # whose files hold the embedding too
            drafter._shared["embedding"] = target.embedding.detach().to(DTYPES[dtype]).float()
        _write(drafter, server, folder, target, dtype)
        check_export(folder, server, drafter, target)
    return Path(out)


def native_form(drafter: TrainedDrafter, target: Target) -> tuple[str, dict[str, Any], dict[str, Tensor], int]:
    """What `drafters.servers.obstacles` asks about a drafter: kind, config, tensors, layers of its target."""
    return drafter.kind, native_config(drafter, target), native_tensors(drafter), target.num_layers


def homes_of(drafter: TrainedDrafter, target: Target) -> list[str]:
    """The servers that `export` writes this drafter for."""
    return homes(*native_form(drafter, target))


@contextmanager
def new_folder(out: str | Path) -> Iterator[Path]:
    """A folder to write into, which becomes `out` once all is well.

    Raises:
        UserError: see `fresh_folder`.
    """
    out = fresh_folder(out)
    with partial_folder(out) as folder:
        yield folder
        try:
            folder.replace(out)
        except OSError:
            fresh_folder(out)  # another export was quicker
            raise


def fresh_folder(out: str | Path) -> Path:
    """The path of a folder that may be written: its parent exists then, and it holds nothing.

    Raises:
        UserError: something is there already; servers read every weight file of a folder.
    """
    if not str(out):
        raise UserError("--out is empty; name a new folder")
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out} already exists and is not an empty folder; name a new one")
    out.parent.mkdir(parents=True, exist_ok=True)
    return out


# ---- writing


def _write(drafter: TrainedDrafter, server: str, folder: Path, target: Target, dtype: str) -> None:
    tensors = {
        server_name(name, drafter, server): w.to(DTYPES[dtype]) if w.is_floating_point() else w
        for name, w in native_tensors(drafter).items()
    }
    config = native_config(drafter, target) | {"torch_dtype": dtype}
    if isinstance(drafter, EagleDrafter):
        config = _eagle_config(drafter.kind, server, config, target)
        if server == "sglang" and drafter.kind == "eagle1":  # it builds fc with a bias; a missing one stays random
            tensors.setdefault("fc.bias", torch.zeros(config["hidden_size"], dtype=DTYPES[dtype]))
        if server == "speculators":  # its own files carry the embedding
            tensors["embed_tokens.weight"] = target.embedding.detach().to("cpu", DTYPES[dtype], copy=True)
    else:
        config["base_model_name_or_path"] = resolve_path(target.name)  # TGI loads the target from here
        if server == "vllm":
            config["architectures"] = ["MedusaModel"]
            if drafter.draft_ids is not None:
                config.pop("truncated_vocab_size")
                tensors = _full_heads(tensors, tensors.pop("token_map"), target.vocab_size)
    name = weight_file(server, drafter.kind)
    tensors = {n: w.contiguous() for n, w in tensors.items()}
    write_weights(folder / name, tensors)
    write_json(folder / CONFIG, config)
    meta = {k: v for k, v in drafter.meta.items() if k not in ("warnings", "notes")}
    if drafter.draft_ids is not None and drafter.kind != "eagle3":
        meta["draft_ids"] = drafter.draft_ids.tolist()  # what the weights do not say
    if isinstance(drafter, MedusaDrafter) and drafter.adapter is not None:
        drafter.adapter.save(folder / ADAPTER)  # no server applies it: it must be merged into the served target
        meta["adapter"] = ADAPTER
    write_json(folder / META, {"kind": drafter.kind, **meta, "layout": server})
    if server == "sglang" and drafter.kind == "eagle1" and drafter.draft_ids is not None:
        torch.save(drafter.draft_ids.tolist(), folder / HOT_TOKENS)  # for --speculative-token-map: absolute ids


def _full_heads(tensors: dict[str, Tensor], ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Heads over the whole vocabulary: vLLM 0.32 builds no smaller ones, so that a `token_map` can't be loaded there.

    Tokens outside the draft vocabulary get the mean of the trained rows: their score is the mean of the trained scores,
    so that none of them is ever a head's best token, which is all that vLLM drafts.
    """

    def full(rows: Tensor) -> Tensor:
        return _filler(rows).expand(vocab_size, -1).clone().index_copy_(0, ids, rows)

    return {name: full(w) if name.startswith("lm_heads.") else w for name, w in tensors.items()}


def _filler(rows: Tensor) -> Tensor:
    return rows.mean(0, keepdim=True)


def weight_file(server: str, kind: str) -> str:
    """The one file of weights."""
    if kind == "medusa" and server != "vllm":
        return "medusa_lm_head.safetensors" if server == "tgi" else "medusa_lm_head.pt"
    return WEIGHTS


def server_name(name: str, drafter: TrainedDrafter, server: str) -> str:
    """A native tensor's name in a server's layout."""
    if server == "speculators":
        return name.replace("midlayer.", "layers.0.")
    if server == "vllm" and isinstance(drafter, MedusaDrafter):  # the names that every version knows
        name = re.sub(r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name)
        return re.sub(rf"^(\d+)\.{drafter.config.layers}\.weight$", r"lm_heads.\1.weight", name)
    return name


def _eagle_config(kind: str, server: str, config: dict[str, Any], target: Target) -> dict[str, Any]:
    if config["rope_scaling"]:  # older readers know the key as "type"
        config["rope_scaling"] |= {"type": config["rope_scaling"]["rope_type"]}
    if kind == "eagle1":
        if server == "sglang":
            config |= {"architectures": ["LlamaForCausalLMEagle"], "bias": True}
        return config
    used = {flag: True for flag in NORMS if config[flag]}  # some servers read them here only
    used |= {"return_hidden_post_norm": True} if config["norm_output"] else {}
    config["eagle_config"] |= used
    if server == "eagle":
        config["architectures"] = ["LlamaForCausalLM"]
    return _speculators_config(config, target) if server == "speculators" else config


def _speculators_config(config: dict[str, Any], target: Target) -> dict[str, Any]:
    own = {"draft_vocab_size", TAPS, *NORMS}
    layer = {k: v for k, v in config.items() if k not in own | {"architectures", "eagle_config", "torch_dtype"}}
    layer.pop("num_aux_hidden_states")
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {  # no model_type at the top: vLLM would not look for this format then
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        **{k: config[k] for k in sorted(own)},
        "target_hidden_size": None,
        "embed_requires_grad": False,
        "torch_dtype": config["torch_dtype"],
        "transformer_layer_config": layer | {"architectures": ["LlamaForCausalLM"]},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": resolve_path(target.name),
                "architectures": target.model.config.architectures or [],
            },
        },
    }


# ---- proving


def check_export(folder: Path, server: str, drafter: TrainedDrafter, target: Target) -> None:
    """The four gates of an export, from its files: table, origin of every tensor, vocabulary, forward pass.

    Args:
        folder: the finished export.
        server: its layout.
        drafter: float32, as the trainer has it.
        target: the model it serves.

    Raises:
        UserError: naming the first gate that failed.
    """
    name = weight_file(server, drafter.kind)
    raw = RawFolder(folder, read_json(folder / CONFIG), read_json(folder / META), read_weights(folder / name), [name])
    stops = [why for bad, why in findings(raw, drafter.kind, server) if bad]
    if stops:
        raise UserError(f"--to {server}: {NAMES[server]} {'; '.join(stops)}")
    want = export_table(raw.config, drafter.kind, server)
    have: Table = {n: (tuple(w.shape), w.dtype) for n, w in raw.weights.items()}
    if have != want:
        raise UserError(f"{folder}: wrote {sorted(map(str, have.items() ^ want.items()))[:4]}, which is not the layout")
    _trace(raw.weights, drafter, server, target)
    _check_vocabulary(raw.weights, drafter, target)
    limit = raw.config.get("transformer_layer_config", raw.config).get("max_position_embeddings")
    if limit not in (None, target.max_positions):
        raise UserError(f"{folder}: position limit {limit} is not the target's {target.max_positions}")
    gap, size = _forward_gap(raw, drafter, target)
    if not gap <= TOLERANCE * max(1.0, size):  # also refuses NaN
        raise UserError(f"{folder}: logits rebuilt from these files differ from the trainer's by {gap:.2e}")


def export_table(config: dict[str, Any], kind: str, server: str) -> Table:
    """The exact table of a layout, from the config beside it: tensor name -> shape, dtype."""
    dtype = DTYPES[config["torch_dtype"]]
    table: dict[str, tuple[int, ...]] = {}
    maps: Table = {}
    if kind == "medusa":
        D, layers, V = config["hidden_size"], config["medusa_num_layers"], config["vocab_size"]
        for i in range(config["medusa_num_heads"]):
            for j in range(layers):
                block = f"blocks.{i}.layers.{j}" if server == "vllm" else f"{i}.{j}.linear"
                table |= {f"{block}.weight": (D, D), f"{block}.bias": (D,)}
            table[f"lm_heads.{i}.weight" if server == "vllm" else f"{i}.{layers}.weight"] = (V, D)
        return {n: (shape, dtype) for n, shape in table.items()}
    c = config.get("transformer_layer_config", config)
    H, inner, V = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    layer = "midlayer" if kind == "eagle3" and server != "speculators" else "layers.0"
    width = 2 * H if kind == "eagle3" else H
    table = {
        f"{layer}.self_attn.q_proj.weight": (q, width),
        f"{layer}.self_attn.k_proj.weight": (kv, width),
        f"{layer}.self_attn.v_proj.weight": (kv, width),
        f"{layer}.self_attn.o_proj.weight": (H, q),
        f"{layer}.mlp.gate_proj.weight": (inner, H),
        f"{layer}.mlp.up_proj.weight": (inner, H),
        f"{layer}.mlp.down_proj.weight": (H, inner),
        f"{layer}.post_attention_layernorm.weight": (H,),
    }
    if kind == "eagle1":
        table |= {"fc.weight": (H, 2 * H)} | ({"fc.bias": (H,)} if config["bias"] else {})
        return {n: (shape, dtype) for n, shape in table.items()}
    A, Vd = len(config[TAPS]), config["draft_vocab_size"]
    table |= {
        "fc.weight": (H, A * H),
        f"{layer}.input_layernorm.weight": (H,),
        f"{layer}.hidden_norm.weight": (H,),
        "norm.weight": (H,),
        "lm_head.weight": (Vd, H),
    }
    table |= {"input_norm.weight": (A * H,)} if config["norm_before_fc"] else {}
    table |= {f"fc_norm.{i}.weight": (H,) for i in range(A)} if config["fc_norm"] else {}
    table |= {"embed_tokens.weight": (V, H)} if server == "speculators" else {}
    maps = {"d2t": ((Vd,), torch.int64), "t2d": ((V,), torch.bool)} if Vd != V else {}
    return {n: (shape, dtype) for n, shape in table.items()} | maps


def _trace(weights: dict[str, Tensor], drafter: TrainedDrafter, server: str, target: Target) -> None:
    """Every tensor is bit-equal to a trained one or to the target's; nothing is made up."""
    sources = {server_name(n.removeprefix("heads."), drafter, server): w for n, w in drafter.state_dict().items()}
    sources["embed_tokens.weight"] = target.embedding
    ids = None if drafter.draft_ids is None else drafter.draft_ids.cpu()
    for name, weight in weights.items():
        if name in ("d2t", "t2d"):
            continue  # see `_check_vocabulary`
        zero_bias = name == "fc.bias" and name not in sources and not weight.any()
        source = sources.get(name)
        source = None if source is None else source.detach().cpu().to(weight.dtype)
        if ids is not None and source is not None and name.startswith("lm_heads."):  # see `_full_heads`
            others = torch.ones(len(weight), dtype=torch.bool).index_fill_(0, ids, False)
            filled = bool((weight[others] == _filler(source)).all())
            weight = weight[ids] if filled else weight
        if not zero_bias and (source is None or not torch.equal(source, weight)):
            raise UserError(f"{name} is neither a trained tensor nor the target's")


def _check_vocabulary(weights: dict[str, Tensor], drafter: TrainedDrafter, target: Target) -> None:
    ids = drafter.draft_ids
    if ids is None or drafter.kind != "eagle3":
        wrong = weights.keys() & {"d2t", "t2d", "token_map"}
    else:
        listed = from_offsets(weights["d2t"], target.vocab_size)
        same = torch.equal(listed, ids.cpu()) and torch.equal(weights["t2d"].nonzero()[:, 0], listed)
        wrong = set() if same else {"d2t", "t2d"}
    if wrong:
        raise UserError(f"vocabulary map {', '.join(sorted(wrong))} is not the trained one")


@torch.no_grad()
def _forward_gap(raw: RawFolder, drafter: TrainedDrafter, target: Target) -> tuple[float, float]:
    """Largest difference in logits between the files, rebuilt, and the trainer's drafter; and the largest logit."""
    generator, D = torch.Generator().manual_seed(1), target.hidden_size
    ids = torch.randint(target.vocab_size, (8,), generator=generator)
    final, taps = torch.randn(8, D, generator=generator), torch.randn(8, len(drafter.taps) * D, generator=generator)
    ids, final, taps = (x.to(target.device) for x in (ids, final, taps))
    head = target.lm_head.weight.detach()
    rebuilt = rebuilt_logits(raw.config, raw.weights, ids, final, taps, target.embedding.detach(), head)
    if isinstance(drafter, MedusaDrafter):
        mine = [drafter.logits(k, final) for k in range(drafter.config.heads)]
    else:
        outs = drafter.unroll(ids[None], Features(final[None], taps[None]), 2)
        mine = [drafter.logits(out[0, : len(ids) - 1 - j]) for j, out in enumerate(outs)]
    if drafter.draft_ids is not None and drafter.kind != "eagle3":  # servers draft from the whole vocabulary
        shown = [x[:, drafter.draft_ids] for x in rebuilt]
        excess = [float((a.amax(-1) - b.amax(-1)).max()) for a, b in zip(rebuilt, shown, strict=True)]
        if drafter.kind == "medusa" and max(excess) > TOLERANCE * max(1.0, float(shown[0].abs().max())):
            raise UserError(f"{raw.folder}: a token outside the draft vocabulary scores above those in it")
        rebuilt = shown
    gap = max(float((a.float() - b).abs().max()) for a, b in zip(mine, rebuilt, strict=True))
    return gap, max(float(a.abs().max()) for a in mine)
