"""What a drafter does for many requests at once is what it does for each."""

import pytest
import torch

from drafters.base import DraftSettings
from drafters.target import Features

LENGTHS, ROUNDS = (3, 11, 1, 6), ((1, 4, 2, 1), (5, 1, 1, 3))


def read(target, drafter, length, seed):
    """Tokens x[1:] and features of a random text."""
    ids = torch.randint(target.vocab_size, (1, length + 1), generator=torch.Generator().manual_seed(seed))
    features = target.forward(ids[:, :-1], torch.arange(length)[None], taps=drafter.taps)
    return ids[0, 1:], features


def part(features, rows):
    return Features(features.final[:, rows], None if features.taps is None else features.taps[:, rows])


@pytest.mark.parametrize("name", ["medusa", "hydra", "eagle1", "eagle3"])
@torch.inference_mode()
def test_lists_of_requests_equal_requests_one_by_one(target, drafters, name):
    drafter = drafters[name]
    settings = [
        DraftSettings("chain", 3),
        DraftSettings("tree", 3, 2, 6),
        DraftSettings("chain", 4, sample=True),
        DraftSettings("chain", 0),
    ]
    temperatures = [0.0, 0.0, 1.2, 0.0]
    texts = [read(target, drafter, 40, seed) for seed in range(4)]
    single = [drafter.begin(60) for _ in texts]
    many = [drafter.begin(60) for _ in texts]
    at = [0] * 4
    for counts in (LENGTHS, *ROUNDS):
        news = [slice(a, a + n) for a, n in zip(at, counts, strict=True)]
        tokens = [text[0][rows] for text, rows in zip(texts, news, strict=True)]
        features = [part(text[1], rows) for text, rows in zip(texts, news, strict=True)]
        at = [a + n for a, n in zip(at, counts, strict=True)]
        for state, *new in zip(single, tokens, features, strict=True):
            drafter.extend(state, *new)
        if hasattr(drafter, "extend_batch"):
            drafter.extend_batch(many, tokens, features)
        else:
            for state, *new in zip(many, tokens, features, strict=True):
                drafter.extend(state, *new)
        coins = [[torch.Generator().manual_seed(b) for b in range(4)] for _ in range(2)]
        one = [drafter.propose(*a) for a in zip(single, settings, temperatures, coins[0], strict=True)]
        lot = drafter.propose_batch(many, settings, temperatures, coins[1])
        for a, b in zip(one, lot, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist()
            assert a.parents.tolist() == b.parents.tolist()
            assert (a.q is None) == (b.q is None)
            if a.q is not None:
                torch.testing.assert_close(a.q, b.q)
        assert [len(tree.tokens) for tree in lot] == [3, 6, 4, 0]


@pytest.mark.parametrize("name", ["medusa", "hydra", "eagle1", "eagle3"])
@torch.inference_mode()
def test_a_fork_goes_on_from_the_common_rows(target, drafters, name):
    drafter = drafters[name]
    tokens, features = read(target, drafter, 20, 9)
    donor, whole = drafter.begin(40), drafter.begin(40)
    drafter.extend(donor, tokens, features)
    drafter.extend(whole, tokens[:12], part(features, slice(0, 12)))
    fork = drafter.fork(donor, 7, 50)
    drafter.extend(fork, tokens[7:12], part(features, slice(7, 12)))
    trees = [drafter.propose(state, DraftSettings("chain", 4), 0.0, None).tokens.tolist() for state in (fork, whole)]
    assert trees[0] == trees[1]
