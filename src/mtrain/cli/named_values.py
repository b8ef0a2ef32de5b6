"""Words `name=value` of a verb that are no settings, each read and checked in one place.

The subverbs of `data` also read `--name VALUE`, which means the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any

from mtrain.cli.output import refusal
from mtrain.config.compose.origins import COMMAND_LINE
from mtrain.config.compose.paths import program, user_path
from mtrain.config.messages.keys import readings
from mtrain.config.schema.run import GROUPS
from mtrain.errors import ConfigError, Problem

Reader = Callable[[str], Any]


@dataclass(frozen=True)
class Word:
    """The declaration of a word: its default, and how its text is read."""

    default: Any
    read: Reader = str
    """Raises ValueError for a text that is no value of it."""
    rule: str = ""
    """Requirement on the value, for error messages."""
    example: str = ""
    """A value of it."""
    aka: tuple[str, ...] = ()
    """Its names in other systems."""
    many: bool = False
    """True if it may be repeated, each time with a value or a JSON list of values."""


def number(
    kind: type[int] | type[float], low: float, high: float, *, above: bool = False
) -> Reader:
    """Return a reader of numbers from `low` (`above`: greater than that) to `high`."""

    def read(text: str) -> Any:
        value = kind(text)
        if not (low < value if above else low <= value) or not value <= high:
            raise ValueError(text)
        return value

    return read


def whole(default: int | None, low: int, high: int, example: str, rule: str = "") -> Word:
    """Declare a whole number; without a `rule`, one of at least `low`."""
    rule = rule or f"a whole number of at least {low}"
    return Word(default, number(int, low, high), rule, example)


def yes(text: str) -> bool:
    """Read true or false."""
    return {"true": True, "false": False}[text.lower()]


OFF = Word(False, yes, "true or false", "true")
ON = Word(True, yes, "true or false", "false")


def one_of(*names: str) -> Reader:
    """Return a reader of one of several words."""
    return {name: name for name in names}.__getitem__


def texts(text: str) -> list[str]:
    """Return the texts of a JSON list or string; any other text is returned as it is."""
    try:
        value = json.loads(text)
    except ValueError:
        return [text]
    found = value if isinstance(value, list) else [value]
    return found if found and all(isinstance(one, str) for one in found) else [text]


def _meant(name: str, known: Mapping[str, Word]) -> list[str]:
    """Return the known word that a name misspells, translates or contains."""
    parts = name.lower().replace("-", "_").split("_")
    near = [word for word, facts in known.items() if name.lower() in facts.aka]
    near = near or get_close_matches(name.lower(), known, n=1, cutoff=0.8)
    return near or [word for word in known if word in parts]


def _as_meant(name: str, value: str, word: Word) -> str:
    """Return the word with the number that its value abbreviates (10k: 10000); else empty."""
    for reading in chain.from_iterable(readings(name, value)):
        if isinstance(reading, (int, float)) and not isinstance(reading, bool):
            with suppress(ValueError, KeyError):
                word.read(str(reading))
                return f"{name}={reading}"
    return ""


def read_words(words: Sequence[str], known: Mapping[str, Word]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the `known` words, with their defaults, and the other words.

    Raises:
        ConfigError: for every invalid value, repeated word, and misspelt word.
    """
    values = {
        name: list(word.default) if word.many else word.default for name, word in known.items()
    }
    others = list[str]()
    seen = set[str]()
    problems = list[Problem]()

    def refuse(code: str, rule: str, fix: str) -> None:
        problems.append(Problem(code, name, value, rule, fix, COMMAND_LINE))

    for text in words:
        name, equals, value = text.partition("=")
        word = known.get(name)
        if not equals or word is None:
            # a dotted name, or that of a group, is a setting
            near = _meant(name, known) if equals and name not in GROUPS else []
            if near and "." not in name:
                rule = f"is no word of this verb; words: {', '.join(known)}"
                refuse("MT003", rule, f"{near[0]}={value}")
            others.append(text)
            continue
        if name in seen and not word.many:
            refuse("MT004", "is set twice", f"{name}={value}, once")
        seen.add(name)
        try:
            found = word.read(value)
            values[name] = [*values[name], *found] if word.many else found
        except (ValueError, KeyError):
            fix = _as_meant(name, value, word) or f"{name}={word.example}"
            refuse("MT003", f"must be {word.rule}", fix)
    if problems:
        raise ConfigError(problems)
    return values, others


def read_arguments(
    argv: Sequence[str],
    known: Mapping[str, Word],
    usage: str,
    least: int = 1,
    most: int | None = None,
) -> tuple[dict[str, Any], list[Path]]:
    """Return the values of the `known` words and the paths of a subverb of `data`, of which `least`
    to `most` are needed.

    Raises:
        ConfigError: an unknown flag or word, an invalid value, too few or too many paths.
    """
    values, rest = read_words(as_words(argv, known, usage), known)
    strange = [word for word in rest if "=" in word and not os.path.exists(word)]
    if strange:
        name, _, value = strange[0].partition("=")
        rule = f"is no word of this subverb; words: {', '.join(known) or 'none'}"
        raise refusal(rule, _fix(usage), "MT003", name, value)
    if len(rest) < least or (most is not None and len(rest) > most):
        need = f"{least} to {most}"
        if most is None:
            need = f"at least {least}"
        elif most == least:
            need = f"{least}"
        last = least if most is None else most
        rule = f"cannot run because it takes {need} path{'s' * (last != 1)}, not {len(rest)}"
        raise refusal(rule, _fix(usage), "MT002")
    return values, [user_path(word) for word in rest]


def required(values: Mapping[str, Any], name: str, usage: str) -> Any:
    """Return the value of a word that has no default.

    Raises:
        ConfigError: it is not set.
    """
    if values[name] is None:
        raise refusal("cannot be left out because it has no default", _fix(usage), "MT002", name)
    return values[name]


def as_words(argv: Sequence[str], known: Mapping[str, Word], usage: str) -> list[str]:
    """Return flags with their values as words `name=value`.

    Raises:
        ConfigError: a flag does not exist, or lacks its value.
    """
    out = list[str]()
    queue = list(argv)
    while queue:
        word = queue.pop(0)
        flag, equals, value = word.partition("=")
        name = flag[2:].replace("-", "_")
        if not word.startswith("-") or word == "-":
            out.append(word)
        elif not flag.startswith("--") or name not in known:
            flags = ", ".join(f"--{each.replace('_', '-')}" for each in known)
            raise refusal(f"{flag}: there is no such flag here; flags: {flags}", _fix(usage))
        elif equals:
            out.append(f"{name}={value}")
        elif known[name].read is yes:
            out.append(f"{name}=true")
        elif queue:
            out.append(f"{name}={queue.pop(0)}")
        else:
            raise refusal(f"{flag}: needs a value", _fix(usage))
    return out


def _fix(usage: str) -> str:
    return f"{program()} data {usage}"
