"""The source of every composition: files of choices, layouts, and the recipe or run file.

This module reads every file, within bounds, and removes whatever could make a loader do more than
compose before Hydra sees it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain.config.compose import paths
from mtrain.config.compose.interpolate import refused
from mtrain.config.compose.layout_string import parse_layout
from mtrain.config.compose.recipe import reserved_keys
from mtrain.config.compose.yaml_reader import Document, load, package_of
from mtrain.config.messages.validate import MISSING
from mtrain.config.schema.run import GROUPS
from mtrain.errors import ConfigError, Problem

# The names of the primary configuration, of the group whose only choice is the recipe, and of a run
# file.
CONFIG = "config"
RECIPE = "recipe"
RUN = "run"
RECIPE_FILE = f"{RECIPE}/{RECIPE}"
GIVEN = "given"
# The prefix of hidden text, which no command-line argument contains, and the stand-in for a $ in
# it.
_BEGIN = "\0"
_DOLLAR = "\ue001"


@dataclass(frozen=True)
class Part:
    """The content that Hydra gets for the name of a configuration."""

    values: Mapping[str, Any]
    package: str | None = None
    """The package that the file names for its values; None: that of its group."""


class Library:
    """The configurations of one composition."""

    def __init__(self) -> None:
        self.documents: dict[str, Document] = {}
        """Files that were read, by Hydra's names."""
        self.files: dict[str, Path] = {}
        """The same files, by the names that problems show."""
        self.problems: list[Problem] = []
        self._given: dict[str, tuple[Mapping[str, Any], str | None]] = {}
        self._paths: dict[str, Path] = {}
        self._written: dict[str, str] = {}

    def give(
        self, name: str, document: Document, values: Mapping[str, Any], package: str | None = None
    ) -> None:
        """Add a file under its own name: a recipe or run file, and its part to compose."""
        self.documents[name] = document
        self._given[name] = values, package

    def give_path(self, group: str, text: str) -> str:
        """Add a choice that is given as the path of a file; return Hydra's name for it."""
        path = paths.user_path(text)
        # Hydra splits names at / and @, so the file's name keeps only letters that it does
        # not read. The ending keeps it apart from the choices of the group.
        choice = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', path.stem)}.{GIVEN}"
        self._paths[f"{group}/{choice}"] = path
        self._written[f"{group}/{choice}"] = text
        return choice

    def written(self, group: str, choice: str) -> str:
        """Return a choice as written, for Hydra's name of it."""
        return self._written.get(f"{group}/{choice}", choice)

    def has(self, name: str) -> bool:
        """Return whether there is a configuration of this name."""
        return name in self._given or self._file(name) is not None or self.layout(name) is not None

    def is_group(self, name: str) -> bool:
        """Return whether there is a group of this name."""
        return name in (*GROUPS, RECIPE) or (not name.startswith("hydra") and paths.is_group(name))

    def layout(self, name: str) -> dict[str, Any] | None:
        """Return the values that `parallel/tp4pp4` means if no file has that name."""
        group, _, word = name.partition("/")
        if group != "parallel" or self._file(name) is not None:
            return None
        try:
            return parse_layout(word)
        except ValueError:
            return None

    def part(self, name: str) -> Part:
        """Return the content that Hydra gets for a name, such as `model/llama3_8b`, and record a
        problem for everything that Hydra must not see.

        Raises:
            ConfigError: the file cannot be read as data.
        """
        if (layout := self.layout(name)) is not None:
            return Part(layout)
        if name in self._given:
            values, package = self._given[name]
        else:
            document = self.document(name)
            values = document.values
            package = package_of(document)
        # A `_target_` and the key `hydra` are refused with the file's other problems (`_refusals`);
        # they must not reach Hydra even in the composition that looks for further ones.
        shown = {
            key: _hidden(inner)
            for key, inner in values.items()
            if _is_data(key) and key != "defaults"
        }
        if name == CONFIG:
            shown["defaults"] = _with_every_group(values.get("defaults", []))
        elif "defaults" in values:
            shown["defaults"] = values["defaults"]
        return Part(shown, package)

    def document(self, name: str) -> Document:
        """Return the file of a configuration.

        Raises:
            ConfigError: the file is missing, or cannot be read as data.
        """
        if name not in self.documents:
            file = self._file(name)
            assert file is not None, name
            document = load(file)
            self.documents[name] = document
            self.files[document.source] = file
            self.problems += _refusals(document, name.partition("/")[0] if "/" in name else "")
        return self.documents[name]

    def text(self, name: str) -> str | None:
        """Return the text of the file of a configuration; None without a file."""
        if name not in self.documents and self._file(name) is None:
            return None
        return self.document(name).text

    def values(self, name: str) -> Mapping[str, Any]:
        """Return the values of a file as written, without its defaults list."""
        values = self._given[name][0] if name in self._given else self.document(name).values
        return {key: value for key, value in values.items() if key != "defaults"}

    def sources(self) -> set[str]:
        """Return the files that a command line names by path, as problems show them."""
        return {
            self.documents[name].source
            for name in (*self._given, *self._paths)
            if name in self.documents
        }

    def said(self) -> Hashable:
        """Return names and texts of everything read; with the arguments they fix the result."""
        given = {name: repr(values) for name, (values, _) in self._given.items()}
        return tuple(
            sorted(
                (name, document.text, given.get(name)) for name, document in self.documents.items()
            )
        )

    def _file(self, name: str) -> Path | None:
        return self._paths.get(name) or paths.find_config(name)


