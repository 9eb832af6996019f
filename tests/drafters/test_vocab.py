"""Draft vocabularies: which tokens, and the two ways to write them down."""

import pytest
import torch

from drafters.errors import UserError
from drafters.vocab import choose_draft_vocab, coverage, from_offsets, to_offsets

COUNTS = torch.tensor([0, 7, 3, 3, 0, 1, 6, 0])


@pytest.mark.parametrize(
    ("size", "always", "ids"),
    [
        (1, (), [1]),
        (3, (), [1, 2, 6]),  # 2 and 3 tie: the lower id
        (3, (4,), [1, 4, 6]),
        (0.65, (), [1, 6]),  # 13 of 20 supervised tokens
        (0.66, (), [1, 2, 6]),
        (0.1, (4, 7), [1, 4, 7]),
        (7, (), [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_choice(size, always, ids):
    assert choose_draft_vocab(COUNTS, size, always).tolist() == ids


def test_the_full_vocabulary_needs_no_map():
    assert choose_draft_vocab(COUNTS, None) is choose_draft_vocab(COUNTS, 8) is None
    assert coverage(COUNTS, None) == 1.0
    assert coverage(COUNTS, torch.tensor([1, 6])) == pytest.approx(0.65)


@pytest.mark.parametrize("size", [0, -3, 9, 1.0, 1.5, 0.0])
def test_bad_sizes(size):
    with pytest.raises(UserError, match="drafter.draft_vocab"):
        choose_draft_vocab(COUNTS, size)


def test_offsets_round_trip():
    ids = torch.tensor([0, 3, 4, 9])
    offsets = to_offsets(ids)
    assert offsets.tolist() == [0, 2, 2, 6] and offsets.dtype == torch.int64
    assert torch.equal(from_offsets(offsets, 10), ids)


@pytest.mark.parametrize("d2t", [[0, 2, 2, 7], [-1, 0, 0, 0], [0, -1, 0, 0], [1, 0, 3, 3]])
def test_what_is_no_offset_map_is_refused(d2t):
    with pytest.raises(UserError, match="offsets"):
        from_offsets(torch.tensor(d2t), 10)
