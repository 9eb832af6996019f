"""Lookahead: the window as part of the tree, and the n-grams that it leaves in the pool."""

import pytest
import torch

from decode.engine import generate
from drafters.base import DraftSettings, Outcome
from drafters.errors import UserError
from drafters.lookahead import LookaheadDrafter

W, N = 4, 4


def successor(path):
    """A made-up target: what it says after a path of tokens."""
    return (3 * path[-1] + len(path)) % 101


def paths_of(tree, root):
    paths = [(root,)]
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*paths[parent + 1], token))
    return paths


def test_the_window_moves_by_what_the_target_said_on_its_own_path():
    drafter = LookaheadDrafter(W, N, W, from_text=False)
    state = drafter.begin(100)
    drafter.extend(state, torch.tensor([11, 12, 13]), None)
    settings = drafter.default_settings
    expected = None
    for round in range(8):
        tree = drafter.propose(state, settings, 0.0, None)
        paths = paths_of(tree, state.text[-1])
        assert len(tree.tokens) <= settings.nodes and max(map(len, paths)) - 1 <= settings.length
        assert len(set(paths)) == len(paths), "shared prefixes are one node"
        window = [list(level) for level in state.window]
        assert len(window) == min(round + 1, N - 1) and {len(level) for level in window} == {W}
        if expected is not None:
            assert window == expected
        columns = [(state.text[-1], *window[0][: i + 1], *(level[i] for level in window[1:])) for i in range(W)]
        assert set(columns) <= set(paths)
        drafter.observe(state, Outcome(tree, [successor(path) for path in paths], [], 0.0))
        newest = [successor(column) for column in columns]
        expected = [*window, newest][-(N - 1) :]
        if len(window) == N - 1:
            for i in range(W):
                assert (*(level[i] for level in window[1:]), newest[i]) in state.pool[window[0][i]]
        drafter.extend(state, torch.tensor([successor(paths[0])]), None)


def test_guesses_are_the_most_recent_ngrams_of_the_last_token():
    drafter = LookaheadDrafter(1, 3, 2)
    state = drafter.begin(100)
    drafter.extend(state, torch.tensor([5, 1, 1, 5, 2, 2, 5, 3, 3, 5]), None)
    paths = paths_of(drafter.propose(state, DraftSettings("tree", 2, 1, 6), 0.0, None), 5)
    assert paths[1:5] == [(5, 3), (5, 3, 3), (5, 2), (5, 2, 2)]
    assert len(state.pool[5]) == 2, "bounded"


@pytest.mark.parametrize("nodes", [1, 2, 3, 7, 16, 40, 120])
@pytest.mark.parametrize("length", [1, 2, 5, 20])
def test_the_shape_fits_the_settings(length, nodes):
    for drafter in (LookaheadDrafter(), LookaheadDrafter(15, 5, 15), LookaheadDrafter(3, 9)):
        for settings in (DraftSettings("tree", length, 1, nodes), DraftSettings("chain", length)):
            columns, levels, guesses = drafter.shape(settings)
            assert (columns + guesses) * levels <= settings.nodes and columns + guesses > 0 <= columns
            assert 1 <= levels <= length and columns + levels - 1 <= length
    assert LookaheadDrafter().shape(DraftSettings("tree", 20, 1, 120)) == (15, 4, 15), "the paper's for 7B models"
    with pytest.raises(UserError, match="ngram=1"):
        LookaheadDrafter(ngram=1)


def test_it_finds_ngrams_of_its_own(target):
    """Nothing of the text goes into the pool here: what is accepted comes from the window."""
    accepted = 0
    for prompt in ([5, 6, 7], [8, 9], [17]):
        plain = generate(target, None, prompt, max_new_tokens=60, eos_token_ids=()).tokens
        drafter = LookaheadDrafter(8, 3, 8, from_text=False)
        out = generate(target, drafter, prompt, max_new_tokens=60, eos_token_ids=())
        assert out.tokens == plain
        accepted += sum(r.accepted for r in out.rounds)
    assert accepted
