"""Suggestions for misspelt and foreign keys, each with a value that the key accepts."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, TypeGuard, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from mtrain.config.compose.dump import override
from mtrain.config.compose.layout_string import parse_layout
from mtrain.config.compose.paths import (
    CHOICE,
    choices_of_group,
    conf_dir,
    find_config,
    program,
    recipe_names,
)
from mtrain.config.compose.yaml_reader import load, scalar
from mtrain.config.engine.formats import FORMATS, WeightFormat
from mtrain.config.messages.keys import (
    as_key,
    field_of,
    is_nothing,
    opposites,
    plain,
    readings,
    suggest,
)
from mtrain.config.schema.run import GROUPS
from mtrain.errors import ConfigError, Problem

NOTHING = "leave it out"
SWEPT = "-m, with the same words"
"""The words that introduce the alternatives of a sweep; all of them must stay."""
NEAREST = "is the nearest"
"""The words before the choice that a misspelt one may have meant."""
FOREIGN_WORDS = {"data.kind": dict.fromkeys(("gpt", "megatron", "mmap", "bin"), "indexed")}
"""Names that other systems use for a choice of a key."""
CHOOSING = {"data.kind": "data", "optim.name": "optim", "peft.kind": "peft"}
"""Keys whose values are names of choices of a group."""
NO_CHOICE = (None,)
"""Their values that no choice is named after."""
INSTEAD: dict[str, Callable[[Any], str]] = {
    **{
        word: lambda value, word=word: f"precision.dtype={word}" if value is True else NOTHING  # type: ignore[misc]
        for word, facts in FORMATS.items()
        if facts.flag is not None
    },
    "betas": lambda value: (
        f"optim.beta1={value[0]} optim.beta2={value[1]}" if _is_pair(value) else NOTHING
    ),
}
"""Names without a key here -> the settings that do the same."""
CONVERTED: dict[str, Callable[[Any], Any]] = {
    "distributed_timeout_minutes": lambda value: 60.0 * value,
}
"""Foreign names whose values mean something else under our key -> the difference."""
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)((?:[kmbt](?![a-z]))?)")
_UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_WORDS = {
    **{"true": True, "false": False, "silu": "swiglu", "relu2": "squared_relu"},
    **{FORMATS[word].torch: word for word in get_args(WeightFormat)},
    "half": "fp16",
}


def accepts(path: str, value: Any) -> bool:
    """Return whether the schema accepts `value` at `path`, whatever the other keys are."""
    # A command without problems never needs this, and the import takes time.
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    field = field_of(path)
    if field is None or (
        isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    ):
        return False
    # Strict, because a fix must be valid exactly as it is printed.
    annotation: Any = (
        Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    )
    try:
        TypeAdapter(
            annotation, config=ConfigDict(strict=True, allow_inf_nan=False)
        ).validate_python(value)
    except ValidationError:
        return False
    return True


def taken(path: str, value: Any) -> list[Any]:
    """Return the values that a key accepts and `value` may have meant, likeliest first."""
    for group in readings(path, value):
        out: list[Any] = []
        for reading in group:
            # YAML and the schema end at a machine word.
            huge = isinstance(reading, int) and abs(reading) >= 1 << 63
            nothing = reading in ([], {}) and value not in ([], {}, "")
            if not huge and not nothing and reading not in out and accepts(path, reading):
                out.append(reading)
        if out:
            return out
    return []


def suggestions(path: str, value: Any) -> list[str]:
    """Return overrides that an unknown key at `path` may have meant, best first, each with a valid
    value.

    If no near key accepts the value, return a page about the nearest; if no key is near, advise to
    remove it.
    """
    last = as_key(path).rpartition(".")[2]
    near = suggest(path)[0]
    if not near:
        return [INSTEAD.get(last, lambda _: NOTHING)(value)]
    if near[0] in GROUPS:
        if value in choices_of_group(near[0]):
            choices = [value]
        else:
            choices = near_choice(str(value), choices_of_group(near[0]))
        return [f"{near[0]}={choice}" for choice in choices[:1]] or [NOTHING]
    known = _WORDS.get(str(value).lower(), value)
    with suppress(TypeError):
        known = CONVERTED.get(last, lambda v: v)(known)
        # --no-bias sets add_bias=false: the flag of the other system is the opposite.
        known = not known if last in opposites() and isinstance(known, bool) else known
    fitting = [override(key, known) for key in near if accepts(key, known)]
    # Many keys accept a text, so it does not identify one.
    fitting = fitting or [
        override(key, reading)
        for key in near
        for reading in taken(key, known)[:1]
        if not isinstance(reading, str)
    ]
    if not fitting and is_nothing(known):
        fitting = [default for key in near if (default := at_default(key))][:1]
    return fitting or [f"{program()} explain {near[0]}, for what it takes"]


def _is_pair(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(accepts("optim.beta1", v) for v in value)
    )


def at_default(path: str) -> str:
    """Return the override that sets a key to its default; empty if it has none."""
    field = field_of(path)
    if field is None or field.default is PydanticUndefined:
        return ""
    return override(path, field.default)


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number and no boolean."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def as_shipped(path: str) -> str:
    """Return the override to the value of the group's default choice; else empty."""
    group, _, key = path.partition(".")
    choice = default_choices()[0].get(group, "")
    file = find_config(f"{group}/{choice}")
    values = load(file).values if file is not None else {}
    return override(path, values[key]) if key in values else ""


