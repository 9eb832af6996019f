"""The decoder's output is the target's own: greedy decoding is token-identical to plain decoding and to HF generate."""

import random

import pytest
import torch

from decode.engine import DraftSettings, Generation, Round, SamplingParams, generate
from drafters.base import DraftTree
from drafters.build import build_eagle
from drafters.errors import UserError
from drafters.lookahead import LookaheadDrafter
from drafters.lookup import LookupDrafter, SuffixDrafter
from tests.scripted import SCRIPTS, Scripted, oracle, wavering
from tests.tiny import make_target

CHAIN, TREE = DraftSettings("chain", length=4), DraftSettings("tree", length=4, top_k=3, total=12)
KINDS = {"chain": CHAIN, "tree": TREE}
UNTRAINED = {
    "lookup": LookupDrafter(2, 1),
    "suffix": SuffixDrafter([range(0, 512, 3)]),
    "lookahead": LookaheadDrafter(),
}


def hf_generate(target, prompt, n, **options):
    with target.attention_backend("eager"), torch.inference_mode():
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "pad_token_id": 1, "attention_mask": torch.ones_like(ids)} | options
        return target.model.generate(ids, max_new_tokens=n, **options)[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def cases(target):
    """50 prompts of 1 to 30 tokens with their plain greedy continuations."""
    rng = random.Random(0)
    prompts = [[rng.randrange(target.vocab_size) for _ in range(rng.randint(1, 30))] for _ in range(50)]
    return [(prompt, generate(target, None, prompt, max_new_tokens=8).tokens) for prompt in prompts]


@pytest.fixture(scope="module")
def long_case(target):
    """A prompt whose first 24 greedy tokens all differ, so that any one can be declared the end; and those tokens."""
    rng = random.Random(1)
    while True:
        prompt = [rng.randrange(target.vocab_size) for _ in range(5)]
        answer = generate(target, None, prompt, max_new_tokens=24, eos_token_ids=()).tokens
        if len(set(answer)) == 24:
            return prompt, answer


def test_plain_decoding_is_what_hf_generates(target, cases):
    assert {len(prompt) for prompt, _ in cases} >= {1, 30}
    for prompt, answer in cases:
        assert hf_generate(target, prompt, 8) == answer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["medusa", "hydra", "eagle1", "eagle3", *UNTRAINED, *SCRIPTS])
def test_greedy_output_does_not_depend_on_the_drafter(target, drafters, cases, name, kind):
    rounds = []
    for prompt, answer in cases:
        drafter = SCRIPTS[name](answer, len(prompt)) if name in SCRIPTS else (drafters | UNTRAINED)[name]
        out = generate(target, drafter, prompt, max_new_tokens=8, settings=KINDS[kind])
        assert out.tokens == answer
        rounds += out.rounds
    accepted = sum(r.accepted for r in rounds)
    assert 0 < max(r.drafted for r in rounds) <= KINDS[kind].nodes
    if name == "oracle":
        assert all(r.accepted == r.depth for r in rounds if r.tokens == r.depth + 1)
        assert len(rounds) < 0.4 * sum(r.tokens for r in rounds)
    elif name == "contrary" and kind == "chain":
        assert accepted == 0
    elif name in ("wavering", "noise"):
        assert 0 < accepted < sum(r.drafted for r in rounds)


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2"])
def test_families_and_windows_that_fill_up(family):
    target = make_target(family, layers=3)
    eagle = build_eagle(target, None, version=3)
    rng = random.Random(2)
    for length in (6, 8, 20):
        prompt = [rng.randrange(target.vocab_size) for _ in range(length)]
        plain = generate(target, None, prompt, max_new_tokens=40, eos_token_ids=()).tokens
        assert hf_generate(target, prompt, 40, eos_token_id=[target.vocab_size + 1]) == plain
        for drafter, settings in (
            (eagle, TREE),
            (oracle(plain, length), DraftSettings("tree", length=12, total=36)),  # deeper than the window
            (wavering(plain, length), CHAIN),
            (wavering(plain, length), TREE),
        ):
            out = generate(target, drafter, prompt, max_new_tokens=40, settings=settings, eos_token_ids=())
            assert out.tokens == plain


