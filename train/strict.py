"""Strict reading of YAML into dataclasses: every mistake is found, named with its remedy, and reported at once.

Types say what a value may be: `Literal` its choices, `Annotated[..., Range]` its bounds.
"""

import re
import types
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from difflib import get_close_matches
from math import inf, isfinite
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from drafters.errors import UserError

T = TypeVar("T")
Errors = dict[str, str]
"""Full key -> what is wrong with it."""

# YAML 1.1 reads 1e-4 (no dot, no sign) as text.
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


@dataclass(frozen=True)
class Range:
    """Bounds of a number; an open bound is itself not allowed."""

    low: float
    high: float = inf
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        return above and (value < self.high if self.open_high else value <= self.high)

    def __str__(self) -> str:
        low = f"{'above' if self.open_low else 'of at least'} {self.low:g}"
        return low if self.high == inf else f"{low} and {'below' if self.open_high else 'at most'} {self.high:g}"


class _Loader(yaml.SafeLoader):
    """The safe loader, which also refuses a key that is written twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.value in seen and isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key_node.value} is written twice", key_node.start_mark
                )
            if isinstance(key_node, yaml.ScalarNode):
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Reads a YAML file that must hold a mapping.

    Raises:
        UserError: no such file, not text, not YAML, a key written twice, empty, or not a mapping.
    """
    try:
        raw = yaml.load(Path(path).read_bytes().decode(), _Loader)
    except OSError as error:
        raise UserError(f"cannot read recipe {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"recipe {path} is not a text file; a recipe is YAML in UTF-8") from error
    except yaml.YAMLError as error:
        raise UserError(f"recipe {path} is not valid YAML: {_one_line(error)}") from error
    if raw is None:
        raise UserError(f"recipe {path} is empty; it needs at least output and drafter.kind")
    if not isinstance(raw, dict):
        raise UserError(f"recipe {path} must be a mapping of sections, not a {type(raw).__name__}")
    return {str(key): value for key, value in raw.items()}


def apply_overrides(raw: dict[str, Any], overrides: Sequence[str], errors: Errors) -> dict[str, Any]:
    """Returns `raw` with each `key=value` or `section.key=value` put in; values are parsed as YAML."""
    merged = dict(raw)
    for override in overrides:
        key, equals, text = override.partition("=")
        section, dot, name = key.partition(".")
        if not equals or not section or (dot and not name):
            errors[override] = f"override {override!r} must have the form section.key=value"
            continue
        if "." in name:
            outer, _, inner = key.rpartition(".")
            errors[key] = f"override {key} reaches too deep; write {outer}={{{inner}: {text}}}"
            continue
        try:
            value = yaml.load(text, _Loader)
        except yaml.YAMLError as error:
            errors[key] = f"{key}={text} is not valid YAML: {_one_line(error)}"
            continue
        old = merged.get(section)
        if dot and (old is None or isinstance(old, dict)):
            merged[section] = {**(old or {}), name: value}
        elif not dot:
            merged[section] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def build(cls: type[T], raw: Mapping[str, Any], errors: Errors, prefix: str = "", root: type | None = None) -> T | None:
    """Makes the dataclass `cls` of a mapping; mistakes go to `errors`, and wrong values become the defaults.

    Returns:
        The instance, or None when a required field has no usable value.
    """
    root = root or cls
    known: dict[str, Field[Any]] = {item.name: item for item in fields(cls)}  # type: ignore[arg-type]
    hints = get_type_hints(cls, include_extras=True)
    for name in map(str, raw):
        if name not in known:
            errors[prefix + name] = (
                f"unknown key {prefix}{name}; did you mean {_nearest(prefix + name, cls, prefix, root)}?"
            )
    values: dict[str, Any] = {}
    for name, item in known.items():
        key, hint = prefix + name, hints[name]
        if is_dataclass(hint):
            value = raw.get(name)
            if value is not None and not isinstance(value, dict):
                errors[key] = f"{key}={show(value)} must be a section, a mapping of keys to values"
            section = build(hint, value if isinstance(value, dict) else {}, errors, f"{key}.", root)  # type: ignore[arg-type]
            if section is not None:
                values[name] = section
        elif name not in raw:
            if item.default is MISSING and item.default_factory is MISSING:
                errors[key] = f"{key} is missing; it must be {describe(hint)}"
        elif raw[name] is not None or "by_kind" not in item.metadata:
            try:
                values[name] = convert(raw[name], hint)
            except ValueError:
                errors[key] = f"{key}={show(raw[name])} must be {describe(hint)}{_hint(raw[name], hint)}"
    required = {name for name, item in known.items() if item.default is MISSING and item.default_factory is MISSING}
    return cls(**values) if required <= values.keys() else None


def convert(value: Any, hint: Any) -> Any:
    """Turns a value as YAML gives it into the type of a field.

    Raises:
        ValueError: the value is of another type, out of range, or not among the choices.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        number = convert(value, args[0])
        if number in args[1]:
            return number
    elif origin in (Union, types.UnionType):
        # The value's own type first: 1 is one step of warm-up, 1.0 the share of all of them.
        for member in sorted(args, key=lambda member: _base(member) is not type(value)):
            try:
                return convert(value, member)
            except ValueError:
                continue
    elif origin is Literal:
        if isinstance(value, str) and value in args:
            return value
        if value is False and "no" in args:  # YAML 1.1 reads a bare no as false
            return "no"
    elif origin is tuple and isinstance(value, list | tuple):
        members = [args[0]] * len(value) if args[-1] is ... else list(args)
        return tuple(convert(item, member) for item, member in zip(value, members, strict=True))
    elif origin is dict and isinstance(value, dict):
        return {convert(key, args[0]): convert(item, args[1]) for key, item in value.items()}
    elif hint in (int, float):
        return _number(value, hint)
    elif type(value) is hint:  # bool, str, NoneType
        return value
    raise ValueError(value)


def describe(hint: Any) -> str:
    """Says in words what a field's type allows."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return f"{describe(args[0])} {args[1]}"
    if origin in (Union, types.UnionType):
        return ", or ".join(describe(member) for member in args)
    if origin is Literal:
        return "one of " + ", ".join(args)
    if origin is tuple:
        return f"a list of {describe(args[0])}" if args[-1] is ... else f"a list of {len(args)}: {describe(args[0])}"
    if origin is dict:
        return f"a mapping of {describe(args[0])} to {describe(args[1])}"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: "null"}[hint]


