"""The files of a configuration in Hydra's order, each a layer of values with their origins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtrain.config.compose.hydra_source import defaults_list
from mtrain.config.compose.library import Library
from mtrain.config.compose.origins import Layer
from mtrain.config.compose.yaml_reader import package_of
from mtrain.errors import ConfigError, Problem

# Names of configurations, each with the dotted key that it fills.
Entries = list[tuple[str, str]]


def entries_of(
    library: Library, usual: Entries, arguments: Sequence[str]
) -> tuple[Entries, dict[str, str]]:
    """Return the composed configurations in rising precedence, and group -> choice.

    Args:
        library: everything that can be composed.
        usual: the chosen configurations, whose files are checked first; the first is the primary.
        arguments: the arguments that choose, for Hydra.

    Raises:
        ConfigError: some files are invalid; the error holds every problem.
        NotComposed: Hydra refuses.
    """
    problems: list[Problem] = []
    # Hydra would stop at the first bad file; reading all of them first reports every problem.
    for name, _ in usual:
        try:
            if library.layout(name) is None:
                library.document(name)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return defaults_list(library, usual[0][0], arguments)


def stays_in_its_group(library: Library, group: str, choice: str) -> bool:
    """Return whether a choice is a layout, or a file without a defaults list and a package."""
    name = f"{group}/{choice}"
    if library.layout(name) is not None:
        return True
    try:
        document = library.document(name)
    except ConfigError:
        return False
    return "defaults" not in document.values and package_of(document) is None


def layer(library: Library, name: str, package: str, chooser: str) -> Layer:
    """Return the values of a file at the key that it fills; `chooser` is the origin of a layout's
    values.
    """
    layout = library.layout(name)
    if layout is not None:
        return Layer(_nested(package, layout), lambda _: chooser)
    document = library.document(name)
    # Lines of a file are recorded by its own keys, layers by keys of the whole configuration.
    cut = len(package) + 1 if package else 0
    return Layer(_nested(package, library.values(name)), lambda key: document.where(key[cut:]))


def _nested(package: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` nested at a dotted key."""
    out = dict(values)
    for name in reversed(package.split(".") if package else []):
        out = {name: out}
    return out
