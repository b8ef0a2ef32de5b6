"""Recipes: YAML files of choices and values by others, which are validated data."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import islice
from pathlib import Path
from typing import Any

from mtrain.config.compose.choices import check_choice, is_path
from mtrain.config.compose.interpolate import refused
from mtrain.config.compose.paths import (
    MAX_NAMES,
    find_recipe_file,
    listing,
    program,
    recipe_names,
    user_path,
)
from mtrain.config.compose.yaml_reader import Document, filled, load
from mtrain.config.disk.files import YAML_ENDINGS, files_near
from mtrain.config.messages.suggestions import default_choices, near_choice, spelled
from mtrain.config.schema.run import GROUPS
from mtrain.errors import ConfigError, Problem

DEFAULTS_FORM = (
    "an entry of defaults is `override /GROUP: CHOICE`, as in `- override /model: llama3_8b`"
)


@dataclass
class Recipe:
    """A valid recipe: choices and values with their document."""

    document: Document
    path: Path
    choices: dict[str, str] = field(default_factory=dict)
    choice_lines: dict[str, str] = field(default_factory=dict)
    """group -> `file:line` of its choice."""
    values: dict[str, Any] = field(default_factory=dict)


def find_recipe(name: str) -> Path:
    """Return the file of a recipe: a shared one by its name under `recipes/`, or any path.

    Raises:
        ConfigError: it is missing; the message lists similar names.
    """
    # A user's own file takes precedence over a shared recipe of the same name.
    shared = find_recipe_file(name)
    for path in (
        user_path(name),
        user_path(f"{name}.yaml"),
        *([shared] if shared is not None else []),
    ):
        if os.path.isfile(path):
            return path
    if os.path.lexists(user_path(name)):
        load(user_path(name))  # says what it is
    names = recipe_names()
    files = files_near(user_path(name)) or (_beside(user_path(name)) if is_path(name) else [])
    near = [f"recipe={n}" for n in near_choice(name, names)] if not is_path(name) else []
    near = near or [shlex.quote(f"recipe={path}") for path in files]
    there = listing(sorted(names), "recipe list")
    rule = f"there is neither such a file nor such a shared recipe; shared ones: {there}"
    fix = " or ".join(near) or f"{program()} recipe list, for all of them"
    raise ConfigError.of("MT002", "recipe", name, rule, fix, "command line")


def _beside(path: Path, most: int = 3) -> list[str]:
    """Return YAML files in the folder of a missing path whose names are similar."""
    try:
        with os.scandir(path.parent) as entries:
            names = [
                entry.name
                for entry in islice(entries, MAX_NAMES)
                if entry.name.endswith(YAML_ENDINGS)
            ]
    except OSError:
        return []
    alike = {name: SequenceMatcher(None, path.stem, Path(name).stem).ratio() for name in names}
    near = sorted(
        (name for name in names if alike[name] >= 0.5), key=lambda name: (-alike[name], name)
    )
    return [os.path.normpath(path.parent / name) for name in near[:most]]


def read_recipe(name: str) -> tuple[Recipe | None, list[Problem]]:
    """Read and validate a recipe; return None if it is not even YAML."""
    try:
        path = find_recipe(name)
        document = filled(load(path))
    except ConfigError as error:
        return None, list(error.problems)
    recipe = Recipe(
        document,
        path,
        values={k: v for k, v in document.values.items() if k not in ("defaults", "run")},
    )
    problems = [*_reserved(document), *refused(recipe.values, document.where), *_defaults(recipe)]
    return recipe, problems


def reserved_keys(values: Any, document: Document, prefix: str = "") -> Iterator[Problem]:
    """Yield a problem for every key that could make a loader run code, such as `_target_`."""
    if isinstance(values, list):
        for item in values:
            yield from reserved_keys(item, document, prefix)
    if not isinstance(values, dict):
        return
    for key, value in values.items():
        path = f"{prefix}.{key}" if prefix else key
        if key.startswith("_") or key == "hydra":
            rule = "the key is refused: a configuration is data and configures no loader"
            yield Problem("MT006", path, value, rule, "delete it", document.where(path))
        else:
            yield from reserved_keys(value, document, path)


def _reserved(document: Document) -> Iterator[Problem]:
    values = document.values
    yield from reserved_keys({k: v for k, v in values.items() if k != "defaults"}, document)
    if "run" in values:
        rule = "a recipe cannot stand on a run file"
        yield Problem("MT017", "run", values["run"], rule, "delete it", document.where("run"))
    block = values.get("recipe")
    if "recipe" in values and not isinstance(block, dict):
        rule = (
            "recipes do not nest; the `recipe:` block holds title, purpose, hardware, source,"
            " verified"
        )
        yield Problem("MT017", "recipe", block, rule, "delete it", document.where("recipe"))


def _defaults(recipe: Recipe) -> Iterator[Problem]:
    document = recipe.document
    entries = document.values.get("defaults", [])
    if not isinstance(entries, list):
        rule = f"must be a list; {DEFAULTS_FORM}"
        yield Problem("MT017", "defaults", entries, rule, "delete it", document.where("defaults"))
        return
    groups = [*dict.fromkeys((*GROUPS, *default_choices()[0]))]
    for index, entry in enumerate(entries):
        source = document.where(f"defaults.{index}")
        if not isinstance(entry, dict) or len(entry) != 1:
            yield Problem("MT017", "defaults", entry, DEFAULTS_FORM, "delete it", source)
            continue
        ((key, choice),) = entry.items()
        words = key.split()
        if len(words) != 2 or words[0] != "override" or words[1].lstrip("/") not in groups:
            group = words[-1].lstrip("/") if words else ""
            near = [group] if group in groups else near_choice(group, groups)
            fix = f"- override /{near[0]}: {choice}" if near else "delete it"
            yield Problem("MT017", "defaults", entry, DEFAULTS_FORM, fix, source)
            continue
        group = words[1].lstrip("/")
        problem = check_choice(group, str(choice), source)
        if (name := spelled(group, choice)) != str(choice):
            rule = f"in YAML {name} is text only in quotes"
            yield Problem(
                "MT017", "defaults", entry, rule, f"- override /{group}: '{name}'", source
            )
        elif problem is not None:
            yield problem
        elif group in recipe.choices:
            rule = f"chosen twice, first at {recipe.choice_lines[group]}"
            yield Problem("MT004", group, choice, rule, "keep one of them", source)
        else:
            recipe.choices[group] = str(choice)
            recipe.choice_lines[group] = source
