"""The files of a configuration in Hydra's order, each a layer of values with their origins, and
the parts of a recipe or run file that choices on the command line replace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtrain.config.compose.dump import override
from mtrain.config.compose.hydra_source import NotComposed, defaults_list
from mtrain.config.compose.interpolate import drop, leaves
from mtrain.config.compose.library import CONFIG, Library
from mtrain.config.compose.origins import COMMAND_LINE, Layer
from mtrain.config.compose.yaml_reader import Document, package_of
from mtrain.config.schema.run import GROUPS, UnresolvedRun
from mtrain.errors import ConfigError, Problem

# The number of replaced values that one report names.
MOST_SHOWN = 12


@dataclass(frozen=True)
class Brought:
    """The effects of choices' files on groups other than their own."""

    choices: dict[str, str] = field(default_factory=dict)
    """group -> the choice that their defaults lists make."""
    keys: dict[str, str] = field(default_factory=dict)
    """Key in another group -> the group of the choice that sets it."""


def brought(
    library: Library,
    defaults: Mapping[str, str],
    chosen: Mapping[str, str],
    added: Mapping[str, str],
) -> Brought:
    """Return the effects of choices on other groups, by defaults lists or `# @package _global_`.

    Args:
        library: everything that can be composed.
        defaults: group -> the choice of `config.yaml`.
        chosen: group -> the choice of the command line.
        added: the same for a user's own groups.
    """
    if not added and all(
        stays_in_its_group(library, group, choice) for group, choice in chosen.items()
    ):
        return Brought()
    words = [
        f"{'' if group in defaults else '+'}{group}='{choice}'" for group, choice in chosen.items()
    ]
    words += [f"+{group}='{choice}'" for group, choice in added.items()]
    without = [f"~{group}" for group in chosen if group in defaults]
    try:
        entries, choices = defaults_list(library, CONFIG, words)
        # The choices bring the difference of two compositions, with and without them.
        before, usual = defaults_list(library, CONFIG, without)
        new = [layer(library, *entry, COMMAND_LINE) for entry in entries if entry not in before]
    except (NotComposed, ConfigError):
        return Brought()  # the composition itself reports it
    groups = {
        g: c for g, c in choices.items() if g in GROUPS and g not in chosen and usual.get(g) != c
    }
    own = {*chosen, *groups}
    keys = [
        path for one in new for path, _ in leaves(one.values) if path.partition(".")[0] not in own
    ]
    chooser = " ".join(
        f"{group}={library.written(group, choice)}" for group, choice in {**chosen, **added}.items()
    )
    return Brought(groups, dict.fromkeys(keys, chooser))


@dataclass
class Replaced:
    """The values of a recipe or run file that choices on the command line replace."""

    document: Document
    values: dict[str, Any]
    """The file's remaining values."""
    gone: dict[str, tuple[str, Any]] = field(default_factory=dict)
    """Key -> the choice that replaces it, and its value in the file."""

    def replace(self, choices: Mapping[str, str], keys: Mapping[str, str]) -> None:
        """Remove the group of each choice, and single keys, recording what replaces them."""
        for group, choice in choices.items():
            if isinstance(self.values.get(group), dict):
                self.gone |= {
                    path: (f"{group}={choice}", value)
                    for path, value in leaves(self.values[group], group)
                }
                self.values.pop(group)
        for key, choice in keys.items():
            found = dict(leaves(self.values))
            if key in found:
                self.gone[key] = choice, found[key]
                drop(self.values, key)

    def problems(
        self, said: Mapping[str, Any], run: UnresolvedRun | None, is_set: Callable[[str], bool]
    ) -> Iterator[Problem]:
        """Yield a warning for each choice that replaced values, except values that the result has
        anyway.

        Args:
            said: dotted key -> value of the command line.
            run: the result; None if it was refused.
            is_set: whether anything in the result sets a key.
        """
        here = run.flat() if run is not None else {}
        set_again = {path for key, value in said.items() for path, _ in leaves(value, key)}
        by_choice: dict[str, dict[str, Any]] = {}
        for key, (choice, value) in self.gone.items():
            kept = key in here and here[key] == value
            if not kept and key not in set_again and value is not None and value != {}:
                by_choice.setdefault(choice, {})[key] = value
        for choice, values in by_choice.items():
            words = [override(key, value) for key, value in values.items()]
            more = f" and {len(words) - MOST_SHOWN} more" if len(words) > MOST_SHOWN else ""
            rule = (
                f"a choice on the command line replaces its group in {self.document.source};"
                f" dropped: {' '.join(words[:MOST_SHOWN])}{more}"
            )
            group, _, name = choice.rpartition(" ")[2].partition("=")
            # what one kind reads, another one does not
            other = {"data.path"} if "data.kind" in values else set()
            lost = [
                override(key, value)
                for key, value in values.items()
                if not is_set(key) and key not in other
            ]
            fix = f"set again the values to keep, as in {lost[0]}" if lost else ""
            yield Problem("MT020", group, name, rule, fix, COMMAND_LINE, "warning")


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
    """Return a file's values at the key that it fills; `chooser`: the origin of a layout."""
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
