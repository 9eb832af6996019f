"""Draft length per concurrency from measured numbers, against the formula worked by hand."""

import pytest

from decode.rollout import cost_at, draft_costs, plan, rollout, verify_costs

COSTS = {1: 1.0, 2: 1.1, 4: 1.2, 8: 1.6, 16: 3.2}


def test_costs_come_from_a_benchmark_and_are_never_extrapolated():
    assert verify_costs({"v2": 1.1, "v16": 3.2, "step_ms": 70.0, "vendor": 1}) == {2: 1.1, 16: 3.2}
    assert cost_at(COSTS, 4) == 1.2 and cost_at(COSTS, 6) == pytest.approx(1.4) and cost_at(COSTS, 17) is None


def test_draft_costs():
    arm, plain = {"cost_split": {"draft": {"ms": 8.0}}}, {"cost_split": {"verify": {"ms": 80.0}}}
    assert draft_costs("eagle3", arm, plain, 4) == pytest.approx([0.025, 0.05, 0.075, 0.1])
    assert draft_costs("medusa", arm, plain, 2) == pytest.approx([0.1, 0.1])  # its heads run side by side


def test_the_best_length_at_each_concurrency():
    rows = plan([0.6, 0.3, 0.1], COSTS, [0.05, 0.1, 0.15], (1, 2, 8, 16))
    one, two, eight, sixteen = rows
    # alone: k=1: 1.6 / 1.15; k=2: 1.9 / (1.15 + .1) = 1.52; k=3: 2.0 / (1.2 + .15) = 1.48
    assert (
        one["length"] == 2 and one["speedup"] == pytest.approx(1.9 / 1.25) and one["break_even"] == pytest.approx(1.25)
    )
    # two: k=1: 1.6 / (1.2 / 1.1 + .05) = 1.40; k=2: 1.9 / (1.4 / 1.1 + .1) = 1.38
    assert two["length"] == 1 and two["speedup"] == pytest.approx(1.6 / (1.2 / 1.1 + 0.05))
    # eight: k=1 reads 16 rows at twice the cost of 8: 1.6 / 2.05 loses
    assert eight["length"] == 0 and eight["tried"] == 1 and eight["speedup"] < 1
    assert sixteen == {"concurrency": 16, "length": None}  # 32 rows were not measured
    profile = rollout(rows, {"0-256": {}})
    assert profile["max_concurrency"] == 2 and profile["length"] == 1 and profile["contexts"] == ["0-256"]
    assert profile["switch_off_tau"] == pytest.approx(1.2 / 1.1 + 0.05) and profile["stages"][-1] == 1.0


def test_a_drafter_that_does_not_pay_is_not_rolled_out():
    assert rollout(plan([0.05], COSTS, [0.2]), {})["max_concurrency"] is None
    assert rollout([], {})["stages"] == [0.0]
