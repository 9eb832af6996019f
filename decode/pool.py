"""One pool of KV pages for many requests: shared prefixes, temporary draft rows, copy on write, a hard limit.

Every request has a table of pages of fixed size. Rows of a forward are written behind its committed ones; `keep`
moves the accepted ones into place and gives every page behind them back. A page may belong to several requests that
share a prompt prefix; whoever writes to one gets a copy first.

Layout. Attention wants (B, K, S, D), and on a CPU the copy that gathers scattered pages on every step costs more than
attention itself. Milliseconds of attention in a step of 16 rows (30 layers, 3 KV heads, D = 64, float32, one thread of
a busy machine, best of 12 interleaved, so read them as ratios):

    contexts, new rows     padded buffer   gathered pages   one call a row   one masked call over the pool
    all 200, 1                       210              532              427                            1443
    40 to 318, 1                     377              756              406                            1382
    57 to 393, 5                    1277             1854             1063                            8238

So pages are handed out in order from a home region that each of the batch's places has, equally far apart. As long as
every request stays at home, the batch *is* the padded buffer: a strided view, nothing copied. A request that outgrows
its home, or shares a prefix, takes pages elsewhere, and the batch pays the gather for as long as that lasts.

Shapes: B rows of the batch, K key/value heads, N new rows of each, S visible rows, D head width.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from drafters.cache import KVCache, Place
from drafters.errors import UserError

PAGE = 16  # rows


@dataclass(eq=False)
class Seat:
    """One request's place in the pool."""

    home: int
    """Which of the pool's home regions it takes pages from first."""
    pages: list[int] = field(default_factory=list)
    length: int = 0
    """Committed rows."""


