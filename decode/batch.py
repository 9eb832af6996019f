"""Many requests at once: one target forward a round for all of them, plain or speculative.

Each request drafts, verifies, samples and stops by itself (`decode.engine.Decoding`); only forwards and memory are
common. Rows that draft less are padded in the forward and nowhere else: acceptance is ragged, and so is what the pool
keeps. A finished request leaves at once and a waiting one takes its place. When the pool runs short, the youngest
request gives its pages back and waits; its tokens, its coins and its drafter's state are kept, so its output is what it
would have been.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from decode.engine import Block, Decoding, Generation, Policy, Request, Round, ask
from decode.pool import PAGE, PagePool, Seat
from drafters.base import Drafter, DraftSettings, DraftTree
from drafters.errors import UserError
from drafters.lazy import Lazy
from drafters.target import Features, Target

__all__ = ["Batch", "Request", "generate_batch"]

Callback = Callable[[int, list[int], int], bool | None]

# A forward costs as much as so many more rows: v(16) = 1.4 to 1.9 in bfloat16 and float32 on two cores, so a row is
# 0.03 to 0.06 of the step of one.
FORWARD_ROWS = 24
OFF = DraftSettings("chain", 0)


@dataclass(eq=False)
class _Job:
    """A request that waits or is served."""

    index: int
    run: Decoding
    seat: Seat | None = None
    begun: bool = False

    @property
    def tokens(self) -> list[int]:
        """All decided tokens."""
        return self.run.prompt + self.run.out.tokens


@torch.inference_mode()
def generate_batch(
    target: Target,
    drafter: Drafter | None,
    requests: Sequence[Request],
    *,
    max_batch: int = 16,
    pool_tokens: int | None = None,
    settings: DraftSettings | Policy | None = None,
    callback: Callback | None = None,
    share_from: int = 128,
) -> list[Generation]:
    """Decodes many requests; each output is what `generate` gives for that request alone.

    Args:
        target: from `load_target`.
        drafter: from `load_drafter`, or None for plain decoding.
        requests: each with its own prompt, length, sampling, seed, stop rules and, if it likes, draft settings.
        max_batch: at most so many are served at once.
        pool_tokens: KV rows that all of them together may hold; None: what the longest `max_batch` of them could need.
        settings: how much to draft, for requests that do not say. A policy decides once a round, for all of them.
        callback: called with a request's index, its new tokens and how many of them were drafted; returning False
            cancels that request.
        share_from: requests whose prompts begin with so many equal tokens share the memory of them.

    Returns:
        One `Generation` a request, in order. One that fails has finish "error" and says why; the others go on.

    Raises:
        UserError: the batch or the pool has no room at all.
    """
    seats = max(1, min(max_batch, len(requests))) if max_batch > 0 else max_batch
    batch = Batch(target, drafter, seats, pool_tokens, settings, callback, share_from)
    for request in requests:
        batch.add(request)
    while batch.busy:
        batch.step()
    return [batch.results[index] for index in range(len(requests))]


class Batch:
    """A running batch: `add` at any time, `step` while `busy`, read `results`.

    Arguments are those of `generate_batch`; call `step` within `torch.inference_mode()`.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        max_batch: int = 16,
        pool_tokens: int | None = None,
        settings: DraftSettings | Policy | None = None,
        callback: Callback | None = None,
        share_from: int = 128,
    ):
        if max_batch < 1:
            raise UserError(f"max_batch={max_batch}: at least 1 is allowed")
        self.target, self.settings = target, settings
        # any request may bring a policy
        self.drafter: Any = drafter if drafter is None or hasattr(drafter, "observe") else Lazy(drafter)
        self.max_batch, self.pool_tokens, self.share_from = max_batch, pool_tokens, max(2, share_from)
        self.callback = callback
        self.pool: PagePool | None = None if pool_tokens is None else PagePool(pool_tokens, max_batch)
        self.results: dict[int, Generation] = {}
        self.waiting: deque[_Job] = deque()
        self.serving: list[_Job] = []
        self.added = 0
        self.wanted: dict[_Job, DraftSettings] = {}
        self.taps = () if drafter is None else drafter.taps
        # what the prefix of a prompt gave a drafter must be had without its features, or the prompt is read anew
        self.sharing = drafter is None or hasattr(drafter, "fork")

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.waiting or self.serving)

    def add(self, request: Request) -> int:
        """Queues a request; returns its index in `results`, where it lies at once if it can't be served."""
        index = self.added
        self.added += 1
        try:
            own = request if request.settings or not self.settings else replace(request, settings=self.settings)
            run = Decoding(self.target, self.drafter, own)
            if self.pool is not None and run.capacity > self.pool.capacity:
                raise UserError(
                    f"a request of up to {run.capacity} tokens, drafts included, does not fit pool_tokens="
                    f"{self.pool.capacity}; raise it, or lower max_new_tokens"
                )
            self.waiting.append(_Job(index, run))
        except UserError as error:
            self.results[index] = Generation([], finish="error", error=str(error))
        return index

    def cancel(self, index: int) -> None:
        """Ends a request with what it has; unknown and finished ones are left alone."""
        for job in (*self.waiting, *self.serving):
            if job.index == index and not job.run.done:
                job.run.done, job.run.out.finish = True, "cancelled"
                self._finish(job)

    def step(self) -> None:
        """Lets waiting requests in, then runs one round of those that are served."""
        self._admit()
        if not self.serving:
            return
        started = time.perf_counter()
        self._make_room(self._choose())
        jobs = self.serving
        trees = self._propose()
        drafted = time.perf_counter()
        blocks = [job.run.prepare(tree) for job, tree in zip(jobs, trees, strict=True)]
        flats, features = self._verify(jobs, blocks)
        verified = time.perf_counter()
        verdicts = [job.run.settle(block, flat) for job, block, flat in zip(jobs, blocks, flats, strict=True)]
        self._pool.keep([_seat(job) for job in jobs], [verdict.rows for verdict in verdicts])
        kept = time.perf_counter()
        if self.drafter is not None:
            going = [i for i, job in enumerate(jobs) if not job.run.done]
            self._extend(
                [jobs[i].run.state for i in going], [jobs[i].run.committed(features[i], verdicts[i]) for i in going]
            )
        ended = time.perf_counter()
        times = drafted - started + ended - kept, verified - drafted, ended - started
        observed: dict[int, list[Round]] = {}
        for job, block, verdict in zip(jobs, blocks, verdicts, strict=True):
            round = job.run.record(block, verdict, *times, len(jobs))
            observed.setdefault(id(job.run.policy), []).append(round)
        for policy in {id(job.run.policy): job.run.policy for job in jobs}.values():
            if policy is not None:
                policy.observe(observed[id(policy)])
        for job, verdict in zip(jobs, verdicts, strict=True):
            if job.index not in self.results:  # else an earlier request's callback cancelled it
                self._report(job, verdict.emitted, verdict.accepted)

    def _choose(self) -> dict[_Job, DraftSettings]:
        """How much each request drafts in this round; a policy that several share is asked once."""
        if self.drafter is None:
            return dict.fromkeys(self.serving, OFF)
        sharing: dict[int, list[Decoding]] = {}
        for job in self.serving:
            sharing.setdefault(id(job.run.policy), []).append(job.run)
        chosen: dict[int, DraftSettings | None] = {
            key: None if (p := runs[0].policy) is None else ask(p, runs, len(self.serving))
            for key, runs in sharing.items()
        }
        return {job: job.run.draft_settings(chosen[id(job.run.policy)]) for job in self.serving}

    @property
    def _pool(self) -> PagePool:
        if self.pool is None:
            longest = max(job.run.capacity for job in self.waiting)
            self.pool = PagePool(self.max_batch * (longest + PAGE), self.max_batch)
        return self.pool

    # ---- who is served

    def _admit(self) -> None:
        """Serves waiting requests, first come first served, while the pool holds them and a page more for each."""
        while self.waiting and len(self.serving) < self.max_batch:
            job, pool = self.waiting[0], self._pool
            ids = job.tokens[:-1] if job.begun else job.tokens  # the last emitted token is read in the next round
            donor, rows = self._donor(ids)
            fresh = pool.pages_for(len(ids)) - rows // pool.page
            if fresh + len(self.serving) > len(pool.free):
                break
            self.waiting.popleft()
            job.seat = pool.enter(donor.seat if donor else None, rows)
            room = pool.reserve(job.seat, len(ids) - rows)
            assert room
            self.serving.append(job)
            self._read(job, ids, donor, rows)
        if self.serving:
            self._pool.move_home([_seat(job) for job in self.serving])

    def _donor(self, ids: list[int]) -> tuple[_Job | None, int]:
        """Who holds most of the first rows of these tokens, and how many; all but the last are of use."""
        best: tuple[_Job | None, int] = (None, 0)
        for job in self.serving if self.sharing else ():
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, job.tokens, strict=False)))
            rows = min(common - 1, _seat(job).length)
            if rows > best[1] and common >= self.share_from:
                best = job, rows
        return best

    def _read(self, job: _Job, ids: list[int], donor: _Job | None, rows: int) -> None:
        """Reads a prompt from row `rows` on and emits the first token; after a preemption only reads."""
        start, run, device = time.perf_counter(), job.run, self.target.device
        self._pool.open([_seat(job)], [len(ids) - rows], device)
        new = torch.tensor([ids[rows:]], device=device)
        features = self.target.forward(
            new, torch.arange(rows, len(ids), device=device)[None], self._pool, taps=() if job.begun else run.taps
        )
        self._pool.commit(len(ids) - rows)
        if job.begun:
            return
        job.begun = True
        logits = self.target.head(features.final[0, -1:]).float()  # (1, V): predicts the first new token
        emitted = run.first(run.choose(None, logits).tolist())
        run.out.ttft_s = time.perf_counter() - start
        if self.drafter is not None and not run.done:
            if donor is None:
                run.begin()
            else:
                run.state = self.drafter.fork(donor.run.state, rows, run.draft_rows)
            self.drafter.extend(run.state, torch.tensor(ids[rows + 1 :] + emitted, device=device), features)
        self._report(job, emitted, 0)

    def _make_room(self, settings: dict[_Job, DraftSettings]) -> None:
        """Reserves pages for the round, eldest first; where they run out, the youngest gives up its own and waits."""
        self.wanted = settings
        i = 0
        while i < len(self.serving):
            job = self.serving[i]
            if self._pool.reserve(_seat(job), settings[job].nodes + 1):
                i += 1
                continue
            youngest = self.serving.pop()
            self._pool.leave(_seat(youngest))
            youngest.seat = None
            self.waiting.appendleft(youngest)

    def _report(self, job: _Job, emitted: list[int], accepted: int) -> None:
        """Tells the caller; ends the request where it is done, or where the caller cancels it or fails."""
        try:
            if self.callback is not None and self.callback(job.index, emitted, accepted) is False:
                self.cancel(job.index)
        except Exception as error:
            job.run.out.finish, job.run.out.error, job.run.done = "error", str(error), True
        if job.run.done:
            self._finish(job)

    def _finish(self, job: _Job) -> None:
        if job.index in self.results:
            return
        self.results[job.index] = job.run.finish()
        job.run.state = None
        if job.seat is not None:
            self._pool.leave(job.seat)
            self.serving = [other for other in self.serving if other is not job]
        else:
            self.waiting.remove(job)

    # ---- one round

    def _propose(self) -> list[DraftTree]:
        if self.drafter is None:
            return [job.run.propose() for job in self.serving]
        runs = [job.run for job in self.serving]
        states, settings = [run.state for run in runs], [self.wanted[job] for job in self.serving]
        temperatures, generators = [run.sampling.temperature for run in runs], [run.generator for run in runs]
        together = getattr(self.drafter, "propose_batch", None)
        if together is not None and len(runs) > 1:
            return together(states, settings, temperatures, generators)
        return [self.drafter.propose(*one) for one in zip(states, settings, temperatures, generators, strict=True)]

    def _extend(self, states: list, committed: list[tuple[Tensor, Features]]) -> None:
        assert self.drafter is not None
        together = getattr(self.drafter, "extend_batch", None)
        if together is not None and len(states) > 1:
            together(states, [tokens for tokens, _ in committed], [features for _, features in committed])
            return
        for state, (tokens, features) in zip(states, committed, strict=True):
            self.drafter.extend(state, tokens, features)

    def _verify(self, jobs: list[_Job], blocks: list[Block]) -> tuple[list[list[int]], list[Features]]:
        """Runs the target over all blocks; for each job what `Decoding.choose` gave, and the block's features.

        One transfer to the host.
        """
        features: dict[_Job, Features] = {}
        chosen: dict[_Job, Tensor] = {}
        of = dict(zip(jobs, blocks, strict=True))
        ordered = sorted(jobs, key=lambda job: _seat(job).home)  # as the pool shows them without a copy
        for group in _groups(ordered, {job: len(block.ids) for job, block in of.items()}):
            counts = [len(of[job].ids) for job in group]
            out = self._forward([_seat(job) for job in group], [of[job] for job in group], counts)
            final = out.final.flatten(0, 1)
            logits = self.target.head(final[self._pool.real] if self._pool.padded else final).float()
            for b, (job, rows) in enumerate(zip(group, logits.split(counts), strict=True)):
                own = slice(b, b + 1), slice(0, counts[b])
                features[job] = Features(out.final[own], None if out.taps is None else out.taps[own])
                chosen[job] = job.run.choose(of[job], rows)
        sizes = [len(chosen[job]) for job in jobs]
        flat = torch.cat([chosen[job] for job in jobs]).tolist()
        ends = [0, *torch.tensor(sizes).cumsum(0).tolist()]
        return [flat[a:b] for a, b in pairwise(ends)], [features[job] for job in jobs]

    def _forward(self, seats: list[Seat], blocks: list[Block], counts: list[int]) -> Features:
        """One forward of (B, N): each request's block, padded behind by rows that see their root only."""
        device, N = self.target.device, max(counts)
        self._pool.open(seats, counts, device)
        if N == 1:
            ids = torch.cat([block.ids for block in blocks])[:, None]
            depths, trees = torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool)[:, :, None]
        else:
            ids = pad_sequence([block.ids for block in blocks], batch_first=True)  # (B, N)
            depths = torch.zeros_like(ids)
            trees = torch.zeros(len(seats), N, N, dtype=torch.bool, device=device)
            trees[:, :, 0] = True
            for b, (block, n) in enumerate(zip(blocks, counts, strict=True)):
                if block.slots is not None and block.depths is not None:
                    depths[b, :n], trees[b, :n, :n] = block.depths, block.slots
        # rotary position: committed length + depth
        positions = self._pool.lengths[:, None] + depths
        return self.target.forward(ids, positions, self._pool, self._pool.mask(trees), self.taps)


def _seat(job: _Job) -> Seat:
    assert job.seat is not None
    return job.seat


def _groups(jobs: list[_Job], rows: dict[_Job, int]) -> list[list[_Job]]:
    """One forward for all, or two where short blocks beside long ones would pad more rows than a forward costs."""
    lengths = sorted(rows.values())
    whole = len(lengths) * lengths[-1]
    parts = {
        lengths[k - 1]: FORWARD_ROWS + k * lengths[k - 1] + (len(lengths) - k) * lengths[-1]
        for k in range(1, len(lengths))
    }
    cut = min(parts, key=lambda length: parts[length], default=0)
    if not parts or parts[cut] >= whole:
        return [jobs]
    return [[job for job in jobs if rows[job] <= cut], [job for job in jobs if rows[job] > cut]]
