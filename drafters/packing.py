"""Linear products of frozen weights as fast as the CPU allows at a few rows, which is where verification lives.

`F.linear` reads an unpacked weight well for one row and badly for two to sixteen. oneDNN's prepacked weights do better,
in float32, and in bfloat16 where the CPU has instructions for it. Where it has none, our own kernel (`bf16_linear.c`)
reads the bfloat16 weights at their own size; it is compiled once, if there is a C compiler.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.locate import cache_folder

PACK_ROWS = 4  # the row count oneDNN chooses its layout for; 4 was best or near it from 1 to 64 rows
PACK_LIMIT = 4 << 30  # bytes: packing keeps a second copy of the weights

Product = Callable[[Tensor], Tensor]
Packed = list[tuple[nn.Module, Product]]
"""Modules and their packed products."""


def native_bf16(device: torch.device) -> bool:
    """Whether this device computes in bfloat16, rather than emulating it."""
    return device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def can_pack(weights: Iterable[Tensor]) -> bool:
    """Whether `product` would prepack these weights: on a CPU, and not too many."""
    weights = list(weights)
    size = sum(w.numel() * w.element_size() for w in weights)
    return bool(weights) and size <= PACK_LIMIT and all(w.device.type == "cpu" for w in weights)


def product(weight: Tensor, bias: Tensor | None = None, pack: bool = True) -> Product:
    """x -> x @ weight.T + bias by the fastest way for this frozen weight; the result has the dtype of x.

    Args:
        weight: (out, in).
        bias: (out,) or None.
        pack: prepack, which keeps a copy of the weight; see `can_pack`.
    """
    dtype = weight.dtype
    if pack and weight.device.type == "cpu":
        if dtype == torch.bfloat16 and not native_bf16(weight.device):
            if compiled() is not None:
                return _compiled_product(weight, bias)
        elif dtype in (torch.float32, torch.bfloat16) and torch.backends.mkldnn.is_available():
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACK_ROWS)
            linear = torch.ops.mkldnn._linear_pointwise
            return lambda x: linear(x.to(dtype), packed, bias, "none", [], "").to(x.dtype)
    return lambda x: F.linear(x.to(dtype), weight, bias).to(x.dtype)


def pack_linears(model: nn.Module, dtype: torch.dtype | None = None) -> Packed:
    """Replaces the product inside every `nn.Linear` of a frozen CPU model; returns what it replaced, if anything.

    Args:
        model: changed in place; `remove` changes it back.
        dtype: of the packed weights; None: their own.
    """
    linears = [m for m in model.modules() if type(m) is nn.Linear]
    if not can_pack(m.weight for m in linears):
        return []
    packed: Packed = [(m, product(m.weight.to(dtype or m.weight.dtype), m.bias)) for m in linears]
    norms = [m for m in model.modules() if type(m) is nn.RMSNorm and m.weight.dtype == torch.float32]
    packed += [(m, functools.partial(rms_norm, weight=m.weight, eps=m.eps or 1e-6)) for m in norms]
    install(packed)
    return packed


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * weight / sqrt(mean(x^2) + eps) over the last dimension, without gradient."""
    if x.dtype != torch.float32 or x.device.type != "cpu":
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    # on a CPU that is eight operations, and this is five
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * weight / norm.mul_(x.shape[-1] ** -0.5).square_().add_(eps).sqrt_()


def install(packed: Packed) -> None:
    """Puts packed products in place."""
    for module, forward in packed:
        module.forward = forward


def remove(packed: Packed) -> None:
    """Gives the modules their own products back."""
    for module, _ in packed:
        del module.forward


def _compiled_product(weight: Tensor, bias: Tensor | None) -> Product:
    width, K = weight.shape
    run: Any = compiled()
    padded = F.pad(weight.detach(), (0, 0, 0, -width % 16)).view(torch.int16).view(-1, 16, K)
    # (panels, K, 8, 2): the lower half of a word is output i of the panel, the upper half output i + 8
    panels = torch.stack([padded[:, :8], padded[:, 8:]], dim=-1).permute(0, 2, 1, 3).contiguous()
    added = None if bias is None else bias.detach().float()

    def forward(x: Tensor) -> Tensor:
        rows = x.float().contiguous()
        out = rows.new_empty(*x.shape[:-1], width)
        run(rows.data_ptr(), panels.data_ptr(), out.data_ptr(), rows.numel() // K, K, width)
        return (out if added is None else out.add_(added)).to(x.dtype)

    return forward


@functools.cache
def compiled() -> Any:
    """The function of `bf16_linear.c`, compiled for this CPU and kept in the user's cache; None where that fails."""
    source = Path(__file__).with_name("bf16_linear.c")
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return None
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else [platform.processor()]
    cpu = next((line for line in lines if line.startswith(("flags", "Features"))), lines[0])
    key = hashlib.sha256(f"{source.read_text()}{cpu}{compiler}".encode()).hexdigest()[:12]
    library = cache_folder() / "kernels" / f"bf16_linear-{key}.so"
    try:
        if not library.exists():
            _compile(compiler, source, library)
        function = ctypes.CDLL(str(library), mode=os.RTLD_NOW).bf16_linear
    except (OSError, subprocess.SubprocessError):
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_long
    function.argtypes, function.restype = [pointer, pointer, pointer, size, size, size], None
    return function


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
