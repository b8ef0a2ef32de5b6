"""The candidates of a shell that completes a command line.

Nothing heavy is imported: a shell asks at every press of the key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain.config.compose.paths import (
    RESUME_WORDS,
    choices_of_group,
    config_dirs,
    group_names,
    recipe_names,
)
from mtrain.errors import say

if TYPE_CHECKING:
    from mtrain.cli.command import Offers, Paged

RUNS = "runs"
AXES = ("tp", "pp", "cp", "vpp", "ep", "etp", "dp")
SHELLS = ("bash", "zsh", "fish")
_AXIS = re.compile("|".join(sorted(AXES, key=len, reverse=True)))
_LAYOUT = re.compile(rf"((?:(?:{_AXIS.pattern})[0-9]+)*)([a-z]*)\Z")


def answer(line: str) -> int:
    """Print a candidate a line for the command line up to the cursor; never an error."""
    with suppress(Exception):
        say(*(word for word in candidates(line) if word.isprintable()))
    return 0


def candidates(line: str) -> list[str]:
    """Return everything that the last word of `line` could become; its first word is the
    program.
    """
    words = line.split()[1:]
    if line[-1:].isspace() or not words:
        words.append("")
    *before, current = words
    folders = [word for flag, word in pairwise(before) if flag == "--config-dir"]
    with config_dirs(folders):
        offered = {word for word in _offered(before, current) if word.startswith(current)}
        return sorted(offered)


def _offered(before: list[str], current: str) -> Iterable[str]:
    from mtrain.cli.verbs import NAMES, command_of

    flags = ["", *before]
    before = [
        word
        for flag, word in zip(flags, before, strict=False)
        if "--config-dir" not in (flag, word)
    ]
    bare = [word for word in before if not word.startswith("-")]
    verb = bare[0] if bare else ""
    command = command_of(verb) if verb in NAMES else None
    if command is not None:
        command = getattr(command, "commands", {}).get("".join(bare[1:2]), command)
    if current.startswith("-"):
        return _flags() if command is None else command.flags()
    if not verb:
        return [*NAMES, *settings(before, current)]
    if command is None:
        return settings(before, current)
    return _words(command, bare[1:], current)


def _words(command: Paged, before: Sequence[str], current: str) -> Iterable[str]:
    """Return the candidates for a word of a verb."""
    if command.offers is not None:
        return command.offers(before, current)
    subverbs = getattr(command, "commands", None)
    if subverbs is not None:
        return [] if before else subverbs
    return settings(before, current)


def _flags() -> list[str]:
    from mtrain.cli.verbs import NAMES, command_of

    return [flag for name in NAMES for flag in command_of(name).flags()]


def nothing(before: Sequence[str], current: str) -> Iterable[str]:
    """Offer nothing, so that the shell completes names of files."""
    return ()


def shells(before: Sequence[str], current: str) -> Iterable[str]:
    """Offer the shells that have a script."""
    return SHELLS


def groups(before: Sequence[str], current: str) -> Iterable[str]:
    """Offer the groups."""
    return group_names()


def schemas(before: Sequence[str], current: str) -> Iterable[str]:
    """Offer the schemas."""
    from mtrain.config.messages.json_schema import KINDS

    return KINDS


def first_of(words: Sequence[str]) -> Offers:
    """Return an offer of these words for the first word, and of nothing after it."""
    return lambda before, current: () if before else words


def only_a_run(before: Sequence[str], current: str) -> Iterable[str]:
    """Offer runs and checkpoints for the first word, and nothing after it."""
    return () if before else [*_runs(), *_checkpoints()]


def first_a_run(before: Sequence[str], current: str) -> Iterable[str]:
    """Offer runs and checkpoints for the first word, and settings after it."""
    return settings(before, current) if before else only_a_run(before, current)


def run_then(own: Sequence[str]) -> Offers:
    """Return an offer of a run, and after it of settings and the verb's own words, as `prompt=`."""

    def offers(before: Sequence[str], current: str) -> Iterable[str]:
        return [*own, *settings(before, current)] if before else only_a_run(before, current)

    return offers


def named_recipes(before: Sequence[str], current: str) -> Iterable[str]:
    """Offer recipes, runs and locks."""
    return [*recipe_names(), *_runs(), *locks(before, current)]


def named_recipes_and_settings(before: Sequence[str], current: str) -> Iterable[str]:
    """Offer recipes, runs, locks and settings."""
    return [*named_recipes(before, current), *settings(before, current)]


def locks(before: Sequence[str], current: str) -> Iterable[str]:
    """Offer locks in this folder, by the ending that `recipe lock` gives them."""
    return [str(file) for file in Path().glob("*.lock.yaml")]


def first_explained(before: Sequence[str], current: str) -> Iterable[str]:
    """Offer keys, groups and codes for the first word, and settings after it."""
    if before:
        return settings(before, current)
    if current[:1] in ("M", "m") and current[1:2] in ("T", "t"):
        from mtrain.config.messages.codes import codes

        return [code if current[0] == "M" else code.lower() for code in codes()]
    if "." not in current:
        names = group_names()
        return [*names, *(f"{group}." for group in names)]
    return [key.removesuffix("=") for key in _keys()]


def settings(before: Sequence[str], current: str) -> list[str]:
    """Offer a group with its choices, or a key with its values."""
    key, equals, begun = current.partition("=")
    names = group_names()
    if equals:
        return [f"{key}={value}" for value in values_of(key, names, begun)]
    if "." in current:
        return _keys()
    return [
        *(f"{group}=" for group in names),
        *(f"{group}." for group in names),
        "recipe=",
        "run=",
    ]


def _keys() -> list[str]:
    from mtrain.config.messages.keys import schema_keys

    return [f"{key}=" for key in schema_keys() if not key.startswith("recipe.")]


def values_of(key: str, names: Sequence[str], begun: str) -> list[str]:
    """Return the values that a key, or a group of these `names`, may have."""
    if key == "parallel":
        return [*choices_of_group(key), *_layouts(begun)]
    if key in names:
        return choices_of_group(key)
    if key == "recipe":
        return recipe_names()
    if key == "run":
        return [*(f"{folder}/run.yaml" for folder in _runs()), *locks((), begun)]
    if key == "checkpoint.resume":
        return [*RESUME_WORDS, "null", *_runs(), *_checkpoints()]
    from mtrain.config.messages.describe import type_of
    from mtrain.config.messages.keys import choices_of

    words = type_of(key)
    values = [*choices_of(key)]
    if words.startswith("true or false"):
        values += ["true", "false"]
    if words.endswith("null"):
        values.append("null")
    return values


def _runs() -> list[str]:
    """Return the run folders in the usual place."""
    return [str(file.parent) for file in Path(RUNS).glob("*/run.yaml")]


def _checkpoints() -> list[str]:
    """Return the checkpoints of the runs in the usual place."""
    return [str(file.parent) for file in Path(RUNS).glob("*/checkpoints/step_*/manifest.json")]


def _layouts(begun: str) -> list[str]:
    """Return layouts in one word that begin so: a further axis with a usual degree."""
    match = _LAYOUT.match(begun)
    if match is None:
        return []
    complete = match[1]
    axis = match[2]
    used = _AXIS.findall(complete)
    degrees = [
        f"{name}{degree}"
        for name in AXES
        if name not in used and name.startswith(axis)
        for degree in (2, 4, 8)
    ]
    if complete:
        degrees.append("sp")
    return [f"{complete}{degree}" for degree in degrees]
