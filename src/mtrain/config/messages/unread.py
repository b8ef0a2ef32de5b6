"""Values that the command line's grammar cannot read or that make no run, and suggestions."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from mtrain.config.compose.dump import override
from mtrain.config.compose.grammar import Sweep, parse_value, sweep_values
from mtrain.config.compose.paths import choices_of_group, is_group, recipe_names
from mtrain.config.messages.keys import choices_of, field_of
from mtrain.config.messages.suggestions import NOTHING, accepts, chooses, near_choice
from mtrain.config.schema.run import GROUPS

MOST = 1000
"""The largest number of values of a sweep."""
FORMS = {
    "choice": "choice(A,B,...)",
    "range": "range(START,STOP) or range(START,STOP,STEP)",
    "glob": "glob(WORD*)",
    "sort": "sort(B,A)",
    "shuffle": "shuffle(A,B)",
}
"""Functions that produce several values."""
ALONE = "a function of several values must be the whole value, not inside or next to another one"
_CALL = re.compile(r"([A-Za-z_]+)\s*[(\[](.*)\Z", re.DOTALL)
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\Z")


def names_of(key: str) -> list[str]:
    """Return the values that a key can name: files of a group, shared recipes, or choices."""
    if key == "recipe":
        return recipe_names()
    # +group=choice adds a choice, and its names are those of the group.
    key = key.lstrip("+")
    return choices_of_group(key) if _is_choice(key) else list(choices_of(key))


def why_unread(key: str, text: str, said: str) -> str:
    """Return the fault of a value in plainer words than the message of the grammar."""
    parts = _parts(text)
    if not text.strip():
        return "is empty: a value stands behind the ="
    # Hydra's grammar reports only a position here.
    if len(parts) > 1 and not all(parts):
        return "a comma has no value on one side of it"
    name, inner = _call(text)
    if len(parts) > 1 and any(_call(part)[0] in FORMS for part in parts):
        return ALONE
    # Hydra has intervals for optimizers of hyperparameters, which mtrain does not run.
    if name == "interval":
        return (
            "an interval has no end of values, and a sweep is made of some: choice(A,B) or"
            " range(START,STOP,STEP)"
        )
    if name not in FORMS:
        return said
    form = f"write {FORMS[name]}"
    if text.count("(") != text.count(")"):
        return (
            f"{name} has {text.count('(')} opening and {text.count(')')} closing brackets; {form}"
        )
    if any("(" in part for part in inner):
        return ALONE
    if not any(inner):
        return f"{name} names no value; {form}"
    if not all(inner):
        return "a comma has no value on one side of it"
    if name == "range":
        return _why_no_range(inner, said)
    if name == "glob":
        names = names_of(key)
        shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
        if names:
            return f"no name is like {inner[0]}: {shown}"
        return f"glob chooses from names, and {key} has none"
    return said


def _why_no_range(parts: list[str], said: str) -> str:
    form = FORMS["range"]
    if len(parts) > 3:
        return f"range has {len(parts)} arguments; write {form}"
    if wrong := [part for part in parts if not _NUMBER.match(part)]:
        return f"range counts, and {wrong[0]} is no number; write {form}"
    start, stop, step = _bounds(parts)
    if step == 0:
        return "a range with a step of 0 never ends"
    if (stop - start) / step <= 0:
        way = "up" if step > 0 else "down"
        return (
            f"the range has no number: it counts {way} from {start:g} by {abs(step):g} and ends"
            f" before {stop:g}"
        )
    return said


def meant(key: str, text: str, *, sweep: bool) -> str:
    """Return overrides that a value may have meant, each tried against the grammar and the key.

    With `sweep` they may produce several values; if none works, return words about how to write
    them.
    """
    found = (
        candidate for candidate in _candidates(key, text) if _works(key, candidate, sweep=sweep)
    )
    fixes = [_written(key, candidate) for candidate in dict.fromkeys(found)]
    if not fixes and not text.strip():
        fixes = [NOTHING]
    if not fixes and sweep and _call(text)[0]:
        fixes = [f"name at most {MOST} values, parted by commas"]
    return " or ".join(fixes[:2])


def _written(key: str, text: str) -> str:
    return chooses(key, text) if _is_choice(key) else shlex.quote(f"{key}={text}")


def _call(text: str) -> tuple[str, list[str]]:
    """Return the name and arguments of a function call that is the whole text; else empty."""
    alone = [part for part in _parts(text) if part]
    call = _CALL.match(alone[0]) if len(alone) == 1 else None
    if call is None:
        return "", []
    name = call.group(1).lower()
    inner = call.group(2).rstrip()
    for opening, closing in ("()", "[]"):
        while inner.endswith(closing) and inner.count(closing) > inner.count(opening):
            inner = inner[:-1].rstrip()
    return name, _parts(inner)


def _candidates(key: str, text: str) -> Iterator[str]:
    # Semicolons separate values in other languages of configuration.
    parts = [part for part in _parts(text.replace(";", ",")) if part]
    name, arguments = _call(text)
    inner = [part for part in arguments if part]
    if name in FORMS:
        yield f"{name}({','.join(inner)})"
    if (
        name == "range"
        and text.count("(") == text.count(")")
        and all(map(_NUMBER.match, inner))
        and 1 <= len(inner) <= 3
    ):
        yield from _ranges(inner)
    # Brackets mean one list here, although a sweep may be meant: offer both.
    if text.startswith("["):
        items = [part for part in _parts(text.strip().strip("[]")) if part]
        yield f"[{','.join(items)}]"
        yield ",".join(items)
    if name and name not in FORMS and (near := near_choice(name, [*FORMS])):
        yield f"{near[0]}({','.join(inner)})"
    if name == "glob" and inner:
        yield ",".join(near_choice(inner[0].strip("*?[]"), names_of(key))[:1])
    yield ",".join(value for part in parts for value in _values(part))
    if name and (name != "range" or len(inner) > 3):
        yield ",".join(value for part in inner for value in _values(part))
    if "${" not in text and text.strip() and accepts(key, text):
        yield shlex.split(override(key, text))[0].partition("=")[2]


def _ranges(parts: list[str]) -> Iterator[str]:
    """Return ranges with numeric bounds for a range without them."""
    start, stop, step = _bounds(parts)
    low, high = (parts[0], parts[1]) if len(parts) > 1 else ("0", parts[0])
    size = f"{abs(step):g}" if step else "1"
    # A range downwards needs a negative step, or was written in the wrong order.
    if start > stop:
        yield f"range({low},{high},-{size})"
        yield f"range({high},{low})" if size == "1" else f"range({high},{low},{size})"
    elif start < stop:
        yield f"range({low},{high})" if size == "1" else f"range({low},{high},{size})"
        yield f"range({high},{low},-{size})"
    else:
        yield f"range({low},{stop + 1:g})"


def _bounds(parts: list[str]) -> tuple[float, float, float]:
    numbers = [float(part) for part in parts]
    if len(numbers) == 1:
        return 0.0, numbers[0], 1.0
    return numbers[0], numbers[1], numbers[2] if len(numbers) > 2 else 1.0


def _values(part: str) -> list[str]:
    """Return the values of a part that is a function; else the part."""
    try:
        return sweep_values(part, [], MOST) or [part]
    except ValueError:
        return [part]


def values_of(key: str, text: str) -> list[str]:
    """Return the values that a text sweeps over; empty if the key does not accept each of them."""
    try:
        values = sweep_values(text, names_of(key), MOST) or []
    except ValueError:
        return []
    return values if all(_fits(key, value) for value in values) else []


def _works(key: str, text: str, *, sweep: bool) -> bool:
    """Return whether a text is readable, makes at least one run, and fits the key."""
    if not text:
        return False
    try:
        values = sweep_values(text, names_of(key), MOST)
    except ValueError:
        return False
    # A sweep is no fix where only one run is started.
    if values is not None and (not sweep or not values):
        return False
    return all(_fits(key, value) for value in values or [text])


def _fits(key: str, text: str) -> bool:
    if _is_choice(key) or key == "recipe":
        return text in names_of(key) or (key == "parallel" and "(" not in text)
    try:
        return accepts(key.lstrip("+"), parse_value(text))
    except (Sweep, ValueError):
        return False


def _is_choice(key: str) -> bool:
    key = key.lstrip("+")
    return key in GROUPS or ("." not in key and is_group(key))


def _parts(text: str) -> list[str]:
    """Return a text split at commas outside of brackets and quotes."""
    out = [""]
    depth = 0
    quote = ""
    # Hydra's parser refuses the texts that are split here, so it cannot be used.
    for letter in text:
        if letter == "," and depth <= 0 and not quote:
            out.append("")
            continue
        if letter in "'\"" and quote in ("", letter):
            quote = "" if quote else letter
        elif not quote:
            depth += (letter in "([{") - (letter in ")]}")
        out[-1] += letter
    return [part.strip() for part in out]


def as_text(key: str, text: str, value: object) -> str | list[str] | None:
    """Return numbers as written if the key takes text or a list of texts; else None."""
    if (
        value is None
        or isinstance(value, (str, dict))
        or field_of(key) is None
        or accepts(key, value)
    ):
        return None
    # 007 is a name as text, and seven as a number.
    if not isinstance(value, list):
        return text if accepts(key, text) and not text.startswith("[") else None
    items = [item.strip("'\"") for item in _parts(text.strip()[1:-1])]
    return items if items and accepts(key, items) else None


def is_empty(key: str) -> bool:
    """Return whether an empty value is invalid for the key."""
    return (
        _is_choice(key)
        or key in ("recipe", "run")
        or (field_of(key) is not None and not accepts(key, ""))
    )


def is_list_of_values(key: str, text: str) -> bool:
    """Return whether a text is a list although the key takes one of its items."""
    if _is_choice(key):
        return text.startswith("[")
    try:
        value = parse_value(text)
    except ValueError:
        return False
    known = isinstance(value, list) and len(value) > 0 and field_of(key) is not None
    return known and not accepts(key, value) and all(accepts(key, item) for item in value)