# ---- where the output ends


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", range(1, 9))
def test_an_end_token_inside_a_block_ends_the_output_there(target, long_case, kind, length):
    prompt, answer = long_case
    unused = next(t for t in range(target.vocab_size) if t not in answer)
    settings = DraftSettings(kind, length=length, total=24)
    for eos in ([answer[6]], [unused, answer[6]]):
        out = generate(
            target, oracle(answer, len(prompt)), prompt, max_new_tokens=20, settings=settings, eos_token_ids=eos
        )
        assert (out.tokens, out.finish) == (answer[:7], "eos")
        assert sum(r.tokens for r in out.rounds) == 6
        assert out.text == target.tokenizer.decode(answer[:6], skip_special_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
def test_max_new_tokens_is_exact(target, long_case, kind):
    prompt, answer = long_case
    for n in range(1, 11):
        for drafter in (None, oracle(answer, len(prompt)), wavering(answer, len(prompt))):
            out = generate(target, drafter, prompt, max_new_tokens=n, settings=KINDS[kind], eos_token_ids=())
            assert (out.tokens, out.finish) == (answer[:n], "length")
            emitted = 1
            for r in out.rounds:
                assert r.depth <= n - emitted - 1  # nothing is drafted that could not be emitted
                emitted += r.tokens


def test_stop_strings(target, long_case):
    prompt, answer = long_case
    decode = target.tokenizer.decode
    text = decode(answer, skip_special_tokens=True)
    begin, end = len(decode(answer[:8], skip_special_tokens=True)), len(decode(answer[:11], skip_special_tokens=True))
    stop = text[begin:end]  # spans three tokens
    assert stop and stop not in decode(answer[:10], skip_special_tokens=True)
    plain = generate(target, None, prompt, max_new_tokens=24, stop=[stop], eos_token_ids=())
    assert (plain.tokens, plain.finish, plain.text) == (answer[:11], "stop", text[: text.index(stop)])
    alone = generate(target, None, prompt, max_new_tokens=24, stop=stop, eos_token_ids=())  # not its letters
    assert (alone.tokens, alone.finish, alone.text) == (plain.tokens, plain.finish, plain.text)
    for kind in KINDS.values():
        out = generate(
            target,
            oracle(answer, len(prompt)),
            prompt,
            max_new_tokens=24,
            stop=["never seen", stop],
            settings=kind,
            eos_token_ids=(),
        )
        assert (out.tokens, out.finish, out.text) == (plain.tokens, plain.finish, plain.text)


@pytest.mark.parametrize("kind", KINDS)
def test_repetition_penalty_and_minimum_length_as_hf_does_it(target, kind):
    rng = random.Random(5)
    for penalty, at_least in ((1.5, 0), (1.0, 9), (1.3, 12), (0.7, 6)):
        prompt = [rng.randrange(target.vocab_size) for _ in range(12)]
        eos = hf_generate(target, prompt, 3, repetition_penalty=penalty, eos_token_id=[600])[2]
        answer = hf_generate(
            target, prompt, 20, repetition_penalty=penalty, min_new_tokens=at_least, eos_token_id=[eos, 511]
        )
        assert len(answer) >= max(3, at_least)
        sampling = SamplingParams(repetition_penalty=penalty, min_new_tokens=at_least)
        for drafter in (None, oracle(answer, 12), wavering(answer, 12)):
            out = generate(
                target,
                drafter,
                prompt,
                max_new_tokens=20,
                settings=KINDS[kind],
                sampling=sampling,
                eos_token_ids=[eos, 511],
            )
            assert out.tokens == answer


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_is_allowed_from_the_minimum_on_inside_a_block(target, long_case, kind):
    prompt, answer = long_case
    for at_least in (5, 6, 7):
        sampling, eos = SamplingParams(min_new_tokens=at_least), [answer[at_least]]
        assert hf_generate(target, prompt, 20, min_new_tokens=at_least, eos_token_id=eos) == answer[: at_least + 1]
        drafter, settings = oracle(answer, len(prompt)), KINDS[kind]
        out = generate(target, drafter, prompt, settings=settings, sampling=sampling, eos_token_ids=eos)
        assert (out.tokens, out.finish) == (answer[: at_least + 1], "eos")


# ---- what is reported


def test_callback_pieces_add_up(target, long_case):
    prompt, answer = long_case
    pieces = []
    out = generate(
        target,
        wavering(answer, len(prompt)),
        prompt,
        max_new_tokens=24,
        callback=lambda tokens, accepted: pieces.append((tokens, accepted)),
        eos_token_ids=(),
    )
    assert [t for tokens, _ in pieces for t in tokens] == out.tokens == answer
    assert [(len(tokens), accepted) for tokens, accepted in pieces[1:]] == [(r.tokens, r.accepted) for r in out.rounds]
    assert pieces[0] == (answer[:1], 0)


def test_acceptance_length_counts_the_targets_own_token(target, long_case):
    prompt, answer = long_case
    right = {1: 0, 2: 2, 5: 3}  # emitted so far -> drafts that are right: rounds that accept 0, 2 and 3

    def continuation(emitted):
        return [t if i < right[emitted] else (t + 1) % 512 for i, t in enumerate(answer[emitted : emitted + 4])]

    out = generate(target, Scripted(continuation, len(prompt)), prompt, max_new_tokens=9, eos_token_ids=())
    assert [r.accepted for r in out.rounds] == [0, 2, 3]
    assert [r.tokens for r in out.rounds] == [1, 3, 4]
    assert out.acceptance_length == pytest.approx(8 / 3)
    assert sum(r.accepted for r in out.rounds) / 3 == pytest.approx(5 / 3)
    assert Generation([1]).acceptance_length == 1.0


def test_a_policy_decides_every_round_and_a_drafter_hears_what_became_of_it(target, long_case):
    prompt, expected = long_case

    class Alternating:
        nodes, rows, turn, seen = 9, 9, 0, []

        def choose(self, requests=1, waiting=0):
            self.turn += 1
            return DraftSettings("tree", 3, 4, 9) if self.turn % 2 else DraftSettings("chain", 0)

        def observe(self, rounds):
            self.seen.extend(rounds)

    class Listening(Scripted):
        outcomes = []

        def observe(self, state, outcome):
            self.outcomes.append(outcome)

    policy, drafter = Alternating(), Listening(lambda n: expected[n:], len(prompt))
    out = generate(target, drafter, prompt, max_new_tokens=len(expected), settings=policy)
    assert out.tokens == expected
    assert policy.seen == out.rounds and len(drafter.outcomes) == len(out.rounds)
    assert [r.drafted > 0 for r in out.rounds[:-1]] == [i % 2 == 0 for i in range(len(out.rounds) - 1)]
    written = 1
    for round, outcome in zip(out.rounds, drafter.outcomes, strict=True):
        assert outcome.choices is not None and len(outcome.choices) == round.drafted + 1
        assert [outcome.tree.tokens[n].item() for n in outcome.accepted] == expected[written:][: round.accepted]
        assert outcome.choices[0] == expected[written]
        written += round.tokens


def test_times_add_up(target, drafters):
    out = generate(target, drafters["eagle3"], [5, 6, 7], max_new_tokens=8, eos_token_ids=())
    assert all(min(r.draft_s, r.verify_s) > 0 and r.other_s >= 0 for r in out.rounds)
    assert out.decode_s == pytest.approx(sum(r.total_s for r in out.rounds), rel=0.5)
    assert out.ttft_s > 0
    assert Round(3, 3, 1, 2, 0.25, 0.5, 0.125).total_s == 0.875


# ---- what is refused


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([[1, 2], [3]], {}, "once a prompt"),
        (torch.tensor([[1, 2], [3, 4]]), {}, "once a prompt"),
        (["one", "two"], {}, "once a prompt"),
        ([], {}, "empty"),
        ([1, 512], {}, "0..511"),
        ([-1], {}, "0..511"),
        ([1] * 500, {"max_new_tokens": 13}, "512 positions"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens=0"),
    ],
)
def test_bad_requests(target, prompt, options, message):
    with pytest.raises(UserError, match=message):
        generate(target, None, prompt, **options)


