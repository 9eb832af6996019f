"""How to serve a drafter: launch lines, draft length per concurrency, a rollout profile, and what must match.

    python scripts/evaluate.py --drafter runs/smollm2-eagle3 --chain 5 --out runs/eval
    python scripts/bench.py --drafter runs/smollm2-eagle3 --dtype auto --out runs/bench
    python scripts/serve_profile.py runs/smollm2-eagle3 --report runs/eval --bench runs/bench

Reads measured results only; what was not measured is said to be so.
"""

import argparse
import contextlib
import json
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decode.rollout import draft_costs, plan, rollout, verify_costs
from drafters.adapter import ADAPTER
from drafters.build import TrainedDrafter
from drafters.card import measured
from drafters.checkpoint import load_drafter
from drafters.errors import UserError, cli
from drafters.export import homes_of
from drafters.files import read_folder, read_json
from drafters.locate import resolve_path
from drafters.provenance import revision
from drafters.readers import read_checkpoint
from drafters.servers import NAMES, launch
from drafters.target import Target, load_target


def parser() -> argparse.ArgumentParser:
    """Builds the command line."""
    p = argparse.ArgumentParser(description="Launch lines and a rollout profile of a drafter, from measured results.")
    p.add_argument("run", metavar="RUN_DIR", help="folder of the drafter")
    p.add_argument("--report", metavar="DIR", help="folder of an evaluation of it with --chain")
    p.add_argument("--bench", metavar="DIR", help="folder of scripts/bench.py on the serving machine, for v(n)")
    p.add_argument("--target", help="hub id, folder or GGUF file; default: the one the drafter was trained for")
    p.add_argument(
        "--exports", default="runs/exports", metavar="DIR", help="where the exports lie, one folder a server"
    )
    p.add_argument("--json", metavar="FILE", help="write the profile there too")
    return p


def main() -> None:
    """Prints the profile."""
    args = parser().parse_args()
    bench = read_json(Path(args.bench) / "bench.json") if args.bench else None
    found = read_checkpoint(read_folder(args.run))
    name = args.target or (found.meta.get("target") or {}).get("name") or found.meta.get("made_for")
    if not name:
        raise UserError(f"{args.run} does not say which target it is for; name it with --target")
    target = load_target(name, pack=False)
    drafter = load_drafter(args.run, target, pack=False)
    results = measured(drafter, args.run, target, args.report)
    profile: dict[str, Any] = {"run": args.run, "kind": drafter.kind, "target": name}
    profile["plan"], profile["why_no_plan"] = lengths(drafter.kind, results, bench)
    profile["rollout"] = rollout(profile["plan"], (results or {"arm": {}})["arm"].get("by_context") or {})
    length = profile["rollout"]["length"]
    profile["launch"] = launch_lines(drafter, args.run, target, resolve_path(name), Path(args.exports), length or 3)
    merged = getattr(drafter, "adapter", None) is not None
    profile["adapter"] = str(Path(args.run) / ADAPTER) if merged else None
    profile["compatibility"] = compatibility(drafter, target)
    if args.json:
        Path(args.json).write_text(json.dumps(profile, indent=2) + "\n")
    print("\n".join(text(profile, results, bench)))


def lengths(kind: str, results: Any, bench: Any) -> tuple[list[dict[str, Any]], str | None]:
    """Rows of `decode.rollout.plan`; or none, and what is missing for them."""
    if results is None:
        return [], "no evaluation: run scripts/evaluate.py with --chain 5 and pass --report"
    draft, survival = results["draft"], results["arm"]["survival"]
    if draft.get("kind") != "chain" or draft["length"] < 1:
        shape = f"a {draft['kind']}" if "kind" in draft else f"by policy {draft['policy']}"
        return [], f"the evaluation drafted {shape}, but servers draft chains: run it with --chain 5"
    if results["arm"]["cost_split"] is None or not survival:
        return [], "the evaluation holds no survival or no split of a step"
    if bench is None:
        return [], "no benchmark of the serving machine: run scripts/bench.py there and pass --bench"
    mine, theirs = results["environment"].get("dtype"), (bench.get("environment") or {}).get("dtype")
    if mine != theirs:
        return [], f"the evaluation ran in {mine}, the benchmark in {theirs}; measure both in one dtype"
    costs = draft_costs(kind, results["arm"], results["plain"], draft["length"])
    return plan(survival[: draft["length"]], {1: 1.0} | verify_costs(bench), costs), None


def launch_lines(
    drafter: TrainedDrafter, run: str, target: Target, served: str, exports: Path, length: int
) -> dict[str, dict[str, str]]:
    """Server -> export, baseline and speculative command, for the servers that this drafter can be exported for."""
    lines = {}
    for server in homes_of(drafter, target):
        folder = exports / server
        line = partial(
            launch, server, drafter.kind, served, folder, taps=drafter.taps,
            draft_vocabulary=drafter.draft_ids is not None,
        )  # fmt: skip
        with contextlib.suppress(UserError):  # research code and a converter have no launch line
            lines[server] = {
                "export": shlex.join(["python", "scripts/export.py", run, "--to", server, "--out", str(folder)]),
                "baseline": line(length=0),
                "speculative": line(length=length),
            }
    return lines


