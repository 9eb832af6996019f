"""A router is lossless whatever it chooses, finds the faster drafter, and keeps the others in step for little."""

import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from decode.engine import DraftSettings, generate
from drafters.base import DraftTree, Outcome
from drafters.combine import Merged, own_features
from drafters.errors import UserError
from drafters.router import OFF, Bandit, Router, combined
from drafters.target import Features
from tests.scripted import Scripted, contrary, oracle, wavering

CHAIN, TREE = DraftSettings("chain", 4), DraftSettings("tree", 4, 3, 12)


@pytest.fixture(scope="module")
def case(target):
    rng = random.Random(3)
    prompt = [rng.randrange(target.vocab_size) for _ in range(9)]
    return prompt, generate(target, None, prompt, max_new_tokens=60, eos_token_ids=()).tokens


class Watched:
    """A drafter whose reads are noted."""

    def __init__(self, drafter):
        self.inner, self.reads = drafter, []
        self.kind, self.taps, self.meta, self.default_settings = drafter.kind, drafter.taps, drafter.meta, None

    def begin(self, capacity):
        self.reads = []
        return self.inner.begin(capacity)

    def extend(self, state, tokens, features):
        self.reads.append(len(tokens))
        assert (features.taps is None) == (not self.taps)
        self.inner.extend(state, tokens, features)

    def propose(self, *args):
        return self.inner.propose(*args)


