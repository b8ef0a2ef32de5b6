"""Differences between two recipes, runs or checkpoints, and the meaning of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain.config.compose.paths import user_path
from mtrain.config.compose.recipe import find_recipe
from mtrain.config.compose.yaml_reader import load
from mtrain.config.messages.keys import effect_of
from mtrain.config.schema.base import Effect
from mtrain.config.schema.run import GROUPS, UnresolvedRun
from mtrain.errors import ConfigError, Problem

RUN_FILE = "run.yaml"
ABSENT = "(absent)"
"""The mark of a key in a section that is null on one side."""


@dataclass(frozen=True)
class Difference:
    """One key with both values."""

    key: str
    left: Any
    right: Any
    kind: Effect


def overrides_of(words: Sequence[str]) -> list[str]:
    """Return command-line words in which a bare one names a recipe, a run or checkpoint folder, or
    a run file.

    `~key` removes a key, and is no path; `~/left_values.yaml` is one.

    Raises:
        ConfigError: a folder holds no run, or the recipe does not exist.
    """
    return [
        word if "=" in word or (word[:1] == "~" and "/" not in word) else _named(word)
        for word in words
    ]


def _named(word: str) -> str:
    path = user_path(word)
    if (
        path.is_dir()
        and not (path / RUN_FILE).is_file()
        and not path.with_suffix(".yaml").is_file()
    ):
        rule = f"{word} is a folder without {RUN_FILE}; a run or a checkpoint folder has one"
        raise ConfigError(
            [Problem("MT502", "", None, rule, "the name of a recipe, or runs/NAME", "command line")]
        )
    if (path / RUN_FILE).is_file():
        return f"run={path / RUN_FILE}"
    # a run file has every group and no defaults; a recipe is a delta
    key = "run" if _is_run_file(path) else "recipe"
    if key == "recipe":
        find_recipe(word)  # raises with suggestions
    return f"{key}={path if key == 'run' else word}"


def _is_run_file(path: Path) -> bool:
    """Return whether a file has every group, as the one in a run folder does."""
    if not path.is_file():
        return False
    values = load(path).values
    return "defaults" not in values and set(GROUPS) <= values.keys()


def differences(left: UnresolvedRun, right: UnresolvedRun) -> list[Difference]:
    """Return the differences in what two configurations do, the gravest kind first."""
    return differences_of_values(left.recorded().flat(), right.recorded().flat())


def differences_of_values(
    left_values: Mapping[str, Any], right_values: Mapping[str, Any]
) -> list[Difference]:
    """Return the same of the leaves of two configurations, by their dotted keys."""
    keys = [
        key
        for key in {**left_values, **right_values}
        if left_values.get(key, ABSENT) != right_values.get(key, ABSENT)
    ]
    changed = [
        Difference(key, left_values.get(key, ABSENT), right_values.get(key, ABSENT), effect_of(key))
        for key in keys
        if not _repeats_its_section(key, left_values, right_values)
    ]
    # its order is that of gravity
    order = list(Effect)
    return sorted(changed, key=lambda d: order.index(d.kind))


def _repeats_its_section(
    key: str, left_values: Mapping[str, Any], right_values: Mapping[str, Any]
) -> bool:
    """Return whether a key only marks a section whose keys the other side lists."""
    left = key in left_values
    right = key in right_values
    other = right_values if left else left_values
    return left != right and any(k.startswith(f"{key}.") for k in other)
