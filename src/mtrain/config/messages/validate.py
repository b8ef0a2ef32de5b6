"""pydantic's errors in mtrain's words: key, value, origin, the rule in numbers and a fix."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import PydanticUndefined

from mtrain.config.compose.dump import override, spell
from mtrain.config.compose.interpolate import leaves
from mtrain.config.compose.paths import choices_of_group
from mtrain.config.messages.keys import (
    MERGE,
    as_key,
    as_name,
    choices_of,
    field_of,
    is_content,
    is_nothing,
    schema_keys,
    section_in,
    suggest,
)
from mtrain.config.messages.suggestions import (
    FOREIGN_WORDS,
    NEAREST,
    accepts,
    as_shipped,
    at_default,
    choice_fix,
    is_number,
    near_choice,
    suggestions,
    taken,
)
from mtrain.config.schema.base import MOST_RANKS
from mtrain.config.schema.run import GROUPS, UnresolvedRun
from mtrain.errors import MAX_PROBLEMS, Problem

Where = Callable[[str], str]
MAX_ITEMS = 64
"""The items of a list that a fix repeats at most."""
MISSING = "???"
"""Hydra's mark of a value that a file leaves open."""
OPEN = {
    "model.vocab_size": (
        (
            "the number of ids of the tokenizer, such as 32000 (Llama 2), 50257 (GPT-2) or 128256"
            " (Llama 3)"
        ),
        "model.vocab_size=32000",
    )
}
"""Keys that an import may leave null -> a remark, and a value that passes."""

_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}
_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping of keys",
    "model_type": "a mapping of keys",
    "model_attributes_type": "a mapping of keys",
    "finite_number": "a finite number",
}
# pydantic's errors of a list with too many or too few items.
_COUNTS = (
    "missing_positional_argument",
    "unexpected_positional_argument",
    "too_long",
    "too_short",
)


_PATTERNS = {
    "^[A-Za-z0-9][A-Za-z0-9_.-]*$": (
        "letters, digits, dots, - and _, and begin with a letter or a digit"
    ),
    "^[A-Za-z0-9][A-Za-z0-9 _.-]*$": (
        "letters, digits, spaces, dots, - and _, and begin with a letter or a digit"
    ),
    "^[a-z][a-z0-9_]*$": "small letters, digits and _, and begin with a letter",
}


def validate(values: Mapping[str, Any], where: Where) -> tuple[UnresolvedRun | None, list[Problem]]:
    """Validate `values` by the schema; return the configuration, or bounded problems."""
    known = dict(leaves(values))
    wrong = [
        _huge(path, number, where)
        for path, value in known.items()
        for number in _huge_numbers(value)
    ]
    wrong += [_open(path, known, where) for path, value in known.items() if value == MISSING]
    try:
        run = UnresolvedRun.model_validate(values)
    except ValidationError as error:
        # pydantic refuses these values too, with less of an explanation.
        named = {problem.path for problem in wrong}
        found = [
            e
            for e in error.errors(include_url=False)
            if whole(".".join(map(str, e["loc"]))) not in named
        ]
        others = (problem for e in found for problem in _problems(e, where, known))
        # One more than the limit, so that the error can mention the others.
        return None, [*wrong, *islice(others, MAX_PROBLEMS + 1)]
    return (None, wrong) if wrong else (run, [])


def _huge_numbers(value: Any) -> list[int]:
    items = value if isinstance(value, list) else [value]
    return [item for item in items if isinstance(item, int) and abs(item) >= 2**63]


def _huge(path: str, number: int, where: Where) -> Problem:
    """Return the problem of a number that exceeds a machine word."""
    rule = f"has {len(str(abs(number)))} digits; whole numbers go up to {2**63 - 1}"
    return Problem("MT014", path, number, rule, _unset(path, number), where(path))


def _open(path: str, values: Mapping[str, Any], where: Where) -> Problem:
    """Return the problem of a value that one file leaves open and no other sets."""
    rule = f"{MISSING} stands for a value that is set over it, and nothing sets it"
    return Problem(
        "MT015", path, MISSING, rule, at_default(path) or _required(path, values), where(path)
    )


def _problems(
    error: Mapping[str, Any], where: Where, values: Mapping[str, Any]
) -> Iterator[Problem]:
    path = ".".join(str(part) for part in error["loc"])
    kind = error["type"]
    value = error["input"]
    context = error.get("ctx", {})
    if kind == "extra_forbidden":
        yield from _unknown(path, value, where)
    # pydantic reports a list that is too short as missing items.
    elif kind in _COUNTS or (kind == "missing" and path.rpartition(".")[2].isdigit()):
        yield _length(path, value, where)
    elif kind == "missing":
        rule = "is required and nothing sets it"
        yield Problem("MT015", path, None, rule, _required(path, values), where(path))
    # An import leaves null where it cannot know; the reader needs a remark, not a type.
    elif value is None and path in OPEN:
        yield unfilled(path, where(path))
    elif kind in _BOUNDS:
        yield _bound(path, kind, value, context, where, values)
    elif kind == "literal_error":
        yield _literal(path, value, where, values)
    elif kind in _KINDS:
        yield _wrong_type(path, kind, value, where, values)
    else:
        yield Problem("MT014", path, value, *_text(path, kind, value, context), where(path))


