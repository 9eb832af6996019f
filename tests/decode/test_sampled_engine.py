"""Sampling through the real engine follows the target's joint distribution; a wrong rule fails the same test."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from scipy.stats import chisquare
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from decode import engine
from decode.engine import DraftSettings, SamplingParams, generate
from drafters.base import DraftTree
from drafters.build import build_eagle, build_medusa
from drafters.combine import Merged
from drafters.draft_model import DraftModel
from drafters.lookahead import LookaheadDrafter
from drafters.lookup import LookupDrafter, SuffixDrafter
from drafters.router import Bandit, Router
from drafters.target import wrap_target
from tests.tiny import make_model, make_tokenizer

V, PROMPT, N = 5, [1, 3, 2], 500
SETTINGS = {
    "plain temperature": SamplingParams(temperature=0.8),
    "top-k": SamplingParams(temperature=1.5, top_k=3),
    "top-p": SamplingParams(temperature=1.2, top_p=0.8),
}


@pytest.fixture(scope="module")
def five():
    """A target with a vocabulary of 5."""
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = make_model(vocab_size=V, layers=1, seed=2, head_dim=8, initializer_range=0.25, **shape)
    return wrap_target(model, make_tokenizer(), "five")


@pytest.fixture(scope="module")
def proposers(five):
    torch.manual_seed(3)
    eagle = build_eagle(five, torch.tensor([0, 1, 3, 4]), version=3, taps=(0, 1))
    medusa = build_medusa(five, None, heads=3)
    for head in medusa.heads:
        head[-1].weight.data.normal_(0, 0.3)
    smaller = make_model(vocab_size=V, layers=1, seed=5, hidden_size=16, intermediate_size=16, head_dim=8)
    both = {"eagle": eagle, "medusa": medusa}
    return both | {
        "model": DraftModel(wrap_target(smaller, make_tokenizer(), "smaller"), five),
        "lookup": LookupDrafter(1, 1),
        "suffix": SuffixDrafter([[1, 3, 2, 0, 1], [2, 4, 4, 1, 2, 0]]),
        "lookahead": LookaheadDrafter(2, 2, 2),
        "router": Steady(both, bandit=Bandit(explore=2.0)),
        "merged": Merged(both),
    }


class Steady(Router):
    """A router on a clock that always tells the same."""

    def observe(self, state, outcome):
        super().observe(state, replace(outcome, seconds=0.1))


def expected(target, params):
    """P(t2, t3, t4), the first token summed out, from full forwards and HF's own warpers."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    joint = Counter({(): 1.0})
    with target.attention_backend("eager"), torch.inference_mode():
        for _ in range(4):
            prefixes = list(joint)
            ids = torch.tensor([PROMPT + list(prefix) for prefix in prefixes])
            probs = warpers(ids, target.model(input_ids=ids).logits[:, -1]).softmax(-1).tolist()
            pairs = itertools.product(zip(prefixes, probs, strict=True), range(V))
            joint = Counter({(*prefix, t): joint[prefix] * row[t] for (prefix, row), t in pairs if row[t] > 0})
    out = Counter()
    for tokens, weight in joint.items():
        out[tokens[1:]] += weight
    return out


def p_value(target, drafter, settings, params):
    """Chi-square of `N` outputs against `expected`; cells of fewer than 5 expected are merged."""
    wanted, seen = expected(target, params), Counter()
    accepted = 0
    for seed in range(N):
        sampling = SamplingParams(params.temperature, params.top_k, params.top_p, seed=seed)
        out = generate(
            target, drafter, PROMPT, max_new_tokens=4, settings=settings, sampling=sampling, eos_token_ids=()
        )
        seen[tuple(out.tokens[1:])] += 1
        accepted += sum(r.accepted for r in out.rounds)
    assert set(seen) <= set(wanted), "a token that the processors forbid"
    assert accepted
    large = [cell for cell in wanted if wanted[cell] * N >= 5]
    counts = [seen[c] for c in large] + [N - sum(seen[c] for c in large)]
    shares = [wanted[c] * N for c in large] + [N - sum(wanted[c] for c in large) * N]
    if shares[-1] < 5:
        counts[-2:], shares[-2:] = [sum(counts[-2:])], [sum(shares[-2:])]
    assert len(counts) > 10
    return chisquare(counts, shares).pvalue


SAMPLED, CHAIN = DraftSettings("chain", length=2, sample=True), DraftSettings("chain", length=2)
TREE = DraftSettings("tree", length=2, top_k=2, total=5)


@pytest.mark.parametrize(
    ("name", "settings", "params"),
    [
        ("medusa", SAMPLED, "top-k"),
        ("eagle", SAMPLED, "plain temperature"),
        ("medusa", CHAIN, "top-p"),
        ("eagle", TREE, "top-k"),
        ("model", SAMPLED, "top-p"),
        ("lookup", CHAIN, "plain temperature"),
        ("suffix", TREE, "plain temperature"),
        ("lookahead", TREE, "plain temperature"),
        ("router", SAMPLED, "plain temperature"),
        ("merged", TREE, "top-p"),
    ],
)
def test_sampled_output_follows_the_target(five, proposers, name, settings, params):
    assert p_value(five, proposers[name], settings, SETTINGS[params]) > 0.001


class Liar:
    """Draws from q and reports another."""

    def __init__(self, drafter):
        self.drafter, self.taps, self.begin, self.extend = drafter, drafter.taps, drafter.begin, drafter.extend

    def propose(self, *args):
        tree = self.drafter.propose(*args)
        return DraftTree(tree.tokens, tree.parents, None if tree.q is None else (tree.q**6 / (tree.q**6).sum(-1, True)))


def test_a_wrong_q_fails(five, proposers):
    assert p_value(five, Liar(proposers["medusa"]), SAMPLED, SETTINGS["plain temperature"]) < 0.001


def test_a_greedy_bonus_fails(five, proposers, monkeypatch):
    honest = engine.verify_sampled_chain

    def careless(tokens, q, p, generator):
        count, bonus = honest(tokens, q, p, generator)
        return count, torch.where(count == len(tokens), p[count].argmax(-1), bonus)

    monkeypatch.setattr(engine, "verify_sampled_chain", careless)
    assert p_value(five, proposers["medusa"], SAMPLED, SETTINGS["plain temperature"]) < 0.001


def test_seeds_are_reproducible(target, drafters):
    for name, settings in (("eagle3", DraftSettings(sample=True)), ("medusa", DraftSettings("tree"))):
        first, again, other = (
            generate(
                target,
                drafters[name],
                [4, 5],
                max_new_tokens=12,
                settings=settings,
                sampling=SamplingParams(temperature=1.5, seed=seed),
                eos_token_ids=(),
            ).tokens
            for seed in (7, 7, 8)
        )
        assert first == again != other
