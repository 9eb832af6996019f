"""Costs and the choice of a draft setting."""

from itertools import product

import pytest
import torch

from decode import cost
from decode.cost import OFF, Curve, _follow, best_static_tree, continuations, profile, try_drafts, tuned_settings
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
def test_counted_tokens_a_step_are_those_of_a_real_decode(prompts, settings):
    target = make_target("gemma2", template="chatml")  # its greedy text repeats itself, so that drafts are accepted
    from drafters.build import build_medusa

    drafter = build_medusa(target, None, heads=3)
    texts = continuations(target, prompts, drafter.taps, max_new_tokens=40)
    rounds = []
    for prompt in prompts:
        rounds += generate(target, drafter, prompt.messages, max_new_tokens=40, settings=settings).rounds
    real = sum(r.tokens for r in rounds) / len(rounds)
    assert real > 1.5
    trial = try_drafts(drafter, texts, [settings])[settings]
    assert 1 + sum(trial.survival) == pytest.approx(real, rel=0.15)  # at fixed places, not where real rounds begin
    assert list(trial.survival) == sorted(trial.survival, reverse=True) and max(trial.nodes) <= settings.nodes


@torch.inference_mode()
def test_first_drafts_at_all_places_set_right_what_few_places_showed(drafters, target, prompts):
    texts = continuations(target, prompts, drafters["eagle3"].taps, max_new_tokens=12)
    assert [len(t.ids) - t.prompt_tokens for t in texts] == [11] * 3
    right, seen = cost.first_hits(drafters["eagle3"], texts)
    drafter, one, hits = drafters["eagle3"], DraftSettings("chain", 1), 0
    for text in texts:
        state, read = drafter.begin(len(text.ids) + 2), 0
        for last in range(text.prompt_tokens, len(text.ids) - 1):
            drafter.extend(state, text.ids[read + 1 : last + 1], text.features.rows(slice(read, last)))
            hits += int(drafter.propose(state, one).tokens[0] == text.ids[last + 1])
            read = last
    assert (right, seen) == (hits, 30)
    assert cost.first_hits(Slow(), texts) == (0, 0), "a drafter that can't say"
    tree = DraftSettings("tree", 2, 2, 4)
    trials = {one: cost.Trial((0.6,), (1,) * 8, 1.0), tree: cost.Trial((0.8, 0.4), (4,) * 8, 1.0)}
    corrected = cost._corrected(trials, (28, 98))
    assert corrected[one].survival[0] == pytest.approx(0.29, abs=0.01)
    first, second = corrected[tree].survival
    assert 0.29 < first < 0.8 and second / first == pytest.approx(0.5), "later tokens as they were, given the first"
    assert cost._corrected(trials, (0, 0)) == trials


def test_what_a_tree_holds_of_a_text():
    tokens, parents = [5, 6, 7, 8], [-1, -1, 1, 2]
    assert _follow(tokens, parents, [6, 7, 8, 9]) == 3
    assert _follow(tokens, parents, [6, 7, 8]) == 2, "the last token of the text is the target's own"
    assert _follow(tokens, parents, [5, 7, 8, 9]) == 1
    assert _follow(tokens, parents, [4, 7, 8, 9]) == 0


class Slow:
    kind, taps, meta, default_settings = "slow", (), {}, None

    def begin(self, capacity):
        return None

    def extend(self, state, tokens, features):
        pass

    def propose(self, state, settings, temperature, generator):
        torch.randn(600, 600) @ torch.randn(600, 600)
        return DraftTree.chain(torch.zeros(settings.length, dtype=torch.long))


def test_a_useless_drafter_is_turned_off_and_costs_are_measured_once(target, prompts, tmp_path, monkeypatch):
    texts = continuations(target, prompts[:1], (), max_new_tokens=12)
    chain = DraftSettings("chain", 4)
    ranked = profile(target, Slow(), texts=texts, settings=[OFF, chain], cache=tmp_path)
    assert [c.settings for c in ranked] == [OFF, chain]
    assert ranked[0].speedup == 1.0 > ranked[1].speedup
    monkeypatch.setattr(cost, "measure_target", None)  # would fail if anything were measured again
    assert profile(target, Slow(), texts=texts, settings=[OFF, chain], cache=tmp_path) == ranked
    with pytest.raises(TypeError):
        profile(target, Slow(), texts=texts, settings=[OFF, chain], cache=tmp_path, context=5000)


