"""A recorder changes no draft, and what it keeps is what the target would compute again."""

import random

import pytest
import torch

from decode.engine import DraftSettings, generate
from drafters.record import Recorder
from tests.scripted import oracle, wavering

CHAIN, TREE = DraftSettings("chain", 4), DraftSettings("tree", 4, 3, 12)


@pytest.fixture(scope="module")
def cases(target):
    rng = random.Random(6)
    prompts = [[rng.randrange(target.vocab_size) for _ in range(n)] for n in (1, 7, 12)]
    return [(p, generate(target, None, p, max_new_tokens=20, eos_token_ids=()).tokens) for p in prompts]


@pytest.mark.parametrize("settings", [CHAIN, TREE], ids=["chain", "tree"])
def test_rows_are_what_the_target_computes_of_the_text(target, drafters, cases, settings):
    recorder = Recorder(drafters["eagle3"])
    for prompt, answer in cases:
        out = generate(target, recorder, prompt, max_new_tokens=20, settings=settings, eos_token_ids=())
        assert out.tokens == answer
    recorder.finish()
    assert recorder.finished == len(recorder.rows) == 3
    for row, (prompt, answer) in zip(recorder.rows, cases, strict=True):
        text, M = prompt + answer, len(row.ids)
        assert len(text) - settings.length - 2 <= M < len(text)  # the last round is not read by the drafter
        assert row.ids[1:].tolist() == text[1:M]
        assert row.written.tolist() == [False] * len(prompt) + [True] * (M - len(prompt))
        ids = torch.tensor([text[:M]])
        with torch.inference_mode():
            expected = target.forward(ids, torch.arange(M)[None], taps=drafters["eagle3"].taps)
        torch.testing.assert_close(row.features.final, expected.final, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(row.features.taps, expected.taps, atol=2e-4, rtol=1e-5)


def test_who_wrote_what(target, cases):
    prompt, answer = cases[1]
    flags = []
    recorder = Recorder(wavering(answer, len(prompt)))
    generate(
        target, recorder, prompt, max_new_tokens=20, settings=CHAIN, eos_token_ids=(),
        callback=lambda tokens, n: flags.extend(i < n for i in range(len(tokens))),
    )  # fmt: skip
    recorder.finish()
    (row,) = recorder.rows
    assert row.accepted.tolist() == ([False] * len(prompt) + flags)[: len(row.ids)]
    assert 0 < row.accepted.sum() < row.written.sum()
    assert (recorder.tokens, recorder.steps)[0] >= len(answer) - 2
    assert recorder.tokens / recorder.steps > 1.5


def test_it_keeps_the_newest_within_its_capacity(target, cases):
    recorder = Recorder(oracle(cases[2][1], len(cases[2][0])), capacity=50, max_length=22)
    for _ in range(4):
        generate(target, recorder, cases[2][0], max_new_tokens=20, eos_token_ids=())
    recorder.finish()
    assert recorder.finished == 4
    assert [len(row.ids) for row in recorder.rows] == [22, 22]
    text = cases[2][0] + cases[2][1]
    row = recorder.rows[-1]
    start = next(i for i in range(len(text)) if text[i : i + 22] == row.ids.tolist())
    assert row.features.final.shape[1] == 22
    assert row.written.tolist() == [start + i >= len(cases[2][0]) for i in range(22)]
    recorder.finish()  # nothing is under way
    assert recorder.finished == 4
