"""Costs and the choice of a draft setting."""

import pytest
import torch

from decode import cost
from decode.cost import OFF, Candidate, Continuation, _follow, continuations, count_tau, tune, tuned_settings
from decode.engine import generate
from decode.prompts import Prompt
from drafters.base import DraftSettings, DraftTree
from drafters.combine import Merged
from drafters.router import Router
from tests.tiny import make_target

TEXTS = ("the quick brown fox", "one two three four", "how are you today")


@pytest.fixture(scope="module")
def prompts():
    return [Prompt(str(i), None, [{"role": "user", "content": text}]) for i, text in enumerate(TEXTS)]


@pytest.mark.parametrize("settings", [DraftSettings("chain", 3), DraftSettings("tree", 3, 3, 8)], ids=["chain", "tree"])
def test_counted_tokens_a_step_are_those_of_a_real_decode(drafters, prompts, settings):
    target = make_target("gemma2", template="chatml")  # its greedy text repeats itself, so that drafts are accepted
    from drafters.build import build_medusa

    drafter = build_medusa(target, None, heads=3)
    texts = continuations(target, prompts, drafter.taps, max_new_tokens=40)
    rounds = []
    for prompt in prompts:
        rounds += generate(target, drafter, prompt.messages, max_new_tokens=40, settings=settings).rounds
    real = sum(r.tokens for r in rounds) / len(rounds)
    assert real > 1.5
    assert count_tau(drafter, texts, settings) == pytest.approx(real, rel=0.05)


def test_what_a_tree_holds_of_a_text():
    tokens, parents = [5, 6, 7, 8], [-1, -1, 1, 2]
    assert _follow(tokens, parents, [6, 7, 8, 9]) == 3
    assert _follow(tokens, parents, [6, 7, 8]) == 2, "the last token of the text is the target's own"
    assert _follow(tokens, parents, [5, 7, 8, 9]) == 1
    assert _follow(tokens, parents, [4, 7, 8, 9]) == 0


def test_a_useless_drafter_is_turned_off(target, drafters, prompts):
    class Slow:
        kind, taps, meta, default_settings = "slow", (), {}, None

        def begin(self, capacity):
            return None

        def extend(self, state, tokens, features):
            pass

        def propose(self, state, settings, temperature, generator):
            torch.randn(600, 600) @ torch.randn(600, 600)
            return DraftTree.chain(torch.zeros(settings.length, dtype=torch.long))

    texts = continuations(target, prompts[:1], (), max_new_tokens=12)
    ranked = tune(target, Slow(), texts, [OFF, DraftSettings("chain", 4)])
    assert ranked[0].settings == OFF
    assert ranked[0].speedup == 1.0 > ranked[1].speedup
    assert isinstance(texts[0], Continuation)


def test_parts_of_a_router_are_tuned_each_for_itself(target, drafters, monkeypatch):
    best = {"eagle3": DraftSettings("chain", 6), "medusa": DraftSettings("tree", 3, 4, 8)}
    monkeypatch.setattr(cost, "continuations", lambda *args: [])
    monkeypatch.setattr(cost, "tune", lambda t, drafter, texts: [Candidate(best[drafter.kind], 1.5, 1.0, 1.0, 1.2)])
    parts = {kind: drafters[kind] for kind in best}
    for drafter, nodes in ((Router(parts), 8), (Merged(parts), 14)):
        chosen = tuned_settings(target, drafter)
        assert drafter.settings == best
        assert chosen == drafter.default_settings == DraftSettings("tree", 6, 4, nodes)
