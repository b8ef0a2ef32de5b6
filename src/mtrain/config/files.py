"""What lies on the disk, looked at within bounds: text of a corpus, and folders that can be written."""

from __future__ import annotations

import codecs
import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

MAX_ENTRIES, MAX_SECONDS = 20_000, 0.1
SKIPPED_FOLDERS = frozenset(("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"))
"""Folders of a Python installation that are not the standard library, or are its tests."""
PIECE = 16 << 10
"""A corpus that is one file is cut at blank lines into documents of at least this many characters."""
PSEUDO = frozenset(
    ("proc", "sysfs", "cgroup", "cgroup2", "devpts", "debugfs", "tracefs", "securityfs", "bpf", "pstore", "configfs")
)
"""Kinds of file systems that hold no files of users."""
LOOKED_AT = 1 << 16
"""Bytes of a file that are looked at to see whether it is text."""


@dataclass
class Bound:
    """How far a walk through folders may go; `spent` says that it was ended before its end."""

    entries: int = MAX_ENTRIES
    until: float = field(default_factory=lambda: time.monotonic() + MAX_SECONDS)
    spent: bool = False

    def step(self) -> bool:
        """Count an entry; whether the walk may go on."""
        self.entries -= 1
        self.spent = self.spent or self.entries < 0 or time.monotonic() > self.until
        return not self.spent


def files_below(
    root: Path, wanted: Callable[[str], bool], skip: frozenset[str] = frozenset(), bound: Bound | None = None
) -> Iterator[Path]:
    """Regular files below a folder whose names are `wanted`, in no order, as far as `bound` lets it go.

    Not those in hidden folders, in folders that are called as one to `skip`, or behind links to folders.
    Raises OSError for a folder that cannot be read.
    """
    waiting = [os.fspath(root)]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if bound is not None and not bound.step():
                    return
                if entry.is_dir(follow_symlinks=False):
                    if entry.name not in skip and not entry.name.startswith("."):
                        waiting.append(entry.path)
                elif wanted(entry.name) and Path(entry.path).is_file():
                    yield Path(entry.path)


def unreadable(path: Path) -> str | None:
    """Why a path cannot be read, or None; it may be a file or a folder, and nothing else."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        return unreachable(path, error)
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return "is neither a file nor a folder"
    if not os.access(path, os.R_OK | (os.X_OK if stat.S_ISDIR(mode) else 0)):
        return "cannot be read: permission denied"
    return None


def unreachable(path: Path, error: OSError | ValueError) -> str:
    """Why there is nothing at a path, from the error that looking at it gave."""
    number = getattr(error, "errno", None)
    if number == errno.ELOOP:
        return "a symbolic link leads back to itself"
    if number in (errno.ENOENT, errno.ENOTDIR):
        return "a symbolic link leads nowhere" if os.path.islink(path) else "there is no such file or folder"
    return f"cannot be read: {getattr(error, 'strerror', None) or error}"


def no_text(path: Path) -> str | None:
    """Why the beginning of a file is no UTF-8 text, or None."""
    try:
        with path.open("rb") as file:
            head = file.read(LOOKED_AT)
            codecs.getincrementaldecoder("utf-8")().decode(head, final=len(head) < LOOKED_AT)
    except UnicodeDecodeError as error:
        return f"byte {error.object[error.start]:#04x} at offset {error.start} is not UTF-8"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None


def unwritable(path: Path) -> str | None:
    """Why no folder can be made at a path, or written to where it is there; None where that works."""
    for place in (path, *path.parents):
        try:
            mode = os.stat(place).st_mode
        except (OSError, ValueError) as error:
            if os.path.islink(place) or getattr(error, "errno", None) not in (errno.ENOENT, errno.ENOTDIR):
                return f"{place}: {unreachable(place, error)}"
            continue
        if not stat.S_ISDIR(mode):
            return f"{place} is a file, and a folder is needed"
        if not os.access(place, os.W_OK | os.X_OK):
            return f"{place} cannot be written: permission denied"
        return f"{place} cannot be written: it is the kernel's" if _is_no_storage(place) else None
    return None


def _is_no_storage(place: Path) -> bool:
    """Whether a folder is the kernel's own, such as /proc, in which nobody makes folders (Linux)."""
    try:
        mounts = [line.split(" ") for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return False
    path = os.path.realpath(place)
    over = [m for m in mounts if path == m[1] or path.startswith(m[1].rstrip("/") + "/")]
    return bool(over) and max(over, key=lambda m: len(m[1]))[2] in PSEUDO
