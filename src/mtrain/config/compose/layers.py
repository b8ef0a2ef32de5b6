"""The files of a configuration in Hydra's order, each a layer of values with their origins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtrain.config.compose.hydra_source import defaults_list
from mtrain.config.compose.library import CONFIG, RECIPE_FILE, RUN, Library
from mtrain.config.compose.origins import Layer
from mtrain.config.compose.paths import CHOICE
from mtrain.config.compose.yaml_reader import MAX_DEPTH, package_of
from mtrain.config.schema.run import GROUPS
from mtrain.errors import ConfigError, Problem

Entries = list[tuple[str, str]]
"""Names of configurations, each with the dotted key that it fills."""


def entries_of(
    library: Library, usual: Entries, arguments: Sequence[str]
) -> tuple[Entries, dict[str, str]]:
    """Return the composed configurations in rising precedence, and group -> choice.

    Args:
        library: everything that can be composed.
        usual: the configurations of files that have neither a defaults list nor a package of their
            own; the first is the primary one.
        arguments: the arguments that choose, for Hydra.

    Raises:
        ConfigError: some files are invalid; the error holds every problem.
        NotComposed: Hydra refuses.
    """
    primary = usual[0][0]
    problems: list[Problem] = []
    for name, _ in usual:
        try:
            if library.layout(name) is None:
                library.document(name)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    try:
        plain = [entry for name, package in usual for entry in _expanded(library, name, package)]
    except _NotPlain:
        return defaults_list(library, primary, arguments)
    return (plain, {}) if not _added(arguments) else defaults_list(library, primary, arguments)


class _NotPlain(Exception):
    """A file has a defaults list that only Hydra can expand."""


def _added(arguments: Sequence[str]) -> list[str]:
    """Return choices of groups that only a user's folder has."""
    added = [word[1:].partition("=")[0] for word in arguments if word.startswith("+")]
    return [group for group in added if group not in (*GROUPS, RECIPE_FILE.partition("/")[0])]


def _expanded(library: Library, name: str, package: str, depth: int = 0) -> Entries:
    """Return a file together with the files of its group that its defaults list names.

    Hydra builds the same list, but asking it takes as long as another composition.

    Raises:
        _NotPlain: the list has other entries, or the values have another package.
        ConfigError: a file cannot be read as data.
    """
    if name in (RUN, RECIPE_FILE) or library.layout(name) is not None:
        return [(name, package)]
    document = library.document(name)
    entries = document.values.get("defaults", ["_self_"])
    if name == CONFIG:
        named = {
            word for entry in entries for word in (entry if isinstance(entry, dict) else [entry])
        }
        if {*document.values} != {"defaults"} or not named <= {*GROUPS, "_self_"}:
            raise _NotPlain
        return [(name, package)]
    words = isinstance(entries, list) and all(isinstance(entry, str) for entry in entries)
    words = words and all(entry == "_self_" or CHOICE.match(entry) for entry in entries)
    if (
        not words
        or entries.count("_self_") != 1
        or package_of(document) is not None
        or depth > MAX_DEPTH
    ):
        raise _NotPlain
    group, _, choice = name.partition("/")
    if any("/" in word for word in (choice, *entries)):
        raise _NotPlain
    out: Entries = []
    for entry in entries:
        below = f"{group}/{entry}"
        if entry != "_self_" and not library.has(below):
            raise _NotPlain
        out += (
            [(name, package)]
            if entry == "_self_"
            else _expanded(library, below, package, depth + 1)
        )
    return out


def stays_in_its_group(library: Library, group: str, choice: str) -> bool:
    """Return whether a choice is a file or a layout that fills only its own group."""
    try:
        _expanded(library, f"{group}/{choice}", group)
    except (_NotPlain, ConfigError):
        return False
    return True


def layer(library: Library, name: str, package: str, chooser: str) -> Layer:
    """Return the values of a file at the key that it fills; `chooser` is the origin of a layout's
    values.
    """
    layout = library.layout(name)
    if layout is not None:
        return Layer(_nested(package, layout), lambda _: chooser)
    document = library.document(name)
    cut = len(package) + 1 if package else 0
    return Layer(_nested(package, library.values(name)), lambda key: document.where(key[cut:]))


def _nested(package: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` nested at a dotted key."""
    out = dict(values)
    for name in reversed(package.split(".") if package else []):
        out = {name: out}
    return out
