"""The evaluation end to end on a tiny random target: a scripted engine where numbers are checked, the real one once."""

import contextlib
import itertools
import json
from dataclasses import dataclass, field

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decode import arms, caveats, engine, exactness
from decode.arms import Arm, Run
from decode.evaluate import _interleaved, evaluate, identity
from decode.prompts import Prompt
from decode.report import render_html
from decode.sampling import SamplingParams
from drafters.base import DraftSettings
from drafters.build import build_eagle, build_medusa
from drafters.errors import UserError
from drafters.router import Router
from drafters.target import wrap_target
from tests.tiny import make_tokenizer

ARM_KEYS = {
    "name", "reference", "tokens_per_second", "speedup", "speedup_ci95", "speedup_median", "tau", "tau_macro",
    "accepted_per_step", "survival", "conditional_acceptance", "rejection_histogram", "target_forwards_per_token",
    "ttft_ms", "tpot_ms", "cost_split", "peak_memory_mb", "exact_match", "by_category", "by_context", "decisions",
}  # fmt: skip
NEW = 8


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    return wrap_target(LlamaForCausalLM(config), make_tokenizer(), "tiny")


@pytest.fixture
def prompts():
    texts = [("a", "hello there"), ("b", "def add(left, right)"), ("b", "one two three")]
    return [Prompt(f"p{i}", c, [{"role": "user", "content": t}]) for i, (c, t) in enumerate(texts)]


@dataclass
class Scripted:
    """A drafter for the scripted engine: takes `step_s` a step and has `accepts` drafts accepted in turn."""

    step_s: float
    accepts: tuple[int, ...] = (0, 2, 3)
    wrong: bool = False
    meta: dict = field(default_factory=dict)


@dataclass
class FakeRound:
    drafted: int
    depth: int
    accepted: int
    tokens: int
    draft_s: float
    verify_s: float
    other_s: float
    total_s: float


@dataclass
class FakeGeneration:
    tokens: list
    rounds: list
    prompt_tokens: int
    ttft_s: float
    decode_s: float
    finish: str = "length"


@pytest.fixture
def scripted_engine(monkeypatch, target):
    """Replaces the engine: plain takes 10 ms a token, true greedy tokens, no real drafting. Returns the call log."""
    calls = []

    def generate(target_, drafter, ids, *, max_new_tokens, settings, sampling, profile):
        calls.append((drafter, list(ids), max_new_tokens, sampling.seed))
        tokens = greedy(target_, ids, max_new_tokens)
        if drafter is not None and drafter.wrong:
            tokens[3] = (tokens[3] + 1) % target_.vocab_size
        step = 0.010 if drafter is None else drafter.step_s
        cycle = itertools.cycle((0,) if drafter is None else drafter.accepts)
        depth = 0 if drafter is None else 3
        rounds, left = [], max_new_tokens - 1
        while left:
            accepted = min(next(cycle), left)
            emitted = min(accepted + 1, left)
            rounds.append(FakeRound(depth, depth, accepted, emitted, step / 4, step / 2, step / 4, step))
            left -= emitted
        return FakeGeneration(tokens, rounds, len(ids), 0.02, step * len(rounds))

    monkeypatch.setattr(engine, "generate", generate)
    return calls


def greedy(target, ids, count):
    ids = list(ids)
    start = len(ids)
    for _ in range(count):
        ids.append(int(exactness.teacher_forced_logits(target, ids, 1).argmax()))
    return ids[start:]


def run(target, drafters, prompts, **options):
    options = {"max_new_tokens": NEW, "progress": False, "hf_generate": False} | options
    return evaluate(target, drafters, prompts, **options)


def arm(report, name):
    return next(a for a in report["arms"] if a["name"] == name)


