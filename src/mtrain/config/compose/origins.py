"""Who set each key: the layers of a configuration, laid over each other as Hydra lays
their values.
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
    """Values, nested, and who set each of them."""

    values: Mapping[str, Any]
    where: Callable[[str], str]
    """`file:line` of a dotted key."""


class Origins:
    """Who set the leaves of a configuration, and what lay beneath them."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        self.history: list[Setting] = []
        """Everything that was set, in order: of two settings of one key the later one holds."""
        self._tree: dict[str, Any] = {}
        for layer in layers:
            for path, value in leaves(layer.values):
                self.put(path, value, layer.where(path))

    def put(self, path: str, value: Any, source: str) -> None:
        """Note who set the leaf at `path`.

        An empty mapping over a section changes nothing of it.
        """
        self.history.append(Setting(path, value, source))
        found, whole = self._found(path)
        if value != {} or not (whole and isinstance(found, dict)):
            put(self._tree, path, source)

    def drop(self, path: str) -> None:
        """Forget the key at `path`, and all beneath it: it was deleted."""
        drop(self._tree, path)

    def has(self, path: str) -> bool:
        """Return whether anything set the key at `path`, or one beneath it."""
        return self._found(path)[1]

    def is_null(self, path: str) -> bool:
        """Return whether the key at `path` was last set to null."""
        last = self.last(path)
        return last is not None and last.value is None

    def last(self, path: str) -> Setting | None:
        """Who set the key at `path` last, and to what."""
        return next((setting for setting in reversed(self.history) if setting.path == path), None)

    def of(self, path: str) -> str:
        """Who set the key at `path`, or the section that it is in as a whole; else `default`."""
        found, _ = self._found(path)
        return found if isinstance(found, str) else DEFAULT

    def where(self, path: str) -> str:
        """Who set the key at `path`; for one that nobody set, who set its neighbours."""
        found, whole = self._found(path)
        if isinstance(found, str):
            return found
        if whole:
            return next(_sources(found), DEFAULT)
        source = next(_sources(found), "") if found is not self._tree else ""
        return source.rpartition(":")[0] or source or DEFAULT

    def _found(self, path: str) -> tuple[Any, bool]:
        """What stands at `path`, or in the nearest section above it that is there; whether it is
        `path` itself.
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
