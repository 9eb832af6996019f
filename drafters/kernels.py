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

from drafters.locate import cache_folder


def address(tensor: Tensor | None) -> int | None:
    """As the compiled functions take it."""
    return None if tensor is None else tensor.data_ptr()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary positions, in place.

    Args:
        x: (rows, heads, d) float32 on the CPU, contiguous but for the distance between rows.
        cos: (rows, d) float32, contiguous; so is sin.
        sin: as `transformers` makes it.
    """
    rows, heads, d = x.shape
    compiled().rotate(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), rows, x.stride(0), heads, d)


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
    S = k.shape[2]
    out = q.new_empty(B, N, H * d)
    if mask is not None and tuple(mask.shape) not in ((B, 1, N, S), (1, 1, N, S)):  # it would be read past its end
        raise ValueError(f"attention of {B} x {N} rows over {S} columns got a mask of {tuple(mask.shape)}")
    seen = None if mask is None else mask.contiguous()
    apart = 0 if seen is None or len(seen) == 1 else N * S
    compiled().attend(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), address(seen), out.data_ptr(), B, N, S, H, H // k.shape[1], d,
        q.stride(1), k.stride(0), k.stride(1), k.stride(2), apart, scale,
    )  # fmt: skip
    return out


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
    functions.bf16_linear.argtypes = [pointer] * 3 + [size] * 3 + [pointer, number, size, pointer, pointer]
    functions.rms_norm.argtypes = [pointer, pointer, number, pointer, size, size]
    functions.rotate.argtypes = [pointer] * 3 + [size] * 4
    functions.attend.argtypes = [pointer] * 5 + [size] * 11 + [number]
    for function in (functions.bf16_linear, functions.rms_norm, functions.rotate, functions.attend):
        function.restype = None
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