def test_numbers_of_a_scripted_run(target, prompts, scripted_engine):
    report = run(target, {"fast": Scripted(0.010)}, prompts)
    assert [a["name"] for a in report["arms"]] == ["plain", "fast"]
    assert all(set(a) == ARM_KEYS for a in report["arms"])
    plain, fast = report["arms"]
    # 8 tokens: one from prefill (20 ms); plain then 7 steps, the drafter 3 (1 + 3 + 3 of 4 tokens), 10 ms each
    assert plain["tokens_per_second"] == pytest.approx(8 / 0.09)
    assert fast["speedup"] == pytest.approx(0.09 / 0.05) and fast["speedup_median"] == pytest.approx(1.8)
    assert fast["speedup_ci95"] == pytest.approx([1.8, 1.8])
    assert plain["speedup"] == pytest.approx(1) and plain["tau"] == 1
    assert fast["tau"] == pytest.approx(7 / 3) and fast["tau_macro"] == pytest.approx(7 / 3)
    assert fast["accepted_per_step"] == pytest.approx(5 / 3)
    assert fast["target_forwards_per_token"] == pytest.approx(4 / 8)
    assert fast["survival"] == pytest.approx([2 / 3, 2 / 3, 1 / 3])  # the last step was cut after its third draft
    assert fast["rejection_histogram"] == {"0": 6, "1": 0, "2": 6}
    assert fast["cost_split"]["verify"] == {"share": pytest.approx(0.5), "ms": pytest.approx(5.0)}
    assert fast["by_category"]["b"]["prompts"] == 2
    assert fast["exact_match"]["verdict"] == "exact" and fast["exact_match"]["rate"] == 1
    assert fast["tpot_ms"]["p50"] == pytest.approx(30 / 7)
    assert report["prompts"] == {"name": "prompts", "count": 3}
    assert {"python", "torch", "transformers", "headstart", "cpu", "threads", "load_before", "load_after"} <= set(
        report["environment"]
    )
    json.dumps(report, allow_nan=False)


def test_arms_interleave_there_and_back(target, prompts, scripted_engine):
    a, b = Scripted(0.01), Scripted(0.02)
    run(target, {"a": a, "b": b}, prompts[:1], warmup=0)
    assert [call[0] for call in scripted_engine] == [None, a, b, b, a, None]
    assert [call[3] for call in scripted_engine] == [0, 0, 0, 1, 1, 1]
    assert len({tuple(call[1]) for call in scripted_engine}) == 1


def test_with_one_run_every_second_prompt_goes_through_the_arms_backwards(target, prompts, scripted_engine):
    a, b = Scripted(0.01), Scripted(0.02)
    run(target, {"a": a, "b": b}, prompts[:3], warmup=0, runs=1)
    assert [call[0] for call in scripted_engine] == [None, a, b, b, a, None, None, a, b]


def test_hf_generate_stands_in_the_middle_of_each_way_there_and_back():
    arms = [Arm("plain"), Arm("a"), Arm("hf_generate")]
    order = [(arm.name, index) for arm, index in _interleaved(arms, 3)]
    assert order[:5] == [("plain", 0), ("a", 0), ("hf_generate", 0), ("a", 1), ("plain", 1)]
    assert order[5:] == [("plain", 2), ("a", 2), ("hf_generate", 2)]


def test_an_interrupted_evaluation_resumes(target, prompts, scripted_engine, tmp_path, monkeypatch):
    raw = tmp_path / "out" / "raw.jsonl"
    original = engine.generate

    def stop_at_third(target_, drafter, ids, **options):
        if list(ids) == target.render(prompts[2].messages, True):
            raise KeyboardInterrupt
        return original(target_, drafter, ids, **options)

    monkeypatch.setattr(engine, "generate", stop_at_third)
    with pytest.raises(KeyboardInterrupt):
        run(target, {"fast": Scripted(0.01)}, prompts, raw_path=raw, warmup=0)
    with raw.open("a") as file:
        file.write('{"id": "p2", "cat')  # killed while writing
    monkeypatch.setattr(engine, "generate", original)
    scripted_engine.clear()
    resumed = run(target, {"fast": Scripted(0.01)}, prompts, raw_path=raw, warmup=0)
    assert {tuple(c[1]) for c in scripted_engine} == {tuple(target.render(prompts[2].messages, True))}
    scripted_engine.clear()
    again = run(target, {"fast": Scripted(0.01)}, prompts, raw_path=raw, warmup=0)
    assert not scripted_engine and again["arms"] == resumed["arms"] and again["outputs"] == resumed["outputs"]
    old = raw.read_bytes()
    run(target, {"fast": Scripted(0.01)}, prompts, raw_path=raw, warmup=0, max_new_tokens=NEW - 1)
    assert len(scripted_engine) == 3 * 2 * 2  # other settings: everything anew
    assert [path.read_bytes() for path in raw.parent.glob("raw-*.jsonl")] == [old]  # and the old ones kept
    raw.write_text(raw.read_text() + "{damaged\n")
    with pytest.raises(UserError, match="raw.jsonl: a damaged line"):
        run(target, {"fast": Scripted(0.01)}, prompts, raw_path=raw, warmup=0, max_new_tokens=NEW - 1)


def test_slow_drafter_and_wrong_estimate_are_reported(target, prompts, scripted_engine):
    meta = {
        "results": {"tau_estimate": 5.0},
        "target": {"name": "elsewhere"},
        "warnings": ["made for 'elsewhere', whose weights differ"],
        "data": {"samples": 120, "tokens": 200_000},
    }
    report = run(target, {"slow": Scripted(0.050, meta=meta)}, prompts)
    text = "\n".join(report["warnings"])
    assert "slow is SLOWER than plain decoding" in text
    assert "5.00 estimated in training; likely causes" in text
    assert "slow: made for 'elsewhere', whose weights differ" in text
    assert "only 3 prompts" in text
    assert report["drafters"]["slow"]["training_samples"] == 120
    assert report["drafters"]["slow"]["expected_tau"].startswith("1.2")


