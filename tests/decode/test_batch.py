"""A request decoded in a batch gives what it gives alone, whatever its neighbours, the pool, or their order."""

import random
from dataclasses import replace

import pytest
import torch

from decode import batch as batch_module
from decode.batch import Batch, generate_batch
from decode.engine import DraftSettings, Request, SamplingParams, generate
from drafters.base import DraftTree
from drafters.errors import UserError
from drafters.lookup import LookupDrafter
from tests.scripted import VOCAB, bushy
from tests.tiny import make_target

OFF = DraftSettings("chain", 0)
CHAIN, TREE = DraftSettings("chain", length=4), DraftSettings("tree", length=4, top_k=3, total=12)


class Chorus:
    """Knows every request's answer, and gives it away always, never, or now and then, request by request."""

    kind, taps, meta, default_settings = "chorus", (), {}, None

    def __init__(self, answers):
        self.answers = answers  # (prompt after its first token, first new token) -> (skill, answer)

    def begin(self, capacity):
        return []

    def extend(self, state, tokens, features):
        assert features.final.shape[1] == len(tokens)
        state.append(tokens.tolist())

    def propose(self, state, settings, temperature=0.0, generator=None):
        skill, answer = self.answers[tuple(state[0])]
        done = 1 + sum(map(len, state[1:]))
        assert [t for part in state[1:] for t in part] == answer[1:done]
        right = {"all": 99, "none": 0, "some": done * 7 % 5}[skill]
        path = [t if i < right else (t + 1) % VOCAB for i, t in enumerate(answer[done:][: settings.length])]
        if not path:
            return DraftTree.empty(torch.device("cpu"))
        if settings.kind == "tree":
            return bushy(path, settings, random.Random(done))
        return DraftTree.chain(torch.tensor(path))


def chorus(requests, answers, skills=("all", "none", "some")):
    known = {}
    for i, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        known[(*request.prompt[1:], answer[0])] = (skills[i % len(skills)], answer)
    return Chorus(known)


def alone(target, drafter, request):
    return generate(
        target,
        drafter,
        request.prompt,
        max_new_tokens=request.max_new_tokens,
        settings=request.settings,
        sampling=request.sampling,
        stop=request.stop,
        eos_token_ids=request.eos_token_ids,
    )


def greedy_requests(count, seed, longest=40, new=12):
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(4, longest))] for _ in range(count)]
    return [Request(prompt, rng.randint(1, new), eos_token_ids=()) for prompt in prompts]


def run(batch, each_step=lambda: None):
    with torch.inference_mode():
        while batch.busy:
            batch.step()
            each_step()
    return [batch.results[i] for i in range(batch.added)]


@pytest.fixture(scope="module")
def small():
    return make_target(layers=1)


