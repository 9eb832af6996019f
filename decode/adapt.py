"""How much to draft, decided round by round: the policies that `generate` takes in place of fixed settings.

The adaptive policy maximises expected tokens per second. What a setting costs comes from `decode.cost`. What it yields
comes from how calibration text survived it depth by depth, shifted by two numbers that say how the text at hand
differs: one for the first drafted token, one for those after it, added to the log odds that a token is accepted. A
forgetting Bayes filter over a grid of both reads them off every round's accepted length, whatever setting was used, so
that one drafted round informs all candidates.
"""

import math
from collections.abc import Sequence

import numpy as np

from decode.cost import CONTEXT, OFF, Candidate, cost_cache, profile, tuned_settings
from decode.engine import Policy, Round
from drafters.adapter import adapted
from drafters.base import Drafter, DraftSettings
from drafters.errors import UserError
from drafters.target import Target

SHIFTS = np.stack(np.meshgrid(np.linspace(-6, 6, 25), np.linspace(-6, 6, 13), indexing="ij")).reshape(2, -1)
SPREAD = (1.0, 0.8)  # prior standard deviation of the first token's shift, and of the later tokens' against it
FORGET = 0.995  # of a round's evidence, each later round that drafts: about 200 rounds count
DOUBT = 16.0  # nats: no shift is ever ruled out further than this, so that a change of text shows within a few rounds
MARGIN = 1.02  # another setting must promise this much more speed before it replaces the present one
SURE = 1.01  # and drafting this much more than none: gains too small to tell from none are not worth the risk
SAMPLES = 30  # drafts that a calibration curve is taken to rest on
PROBE = (16, 0.02, 0.005)  # plain rounds before a draft is tried: so many, and enough for a failure to cost but these
# shares of the time: the first failure, and each one once failures have doubled the wait
JUDGE = (16, 64)  # plain rounds before the drafter is asked what it would have drafted of them: so many, and so many
# at most once the answers have doubled the wait
HOPE = 0.95  # of plain decoding's speed must then be likely before a draft is tried
HORIZON = 64  # drafting rounds over which the reading of what waited for the drafter must pay
SLOWEST = 0.06  # share of what a round shows about a setting's cost that is believed, once much is known
HOLD, FRESH = 4, 8  # rounds that a decision stands, for to make it takes a hundredth of a step; but the first so many
# rounds after a change are decided one by one
RECHECK = 25  # drafting rounds before a plain one shows what drafting is compared with, where the two are close


def build_policy(
    name: str | None, target: Target, drafter: Drafter, fixed: DraftSettings | None = None, context: int = CONTEXT
) -> DraftSettings | Policy:
    """What `--policy` means: settings or a policy for `generate`; prints what was measured.

    Args:
        name: "adaptive", "window" or "fixed"; None: adaptive, or fixed where settings are given.
        target: as it will decode.
        drafter: what drafts.
        fixed: from `--chain` or `--tree`; the fixed policy without them times the candidates and takes the best.
        context: tokens that usually precede a step.

    Raises:
        UserError: another name, or settings that the policy has no use for.
    """
    name = name or ("fixed" if fixed else "adaptive")
    if name not in POLICIES:
        raise UserError(f"policy={name!r}: {', '.join(POLICIES)} are allowed")
    if name == "fixed" or (not fixed and (hasattr(drafter, "observe") or hasattr(drafter, "drafters"))):
        return fixed or tuned_settings(target, drafter)  # what learns or chooses by itself needs no policy
    if name == "window":
        if fixed and fixed.kind == "tree":
            raise UserError("policy=window drafts chains; use --chain LENGTH to limit them, or another policy")
        return Window(fixed.length if fixed else 8)
    if fixed:
        raise UserError("policy=adaptive chooses chain and tree itself; leave --chain and --tree out, or use fixed")
    with adapted(drafter):
        candidates = profile(target, drafter, context=context, cache=cost_cache())
    best = candidates[0]
    print(
        f"adaptive drafting for {drafter.kind}: starts with {best.settings.describe()} of {len(candidates)}; "
        f"expected {best.tau:.2f} tokens a step, {best.speedup:.2f}x plain"
    )
    return Adaptive(candidates)


