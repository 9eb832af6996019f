"""Pages: who holds them, what a forward sees, what a commit keeps."""

import pytest
import torch

from decode.pool import PagePool, Seat

CPU = torch.device("cpu")


def write(pool: PagePool, seats: list[Seat], counts: list[int], first: float):
    """One forward of a single layer whose rows are numbered from `first` on, request by request; what each sees."""
    N = max(counts)
    pool.open(seats, counts, CPU)
    new = first + torch.arange(len(seats) * N).view(len(seats), 1, N, 1).float()
    keys, values = pool.update(new.expand(-1, 2, -1, 3), -new.expand(-1, 2, -1, 5), 0)
    assert keys.shape[:3] == values.shape[:3] and (keys.shape[3], values.shape[3]) == (3, 5)
    assert torch.equal(keys[..., 0], -values[..., 0])
    return [keys[b, 1, : s.length + n, 0].tolist() for b, (s, n) in enumerate(zip(seats, counts, strict=True))]


def test_rows_are_seen_in_place_and_gathered_alike():
    for scattered in (False, True):
        pool = PagePool(64, seats=2, page=4)
        if scattered:
            pool.free -= {1, 9}  # the second page of either home is lent
        a, b = pool.enter(), pool.enter()
        assert pool.reserve(a, 3) and pool.reserve(b, 3)
        assert write(pool, [a], [3], 0) == [[0, 1, 2]]
        pool.keep([a], [[0, 1, 2]])
        assert write(pool, [b], [2], 10) == [[10, 11]]
        pool.keep([b], [[0, 1]])
        assert pool.reserve(a, 4) and pool.reserve(b, 4)
        # four new rows and two: the padding is written nowhere
        assert write(pool, [a, b], [4, 2], 20) == [[0, 1, 2, 20, 21, 22, 23], [10, 11, 24, 25]]
        assert pool.gathered == scattered
        pool.keep([a, b], [[0, 2, 3], [0]])
        assert (a.length, b.length, len(a.pages), len(b.pages)) == (6, 3, 2, 1)
        assert pool.reserve(a, 1) and pool.reserve(b, 1)
        assert write(pool, [a, b], [1, 1], 30) == [[0, 1, 2, 20, 22, 23, 30], [10, 11, 24, 31]]


def test_columns_know_their_positions_and_who_sees_them():
    pool = PagePool(64, seats=2, page=4)
    a, b = pool.enter(), pool.enter()
    pool.reserve(a, 3)
    write(pool, [a], [3], 0)
    pool.keep([a], [[0, 1, 2]])
    assert pool.reserve(a, 3) and pool.reserve(b, 2)
    pool.open([a, b], [3, 2], CPU)
    depths = torch.tensor([[0, 1, 1], [0, 1, 0]])  # a's two nodes are siblings
    positions = pool.note_positions(pool.lengths[:, None] + depths)
    assert positions[0].tolist() == [0, 1, 2, 3, 4, 4]
    assert positions[1, :2].tolist() == [0, 1]
    trees = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]], [[1, 0, 0], [1, 1, 0], [1, 0, 0]]], dtype=torch.bool)
    mask = pool.mask(trees)[:, 0].int().tolist()
    assert mask[0] == [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 1]]
    assert mask[1] == [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]]


def test_a_shared_page_is_copied_by_whoever_writes_first():
    pool = PagePool(48, seats=3, page=4)
    a = pool.enter()
    pool.reserve(a, 6)
    write(pool, [a], [6], 0)
    pool.keep([a], [list(range(6))])
    b = pool.enter(a, 5)
    assert (pool.used, pool.shared) == (2, 2)
    assert pool.reserve(a, 1) and a.pages[0] == b.pages[0] and a.pages[1] != b.pages[1]
    assert write(pool, [a], [1], 50) == [[0, 1, 2, 3, 4, 5, 50]]
    assert pool.reserve(b, 2)
    assert write(pool, [b], [2], 60) == [[0, 1, 2, 3, 4, 60, 61]]
    pool.keep([b], [[0, 1]])
    assert (pool.used, pool.shared) == (3, 1)
    pool.leave(a)
    assert (pool.used, pool.shared) == (2, 0)
    pool.reserve(b, 1)
    assert write(pool, [b], [1], 70) == [[0, 1, 2, 3, 4, 60, 61, 70]]
    pool.leave(b)
    assert pool.used == 0 and sorted(pool.vacant) == [0, 1, 2]


def test_a_short_pool_gives_nothing_rather_than_half():
    pool = PagePool(17, seats=1, page=4)
    assert pool.pages == 4
    a = pool.enter()
    assert not pool.reserve(a, 17) and pool.used == 0
    assert pool.reserve(a, 16) and pool.peak == 4
    pool.leave(a)
    a = pool.enter()
    pool.reserve(a, 9)
    write(pool, [a], [9], 0)
    pool.keep([a], [list(range(9))])
    pool.vacant.append(1)
    b = pool.enter(a, 9)
    assert pool.used == 3
    assert pool.reserve(b, 3)  # one page is copied, none is left
    assert not pool.reserve(a, 4) and len(a.pages) == 3


def test_seats_move_into_lower_homes():
    pool = PagePool(64, seats=4, page=4)
    seats = [pool.enter() for _ in range(4)]
    for i, seat in enumerate(seats):
        pool.reserve(seat, 6)
        write(pool, [seat], [6], 10 * i)
        pool.keep([seat], [list(range(6))])
    pool.leave(seats[0])
    pool.leave(seats[2])
    kept = [seats[1], seats[3]]
    pool.move_home(kept)
    kept.sort(key=lambda seat: seat.home)
    assert [seat.home for seat in kept] == [0, 1] and pool.used == 4 and sorted(pool.vacant) == [2, 3]
    for seat in kept:
        pool.reserve(seat, 1)
    seen = write(pool, kept, [1, 1], 90)
    assert not pool.gathered
    assert sorted(rows[:6] for rows in seen) == [list(range(10, 16)), list(range(30, 36))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_start_as_zeros_of_the_models_dtype(dtype):
    pool = PagePool(32, seats=2, page=4)
    seats = [pool.enter(), pool.enter()]
    for seat in seats:
        pool.reserve(seat, 1)
    pool.open(seats, [1, 1], CPU)
    pool.update(torch.ones(2, 1, 1, 4, dtype=dtype), torch.ones(2, 1, 1, 4, dtype=dtype), 0)
    assert pool.keys[0].dtype == dtype and pool.keys[0].sum() == 8