@pytest.mark.parametrize("settings", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("patience", [2, 512])
def test_greedy_text_is_the_target_s_own_and_every_choice_is_counted(target, drafters, case, settings, patience):
    prompt, answer = case
    watched = {name: Watched(drafters[name]) for name in ("medusa", "eagle1", "eagle3")}
    watched["script"] = Watched(wavering(answer, len(prompt)))
    router = Router(watched, {"eagle3": TREE}, bandit=Bandit(explore=3.0), patience=patience)
    out = generate(target, router, prompt, max_new_tokens=60, settings=settings, eos_token_ids=())
    assert out.tokens == answer
    assert set(router.counts) == {*watched, OFF}
    chosen = router.counts.total()
    assert chosen in (len(out.rounds), len(out.rounds) - 1)  # the last round may have no room for a draft
    for drafter in watched.values():  # nothing is read twice, and little is read late
        assert sum(drafter.reads) <= len(prompt) + 60
        assert len(drafter.reads) < chosen or patience == 2


def test_a_drafter_reads_the_same_through_the_router(target, drafters, case):
    """Every arm's proposal equals what the drafter alone proposes after the same tokens."""
    prompt, answer = case
    ids = torch.tensor([prompt + answer])
    taps = tuple(sorted({*drafters["eagle3"].taps}))
    with torch.inference_mode():
        features = target.forward(ids, torch.arange(ids.shape[1])[None], taps=taps)
        for name in ("eagle1", "eagle3"):
            router = Router({name: drafters[name], "medusa": drafters["medusa"], "other": drafters["eagle3"]})
            state, alone = router.begin(100), drafters[name].begin(100)
            for start, end in ((0, 9), (9, 11), (11, 12), (12, 30)):
                part = Features(features.final[:, start:end], features.taps[:, start:end])
                tokens = ids[0, start + 1 : end + 1]
                router.extend(state, tokens, part)
                drafters[name].extend(alone, tokens, own_features(part, taps, drafters[name].taps))
            state.bandit.record(name, 9, 1.0)
            state.bandit.record("medusa", 1, 1.0), state.bandit.record("other", 1, 1.0), state.bandit.record(OFF, 1, 1)
            tree = router.propose(state, TREE)
            assert state.name == name
            expected = drafters[name].propose(alone, TREE)
            assert tree.tokens.tolist() == expected.tokens.tolist()
            assert tree.parents.tolist() == expected.parents.tolist()


def test_own_features_are_the_drafter_s_layers():
    taps = torch.arange(12.0).view(1, 1, 12)  # layers 1, 4 and 7, four wide
    features = Features(torch.zeros(1, 1, 4), taps)
    assert own_features(features, (1, 4, 7), (1, 7)).taps.flatten().tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    assert own_features(features, (1, 4, 7), ()).taps is None


def simulate(router, seconds, rounds=300, tokens=None):
    """Rounds under an injected clock: each arm's seconds and accepted tokens."""
    state = router.begin(10_000)
    chosen = []
    for _ in range(rounds):
        tokens_in = torch.zeros(1, dtype=torch.long)
        router.extend(state, tokens_in, Features(torch.zeros(1, 1, 4), None))
        tree = router.propose(state, CHAIN)
        accepted = list(range((tokens or {}).get(state.name, 2)))
        router.observe(state, Outcome(tree, [0], accepted, seconds[state.name]))
        chosen.append(state.name)
    return chosen


def scripted():
    return Scripted(lambda emitted: [1, 2, 3, 4], 0)


def test_the_bandit_finds_the_faster_arm_and_notices_when_it_is_no_longer():
    for fast, slow in (("a", "b"), ("b", "a")):
        router = Router({"a": scripted(), "b": scripted()})
        chosen = simulate(router, {fast: 0.02, slow: 0.03, OFF: 0.04})
        assert set(chosen[:10]) == {"a", "b", OFF}  # all are tried
        assert chosen[100:].count(fast) > 160
        chosen = simulate(router, {fast: 0.06, slow: 0.03, OFF: 0.04})  # a new request starts from the old figures ...
        assert chosen[150:].count(slow) > 110  # ... and leaves them behind
    # more tokens beat less time, and not drafting wins where it is fastest
    router = Router({"a": scripted(), "b": scripted()})
    assert simulate(router, {"a": 0.03, "b": 0.02, OFF: 0.02}, tokens={"a": 4, "b": 1, OFF: 0})[100:].count("a") > 160
    router = Router({"a": scripted(), "b": scripted()})
    assert simulate(router, {"a": 0.03, "b": 0.03, OFF: 0.006}, tokens={OFF: 0})[100:].count(OFF) > 160


def test_confidence_overrides_until_it_proves_slower():
    sure = scripted()
    sure.confidence = lambda state: 9 if len(state) % 2 else 3
    for seconds, low, high in ((0.03, 90, 100), (0.3, 1, 25)):
        router = Router({"a": scripted(), "suffix": sure}, override=6)
        state = router.begin(1000)
        names = []
        for _ in range(200):
            router.extend(state, torch.zeros(1, dtype=torch.long), Features(torch.zeros(1, 1, 4), None))
            tree = router.propose(state, CHAIN)
            took = seconds if state.arm == "suffix, sure" else {"a": 0.03, "suffix": 0.3, OFF: 0.3}[state.arm]
            router.observe(state, Outcome(tree, [0], [0], took))
            names.append(state.arm)
        assert low <= names.count("suffix, sure") <= high
        assert router.counts == Counter(names)  # counted apart from its ordinary rounds
        assert names.count("suffix") < 20


def test_a_late_read_is_not_held_against_the_drafter():
    router = Router({"a": scripted(), "b": scripted()})
    state = router.begin(1000)
    router.extend(state, torch.zeros(100, dtype=torch.long), Features(torch.zeros(1, 100, 4), None))
    tree = router.propose(state, CHAIN)
    router.observe(state, Outcome(tree, [0], [0], 5.0))
    assert state.name == "a" and not router.bandit.tallies
    tree = router.propose(state, CHAIN)
    router.observe(state, Outcome(tree, [0], [0], 0.5))
    assert state.name == "a" and router.bandit.rate("a") == 4.0


def test_the_chosen_drafter_hears_of_its_proposal_after_the_tokens():
    heard = []
    a, b = scripted(), scripted()
    a.observe = lambda state, outcome: heard.append((len(state), outcome.accepted))
    b.observe = lambda state, outcome: pytest.fail("b proposed nothing")
    router = Router({"a": a, "b": b})
    state = router.begin(100)
    router.extend(state, torch.zeros(3, dtype=torch.long), Features(torch.zeros(1, 3, 4), None))
    tree = router.propose(state, CHAIN)
    router.extend(state, torch.zeros(2, dtype=torch.long), Features(torch.zeros(1, 2, 4), None))
    router.observe(state, Outcome(tree, [0], [0], 1.0))
    assert heard == [(5, [0])]


def test_settings_of_each_fit_into_what_the_engine_allows():
    asked = []

    def propose(state, settings, temperature, generator):
        asked.append(settings)
        return DraftTree.empty(torch.device("cpu"))

    def drafter(settings=None):
        return SimpleNamespace(
            kind="x", taps=(), meta={}, default_settings=settings, begin=lambda n: [], extend=lambda *a: None,
            propose=propose,
        )  # fmt: skip

    router = Router({"a": drafter(TREE), "b": drafter()}, {"b": DraftSettings("chain", 7)})
    assert router.default_settings == DraftSettings("tree", 7, 4, 12)
    assert Router({"a": drafter(TREE), "b": drafter()}).default_settings is None
    state = router.begin(100)
    router.extend(state, torch.zeros(2, dtype=torch.long), Features(torch.zeros(1, 2, 4), None))
    router.propose(state, DraftSettings("tree", 2, 8, 5))
    assert asked == [DraftSettings("tree", 2, 3, 5)]
    assert len(router.propose(state, DraftSettings("chain", 0)).tokens) == 0  # nothing to choose, nothing counted
    assert router.counts.total() == 1
    with pytest.raises(UserError, match="two drafters"):
        Router({"a": drafter()})


def test_it_is_as_fast_as_the_best_in_real_rounds(target, case):
    """With the engine's own clock: a drafter that is always right beats one that never is."""
    prompt, answer = case
    router = Router({"right": oracle(answer, len(prompt)), "wrong": contrary(answer, len(prompt))}, {})
    for _ in range(4):
        assert generate(target, router, prompt, max_new_tokens=60, eos_token_ids=()).tokens == answer
    assert router.counts["right"] > router.counts["wrong"]


def test_by_name():
    made = {}

    def make(spec):
        return made.setdefault(spec, scripted())

    router = combined("router", "runs/a+suffix", make)
    assert isinstance(router, Router) and router.drafters == {"a": made["runs/a"], "suffix": made["suffix"]}
    assert isinstance(combined("merged", "a+b+c", make), Merged)
    for wrong in ("", "a", "a+", "x/a+y/a"):
        with pytest.raises(UserError, match=r"write router:A\+B"):
            combined("router", wrong, make)
