"""Files of a drafter folder: weights in any of the usual containers (tensors only, never code), and JSON."""

import contextlib
import glob
import json
import os
import pickle
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters.errors import UserError

STALE = 3600  # seconds after which the scratch of a process that is gone is deleted
WEIGHTS, CONFIG, META = "model.safetensors", "config.json", "headstart.json"

_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("transformer_layer_config", "rope_scaling", "rope_parameters", "eagle_config"), (dict,)),
    **dict.fromkeys(("speculators_config", "verifier", "target", "draft"), (dict,)),
    **dict.fromkeys(("eagle_aux_hidden_state_layer_ids", "draft_ids"), (list,)),
    **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size", "draft_vocab_size", "head_dim"), (int,)),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), (int,)),
    **dict.fromkeys(("medusa_num_heads", "medusa_num_layers", "max_position_embeddings"), (int,)),
    **dict.fromkeys(("rope_theta", "rms_norm_eps"), (int, float)),
}
_CALLED = {dict: "an object", list: "a list of whole numbers", int: "a whole number", float: "a number"}


@dataclass
class RawFolder:
    """A folder as it lies on disk."""

    folder: Path
    config: dict[str, Any]
    meta: dict[str, Any]
    weights: dict[str, Tensor]
    files: list[str]
    """The weight files that were read."""


@contextmanager
def partial_folder(folder: str | Path) -> Iterator[Path]:
    """An empty folder beside `folder`, to write into until all is proven; gone afterwards.

    Each process has its own; what a process that is gone left there goes too. Errors name `folder`, as was asked for.
    """
    folder = Path(folder)
    partial = _partial(folder)
    partial.mkdir(parents=True)
    try:
        yield partial
    except UserError as error:
        raise UserError(str(error).replace(str(partial), str(folder))) from error
    except OSError as error:
        error.filename = error.filename and str(error.filename).replace(str(partial), str(folder))
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write in the place of `path`, which it becomes when all is written: a kill leaves the old one whole."""
    partial = _partial(path)
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    """A name beside `path` for this process; what processes that are gone left under such names goes.

    Containers that share a folder know nothing of each other's processes: what is recent stays.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        owner = left.name.split(".")[-2]
        with contextlib.suppress(OSError):  # gone by now
            if not owner.isdecimal() or psutil.pid_exists(int(owner)) or time.time() - left.stat().st_mtime < STALE:
                continue
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)
    return path.with_name(f".{path.name}.{secrets.token_hex(3)}.{os.getpid()}.partial")


