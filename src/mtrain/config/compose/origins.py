"""Origins: the file, line or command line that set each key, and the values that a user provided
(paths, names, texts and lists), which no fix may discard.

Layers are merged as Hydra merges values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from mtrain.config.compose.dump import override
from mtrain.config.compose.interpolate import at, drop, leaves, put
from mtrain.config.compose.paths import is_shipped
from mtrain.config.compose.yaml_reader import Document
from mtrain.config.messages.keys import field_of, is_content
from mtrain.config.messages.suggestions import accepts
from mtrain.config.messages.validate import MAX_ITEMS, whole
from mtrain.errors import Problem

COMMAND_LINE = "command line"
DEFAULT = "default"


@dataclass(frozen=True)
class Setting:
    """A key or a section that something set."""

    path: str
    value: Any
    source: str


@dataclass(frozen=True)
class Layer:
    """Nested values with the origin of each."""

    values: Mapping[str, Any]
    where: Callable[[str], str]
    """`file:line` of a dotted key."""


class Origins:
    """The origins of the leaves of a configuration, including the values that were overridden."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        self.history: list[Setting] = []
        """Everything that was set, in order: the later of two settings of a key wins."""
        self._tree: dict[str, Any] = {}
        for layer in layers:
            for path, value in leaves(layer.values):
                self.put(path, value, layer.where(path))

    def put(self, path: str, value: Any, source: str) -> None:
        """Record the origin of the leaf at `path`; an empty mapping does not empty a section."""
        self.history.append(Setting(path, value, source))
        found, whole = self._found(path)
        # Hydra merges an empty mapping into a section instead of emptying it.
        if value != {} or not (whole and isinstance(found, dict)):
            put(self._tree, path, source)

    def drop(self, path: str) -> None:
        """Forget the deleted key at `path`, and everything below it."""
        drop(self._tree, path)

    def has(self, path: str) -> bool:
        """Return whether something set the key at `path`, or a key below it."""
        return self._found(path)[1]

    def is_null(self, path: str) -> bool:
        """Return whether the key at `path` was last set to null."""
        last = self.last(path)
        return last is not None and last.value is None

    def last(self, path: str) -> Setting | None:
        """Return the last origin and value of the key at `path`."""
        return next((setting for setting in reversed(self.history) if setting.path == path), None)

    def of(self, path: str) -> str:
        """Return the origin of the key at `path` or of the section that sets it; else `default`."""
        found, _ = self._found(path)
        return found if isinstance(found, str) else DEFAULT

    def where(self, path: str) -> str:
        """Return the origin of the key at `path`; for an unset key, that of its neighbours."""
        found, whole = self._found(path)
        if isinstance(found, str):
            return found
        if whole:
            return next(_sources(found), DEFAULT)
        source = next(_sources(found), "") if found is not self._tree else ""
        return source.rpartition(":")[0] or source or DEFAULT

    def _found(self, path: str) -> tuple[Any, bool]:
        """Return the entry at `path` or the nearest section above, and whether it is `path`."""
        node: Any = self._tree
        for name in path.split(".") if path else ():
            if not isinstance(node, dict) or name not in node:
                return node, False
            node = node[name]
        return node, True


def _sources(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for inner in node.values():
            yield from _sources(inner)
    else:
        yield node


_FILE = re.compile(r".+:[0-9]+\Z")
SYNTHETIC = "mock"


def is_provided(origin: str) -> bool:
    """Return whether a user set a key: on the command line or in a file that does not ship."""
    return origin == COMMAND_LINE or (_FILE.match(origin) is not None and not is_shipped(origin))


def discards(
    change: Mapping[str, Any], held: Mapping[str, Any], origins: Mapping[str, str]
) -> bool:
    """Return whether a change discards a value that a user provided.

    Args:
        change: dotted key -> new value.
        held: dotted key -> value, as it was set.
        origins: dotted key -> origin.
    """
    return any(
        _loses(key, held.get(key), value, origins.get(key, "")) for key, value in change.items()
    )


def forgets(change: Mapping[str, Any], held: Mapping[str, Any], origins: Mapping[str, str]) -> bool:
    """Return whether a change sets a value that a user provided to null."""
    return any(change[key] is None for key in _provided(change, held, origins))


def lost(
    change: Mapping[str, Any], held: Mapping[str, Any], origins: Mapping[str, str]
) -> list[str]:
    """Return the keys that a user provided and that a change sets to null or to their default."""
    return [
        key
        for key in _provided(change, held, origins)
        if key != "data.kind" and change[key] in (None, _default(key))
    ]


def _provided(
    keys: Iterable[str], held: Mapping[str, Any], origins: Mapping[str, str]
) -> Iterator[str]:
    """Yield the keys whose value a user provided."""
    for key in keys:
        if held.get(key) is not None and is_provided(origins.get(key, "")):
            yield key


def _default(key: str) -> Any:
    field = field_of(key)
    return field.get_default(call_default_factory=True) if field is not None else None


def _loses(key: str, old: Any, new: Any, origin: str) -> bool:
    # Synthetic data in place of real data would train a useless model without an error.
    if key == "data.kind":
        return old not in (None, new) and new == SYNTHETIC
    if old in (None, "", [], (), {}) or not is_provided(origin) or not is_content(key):
        return False
    default = _default(key)
    if (
        isinstance(old, (list, tuple))
        and isinstance(new, (list, tuple))
        and new
        and all(item in old for item in new)
    ):
        return False  # some of the same
    empty = new in (None, "", [], (), {}) or (new == default and new != old)
    return empty or (isinstance(old, str) and not isinstance(new, str))


def as_written(problem: Problem, documents: Iterable[Document]) -> Problem:
    """Return a problem for an unquoted text, with a fix that quotes it: 1.10 is not 1.1."""
    if problem.code != "MT013" or "must be text" not in problem.rule:
        return problem
    source, _, line = problem.source.rpartition(":")
    key = whole(problem.path)
    for document in documents:
        if document.source != source or not line.isdigit():
            continue
        ends = [
            path
            for path, at in document.lines.items()
            if at == int(line) and f".{key}".endswith(f".{path}")
        ]
        for path in ends:
            items = list(islice(_items_at(document, path), MAX_ITEMS + 1))
            value: Any = items if problem.path != key else document.texts.get(path)
            short = isinstance(value, str) or len(items) <= MAX_ITEMS
            if value and short and accepts(key, value):
                return replace(problem, fix=override(key, value))
    return problem


def _items_at(document: Document, path: str) -> Iterator[Any]:
    """Yield the items of a list in a file as text."""
    items = at(document.values, path)
    for index, item in enumerate(items if isinstance(items, list) else ()):
        yield document.texts.get(f"{path}.{index}", item)