def compatibility(drafter: Any, target: Target) -> list[dict[str, Any]]:
    """What must match between drafter and target folder: item, whether it does (None: not recorded), detail."""
    stored, now = drafter.meta.get("target") or {}, target.fingerprint
    out = []
    for key in ("config", "tokenizer", "template", "weights"):
        same = None if key not in stored else stored[key] == now[key]
        detail = now[key] if same else f"drafter {stored.get(key, 'not recorded')}, target {now[key]}"
        out.append({"item": key, "ok": same, "detail": detail})
    stops = {int(i): str(target.tokenizer.convert_ids_to_tokens(int(i))) for i in target.eos_token_ids}
    ids: Tensor | None = drafter.draft_ids
    lost = [] if ids is None else [t for i, t in stops.items() if not bool(torch.isin(torch.tensor(i), ids.cpu()))]
    detail = ", ".join(f"{t} ({i})" for i, t in stops.items()) + (f"; never drafted: {', '.join(lost)}" if lost else "")
    out.append({"item": "stop tokens", "ok": bool(stops) and not lost, "detail": detail or "the target names none"})
    special = dict(sorted(target.tokenizer.special_tokens_map.items()))
    outside = [t for t in target.tokenizer.all_special_ids if t >= target.vocab_size]
    out.append({"item": "special tokens", "ok": not outside, "detail": json.dumps(special, default=str)})
    recorded = getattr(target.model.config, "_commit_hash", None) or "unknown (a local folder)"
    detail = f"target {recorded}, drafter made with headstart {drafter.meta.get('headstart')}"
    out.append({"item": "revisions", "ok": None, "detail": f"{detail}, this checkout {revision()}"})
    return out


def text(profile: dict[str, Any], results: Any, bench: Any) -> list[str]:
    """The profile for people."""
    lines = [f"{profile['run']}: {profile['kind']} for {profile['target']}", ""]
    lines.append("Launch" if profile["launch"] else "No server loads this drafter: it decodes with headstart only")
    if profile["adapter"] and profile["launch"]:
        lines.append(f"  serve {profile['target']} with {profile['adapter']} merged into it, in every line below")
    for server, commands in profile["launch"].items():
        lines += [f"  {NAMES[server]}", *(f"    {what}: {line}" for what, line in commands.items())]
    lines += ["", "Draft length per concurrency"]
    if profile["why_no_plan"]:
        lines.append(f"  no claim: {profile['why_no_plan']}")
    for row in profile["plan"]:
        if row["length"] is None:
            lines.append(f"  {row['concurrency']:>3} requests: not measured that wide")
            continue
        what = f"chain of {row['length']}" if row["length"] else f"off (best: chain of {row['tried']})"
        lines.append(
            f"  {row['concurrency']:>3} requests: {what}; {row['speedup']:.2f}x expected at {row['tau']:.2f} tokens "
            f"a step, break-even {row['break_even']:.2f}"
        )
    if profile["plan"]:
        survival = ", ".join(f"{share:.2f}" for share in results["arm"]["survival"])
        lines += [
            f"  from survival {survival} on {results['prompts']['count']} prompts, and v(n) on "
            f"{bench['environment'].get('cpu')} in {results['environment']['dtype']}",
            "  a model, not a measurement of a server: rows of many requests are taken to cost what rows of one cost",
        ]
    if results is not None and results["draft"].get("kind") == "chain" and results["draft"]["length"] < 5:
        lines.append(f"  the evaluation drafted {results['draft']['length']} at most; --chain 5 would show longer ones")
    lines += ["", "Rollout", *_rollout_text(profile)] if profile["launch"] else []
    lines += ["", "Compatibility"]
    marks = {True: "ok", False: "DIFFERS", None: "-"}
    return lines + [f"  {marks[i['ok']]:>7}  {i['item']}: {i['detail']}" for i in profile["compatibility"]]


def _rollout_text(profile: dict[str, Any]) -> list[str]:
    r = profile["rollout"]
    if profile["why_no_plan"]:
        return ["  no claim"]
    if r["max_concurrency"] is None:
        return ["  keep the baseline: no concurrency here gains 5 % by these figures"]
    k, tau = r["length"], r["switch_off_tau"]
    stages = ", then ".join(f"{share:.0%}" for share in r["stages"])
    return [
        f"  baseline beside speculative on the same target; share of traffic {stages}",
        f"  limit the speculative server to {r['max_concurrency']} requests at once; chain of {k}",
        f"  acceptance was measured at contexts of {', '.join(r['contexts'])} tokens, nowhere else",
        f"  switch off below {tau:.2f} tokens a step. In vLLM's metrics: 1 + {k} x accepted_tokens / draft_tokens "
        "(vllm:spec_decode_num_accepted_tokens_total, vllm:spec_decode_num_draft_tokens_total), so below "
        f"{(tau - 1) / k:.0%} of the drafts accepted",
    ]


if __name__ == "__main__":
    cli(main)()
