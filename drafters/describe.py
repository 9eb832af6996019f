"""What a drafter folder is: layout, shapes, target, what is missing or suspicious, and what each server makes of it."""

from pathlib import Path

import torch
from torch import Tensor

from drafters.adapter import ADAPTER, ADAPTER_CONFIG, ADAPTER_WEIGHTS
from drafters.checkpoint import draft_settings, load_drafter, table_of
from drafters.errors import UserError
from drafters.files import RawFolder, read_folder
from drafters.readers import TAPS, Checkpoint, read_checkpoint
from drafters.servers import NAMES, SUPPORT, findings, homes
from drafters.target import Target


def describe(folder: str | Path, target: Target | None = None) -> list[str]:
    """Lines for people. Never fails on a folder whose drafter is only broken: that is what it is there to say.

    Args:
        folder: any drafter folder that `drafters.readers` knows.
        target: if given, the drafter is loaded for it too.

    Raises:
        UserError: no readable drafter at all.
    """
    raw = read_folder(folder)
    found = read_checkpoint(raw, target)
    broken = _broken(found, raw)
    why = "broken (reason above)" if broken else ""
    lines = [
        f"{folder}: {found.kind}, {found.layout}",
        *_facts(raw, found),
        *(f"note: {note}" for note in found.notes),
        *(f"suspicious: {line}" for line in found.warnings + _suspicious(found)),
        *(f"broken: {line}" for line in broken),
    ]
    if target is not None:
        try:
            drafter = load_drafter(folder, target, pack=False)
            told = [f"warning: {line}" for line in drafter.meta["warnings"] if line not in found.warnings]
            lines += [f"loads for {target.name!r}", *told]
        except UserError as error:
            lines.append(f"does not load for {target.name!r}: {error}")
            why = why or f"does not load for {target.name!r} (reason above)"
    layers = None if target is None else target.num_layers
    return [
        *lines,
        "servers:",
        *([f"  {NAMES[s]}: will not: {why}" for s in SUPPORT] if why else _servers(raw, found, layers)),
    ]


def is_broken(lines: list[str]) -> bool:
    """Whether `describe` found the drafter unusable."""
    return any(line.startswith(("broken:", "does not load")) for line in lines)


def _facts(raw: RawFolder, found: Checkpoint) -> list[str]:
    c, size = found.config, sum(w.numel() for w in found.weights.values() if w.is_floating_point())
    dtypes = sorted({str(w.dtype).removeprefix("torch.") for w in raw.weights.values() if w.is_floating_point()})
    lines = [f"weights: {', '.join(raw.files)}; {len(raw.weights)} tensors, {size / 1e6:.1f} M, {', '.join(dtypes)}"]
    if raw.config.get("torch_dtype", raw.config.get("dtype")) not in (*dtypes, None):
        lines.append(f"suspicious: config says {raw.config.get('torch_dtype')}, the file holds {', '.join(dtypes)}")
    draft = c.get("draft_vocab_size") or c.get("truncated_vocab_size") or len(found.meta.get("draft_ids") or ())
    V = c.get("vocab_size")
    lines.append(f"hidden {c.get('hidden_size')}, vocabulary {V}, draft vocabulary {draft or V}")
    if found.kind == "eagle3":
        taps = c.get(TAPS)
        lines.append(f"taps {taps if taps else '2, L // 2, L - 3 of the target'} (k = output of the first k blocks)")
    elif "medusa_num_heads" in c:
        lines.append(f"{c['medusa_num_heads']} heads of {c['medusa_num_layers']} residual blocks")
    stored = found.meta.get("target") or {}
    made_for = stored.get("name") or found.meta.get("made_for")
    known = "its fingerprint is stored" if stored.get("weights") else "no fingerprint of it is stored"
    return [*lines, f"target: {made_for or 'not named'}; {known}"]


def _suspicious(found: Checkpoint) -> list[str]:
    out = []
    for name, w in found.weights.items():
        if w.is_floating_point() and w.dim() == 2 and not w.any():
            out.append(f"{name} is all zero")
    head = found.weights.get("lm_head.weight")
    ids = _draft_ids(found.weights)
    if ids is not None and head is not None and torch.equal(ids, torch.arange(len(ids))):
        out.append("the draft vocabulary is the first ids of the target's: was the map lost?")
    return out


def _draft_ids(weights: dict[str, Tensor]) -> Tensor | None:
    if "d2t" in weights:
        return weights["d2t"].long() + torch.arange(len(weights["d2t"]))
    return weights.get("token_map")


def _broken(found: Checkpoint, raw: RawFolder) -> list[str]:
    """Tensors that are missing, unknown or of the wrong shape, and values that are no numbers."""
    try:
        draft_settings(found.meta, raw.folder)
        table = table_of(found, raw.folder)
    except UserError as error:
        return [str(error)]
    have = {name: tuple(w.shape) for name, w in found.weights.items()}
    lines = [f"missing {n} {shape}" for n, (shape, _) in table.items() if n not in have]
    lines += [f"unknown {n} {shape}" for n, shape in have.items() if n not in table]
    lines += [f"{n} is {have[n]}, not {shape}" for n, (shape, _) in table.items() if n in have and have[n] != shape]
    if found.meta.get("adapter"):
        files = (raw.folder / ADAPTER / name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS))
        lines += [f"missing {path}" for path in files if not path.is_file()]
    return lines + [f"{n} holds NaN or infinity" for n, w in found.weights.items() if not torch.isfinite(w).all()]


def _servers(raw: RawFolder, found: Checkpoint, layers: int | None) -> list[str]:
    lines, exportable = [], []
    possible = homes(found.kind, found.config, found.weights, layers)
    for server in SUPPORT:
        told = findings(raw, found.kind, server)
        stops = [why for bad, why in told if bad]
        reasons = stops or [why for bad, why in told if not bad]
        verdict = "will not" if stops else "will load"
        lines.append(f"  {NAMES[server]}: {verdict}" + (f": {'; '.join(reasons)}" if reasons else ""))
        if stops and server in possible:
            exportable.append(server)
    if exportable:
        lines.append(f"scripts/export.py writes what these read: --to {', '.join(exportable)}")
    return lines