class Adaptive:
    """Maximises expected tokens per second; not drafting is always a candidate.

    Args:
        candidates: settings with survival and costs, as `decode.cost.profile` gives them; `OFF` must be among them.
    """

    name = "adaptive"

    def __init__(self, candidates: Sequence[Candidate]):
        self.settings = [c.settings for c in candidates]
        self.off = self.settings.index(OFF)
        self.nodes, self.rows = max(s.nodes for s in self.settings), max(s.rows for s in self.settings)
        self.candidates = list(candidates)
        self.usual = 1 + max(s.length for s in self.settings)  # rows of a request that a round leaves to be read
        self.read_ms = max(c.read_ms for c in candidates)
        depth = max(len(c.survival) for c in candidates) + 1
        self.survival = np.zeros((len(candidates), SHIFTS.shape[1], depth))  # [setting, shifts, d - 1]
        for i, c in enumerate(candidates):
            self.survival[i, :, : len(c.survival)] = _shifted(c.survival)
        self.tokens = 1 + self.survival.sum(-1)  # [setting, shifts]
        self.costs: dict[int, np.ndarray] = {}  # by requests that share a step
        self.requests = 1
        # Cauchy: text may be nothing like the calibration prompts, and a few rounds should then be enough to see it
        self.prior = -np.log1p((SHIFTS[0] / SPREAD[0]) ** 2) - np.log1p(((SHIFTS[1] - SHIFTS[0]) / SPREAD[1]) ** 2)
        self.evidence = np.zeros_like(self.prior)
        self.expected = self._expected()
        self.known: dict[tuple[int, float, int], float] = {}
        self.likelihoods: dict[tuple[int, int, bool], np.ndarray] = {}
        self.unread: list[list[np.ndarray]] = []  # of the rounds since the last decision
        self.drafts = np.arange(len(candidates)) != self.off
        self.load = 0.0  # log of the machine's slowness now against the profile, the same for all settings
        self.bias = np.zeros(len(candidates))  # log of what each setting costs beyond that
        self.timed = np.zeros(len(candidates))  # rounds it was learned from
        self.drafting = 0.0  # log of what drafting with any setting costs beyond that, against not drafting
        self.switches = 0  # between drafting and not, which it was learned from
        self.timed_last: int | None = None
        self.behind = 0.0  # milliseconds of reading that come before the first draft
        self.current = -1  # what the rates decided last
        self.held = 0  # rounds that it still stands
        self.streak = 0  # rounds since drafting was turned on or off
        self.unchecked = 0  # drafting rounds since a plain one
        cheapest = min((c.ms for c in candidates if c.settings.nodes), default=0.0) / self.cost[self.off]
        self.gap = self.patience = max(PROBE[0], int((cheapest - 1) / PROBE[1]))
        self.probing = False
        self.judging, self.judgeable = 0, False  # tokens asked about now; whether the drafter ever answered
        self.wait, self.unjudged = JUDGE[0], 0
        # whose first depth is an unconditional first draft: a cut leaves out those that the drafter doubts
        chains = [i for i, s in enumerate(self.settings) if s.kind == "chain" and s.length and not s.min_confidence]
        self.first = chains[0] if chains else self.off

    @property
    def cost(self) -> np.ndarray:
        """Expected milliseconds of a step, by candidate."""
        if self.requests not in self.costs:
            together = [c.of(c.settings.nodes, self.requests) for c in self.candidates]
            alone = [c.ms for c in self.candidates]
            self.costs[self.requests] = np.array(alone if self.requests == 1 else together)
        return self.costs[self.requests]

    def _excess(self) -> np.ndarray:
        """Log of what each candidate costs beyond the profile."""
        return (self.bias + self.drafting) * self.drafts

    def _expected(self) -> np.ndarray:
        """Tokens of a step, by candidate."""
        weight = self.prior + self.evidence
        weight = np.exp(weight - weight.max())
        return self.tokens @ weight / weight.sum()

    def rates(self) -> np.ndarray:
        """Expected tokens of a request per plain step's time, by candidate."""
        cost = self.cost * np.exp(self._excess()) + self.behind / HORIZON * self.drafts
        rates = self.expected / cost * cost[self.off]
        rates[self.off] *= SURE
        return rates

    def choose(self, requests: int = 1, waiting: int = 0) -> DraftSettings:
        """See `Policy.choose`."""
        self.behind = max(0, waiting - requests * self.usual) * self.read_ms
        if self.held == 0 or requests != self.requests:
            self.requests = requests
            self._decide()
        self.held -= 1
        best = used = self.current
        self.probing, self.judging = False, 0
        if best == self.off:
            affordable = PROBE[1] * self.streak * self.cost[self.off]  # milliseconds
            if self.behind <= affordable and self.streak >= self.gap and (self.hopeful or not self.judgeable):
                self.probing, used, self.held = True, self.trial, 0
            elif self.unjudged >= self.wait - 1:
                self.judging, self.unjudged = self.wait, -1  # of one request's
            self.unjudged += 1
        else:
            self.unjudged = 0
            if self.unchecked >= min(RECHECK, 5 * (1 + self.switches)) * self.gain**2:
                used = self.off
        self.streak += 1
        self.unchecked = 0 if used == self.off else self.unchecked + 1
        self.used = used
        return self.settings[used]

    def _decide(self) -> None:
        """What the next rounds draft, what a trial would, and whether one is worth it."""
        for likelihoods in self.unread:
            self._learn(likelihoods[0] if len(likelihoods) == 1 else np.sum(likelihoods, axis=0), 1)
        self.unread = []
        self.expected = self._expected()
        rates = self.rates()
        best = int(np.argmax(rates))
        if self.current >= 0 and rates[best] < MARGIN * rates[self.current]:
            best = self.current
        if (best == self.off) != (self.current == self.off):
            self.streak = 0
        drafting = rates * self.drafts
        self.trial = int(np.argmax(drafting))
        self.hopeful = bool(drafting[self.trial] > HOPE * rates[self.off])
        self.gain = float(rates[best] / rates[self.off])
        self.current, self.held = best, HOLD if self.streak >= FRESH else 1

    def observe(self, rounds: Sequence[Round]) -> None:
        """See `Policy.observe`."""
        drafted = [r for r in rounds if self._asked(r)]
        if drafted:
            if self.probing:
                self._judge_probe(rounds)
            self.unread.append([self._likelihood(r) for r in drafted])
        if drafted or not self.judging:  # else its judgement is in the time
            self._learn_cost(rounds)

    def judged(self, right: int, seen: int) -> None:
        """Takes how many of so many tokens the drafter would have drafted while it was off."""
        if seen and self.first != self.off:
            self.judgeable = True
            p = self.survival[self.first, :, 0].clip(1e-4, 1 - 1e-4)
            self._learn(right * np.log(p) + (seen - right) * np.log1p(-p), seen)
            self._decide()
            hopeless = self.current == self.off
            self.wait = min(2 * self.wait, JUDGE[1]) if hopeless else JUDGE[0]

    def _learn(self, likelihood: np.ndarray, rounds: int) -> None:
        evidence = FORGET**rounds * self.evidence + likelihood
        self.evidence = np.maximum(evidence - evidence.max(), -DOUBT)

    def _asked(self, round: Round) -> int:
        return (round.settings or self.settings[self.used]).length

    def _likelihood(self, round: Round) -> np.ndarray:
        """Log likelihood of the accepted length under all shifts."""
        ended = round.accepted < min(round.tokens, self._asked(round))  # else what came after is not known
        key = self.used, round.accepted, ended
        if key not in self.likelihoods:
            curve = self.survival[self.used]  # [shifts, d - 1]
            likelihood = curve[:, round.accepted - 1] if round.accepted else np.ones(len(curve))
            likelihood = likelihood - curve[:, round.accepted] if ended else likelihood
            self.likelihoods[key] = np.log(np.maximum(likelihood, 1e-4))
        return self.likelihoods[key]

    def _learn_cost(self, rounds: Sequence[Round]) -> None:
        used = self.used if any(map(self._asked, rounds)) else self.off
        expected = self._known(used, sum(r.drafted for r in rounds) / len(rounds), rounds[0].requests)
        expected += self.behind if used != self.off else 0.0
        seen = math.log(max(rounds[0].total_s, 1e-9) * 1e3 / expected)
        residual = seen - self.load - (0.0 if used == self.off else self.bias[used] + self.drafting)
        if self.timed_last is None:
            self.load = seen
        elif used == self.timed_last:  # a busier machine is no news about the setting
            self.load += 0.5 * max(-1.0, min(1.0, residual))
        else:  # the machine is as busy as a round ago, so the difference is the setting's
            residual = max(-0.5, min(0.5, residual))  # or a stall
            if self.off in (used, self.timed_last):
                self.switches += 1
                sign = -1 if used == self.off else 1
                self.drafting += sign * max(SLOWEST, 1 / (2 + self.switches)) * residual
            else:
                self.timed[used] += 1
                self.bias[used] += max(SLOWEST, 1 / (8 + self.timed[used])) * residual
        self.timed_last = used

    def _known(self, candidate: int, drafted: float, requests: int) -> float:
        """`Candidate.of`, which is asked for the same again and again."""
        key = candidate, drafted, requests
        if key not in self.known:
            self.known[key] = self.candidates[candidate].of(drafted, requests)
        return self.known[key]

    def _judge_probe(self, rounds: Sequence[Round]) -> None:
        tokens = sum(r.tokens for r in rounds) / len(rounds)
        cost = self.cost * np.exp(self._excess())
        lost = cost[self.used] / cost[self.off] - tokens  # in plain steps
        wasted = lost + self.behind / cost[self.off]  # what was read for it, too
        self.gap = self.patience if lost < 0 else max(self.patience, min(2 * self.gap, int(wasted / PROBE[2])))
        if lost < 0:
            self.evidence *= 0.5  # what was seen before is old
        else:
            self.streak = 0


