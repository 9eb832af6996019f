"""The adapter of a drafter that was trained together with its target (Medusa-2): LoRA, switched on for a while.

Such a drafter serves the *adapted* target, whose text is not the original's. Nothing here decides for the caller: with
the adapter off, the target is what it was, bit for bit, and the drafter is still lossless for it, only worse.
"""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from drafters.errors import UserError
from drafters.llama import FastDecoder
from drafters.packing import Packed, install, pack_linears, remove
from drafters.target import Target

ADAPTER, ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter", "adapter_config.json", "adapter_model.safetensors"
# what peft can do beyond W + alpha / r * B A, and how a config says that it does not
_BEYOND = (
    "use_dora", "use_rslora", "use_qalora", "use_bdlora", "fan_in_fan_out", "lora_bias", "modules_to_save",
    "rank_pattern", "alpha_pattern", "layer_replication", "trainable_token_indices", "target_parameters",
    "alora_invocation_tokens", "arrow_config", "kasa_config", "velora_config",
)  # fmt: skip


class Adapter:
    """LoRA merged into copies of the weights it touches; `on` swaps them in.

    Args:
        target: what it adapts.
        folder: peft's files.
        deltas: module name -> (out, in) float32, what is added to the weight.
    """

    def __init__(self, target: Target, folder: Path, deltas: dict[str, Tensor]):
        self.target, self.folder = target, folder
        modules = dict(target.model.named_modules())
        self.merged: list[tuple[nn.Linear, nn.Parameter]] = []
        copies: list[nn.Linear] = []
        for name, delta in deltas.items():
            module: Any = modules[name]
            weight = (module.weight.detach().float() + delta.to(module.weight.device)).to(module.weight.dtype)
            copy = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            copy.weight, copy.bias = nn.Parameter(weight, requires_grad=False), module.bias
            copies.append(copy)
            self.merged.append((module, copy.weight))
        own = {id(copy): module for copy, (module, _) in zip(copies, self.merged, strict=True)}
        products = pack_linears(nn.ModuleList(copies)) if target.packed else []
        self.packed: Packed = [(own[id(copy)], forward) for copy, forward in products]
        self.fast: FastDecoder | None = None
        if target.fast is not None:  # it keeps weights of its own, which no module's weight changes
            with self._merged_weights():
                self.fast = FastDecoder(target.decoder, target.config)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """The target with the adapter, for a while."""
        target, packed, fast = self.target, self.target.packed, self.target.fast
        touched = {id(module) for module, _ in self.merged}
        remove(packed)
        try:
            with self._merged_weights():
                target.packed = [(m, forward) for m, forward in packed if id(m) not in touched] + self.packed
                target.fast = self.fast
                install(target.packed)
                try:
                    yield
                finally:
                    remove(target.packed)
        finally:
            target.packed, target.fast = packed, fast
            install(packed)

    @contextlib.contextmanager
    def _merged_weights(self) -> Iterator[None]:
        original: list[Any] = [(module, module.weight) for module, _ in self.merged]
        for module, weight in self.merged:
            module.weight = weight
        try:
            yield
        finally:
            for module, weight in original:
                module.weight = weight

    def save(self, folder: Path) -> None:
        """Copies peft's files."""
        shutil.copytree(self.folder, folder)

    def digest(self) -> str:
        """A hash of its weights' file."""
        return hashlib.sha256((self.folder / ADAPTER_WEIGHTS).read_bytes()).hexdigest()[:16]


def adapted(drafter: Any) -> contextlib.AbstractContextManager[None]:
    """The target as this drafter was trained for: with its adapter on, if it has one; drafter None changes nothing."""
    adapter = getattr(drafter, "adapter", None)
    return contextlib.nullcontext() if adapter is None else adapter.on()


def read_adapter(folder: Path, target: Target) -> Adapter:
    """Reads what peft saved; peft itself is not needed.

    Raises:
        UserError: files that are missing or broken, or an adapter of another kind or for another model.
    """
    return Adapter(target, folder, read_deltas(folder, target))


def read_deltas(folder: Path, target: Target) -> dict[str, Tensor]:
    """What an adapter adds to each weight: module name -> alpha / r * B A, (out, in) float32; raises as above."""
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text())
        tensors = load_file(folder / ADAPTER_WEIGHTS)
        scale = float(config["lora_alpha"]) / int(config["r"])
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError, SafetensorError) as error:
        raise UserError(f"{folder}: no adapter of peft's can be read there ({error})") from error
    beyond = [key for key in _BEYOND if config.get(key)]
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or beyond:
        raise UserError(f"{folder}: only plain LoRA without bias can be applied, not {', '.join(beyond) or 'this'}")
    modules = {n: m for n, m in target.decoder.named_modules() if hasattr(m, "weight")}
    prefix = next(n for n, m in target.model.named_modules() if m is target.decoder)
    deltas: dict[str, Tensor] = {}
    for key in [k for k in tensors if k.endswith(".lora_A.weight")]:
        name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        A, B = tensors.pop(key), tensors.pop(key.replace(".lora_A.", ".lora_B."), None)
        module = modules.get(name.removeprefix(f"{prefix}."))
        if B is None or module is None or (len(B), A.shape[1]) != tuple(module.weight.shape):
            raise UserError(f"{folder}: {name} is no linear layer of target {target.name!r} with these shapes")
        if not len(A) == B.shape[1] == int(config["r"]):  # another r would scale it wrongly
            raise UserError(f"{folder}: {name} has rank {len(A)} and {B.shape[1]}, but its config says r={config['r']}")
        deltas[name] = scale * (B.float() @ A.float())
        if not torch.isfinite(deltas[name]).all():
            raise UserError(f"{folder}: {name} holds NaN or infinity")
    if tensors or not deltas:
        raise UserError(f"{folder / ADAPTER_WEIGHTS}: {next(iter(tensors), 'an empty file')} is not understood")
    return deltas