def _unknown(path: str, value: Any, where: Where) -> Iterator[Problem]:
    """Yield the problem of an unknown key, or of each key of an unknown section."""
    near, why = suggest(path)
    is_section = isinstance(value, dict) and value and not why and path not in GROUPS
    # The user meant a near key that takes the whole mapping.
    if is_section and all(_is_section(key) or not accepts(key, value) for key in near):
        for leaf, inner in leaves(value, path):
            yield unknown_key(leaf, inner, where)
    else:
        yield unknown_key(path, value, where)


def _text(path: str, kind: str, value: Any, context: Mapping[str, Any]) -> tuple[str, str]:
    """Return the rule that a text breaks, and the fix."""
    if kind == "string_pattern_mismatch":
        pattern = str(context.get("pattern"))
        rule = f"must be {_PATTERNS.get(pattern, f'text that matches {pattern}')}"
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", as_name(value)).strip("-._")
        return rule, override(path, name) if accepts(path, name) else _unset(path, None)
    if kind == "string_too_long":
        most = context["max_length"]
        rule = f"has {len(value)} letters; at most {most} are allowed"
        return rule, override(path, value[:most])
    return "is not what the key takes", _unset(path, value)


def _is_section(path: str) -> bool:
    field = field_of(path)
    return field is not None and section_in(field.annotation) is not None


HIDDEN = "..."
"""The value of a secret in a message."""


def unknown_key(path: str, value: Any, where: Where) -> Problem:
    """Return the problem of an unknown key, with suggestions."""
    if path.startswith("log.") and "webhook" in path:
        # Whoever has the URL may post there, so no message repeats it.
        return Problem("MT375", path, HIDDEN, "", "set MTRAIN_WEBHOOK", where(path))
    near, why = suggest(path)
    top = path.split(".")[0]
    if MERGE in path.split("."):
        why = "a mapping that is merged with << is not read: write its keys out"
    if not near and not why:
        section = dict.fromkeys(k.split(".")[1] for k in schema_keys() if k.startswith(f"{top}."))
        if top in GROUPS:
            why = f"keys of {top}: {', '.join(section)}"
        else:
            why = f"groups: {', '.join(GROUPS)}"
    rule = "there is no such key" + (f"; {why}" if why else "")
    return Problem("MT012", path, value, rule, " or ".join(suggestions(path, value)), where(path))


def _bound(
    path: str,
    kind: str,
    value: Any,
    context: Mapping[str, Any],
    where: Where,
    values: Mapping[str, Any],
) -> Problem:
    name, words = _BOUNDS[kind]
    bound = context[name]
    # A bound itself is no valid value of an open interval, so step over it.
    whole = isinstance(value, int) and isinstance(bound, int)
    if kind == "less_than_equal" and bound >= MOST_RANKS:  # far beyond what anybody has
        fix = _unset(path, value)
    elif kind.endswith("equal"):
        fix = f"{path}={bound}"
    else:
        step = 1 if kind == "greater_than" else -1
        near = bound + step if whole else -value
        fix = override(path, near) if accepts(path, near) else _unset(path, value)
    if field_of(path) is None:  # an item of a list, which no other number can replace
        fix = ""
    return Problem("MT014", path, value, f"must be {words} {bound}", fix, where(path))


def _literal(path: str, value: Any, where: Where, values: Mapping[str, Any]) -> Problem:
    # pydantic marks an unknown name in a mapping this way.
    if path.endswith(".[key]"):
        key = path.removesuffix(".[key]")
        section = key.rpartition(".")[0]
        rule = f"there is no such key; one of {', '.join(choices_of(section))}"
        return Problem("MT012", key, value, rule, "", where(key))
    choices = choices_of(path)
    # A word of another system has one meaning; similar spelling would mislead.
    foreign = FOREIGN_WORDS.get(path, {}).get(str(value))
    near = [foreign] if foreign is not None else near_choice(str(value), choices)
    rule = f"must be one of {', '.join(choices)}" + (f"; {near[0]} {NEAREST}" if near else "")
    if is_nothing(value):
        fix = at_default(path)
    elif field_of(path) is None:
        fix = _items(path, values, lambda item: near[0] if near and item == value else item)
    else:
        fix = override(path, near[0]) if near else ""
    return Problem("MT014", path, value, rule, fix, where(path))


def _wrong_type(
    path: str, kind: str, value: Any, where: Where, values: Mapping[str, Any]
) -> Problem:
    rule = f"must be {_KINDS[kind]}, not {_kind(value)}"
    # In a file `model: llama_tiny` is a natural mistake: on the command line it is a choice.
    if path in GROUPS and isinstance(value, str):
        return _text_for_a_group(path, value, rule, where)
    if path in GROUPS:
        return Problem(
            "MT013", path, value, rule, f"write the keys of {path}, or delete the line", where(path)
        )
    if field_of(path) is not None:
        fix = _converted(path, value)
    else:
        fix = _items(path, values, _item_as(kind))
    return Problem("MT013", path, value, rule, fix, where(path))


