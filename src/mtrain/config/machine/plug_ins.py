"""Parts of mtrain that other installed packages add, by the entry points of their group."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from mtrain.errors import BadEnvironment

Kind = TypeVar("Kind")


def found(group: str) -> dict[str, EntryPoint]:
    """Return the plug-ins of a group by their names; none is loaded."""
    return {entry.name: entry for entry in entry_points(group=group)}


def load(entry: EntryPoint, what: str, kind: type[Kind]) -> Kind:
    """What an entry point stands for.

    Args:
        entry: the entry point.
        what: what it provides, for messages: `device 'tpu'`.
        kind: the class that it must be of.

    Raises:
        BadEnvironment: it does not load, or is something else.
    """
    try:
        part = entry.load()
    except Exception as error:
        raise BadEnvironment(f"{what}: its plug-in {entry.value} does not load: {error}") from error
    if not isinstance(part, kind):
        raise BadEnvironment(
            f"{what}: its plug-in {entry.value} is no {kind.__module__}.{kind.__qualname__}"
        )
    return part
