"""A preallocated KV cache for an unmodified HF model: hands out views, commits by gather, rolls back by length."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache


@dataclass(frozen=True)
class Place:
    """Where the next forward's rows go in every layer's buffers, and what they see: for a kernel that does both.

    Counted in rows of one head.
    """

    rows: Tensor
    """(B * N,) long, where each new row is written; -1 for one that is not kept."""
    first: int
    """Where the first request's columns begin."""
    batch: int
    """From one request's columns to the next one's."""
    visible: int
    """Columns that each has, the new ones last."""


class KVCache(Cache):
    """Keys and values of every layer in buffers of fixed size.

    A forward writes its N rows behind the `length` committed ones and attends over a view of both. Nothing is
    kept until `commit` says which rows were accepted; whatever lies behind `length` is overwritten by the next
    forward, so rollback costs nothing. Buffers are made at the first write, when the shapes are known.

    Args:
        capacity: rows per sequence, draft nodes included.
    """

    def __init__(self, capacity: int):
        super().__init__(layers=[])
        self.capacity = capacity
        self.length = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        # of a decoder that runs in one call: its `Blocks`, and the array that points to these buffers, too
        self.blocks: tuple[Any, bytes | None] = (None, None)
        self.positions: Tensor | None = None  # (B, capacity): where each row stands, read by sliding-window masks

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Writes (B, K, N, D) behind the committed rows; returns views (B, K, length + N, D).

        Raises:
            ValueError: the rows do not fit the capacity.
        """
        end = self.length + key_states.shape[2]
        self._check(end)
        while len(self.keys) <= layer_idx:
            B, K, _, D = key_states.shape
            # zeros, not empty: a masked column times NaN garbage would still be NaN
            self.keys.append(key_states.new_zeros(B, K, self.capacity, D))
            self.values.append(value_states.new_zeros(B, K, self.capacity, value_states.shape[-1]))
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys[:, :, self.length : end] = key_states
        values[:, :, self.length : end] = value_states
        return keys[:, :, :end], values[:, :, :end]

    def place(self, B: int, N: int) -> Place | None:
        """Where N new rows of each of B sequences go in float32 buffers; None where only `update` can say.

        Raises:
            ValueError: the rows do not fit the capacity.
        """
        if not self.keys or len(self.keys[0]) != B or self.keys[0].dtype != torch.float32:
            return None
        self._check(self.length + N)
        apart = self.keys[0].shape[1] * self.capacity
        rows = torch.arange(self.length, self.length + N)
        if B > 1:
            rows = (torch.arange(B)[:, None] * apart + rows).flatten()
        return Place(rows, 0, apart, self.length + N)

    def _check(self, end: int) -> None:
        if end > self.capacity:
            raise ValueError(f"KV cache of {self.capacity} rows cannot take row {end}")

    def note_positions(self, positions: Tensor) -> Tensor:
        """Records where the next N rows stand, (B, N); returns the positions of all visible rows (B, length + N)."""
        if self.positions is None:
            self.positions = positions.new_zeros(positions.shape[0], self.capacity)
        end = self.length + positions.shape[1]
        self.positions[:, self.length : end] = positions
        return self.positions[:, :end]

    def commit(self, count: int, rows: list[int] | None = None) -> None:
        """Keeps rows of the last forward and drops the rest.

        Args:
            count: how many rows to keep.
            rows: which ones, ascending, counted from the first row of that forward; None: the first `count`
                (a chain or a prefill needs no copy).
        """
        if rows is not None and rows != list(range(count)):
            start, end = self.length, self.length + count
            index = torch.tensor(rows, device=self.keys[0].device) + start
            # index_select copies first, so that overlapping rows are safe
            for buffer in (*self.keys, *self.values):
                buffer[:, :, start:end] = buffer.index_select(2, index)
            if self.positions is not None:
                self.positions[:, start:end] = self.positions.index_select(1, index)
        self.length += count

    def rollback(self, length: int) -> None:
        """Forgets every row from `length` on."""
        assert 0 <= length <= self.length
        self.length = length

    def get_seq_length(self, layer_idx: int | None = 0) -> int:
        """Committed rows."""
        return self.length

    def get_max_cache_shape(self, layer_idx: int | None = 0) -> int:
        """Rows that fit."""
        return self.capacity