@pytest.mark.parametrize(
    "wrong", [{"kind": "bush"}, {"length": -1}, {"top_k": 0}, {"total": 0}, {"kind": "tree", "sample": True}], ids=str
)
def test_bad_draft_settings(wrong):
    with pytest.raises(UserError):
        DraftSettings(**wrong)


def test_every_form_of_prompt(target):
    messages = [{"role": "user", "content": "hello"}]
    ids = target.render(messages)
    outs = [generate(target, None, p, max_new_tokens=4) for p in ("hello", messages, ids, torch.tensor(ids))]
    assert all(out.tokens == outs[0].tokens and out.prompt_tokens == len(ids) for out in outs)


def test_the_last_position_of_the_target_can_be_used(target, drafters):
    prompt = list(range(500))
    plain = generate(target, None, prompt, max_new_tokens=12, eos_token_ids=())
    for settings in KINDS.values():
        out = generate(target, drafters["eagle3"], prompt, max_new_tokens=12, settings=settings, eos_token_ids=())
        assert out.tokens == plain.tokens and len(out.tokens) == 12


# ---- what the drafter sees


class Watched:
    """An EAGLE drafter that proposes a given answer, after it has drafted for itself, and checks every `extend`."""

    kind, meta = "watched", {}

    def __init__(self, eagle, target, prompt, script):
        self.eagle, self.target, self.prompt, self.script = eagle, target, prompt, script
        self.taps, self.read, self.rounds = eagle.taps, list(prompt[:1]), 0

    def begin(self, capacity):
        self.capacity, self.script_state = capacity, self.script.begin(capacity)
        return self.eagle.begin(capacity)

    def propose(self, state, settings, temperature, generator) -> DraftTree:
        self.eagle.propose(state, settings, temperature, generator)  # scribbles behind the committed rows
        return self.script.propose(self.script_state, settings, temperature, generator)

    def extend(self, state, tokens, features):
        self.eagle.extend(state, tokens, features)
        self.script.extend(self.script_state, tokens, features)
        self.read += tokens.tolist()
        self.rounds += 1
        ids = torch.tensor([self.read])
        true = self.target.forward(ids, torch.arange(ids.shape[1])[None], taps=self.taps)
        rebuilt = self.eagle.begin(self.capacity)
        cut = lambda x: None if x is None else x[:, :-1]  # noqa: E731
        self.eagle.extend(rebuilt, ids[0, 1:], type(true)(cut(true.final), cut(true.taps)))
        assert state.length == rebuilt.length == len(self.read) - 1
        for mine, theirs in ((state.keys, rebuilt.keys), (state.values, rebuilt.values)):
            torch.testing.assert_close(mine[:, :, : state.length], theirs[:, :, : state.length], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(state.out, rebuilt.out, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
def test_the_drafters_cache_holds_true_features_only(target, drafters, long_case, name, kind):
    prompt, answer = long_case
    watched = Watched(drafters[name], target, prompt, wavering(answer, len(prompt)))
    out = generate(target, watched, prompt, max_new_tokens=24, settings=KINDS[kind], eos_token_ids=())
    assert out.tokens == answer
    assert watched.rounds == len(out.rounds)  # the prefill and every round but the last
    assert max(r.accepted for r in out.rounds) >= 2


def test_a_beam_wider_than_the_tree_fits_the_drafters_cache(target, drafters, long_case):
    prompt, answer = long_case
    settings = DraftSettings("tree", length=5, top_k=10, total=4)
    for n in (6, 7, 12):
        out = generate(target, drafters["eagle3"], prompt, max_new_tokens=n, settings=settings, eos_token_ids=())
        assert out.tokens == answer[:n]
