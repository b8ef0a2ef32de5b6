"""`completion SHELL`, and the candidates of a shell that completes a command line.

Nothing heavy is imported: a shell asks at every press of the key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from mtrain.cli.command import Paged, Subverbs
from mtrain.cli.output import refusal
from mtrain.cli.verbs import NAMES, command_of
from mtrain.config.compose.paths import (
    RESUME_WORDS,
    choices_of_group,
    config_dirs,
    group_names,
    recipe_names,
)
from mtrain.errors import say, say_page

RUNS = "runs"
AXES = ("tp", "pp", "cp", "vpp", "ep", "etp", "dp")
SHELLS = ("bash", "zsh", "fish")
SCRIPTS = Path(__file__).with_name("completions")
# `vpp` before `pp`, `etp` before `tp`: the first that matches is taken
_AXIS = re.compile("|".join(sorted(AXES, key=len, reverse=True)))
_LAYOUT = re.compile(rf"((?:(?:{_AXIS.pattern})[0-9]+)*)([a-z]*)\Z")


def run(words: list[str]) -> int:
    """Print the script with which a shell asks `mtrain __complete` for candidates.

    Raises:
        ConfigError: the shell is missing or unknown.
    """
    if not words:
        raise refusal("the shell is missing", "completion bash")
    if words[0] not in SHELLS:
        rule = f"there is no completion for {words[0]}; shells: {', '.join(SHELLS)}"
        raise refusal(rule, "completion bash")
    say_page((SCRIPTS / f"mtrain.{words[0]}").read_text(encoding="utf-8"))
    return 0


def answer(line: str) -> int:
    """Print a candidate a line for the command line up to the cursor; never an error."""
    # An error would appear in the middle of the line that a user types.
    with suppress(Exception):
        say(*(word for word in candidates(line) if word.isprintable()))
    return 0


def candidates(line: str) -> list[str]:
    """Return all completions of the last word of `line`, whose first word is the program."""
    words = line.split()[1:]
    if line[-1:].isspace() or not words:
        words.append("")
    *before, current = words
    # Choices in folders that this very line names are candidates, too.
    folders = [word for flag, word in pairwise(before) if flag == "--config-dir"]
    with config_dirs(folders):
        offered = {word for word in _offered(before, current) if word.startswith(current)}
        return sorted(offered)


def _offered(before: list[str], current: str) -> Iterable[str]:
    is_folder = [flag == "--config-dir" for flag in ("", *before)]
    bare = [
        word
        for word, skipped in zip(before, is_folder, strict=False)
        if not skipped and not word.startswith("-")
    ]
    verb = bare[0] if bare else ""
    command: Paged | None = command_of(verb) if verb in NAMES else None
    rest = bare[1:]
    if isinstance(command, Subverbs) and rest and rest[0] in command.commands:
        # The name of the subverb counts as its first word, as a path before it would.
        command = command.commands[rest[0]]
    if current.startswith("-"):
        shown = [command] if command is not None else map(command_of, NAMES)
        return [flag for each in shown for flag in each.flags()]
    if isinstance(command, Subverbs):
        return [] if rest else command.commands
    if command is not None:
        return _words(command, rest, current)
    return [*([] if verb else NAMES), *settings(current)]


def _words(command: Paged, before: Sequence[str], current: str) -> Iterable[str]:
    """Return the candidates for a word of a verb, by the sources that its page names."""
    page = command.declared
    sources = page.then if before and page.then is not None else page.first
    offered: list[str] = []
    for source in sources:
        if source == "own":
            names = (name.partition("=")[0] for name in page.arguments if name[0].islower())
            offered += [f"{name}=" for name in names]
        else:
            offered += SOURCES[source](current) if source in SOURCES else [source]
    return offered


def settings(current: str) -> list[str]:
    """Return a group with its choices, or a key with its values."""
    key, equals, begun = current.partition("=")
    names = group_names()
    if equals:
        return [f"{key}={value}" for value in values_of(key, names, begun)]
    if "." in current:
        return _keys()
    return [*(f"{name}{end}" for name in names for end in "=."), "recipe=", "run="]


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
        return [*(f"{folder}/run.yaml" for folder in _runs()), *_locks()]
    if key == "checkpoint.resume":
        return [*RESUME_WORDS, "null", *_runs(), *_checkpoints()]
    # Only a value of a key needs the schema, so a verb or a group completes without loading it.
    from mtrain.config.messages.describe import type_of
    from mtrain.config.messages.keys import choices_of

    words = type_of(key)
    values = [*choices_of(key)]
    if words.startswith("true or false"):
        values += ["true", "false"]
    if words.endswith("null"):
        values.append("null")
    return values


def _explained(current: str) -> list[str]:
    """Return keys and groups, or codes once the word begins like one."""
    if current[:2].upper() == "MT":
        from mtrain.config.messages.codes import codes

        # A shell compares a candidate with the typed word by case.
        return [code if current[0] == "M" else code.lower() for code in codes()]
    if "." not in current:
        return [f"{group}{end}" for group in group_names() for end in ("", ".")]
    return [key.removesuffix("=") for key in _keys()]


def _schemas(current: str) -> Iterable[str]:
    from mtrain.config.messages.json_schema import KINDS

    return KINDS


def _runs() -> list[str]:
    """Return the run folders in the usual place."""
    return [str(file.parent) for file in Path(RUNS).glob("*/run.yaml")]


def _checkpoints() -> list[str]:
    """Return the checkpoints of the runs in the usual place."""
    return [str(file.parent) for file in Path(RUNS).glob("*/checkpoints/step_*/manifest.json")]


def _locks() -> list[str]:
    """Return the locks in this folder, by the ending that `recipe lock` gives them."""
    return [str(file) for file in Path().glob("*.lock.yaml")]


def _layouts(begun: str) -> list[str]:
    """Return layouts in one word that begin so: a further axis with a usual degree."""
    match = _LAYOUT.match(begun)
    if match is None:
        return []
    complete = match[1]
    used = _AXIS.findall(complete)
    degrees = [
        f"{name}{degree}"
        for name in AXES
        if name not in used and name.startswith(match[2])
        for degree in (2, 4, 8)
    ]
    # No layout begins with sp: it is a property of the axes before it.
    if complete:
        degrees.append("sp")
    return [f"{complete}{degree}" for degree in degrees]


SOURCES: dict[str, Callable[[str], Iterable[str]]] = {
    "settings": settings,
    "groups": lambda current: group_names(),
    "schemas": _schemas,
    "shells": lambda current: SHELLS,
    "explained": _explained,
    "runs": lambda current: [*_runs(), *_checkpoints()],
    "recipes": lambda current: [*recipe_names(), *_runs(), *_locks()],
    "locks": lambda current: _locks(),
}
