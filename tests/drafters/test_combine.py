"""A merged tree holds every path of its parts once, and changes no text."""

import random
from types import SimpleNamespace

import pytest
import torch

from decode.engine import DraftSettings, generate
from drafters.base import DraftTree, Outcome
from drafters.combine import Merged, merge
from drafters.errors import UserError
from tests.scripted import SCRIPTS, oracle

CHAIN, TREE = DraftSettings("chain", 5), DraftSettings("tree", 4, 3, 14)


def paths(tree):
    tokens, out = tree.tokens.tolist(), []
    for node, parent in enumerate(tree.parents.tolist()):
        assert parent < node  # parents stand before their children
        out.append((out[parent] if parent >= 0 else ()) + (tokens[node],))
    return out


def test_merge_is_the_union_of_paths():
    rng = random.Random(0)
    for _ in range(200):
        trees = []
        for _ in range(rng.randint(1, 3)):
            n = rng.randint(0, 8)
            tokens = torch.tensor([rng.randrange(3) for _ in range(n)], dtype=torch.long)
            parents = torch.tensor([rng.randint(-1, i - 1) for i in range(n)], dtype=torch.long)
            trees.append(DraftTree(tokens, parents))
        if len([t for t in trees if len(t.tokens)]) < 2:
            continue
        merged = paths(merge(trees)[0])
        assert len(set(merged)) == len(merged)
        assert set(merged) == {path for tree in trees for path in paths(tree)}


def test_merge_of_one_or_none_forgets_how_tokens_were_drawn():
    empty = DraftTree.empty(torch.device("cpu"))
    assert len(merge([empty, empty])[0].tokens) == 0
    drawn = DraftTree.chain(torch.tensor([3, 4]), q=torch.ones(2, 5) / 5)
    for tree, _ in (merge([empty, drawn]), merge([drawn, drawn])):
        assert (tree.tokens.tolist(), tree.parents.tolist(), tree.q) == ([3, 4], [-1, 0], None)


@pytest.mark.parametrize("settings", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("script", ["oracle", "wavering", "contrary"])
@pytest.mark.parametrize("trained", ["medusa", "eagle3"])
def test_greedy_text_is_the_target_s_own(target, drafters, script, trained, settings):
    rng = random.Random(4)
    for length in (1, 12):
        prompt = [rng.randrange(target.vocab_size) for _ in range(length)]
        answer = generate(target, None, prompt, max_new_tokens=16, eos_token_ids=()).tokens
        merged = Merged({trained: drafters[trained], "script": SCRIPTS[script](answer, length)})
        out = generate(target, merged, prompt, max_new_tokens=16, settings=settings, eos_token_ids=())
        assert out.tokens == answer
        assert max(r.drafted for r in out.rounds) <= settings.nodes
        assert max(r.depth for r in out.rounds) <= settings.length
        if script == "oracle":  # the free drafter's candidates come first, and the target finds them
            assert len(out.rounds) < 10
        elif script == "contrary" and trained == "eagle3":
            assert max(r.drafted for r in out.rounds) > settings.nodes // 2  # both have a share


def test_settings_of_each_and_of_all(target, drafters):
    both = {"eagle3": drafters["eagle3"], "script": oracle([1, 2, 3], 1)}
    merged = Merged(both, {"eagle3": TREE, "script": CHAIN})
    assert list(merged.drafters) == ["script", "eagle3"]
    assert merged.default_settings == DraftSettings("tree", 5, 4, 19)
    assert Merged(both).default_settings is None
    answer = generate(target, None, [5, 6], max_new_tokens=20, eos_token_ids=()).tokens
    assert generate(target, merged, [5, 6], max_new_tokens=20, eos_token_ids=()).tokens == answer
    with pytest.raises(UserError, match="two drafters"):
        Merged({"eagle3": drafters["eagle3"]})


def test_each_drafter_hears_what_became_of_its_own_candidates():
    heard = {}

    def speaker(name, tree):
        return SimpleNamespace(
            kind="x", taps=(), meta={}, begin=lambda n: name, extend=lambda *a: None, propose=lambda *a: tree,
            observe=heard.__setitem__,
        )  # fmt: skip

    a = DraftTree(torch.tensor([1, 2, 3]), torch.tensor([-1, 0, -1]))
    b = DraftTree(torch.tensor([9, 1, 2, 7]), torch.tensor([-1, -1, 1, 2]))
    merged = Merged({"a": speaker("a", a), "b": speaker("b", b), "none": speaker("none", DraftTree.empty("cpu"))})
    state = merged.begin(10)
    union = merged.propose(state, TREE)
    assert paths(union) == [(1,), (1, 2), (3,), (9,), (1, 2, 7)]
    choices = [1, 2, 7, 30, 90, 70]  # after the root and each node: 1, 2, 7 are right
    merged.observe(state, Outcome(union, choices, [0, 1, 4], 0.5))
    assert heard["a"] == Outcome(a, [1, 2, 7, 30], [0, 1], 0.5)
    assert heard["b"] == Outcome(b, [1, 90, 2, 7, 70], [1, 2, 3], 0.5)
    assert heard["none"].choices == [1]