class Window:
    """Length of a chain from the acceptance rate over a window of rounds, as in simple schedulers; knows no costs.

    One token longer above a rate of 0.9, one shorter below 0.6, off below 0.5 until some rounds have passed.

    Args:
        longest: chain length at most.
        window: drafting rounds that are looked at.
        retry: plain rounds before a chain of 1 is tried again.
    """

    name = "window"

    def __init__(self, longest: int = 8, window: int = 16, retry: int = 64):
        if longest < 1:
            raise UserError(f"policy=window with a chain of {longest}: at least 1 is allowed")
        self.longest, self.window, self.retry = longest, window, retry
        self.nodes = self.rows = longest
        self.length, self.idle = min(4, longest), 0
        self.seen: list[tuple[int, int]] = []  # accepted, drafted

    def choose(self, requests: int = 1, waiting: int = 0) -> DraftSettings:
        """See `Policy.choose`."""
        if self.length == 0:
            self.idle += 1
            if self.idle > self.retry:
                self.length, self.idle = 1, 0
        return DraftSettings("chain", self.length)

    def observe(self, rounds: Sequence[Round]) -> None:
        """See `Policy.observe`."""
        self.seen += [(r.accepted, r.depth) for r in rounds if r.depth]
        if len(self.seen) < self.window:
            return
        accepted, drafted = map(sum, zip(*self.seen, strict=True))
        self.seen = []
        rate = accepted / drafted
        if rate < 0.5:
            self.length = 0
        elif rate < 0.6:
            self.length = max(1, self.length - 1)
        elif rate > 0.9:
            self.length = min(self.longest, self.length + 1)


POLICIES = ("adaptive", "window", "fixed")


def _shifted(survival: Sequence[float]) -> np.ndarray:
    """Survival under all shifts, [shifts, d - 1], from a curve counted on short text: nothing is certain."""
    alive = np.maximum.accumulate(np.asarray([1.0, *survival])[::-1])[::-1] * SAMPLES
    accepted = (alive[1:] + 1) / (alive[:-1] + 2)  # conditional on the depth before; 1/2 where nothing was seen
    tries = np.exp(np.where(np.arange(len(accepted)) == 0, SHIFTS[0][:, None], SHIFTS[1][:, None]))
    return np.cumprod(1 - (1 - accepted) ** tries, axis=1)
