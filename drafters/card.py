"""A drafter as a folder for the Hub: our own layout and a model card that states measured results and nothing else."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from drafters.build import TrainedDrafter
from drafters.checkpoint import load_drafter, save_drafter
from drafters.errors import UserError
from drafters.export import homes_of, new_folder
from drafters.files import META, read_json
from drafters.servers import NAMES
from drafters.target import Target

PATH_KEYS = {"output", "folder", "prompts", "features", "init"}  # of the recipe: they name the author's folders
PAPERS = {"medusa": "2401.10774", "eagle1": "2401.15077", "eagle3": "2503.01840"}

CARD = """\
---
{header}
---

# {kind} drafter for {short}

Guesses the next few tokens of one target model; the target checks them, so {text}. It belongs to that
target only.

| | |
|---|---|
{table}

## Measured

{measured}
## Use

```python
from decode.engine import generate
{imports}from drafters.checkpoint import load_drafter
from drafters.target import load_target

target = load_target({target})
drafter = load_drafter("PATH_OF_THIS_FOLDER", target)
{call}
```

{servers}
"""
CALL = 'print(generate(target, drafter, "Why is the sky blue?", max_new_tokens=64).text)'
ADAPTED = """\
the text is that of the *adapted* target. These heads
were trained together with the LoRA adapter in `adapter/`, which changes the target{moved}"""


def measured(
    drafter: TrainedDrafter, run: str | Path, target: Target, report: str | Path | None
) -> dict[str, Any] | None:
    """What an evaluation measured of this drafter, or None without one.

    Args:
        drafter: from `load_drafter`; found by its weights, not by its name.
        run: its folder; where the report has these weights twice, the arm of that name, else the first.
        target: the model that the figures are wanted for.
        report: folder of `scripts/evaluate.py` (or its report.json).

    Returns:
        arm, plain (the two arms' figures), draft (settings), target_kl, and the report's environment, prompts, target,
        settings.

    Raises:
        UserError: no report there, this drafter is not in it, or it was measured on another target.
    """
    if report is None:
        return None
    path = Path(report)
    path = path / "report.json" if path.is_dir() else path
    page = read_json(path)
    arms = {arm["name"]: arm for arm in page.get("arms", [])}
    drafters = page.get("drafters", {})
    same = [name for name, told in drafters.items() if told.get("weights") == drafter.digest]
    if not same:
        raise UserError(
            f"{path}: measures {', '.join(drafters) or 'no drafter'}, none of which is known to have the weights of "
            f"{run}; evaluate it again with scripts/evaluate.py"
        )
    if page["target"]["fingerprint"]["weights"] != target.fingerprint["weights"]:
        raise UserError(
            f"{path}: was measured on target {page['target']['name']!r}, whose weights differ from {target.name!r}; "
            "evaluate there with scripts/evaluate.py"
        )
    name = Path(run).resolve().name
    name = name if name in same else same[0]
    return {
        "arm": arms[name],
        "plain": arms[arms[name].get("reference", "plain")],
        "draft": page["settings"]["draft"][name],
        "target_kl": drafters[name].get("target_kl"),
        **{key: page[key] for key in ("environment", "prompts", "target", "settings")},
    }


def save_pretrained(run: str | Path, out: str | Path, target: Target, report: str | Path | None) -> Path:
    """Writes the folder: config, weights (proven again), metadata without local paths, and README.md.

    Args:
        run: the drafter's folder.
        out: a new folder.
        target: the model it serves.
        report: see `measured`; None: the card then claims nothing.
    """
    drafter = load_drafter(run, target, pack=False, dtype=torch.float32)
    results = measured(drafter, run, target, report)
    meta = {k: v for k, v in drafter.meta.items() if k not in ("kind", "warnings", "layout", "draft_ids")}
    if not meta.get("target"):
        meta["target"] = target.fingerprint
    if isinstance(meta.get("recipe"), dict):
        meta["recipe"] = _without_paths(meta["recipe"])
    with new_folder(out) as folder:
        save_drafter(drafter, folder, target, meta)
        page = model_card(read_json(folder / META), target.fingerprint, homes_of(drafter, target), results)
        (folder / "README.md").write_text(page, encoding="utf-8")
    return Path(out)


def _without_paths(recipe: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_paths(value)
        if isinstance(value, dict)
        else (Path(value).name if key in PATH_KEYS | {"name", "source"} and _is_path(value) else value)
        for key, value in recipe.items()
    }


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and (value.startswith((".", "/", "~")) or value.count("/") > 1)


def _bare(name: str) -> str:
    """A target's name; of a local folder its last part only."""
    return Path(name).name if _is_path(name) else name


def model_card(
    meta: dict[str, Any], target: dict[str, Any], servers: Sequence[str], results: dict[str, Any] | None
) -> str:
    """README.md: what it is, for which target, how it was trained; figures only where they were measured.

    Args:
        meta: the folder's `headstart.json`.
        target: the fingerprint of the model that the card is for.
        servers: those that it can be exported for.
        results: from `measured`.
    """
    kind, base, trained_for = meta["kind"], target["name"], meta["target"]
    name = _bare(base)
    other, source = trained_for.get("weights") != target["weights"], _bare(trained_for.get("name") or "another target")
    header = ["library_name: headstart", "tags:", "- speculative-decoding", f"- {kind}"]
    if base.count("/") == 1 and not _is_path(base):
        header += ["base_model:", f"- {base}"]
    data = meta.get("data") or {}
    facts = {
        "Kind": f"{kind} (arXiv {PAPERS[kind]})" if kind in PAPERS else kind,
        "Target": f"{name} (weights {target['weights']}, "
        f"tokenizer {target['tokenizer']}, template {target['template']})",
        "Trained for": f"{source} (weights {trained_for.get('weights')})" if other else None,
        "Draft vocabulary": (meta.get("draft_vocab") or {}).get("size"),
        "Trained on": f"{data['tokens']:,} tokens in {data['samples']:,} samples" if data.get("tokens") else None,
        "Made with": f"headstart {meta['headstart']}" if meta.get("headstart") else None,
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in facts.items() if value is not None)
    moved = (results or {}).get("target_kl")
    adapted = ADAPTED.format(moved="" if moved is None else f" (by {moved:.3g} nats a token on the original's answers)")
    return CARD.format(
        header="\n".join(header), kind=kind, short=Path(base).name, table=table,
        measured=_measured_text(meta, results), target=json.dumps(name), servers=_servers_text(meta, servers),
        text=adapted if meta.get("adapter") else "the text stays its own",
        imports="from drafters.adapter import adapted\n" if meta.get("adapter") else "",
        call=f"with adapted(drafter):\n    {CALL}" if meta.get("adapter") else CALL,
    )  # fmt: skip


def _servers_text(meta: dict[str, Any], servers: Sequence[str]) -> str:
    if not servers:
        return "No server loads it: it decodes with headstart only."
    merged = ", to serve the target with `adapter/` merged into it" if meta.get("adapter") else ""
    return f"`scripts/export.py` writes it for {', '.join(NAMES[s] for s in servers)}{merged}."


def _measured_text(meta: dict[str, Any], results: dict[str, Any] | None) -> str:
    lines = []
    if results is None:
        lines.append("Speed and acceptance in real decoding: not measured.")
    else:
        arm, plain, env = results["arm"], results["plain"], results["environment"]
        interval = arm["speedup_ci95"]
        spread = f" (95 % interval {interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
        match = arm["exact_match"]
        draft, temperature = results["draft"], results["settings"]["sampling"]["temperature"]
        shape = {"chain": "chain of {length}", "tree": "tree of {total}"}.get(draft.get("kind"), "{policy} drafts")
        shape = shape.format(**draft)
        lines += [
            f"On {results['prompts']['count']} prompts ({results['prompts']['name']}), {shape}, temperature "
            f"{temperature:g}, {results['settings']['max_new_tokens']} new tokens, {env['device']} ({env['cpu']}), "
            f"{env['dtype']}:\n",
            f"| | {'adapted target, plain' if meta.get('adapter') else 'plain'} | with this drafter |",
            "|---|---|---|",
            f"| acceptance length (tokens a target step) | {plain['tau']:.2f} | {arm['tau']:.2f} |",
            f"| tokens/s | {plain['tokens_per_second']:.1f} | {arm['tokens_per_second']:.1f} |",
            f"| speedup | 1.00x | {arm['speedup']:.2f}x{spread} |",
        ]
        if match is not None:
            lines.append(f"| greedy output | | {match['verdict']} ({match['rate']:.0%}) |")
    estimate = (meta.get("results") or {}).get("tau_estimate")
    if estimate:
        lines.append(f"\nEstimated in training on held-out text, which flatters: acceptance length {estimate:.2f}.")
    return "\n".join(lines) + "\n"


def publish(folder: str | Path, repo: str) -> str:
    """Uploads the folder with the user's own Hub login; a new repository is private. Returns its address.

    Raises:
        UserError: no login, no network, or the Hub refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    try:
        api = HfApi()
        api.create_repo(repo, private=True, exist_ok=True)
        return str(api.upload_folder(repo_id=repo, folder_path=str(folder)))
    except (HfHubHTTPError, LocalTokenNotFoundError, OSError, ValueError) as error:
        raise UserError(f"--push {repo}: {str(error).strip().splitlines()[0]}") from error
