"""Acceptance statistics on scripted steps, where each number can be worked out by hand."""

import numpy as np
import pytest

from decode import stats
from decode.stats import Step


def scripted(*accepted, depth=3):
    return [Step(accepted=a, tokens=a + 1, depth=depth) for a in accepted]


def test_the_bonus_is_counted_in_tau_only():
    steps = scripted(0, 2, 3)
    assert stats.accepted_per_step(steps) == pytest.approx(1.67, abs=0.01)
    assert stats.tau(steps) == pytest.approx(2.67, abs=0.01)


def test_survival_conditional_and_histogram():
    steps = scripted(0, 2, 3, 0)
    assert stats.survival(steps) == pytest.approx([0.5, 0.5, 0.25])
    assert stats.conditional_acceptance(steps) == pytest.approx([0.5, 1.0, 0.5])
    assert stats.rejection_histogram(steps) == {"0": 2, "1": 0, "2": 1, "3": 1}
    assert 1 + sum(stats.survival(steps)) == pytest.approx(stats.tau(steps))


def test_a_short_draft_fails_survival_but_not_conditional_acceptance():
    steps = scripted(1, depth=1) + scripted(2, depth=2)
    assert stats.survival(steps) == pytest.approx([1.0, 0.5])
    assert stats.conditional_acceptance(steps) == [1.0, 1.0]


def row(depth, accepted, tokens):
    return (depth, depth, accepted, tokens, 0.001, 0.002, 0.001, 0.004)


def test_a_step_cut_by_the_end_is_no_rejection():
    full = stats.steps_of([row(4, 4, 5), row(4, 2, 2)], prompt_tokens=10, finish="eos")  # EOS was the 2nd draft token
    assert [s.cut for s in full] == [False, True]
    assert stats.survival(full) == [1.0, 1.0, 1.0, 1.0]
    assert stats.rejection_histogram(full) == {"0": 0, "1": 0, "2": 0, "3": 0, "4": 1}
    assert [s.context for s in full] == [11, 16]


def test_an_engine_that_counts_beyond_the_limit_is_clamped():
    step = stats.steps_of([row(4, 4, 2)], prompt_tokens=1, finish="length")[0]
    assert (step.accepted, step.tokens, step.cut) == (2, 2, True)


def test_a_draft_shortened_for_the_limit_is_cut_but_a_rejection_is_not():
    shortened = stats.steps_of([row(4, 2, 3), row(1, 1, 2)], prompt_tokens=1, finish="length")
    assert [s.cut for s in shortened] == [False, True]
    assert not stats.steps_of([row(4, 4, 5)], prompt_tokens=1, finish="length")[0].cut
    assert not stats.steps_of([row(4, 1, 2)], prompt_tokens=1, finish="length")[0].cut
    assert not stats.steps_of([row(0, 0, 1)], prompt_tokens=1, finish="length")[0].cut


def test_bootstrap_brackets_the_truth():
    rng = np.random.default_rng(1)
    hardness = rng.uniform(1, 10, 40)
    tokens = [100] * 40
    base = hardness * rng.normal(1, 0.05, 40)
    same = hardness * rng.normal(1, 0.05, 40)
    low, high = stats.paired_bootstrap(base, tokens, same, tokens)
    assert low < 1 < high and high - low < 0.1  # pairing cancels the tenfold spread between prompts
    low, high = stats.paired_bootstrap(base, tokens, same / 2, tokens)
    assert 1.8 < low < 2 < high < 2.2
    assert stats.paired_bootstrap(base, tokens, same, tokens) == stats.paired_bootstrap(base, tokens, same, tokens)
    assert stats.paired_bootstrap([1.0], [1], [1.0], [1]) is None


def test_speedup_is_per_token():
    assert stats.speedup([10], [100], [10], [200]) == pytest.approx(2.0)


def test_context_buckets():
    names = [stats.context_bucket(n) for n in (0, 255, 256, 511, 512, 1023, 1024)]
    assert names == ["0-256"] * 2 + ["256-512"] * 2 + ["512-1024"] * 2 + ["1024-2048"]
    table = stats.acceptance_by_context([Step(2, 3, 4, context=10), Step(0, 1, 4, context=300)])
    assert table["0-256"] == {"steps": 1, "accepted_per_step": 2.0, "tau": 3.0}
    assert list(table) == ["0-256", "256-512"]


def test_cost_split_adds_up():
    split = stats.cost_split(stats.steps_of([row(4, 1, 2)] * 3, 1, "eos"))
    assert sum(part["share"] for part in split.values()) == pytest.approx(1)
    assert split["verify"]["ms"] == pytest.approx(2.0)
    assert stats.cost_split([]) is None


def test_no_steps():
    assert stats.survival([]) == [] and stats.tau([]) == 1.0 and stats.rejection_histogram([]) == {}
    assert stats.percentiles([]) == {"p50": None, "p95": None, "p99": None}
