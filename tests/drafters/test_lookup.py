"""Drafters that copy: what they find, how far they trust it, and what it costs in memory."""

import random

import pytest
import torch

from decode.engine import generate
from drafters.automaton import CHAIN, SuffixAutomaton
from drafters.base import DraftSettings
from drafters.errors import UserError
from drafters.lookup import LookupDrafter, SuffixDrafter
from tests.tiny import make_target

FULL, TREE = DraftSettings("chain", 8), DraftSettings("tree", 4, 2, 6)


def proposal(drafter, text, settings=FULL):
    """Paths of the tree drafted after a text, the root's children first."""
    state = drafter.begin(len(text))
    drafter.extend(state, torch.tensor(text), None)
    tree = drafter.propose(state, settings, 0.0, None)
    paths = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths) <= settings.nodes and all(len(path) <= settings.length for path in paths)
    return paths


def longest(paths):
    return list(max(paths, key=len, default=()))


@pytest.mark.parametrize("drafter", [LookupDrafter(), SuffixDrafter()], ids=lambda d: d.kind)
def test_what_both_find(drafter):
    assert proposal(drafter, [1, 2, 3, 4, 5]) == [], "nothing to copy: plain decoding"
    assert proposal(drafter, [5]) == []
    assert longest(proposal(drafter, [1, 2, 3, 4, 9, 8, 7, 6, 1, 2, 3, 4]))[:4] == [9, 8, 7, 6]
    assert longest(proposal(drafter, [7] * 20)) == [7] * 8, "a match that ends with the text goes on"
    assert longest(proposal(drafter, [1, 2, 3] * 9)) == [1, 2, 3, 1, 2, 3, 1, 2]
    state = drafter.begin(4)
    assert len(drafter.propose(state, DraftSettings("chain", 0), 0.0, None).tokens) == 0


def test_lookup_takes_the_longest_ngram_and_of_those_the_most_recent():
    text = [1, 2, 3, 50, 9, 2, 3, 60, 9, 2, 3, 70, 1, 2, 3]
    assert proposal(LookupDrafter(3, 2), text)[0] == (50,)
    assert proposal(LookupDrafter(2, 2), text)[0] == (70,)
    assert [p for p in proposal(LookupDrafter(3, 2), text, TREE) if len(p) == 1] == [(50,), (70,)]
    assert [p for p in proposal(LookupDrafter(2, 2), text, TREE) if len(p) == 1] == [(70,), (60,)]
    with pytest.raises(UserError, match="shortest=3"):
        LookupDrafter(2, 3)


def test_suffix_trusts_a_match_by_its_length_and_frequency():
    text = [1, 2, 3, 4, 5, 6, 7, 90, 1, 2, 3]
    assert longest(proposal(SuffixDrafter(), text)) == [4, 5, 6]
    assert longest(proposal(SuffixDrafter(factor=2), text)) == [4, 5, 6, 7, 90, 1]
    assert proposal(SuffixDrafter(shortest=4), text) == []
    often = [8, 1, 30] * 3 + [8, 1, 40] + [8, 1]
    assert proposal(SuffixDrafter(), often)[0] == (30,)
    assert [p for p in proposal(SuffixDrafter(), often, TREE) if len(p) == 1] == [(30,), (40,)]
    assert [p for p in proposal(SuffixDrafter(min_probability=0.5), often, TREE) if len(p) == 1] == [(30,)]
    with pytest.raises(UserError, match="factor=0"):
        SuffixDrafter(factor=0)


def test_reference_texts_and_texts_learned_later():
    reference = list(range(100, 140))
    drafter = SuffixDrafter([reference, [200, 201, 202]])
    assert longest(proposal(drafter, [1, 2, *reference[5:15]])) == reference[15:23]
    assert proposal(drafter, [1, 2, 3]) == []
    assert longest(proposal(drafter, [138, 139, 200])) == [201], "texts do not run into each other"
    drafter.learn([1, 2, 3, 77])
    assert longest(proposal(drafter, [1, 2, 3])) == [77]
    assert longest(proposal(drafter, [5, 6, 7, 8, 120, 5, 6, 7, 8, 120, 5, 6, 7, 8]))[:5] == [120, 5, 6, 7, 8], (
        "own text too"
    )


def test_the_automaton_counts_every_substring():
    rng = random.Random(0)
    for _ in range(60):
        texts = [[rng.randrange(3) for _ in range(rng.randint(1, 14))] for _ in range(rng.randint(1, 3))]
        automaton = SuffixAutomaton()
        counts = {}
        for text in texts:
            automaton.begin_text()
            for end, token in enumerate(text, 1):
                automaton.append(token)
                for start in range(end):
                    counts[tuple(text[start:end])] = counts.get(tuple(text[start:end]), 0) + 1
        for substring, count in counts.items():
            place = match = 0
            for token in substring:
                place, match = automaton.follow(place, match, token)
            assert (automaton.count[place], match) == (count, len(substring))
        if len(texts) == 1:
            [text] = texts
            ends = [k for k in range(len(text)) if any(text[i : i + k] == text[-k:] for i in range(len(text) - k))]
            assert automaton.seen_before()[1] == max(ends, default=0)


@pytest.mark.parametrize("text", [[3] * 4000, [i % 50 for i in range(4000)], None], ids=["one", "period", "chance"])
def test_memory_and_work_grow_with_the_text(text):
    text = text or random.Random(0).choices(range(300), k=4000)
    automaton = SuffixAutomaton()
    touched = 0
    for token in text:
        before = list(automaton.count) if automaton.size % 500 == 0 else None
        automaton.append(token)
        if before is not None:
            touched = sum(a != b for a, b in zip(automaton.count, before, strict=False))
        assert touched <= CHAIN + 1
    assert len(automaton.link) <= 2 * len(text)
    assert sum(map(len, automaton.following)) <= 3 * len(text)


@pytest.mark.parametrize("settings", [FULL, DraftSettings("tree", 8, 2, 16)], ids=["chain", "tree"])
@pytest.mark.parametrize("drafter", [LookupDrafter(), SuffixDrafter()], ids=lambda d: d.kind)
def test_long_runs_are_accepted_where_the_text_repeats_itself(drafter, settings):
    target = make_target("gemma2", layers=2)
    plain = generate(target, None, "the quick brown fox", max_new_tokens=60, eos_token_ids=()).tokens
    out = generate(target, drafter, "the quick brown fox", max_new_tokens=60, settings=settings, eos_token_ids=())
    assert out.tokens == plain
    assert max(r.accepted for r in out.rounds) == 8
    assert out.acceptance_length > 4


def test_a_reference_that_holds_the_answer(target):
    prompt = [5, 6, 7]
    plain = generate(target, None, prompt, max_new_tokens=40, eos_token_ids=()).tokens
    out = generate(target, SuffixDrafter([plain]), prompt, max_new_tokens=40, eos_token_ids=())
    assert out.tokens == plain
    assert out.acceptance_length > 3 > generate(target, SuffixDrafter(), prompt, max_new_tokens=40).acceptance_length
