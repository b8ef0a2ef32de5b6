"""Compiled code of rewritten modules, kept between runs in a folder that only this user can write.

An entry goes that was not loaded for `UNUSED_DAYS`, when another one is stored.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import stat
import tempfile
import time
from pathlib import Path
from types import CodeType

from mtrain.config.machine.installed import cache_folder

Entry = tuple[CodeType, dict[str, int]]
UNUSED_DAYS = 90
DAY_S = 86_400


def folder() -> Path:
    """Return `code` under $MTRAIN_CACHE, else under ~/.cache/mtrain.

    Raises:
        FileNotFoundError: this user has no home.
    """
    root = cache_folder()
    if root is None:
        raise FileNotFoundError("this user has no home folder")
    return root / "code"


def load(key: str) -> Entry | None:
    """Return the entry stored under `key`; None if there is no entry that only this user can have
    written.

    Code from a file is run, so the file and its folder must belong to this user and be closed to
    writing by others.
    """
    try:
        if not _is_private(os.lstat(folder())):
            return None
        # A symbolic link could lead to code that another user wrote.
        file = os.open(folder() / key, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with open(file, "rb") as stream:
        # Checked on the open file: its path could name another one by the time it is read.
        status = os.fstat(stream.fileno())
        if not _is_private(status):
            return None
        # The time of modification stands for the time of the last load. Once a day is exact enough,
        # and spares most loads a write.
        if status.st_mtime < time.time() - DAY_S:
            with contextlib.suppress(OSError):
                os.utime(stream.fileno())
        try:
            code, counts = marshal.loads(stream.read())
        except (OSError, EOFError, ValueError, TypeError):
            return None
    return code, counts


def store(key: str, code: CodeType, counts: dict[str, int]) -> None:
    """Keep `code` and `counts` under `key`; where that is impossible, do nothing."""
    try:
        folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_private(os.lstat(folder())):
            return
        file, draft = tempfile.mkstemp(prefix="draft-", dir=folder())
    except OSError:
        return
    try:
        with open(file, "wb") as stream:
            stream.write(marshal.dumps((code, counts)))
        # The ranks of a machine start together and store the same entries. A rename is atomic: no
        # rank reads what another has half written.
        os.replace(draft, folder() / key)
        _prune()
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(draft)


def _prune() -> None:
    """Remove entries that nobody has loaded for long, and drafts that a killed process left."""
    oldest = time.time() - UNUSED_DAYS * DAY_S
    for path in folder().iterdir():
        if path.lstat().st_mtime < oldest:
            path.unlink(missing_ok=True)


def _is_private(status: os.stat_result) -> bool:
    writable_by_others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return (
        status.st_uid == os.getuid() and not writable_by_others and not stat.S_ISLNK(status.st_mode)
    )