def show(value: Any) -> str:
    """Writes a value about as the recipe has it, in at most 60 characters."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _number(value: Any, kind: type[int] | type[float]) -> int | float:
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(value)
    if isinstance(value, float) and (not isfinite(value) or (kind is int and not value.is_integer())):
        raise ValueError(value)
    return kind(value)


def _base(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _hint(value: Any, hint: Any) -> str:
    """What to do about the usual slips: a misspelt choice, text that YAML takes for something else."""
    if get_origin(hint) is Literal:
        near = get_close_matches(str(value), get_args(hint), n=1)
        return f"; did you mean {near[0]}?" if near else ""
    takes_text = hint is str or str in get_args(hint)
    return "; put it in quotes" if takes_text and value is not None and not isinstance(value, list | dict) else ""


def _nearest(key: str, cls: Any, prefix: str, root: type) -> str:
    """The known key that `key` most likely means: in its section, else by its name elsewhere, else by spelling."""
    name = key.rpartition(".")[2]
    siblings = [item.name for item in fields(cls)]
    every = list(_keys(root))
    if near := get_close_matches(name, siblings, n=1):
        return prefix + near[0]
    if same := [known for known in every if known.rpartition(".")[2] == name]:
        return same[0]
    return get_close_matches(key, [known for known in every if known.startswith(prefix)], n=1, cutoff=0.0)[0]


def _keys(cls: Any, prefix: str = "") -> list[str]:
    found = []
    for name, hint in get_type_hints(cls).items():
        found += [prefix + name, *(_keys(hint, f"{prefix}{name}.") if is_dataclass(hint) else [])]
    return found


def _one_line(error: yaml.YAMLError) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
    return f"{problem or ' '.join(str(error).split())}{place}"
