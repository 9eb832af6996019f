"""What each server loads, why it would not, and how it is launched.

The rules were read in the servers' code: vLLM 0.32, SGLang 0.5.23, speculators 0.9, TGI (maintenance), TensorRT-LLM's
PyTorch backend, SafeAILab/EAGLE and FasterDecoding/Medusa. Most of what goes wrong there goes wrong in silence: the
server is healthy and the acceptance is 1.
"""

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from drafters.eagle import NORMS
from drafters.errors import UserError
from drafters.files import RawFolder
from drafters.readers import TAPS, norms_of

SUPPORT = {
    "vllm": ("eagle1", "eagle3", "medusa"),
    "sglang": ("eagle1", "eagle3"),
    "speculators": ("eagle3",),
    "tgi": ("medusa",),
    "trtllm": ("eagle3", "medusa"),
    "eagle": ("eagle1", "eagle3"),
    "medusa": ("medusa",),
}
"""Server or format -> kinds of drafter that it loads."""

NAMES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "speculators": "speculators (vLLM serves it)",
    "tgi": "TGI",
    "trtllm": "TensorRT-LLM",
    "eagle": "SafeAILab/EAGLE",
    "medusa": "FasterDecoding/Medusa",
}

EAGLE3_ARCHITECTURES = {
    "vllm": ("LlamaForCausalLMEagle3", "LlamaForCausalLM", "Eagle3LlamaForCausalLM"),
    "sglang": ("LlamaForCausalLMEagle3",),
    "trtllm": ("LlamaForCausalLMEagle3",),
}

Finding = tuple[bool, str]  # whether it stops the drafter from working there, and why


HOT_TOKENS = "hot_token_ids.pt"
"""EAGLE-1's draft vocabulary beside an export for SGLang."""