def test_wrong_output_fails(target, prompts, scripted_engine):
    report = run(target, {"wrong": Scripted(0.005, wrong=True)}, prompts)
    match = arm(report, "wrong")["exact_match"]
    assert (match["rate"], match["verdict"]) == (0, "FAIL")
    assert match["first_divergence"][0]["index"] == 3 and match["logit_gap"] > 1e-3
    assert "wrong is NOT lossless" in report["warnings"][0]


def test_near_tie_and_broken_stop_rule(target):
    ids = [5, 6, 7]
    plain = greedy(target, ids, 4)
    runs = [Run(t, [], 3, 0.1, 0.1, "length", 1.0) for t in (plain, [*plain[:2], plain[2] + 1, plain[3]], plain[:2])]
    gap = exactness.logit_gap(target, ids, runs[1].tokens, 2, SamplingParams())
    for epsilon, verdict in ((gap + 1e-6, "near-tie"), (gap / 2, "FAIL")):
        result = exactness.compare(target, SamplingParams(), [("p", ids, runs[0], runs[1])], epsilon)
        assert result["verdict"] == verdict and result["logit_gap"] == pytest.approx(gap)
    result = exactness.compare(target, SamplingParams(), [("p", ids, runs[0], runs[2])], 1e9)
    assert result["verdict"] == "FAIL" and result["first_divergence"][0]["index"] == 2


def test_epsilon_is_measured_below_fp32(target):
    torch.manual_seed(0)
    low = wrap_target(LlamaForCausalLM(target.model.config).to(torch.bfloat16), make_tokenizer(), "tiny-bf16")
    ids = [5, 6, 7]
    epsilon = exactness.calibrate_epsilon(low, [(ids, greedy(low, ids, 6))])
    assert 1e-3 <= epsilon < 0.1
    assert exactness.calibrate_epsilon(target, []) == exactness.FP32_EPSILON


def test_hf_generate_is_the_same_greedy_decoding(target, prompts):
    ids = target.render(prompts[0].messages, True)
    before = target.model.generation_config
    result = arms.Arm(arms.HF).run(target, ids, SamplingParams(), NEW)
    assert result.tokens == greedy(target, ids, NEW)[: len(result.tokens)]
    assert result.ttft_s > 0 and result.decode_s > 0 and result.peak_memory_mb > 0
    assert target.model.generation_config is before
    assert target.model.config._attn_implementation == target.attention
    sampled = [
        arms.Arm(arms.HF).run(target, ids, SamplingParams(temperature=1.0, top_p=0.9, seed=s), NEW).tokens
        for s in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]


def test_sampling_reports_no_exactness(target, prompts, scripted_engine):
    report = run(target, {"fast": Scripted(0.01)}, prompts, sampling=SamplingParams(temperature=1.0))
    assert all(a["exact_match"] is None for a in report["arms"])


class Louder:
    """An adapter: the target's head on hidden states whose signs are turned in half of the columns."""

    def __init__(self, target):
        self.weight = target.decoder.norm.weight

    @contextlib.contextmanager
    def on(self):
        flip = torch.ones_like(self.weight.data)
        flip[::2] = -1
        self.weight.data.mul_(flip)
        try:
            yield
        finally:
            self.weight.data.mul_(flip)


def test_an_adapted_target_is_compared_with_itself(target, prompts):
    own, other = build_medusa(target, None, heads=2), build_medusa(target, None, heads=2)
    own.adapter = Louder(target)
    ids = target.render(prompts[0].messages, True)
    before = greedy(target, ids, NEW)
    with own.adapter.on():
        after = greedy(target, ids, NEW)
        there = exactness.teacher_forced_logits(target, [*ids, *before[:-1]], NEW).log_softmax(-1)
    here = exactness.teacher_forced_logits(target, [*ids, *before[:-1]], NEW).log_softmax(-1)
    assert after != before
    settings = {"own": DraftSettings(length=2), "other": DraftSettings(length=2)}
    report = run(target, {"own": own, "other": other}, prompts[:1], settings=settings, hf_generate=True)
    by_name = {a["name"]: a for a in report["arms"]}
    assert list(by_name) == ["plain", "plain+own", "own", "other", "hf_generate"]
    assert {a["exact_match"]["verdict"] for a in report["arms"]} == {"exact"}
    assert [by_name[n]["reference"] for n in ("own", "other", "plain+own")] == ["plain+own", "plain", "plain+own"]
    assert by_name["plain+own"]["speedup"] == pytest.approx(1.0)
    texts = {name: "".join(t for t, _ in pieces) for name, pieces in report["outputs"][0]["arms"].items()}
    assert texts["own"] == texts["plain+own"] != texts["plain"] == texts["other"] == texts["hf_generate"]
    assert report["drafters"]["other"]["target_kl"] is None
    moved = float((here.exp() * (here - there)).sum(-1).mean())
    assert report["drafters"]["own"]["target_kl"] == pytest.approx(moved, rel=1e-3) and moved > 0.01
    (warning,) = [w for w in report["warnings"] if "CHANGES THE TARGET" in w]
    assert warning.startswith("own ") and "plain+own" in warning
    page = render_html(report, report["outputs"])
    assert "CHANGES THE TARGET" in page and "plain+own" in page
    json.dumps({k: v for k, v in report.items() if k != "outputs"}, allow_nan=False)


