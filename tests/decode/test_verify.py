"""Both verification rules are exact, by enumeration over every draw and coin; the rules known to be wrong are not.

Probabilities are twentieths and draft numerators divide 20, so that every acceptance threshold p / q is a twentieth too
and 20 equal coins integrate a coin without error.
"""

import itertools
from collections import defaultdict
from fractions import Fraction as F

import pytest
import torch

from decode import verify
from decode.tree import walk

V, COINS = 5, 20
P = [6, 5, 4, 3, 2]  # twentieths
Q = [10, 5, 2, 2, 1]


def p_after(context):
    """The target's distribution after these tokens: another one for every context, one entry zero in some."""
    turn = (sum(context) * 2 + len(context)) % V
    p = P[turn:] + P[:turn]
    if context and context[-1] == 2:
        p = [p[0] + p[1], 0, *p[2:]]
    return [F(x, 20) for x in p]


def q_after(context):
    turn = (sum(context) + 3 * len(context)) % V
    return [F(x, 20) for x in Q[turn:] + Q[:turn]]


def one_hot(token):
    return [F(int(i == token)) for i in range(V)]


def normalized(weights):
    total = sum(weights)
    return [w / total for w in weights] if total else None


def residual(p, q):
    return normalized([max(F(0), a - b) for a, b in zip(p, q, strict=True)])


def joint(n):
    """The target's own joint distribution of n tokens."""
    out = {}
    for tokens in itertools.product(range(V), repeat=n):
        out[tokens] = F(1)
        for i, token in enumerate(tokens):
            out[tokens] *= p_after(tokens[:i])[token]
    return out


def distance(found, n):
    """Total variation between what a rule emits, completed to n tokens by the target, and the target's joint."""
    completed = defaultdict(float)
    for tokens, weight in found.items():
        for rest in itertools.product(range(V), repeat=n - len(tokens)):
            w = float(weight)
            for i, token in enumerate(rest):
                w *= float(p_after(tokens + rest[:i])[token])
            completed[tokens + rest] += w
    return sum(abs(completed[tokens] - float(weight)) for tokens, weight in joint(n).items()) / 2


# ---- sampled chains, through the function itself


def chain_output(monkeypatch, drafts, rule=verify.verify_sampled_chain, claimed=None, steps=COINS):
    """What `rule` emits over all drafts {tokens: probability}, every coin and every bonus draw."""
    claimed = claimed or (lambda tokens: [q_after(tokens[:i]) for i in range(len(tokens))])
    bonus_probs, coins = [], []

    def capture(probs, generator):
        bonus_probs.append(probs)
        return torch.zeros(1, dtype=torch.long)

    monkeypatch.setattr(verify, "draw", capture)
    monkeypatch.setattr(torch, "rand", lambda n, **_: torch.tensor(coins, dtype=torch.float64))
    found = defaultdict(float)
    for tokens, weight in drafts.items():
        n = len(tokens)
        q = torch.tensor([[float(x) for x in row] for row in claimed(tokens)], dtype=torch.float64)
        p = torch.tensor([[float(x) for x in p_after(tokens[:i])] for i in range(n + 1)], dtype=torch.float64)
        for tossed in itertools.product(range(steps), repeat=n):
            coins[:] = [(toss + 0.5) / steps for toss in tossed]
            count, _ = rule(torch.tensor(tokens), q, p, torch.Generator())
            bonus = bonus_probs.pop()[0]
            for token, share in enumerate((bonus / bonus.sum()).tolist()):
                found[(*tokens[: int(count)], token)] += float(weight) * share / steps**n
    return found


def sampled_drafts(n, q=q_after):
    out = {}
    for tokens in itertools.product(range(V), repeat=n):
        weight = F(1)
        for i, token in enumerate(tokens):
            weight *= q(tokens[:i])[token]
        if weight:
            out[tokens] = weight
    return out


