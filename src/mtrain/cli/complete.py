"""What could stand where the cursor is: the answer to a shell that completes.

Nothing heavy is imported for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from mtrain.cli.verbs import FLAGS, VERBS
from mtrain.config.compose.paths import (
    RESUME_WORDS,
    choices_of_group,
    config_dirs,
    group_names,
    recipe_names,
)
from mtrain.errors import say

NAMED = ("show", "diff", "lock", "export")
"""Subverbs of `recipe` that take the name of one."""
RUNS = "runs"
AXES = ("tp", "pp", "cp", "vpp", "ep", "etp", "dp")
_AXIS = re.compile("|".join(sorted(AXES, key=len, reverse=True)))
_LAYOUT = re.compile(rf"((?:(?:{_AXIS.pattern})[0-9]+)*)([a-z]*)\Z")
SHELLS = ("bash", "zsh", "fish")


def run(argv: list[str], *, debug: bool) -> int:
    """Print a line for each candidate of the command line in `argv[0]`, up to the cursor; never an
    error.
    """
    with suppress(Exception):
        say(*(word for word in candidates(argv[0] if argv else "") if word.isprintable()))
    return 0


def candidates(line: str) -> list[str]:
    """Everything that the last word of `line` could become; the first word is the
    command itself.
    """
    words = line.split()[1:]
    if line[-1:].isspace() or not words:
        words.append("")
    *before, current = words
    dirs = [after for flag, after in pairwise(before) if flag == "--config-dir"]
    with config_dirs(dirs):
        return sorted(
            dict.fromkeys(word for word in _offered(before, current) if word.startswith(current))
        )


def _offered(before: list[str], current: str) -> Iterable[str]:
    before = [
        word
        for flag, word in zip(["", *before], before, strict=False)
        if "--config-dir" not in (flag, word)
    ]
    verb = next((word for word in before if not word.startswith("-")), "")
    if current.startswith("-"):
        from mtrain.cli.pages import PAGES, flags_of

        return flags_of(verb, before) if verb in PAGES else [*FLAGS, "-m", "-h"]
    if not verb:
        return [*VERBS, *_overrides(current)]
    if verb == "recipe":
        return _recipe([word for word in before if not word.startswith("-")][1:], current)
    if verb == "data" and not before[1:]:
        from mtrain.cli.data import SUBVERBS

        return SUBVERBS
    if verb == "explain" and len(before) == 1:
        return _explained(current)
    if verb == "schema":
        from mtrain.config.messages.json_schema import KINDS

        return KINDS
    if verb == "completion":
        return SHELLS
    if verb == "choices":
        return group_names()
    if verb in ("resume", "generate", "evaluate", "export") and len(before) == 1:
        return [*_runs(), *_checkpoints()]
    if verb == "convert" and not before[1:]:
        return ("import", "export", "inspect", "verify")
    if verb in ("export", "convert"):
        return []
    return [*(_own_words(verb) if verb in ("generate", "evaluate") else ()), *_overrides(current)]


def _own_words(verb: str) -> list[str]:
    """What a verb takes beside settings, as its page says it: `prompt=`."""
    from mtrain.cli.pages import PAGES

    return [
        f"{name.partition('=')[0]}="
        for name, _ in PAGES[verb].arguments
        if "=" in name and name[0].islower()
    ]


def _recipe(before: list[str], current: str) -> Iterable[str]:
    if not before:
        from mtrain.cli.recipe import SUBVERBS

        return SUBVERBS
    if before[0] == "verify":
        return _locks()
    names = [*_recipes(), *_runs(), *_locks()] if before[0] in NAMED else []
    return [*names, *_overrides(current)] if before[0] != "diff" else names


def _explained(current: str) -> Iterable[str]:
    if current[:1] in ("M", "m") and current[1:2] in ("T", "t"):
        from mtrain.config.messages.codes import codes

        return [code if current[0] == "M" else code.lower() for code in codes()]
    groups = group_names()
    if "." not in current:
        return [*groups, *(f"{group}." for group in groups)]
    return [key.removesuffix("=") for key in _keys()]


def _overrides(current: str) -> list[str]:
    """Settings: a group with its choices, a key with its words."""
    key, equals, begun = current.partition("=")
    groups = group_names()
    if equals:
        return [f"{key}={value}" for value in _values(key, groups, begun)]
    if "." in current:
        return _keys()
    return [
        *(f"{group}=" for group in groups),
        *(f"{group}." for group in groups),
        "recipe=",
        "run=",
    ]


def _keys() -> list[str]:
    from mtrain.config.messages.keys import schema_keys

    return [f"{key}=" for key in schema_keys() if not key.startswith("recipe.")]


def _values(key: str, groups: list[str], value: str) -> list[str]:
    if key == "parallel":
        return [*choices_of_group(key), *_layouts(value)]
    if key in groups:
        return choices_of_group(key)
    if key == "recipe":
        return _recipes()
    if key == "run":
        return [*(f"{folder}/run.yaml" for folder in _runs()), *_locks()]
    if key == "checkpoint.resume":
        return [*RESUME_WORDS, "null", *_runs(), *_checkpoints()]
    from mtrain.config.messages.describe import type_of
    from mtrain.config.messages.keys import choices_of

    words = type_of(key)
    found = [*choices_of(key), *(["true", "false"] if words.startswith("true or false") else [])]
    return [*found, *(["null"] if words.endswith("null") else [])]


def _recipes() -> list[str]:
    return recipe_names()


def _runs() -> list[str]:
    """Run folders in the usual place."""
    return [str(file.parent) for file in Path(RUNS).glob("*/run.yaml")]


def _checkpoints() -> list[str]:
    """Checkpoints of the runs in the usual place."""
    return [str(file.parent) for file in Path(RUNS).glob("*/checkpoints/step_*/manifest.json")]


def _locks() -> list[str]:
    """Locks in this folder, by the name that `recipe lock` gives them."""
    return [str(file) for file in Path().glob("*.lock.yaml")]


def _layouts(begun: str) -> list[str]:
    """Return layouts in one word that begin so: another axis with a usual degree behind those that
    are there.
    """
    match = _LAYOUT.match(begun)
    if match is None:
        return []
    there = match[1]
    axis = match[2]
    used = _AXIS.findall(there)
    more = [
        f"{name}{n}"
        for name in AXES
        if name not in used and name.startswith(axis)
        for n in (2, 4, 8)
    ]
    return [f"{there}{word}" for word in (*more, *(["sp"] if there else []))]