@pytest.mark.parametrize("content", ["", "[]", "{}", '[{"settings": {"kind": "chain"}}]', "[1]"])
def test_damaged_costs_are_measured_anew_and_what_cannot_be_kept_is_said(target, prompts, tmp_path, content, capsys):
    texts = continuations(target, prompts[:1], (), max_new_tokens=12)
    asked = {"texts": texts, "settings": [OFF, DraftSettings("chain", 1)]}
    profile(target, Slow(), **asked, cache=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(content)
    assert len(profile(target, Slow(), **asked, cache=tmp_path)) == 2 and len(file.read_text()) > 99
    file.unlink()
    file.mkdir()
    assert len(profile(target, Slow(), **asked, cache=tmp_path)) == 2
    assert "cannot be kept" in capsys.readouterr().out


def test_the_curve_between_and_beyond_its_points():
    curve = Curve({1: 10.0, 2: 11.0, 4: 15.0})
    assert [curve(n) for n in (1, 2, 3, 4, 6)] == [10, 11, 13, 15, 19]


def best_by_search(hits, cost):
    """Every tree of up to 5 nodes over the ranks, the slow way."""
    paths = [p for depth in range(1, len(hits) + 1) for p in product(range(len(hits[0])), repeat=depth)]

    def grow(tree, frontier):
        if tree:
            value = 1 + sum(torch.tensor([hits[d][r] for d, r in enumerate(p)]).prod().item() for p in tree)
            yield value / cost(len(tree), max(map(len, tree)))
        if len(tree) < 5:
            for i, path in enumerate(frontier):
                children = [p for p in paths if p[:-1] == path]
                yield from grow([*tree, path], frontier[i + 1 :] + children)

    return max(grow([], [p for p in paths if len(p) == 1]))


@pytest.mark.parametrize("row", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("level", [0.0, 0.2])
def test_the_static_tree_of_best_size_and_depth(row, level):
    hits = [[0.6, 0.2], [0.5, 0.2], [0.4, 0.1]]
    price = lambda nodes, depth: 1 + row * nodes + level * depth  # noqa: E731
    settings, rate = best_static_tree(hits, price, most=5)
    assert rate == pytest.approx(max(1.0, best_by_search(hits, price)))
    assert settings.nodes <= 5 and (settings.nodes > 0) == (rate > 1)


def test_candidates_that_costs_suggest(drafters):
    chains = {n: cost.Trial((0.6, 0.4, 0.3, 0.2)[:n], (n,), 1.0 + 0.2 * n) for n in (1, 4)}
    trials = {DraftSettings("chain", n): trial for n, trial in chains.items()}
    curve = Curve({1: 10.0, 5: 10.8})
    cuts = cost._derived(drafters["eagle3"], curve, trials)
    # a level costs 0.2 ms to draft and 0.2 to verify, at a speed of 2.5 tokens in 12.6 ms
    assert {s.kind: s.min_confidence for s in cuts} == {"chain": 0.08, "tree": 0.08}
    medusa = replace_meta(drafters["medusa"], rank_hits=[[0.6, 0.2], [0.4, 0.1]])
    trees = cost._derived(medusa, curve, trials)
    assert len(trees) >= 2 and all(s.kind == "tree" and s.length <= 2 for s in trees)
    assert cost._derived(drafters["eagle3"], Curve({1: 10.0, 5: 60.0}), trials) == []


def replace_meta(drafter, **meta):
    return type("Stub", (), {"kind": drafter.kind, "meta": meta})()


def test_parts_of_a_router_are_tuned_each_for_itself(drafters, monkeypatch):
    best = {"eagle3": DraftSettings("chain", 6), "medusa": DraftSettings("tree", 3, 4, 8)}
    found = lambda settings: [cost.Candidate(settings, (0.5,), 1.0, 1.0, 0.0, Curve({1: 1.0}))]  # noqa: E731
    monkeypatch.setattr(cost, "profile", lambda t, drafter, cache: found(best[drafter.kind]))
    parts = {kind: drafters[kind] for kind in best}
    for drafter, nodes in ((Router(parts), 8), (Merged(parts), 14)):
        chosen = tuned_settings(None, drafter)
        assert drafter.settings == best
        assert chosen == drafter.default_settings == DraftSettings("tree", 6, 4, nodes)