def top_two(context):
    q = q_after(context)
    keep = sorted(range(V), key=lambda i: -q[i])[:2]
    return normalized([q[i] if i in keep else F(0) for i in range(V)])


def zero_only(tokens, q, p, generator):
    """Wrong rule F: after a rejection only the rejected token is removed."""
    n = len(tokens)
    accept = torch.rand(n) * q.gather(1, tokens[:, None])[:, 0] < p[:n].gather(1, tokens[:, None])[:, 0]
    count = accept.long().cumprod(0).sum(0, keepdim=True)
    left = p[count].clone()
    if count < n:
        left[0, tokens[count]] = 0
    return count, verify.draw(left, generator)


def bonus_from_p(tokens, q, p, generator):
    """Wrong: the bonus ignores that a rejection happened."""
    count, _ = verify.verify_sampled_chain(tokens, q, p, generator)
    return count, verify.draw(p[count], generator)


@pytest.mark.parametrize("n", [1, 2])
def test_sampled_chains_are_exact(monkeypatch, n):
    assert distance(chain_output(monkeypatch, sampled_drafts(n)), n + 1) < 1e-12


def test_an_argmax_chain_is_exact_as_one_hot(monkeypatch):
    best = max(range(V), key=lambda i: q_after(())[i])
    found = chain_output(monkeypatch, {(best,): F(1)}, claimed=lambda tokens: [one_hot(t) for t in tokens])
    assert distance(found, 2) < 1e-12


def test_top_two_sampling_is_exact_with_its_true_q(monkeypatch):
    drafts = sampled_drafts(1, top_two)  # q is 2/3 and 1/3: thresholds are fortieths
    found = chain_output(monkeypatch, drafts, claimed=lambda tokens: [top_two(())], steps=40)
    assert distance(found, 2) < 1e-12


BEST = max(range(V), key=lambda i: q_after(())[i])
WRONG_CHAINS = {
    "E1 argmax tested with softmax q": ({(BEST,): F(1)}, verify.verify_sampled_chain),
    "bonus from p after a rejection": (sampled_drafts(1), bonus_from_p),
    "F zero-only residual": (sampled_drafts(1), zero_only),
    "G top-2 sampled, tested with raw q": (sampled_drafts(1, top_two), verify.verify_sampled_chain),
    "I best of two draws, tested with q": (None, verify.verify_sampled_chain),
}


@pytest.mark.parametrize("name", WRONG_CHAINS)
def test_wrong_chain_rules_fail(monkeypatch, name):
    drafts, rule = WRONG_CHAINS[name]
    if drafts is None:
        drafts = defaultdict(F)
        for weight, (a, b) in without_replacement(q_after(()), 2):
            drafts[(max(a, b, key=lambda i: q_after(())[i]),)] += weight
    assert distance(chain_output(monkeypatch, drafts, rule, lambda tokens: [q_after(())]), 2) > 0.01


def test_a_token_of_probability_zero_is_never_accepted(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda n, **_: torch.zeros(n))  # the coin that is <= 0
    p = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    count, bonus = verify.verify_sampled_chain(torch.tensor([0]), torch.tensor([[0.9, 0.1]]), p, torch.Generator())
    assert (count.item(), bonus.item()) == (0, 1)


def test_a_residual_lost_to_rounding_falls_back_to_p(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda n, **_: torch.ones(n))  # never happens; forces a rejection at p == q
    p = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    count, bonus = verify.verify_sampled_chain(torch.tensor([1]), p[:1], p, torch.Generator().manual_seed(0))
    assert count.item() == 0 and bonus.item() in (0, 1)


# ---- one-hot trees, through `walk`


