"""Origins: the file, line or command line that set each key. Layers are merged as Hydra merges
values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mtrain.config.compose.interpolate import drop, leaves, put

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
        """Record the origin of the leaf at `path`. An empty mapping over a section changes nothing
        in it.
        """
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
        """Return the origin of the key at `path`, or of the section that sets it; else
        `default`.
        """
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
        """Return the entry at `path` or at the nearest section above, and whether it is exactly
        `path`.
        """
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
