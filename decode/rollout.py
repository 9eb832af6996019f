"""How to roll a drafter out on a server: draft length per concurrency, break-even, when to switch off.

The cost model of `decode.cost`, for b requests at once: a speculative step with k drafts reads b (k + 1) rows, a plain
one b, so S = E / (v(b (k + 1)) / v(b) + d / T1). E comes from the measured survival of a chain, v from a benchmark of
this machine, d from the measured split of a step. Drafting is taken to grow with the rows as the target does. Where a
number was not measured there is no claim.
"""

from collections.abc import Mapping, Sequence
from typing import Any

CONCURRENCY = (1, 2, 4, 8, 16, 32)
MARGIN = 1.05
"""A speedup below this is noise, and not worth a more complicated server."""


def verify_costs(bench: Mapping[str, Any]) -> dict[int, float]:
    """v(n) by rows from `bench.json`: the cost of a step over n rows in steps over one."""
    return {int(key[1:]): value for key, value in bench.items() if key[:1] == "v" and key[1:].isdigit()}


def cost_at(costs: Mapping[int, float], rows: int) -> float | None:
    """v(rows), linear between measured rows; None beyond them."""
    below = max((n for n in costs if n <= rows), default=None)
    above = min((n for n in costs if n >= rows), default=None)
    if below is None or above is None:
        return None
    share = (rows - below) / (above - below) if above > below else 0.0
    return costs[below] + share * (costs[above] - costs[below])


def draft_costs(kind: str, arm: Mapping[str, Any], plain: Mapping[str, Any], length: int) -> list[float]:
    """Drafting time of chains of 1..length in plain steps, from the measured split of a step of `length` drafts."""
    whole = arm["cost_split"]["draft"]["ms"] / plain["cost_split"]["verify"]["ms"]
    parallel = kind in ("medusa",)  # heads that run side by side cost the same whatever the length
    return [whole if parallel else whole * k / length for k in range(1, length + 1)]


def plan(
    survival: Sequence[float],
    costs: Mapping[int, float],
    draft: Sequence[float],
    concurrency: Sequence[int] = CONCURRENCY,
) -> list[dict[str, Any]]:
    """The best chain at each concurrency.

    Args:
        survival: [i - 1], share of steps that accepted at least i drafts of a chain.
        costs: v(n), see `verify_costs`.
        draft: [k - 1], drafting time of a chain of k in plain steps.
        concurrency: requests decoded at once.

    Returns:
        One row each: concurrency, length (0: off), tau and speedup expected, and break_even, the tau below which that
        length loses; length None where the step was not measured that wide.
    """
    table: list[dict[str, Any]] = []
    for b in concurrency:
        base = cost_at(costs, b)
        options: list[dict[str, Any]] = []
        for k in range(1, min(len(survival), len(draft)) + 1):
            wide = cost_at(costs, b * (k + 1))
            if base and wide:
                step = wide / base + draft[k - 1]
                tau = 1.0 + sum(survival[:k])
                options.append({"length": k, "tau": tau, "speedup": tau / step, "break_even": step})
        if not options:
            table.append({"concurrency": b, "length": None})
            continue
        best = max(options, key=lambda o: o["speedup"])
        on = best["speedup"] >= MARGIN
        table.append({"concurrency": b, **best, "length": best["length"] if on else 0, "tried": best["length"]})
    return table


def rollout(rows: Sequence[Mapping[str, Any]], context: Mapping[str, Any]) -> dict[str, Any]:
    """A rollout profile: shares of traffic, limits, and when to switch off.

    Args:
        rows: from `plan`.
        context: `by_context` of the measured arm.

    Returns:
        stages (shares of traffic for the speculative servers beside the baseline), max_concurrency (None: nowhere worth
        it), length and switch_off_tau there, and contexts measured.
    """
    paying = [r for r in rows if r.get("length")]
    if not paying:
        return {"stages": [0.0], "max_concurrency": None, "length": 0, "switch_off_tau": None, "contexts": []}
    # one length serves up to the highest concurrency in an unbroken run from the lowest
    run = []
    for row in rows:
        if not row.get("length"):
            break
        run.append(row)
    last = (run or paying)[-1]
    return {
        "stages": [0.05, 0.25, 1.0],
        "max_concurrency": last["concurrency"],
        "length": last["length"],
        "switch_off_tau": last["break_even"],
        "contexts": sorted(context, key=lambda span: int(span.partition("-")[0])),
    }
