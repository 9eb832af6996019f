"""Prompts to measure on: the built-in set, Spec-Bench files, JSONL and plain text.

Categories are kept, because a drafter that shines on code may lose on chat.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafters.errors import UserError

BUILT_IN = {name: Path(__file__).parent / "data" / f"{name}.jsonl" for name in ("headstart", "calibration", "traffic")}


@dataclass(frozen=True)
class Prompt:
    """One conversation that the target shall continue; the last message is the user's."""

    id: str
    category: str | None
    messages: list[dict[str, str]]


def load_prompts(name_or_path: str | Path, limit: int | None = None, per_category: int | None = None) -> list[Prompt]:
    """Read prompts from a built-in set or from a file.

    "headstart" is for measuring, "calibration" for choosing how much to draft; no prompt is in both. "traffic" is what
    an application sends: requests of one form, forty of one topic and then forty of another.

    A ``.txt`` file holds one prompt a line. Any other file is JSONL, each row one of ``{"turns": [...]}``
    (Spec-Bench; the first turn is used), ``{"prompt": "..."}`` or ``{"messages": [...]}`` (a closing assistant
    message is dropped: it is what the target shall write), with optional ``question_id`` or ``id``, and ``category``.

    Args:
        name_or_path: "headstart", "calibration", "traffic" or a path.
        limit: keep this many, taken in turn from each category, so that a small limit still covers them all.
        per_category: keep the first so many of each category.

    Raises:
        UserError: no such file, a row that can't be read (named by file and line), or no prompt at all.
    """
    path = BUILT_IN.get(str(name_or_path), Path(name_or_path))
    if not path.is_file():
        raise UserError(
            f"prompts={name_or_path}: no such file, and not one of the built-in sets ({', '.join(BUILT_IN)})"
        )
    for key, value in (("limit", limit), ("per_category", per_category)):
        if value is not None and value < 1:
            raise UserError(f"{key}={value} must be at least 1")
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # splitlines() would also part a row at U+2028
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file in UTF-8 ({error.reason} at byte {error.start})") from error
    for line, text in enumerate(lines, 1):
        if not text.strip():
            continue
        where = f"{path}:{line}"
        prompt = _from_text(text, path, line) if path.suffix == ".txt" else _from_json(text, path, line, where)
        if prompt.id in seen:
            raise UserError(f"{where}: id {prompt.id!r} is already used in line {seen[prompt.id]}; make it unique")
        seen[prompt.id] = line
        prompts.append(prompt)
    if not prompts:
        raise UserError(f"{path}: holds no prompt")
    return _select(prompts, limit, per_category)


def _from_text(text: str, path: Path, line: int) -> Prompt:
    return Prompt(f"{path.stem}-{line}", None, [{"role": "user", "content": text.strip()}])


def _from_json(text: str, path: Path, line: int, where: str) -> Prompt:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
    except RecursionError as error:
        raise UserError(f"{where}: JSON nested too deeply") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: a row must be a JSON object, found {type(row).__name__}")
    identity = row.get("question_id", row.get("id", f"{path.stem}-{line}"))
    category = row.get("category")
    return Prompt(str(identity), None if category is None else str(category), _messages(row, where))


def _messages(row: dict[str, Any], where: str) -> list[dict[str, str]]:
    if "turns" in row:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0].strip():
            raise UserError(f'{where}: "turns" must be a list that starts with a non-empty text')
        return [{"role": "user", "content": turns[0]}]
    if "prompt" in row:
        if not isinstance(row["prompt"], str) or not row["prompt"].strip():
            raise UserError(f'{where}: "prompt" must be a non-empty text')
        return [{"role": "user", "content": row["prompt"]}]
    if "messages" not in row:
        raise UserError(f'{where}: needs "turns", "prompt" or "messages", found {", ".join(sorted(row)) or "nothing"}')
    messages = row["messages"]
    if not isinstance(messages, list):
        raise UserError(f'{where}: "messages" must be a list')
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise UserError(f'{where}: each of "messages" needs the texts "role" and "content"')
    kept = [{"role": m["role"], "content": m["content"]} for m in messages]
    while kept and kept[-1]["role"] == "assistant":
        kept.pop()
    if not kept or kept[-1]["role"] != "user":
        raise UserError(f'{where}: "messages" must end with a user message for the target to answer')
    return kept


def _select(prompts: list[Prompt], limit: int | None, per_category: int | None) -> list[Prompt]:
    groups: dict[str | None, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    if per_category is not None:
        groups = {category: members[:per_category] for category, members in groups.items()}
    # rank inside the category first, then the category: one of each, two of each, ...
    ranked = [(rank, group, p) for group, members in enumerate(groups.values()) for rank, p in enumerate(members)]
    if limit is not None:
        ranked = sorted(ranked, key=lambda r: r[:2])[:limit]
    kept = {p.id for _, _, p in ranked}
    return [p for p in prompts if p.id in kept]