@contextmanager
def alone_in(folder: Path, busy: str, wait: bool = False) -> Iterator[None]:
    """Keeps other processes that ask for it out of a folder, which is made; the lock goes with the process.

    Args:
        folder: to be written to.
        busy: what to say where another process has it.
        wait: say so and wait for it.

    Raises:
        UserError: another process has it, and `wait` is off.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except NotImplementedError:
        print(f"warning: {folder} lies where no file can be locked; let no other run write there")
    except Timeout:
        if not wait:
            raise UserError(busy) from None
        print(busy, flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def read_folder(folder: str | Path) -> RawFolder:
    """Reads config, metadata and every weight of a folder.

    Raises:
        UserError: no folder, no weights or more than one candidate, unreadable or unsafe files.
    """
    folder = Path(folder)
    if folder.is_file():
        raise UserError(f"{folder}: is a file, not a drafter folder")
    meta = read_json(folder / META, missing_ok=True)
    config = read_json(folder / CONFIG)
    if is_native(meta):  # ours is one file with one name: a missing one must not be made up for by another
        return RawFolder(folder, config, meta, read_weights(folder / WEIGHTS), [WEIGHTS])
    files = _weight_files(folder)
    weights: dict[str, Tensor] = {}
    for name in files:
        part = read_weights(folder / name)
        twice = sorted(weights.keys() & part.keys())
        if twice:
            raise UserError(f"{folder / name}: {twice[0]} is in another shard too")
        weights |= part
    return RawFolder(folder, config, meta, weights, files)


def is_native(meta: dict[str, Any]) -> bool:
    """Whether `headstart.json` says that `save_drafter` wrote the folder (an export carries its layout's name)."""
    return bool(meta.get("kind")) and "layout" not in meta


def _weight_files(folder: Path) -> list[str]:
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (folder / name).is_file():
            listed = read_json(folder / name).get("weight_map")
            shards = set(map(str, listed.values())) if isinstance(listed, dict) else set()
            if not shards or any(Path(s).name != s for s in shards):
                raise UserError(f"{folder / name}: weight_map must name files of this folder")
            return sorted(shards)
    for pattern in (WEIGHTS, "medusa_lm_head.safetensors", "pytorch_model.bin", "medusa_lm_head.pt"):
        if (folder / pattern).is_file():
            return [pattern]
    for pattern in ("*.safetensors", "*.bin", "*.pt"):
        found = sorted(p.name for p in folder.glob(pattern))
        if len(found) > 1:
            raise UserError(f"{folder}: several weight files ({', '.join(found[:4])}); keep the drafter's alone")
        if found:
            return found
    raise UserError(
        f"{folder / WEIGHTS}: no such file, nor any other .safetensors, .bin or .pt; a drafter folder holds {CONFIG} "
        "and one file of weights"
    )


def read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors of one file; pickles may hold tensors only.

    Raises:
        UserError: missing, cut short, or more than tensors.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file; a drafter folder holds {CONFIG}, {WEIGHTS} and {META}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # torch's own words would advise to open it anyway
        raise UserError(
            f"{path}: holds more than tensors, perhaps code, and is not opened; get it as .safetensors"
        ) from error
    except (SafetensorError, OSError, RuntimeError, EOFError) as error:
        why = str(error).partition(". ")[0].partition("\n")[0] or "an empty file"
        raise UserError(f"{path}: cannot be read ({why}); was the copy cut short?") from error
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise UserError(f"{path}: a mapping of names to tensors is expected")
    return {str(name): weight.contiguous() for name, weight in state.items()}


def write_weights(path: Path, tensors: dict[str, Tensor]) -> None:
    """Tensors as one file, a pickle where its name ends in .pt; its mode follows the umask."""
    if path.suffix == ".pt":
        torch.save(tensors, path)
        return
    save_file(tensors, path, metadata={"format": "pt"})
    mask = os.umask(0o077)  # reading it means setting it
    os.umask(mask)
    path.chmod(0o666 & ~mask)  # safetensors lets nobody but the owner read


def read_json(path: Path, missing_ok: bool = False) -> dict[str, Any]:
    """A JSON object; {} where the file may be missing and is.

    Raises:
        UserError: missing, or no JSON object.
    """
    if not path.is_file():
        if missing_ok:
            return {}
        hint = f"; is {path.parent} a drafter folder?" if path.name in (CONFIG, META) else ""
        raise UserError(f"{path}: no such file{hint}")
    try:
        value = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: a JSON object is expected")
    if path.name in (CONFIG, META):
        _check_kinds(path, value)
    return value


def _check_kinds(path: Path, values: dict[str, Any]) -> None:
    """Raises `UserError` where a key that is read here holds another kind of value, or a size of nothing.

    null stands for no value.
    """
    for key, value in values.items():
        kinds = _KINDS.get(key)
        if kinds is None or value is None:
            continue
        numbers = not isinstance(value, list) or all(isinstance(item, int) for item in value)
        if not isinstance(value, kinds) or not numbers:
            raise UserError(f"{path}: {key}={value!r:.60} is not {_CALLED[kinds[-1]]}")
        if kinds == (int,) and isinstance(value, int) and value < 1:
            raise UserError(f"{path}: {key}={value} must be at least 1")
        if isinstance(value, dict):
            _check_kinds(path, value)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a JSON file for people to read too."""
    path.write_text(json.dumps(value, indent=2) + "\n")
