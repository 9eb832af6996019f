"""The benchmark of adaptation and of transformers' own speculation, on a tiny target: the right arms, the same text."""

import pytest
import torch

from decode.adapt import Adaptive
from decode.arms import Arm, Run
from decode.cost import OFF, Candidate, Curve
from decode.prompts import load_prompts
from decode.sampling import SamplingParams
from drafters.base import DraftSettings
from drafters.draft_model import DraftModel
from drafters.lookup import LookupDrafter
from scripts import bench_arms
from scripts.bench_arms import Adversary, HfArm, adaptation, beside_hf, measure, truncated


@pytest.fixture
def clock(monkeypatch):
    """Sets what each arm takes for 4 tokens, in seconds by (arm, category) or arm, else 1; returns the table."""
    seconds = {}

    def measure(target, arms, prompts, tokens, turns):
        def run(arm, category):
            took = seconds.get((arm, category), seconds.get(arm, 1.0))
            return Run([1, 2, 3, 4], [[2, 2, 1, 2, 0, 0, 0, took / 2]] * 2, 5, took / 2, took / 2, "length", 0.0)

        return [
            {"id": p.id, "category": p.category, "arms": {arm.name: [run(arm.name, p.category)] for arm in arms}}
            for p in prompts
        ]

    monkeypatch.setattr(bench_arms, "measure", measure)
    return seconds


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """One pass over the arms, and policies that need no profile."""
    settings = [DraftSettings("chain", 1), OFF, DraftSettings("chain", 2), DraftSettings("tree", 2, 3, 4)]
    curve = Curve({1: 10.0, 5: 12.0})
    known = [Candidate(s, (0.5,) * s.length, curve(s.nodes + 1), 0.5, 0.1, curve) for s in settings]
    monkeypatch.setattr(bench_arms, "TURNS", 1)
    monkeypatch.setattr(bench_arms, "build_policy", lambda *_: Adaptive(known))


def test_a_cut_target_computes_what_the_first_blocks_do(target):
    ids = torch.arange(9)[None]
    whole, cut = truncated(target, target.num_layers), truncated(target, 2)
    assert torch.equal(whole.head(whole.forward(ids, ids).final), target.head(target.forward(ids, ids).final))
    assert cut.num_layers == 2
    hidden = target.forward(ids, ids, taps=(2,)).taps
    torch.testing.assert_close(cut.forward(ids, ids).final, target.decoder.norm(hidden))


def test_every_arm_writes_what_the_target_writes(target, drafters):
    draft = truncated(target, 2)
    equal = {"num_assistant_tokens": 3, "assistant_confidence_threshold": 0.0}
    arms = [
        Arm("plain"),
        Arm("lookup", LookupDrafter()),
        Arm("model", DraftModel(draft, target)),
        Arm("wrong", Adversary(drafters["eagle3"], target.vocab_size)),
        HfArm("hf_lookup", options={"prompt_lookup_num_tokens": 4}),
        HfArm("hf_model", assistant=draft),
        HfArm("hf_equal", assistant=draft, assistant_options=equal),
    ]
    for record in measure(target, arms, load_prompts("headstart", limit=2), tokens=12, turns=1):
        texts = {name: runs[0].tokens for name, runs in record["arms"].items()}
        assert all(tokens == texts["plain"] for tokens in texts.values()), texts


def test_transformers_drafts_with_the_model_and_as_many_tokens_as_asked(target, monkeypatch):
    draft, ids = truncated(target, target.num_layers), list(range(20, 40))  # always right
    steps = []
    head = target.model.lm_head.forward
    monkeypatch.setattr(target.model.lm_head, "forward", lambda x: steps.append(x.shape[1]) or head(x))
    equal = {"num_assistant_tokens": 3, "assistant_confidence_threshold": 0.0}
    HfArm("hf", assistant=draft, assistant_options=equal).run(target, ids, SamplingParams(), 12)
    assert len(steps) == 3 and set(steps) == {4}, steps  # 3 rounds of 3 drafts and the target's own token


def test_minima_are_over_categories_and_the_adversary_counts(clock, target, drafters):
    prompts = load_prompts("headstart", per_category=1)
    clock |= {"plain": 2.0, "chain2": 1.5, ("chain1", "code"): 0.9, ("adaptive", "math"): 1.6, "tree4x2": 1.25}
    found = adaptation(target, drafters["eagle3"], prompts)
    assert found["adaptive_vs_plain_chat"] == 2 and found["adaptive_vs_plain_min"] == 2 / 1.6
    assert found["adaptive_vs_best_fixed_code"] == pytest.approx(0.9)
    assert found["adaptive_vs_best_fixed_math"] == found["adaptive_vs_best_fixed_min"] == 1 / 1.6
    clock["adversarial", "code"] = 2.5
    found = adaptation(target, drafters["eagle3"], prompts)
    assert found["adversarial_vs_plain_code"] == found["adaptive_vs_plain_min"] == 0.8


def test_above_one_transformers_is_the_slower(clock, target):
    clock |= {"hf_lookup": 3.0, "lookup_fixed": 2.0, "hf_assisted": 5.0, "hf_assisted_fixed": 4.0}
    found = beside_hf(target, truncated(target, 2), load_prompts("headstart", per_category=1))
    assert found == {
        "vs_hf_lookup": 3.0, "vs_hf_lookup_fixed": 1.5, "vs_hf_assisted": 5.0, "vs_hf_assisted_fixed": 4.0,
    }  # fmt: skip


def test_all_of_it_runs(target, drafters, monkeypatch):
    monkeypatch.setattr(bench_arms, "load_prompts", lambda *_, **__: load_prompts("headstart", limit=1))
    found = bench_arms.arms(target, drafters["eagle3"], tokens=4, hf_tokens=4)
    assert found.keys() >= {"adaptive_vs_best_fixed_min", "adaptive_vs_plain_min", "vs_hf_lookup", "vs_hf_assisted"}
    assert all(value > 0 for name, value in found.items() if "_vs_" in name)
    assert found["adversarial_accepted_per_step"] == 0
