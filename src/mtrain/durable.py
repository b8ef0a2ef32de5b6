"""Files that are on disk when a call returns, not only in the kernel's memory, on file systems of
every kind.

Where a file system has no hard links, or cannot sync a folder, the code works without, and reports
it once.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from mtrain.errors import BadEnvironment, CorruptData, MtrainError, warn

NOT_SYNCED = {
    errno.EINVAL,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.ENOTSUP,
    errno.EBADF,
    errno.EISDIR,
}
"""The errors by which a file system reports that it cannot sync a folder."""
NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.EXDEV}
"""The errors by which a file system reports that a file cannot have a second name."""
REFUSED = {errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""The errors of reading that mean no damage: the machine refuses, and the file may be intact."""

LINKS = "hard links"
"""The feature that `linked` reports where a file system lacks it."""
_reported: set[str] = set()


def report_once(what: str, text: str) -> None:
    """Warn once per process, and only on rank 0, of a feature `what` that the file system lacks."""
    if what not in _reported and os.environ.get("RANK", "0") == "0":
        warn(text)
    _reported.add(what)


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on disk.

    Raises:
        OSError: the disk refused some of it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NOT_SYNCED or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise
        report_once(
            "sync of folders",
            f"{path}: this file system cannot sync a folder ({error.strerror}); files are synced,"
            " but after a power failure the newest may be missing from the folder",
        )
    finally:
        os.close(descriptor)


def write(path: Path, data: bytes) -> None:
    """Write a file, and wait until it is on disk; raises as `sync` does."""
    path.write_bytes(data)
    sync(path)


def linked(source: Path, target: Path) -> bool:
    """Give a file a second name; return False if the file system cannot, so that the caller makes a
    copy.

    Raises:
        OSError: another error, such as a `target` that exists.
    """
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        report_once(
            LINKS,
            f"{target.parent}: no hard links here ({error.strerror}); files are copied instead",
        )
        return False
    return True


def has_links() -> bool:
    """Return whether `linked` has succeeded wherever it was tried in this process."""
    return LINKS not in _reported


def not_read(path: Path, error: OSError) -> MtrainError:
    """Return the error of a file that cannot be read: damage, unless access is refused."""
    if error.errno not in REFUSED:
        return CorruptData(f"{path} cannot be read: {error.strerror or error}")
    if error.errno in (errno.EACCES, errno.EPERM):
        fix = (
            "its owner allows it with `chmod -R g+rX FOLDER` (or o+rX); or run as the user who"
            " wrote it"
        )
        return BadEnvironment(f"{path} cannot be read: permission denied", f"  fix: {fix}")
    return BadEnvironment(f"{path} cannot be read: {error.strerror or error}")
