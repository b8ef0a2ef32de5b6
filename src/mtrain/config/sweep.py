"""A command line with several values for a key as several command lines, in Hydra's grammar."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from mtrain.config.keys import choices_of
from mtrain.config.origins import COMMAND_LINE
from mtrain.config.overrides import shortened
from mtrain.config.paths import choices_of_group, is_group, recipe_names
from mtrain.config.run import GROUPS
from mtrain.errors import ConfigError, Problem

MAX_RUNS = 1000


@dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    argv: tuple[str, ...]
    swept: dict[str, str]
    """The keys that are swept, with this run's values."""

    @property
    def differs(self) -> str:
        """What tells this run from the others."""
        return " ".join(f"{key}={value}" for key, value in self.swept.items()) or "(nothing is swept)"


def jobs(argv: Sequence[str]) -> list[Job]:
    """Every combination of the swept values; the last key varies fastest, a key is given once.

    Raises:
        ConfigError: a value cannot be read, sweeps over nothing, or there are more than 1000 runs.
    """
    words: dict[str, list[str]] = {}
    given: dict[str, str] = {}
    swept: list[str] = []
    problems: list[Problem] = []
    for argument in argv:
        key, equals, text = argument.partition("=")
        values = [text]
        if equals and ("," in text or "(" in text):
            try:
                values = _values(key, text)
            except ValueError as error:
                problems.append(Problem("MT010", key, text, str(error), "", COMMAND_LINE))
        if equals and key in given:
            rule = f"said twice, as {shortened(given[key])} and as {shortened(argument)}; one of them would be lost"
            problems.append(Problem("MT004", key, text, rule, "keep one of them", COMMAND_LINE))
        given[key] = argument
        swept += [key] if values != [text] else []
        words[key] = [f"{key}={value}" for value in values] if equals else [argument]
    if problems:
        raise ConfigError(problems)
    count = math.prod(len(values) for values in words.values())
    if count > MAX_RUNS:
        rule = f"{count} runs; a sweep makes at most {MAX_RUNS}"
        raise ConfigError([Problem("MT010", "", None, rule, "sweep over fewer values", COMMAND_LINE)])
    keys = list(words)
    return [
        Job(chosen, {key: chosen[keys.index(key)].partition("=")[2] for key in swept})
        for chosen in itertools.product(*words.values())
    ]


def _values(key: str, text: str) -> list[str]:
    from mtrain.config.grammar import sweep_values

    found = sweep_values(text, _names(key), MAX_RUNS)
    if found is None:
        return [text]
    if not found:
        raise ValueError(f"stands for nothing; there are {', '.join(_names(key)) or 'no names'}")
    return found


def _names(key: str) -> list[str]:
    """What a key can be called: the files of a group, the shared recipes, the words of a key."""
    if key == "recipe":
        return recipe_names()
    key = key.lstrip("+")
    return choices_of_group(key) if key in GROUPS or is_group(key) else list(choices_of(key))
