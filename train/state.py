"""Exact resume: everything a run needs to go on, in one safetensors file that is replaced at once.

Nothing in the loop draws from a global random stream (order, noise and draws are functions of seed, step and rank), so
weights, optimizer state by parameter name and the counters are all there is.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from drafters.errors import UserError
from drafters.files import replacing

STATE = "state.safetensors"


def save_state(
    folder: Path, drafter: nn.Module, optimizers: list[torch.optim.Optimizer], facts: dict[str, Any]
) -> None:
    """Writes weights, optimizer state and `facts` (JSON: step, best, recipe, ...)."""
    tensors = {f"weight/{name}": w for name, w in drafter.state_dict().items()}
    ids = getattr(drafter, "draft_ids", None)
    if ids is not None:
        tensors["draft_ids"] = ids
    for k, name, slot, value in _slots(drafter, optimizers):
        tensors[f"optimizer/{k}/{name}/{slot}"] = value
    flat = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / STATE) as file:
        save_file(flat, file, metadata={"facts": json.dumps(facts)})


def read_state(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Tensors and facts of the last save, or None when there was none.

    Raises:
        UserError: the file is damaged.
    """
    path = folder / STATE
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads(file.metadata()["facts"])
            return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}); delete it to train from the start") from error


def restore(tensors: dict[str, Tensor], drafter: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Puts a saved state back, by parameter name.

    Raises:
        UserError: what was trained then is not what is trained now.
    """
    drafter.load_state_dict({n.removeprefix("weight/"): t for n, t in tensors.items() if n.startswith("weight/")})
    saved = {n for n in tensors if n.startswith("optimizer/")}
    for k, optimizer in enumerate(optimizers):
        for parameter, name in _named(drafter, optimizer):
            prefix = f"optimizer/{k}/{name}/"
            slots = {n.removeprefix(prefix): tensors[n] for n in sorted(saved) if n.startswith(prefix)}
            if not slots:
                raise UserError(
                    f"the saved state has no optimizer state for {name}; was it frozen then? choose another output"
                )
            saved -= {prefix + slot for slot in slots}
            # step counters stay on the CPU, as torch keeps them
            optimizer.state[parameter] = {s: v if v.dim() == 0 else v.to(parameter.device) for s, v in slots.items()}
    if saved:
        raise UserError(
            f"the saved state trains {sorted(saved)[0].split('/')[2]}, which is frozen now; choose another output"
        )


def _slots(drafter: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Iterator[tuple[int, str, str, Tensor]]:
    for k, optimizer in enumerate(optimizers):
        for parameter, name in _named(drafter, optimizer):
            for slot, value in optimizer.state[parameter].items():
                yield k, name, slot, value if isinstance(value, Tensor) else torch.tensor(float(value))


def _named(drafter: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[nn.Parameter, str]]:
    names = {id(p): name for name, p in drafter.named_parameters()}
    return [(p, names[id(p)]) for group in optimizer.param_groups for p in group["params"]]
