"""Drafters by the name a user types: those that need no training have one, trained ones go by their folder."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from drafters.base import Drafter
from drafters.checkpoint import load_drafter
from drafters.draft_model import DraftModel, same_tokenizer
from drafters.errors import UserError
from drafters.lookahead import LookaheadDrafter
from drafters.lookup import LookupDrafter, SuffixDrafter
from drafters.router import combined
from drafters.target import Target, load_target
from drafters.translate import TranslatedDraftModel


def make_drafter(spec: str, target: Target) -> Drafter:
    """A drafter from its folder or its name; a folder of that name wins.

    Args:
        spec: a drafter's folder, or NAME or NAME:ARGUMENT with a name of `NAMES`.
        target: the model it will serve.

    Raises:
        UserError: neither a folder nor a name, an argument that is missing or wrong, or a drafter that can't be loaded.
    """
    if not is_name(spec):
        if not Path(spec).is_dir():
            allowed = ", ".join(usage for usage, _ in NAMES.values())
            raise UserError(f"drafter {spec!r}: no such folder, and no such name; a drafter folder or {allowed}")
        return load_drafter(spec, target)
    name, _, argument = spec.partition(":")
    return NAMES[name][1](argument, target)


def is_name(spec: str) -> bool:
    """Whether a drafter is meant by name and not by folder."""
    return spec.partition(":")[0] in NAMES and not Path(spec).is_dir()


def _lookup(argument: str, target: Target) -> Drafter:
    return LookupDrafter(*_numbers("lookup", argument, 2))


def _lookahead(argument: str, target: Target) -> Drafter:
    return LookaheadDrafter(*_numbers("lookahead", argument, 3))


def _suffix(argument: str, target: Target) -> Drafter:
    if not argument:
        return SuffixDrafter()
    try:
        text = Path(argument).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text in UTF-8"
        raise UserError(f"drafter suffix:{argument}: {reason}; name a text file, or suffix alone") from error
    drafter = SuffixDrafter([target.tokenizer.encode(text, add_special_tokens=False)])
    drafter.meta["reference"] = {"file": argument, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    return drafter


def _model(argument: str, target: Target) -> Drafter:
    if not argument:
        raise UserError("drafter model: write model:NAME_OR_DIR, a smaller causal language model")
    dtype = str(target.dtype).removeprefix("torch.")
    draft = load_target(argument, dtype, target.device, target.attention, pack=target.is_packed)
    return DraftModel(draft, target) if same_tokenizer(draft, target) else TranslatedDraftModel(draft, target)


def _numbers(name: str, argument: str, most: int) -> list[int]:
    """Whole numbers parted by commas, `most` of them or fewer."""
    try:
        numbers = [int(number) for number in argument.split(",")] if argument else []
    except ValueError:
        numbers = [0] * (most + 1)
    if len(numbers) > most:
        raise UserError(f"drafter {name}:{argument}: write {NAMES[name][0]} in whole numbers")
    return numbers


NAMES: dict[str, tuple[str, Callable[[str, Target], Drafter]]] = {
    "lookup": ("lookup[:LONGEST[,SHORTEST]]", _lookup),
    "suffix": ("suffix[:TEXT_FILE]", _suffix),
    "lookahead": ("lookahead[:WINDOW[,NGRAM[,GUESSES]]]", _lookahead),
    "model": ("model:NAME_OR_DIR", _model),
    "router": ("router:A+B", lambda argument, target: combined("router", argument, lambda s: make_drafter(s, target))),
    "merged": ("merged:A+B", lambda argument, target: combined("merged", argument, lambda s: make_drafter(s, target))),
}
"""Name -> how it is written, and what makes it."""
