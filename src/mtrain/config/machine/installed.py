"""Versions of what is installed here, and the folder for results that can be made again."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

import mtrain

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
