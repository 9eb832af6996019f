"""Linear products as fast as the CPU allows at a few rows: weights prepacked once by oneDNN.

`F.linear` reads an unpacked weight well for one row and badly for two to sixteen, which is where verification lives.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

PACK_ROWS = 4  # the row count oneDNN chooses its layout for; 4 was best or near it from 1 to 64 rows
PACK_LIMIT = 4 << 30  # bytes: packing keeps a second copy of the weights


Packed = list[tuple[nn.Module, Callable[[Tensor], Tensor]]]
"""Modules and their packed products."""


def pack_linears(model: nn.Module) -> Packed:
    """Replaces the product inside every `nn.Linear` of a frozen CPU model; returns what it replaced, if anything.

    Where the CPU lacks bf16 instructions, a bf16 weight is packed in float32 (exact) and used from two rows on: inputs
    and outputs stay bf16 and sums are float32, as in a native bf16 product; one row keeps the native product.
    """
    linears = [m for m in model.modules() if type(m) is nn.Linear]
    size = sum(m.weight.numel() * 4 for m in linears)
    if not linears or size > PACK_LIMIT or not torch.backends.mkldnn.is_available():
        return []
    packed_modules: Packed = []
    for module in linears:
        dtype = module.weight.dtype
        native = dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
        if not native and dtype != torch.bfloat16:
            continue
        weight = module.weight.detach() if native else module.weight.detach().float()
        bias = module.bias if native or module.bias is None else module.bias.float()
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)
        forward = _product(packed, bias) if native else _widened(packed, bias, module.weight, module.bias)
        packed_modules.append((module, forward))
    install(packed_modules)
    return packed_modules


def install(packed: Packed) -> None:
    """Puts packed products in place."""
    for module, forward in packed:
        module.forward = forward


def remove(packed: Packed) -> None:
    """Gives the modules their own products back."""
    for module, _ in packed:
        del module.forward


def _product(packed: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    linear = torch.ops.mkldnn._linear_pointwise

    def forward(x: Tensor) -> Tensor:
        return linear(x, packed, bias, "none", [], "")

    return forward


def _widened(
    packed: Tensor, bias: Tensor | None, weight: Tensor, narrow_bias: Tensor | None
) -> Callable[[Tensor], Tensor]:
    linear = torch.ops.mkldnn._linear_pointwise

    def forward(x: Tensor) -> Tensor:
        if x.numel() == x.shape[-1]:
            return nn.functional.linear(x, weight, narrow_bias)
        return linear(x.float(), packed, bias, "none", [], "").to(x.dtype)

    return forward
