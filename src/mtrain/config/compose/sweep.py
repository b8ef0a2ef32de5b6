"""Sweeps: a command line with several values for a key as several command lines, in Hydra's
grammar.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from mtrain.config.compose.grammar import sweep_values
from mtrain.config.compose.origins import COMMAND_LINE
from mtrain.config.compose.overrides import shortened
from mtrain.config.messages.unread import (
    MOST,
    is_empty,
    is_list_of_values,
    meant,
    names_of,
    why_unread,
)
from mtrain.errors import ConfigError, Problem

MAX_RUNS = MOST


@dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    argv: tuple[str, ...]
    swept: dict[str, str]
    """The swept keys with this run's values."""

    @property
    def differs(self) -> str:
        """Return the settings that distinguish this run from the others."""
        return (
            " ".join(f"{key}={value}" for key, value in self.swept.items()) or "(nothing is swept)"
        )


def jobs(argv: Sequence[str]) -> list[Job]:
    """Return every combination of the swept values; the last key varies fastest.

    Raises:
        ConfigError: a value cannot be read, a sweep is empty, or there are more than 1000 runs.
    """
    words: dict[str, list[str]] = {}
    given: dict[str, str] = {}
    swept: list[str] = []
    problems: list[Problem] = []
    for argument in argv:
        key, equals, text = argument.partition("=")
        values = [text]
        if equals:
            try:
                values = _values(key, text)
            except ValueError as error:
                rule = why_unread(key, text, str(error))
                fix = meant(key, text, sweep=True)
                problems.append(Problem("MT010", key, text, rule, fix, COMMAND_LINE))
        if equals and key in given:
            rule = (
                f"set twice, as {shortened(given[key])} and as {shortened(argument)}; one of them"
                " would be lost"
            )
            problems.append(Problem("MT004", key, text, rule, "keep one of them", COMMAND_LINE))
        given[key] = argument
        swept += [key] if values != [text] else []
        words[key] = [f"{key}={value}" for value in values] if equals else [argument]
    if problems:
        raise ConfigError(problems)
    count = math.prod(len(values) for values in words.values())
    if count > MAX_RUNS:
        rule = f"{count} runs; a sweep makes at most {MAX_RUNS}"
        raise ConfigError.of("MT010", "", None, rule, "sweep over fewer values", COMMAND_LINE)
    keys = list(words)
    return [
        Job(chosen, {key: chosen[keys.index(key)].partition("=")[2] for key in swept})
        for chosen in itertools.product(*words.values())
    ]


def _values(key: str, text: str) -> list[str]:
    """Return the values that a text stands for, each as written.

    Raises:
        ValueError: it is not in the grammar, stands for nothing, or is a list in place of values.
    """
    if not text and is_empty(key):
        raise ValueError("is empty")
    # Most values are plain words, which need no parser.
    if not set(text) & {*",(;["}:
        return [text]
    found = sweep_values(text, names_of(key), MAX_RUNS)
    if found == []:
        raise ValueError("stands for nothing")
    if found is None and is_list_of_values(key, text):
        raise ValueError(
            "a list is one value; values of a sweep are parted by commas, without brackets"
        )
    return found or [text]
