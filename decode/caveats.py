"""What a reader must know before trusting or blaming a result: mismatches, slow arms, estimates that were off."""

from __future__ import annotations

import os
from typing import Any

from decode.arms import HF, is_plain

ESTIMATE_TOLERANCE = 0.2

# Orientation only, so that a small demo's weak figure does not read as a bug (speculators #751). By training tokens.
# Measured with SmolLM2-135M on other prompts than the text: 1.19 to 1.25 after 0.03 to 0.05 million (here), 1.37 to
# 1.47 after 0.2 to 0.5 million (DESIGN.md, decision 10). Published EAGLE heads on 7B to 13B targets: 3.5 to 6.7.
# Between the two there is no measurement of ours, and nothing is claimed.
EXPECTED_TAU = (
    (1_000_000, "1.2 to 1.5 (chains, a 135M target, under a million tokens)"),
    (20_000_000, None),
    (float("inf"), "3.5 to 6.7 (published EAGLE heads, 7B to 13B targets)"),
)


def meta_of(drafter: Any) -> dict[str, Any]:
    """What `headstart.json` says about a drafter; empty for the untrained ones and foreign checkpoints."""
    return getattr(drafter, "meta", None) or {}


def describe_drafter(drafter: Any) -> dict[str, Any]:
    """A drafter's kind, its weights' digest and, from `headstart.json`, its target, data size and training estimate."""
    meta = meta_of(drafter)
    data = meta.get("data") or {}
    samples = next((data[k] for k in ("samples", "rows", "conversations", "examples") if k in data), None)
    return {
        "kind": getattr(drafter, "kind", type(drafter).__name__),
        "weights": getattr(drafter, "digest", None) or None,  # by which a model card finds it, whatever its name
        "training_samples": samples,
        "training_tokens": data.get("tokens"),
        "expected_tau": expected_tau(data.get("tokens")),
        "tau_estimate": (meta.get("results") or {}).get("tau_estimate"),
        "survival_estimate": (meta.get("results") or {}).get("survival_estimate"),
        "trained_for": (meta.get("target") or {}).get("name"),
        "choices": dict(getattr(drafter, "counts", None) or {}),  # a router's, over all rounds in this process
        "warnings": list(meta.get("warnings") or ()),  # `load_drafter` compares target fingerprints
    }


def expected_tau(tokens: int | None) -> str | None:
    """The range of tau to expect after training on so many tokens; None where no measurement says."""
    if tokens is None:
        return None
    return next(text for limit, text in EXPECTED_TAU if tokens <= limit)


def collect_warnings(report: dict[str, Any]) -> list[str]:
    """Read a report's warnings off its own numbers, the gravest first."""
    found: list[str] = []
    arms = {arm["name"]: arm for arm in report["arms"]}
    for name, arm in arms.items():
        found += _exactness_warnings(name, arm)
    for name, drafter in report["drafters"].items():
        found += [f"{name}: {line}" for line in drafter["warnings"]]
        found += _adapter_warnings(name, drafter, arms[name])
        found += _estimate_warnings(name, drafter, arms[name], report["settings"].get("draft", {}).get(name, {}))
        found += _speed_warnings(name, arms[name])
    if HF in arms and arms[HF]["speedup"] > 1.05:
        found.append(
            f"transformers' generate is {arms[HF]['speedup']:.2f}x as fast as plain decoding here: "
            "the baseline is slow, and speedups over it flatter"
        )
    found += _setup_warnings(report)
    return found


def _exactness_warnings(name: str, arm: dict[str, Any]) -> list[str]:
    match = arm["exact_match"]
    if match is None or match["verdict"] != "FAIL":
        return []
    if is_plain(name):
        return [
            f"{name} decoding gave two different greedy outputs for one prompt: "
            "this machine's results can't be compared"
        ]
    if name == HF:
        return [
            "transformers' generate and our plain decoding differ by more than a near tie: check template and target"
        ]
    gap = "a stop rule" if match["logit_gap"] is None else f"a logit gap of up to {match['logit_gap']:.3g}"
    return [
        f"{name} is NOT lossless here: greedy output differs from {arm['reference']} decoding by {gap}; "
        "its speedup is void"
    ]


def _adapter_warnings(name: str, drafter: dict[str, Any], arm: dict[str, Any]) -> list[str]:
    if drafter.get("target_kl") is None:
        return []
    return [
        f"{name} CHANGES THE TARGET: it was trained with an adapter, which moves the target's distribution by "
        f"{drafter['target_kl']:.3g} nats a token (KL); its text is not the original's, and its speedup and exactness "
        f"are against {arm['reference']}, the adapted target decoded plainly"
    ]


def _estimate_warnings(name: str, drafter: dict[str, Any], arm: dict[str, Any], draft: dict[str, Any]) -> list[str]:
    """Compares like with like: the training estimate of a chain, as deep as what was drafted here."""
    if "policy" in draft:
        return []  # drafts of changing length have no estimate to be held against
    estimate = drafter["tau_estimate"]
    if drafter.get("survival_estimate") and draft.get("length"):
        estimate = 1 + sum(drafter["survival_estimate"][: draft["length"]])
    if not estimate or abs(arm["tau"] - estimate) <= ESTIMATE_TOLERANCE * estimate:
        return []
    if arm["tau"] > estimate and draft.get("kind") == "tree":
        return []  # that is what a tree is for
    if arm["tau"] < estimate:
        causes = (
            "other prompts than the training text, sampling at another temperature, another chat template or target, "
            "a shorter draft than the training unrolled, or a shift between trained and drafted positions"
        )
    else:
        causes = "easier prompts than the validation text, or a tree where training estimated a chain"
    return [f"{name}: tau {arm['tau']:.2f} here, {estimate:.2f} estimated in training; likely causes: {causes}"]


def is_slower(arm: dict[str, Any]) -> bool:
    """Whether an arm is slower than plain decoding, chance aside."""
    interval = arm["speedup_ci95"]
    return arm["speedup"] < 1 if interval is None else interval[1] < 1


def _speed_warnings(name: str, arm: dict[str, Any]) -> list[str]:
    if is_slower(arm):
        split = arm["cost_split"]
        cost = (
            ""
            if split is None
            else "; a step spends " + ", ".join(f"{v['ms']:.1f} ms on {k}" for k, v in split.items())
        )
        return [f"{name} is SLOWER than plain decoding ({arm['speedup']:.2f}x) at tau {arm['tau']:.2f}{cost}"]
    interval = arm["speedup_ci95"]
    if interval is not None and interval[0] < 1:
        return [
            f"{name}: the speedup's interval includes 1, so it may be no faster than plain; use more prompts or runs"
        ]
    return []


def _setup_warnings(report: dict[str, Any]) -> list[str]:
    found: list[str] = []
    if report["prompts"]["count"] < 10:
        found.append(f"only {report['prompts']['count']} prompts: read the intervals, not the point estimates")
    if report["settings"]["runs"] % 2 and report["prompts"]["count"] == 1:
        found.append(f"runs={report['settings']['runs']} is odd: a drift of the machine's speed does not cancel")
    load = report["environment"].get("load_before")
    if load and load[0] > (os.cpu_count() or 1) + 0.5:  # a training that just ended here fills its own cores
        found.append(f"the machine was busy before the measurement began (load {load[0]}); absolute rates are too low")
    return found