def _text_for_a_group(group: str, text: str, rule: str, where: Where) -> Problem:
    """Return the problem of a text for a group's keys: `lr:1e-3` without space, or a choice."""
    pairs = re.findall(r"([A-Za-z_][A-Za-z0-9_-]*)\s*[:=]\s*(\S+)", text)
    known = [
        (as_key(key), value)
        for key, value in pairs
        if field_of(f"{group}.{as_key(key)}") is not None
    ]
    if known:
        lines = " and ".join(f"`{key}: {value}`" for key, value in known)
        rule += "; a key and its value are parted by a colon and a space"
        return Problem("MT013", group, text, rule, f"write {lines} under `{group}:`", where(group))
    rule += "; in a file a choice is made with `defaults: [override /GROUP: CHOICE]`"
    near = near_choice(text, choices_of_group(group))
    if near:
        fix = f"- override /{group}: {near[0]}"
    else:
        fix = f"write the keys of {group}, or delete the line"
    return Problem("MT013", group, text, rule, fix, where(group))


def _converted(path: str, value: Any) -> str:
    """Return overrides that a value of another type may have meant, or the default."""
    meant = " or ".join(override(path, reading) for reading in taken(path, value)[:2])
    return meant or (at_default(path) if is_nothing(value) else _unset(path, value))


def _unset(path: str, value: Any) -> str:
    """Return the default in place of an empty value; empty if that discarded a text, a list or a
    path.

    Null does not replace a number: zero minutes do not mean the default minutes.
    """
    if is_content(path) or (isinstance(value, (str, list)) and value):
        return ""
    return "" if is_number(value) and _default(path) is None else at_default(path)


def _item_as(kind: str) -> Callable[[Any], Any]:
    """Return the likely meaning of one item of the wrong type."""
    if kind.startswith("int"):
        return lambda item: round(item) if isinstance(item, float) and math.isfinite(item) else item
    return lambda item: as_name(item) if kind == "string_type" else item


def _items(path: str, values: Mapping[str, Any], meant: Callable[[Any], Any]) -> str:
    """Return the list around the item at `path` with its items as meant; else empty."""
    outer = whole(path)
    said = values.get(outer)
    # Repeat the whole list: a fix must be a setting, and an item has no key.
    items = (
        [meant(item) for item in said] if isinstance(said, list) and len(said) <= MAX_ITEMS else []
    )
    return override(outer, items) if items and items != said and accepts(outer, items) else ""


def _length(path: str, value: Any, where: Where) -> Problem:
    path = whole(path)
    default = _default(path)
    size = _size(path)
    want = f"{size} values" if size else "at least one value"
    if isinstance(default, tuple):
        want += f", such as {spell(default)}"
    filled = [*value, *[0] * (size - len(value))] if isinstance(value, list) and size else []
    # an unset share is 0
    fix = override(path, filled) if value and accepts(path, filled) else ""
    return Problem("MT014", path, value, f"must have {want}", fix, where(path))


def _size(path: str) -> int | None:
    """Return the fixed number of values of a list, if there is one."""
    field = field_of(path)
    annotations = [field.annotation, *get_args(field.annotation)] if field is not None else []
    parts = next((get_args(a) for a in annotations if get_origin(a) is tuple), ())
    return len(parts) if parts and Ellipsis not in parts else None


def whole(path: str) -> str:
    """Return the path of the outermost list around `path`, or `path` itself."""
    while path.rpartition(".")[2].isdigit():
        path = path.rpartition(".")[0]
    return path


def unfilled(path: str, source: str) -> Problem:
    """Return the problem of a key that an import left open."""
    rule, fix = OPEN[path]
    return Problem("MT702", path, None, rule, fix, source)


def _required(path: str, values: Mapping[str, Any]) -> str:
    """Return a value for a required key: that of another key of its name, or its section unset."""
    if path in GROUPS:
        return choice_fix(path, "")
    section, _, last = path.rpartition(".")
    # Sections of attention share names of keys, so another one's value is the likeliest.
    same = [
        values[key]
        for key in schema_keys()
        if key.endswith(f".{last}") and key != path and key in values
    ]
    fixes = [override(path, value) for value in same if accepts(path, value)]
    field = field_of(section)
    fixes += [f"{section}=null"] if field is not None and field.default is None else []
    return " or ".join(fixes) or as_shipped(path) or f"{path}=VALUE"


def _default(path: str) -> Any:
    field = field_of(path)
    if field is None or field.default is PydanticUndefined:
        return None
    return field.default


def _kind(value: Any) -> str:
    if (
        value is None
        or isinstance(value, bool)
        or (isinstance(value, float) and not math.isfinite(value))
    ):
        return spell(value)
    names = {
        int: "a number",
        float: "a number with a fraction",
        str: "text",
        list: "a list",
        dict: "a mapping",
    }
    text = spell(value)
    return (
        f"{names.get(type(value), type(value).__name__)}"
        f" ({text[:60]}{'...' if len(text) > 60 else ''})"
    )