def near_choice(word: str, choices: Sequence[str]) -> list[str]:
    """Return the choices that `word` may have meant, best first."""
    import difflib

    word = plain(word).strip().lower()
    near = difflib.get_close_matches(word, choices, n=3, cutoff=0.5)
    letters = re.sub(r"[^a-z0-9]", "", word)
    # Case, dashes and dots are the most frequent slips, and unambiguous.
    same = [c for c in choices if re.sub(r"[^a-z0-9]", "", c.lower()) == letters]
    begun = sorted(
        (c for c in choices if len(word) > 2 and c.startswith(word)),
        key=lambda c: _by_size(c, word),
    )
    return same or list(dict.fromkeys([*_of_another_size(word, choices), *begun, *near]))[:3]


def _by_size(choice: str, begin: str) -> tuple[int, list[float]]:
    """Return an order of choices with a common prefix: the name plus a size, the name plus other
    words, other names; the smallest of each first.
    """
    rest = choice.removeprefix(begin)
    # llama3 means llama3_8b before llama3_instruct and before llama31_8b.
    order = 2
    if not rest or rest[0] == "_":
        order = 0 if _SIZE.match(rest, 1) or not rest else 1
    return order, [_in_ones(size) for size in _SIZE.findall(rest)]


def _in_ones(size: tuple[str, str]) -> float:
    """Return a number with a unit (1.7, "b") as a plain number."""
    return float(size[0]) * _UNITS.get(size[1], 1.0)


def _of_another_size(word: str, choices: Sequence[str]) -> list[str]:
    """Return the choices that differ from a word in one number, the nearest first."""
    sizes = _SIZE.findall(word)
    outside = _SIZE.sub("#", word)
    away: dict[str, float] = {}
    for choice in choices if sizes else ():
        if _SIZE.sub("#", choice) == outside:
            apart = [
                pair
                for pair in zip(sizes, _SIZE.findall(choice), strict=True)
                if pair[0] != pair[1]
            ]
            if len(apart) == 1:
                away[choice] = _apart(*apart[0])
    return sorted(away, key=lambda choice: away[choice])


def _apart(one: tuple[str, str], other: tuple[str, str]) -> float:
    """Return the distance of two sizes, without units if one has none."""
    # 8 next to 8b: compare the digits if a unit is missing.
    if one[1] and other[1]:
        return abs(_in_ones(one) - _in_ones(other))
    return abs(float(one[0]) - float(other[0]))


def layouts_near(word: str) -> list[str]:
    """Return the layouts that a word may have meant: other case, separators, or a bare number."""
    letters = re.sub(r"[^a-z0-9]", "", plain(word).lower())
    # A bare number may be a degree of any of the three usual axes.
    if letters.isdigit() and int(letters[:7]) > 0 and len(letters) < 7:
        return [f"{axis}{int(letters)}" for axis in ("tp", "pp", "dp")]
    try:
        parse_layout(letters)
    except ValueError:
        return []
    return [letters]


def spelled(group: str, value: object) -> str:
    """Return the choice whose name YAML reads as a value (1.10 as 1.1); else the text."""
    return next((name for name in choices_of_group(group) if scalar(name) == value), str(value))


def usual_choice(group: str) -> str:
    """Return the default choice of a group, or the first of its files; empty if it has none."""
    names = choices_of_group(group)
    usual = default_choices()[0].get(group, "")
    return usual if usual in names or layouts_near(usual) == [usual] else next(iter(names), "")


