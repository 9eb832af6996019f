"""Our own operators for a step over a few rows on a CPU (`kernels.c`), compiled once, if there is a C compiler."""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters.cache import Place
from drafters.locate import cache_folder


def address(tensor: Tensor | None) -> int | None:
    """As the compiled functions take it."""
    return None if tensor is None else tensor.data_ptr()


def readable(tensor: Any) -> Any:
    """A tensor as the compiled functions read it: float32, contiguous."""
    if tensor is None or (tensor.dtype == torch.float32 and tensor.is_contiguous()):
        return tensor
    return tensor.float().contiguous()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary positions, in place.

    Args:
        x: (rows, heads, d) float32 on the CPU, contiguous but for the distance between rows.
        cos: (rows, d) float32, contiguous; so is sin.
        sin: as `transformers` makes it.
    """
    rows, heads, d = x.shape
    compiled().rotate(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), rows, x.stride(0), heads, d)


class Shape(ctypes.Structure):
    """`shape_t` of `kernels.c`."""

    _fields_ = [(name, ctypes.c_long) for name in ("B", "N", "S", "H", "K", "d", "first", "batch", "head", "apart")]
    _fields_ += [("scale", ctypes.c_float)]


class Block(ctypes.Structure):
    """`block_t` of `kernels.c`: addresses of one block's weights, of its keys and values, and where its output goes."""

    _fields_ = [
        (name, ctypes.c_void_p)
        for name in (
            *("embed_norm", "attention_norm", "bias", "q_norm", "k_norm", "mlp_norm", "qkv", "out", "gate_up", "down"),
            *("keys", "values", "tap"),
        )
    ]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention of N new rows over S columns, the new ones last; see `can_attend`.

    Args:
        q: (B, N, H, d); contiguous but for the distance between rows.
        k: (B, K, S, d), any strides but the last; v has the same.
        v: (B, K, S, d).
        mask: (B or 1, 1, N, S) bool, True where a row may look; None: causal.
        scale: of the scores.

    Returns:
        (B, N, H * d).
    """
    B, N, H, d = q.shape
    K, S = k.shape[1:3]
    out = q.new_empty(B, N, H * d)
    seen, apart = _bytes(mask, B, N, S)
    shape = Shape(B, N, S, H, K, d, 0, k.stride(0), k.stride(1), apart, scale)
    compiled().attend(
        q.data_ptr(), q.stride(1), k.data_ptr(), v.data_ptr(), k.stride(2), address(seen), out.data_ptr(), shape
    )
    return out


def decode(
    blocks: "ctypes.Array[Block]", hidden: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, place: Place,
    mask: Tensor | None, heads: int, inner: int, eps: float, embeds: Tensor | None = None,
) -> None:  # fmt: skip
    """Runs blocks of a Llama-shaped decoder in place, and writes their keys and values into the cache.

    Args:
        blocks: with the addresses of their buffers in the cache.
        hidden: (B, N, D) float32 on the CPU, contiguous.
        cos: (B, N, d) float32, contiguous; d is a multiple of 16.
        sin: as `transformers` makes it, like cos.
        keys: (..., K, rows, d) float32, one of those buffers; all have its shape.
        place: where the new rows go, and what they see.
        mask: as in `attend`.
        heads: query heads.
        inner: width of the MLP.
        eps: of all norms.
        embeds: like hidden, where a block has a norm for them.
    """
    B, N, D = hidden.shape
    K, rows, d = keys.shape[-3:]
    S = place.visible
    seen, apart = _bytes(mask, B, N, S)
    shape = Shape(B, N, S, heads, K, d, place.first * d, place.batch * d, rows * d, apart, d**-0.5)
    compiled().decode(
        blocks, len(blocks), hidden.data_ptr(), address(embeds), D, inner, eps, cos.data_ptr(), sin.data_ptr(),
        place.rows.data_ptr(), address(seen), shape,
    )  # fmt: skip


def _bytes(mask: Tensor | None, B: int, N: int, S: int) -> tuple[Tensor | None, int]:
    """A mask as the compiled functions read it, and how far apart in it the batch's are."""
    shape = None if mask is None else tuple(mask.shape)
    if N > S or shape not in (None, (B, 1, N, S), (1, 1, N, S)):  # memory would be read past its end
        raise ValueError(f"attention of {B} x {N} rows over {S} columns got a mask of {shape}")
    if mask is None:
        return None, 0
    if mask.dtype != torch.bool:
        raise ValueError(f"attention got a mask of {mask.dtype}, not bool")
    return mask.contiguous(), 0 if len(mask) == 1 else N * S


def can_attend(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `attend` takes these tensors: float32 on the CPU, no gradient, laid out as it wants them."""
    if any(x.dtype != torch.float32 or x.device.type != "cpu" or x.requires_grad for x in (q, k, v)):
        return False
    same = k.stride() == v.stride() and k.shape == v.shape and k.stride(3) == q.stride(3) == 1
    rows = q.stride(2) == q.shape[3] and q.stride(0) == q.shape[1] * q.stride(1)
    return same and rows and q.shape[3] % 16 == 0 and compiled() is not None


@functools.cache
def compiled() -> Any:
    """The functions of `kernels.c`, compiled for this CPU and kept in the user's cache; None where that fails."""
    source = Path(__file__).with_name("kernels.c")
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return None
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else [platform.processor()]
    cpu = next((line for line in lines if line.startswith(("flags", "Features"))), lines[0])
    key = hashlib.sha256(f"{source.read_text()}{cpu}{compiler}".encode()).hexdigest()[:12]
    library = cache_folder() / "kernels" / f"kernels-{key}.so"
    try:
        if not library.exists():
            _compile(compiler, source, library)
        functions = ctypes.CDLL(str(library), mode=os.RTLD_NOW)
    except (OSError, subprocess.SubprocessError):
        return None
    pointer, size, number = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
    shape, block = ctypes.POINTER(Shape), ctypes.POINTER(Block)
    for name, arguments in {
        "bf16_linear": [pointer] * 3 + [size] * 3 + [pointer, number, size, pointer],
        "rms_norm": [pointer, pointer, number, pointer, size, size],
        "rotate": [pointer] * 3 + [size] * 4,
        "attend": [pointer, size, pointer, pointer, size, pointer, pointer, shape],
        "decode": [block, size, pointer, pointer, size, size, number] + [pointer] * 4 + [shape],
    }.items():
        getattr(functions, name).argtypes = arguments
        getattr(functions, name).restype = None
    return functions


def _compile(compiler: str, source: Path, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        compiled, linked = f"{folder}/a.o", f"{folder}/a.so"
        flags = ["-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-fPIC"]
        subprocess.run(
            [compiler, *flags, "-c", str(source), "-o", compiled], check=True, capture_output=True, timeout=60
        )
        # linked without OpenMP's own library: its names are then those of torch's, and the two share one set of threads
        subprocess.run([compiler, "-shared", compiled, "-o", linked], check=True, capture_output=True, timeout=60)
        os.replace(linked, library)
