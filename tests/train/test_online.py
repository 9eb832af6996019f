"""Training between requests: faster on what comes again, taken back where it hurts, never another text."""

import copy
import random

import pytest
import torch

from decode.engine import DraftSettings, SamplingParams, generate
from drafters.build import build_eagle, build_medusa, pack_drafter
from drafters.record import Recorder
from drafters.router import Router
from tests.scripted import Scripted
from train.online import Online
from train.recipe import recipe_from_dict

CHAIN = DraftSettings("chain", 3)


@pytest.fixture(scope="module")
def cases(target):
    rng = random.Random(8)
    prompts = [[rng.randrange(target.vocab_size) for _ in range(8)] for _ in range(2)]
    return [(p, generate(target, None, p, max_new_tokens=30, eos_token_ids=()).tokens) for p in prompts]


def recipe(kind, **train):
    return recipe_from_dict({"output": "unused", "drafter": {"kind": kind}, "train": {"micro_batch": 4, **train}})


def live_drafter(target, kind, dtype=torch.float32):
    torch.manual_seed(0)
    drafter = build_medusa(target, None, heads=3) if kind == "medusa" else build_eagle(target, None, version=3)
    return drafter.to(dtype).eval().requires_grad_(False)


def serve(target, recorder, cases):
    """Decodes every case; returns tokens per target step."""
    recorder.reset()
    for prompt, answer in cases:
        out = generate(target, recorder, prompt, max_new_tokens=30, settings=CHAIN, eos_token_ids=())
        assert out.tokens == answer
    recorder.finish()
    return recorder.tokens / recorder.steps


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_acceptance_rises_on_a_stream_that_repeats(target, cases, kind):
    live = live_drafter(target, kind)
    recorder = Recorder(live)
    online = Online(live, target, recipe(kind, lr=1e-2), steps=10)
    taus, updates = [], []
    for _ in range(3):
        taus.append(serve(target, recorder, cases))
        updates.append(online.update(list(recorder.rows), fresh=len(cases)))
    assert len(updates[0].losses) == 10 and updates[0].before is None
    assert taus[2] > taus[0] + 0.7 and taus[1] > taus[0] + 0.4
    assert online.restored == 0 and updates[1].now > updates[1].before
    # the estimate by which it judges is near what decoding shows; it looks further than a chain of 3
    assert taus[1] - 0.3 < updates[1].now < taus[1] + 0.7


def test_a_harmful_update_is_taken_back(target, cases):
    live = live_drafter(target, "eagle3")
    recorder = Recorder(live)
    online = Online(live, target, recipe("eagle3", lr=1e-2), steps=10)
    serve(target, recorder, cases)
    online.update(list(recorder.rows), len(cases))
    good = copy.deepcopy(live.state_dict())
    before = serve(target, recorder, cases)
    online.steps = 1
    online.recipe, online.lr = recipe("eagle3", lr=1.0), 1.0
    online.update(list(recorder.rows), len(cases))
    assert serve(target, recorder, cases) < before - 0.3
    online.steps = 0
    update = online.update(list(recorder.rows), len(cases))
    assert update.restored and update.now < update.before
    assert all(torch.equal(weight, good[name]) for name, weight in live.state_dict().items())
    assert online.lr == online.optimizers[0].param_groups[0]["lr"] == 0.5
    online.update(list(recorder.rows), len(cases))  # no worse: it may step further again
    assert online.lr == online.optimizers[0].param_groups[0]["lr"] == 1.0


def test_the_live_drafter_keeps_its_dtype_and_its_packing(target, cases):
    live = live_drafter(target, "eagle3", torch.bfloat16)
    pack_drafter(live, target.dtype)
    packed = [module for module in live.modules() if "forward" in vars(module)]
    recorder = Recorder(live)
    online = Online(live, target, recipe("eagle3"), steps=2)
    serve(target, recorder, cases[:2])
    online.update(list(recorder.rows), 2)
    x = torch.randn(2, 64).to(torch.bfloat16)
    for name, weight in online.learner.named_parameters():
        assert weight.dtype == torch.float32
        assert torch.equal(dict(live.named_parameters())[name], weight.to(torch.bfloat16))
    for module in packed:
        x = torch.randn(2, module.in_features).to(torch.bfloat16)
        expected = torch.nn.functional.linear(x.float(), module.weight.float())
        torch.testing.assert_close(module(x).float(), expected, atol=0.05, rtol=0.05)
    assert packed or not torch.backends.mkldnn.is_available()
    serve(target, recorder, cases[:2])


def test_it_learns_through_a_router_and_leaves_sampling_alone(target, cases):
    live = live_drafter(target, "eagle3")
    other = build_eagle(target, None, version=3, taps=(0, 1, 3))
    recorder = Recorder(Router({"eagle": live, "other": other, "script": Scripted(lambda n: [1, 2], 8)}))
    online = Online(live, target, recipe("eagle3"), taps=recorder.taps, steps=1)
    assert recorder.taps != live.taps
    serve(target, recorder, cases[:2])
    through_router = online.update(list(recorder.rows), 2).now
    alone = Recorder(live_drafter(target, "eagle3"))
    serve(target, alone, cases[:2])
    for row in alone.rows:  # requests end at other rounds, so only nearly the same rows
        assert len(row.ids) > 30
    fresh = Online(alone.drafter, target, recipe("eagle3"), steps=0)
    assert through_router == pytest.approx(fresh.update(list(alone.rows), 2).now, abs=0.1)
    sampling = SamplingParams(temperature=1.0, seed=3)
    first = generate(target, recorder, cases[0][0], max_new_tokens=30, sampling=sampling, eos_token_ids=())
    assert len(first.tokens) == 30
