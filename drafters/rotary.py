"""Rotary angles looked up by position, where steps are so short that making them anew would count."""

import contextlib
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
        if self.table is not None:
            cos, sin = self.table  # read once: another thread may put a shorter one there
            with contextlib.suppress(IndexError):  # to look for the greatest position first would take longer than both
                return F.embedding(positions, cos), F.embedding(positions, sin)
        every = torch.arange(max(512, 1 << int(positions.max()).bit_length()))[None]
        cos, sin = (x[0] for x in self.rotary(hidden, every))
        self.table = cos, sin
        return F.embedding(positions, cos), F.embedding(positions, sin)