def with_choices(change: Mapping[str, Any]) -> str:
    """Return the overrides of a change, with a choice in place of the key that it sets."""
    chosen = {
        CHOOSING[key]: value
        for key, value in change.items()
        if key in CHOOSING and value not in NO_CHOICE
    }
    others = [
        override(key, value) for key, value in change.items() if key.partition(".")[0] not in chosen
    ]
    return " ".join([*(f"{group}={choice}" for group, choice in chosen.items()), *others])


def chooses(group: str, choice: str) -> str:
    """Return the argument that makes a choice, with a + for a group without a default."""
    known = group in GROUPS or group in default_choices()[0]
    return f"{'' if known else '+'}{group}={choice}"


def choice_fix(group: str, text: str) -> str:
    """Return overrides that an unknown choice may have meant, best first."""
    near = near_choice(text, choices_of_group(group))
    if group == "parallel":
        near = layouts_near(text) or near
        # parallel=1 means one rank.
        near += ["single"] if text.strip().isdigit() else []
    if is_nothing(text):
        near = [usual_choice(group)]
    return (
        " or ".join(chooses(group, name) for name in near if name)
        or f"{program()} choices {group}, for all of them"
    )


def bare_word(word: str) -> list[str]:
    """Return the settings that a word without `=` may have meant, such as a choice."""
    key, _, value = word.partition(":")
    path = as_key(key)
    if value and (field_of(path) is not None or path in GROUPS):
        return [f"{path}={value.strip()}"]
    names = recipe_names()
    recipe = word.removesuffix(".yaml")
    if recipe in names or (word.endswith((".yaml", ".yml")) and os.path.isfile(word)):
        return [f"recipe={recipe if recipe in names else word}"]
    found = [
        f"{group}={name}"
        for group in GROUPS
        for name in choices_of_group(group)
        if name == plain(word).lower()
    ]
    if found or layouts_near(word):
        return found or [f"parallel={name}" for name in layouts_near(word)]
    if field_of(path) is not None and (default := at_default(path)):
        return [default]
    import difflib

    # Reversed, so that of two groups with one name the first of GROUPS wins.
    every = {name: group for group in reversed(GROUPS) for name in choices_of_group(group)}
    close = difflib.get_close_matches(plain(word).lower(), every, n=1, cutoff=0.8)
    recipes = difflib.get_close_matches(recipe, names, n=1, cutoff=0.8)
    return [f"{every[name]}={name}" for name in close] or [f"recipe={name}" for name in recipes]


def default_choices() -> tuple[dict[str, str], dict[str, str]]:
    """Return group -> choice of `config.yaml`, and group -> the line that makes it.

    Raises:
        ConfigError: `defaults` contains an invalid entry.
    """
    config = load(find_config("config") or conf_dir() / "config.yaml")
    choices: dict[str, str] = {}
    sources: dict[str, str] = {}
    problems: list[Problem] = []
    entries = config.values.get("defaults", [])
    # A user's own config.yaml may replace the one that ships, so validate it.
    for index, entry in enumerate(entries if isinstance(entries, list) else [None]):
        source = config.where(f"defaults.{index}")
        ((group, choice),) = (
            entry.items() if isinstance(entry, dict) and len(entry) == 1 else [(entry, None)]
        )
        if _is_name(group) and _is_name(choice) and group not in choices:
            choices[group] = choice
            sources[group] = source
        elif choice is not None or not (
            entry == "_self_" or _is_file(entry) or (_is_name(group) and entry != group)
        ):
            problems.append(_no_default(entry, group, choice, source))
    if problems:
        raise ConfigError(problems)
    return choices, sources


def _is_file(entry: object) -> bool:
    """Return whether an entry of the defaults names a file next to `config.yaml`."""
    return _is_name(entry) and find_config(entry) is not None


def _is_name(word: object) -> TypeGuard[str]:
    return isinstance(word, str) and CHOICE.match(word) is not None


def _no_default(entry: object, group: object, choice: object, source: str) -> Problem:
    """Return the problem of an invalid entry of the defaults of `config.yaml`."""
    rule = (
        "an entry of defaults is `GROUP: CHOICE`, with the name of one choice and once for each"
        " group, or `_self_`"
    )
    name = str(group).rpartition(" ")[2].lstrip("/")
    fix = "delete it"
    if name in GROUPS and name != group and _is_name(choice):
        fix = f"- {name}: {choice}"
    elif _is_name(group) and isinstance(choice, (int, float)):
        fix = (
            f"put the name of the choice into quotes, as in `- {group}:"
            f" '{spelled(str(group), choice)}'`"
        )
    return Problem("MT017", "defaults", entry, rule, fix, source)