def _with_every_group(defaults: list[Any]) -> list[Any]:
    """Return the defaults of `config.yaml` with every group; groups left out have no choice yet."""
    if any(isinstance(entry, str) and entry != "_self_" for entry in defaults):
        return defaults  # another file may choose
    named = {group for entry in defaults if isinstance(entry, dict) for group in entry}
    return [*({group: None} for group in GROUPS if group not in named), *defaults]


def _hidden(value: Any) -> Any:
    """Return a value as Hydra gets it: lists and interpreted text become opaque text."""
    if isinstance(value, dict):
        return {key: _hidden(inner) for key, inner in value.items() if _is_data(key)}
    if isinstance(value, list) or (isinstance(value, str) and _is_read(value)):
        return f"{_BEGIN}{json.dumps(value).replace('$', _DOLLAR)}"
    return value


def _is_read(text: str) -> bool:
    """Return whether Hydra or `restored` would interpret a text."""
    return text == MISSING or text.startswith(_BEGIN) or ("${" in text and any(refused(text, str)))


def restored(value: Any) -> Any:
    """Return a composed value as it was before it was hidden from Hydra."""
    if isinstance(value, dict):
        return {key: restored(inner) for key, inner in value.items()}
    if isinstance(value, str) and value.startswith(_BEGIN):
        return json.loads(value.removeprefix(_BEGIN).replace(_DOLLAR, "$"))
    return value


def _is_data(key: str) -> bool:
    return not key.startswith("_") and key != "hydra"


def _refusals(document: Document, group: str) -> list[Problem]:
    """Return the problems of a file of choices that are known before composition."""
    values = {key: value for key, value in document.values.items() if key != "defaults"}
    cut = len(group) + 1 if group else 0
    found = [
        *reserved_keys(values, document),
        *refused(values, lambda key: document.where(key[cut:]), group),
    ]
    defaults = document.values.get("defaults", [])
    for index, entry in enumerate(defaults if isinstance(defaults, list) else []):
        if isinstance(entry, dict):
            words = [str(word) for pair in entry.items() for word in pair]
        else:
            words = [str(entry)]
        if any("hydra" in re.split(r"[/@: ]", word) or "${" in word for word in words):
            rule = (
                "an entry of defaults names a file of choices: neither a part of Hydra nor a"
                " reference"
            )
            line = document.where(f"defaults.{index}")
            found.append(Problem("MT006", "defaults", entry, rule, "delete it", line))
    package = package_of(document)
    if package is not None and package.split(".")[0] == "hydra":
        rule = "the package is refused: a configuration is data and configures no loader"
        found.append(
            Problem("MT006", "", None, rule, "delete the line with @package", document.source)
        )
    # Hydra would follow such an entry, so composition stops here; other problems are collected.
    if any(problem.code == "MT006" and problem.path == "defaults" for problem in found) or (
        found and package
    ):
        raise ConfigError(found)
    return found
