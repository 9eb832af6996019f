"""Targets that are more than a folder of plain weights (a LoRA adapter over a base, quantized ones), or can be none."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from drafters.errors import UserError
from drafters.files import read_json

ADAPTER = "adapter_config.json"
ROLLBACK_LAYERS = {"full_attention", "sliding_attention"}


def split_adapter(path: str) -> tuple[str, Path | None]:
    """The folder or hub id of the base model, and the LoRA adapter's folder if `path` is one.

    Raises:
        UserError: another kind of adapter, or one that names no base.
    """
    folder = Path(path)
    if not (folder / ADAPTER).is_file() or (folder / "config.json").is_file():
        return path, None
    config = read_json(folder / ADAPTER)
    base = config.get("base_model_name_or_path")
    if config.get("peft_type") != "LORA" or not base:
        raise UserError(
            f"target.name={path!r} is an adapter of peft_type={config.get('peft_type')!r} on {base!r}; only LoRA that "
            "names its base model is merged here; merge it and save it first"
        )
    return str(base), folder


def load_model(path: str, adapter: Path | None, config: Any, **options: Any) -> PreTrainedModel:
    """`AutoModelForCausalLM.from_pretrained` that leaves no weight at random, with the adapter merged in.

    Args:
        path: folder or hub id of the model.
        adapter: from `split_adapter`; merged in the weights' dtype.
        config: the model's; its quantization is what transformers supports with the packages that are installed.
        **options: of `from_pretrained`.

    Raises:
        UserError: an unknown quantization, or weights that the files do not hold.
    """
    quantization = getattr(config, "quantization_config", None) or {}
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method is not None and str(method) not in AUTO_QUANTIZATION_CONFIG_MAPPING and method != "bitsandbytes":
        raise UserError(f"target.name={path!r}: quantization {method!r} is not one that transformers knows")
    if adapter is not None and quantization:
        raise UserError(f"target.name={str(adapter)!r}: its base {path!r} is quantized; merge it and save it first")
    loaded: Any = AutoModelForCausalLM.from_pretrained(path, config=config, output_loading_info=True, **options)
    model, missing = loaded[0], sorted(loaded[1]["missing_keys"])
    if missing:  # transformers only prints a table and goes on with random numbers
        raise UserError(
            f"target.name={path!r}: its files lack {len(missing)} weights of the model, such as {missing[0]}, which "
            "would be random"
        )
    return model if adapter is None else _merged(model, adapter)


def _merged(model: PreTrainedModel, adapter: Path) -> PreTrainedModel:
    from peft import PeftModel  # only who has an adapter needs it

    names = {name for name, _ in model.named_parameters()}
    try:
        merged: Any = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    except (RuntimeError, KeyError, TypeError) as error:  # shapes or names of another base
        raise UserError(
            f"target.name={str(adapter)!r} does not fit its base: {str(error).strip().splitlines()[0]}"
        ) from error
    left = [name for name, _ in merged.named_parameters() if name not in names]
    if left:
        raise UserError(f"target.name={str(adapter)!r}: {left[0]} stays after merging; merge it and save it first")
    with torch.no_grad():
        if not all(torch.isfinite(w).all() for w in merged.parameters()):
            raise UserError(f"target.name={str(adapter)!r}: the merged weights hold NaN or infinity")
    return merged


def refuse(config: Any, name: str) -> None:
    """Refuses what cannot be decoded speculatively, by name, before any weight is read."""
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"target {name!r} is an encoder-decoder ({config.model_type}); headstart needs a decoder-only model"
        )
    local = "local" in (getattr(config, "attention_layers", None) or ())  # GPT-Neo
    if local or getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt", "xglm"):
        raise UserError(
            f"target {name!r} ({config.model_type}) places tokens by where they lie in its cache, where the "
            "branches of a draft tree lie side by side; such models are not supported"
        )
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or []) - ROLLBACK_LAYERS
    if kinds:
        refuse_state(name, f"{config.model_type}: {', '.join(sorted(kinds))}")


def refuse_state(name: str, what: str) -> None:
    """Refuses a model of recurrent state, by name."""
    raise UserError(
        f"target {name!r} ({what}) keeps state that cannot be rolled back after a rejected draft; "
        "only attention caches of full or sliding layers are supported"
    )
