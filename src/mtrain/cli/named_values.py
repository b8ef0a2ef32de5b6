"""Words `name=value` of a verb that are no settings, each read and checked in one place."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain
from typing import Any

from mtrain.config.compose.origins import COMMAND_LINE
from mtrain.config.messages.keys import readings
from mtrain.config.schema.run import GROUPS
from mtrain.errors import ConfigError, Problem


@dataclass(frozen=True)
class Word:
    """The declaration of a word: its default, and how its text is read."""

    default: Any
    read: Callable[[str], Any] = str
    """Raises ValueError for a text that is no value of it."""
    rule: str = ""
    """What a value must be."""
    example: str = ""
    aka: tuple[str, ...] = ()
    """Its names in other systems."""
    many: bool = False
    """It may be repeated, each time with a value or a JSON list of values."""


def number(
    kind: type[int] | type[float], low: float, high: float, *, above: bool = False
) -> Callable[[str], Any]:
    """Return a reader of numbers from `low` (`above`: greater than that) to `high`."""

    def read(text: str) -> Any:
        value = kind(text)
        if not (low < value if above else low <= value) or not value <= high:
            raise ValueError(text)
        return value

    return read


def yes(text: str) -> bool:
    """Read true or false."""
    return {"true": True, "false": False}[text.lower()]


def texts(text: str) -> list[str]:
    """Return the texts of a JSON list or string; any other text is returned as it is."""
    try:
        value = json.loads(text)
    except ValueError:
        return [text]
    found = value if isinstance(value, list) else [value]
    return found if found and all(isinstance(one, str) for one in found) else [text]


def _meant(name: str, known: Mapping[str, Word]) -> list[str]:
    """Return the known word that a name misspells, translates or contains: `max_new_tokens` is
    `tokens`.
    """
    parts = name.lower().replace("-", "_").split("_")
    near = [word for word, facts in known.items() if name.lower() in facts.aka]
    near = near or get_close_matches(name.lower(), known, n=1, cutoff=0.8)
    return near or [word for word in known if word in parts]


def _as_meant(name: str, value: str, word: Word) -> str:
    """Return the word with the number that its value abbreviates, as 10k does 10000; empty: no
    number.
    """
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
    said = set[str]()
    problems = list[Problem]()
    for text in words:
        name, equals, value = text.partition("=")
        word = known.get(name)
        if not equals or word is None:
            near = _meant(name, known) if equals and name not in GROUPS else []
            if near and "." not in name:
                rule = f"is no word of this verb; words: {', '.join(known)}"
                problems.append(
                    Problem("MT003", name, value, rule, f"{near[0]}={value}", COMMAND_LINE)
                )
            others.append(text)
            continue
        if name in said and not word.many:
            problems.append(
                Problem("MT004", name, value, "is set twice", f"{name}={value}, once", COMMAND_LINE)
            )
        said.add(name)
        try:
            found = word.read(value)
            values[name] = [*values[name], *found] if word.many else found
        except (ValueError, KeyError):
            fix = _as_meant(name, value, word) or word.example
            problems.append(
                Problem("MT003", name, value, f"must be {word.rule}", fix, COMMAND_LINE)
            )
    if problems:
        raise ConfigError(problems)
    return values, others