def test_200_requests_through_a_third_of_the_pool_they_need(small):
    requests = greedy_requests(200, seed=0, longest=60, new=8)
    answers = [alone(small, None, request).tokens for request in requests]
    need = sorted(len(r.prompt) + r.max_new_tokens + CHAIN.nodes + 1 for r in requests)
    batch = Batch(small, chorus(requests, answers), max_batch=16, pool_tokens=sum(need[-16:]) // 3, settings=CHAIN)
    for request in requests:
        batch.add(request)
    most = 0

    def look():
        nonlocal most
        most = max(most, len(batch.serving))
        held = [job.seat for job in batch.serving]
        assert batch.pool.used == sum(batch.pool.pages_for(seat.length) for seat in held)  # drafts are given back

    outs = run(batch, look)
    assert [out.tokens for out in outs] == answers
    pages = batch.pool.pages
    assert batch.pool.capacity <= sum(need[-16:]) // 3
    assert 0.7 * pages <= batch.pool.peak <= pages
    assert batch.pool.used == 0
    assert 3 < most < 16  # the pool was what they waited for


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_a_preempted_request_goes_on_where_it_was(target, drafters, temperature):
    settings = DraftSettings("chain", 3, sample=True)
    requests = [
        Request([7 + i, 8, 9], 24, settings, SamplingParams(temperature, seed=i), eos_token_ids=()) for i in range(3)
    ]
    batch = Batch(target, drafters["eagle3"], max_batch=3, pool_tokens=48)  # of 3 * 31 that they grow to
    for request in requests:
        batch.add(request)
    preempted, gathered = [], []

    def look():
        preempted.extend(job.index for job in batch.waiting if job.begun)
        gathered.append(batch.pool.gathered)

    outs = run(batch, look)
    assert [out.tokens for out in outs] == [alone(target, drafters["eagle3"], request).tokens for request in requests]
    assert preempted and any(gathered) and not all(gathered)
    assert batch.pool.used == 0


MIXED = [
    Request([5, 6, 7], 20, CHAIN, SamplingParams(), eos_token_ids=()),
    Request(list(range(30, 60)), 14, TREE, SamplingParams(temperature=0.9, seed=3)),
    Request([9] * 17, 9, DraftSettings("chain", 2, sample=True), SamplingParams(temperature=1.3, top_k=20, seed=4)),
    Request([100, 4, 200], 1, CHAIN),
    Request([11, 300, 8, 90], 18, DraftSettings("chain", 7), SamplingParams(repetition_penalty=1.3), eos_token_ids=()),
    Request([77, 78], 16, DraftSettings("chain", 0), SamplingParams(temperature=1.0, top_p=0.8, seed=5)),
    Request([1, 2, 3, 4], 15, CHAIN, SamplingParams(temperature=0.7, min_p=0.05, min_new_tokens=9, seed=6)),
    Request([450, 451, 452], 15, None, SamplingParams(temperature=1.1, seed=7), stop=("e", "th")),
]
"""Own lengths, settings, samplers, seeds and stop rules."""


@pytest.mark.parametrize("name", ["plain", "medusa", "hydra", "eagle1", "eagle3"])
def test_a_request_does_not_depend_on_its_neighbours(target, drafters, name):
    drafter = drafters.get(name)
    expected = [alone(target, drafter, request) for request in MIXED]
    order = list(range(len(MIXED)))
    for size, pool in ((8, None), (3, None), (5, 112)):
        random.Random(size).shuffle(order)
        outs = generate_batch(target, drafter, [MIXED[i] for i in order], max_batch=size, pool_tokens=pool)
        for i, out in zip(order, outs, strict=True):
            assert (out.tokens, out.text, out.finish) == (expected[i].tokens, expected[i].text, expected[i].finish)
            assert [r.accepted for r in out.rounds] == [r.accepted for r in expected[i].rounds]
    assert {out.finish for out in expected} >= {"stop", "length"}


@pytest.mark.parametrize("name", ["medusa", "eagle3", "lookup"])
def test_a_policy_decides_once_a_round_for_all_who_share_it(target, drafters, name):
    """Off, chain and tree in turn; what a drafter had not read while it was off, it reads late."""

    class InTurn:
        name, nodes, rows = "in turn", 12, 12
        asked, seen = [], []

        def choose(self, requests=1, waiting=0):
            self.asked.append(requests)
            return (OFF, OFF, CHAIN, TREE, CHAIN)[len(self.asked) % 5]

        def observe(self, rounds):
            self.seen.append(rounds)

    drafter = LookupDrafter() if name == "lookup" else drafters[name]
    requests = greedy_requests(5, seed=4, new=20)
    requests[3] = replace(requests[3], settings=CHAIN)  # knows what it wants
    policy = InTurn()
    outs = generate_batch(target, drafter, requests, max_batch=3, settings=policy)
    for request, out in zip(requests, outs, strict=True):
        assert out.tokens == alone(target, None, replace(request, settings=None)).tokens
    assert len(policy.asked) == len(policy.seen)
    for asked, rounds in zip(policy.asked, policy.seen, strict=True):
        assert all(r.requests == asked <= 3 for r in rounds) and 1 <= len(rounds) <= asked
    own = [r for i, out in enumerate(outs) if i != 3 for r in out.rounds]
    assert sum(map(len, policy.seen)) == len(own)
    assert any(r.drafted for r in own) or name == "lookup"  # which finds nothing in random text
    assert all(not r.drafted for r in own if r.settings.length == 0)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("settings", [CHAIN, TREE], ids=["chain", "tree"])
def test_rows_that_accept_all_beside_rows_that_accept_none_and_windows(family, settings):
    target = make_target(family, layers=2)
    requests = [replace(r, max_new_tokens=20) for r in greedy_requests(7, seed=1, longest=20)]
    answers = [alone(target, None, request).tokens for request in requests]
    for pool in (None, 160):  # in place, and gathered from scattered pages
        outs = generate_batch(target, chorus(requests, answers), requests, settings=settings, pool_tokens=pool)
        assert [out.tokens for out in outs] == answers
        if settings is CHAIN:
            assert all(r.accepted == r.drafted for r in outs[0].rounds)
            assert all(r.accepted == 0 for r in outs[1].rounds)
            assert len(outs[0].rounds) == 4 and len(outs[1].rounds) == 19


def test_a_batch_at_home_is_read_in_place(target):
    batch = Batch(target, None, max_batch=4)
    for request in greedy_requests(11, seed=2):
        batch.add(request)
    gathered = []
    run(batch, lambda: gathered.append(batch.pool.gathered))
    assert not any(gathered)


# ---- shared prefixes


@pytest.mark.parametrize("name", ["plain", "medusa", "hydra", "eagle3"])
def test_a_common_prefix_is_stored_and_read_once(target, drafters, name, monkeypatch):
    drafter, rng = drafters.get(name), random.Random(3)
    system = [rng.randrange(VOCAB) for _ in range(70)]  # ends inside a page
    tails = [[1, 2, 3], [4], [], [5] * 20, []]
    requests = [Request(system + tail, 8 + i, CHAIN, eos_token_ids=()) for i, tail in enumerate(tails)]
    expected = [alone(target, drafter, request).tokens for request in requests]
    read = []
    forward = type(target).forward
    monkeypatch.setattr(
        type(target), "forward", lambda self, ids, *a, **k: (read.append(ids.numel()), forward(self, ids, *a, **k))[1]
    )
    used = {}
    for share_from in (1000, 32):
        batch = Batch(target, drafter, share_from=share_from)
        for request in requests:
            batch.add(request)
        read.clear()
        shared = []
        outs = run(batch, lambda batch=batch, shared=shared: shared.append(batch.pool.shared))
        assert [out.tokens for out in outs] == expected
        assert batch.pool.used == batch.pool.shared == 0
        used[share_from] = batch.pool.peak, sum(read[: len(requests)]), shared[0]
    assert used[1000][2] == 0
    assert used[32][2] == 4 * 4  # four whole pages of 70 rows, for each of four others; the fifth was copied on write
    assert used[1000][0] - used[32][0] >= 16
    assert used[1000][1] - used[32][1] == 4 * 69  # the last common row is read again, for what it predicts


def test_the_first_holder_of_a_shared_page_may_leave_first(target):
    prompt = list(range(100, 150))
    requests = [Request(prompt, n, eos_token_ids=()) for n in (2, 30, 12)]
    outs = generate_batch(target, None, requests, share_from=8)
    assert [out.tokens for out in outs] == [
        outs[1].tokens[:2],
        alone(target, None, requests[1]).tokens,
        outs[1].tokens[:12],
    ]


# ---- requests that end early


def test_cancelled_and_failing_requests_free_their_pages_and_hurt_no_other(target):
    requests = greedy_requests(6, seed=4, new=12)
    requests = [replace(request, max_new_tokens=12) for request in requests]
    requests[1] = Request([], 4)
    requests[2] = Request([VOCAB + 7], 4)
    requests[3] = Request([1] * 300, 100)
    answers = {i: alone(target, None, requests[i]).tokens for i in (0, 4, 5)}
    seen = {i: [] for i in range(6)}

    def callback(index, tokens, accepted):
        seen[index] += tokens
        if index == 4 and len(seen[4]) == 5:
            return False
        if index == 5 and len(seen[5]) == 3:
            raise ConnectionError("the reader went away")
        return True

    batch = Batch(target, None, max_batch=3, pool_tokens=200, callback=callback)
    for request in requests:
        batch.add(request)
    outs = run(batch)
    assert (outs[0].tokens, outs[0].finish) == (answers[0], "length")
    assert (outs[4].tokens, outs[4].finish) == (answers[4][:5], "cancelled")
    assert (outs[5].tokens, outs[5].finish, outs[5].error) == (answers[5][:3], "error", "the reader went away")
    assert [out.finish for out in outs[1:4]] == ["error"] * 3
    assert "empty" in outs[1].error and "0..511" in outs[2].error
    assert "pool_tokens=192" in outs[3].error  # whole pages
    assert batch.pool.used == 0
    assert seen[0] == answers[0]


def test_waiting_requests_can_be_cancelled_and_new_ones_added(target):
    requests = [replace(request, max_new_tokens=8) for request in greedy_requests(4, seed=5)]
    batch = Batch(target, None, max_batch=2, pool_tokens=400)
    for request in requests[:3]:
        batch.add(request)
    with torch.inference_mode():
        batch.step()
    batch.cancel(2)
    batch.cancel(0)
    batch.cancel(99)
    batch.add(requests[3])
    outs = run(batch)
    assert [out.finish for out in outs] == ["cancelled", "length", "cancelled", "length"]
    assert len(outs[0].tokens) == 2 and outs[2].tokens == []
    assert [outs[1].tokens, outs[3].tokens] == [alone(target, None, requests[i]).tokens for i in (1, 3)]


def test_no_room_at_all_is_an_error_at_once(target):
    with pytest.raises(UserError, match="max_batch=0"):
        generate_batch(target, None, [Request([1])], max_batch=0)
    with pytest.raises(UserError, match="pool_tokens=3"):
        generate_batch(target, None, [Request([1])], pool_tokens=3)
    assert generate_batch(target, None, []) == []


# ---- what a forward holds


def test_a_forward_is_split_where_padding_would_cost_more():
    groups = batch_module._groups
    assert groups(list("abc"), {"a": 1, "b": 1, "c": 5}) == [["a", "b", "c"]]
    long = dict.fromkeys("abcdefgh", 1) | {"e": 9}
    assert groups(list("abcdefgh"), long) == [list("abcdfgh"), ["e"]]
    assert groups(["a"], {"a": 60}) == [["a"]]
    assert groups(list("abcdefgh"), dict.fromkeys("abcdefgh", 9)) == [list("abcdefgh")]


def test_one_forward_and_one_transfer_a_round(target, drafters, monkeypatch):
    requests = [replace(request, max_new_tokens=9, settings=CHAIN) for request in greedy_requests(5, seed=6)]
    calls = []
    forward = type(target).forward
    monkeypatch.setattr(type(target), "forward", lambda self, *a, **k: (calls.append(1), forward(self, *a, **k))[1])
    outs = generate_batch(target, drafters["eagle3"], requests)
    assert len(calls) == 5 + max(len(out.rounds) for out in outs)