def test_mistakes(target, prompts):
    with pytest.raises(UserError, match="no prompt"):
        run(target, {}, [])
    with pytest.raises(UserError, match="runs=0"):
        run(target, {}, prompts, runs=0)
    with pytest.raises(UserError, match="named 'plain'"):
        run(target, {"plain": None}, prompts)
    with pytest.raises(UserError, match=r"named 'plain\+x'"):
        run(target, {"plain+x": None}, prompts)
    with pytest.raises(UserError, match="256 positions"):
        run(target, {}, prompts, max_new_tokens=250)


def test_default_settings_come_from_the_drafter(target, prompts, scripted_engine):
    drafter = Scripted(0.01)
    drafter.default_settings = DraftSettings(kind="chain", length=2)
    report = run(target, {"own": drafter, "other": Scripted(0.02)}, prompts[:1])
    assert report["settings"]["draft"]["own"]["length"] == 2
    report = run(target, {"own": drafter}, prompts[:1], settings=DraftSettings(length=7))
    assert report["settings"]["draft"]["own"]["length"] == 7


def test_expected_tau():
    assert caveats.expected_tau(None) is None
    assert caveats.expected_tau(5_000_000) is None, "nothing was measured there"
    assert caveats.expected_tau(10**9).startswith("3.5 to 6.7")


def test_outputs_mark_what_was_drafted(target, prompts, scripted_engine):
    report = run(target, {"fast": Scripted(0.01)}, prompts[:1])
    pieces = report["outputs"][0]["arms"]
    assert "".join(t for t, _ in pieces["fast"]) == "".join(t for t, _ in pieces["plain"])
    assert any(drafted for _, drafted in pieces["fast"]) and not any(drafted for _, drafted in pieces["plain"])


def test_the_real_engine_and_drafter(target, prompts):
    drafters = {"chain": build_eagle(target, None), "tree": build_eagle(target, None)}
    settings = {"chain": DraftSettings(length=3), "tree": DraftSettings(kind="tree", length=3, top_k=2, total=6)}
    report = run(target, drafters, prompts, settings=settings, hf_generate=True, max_new_tokens=20)
    assert [a["name"] for a in report["arms"]] == ["plain", "chain", "tree", "hf_generate"]
    assert {a["exact_match"]["verdict"] for a in report["arms"]} == {"exact"}
    plain, chain, tree, hf = report["arms"]
    assert plain["speedup"] == pytest.approx(1.0) and hf["speedup"] > 0
    assert plain["target_forwards_per_token"] == pytest.approx(1.0) and plain["survival"] == []
    for a in (chain, tree):
        assert a["tau"] == pytest.approx(1 + a["accepted_per_step"], abs=0.35)  # apart by the steps that were cut
        assert len(a["survival"]) <= 3 and all(0 <= s <= 1 for s in a["survival"])
        assert sum(part["share"] for part in a["cost_split"].values()) == pytest.approx(1)
    assert all("".join(t for t, _ in o["arms"]["plain"]) for o in report["outputs"])
    json.dumps(report, allow_nan=False)


def test_a_router_s_choices_are_reported_and_its_parts_are_its_identity(target, prompts):
    parts = {"a": build_eagle(target, None), "b": build_eagle(target, None, version=1)}
    router = Router(parts)
    before = identity(router)
    report = run(target, {"router": router}, prompts, settings=DraftSettings(length=3), max_new_tokens=12)
    assert report["arms"][1]["exact_match"]["verdict"] == "exact"
    assert set(report["drafters"]["router"]["choices"]) == {"a", "b", "off"}
    assert identity(router) == before  # what it measured does not make it another
    with torch.no_grad():
        next(parts["a"].parameters()).add_(1)
    assert identity(router) != before
