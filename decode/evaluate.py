"""Paired measurement of drafters: what is each one really worth on this machine?

Every prompt goes through every arm in turn and then back (A B B A), so that a drifting machine load hits all arms
alike. Time is end to end (prefill and decoding); tokens are counted the same way in each arm. The speedup comes with a
paired bootstrap interval over prompts. Raw measurements are appended to a file prompt by prompt: an interrupted run
goes on from there.

    python scripts/evaluate.py --target NAME --drafter DIR --prompts headstart --out results
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from decode import stats
from decode.arms import HF, PLAIN, Arm, Run, is_plain
from decode.caveats import collect_warnings, describe_drafter, meta_of
from decode.engine import Policy
from decode.environment import environment, load_average
from decode.exactness import calibrate_epsilon, compare, target_kl
from decode.prompts import Prompt
from decode.sampling import SamplingParams
from drafters.adapter import adapted
from drafters.base import DraftSettings
from drafters.errors import UserError
from drafters.files import replacing
from drafters.target import Target

CONVENTIONS = {
    "speedup": "time per token of plain over the arm's, end to end (prefill + decoding), pooled over prompts and runs",
    "reference": "the plain arm that speedup and exactness are against; plain+NAME is NAME's adapted target",
    "target_kl": "KL(original || adapted target) on plain's outputs, mean over tokens, in nats; null: target unchanged",
    "speedup_ci95": "95% percentile interval of a paired bootstrap over prompts, 10,000 resamples, seed 0",
    "tau": "tokens per target step after prefill, the target's own token (bonus) included, pooled over steps",
    "tau_macro": "mean of each request's tau",
    "accepted_per_step": "accepted draft tokens per target step, bonus left out",
    "survival": "share of steps that accepted at least i draft tokens; steps cut by the end of the text are censored",
    "conditional_acceptance": "share accepted at depth i among steps that accepted i-1 and drafted a token at depth i",
    "rejection_histogram": "accepted count -> steps, cut steps left out",
    "tpot_ms": "decoding time per token after the first, one value a request",
    "peak_memory_mb": "largest over requests; CUDA: allocated, else resident size of the process, weights included",
}

Settings = DraftSettings | Policy
Records = list[dict[str, Any]]
GREEDY = SamplingParams()


def evaluate(
    target: Target,
    drafters: Mapping[str, Any],
    prompts: Sequence[Prompt],
    *,
    settings: Settings | Mapping[str, Settings] | None = None,
    sampling: SamplingParams = GREEDY,
    max_new_tokens: int = 128,
    runs: int = 2,
    warmup: int = 1,
    hf_generate: bool = True,
    progress: bool = True,
    raw_path: Path | None = None,
    prompts_name: str = "prompts",
) -> dict[str, Any]:
    """Measure plain decoding, each drafter and HF `generate` on the same prompts.

    Args:
        drafters: name -> drafter.
        settings: draft settings or policies by drafter's name, or settings for all drafters; where left out, the
            drafter's `default_settings`. A policy belongs to one drafter.
        sampling: temperature 0 also checks that every arm's output is the target's own.
        runs: passes a prompt makes over the arms, every second one in reverse order and without HF `generate`; where
            their number is odd, every second prompt makes them backwards. More prompts tell more than more passes.
        warmup: untimed requests per arm before the first measurement.
        raw_path: JSONL file for raw measurements; an equal evaluation resumes from it, that of another one is renamed.

    Returns:
        The report as plain JSON data; see `CONVENTIONS` for what the numbers mean. Its key "outputs" holds each
        prompt's text by arm as (text, drafted and accepted) pieces, for `decode.report.write_report`.

    Raises:
        UserError: nothing to measure, or a prompt that does not fit into the target.
    """
    _check(drafters, prompts, runs, max_new_tokens)
    arms = _arms(drafters, settings, hf_generate)
    requests = {p.id: _render(target, p, max_new_tokens) for p in prompts}
    load_before = load_average()
    described = {
        "max_new_tokens": max_new_tokens,
        "runs": runs,
        "warmup": warmup,
        "sampling": asdict(sampling),
        "draft": {arm.name: _describe(arm.settings) for arm in arms if arm.drafter is not None},
    }
    facts = environment(target)
    key = _digest([described, facts, target.fingerprint, requests, [(a.name, identity(a.drafter)) for a in arms]])
    records = _resume(raw_path, key, [p.id for p in prompts])
    _measure(target, arms, prompts, requests, records, sampling, described, raw_path, progress)

    by_id = {r["id"]: r for r in records}
    records = [by_id[p.id] for p in prompts]
    for arm in arms:
        for record in records:
            record["arms"][arm.name] = [Run(**run) for run in record["arms"][arm.name]]
    summaries = [summarize(arm.name, records, arm.reference) for arm in arms]
    _add_exactness(target, arms, summaries, records, requests, sampling, described)
    facts |= {"load_before": load_before, "load_after": load_average()}
    report: dict[str, Any] = {
        "environment": facts,
        "target": {
            "name": target.name,
            "fingerprint": target.fingerprint,
            "template_hash": target.fingerprint.get("template"),
        },
        "settings": described | {"conventions": CONVENTIONS},
        "prompts": {"name": prompts_name, "count": len(prompts)},
        "drafters": {
            arm.name: describe_drafter(arm.drafter) | {"target_kl": _moved(target, arm, records, requests)}
            for arm in arms
            if arm.drafter is not None
        },
        "arms": summaries,
    }
    report["warnings"] = collect_warnings(report)
    report["outputs"] = outputs(target, prompts, records, [arm.name for arm in arms])
    return report


def _check(drafters: Mapping[str, Any], prompts: Sequence[Prompt], runs: int, max_new_tokens: int) -> None:
    if not prompts:
        raise UserError("there is no prompt to measure on")
    if runs < 1:
        raise UserError(f"runs={runs} must be at least 1")
    if max_new_tokens < 2:
        raise UserError(
            f"max_new_tokens={max_new_tokens}: the first token comes from prefill, so at least 2 are needed"
        )
    for name in drafters:
        if is_plain(name) or name == HF:
            raise UserError(f"a drafter can't be named {name!r}, that is an arm of its own; use NAME=DIR")


def _arms(
    drafters: Mapping[str, Any], settings: Settings | Mapping[str, Settings] | None, hf_generate: bool
) -> list[Arm]:
    arms = [Arm(PLAIN)]
    for name, drafter in drafters.items():
        chosen = settings.get(name) if isinstance(settings, Mapping) else settings
        chosen = chosen or getattr(drafter, "default_settings", None) or DraftSettings()
        adapts = drafter if getattr(drafter, "adapter", None) is not None else None
        if adapts is not None:
            arms.append(Arm(f"{PLAIN}+{name}", adapts=adapts))
        arms.append(Arm(name, drafter, chosen, adapts))
    return [*arms, Arm(HF)] if hf_generate else arms


def _describe(settings: Settings) -> dict[str, Any]:
    return asdict(settings) if isinstance(settings, DraftSettings) else {"policy": settings.name}


def _render(target: Target, prompt: Prompt, max_new_tokens: int) -> list[int]:
    ids = target.render(prompt.messages, True)
    if len(ids) + max_new_tokens > target.max_positions:
        raise UserError(
            f"prompt {prompt.id} has {len(ids)} tokens; with max_new_tokens={max_new_tokens} that exceeds the "
            f"target's {target.max_positions} positions"
        )
    return ids


# --- measurement ------------------------------------------------------------------------------------------------------


def _measure(
    target: Target,
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    requests: Mapping[str, list[int]],
    records: Records,
    sampling: SamplingParams,
    described: Mapping[str, Any],
    raw_path: Path | None,
    progress: bool,
) -> None:
    """Run what `records` lacks and append it there and to `raw_path`, prompt by prompt."""
    done = {r["id"] for r in records}
    missing = [p for p in prompts if p.id not in done]
    backwards = {p.id for p in prompts[1::2]} if described["runs"] % 2 else set()
    if not missing:
        return
    runs, limit = described["runs"], described["max_new_tokens"]
    for index in range(described["warmup"]):
        for arm in arms:
            arm.run(target, requests[missing[index % len(missing)].id], sampling, min(limit, 32))
    order = list(_interleaved(arms, runs))
    with tqdm(total=len(missing) * len(order), unit="request", disable=not progress) as bar:
        for prompt in missing:
            measured: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
            for arm, index in reversed(order) if prompt.id in backwards else order:
                seeded = replace(sampling, seed=sampling.seed + index)  # each pass its own draws, the same in all arms
                run = arm.run(target, requests[prompt.id], seeded, limit)
                measured[arm.name].append(asdict(run))
                bar.set_postfix_str(f"{arm.name} {len(run.tokens) / run.seconds:.1f} tokens/s", refresh=False)
                bar.update()
            record = {"id": prompt.id, "category": prompt.category, "arms": measured}
            records.append(record)
            if raw_path is not None:
                with raw_path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")


def _interleaved(arms: Sequence[Arm], runs: int) -> Iterator[tuple[Arm, int]]:
    """A B C, C B A, A B C, ...: a linear drift of the machine then adds the same to every arm.

    HF `generate`, the slowest by far, stands in the middle and runs once there and back.
    """
    ours = [arm for arm in arms if arm.name != HF]
    for index in range(runs):
        for arm in arms if index % 2 == 0 else reversed(ours):
            yield arm, index


def _resume(path: Path | None, key: str, wanted: Sequence[str]) -> Records:
    """Records of an interrupted evaluation with the same key; else an empty list. Leaves `path` ready to append to."""
    if path is None:
        return []
    records: Records = []
    if path.is_file():
        old = path.read_bytes()
        head, *lines = old.decode("utf-8", "replace").splitlines(keepends=True) or [""]
        if head.strip() == json.dumps({"key": key}):
            try:  # a line without its end was being written when the run was stopped
                records = [json.loads(line) for line in lines if line.endswith("\n")]
            except ValueError as error:
                raise UserError(f"{path}: a damaged line ({error}); delete the file to measure anew") from error
        elif lines:  # measurements of something else may have taken hours
            path.replace(path.with_name(f"{path.stem}-{hashlib.sha256(old).hexdigest()[:8]}{path.suffix}"))
    path.parent.mkdir(parents=True, exist_ok=True)
    records = [r for r in records if r["id"] in set(wanted)]
    with replacing(path) as partial:
        partial.write_text("".join(json.dumps(row) + "\n" for row in ({"key": key}, *records)), encoding="utf-8")
    return records


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def identity(drafter: Any) -> str | None:
    """What makes a drafter itself: class, plain settings, metadata and, where it has weights, their bytes."""
    if drafter is None:
        return None
    digest = hashlib.sha256(type(drafter).__qualname__.encode())
    parts = getattr(drafter, "drafters", {})  # of a router or a merged drafter
    digest.update(json.dumps({name: identity(part) for name, part in parts.items()}).encode())
    plain = {k: v for k, v in vars(drafter).items() if isinstance(v, int | float | str | tuple)}
    digest.update(json.dumps([plain, meta_of(drafter)], sort_keys=True, default=str).encode())
    if isinstance(drafter, torch.nn.Module):
        for name, tensor in drafter.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# --- summaries --------------------------------------------------------------------------------------------------------


def summarize(name: str, records: Records, reference: str = PLAIN) -> dict[str, Any]:
    """Statistics of one arm over records whose runs are `Run`s, against another; the caller fills in `exact_match`."""
    runs: list[Run] = [run for r in records for run in r["arms"][name]]
    by_run = [stats.steps_of(run.rounds, run.prompt_tokens, run.finish) for run in runs]
    steps = [step for steps in by_run for step in steps]
    tokens = sum(len(run.tokens) for run in runs)
    forwards = len(steps) + len(runs) if name != HF else tokens  # one prefill a request gives its first token
    pairs = _pairs(name, records, reference)
    return {
        "name": name,
        "reference": reference,
        "tokens_per_second": tokens / sum(run.seconds for run in runs),
        "speedup": stats.speedup(*pairs),
        "speedup_ci95": stats.paired_bootstrap(*pairs),
        "speedup_median": statistics.median(
            stats.speedup([a], [b], [c], [d]) for a, b, c, d in zip(*pairs, strict=True)
        ),
        "tau": stats.tau(steps),
        "tau_macro": statistics.fmean(stats.tau(steps) for steps in by_run),
        "accepted_per_step": stats.accepted_per_step(steps),
        "survival": stats.survival(steps),
        "conditional_acceptance": stats.conditional_acceptance(steps),
        "rejection_histogram": stats.rejection_histogram(steps),
        "target_forwards_per_token": forwards / tokens,
        "ttft_ms": stats.percentiles(1e3 * run.ttft_s for run in runs),
        "tpot_ms": stats.percentiles(1e3 * run.decode_s / (len(run.tokens) - 1) for run in runs if len(run.tokens) > 1),
        "cost_split": stats.cost_split(steps),
        "peak_memory_mb": max(run.peak_memory_mb for run in runs),
        "exact_match": None,
        "by_category": _by_category(name, records, reference),
        "by_context": stats.acceptance_by_context(steps),
        "decisions": _decisions(runs, [r["arms"][name][0] for r in records]),
    }


def _decisions(runs: Sequence[Run], first: Sequence[Run]) -> dict[str, Any] | None:
    """What a policy chose: share of rounds by setting, and nodes drafted by round, prompt after prompt."""
    asked = Counter(text for run in runs for text in run.asked)
    if not asked:
        return None
    share = {text: count / asked.total() for text, count in asked.most_common()}
    return {"share": share, "drafted": [int(row[0]) for run in first for row in run.rounds][:600]}


def _pairs(name: str, records: Records, reference: str) -> tuple[list[float], list[int], list[float], list[int]]:
    """Per prompt, summed over its runs: the reference's seconds and tokens, the arm's seconds and tokens."""

    def seconds(arm: str) -> list[float]:
        return [sum(run.seconds for run in r["arms"][arm]) for r in records]

    def tokens(arm: str) -> list[int]:
        return [sum(len(run.tokens) for run in r["arms"][arm]) for r in records]

    return seconds(reference), tokens(reference), seconds(name), tokens(name)


def _by_category(name: str, records: Records, reference: str) -> dict[str, dict[str, Any]]:
    groups: dict[str, Records] = {}
    for record in records:
        if record["category"] is not None:
            groups.setdefault(record["category"], []).append(record)
    table: dict[str, dict[str, Any]] = {}
    for category, members in groups.items():
        runs = [run for r in members for run in r["arms"][name]]
        steps = [s for run in runs for s in stats.steps_of(run.rounds, run.prompt_tokens, run.finish)]
        table[category] = {
            "tokens_per_second": sum(len(run.tokens) for run in runs) / sum(run.seconds for run in runs),
            "speedup": stats.speedup(*_pairs(name, members, reference)),
            "tau": stats.tau(steps),
            "prompts": len(members),
        }
    return table


def _add_exactness(
    target: Target,
    arms: Sequence[Arm],
    summaries: list[dict[str, Any]],
    records: Records,
    requests: Mapping[str, list[int]],
    sampling: SamplingParams,
    described: dict[str, Any],
) -> None:
    """Fill in `exact_match` (greedy only); plain is held against its own second run, an adapted arm against its own."""
    if sampling.temperature > 0:
        return
    samples = [(requests[r["id"]], r["arms"][PLAIN][0].tokens) for r in records[:3]]
    epsilon = calibrate_epsilon(target, samples)
    described["near_tie_epsilon"] = epsilon
    for arm, summary in zip(arms, summaries, strict=True):
        index = -1 if is_plain(arm.name) else 0
        cases = [(r["id"], requests[r["id"]], r["arms"][arm.reference][0], r["arms"][arm.name][index]) for r in records]
        with adapted(arm.adapts):
            summary["exact_match"] = compare(target, sampling, cases, epsilon)


def _moved(target: Target, arm: Arm, records: Records, requests: Mapping[str, list[int]]) -> float | None:
    """How far the arm's adapter moved the target on the original's own answers, in nats a token; None without one."""
    if arm.adapts is None:
        return None
    return target_kl(target, arm.adapts, [(requests[r["id"]], r["arms"][PLAIN][0].tokens) for r in records])


def outputs(target: Target, prompts: Sequence[Prompt], records: Records, names: Sequence[str]) -> list[dict[str, Any]]:
    """Each prompt's first output by arm, in (text, drafted and accepted) pieces: {id, category, prompt, arms}."""
    return [
        {
            "id": prompt.id,
            "category": prompt.category,
            "prompt": prompt.messages[-1]["content"],
            "arms": {name: _pieces(target.tokenizer, record["arms"][name][0]) for name in names},
        }
        for prompt, record in zip(prompts, records, strict=True)
    ]


def _pieces(tokenizer: Any, run: Run) -> list[tuple[str, bool]]:
    flags = [False]  # the first token is prefill's
    for _, _, accepted, emitted, *_ in run.rounds:
        drafted = min(int(accepted), int(emitted))
        flags += [True] * drafted + [False] * (int(emitted) - drafted)
    flags += [False] * (len(run.tokens) - len(flags))  # HF generate has no rounds
    pieces: list[tuple[str, bool]] = []
    shown = ""
    for end in range(1, len(run.tokens) + 1):
        if end < len(run.tokens) and flags[end] == flags[end - 1]:
            continue
        # decoding a prefix keeps the spaces between pieces; half a character waits for the next piece
        text = tokenizer.decode(run.tokens[:end], skip_special_tokens=True)
        if text.endswith("\ufffd") and end < len(run.tokens):
            continue
        pieces.append((text[len(shown) :], flags[end - 1]))
        shown = text
    return pieces
