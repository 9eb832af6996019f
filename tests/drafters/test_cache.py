"""The preallocated cache: what is committed stays, what is not is overwritten."""

import pytest
import torch

from drafters.cache import KVCache


def rows(*values):
    return torch.tensor(values, dtype=torch.float32).view(1, 1, -1, 1).expand(1, 2, -1, 3)


def read(cache, layer=0):
    return cache.keys[layer][0, 0, : cache.length, 0].tolist()


def test_commit_gathers_and_drops():
    cache = KVCache(10)
    for layer in (0, 1):
        keys, values = cache.update(rows(1, 2, 3), -rows(1, 2, 3), layer)
        assert keys.shape == (1, 2, 3, 3) and torch.equal(keys, -values)
    assert cache.get_seq_length() == 0 and cache.get_max_cache_shape() == 10
    cache.commit(3)
    for layer in (0, 1):
        cache.update(rows(4, 5, 6, 7), -rows(4, 5, 6, 7), layer)
    cache.commit(3, [0, 2, 3])
    assert read(cache, 0) == read(cache, 1) == [1, 2, 3, 4, 6, 7]
    assert cache.values[0][0, 1, :6, 2].tolist() == [-1, -2, -3, -4, -6, -7]
    keys, _ = cache.update(rows(8), rows(8), 0)
    assert keys[0, 0, :, 0].tolist() == [1, 2, 3, 4, 6, 7, 8]
    cache.rollback(2)
    assert read(cache) == [1, 2] and cache.get_seq_length() == 2


def test_views_not_copies():
    cache = KVCache(4)
    keys, _ = cache.update(rows(1, 2), rows(1, 2), 0)
    assert keys.data_ptr() == cache.keys[0].data_ptr()


def test_positions_follow_the_rows():
    cache = KVCache(8)
    cache.update(rows(1, 2), rows(1, 2), 0)
    assert cache.note_positions(torch.tensor([[0, 1]])).tolist() == [[0, 1]]
    cache.commit(2)
    cache.update(rows(3, 4, 5), rows(3, 4, 5), 0)
    assert cache.note_positions(torch.tensor([[2, 3, 3]])).tolist() == [[0, 1, 2, 3, 3]]  # two siblings
    cache.commit(2, [0, 2])
    assert cache.positions[0, :4].tolist() == [0, 1, 2, 3]


def test_a_full_cache_says_so():
    cache = KVCache(2)
    with pytest.raises(ValueError, match="2 rows cannot take row 3"):
        cache.update(rows(1, 2, 3), rows(1, 2, 3), 0)
