"""Rotary angles looked up by position, where steps are so short that making them anew would count."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHANGING = {"dynamic", "longrope"}  # whose frequencies depend on how long the text is


class Angles:
    """cos and sin of a rotary embedding of `transformers`, each computed once, on a CPU.

    Args:
        rotary: such as `LlamaRotaryEmbedding`.
    """

    def __init__(self, rotary: Any):
        self.rotary = rotary
        self.table: tuple[Tensor, Tensor] | None = None  # (positions, d) float32

    def __call__(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(B, N) positions -> cos and sin, (B, N, d) in the dtype of the hidden states, contiguous."""
        if hidden.dtype != torch.float32 or hidden.device.type != "cpu" or self.rotary.rope_type in CHANGING:
            cos, sin = self.rotary(hidden, positions)
            return cos.contiguous(), sin.contiguous()
        size = int(positions.max()) + 1
        table = self.table  # read once: another thread may put a shorter one there
        if table is None or len(table[0]) < size:
            every = torch.arange(max(512, 1 << (size - 1).bit_length()))[None]
            cos, sin = self.rotary(hidden, every)
            table = self.table = cos[0], sin[0]
        cos, sin = table
        return F.embedding(positions, cos), F.embedding(positions, sin)
