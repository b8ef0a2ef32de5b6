"""Versions of what is installed here, and the folder for results that can be made again."""

from __future__ import annotations

import os
from importlib import metadata
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TypeVar

import mtrain
from mtrain.errors import BadEnvironment

CACHE = "MTRAIN_CACHE"


def version_of(package: str) -> str | None:
    """Return a package's version, by its metadata; None: it has none.

    mtrain knows its own, also in a source tree.
    """
    if package == "mtrain":
        return mtrain.__version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cache_folder() -> Path | None:
    """Return MTRAIN_CACHE, else ~/.cache/mtrain; None where this user has no home.

    The folder may be missing, or read-only.
    """
    named = os.environ.get(CACHE, "")
    try:
        return Path(named or "~/.cache/mtrain").expanduser()
    except RuntimeError:  # a user without an entry in the table of users, and without HOME
        return None


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