def tree_output(trees):
    """What `walk` emits when each slot's choice is drawn from the target, over {(tokens, parents): probability}."""
    found = defaultdict(F)
    for (tokens, parents), weight in trees.items():
        contexts = [()]
        for token, parent in zip(tokens, parents, strict=True):
            contexts.append((*contexts[parent + 1], token))
        for choices in itertools.product(range(V), repeat=len(tokens) + 1):
            share = weight
            for context, choice in zip(contexts, choices, strict=True):
                share *= p_after(context)[choice]
            if share:
                path, bonus = walk(list(choices), list(tokens), list(parents))
                found[(*(tokens[i] for i in path), bonus)] += share
    return found


def without_replacement(q, k):
    for tokens in itertools.permutations(range(V), k):
        weight = F(1)
        for j, token in enumerate(tokens):
            weight *= dropped(q, tokens[:j])[token]
        if weight:
            yield weight, tokens


def dropped(q, tokens):
    return normalized([F(0) if i in tokens else x for i, x in enumerate(q)])


TREES = {
    "chain of 3": {((1, 0, 4), (-1, 0, 1)): F(1)},
    "A top-2 siblings": {((0, 1), (-1, -1)): F(1)},
    "top-2 at two levels": {((0, 1, 3, 2), (-1, -1, 0, 0)): F(1)},
    "children under both siblings": {((4, 2, 0, 1), (-1, -1, 0, 1)): F(1)},
    "B2 sampled without replacement": {(t, (-1, -1)): w for w, t in without_replacement(q_after(()), 2)},
    "J2 one sampled token": {((t,), (-1,)): w for t, w in enumerate(q_after(()))},
}


@pytest.mark.parametrize("name", TREES)
def test_trees_as_one_hot_are_exact(name):
    assert distance(tree_output(TREES[name]), 4) < 1e-12  # no path is longer than 3 and a bonus


# ---- several siblings tested with q: no rule of ours, and here is why


def sibling_output(draws):
    """One node, siblings tested in turn with min(1, p / q) and residual relu(p - q); draws: (probability, [(x, q)])."""
    found = defaultdict(F)
    for weight, siblings in draws:
        p, live = p_after(()), weight
        for token, q in siblings:
            accept = min(F(1), p[token] / q[token])
            found[(token,)] += live * accept
            live *= 1 - accept
            p = residual(p, q) if live else p
            if p is None:
                break
        for token in range(V) if live and p is not None else ():
            found[(token,)] += live * p[token]
    return found


q0 = q_after(())
top = sorted(range(V), key=lambda i: -q0[i])[:2]
SIBLINGS = {
    "A fixed top-2 as one-hot": [(F(1), [(x, one_hot(x)) for x in top])],
    "B without replacement, q renormalized": [
        (w, [(x, dropped(q0, s[:j])) for j, x in enumerate(s)]) for w, s in without_replacement(q0, 2)
    ],
    "C with replacement": [(q0[a] * q0[b], [(a, q0), (b, q0)]) for a in range(V) for b in range(V)],
}
WRONG_SIBLINGS = {
    "C2 with replacement, duplicates skipped": [
        (q0[a] * q0[b], [(a, q0)] + ([(b, q0)] if a != b else [])) for a in range(V) for b in range(V)
    ],
    "D without replacement, q not renormalized": [(w, [(x, q0) for x in s]) for w, s in without_replacement(q0, 2)],
    "E top-2 tested with softmax q": [(F(1), [(x, q0) for x in top])],
    "H without replacement, sorted by q": [
        (w, [(x, dropped(q0, t[:j])) for j, x in enumerate(t)])
        for w, s in without_replacement(q0, 2)
        for t in [tuple(sorted(s, key=lambda i: -q0[i]))]
    ],
}


@pytest.mark.parametrize("name", SIBLINGS)
def test_exact_sibling_rules(name):
    assert distance(sibling_output(SIBLINGS[name]), 1) < 1e-12


@pytest.mark.parametrize("name", WRONG_SIBLINGS)
def test_wrong_sibling_rules_fail(name):
    assert distance(sibling_output(WRONG_SIBLINGS[name]), 1) > 0.001
