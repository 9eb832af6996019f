"""Linear products of frozen weights as fast as the CPU allows at a few rows, which is where verification lives.

`F.linear` reads an unpacked weight well for one row and badly for two to sixteen. oneDNN's prepacked weights do better,
in float32, and in bfloat16 where the CPU has instructions for it. Where it has none, our own kernel (`kernels.c`)
reads the bfloat16 weights at their own size.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.kernels import Block, address, compiled, readable

PACK_ROWS = 4  # the row count oneDNN chooses its layout for; 4 was best or near it from 1 to 64 rows
PACK_LIMIT = 4 << 30  # bytes: packing keeps a second copy of the weights


class Product(Protocol):
    """x -> f(x) @ weight.T + bias [+ residual]; the result has the dtype of x."""

    def __call__(
        self,
        x: Tensor,
        norm: Tensor | None = None,
        eps: float = 0.0,
        gated: bool = False,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Multiplies.

        Args:
            x: (..., in), or (..., 2 * in) where gated.
            norm: (in,), the weight of an RMS norm that x goes through first.
            eps: of that norm.
            gated: x holds gate and up side by side, and goes through silu(gate) * up first.
            residual: (..., out), added to the result.
        """
        ...


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
    """The product with this frozen weight in the fastest way there is.

    Args:
        weight: (out, in).
        bias: (out,) or None.
        pack: prepack, which keeps a copy of the weight; see `can_pack`.
    """
    dtype = weight.dtype
    if pack and weight.device.type == "cpu":
        if dtype == torch.bfloat16 and not native_bf16(weight.device):
            if compiled() is not None:
                return CompiledProduct(weight, bias)
        elif dtype in (torch.float32, torch.bfloat16) and torch.backends.mkldnn.is_available():
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACK_ROWS)
            linear = torch.ops.mkldnn._linear_pointwise
            return _composed(lambda x: linear(x.to(dtype), packed, bias, "none", [], "").to(x.dtype))
    return _composed(lambda x: F.linear(x.to(dtype), weight, bias).to(x.dtype))


def _composed(linear: Callable[[Tensor], Tensor]) -> Product:
    def forward(
        x: Tensor, norm: Tensor | None = None, eps: float = 0.0, gated: bool = False, residual: Tensor | None = None
    ) -> Tensor:
        if norm is not None:
            x = rms_norm(x, norm, eps)
        if gated:
            gate, up = x.chunk(2, dim=-1)
            x = F.silu(gate).mul_(up)
        out = linear(x)
        return out if residual is None else residual + out

    return forward


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
    K = x.shape[-1]
    if x.dtype != torch.float32 or x.device.type != "cpu" or x.requires_grad:
        return F.rms_norm(x, (K,), weight, eps)
    if compiled() is None:
        # on a CPU that is eight operations, and this is five
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * weight / norm.mul_(K**-0.5).square_().add_(eps).sqrt_()
    x, weight = x.contiguous(), weight.float().contiguous()
    out = torch.empty_like(x)
    compiled().rms_norm(x.data_ptr(), weight.data_ptr(), eps, out.data_ptr(), x.numel() // K, K)
    return out


def install(packed: Packed) -> None:
    """Puts packed products in place."""
    for module, forward in packed:
        module.forward = forward


def remove(packed: Packed) -> None:
    """Gives the modules their own products back."""
    for module, _ in packed:
        del module.forward


class CompiledProduct:
    """`Product` with bfloat16 weights by `kernels.c`."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.width, self.K = weight.shape
        self.bias = None if bias is None else bias.detach().float()
        padded = F.pad(weight.detach(), (0, 0, 0, -self.width % 16)).view(torch.int16).view(-1, 16, self.K)
        # (panels, K, 8, 2): the lower half of a word is output i of the panel, the upper half output i + 8
        self.panels = torch.stack([padded[:, :8], padded[:, 8:]], dim=-1).permute(0, 2, 1, 3).contiguous()

    def __call__(
        self,
        x: Tensor,
        norm: Tensor | None = None,
        eps: float = 0.0,
        gated: bool = False,
        residual: Tensor | None = None,
    ) -> Tensor:
        """See `Product`."""
        *outer, K = x.shape
        if (2 * self.K if gated else self.K) != K:  # the kernel would read past the end
            raise ValueError(f"a product of {self.K} inputs got {tuple(x.shape)}{', gated' if gated else ''}")
        rows, scale, added = readable(x), readable(norm), readable(residual)
        out = rows.new_empty(*outer, self.width)
        compiled().bf16_linear(
            rows.data_ptr(), self.panels.data_ptr(), out.data_ptr(), x.numel() // K, self.K, self.width,
            address(scale), eps, gated, address(added),
        )  # fmt: skip
        out = out if self.bias is None else out.add_(self.bias)
        return out if x.dtype == torch.float32 else out.to(x.dtype)


class Blocks:
    """`kernels.Block` for every layer, and the tensors that they point to; a copy of it points to copies of those."""

    def __init__(self, layers: Sequence[tuple[Sequence[Tensor | None], Sequence["CompiledProduct"]]]):
        self.layers = layers
        names, blocks = [field[0] for field in Block._fields_], []
        for vectors, products in layers:
            addresses = *map(address, vectors), *(p.panels.data_ptr() for p in products), None, None, None
            blocks.append(Block(**dict(zip(names, addresses, strict=True))))
        self.array = (Block * len(blocks))(*blocks)

    def __reduce__(self) -> tuple[type, tuple[Any]]:
        return Blocks, (self.layers,)

    def for_one_call(self, like: bytes | None = None) -> Any:
        """A copy of the array, or of what it was made into before: other threads may decode, too."""
        return type(self.array).from_buffer_copy(like or self.array)


def compiled_blocks(layers: Iterable[tuple[Sequence[Tensor | None], Sequence[Product]]]) -> Blocks | None:
    """What `kernels.decode` reads of decoder blocks, but for their cache; None where it can't.

    Args:
        layers: for each, what `kernels.Block` begins with (two norms of what attention reads, the bias of its product,
            norms of queries and keys, the MLP's norm), and its four products.
    """
    blocks = []
    for vectors, products in layers:
        compiled = [p for p in products if isinstance(p, CompiledProduct)]
        if len(compiled) < len(products) or any(p.bias is not None for p in compiled[1:]):
            return None
        blocks.append((vectors, compiled))
    return Blocks(blocks)