class PagePool(KVCache):
    """KV cache of a whole batch; `open` says which seats the next forward serves.

    Args:
        limit: rows that all requests together may hold, draft nodes included; rounded down to whole pages.
        seats: most requests at once.
        page: rows a page.

    Raises:
        UserError: not even a page fits the limit.
    """

    def __init__(self, limit: int, seats: int, page: int = PAGE):
        pages = limit // page
        if pages < 1:
            raise UserError(f"pool_tokens={limit}: at least one page of {page} is needed")
        super().__init__(pages * page)
        self.page, self.pages = page, pages
        self.stride = max(1, pages // seats)  # pages from one home to the next
        self.free = set(range(pages))
        self.owners = [0] * pages
        self.vacant = list(range(seats))
        self.peak = 0
        self.serving: list[Seat] = []

    # ---- who holds what

    @property
    def used(self) -> int:
        """Pages in use."""
        return self.pages - len(self.free)

    @property
    def shared(self) -> int:
        """Pages that sharing saves."""
        return sum(owners - 1 for owners in self.owners if owners > 1)

    def pages_for(self, rows: int) -> int:
        """Pages that so many rows take."""
        return -(-rows // self.page)

    def enter(self, donor: Seat | None = None, rows: int = 0) -> Seat:
        """A seat in the lowest vacant home; its first `rows` rows are the donor's, in the donor's own pages."""
        home = min(self.vacant)
        self.vacant.remove(home)
        seat = Seat(home, length=rows)
        if donor is not None:
            seat.pages = donor.pages[: self.pages_for(rows)]
            for page in seat.pages:
                self.owners[page] += 1
        return seat

    def leave(self, seat: Seat) -> None:
        """Gives up a seat and its pages."""
        seat.length = 0
        self._trim(seat)
        self.vacant.append(seat.home)

    def reserve(self, seat: Seat, rows: int) -> bool:
        """Makes room for so many rows behind the committed ones; False (and nothing taken) where the pool is short."""
        wanted = self.pages_for(seat.length + rows)
        first = seat.length // self.page  # the first page that will be written to
        copied = [i for i in range(first, len(seat.pages)) if self.owners[seat.pages[i]] > 1]
        if len(copied) + wanted - len(seat.pages) > len(self.free):
            return False
        self._replace(seat, copied)
        while len(seat.pages) < wanted:
            seat.pages.append(self._take(seat, len(seat.pages)))
        return True

    def move_home(self, seats: list[Seat]) -> None:
        """Moves requests into lower homes that stand empty, so that what remains of a batch lies equally far apart."""
        for seat in sorted(seats, key=lambda s: -s.home):
            hole = min(self.vacant, default=seat.home)
            if hole >= seat.home or len(seat.pages) > min(self.stride, len(self.free)):
                continue
            if any(self.owners[page] > 1 for page in seat.pages):
                continue
            self.vacant[self.vacant.index(hole)] = seat.home
            seat.home = hole
            self._replace(seat, list(range(len(seat.pages))))

    def _take(self, seat: Seat, index: int) -> int:
        """A free page: the next at home, else the last of all, which its own home will miss latest."""
        wanted = seat.home * self.stride + index
        page = wanted if index < self.stride and wanted in self.free else max(self.free)
        self.free.remove(page)
        self.owners[page] = 1
        self.peak = max(self.peak, self.used)
        return page

    def _replace(self, seat: Seat, indices: list[int]) -> None:
        """Gives a seat copies of some of its pages."""
        old = [seat.pages[i] for i in indices]
        for i in indices:
            seat.pages[i] = self._take(seat, i)
        new = [seat.pages[i] for i in indices]
        for buffer in (*self.keys, *self.values) if old else ():
            pages = buffer.view(buffer.shape[0], self.pages, -1)
            pages[:, new] = pages[:, old]
        for page in old:
            self._release(page)

    def _release(self, page: int) -> None:
        self.owners[page] -= 1
        if not self.owners[page]:
            self.free.add(page)

    def _trim(self, seat: Seat) -> None:
        while len(seat.pages) > self.pages_for(seat.length):
            self._release(seat.pages.pop())

    # ---- one forward

    def open(self, seats: list[Seat], counts: list[int], device: torch.device) -> None:
        """The next forward serves these seats, in this order, with so many new rows each, padded to the most.

        Room must have been reserved. Columns are a request's own rows: committed ones, then new ones.
        """
        self.serving = seats
        self.length = max(seat.length for seat in seats)
        width, page = max(counts), self.page
        self.visible = max(seat.length + count for seat, count in zip(seats, counts, strict=True))
        self.padded = min(counts) != width
        slots: list[int] = []  # of the B * N new rows, the real ones
        rows: list[int] = []  # and where in the pool they go
        for b, (seat, count) in enumerate(zip(seats, counts, strict=True)):
            slots += range(b * width, b * width + count)
            rows += [seat.pages[r // page] * page + r % page for r in range(seat.length, seat.length + count)]
        tables: list[int] = []
        columns = self.pages_for(self.visible)
        self.gathered = not self._regular(seats)
        if self.gathered:
            tables = [p for s in seats for p in (s.pages + s.pages[:1] * columns)[:columns]]
        packed = torch.tensor(slots + rows + tables + [s.length for s in seats], device=device)
        self.real, self.rows, self.table, self.lengths = packed.split([len(slots), len(rows), len(tables), len(seats)])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Writes the real rows of (B, K, N, D); returns (B, K, S, D), where only the mask tells what is whose."""
        while len(self.keys) <= layer_idx:
            self.keys.append(_calm(key_states, self.capacity))
            self.values.append(_calm(value_states, self.capacity))
        pair = (self.keys[layer_idx], key_states), (self.values[layer_idx], value_states)
        for buffer, new in pair:
            flat = new.transpose(0, 1).flatten(1, 2)  # (K, B * N, D)
            buffer.index_copy_(1, self.rows, flat[:, self.real] if self.padded else flat)
        if len(self.serving) == 1 and self.length == 0:
            return key_states, value_states
        return self._columns(self.keys[layer_idx]), self._columns(self.values[layer_idx])

    def place(self, B: int, N: int) -> Place | None:
        """See `KVCache.place`."""
        if self.gathered or not self.keys or self.length == 0 or self.keys[0].dtype != torch.float32:
            return None
        rows = self.rows
        if self.padded:
            rows = rows.new_full((B * N,), -1).index_copy_(0, self.real, rows)
        return Place(rows, self.start * self.page, self.step * self.page, self.visible)

    def note_positions(self, positions: Tensor) -> Tensor:
        """(B, N) rotary positions of the new rows -> (B, S) of all columns: a committed row stands at its own index."""
        columns = torch.arange(self.visible, device=positions.device)
        new = columns - self.lengths[:, None]  # (B, S): which new row a column is
        N = positions.shape[1]
        return torch.where((new >= 0) & (new < N), positions.gather(1, new.clamp(0, N - 1)), columns)

    def mask(self, trees: Tensor) -> Tensor:
        """(B, 1, N, S) for the trees' own masks (B, N, N): all of a request's committed rows, and each slot's path."""
        N = trees.shape[1]
        new = torch.arange(self.visible, device=trees.device) - self.lengths[:, None]  # (B, S)
        own = trees.gather(2, new.clamp(0, N - 1)[:, None].expand(-1, N, -1))  # (B, N, S)
        return ((new < 0)[:, None] | (own & ((new >= 0) & (new < N))[:, None]))[:, None]

    def keep(self, seats: list[Seat], kept: list[list[int]]) -> None:
        """Commits rows that a forward wrote for each seat (ascending, counted from its first); drops the rest."""
        source: list[int] = []
        goal: list[int] = []
        for seat, rows in zip(seats, kept, strict=True):
            if rows != list(range(len(rows))):
                source += [self._row(seat, seat.length + row) for row in rows]
                goal += [self._row(seat, seat.length + i) for i in range(len(rows))]
            seat.length += len(rows)
        if source:
            index = torch.tensor([source, goal], device=self.rows.device)
            for buffer in (*self.keys, *self.values):
                buffer[:, index[1]] = buffer.index_select(1, index[0])
        for seat in seats:
            self._trim(seat)

    def commit(self, count: int, rows: list[int] | None = None) -> None:
        """`keep` for a forward of one seat."""
        self.keep(self.serving, [list(range(count)) if rows is None else rows])

    def _row(self, seat: Seat, row: int) -> int:
        return seat.pages[row // self.page] * self.page + row % self.page

    def _regular(self, seats: list[Seat]) -> bool:
        """Whether the seats' pages lie in order and equally far apart, so that a strided view shows them."""
        start = seats[0].pages[0]
        self.start, self.step = start, seats[1].pages[0] - start if len(seats) > 1 else 0
        last = start + self.step * (len(seats) - 1)
        return (
            (self.step > 0 or len(seats) == 1)
            and last * self.page + self.visible <= self.capacity
            and all(
                page == start + b * self.step + i for b, seat in enumerate(seats) for i, page in enumerate(seat.pages)
            )
        )

    def _columns(self, buffer: Tensor) -> Tensor:
        """(B, K, S, D) out of (K, capacity, D)."""
        K, rows, D = buffer.shape
        B = len(self.serving)
        if not self.gathered:
            strides = (self.step * self.page * D, rows * D, D, 1)
            return buffer.as_strided((B, K, self.visible, D), strides, self.start * self.page * D)
        pages = buffer.view(K, self.pages, -1).index_select(1, self.table)  # (K, B * pages, page * D)
        return pages.view(K, B, -1, D)[:, :, : self.visible].transpose(0, 1)


def _calm(like: Tensor, rows: int) -> Tensor:
    """(K, rows, D) of zeros, for a masked column times NaN garbage would still be NaN.

    On a CPU from calloc: the system gives real memory page by page, at the first write.
    """
    shape = (like.shape[1], rows, like.shape[3])
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    size = shape[0] * shape[1] * shape[2] * like.element_size()
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(like.dtype).view(shape)