def obstacles(
    server: str, kind: str, config: dict[str, Any], names: Mapping[str, Tensor], layers: int | None = None
) -> list[str]:
    """Why a server can't load a drafter in any layout; empty: `drafters.export` writes it for that server.

    Args:
        server: a key of `SUPPORT`.
        kind: of the drafter.
        config: in our native form, or as it lies in a folder.
        names: tensors by name, in the same form.
        layers: L of the target, which SafeAILab's taps follow from; None: not known here.
    """
    if kind not in SUPPORT[server]:
        return [f"loads no {kind} drafter; only {', '.join(SUPPORT[server])}"]
    llama = config.get("transformer_layer_config", config)
    if kind == "medusa":
        mapped = server != "vllm" and "token_map" in names
        return ["knows no draft vocabulary (token_map); train with drafter.draft_vocab=null"] if mapped else []
    act = llama.get("hidden_act") or "silu"
    out = [f"knows hidden_act=silu only, not {act}"] if act != "silu" else []
    bias = names.get("fc.bias")
    if server == "vllm" and kind == "eagle1" and bias is not None and bool(bias.any()):
        out.append("drops fc.bias silently, which is not zero here")
    if kind == "eagle1":
        return out
    ignored = {"sglang": {"norm_before_residual", "norm_output"}, "trtllm": {"norm_before_residual", "fc_norm"}}
    lost = sorted(set(norms_of(config)) & (set(NORMS) if server == "eagle" else ignored.get(server, set())))
    out += [f"ignores {', '.join(lost)}"] if lost else []
    taps, nested = config.get(TAPS) or [], (config.get("eagle_config") or {}).get(TAPS) or []
    if server in ignored and (0 in taps or -1 in nested):
        out.append("can't tap the embeddings (layer 0)")
    if server == "eagle":
        width = llama.get("num_attention_heads", 0) * (llama.get("head_dim") or 0)
        if width not in (0, llama.get("hidden_size")):
            out.append(f"heads x head_dim ({width}) must be the hidden size")
        L = layers or (taps or [0])[-1] + 3
        if taps and list(taps) != [2, L // 2, L - 3]:
            out.append(f"always taps 2, L // 2 and L - 3, and this drafter reads {list(taps)}")
    return out


def homes(kind: str, config: dict[str, Any], names: Mapping[str, Tensor], layers: int | None = None) -> list[str]:
    """The servers that this drafter can be exported for; arguments as in `obstacles`."""
    return [server for server in SUPPORT if not obstacles(server, kind, config, names, layers)]


def check_pair(
    server: str, kind: str, config: dict[str, Any], names: Mapping[str, Tensor], layers: int | None = None
) -> None:
    """Refuses a server that this drafter can't be written for, and names what does work; as in `obstacles`."""
    if server not in SUPPORT:
        raise UserError(f"--to {server}: one of {', '.join(SUPPORT)}, hub is allowed")
    why = obstacles(server, kind, config, names, layers)
    if why:
        works = ", ".join(homes(kind, config, names, layers)) or "nothing yet; it decodes with headstart only"
        raise UserError(f"--to {server}: {NAMES[server]} {'; '.join(why)}. This drafter works with --to {works}")


def findings(raw: RawFolder, kind: str, server: str) -> list[Finding]:
    """What a server would make of this folder as it lies there; empty: it loads, and means what it says."""
    out: list[Finding] = [(True, why) for why in obstacles(server, kind, raw.config, raw.weights)]
    if kind not in SUPPORT[server]:
        return out
    rules = {"eagle3": _eagle3, "eagle1": _eagle1, "medusa": _medusa}[kind]
    rules(raw, server, lambda bad, stops, why: out.append((stops, why)) if bad else None)
    return out


Note = Callable[[bool, bool, str], None]  # condition, whether it stops, why


def _architectures(config: dict[str, Any]) -> list[str]:
    names = config.get("architectures") or []
    return [names] if isinstance(names, str) else list(names)


def _weight_files(raw: RawFolder, server: str, note: Note) -> None:
    others = sorted(p.name for p in raw.folder.glob("*.safetensors") if p.name not in raw.files)
    note(
        server in ("vllm", "sglang", "speculators") and bool(others),
        True,
        f"reads every *.safetensors of a folder, so {', '.join(others)} too; export to a folder of its own",
    )


def _eagle_config(raw: RawFolder, llama: dict[str, Any], note: Note) -> None:
    rope = llama.get("rope_parameters") or {}
    note(
        bool(rope) and "rope_theta" not in llama and rope.get("rope_theta") != 10000.0,
        False,
        "only rope_parameters is written: older versions read rope_theta and silently take 10000",
    )
    note(any(n.startswith("model.") for n in raw.weights), True, "tensor names begin with model.: dropped silently")
    note(bool(llama.get("tie_word_embeddings")), True, "tie_word_embeddings is true: the head becomes the embedding")
    note((llama.get("num_hidden_layers") or 1) != 1, True, "more than one layer: the servers disagree on its norms")


def _eagle3(raw: RawFolder, server: str, note: Note) -> None:
    config, names = raw.config, raw.weights
    spec = "speculators_model_type" in config
    llama = config.get("transformer_layer_config", config)
    nested = (config.get("eagle_config") or {}).get(TAPS)
    top = config.get(TAPS)
    V, head = llama.get("vocab_size"), names.get("lm_head.weight")
    size = None if head is None else len(head)
    arch = _architectures(config)
    _weight_files(raw, server, note)
    _eagle_config(raw, llama, note)
    if server == "speculators":
        note(not spec, True, "config.json is not a speculators config; export it with --to speculators")
        note(spec and "model_type" in config, True, "a top-level model_type hides the format from vLLM")
        note(spec and "norm_before_residual" not in config, True, "norm_before_residual is absent: vLLM takes true")
    elif server != "vllm":
        note(spec, True, f"does not read the speculators format; export it with --to {server}")
    known = EAGLE3_ARCHITECTURES.get(server)
    wrong = known is not None and not spec and not set(arch) & set(known)
    note(wrong, True, f"architectures={arch}, expected {' or '.join(known or ())}")
    note(
        head is None and config.get("draft_vocab_size") not in (None, V),
        True,
        "no lm_head.weight for its vocabulary",
    )
    note(
        size is not None and size != V and "d2t" not in names,
        True,
        "no d2t: draft ids are taken as target ids",
    )
    note(size == V and "d2t" in names and server in ("vllm", "speculators"), True, "refuses d2t on a full vocabulary")
    note("draft_vocab_size" not in config and server in ("sglang", "trtllm"), True, "draft_vocab_size is not written")
    if server == "vllm" and not spec:
        note(bool(nested) and not top, True, "tap ids in eagle_config only: V1 reads one layer too low, V2 none")
        note(not nested and not top, False, "no tap ids: it takes 2, L // 2, L - 3")
    if server == "sglang":
        note(bool(top) and not nested, True, "reads tap ids from eagle_config only, and takes 2, L // 2, L - 3")
        note(not nested and not top, False, "no tap ids: it takes 2, L // 2, L - 3")
        note(any(n.startswith("layers.0.") for n in names), False, "names layers.0.*: versions before 0.5.14 drop them")
    if server == "trtllm":
        note(True, False, f"takes the layers as an argument: eagle3_layers_to_capture {[k - 1 for k in top or []]}")
    if server == "eagle":
        note(any(n.startswith("layers.0.") for n in names), True, "reads midlayer.*, not layers.0.*")
        note(not top, False, "always taps 2, L // 2 and L - 3")


def _eagle1(raw: RawFolder, server: str, note: Note) -> None:
    config, names, arch = raw.config, raw.weights, _architectures(raw.config)
    bias = names.get("fc.bias")
    _weight_files(raw, server, note)
    _eagle_config(raw, config, note)
    note("speculators_model_type" in config, True, "does not read the speculators format of EAGLE-1")
    extra = [n for n in names if n.startswith(("lm_head.", "norm.", "layers.0.input_layernorm."))]
    note(bool(extra) and server == "vllm", True, f"has no place for {', '.join(extra)}")
    note(bool(extra) and server == "sglang", False, f"ignores {', '.join(extra)}")
    if server == "vllm":
        note(
            not set(arch) & {"LlamaForCausalLM", "EagleLlamaForCausalLM"},
            True,
            f"architectures={arch}, expected LlamaForCausalLM or EagleLlamaForCausalLM",
        )
    if server == "sglang":
        note("LlamaForCausalLMEagle" not in arch, True, f"architectures={arch}, expected LlamaForCausalLMEagle")
        note(bias is None, True, "fc.bias is missing and would stay random; export writes zeros")
    if server == "eagle":
        note(
            config.get("bias", True) and bias is None,
            True,
            "the config lacks bias: false, but there is no fc.bias",
        )


def _medusa(raw: RawFolder, server: str, note: Note) -> None:
    config, names = raw.config, raw.weights
    vllm_names = any(n.startswith("blocks.") for n in names)
    bias = any(n.endswith(".bias") for n in names)
    _weight_files(raw, server, note)
    if server == "vllm":
        note(not vllm_names, False, "reference names: versions before 0.26 do not know them")
        note(bias and not config.get("medusa_fc_bias"), True, "drops the biases: medusa_fc_bias is not true")
        mapped = "token_map" in names and not config.get("original_lm_head")
        note(mapped, True, "builds heads of the full vocabulary only (0.32), and can't load a token_map")
        note("hidden_size" not in config, True, "hidden_size is not written, and it takes 4096")
        keys = [k for k in config if "num" in k and ("heads" in k or "layers" in k)]
        extra = [k for k in keys if k not in ("medusa_num_heads", "medusa_num_layers")]
        note(bool(extra), True, f"reads {', '.join(extra)} as its own number of heads or layers")
        return
    note(vllm_names, True, "reads the reference names only (0.0.linear.weight)")
    note(not bias, True, "needs a bias in every block")
    file = "medusa_lm_head.safetensors" if server == "tgi" else "medusa_lm_head.pt"
    note(raw.files != [file], True, f"reads {file}, not {', '.join(raw.files)}")
    if server == "tgi":
        note("architectures" in config, True, "architectures must be absent from config.json")
    if server == "medusa":
        heads = len({n.split(".")[0] for n in names if re.match(r"\d+\.", n)})
        note(heads != 5, False, f"its loader builds 5 heads whatever the config says; the file holds {heads}")


def launch(
    server: str,
    kind: str,
    target: str,
    folder: str | Path,
    length: int,
    taps: Sequence[int] = (),
    draft_vocabulary: bool = False,
) -> str:
    """The command that serves a target with an exported drafter as a chain of `length` drafts, or plainly with 0.

    Raises:
        UserError: research code and a converter have none.
    """
    t, d = shlex.quote(target), shlex.quote(str(folder))
    if server in ("vllm", "speculators"):
        if length == 0:
            return f"vllm serve {t}"
        method = {"eagle1": "eagle"}.get(kind, kind)
        spec = json.dumps({"method": method, "model": str(folder), "num_speculative_tokens": length})
        return f"vllm serve {t} --speculative-config {shlex.quote(spec)}"  # without method it guesses from the path
    if server == "sglang":
        plain = f"python -m sglang.launch_server --model-path {t}"
        algorithm = "EAGLE3" if kind == "eagle3" else "EAGLE"  # EAGLE on an EAGLE-3 drafter: acceptance 1, no error
        mapped = kind == "eagle1" and draft_vocabulary
        tokens = f" --speculative-token-map {shlex.quote(str(Path(folder) / HOT_TOKENS))}" if mapped else ""
        return plain + (
            f" --speculative-algorithm {algorithm} --speculative-draft-model-path {d} --speculative-num-steps {length} "
            f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {length + 1}{tokens}"
            if length
            else ""
        )
    if server == "tgi":
        return (
            f"text-generation-launcher --model-id {d} --speculate {length}"
            if length
            else (f"text-generation-launcher --model-id {t}")
        )
    if server == "trtllm" and kind == "eagle3":
        how = {"decoding_type": "Eagle3", "max_draft_len": length, "speculative_model": str(folder)}
        how["eagle3_layers_to_capture"] = [k - 1 for k in taps]
        spec = json.dumps({"speculative_config": how})  # which is YAML too, whatever the path holds
        options = f" --backend pytorch --config <(echo {shlex.quote(spec)})" if length else ""
        return f"trtllm-serve {t}{options}"
    raise UserError(f"{NAMES[server]} with {kind}: no launch line is known")
