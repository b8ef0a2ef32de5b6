"""What is installed here and where results that can be made again are kept, as far as this machine says so."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

import mtrain

CACHE = "MTRAIN_CACHE"


def version_of(package: str) -> str | None:
    """The version of a package by its metadata, and of mtrain by itself; None: there is none, as of a source tree."""
    if package == "mtrain":
        return mtrain.__version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cache_folder() -> Path | None:
    """MTRAIN_CACHE, else ~/.cache/mtrain; None where this user has no home. It may not be there, or be read only."""
    named = os.environ.get(CACHE, "")
    try:
        return Path(named or "~/.cache/mtrain").expanduser()
    except RuntimeError:  # a user without an entry in the table of users, and without HOME
        return None
