"""Choices of groups: which texts may name one, and the problem of a text that cannot."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mtrain.config.compose.dump import override
from mtrain.config.compose.interpolate import leaves
from mtrain.config.compose.layout_string import looks_like_layout, nearest_layout, parse_layout
from mtrain.config.compose.origins import COMMAND_LINE
from mtrain.config.compose.paths import (
    CHOICE,
    choices_of_group,
    find_config,
    listing,
    names_near,
    user_path,
)
from mtrain.config.compose.yaml_reader import load, package_of
from mtrain.config.messages.suggestions import (
    NOTHING,
    SWEPT,
    accepts,
    choice_fix,
    chooses,
    layouts_near,
)
from mtrain.config.schema.run import GROUPS
from mtrain.errors import ConfigError, Problem

# Matches a text that names a file instead of a choice: it starts like a path or ends like a YAML
# file.
_PATH = re.compile(r"(\.{0,2}|~)/|.*\.ya?ml\Z")


def is_path(text: str) -> bool:
    """Return whether a choice is given as the path of a file."""
    return _PATH.match(text) is not None


def check_choice(group: str, text: str, source: str) -> Problem | None:
    """Return the problem of `group=text` when `text` cannot even be a choice's name."""
    value: object = text
    if is_path(text):
        return _path_problem(group, text, source)
    if CHOICE.match(text):
        return None
    if text.startswith("{"):
        rule = "a group takes a choice; its keys are set one by one"
        return Problem("MT010", group, value, rule, _one_by_one(group, text) or NOTHING, source)
    # `model=[a,b]` and `model=a,b` are Hydra's grammar: the first would merge both files silently,
    # so the message is about their names.
    names = [
        name.strip().removesuffix(".yaml").removesuffix(".yml")
        for name in text.strip("[] ").split(",")
    ]
    if (
        "," in text
        and source == COMMAND_LINE
        and not text.startswith("[")
        and all(_is_one(group, n) for n in names)
    ):
        rule = "a comma makes a sweep: -m trains or checks one run for each"
        return Problem("MT010", group, value, rule, SWEPT, source)
    first = next((name for name in names if name in choices_of_group(group)), names[0])
    fix = some_choice(group, re.split(r"[/\\]", first)[-1])
    if text.startswith("["):
        rule = "two choices of one group would be merged silently; choose one"
    elif "," in text:
        rule = "a comma makes a sweep: -m trains or checks one run for each; without it, choose one"
    elif "/" in text or "\\" in text or text.startswith("."):
        rule = (
            f"a choice is a name under conf/{group}, as in mine or mine/small, or the path of a"
            " file: ./mine.yaml"
        )
    else:
        rule = "needs the name of a choice"
    return Problem("MT010", group, value, rule, fix, source)


def _is_one(group: str, name: str) -> bool:
    """Return whether a name is a file of its group, or a layout in the group `parallel`."""
    return name in choices_of_group(group) or (
        group == "parallel" and bool(name) and layouts_near(name) == [name]
    )


def _path_problem(group: str, text: str, source: str) -> Problem | None:
    """Return the problem of a choice given as the path of a file; None if the file is usable."""
    name = Path(text).stem
    # A recipe is sent to others, who do not have the file.
    if source != COMMAND_LINE:
        rule = (
            "a path is for the command line: a recipe is one file, and names choices that others"
            " have as well"
        )
        fix = f"delete it, and say {group}={text} on the command line"
        return Problem("MT010", group, text, rule, fix, source)
    path = user_path(text)
    if not os.path.isfile(path):
        files = [chooses(group, file) for file in names_near(path) if is_path(file)]
        near = files[0] if files else choice_fix(group, name).split(" or ")[0]
        return Problem("MT011", group, text, "there is no such file", near, source)
    if not text.endswith((".yaml", ".yml")):
        rule = "the file of a choice ends in .yaml"
        return Problem("MT010", group, text, rule, chooses(group, f"{text}.yaml"), source)
    if _is_recipe(text):
        rule = f"is a recipe, and no choice of {group}: it has groups, and not the keys of one"
        return Problem("MT010", group, text, rule, f"recipe={text}", source)
    return None


def unknown_choice(group: str, choice: str, source: str) -> Problem | None:
    """Return the problem of an unknown choice; None for a file of the group or a layout."""
    if find_config(f"{group}/{choice}") is not None:
        return None
    if group == "parallel":
        try:
            parse_layout(choice)
            return None
        except ValueError as error:
            if looks_like_layout(choice):
                return Problem("MT016", group, choice, str(error), _layout_fix(choice), source)
    fix = choice_fix(group, choice)
    also = ", or a layout such as tp4pp4" if group == "parallel" else ""
    names = listing(choices_of_group(group), f"choices {group}")
    rule = f"there is no such choice; choices: {names}{also}"
    return Problem("MT011", group, choice, rule, fix, source)


def _layout_fix(choice: str) -> str:
    return " or ".join(f"parallel={word}" for word in layouts_near(choice)) or nearest_layout(
        choice
    )


def some_choice(group: str, text: str) -> str:
    """Return the first choice that a text may have meant, as an override."""
    if text in choices_of_group(group) or layouts_near(text) == [text]:
        return chooses(group, text)
    return choice_fix(group, text).split(" or ")[0]


def _is_recipe(text: str) -> bool:
    """Return whether a file looks like a recipe; one that names its package is a choice."""
    try:
        document = load(user_path(text)) if os.path.isfile(user_path(text)) else None
    except ConfigError:
        return False
    # `# @package _global_` makes a choice that sets several groups, which looks like a recipe.
    said = set() if document is None or package_of(document) is not None else {*document.values}
    return bool(said & {*GROUPS, "recipe"}) and said <= {*GROUPS, "defaults", "recipe"}


def _one_by_one(group: str, text: str) -> str:
    """Return the keys of a mapping given as a choice, as overrides; empty if one is invalid."""
    from mtrain.config.compose.grammar import parse_value

    try:
        found = list(leaves(parse_value(text), group))
    except ValueError:
        return ""
    return (
        " ".join(override(*pair) for pair in found) if all(accepts(*pair) for pair in found) else ""
    )
