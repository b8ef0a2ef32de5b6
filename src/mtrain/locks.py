"""Locks on files: the kernel's, or, on a file system without locks, a file that names the owner.

Creating an owner's file fails if it exists, so only one of several processes gets it. If its owner,
a process of this machine, has ended, another process takes the file over. This machine cannot see
whether a process of another machine still runs: the message names it, and a user who knows that it
has ended removes the file.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from mtrain.durable import report_once

NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.EBADF}
"""The errors by which a file system reports that it has no locks; EBADF comes from NFS for a
folder, which cannot be opened for writing.
"""
SUFFIX = ".owner"
POLL_S = 0.2
PATIENCE_S = 10.0
"""The wait after which this process reports which process it waits for."""


class Taken(Exception):
    """Another process, named by `owner` where it is known, holds the lock."""

    def __init__(self, owner: str = "") -> None:
        super().__init__(owner)
        self.owner = owner


@dataclass(frozen=True)
class Owner:
    """A process, as an owner's file describes it."""

    host: str
    pid: int
    boot: str
    """The id of the machine's boot in which it runs."""
    started: str
    """Its start, in clock ticks since that boot: another process may get the same number later."""

    @classmethod
    def me(cls) -> Owner:
        """Return this process."""
        return cls(platform.node(), os.getpid(), boot_id(), _started(os.getpid()))

    @property
    def is_gone(self) -> bool:
        """Return whether it has certainly ended; other machines' processes are unknown."""
        if self.host != platform.node():
            return False
        return self.boot != boot_id() or _started(self.pid) != self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Lock:
    """A lock that is held: until `release`, or until this process ends."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self._pid = os.getpid()

    def release(self) -> None:
        """Remove the owner's file, if there is one.

        The kernel's lock goes when its descriptor is closed.
        """
        # A process that was forked from the owner leaves the owner's file in place.
        if self.file is not None and self._pid == os.getpid():
            with suppress(OSError):
                self.file.unlink()
            self.file = None


def lock(descriptor: int, path: Path, *, wait: bool = False) -> Lock:
    """Lock the file or folder `path`, open as `descriptor`, for this process only.

    Raises:
        Taken: another process holds it, and `wait` is false.
        OSError: the disk refuses.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Taken from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return _own(_report(path, error), wait)
    return Lock()


def share(descriptor: int, path: Path) -> bool:
    """Lock `path` together with other readers; False: this file system has no locks, and the lock
    excludes no process.

    Raises:
        Taken: a process holds it exclusively.
        OSError: the disk refuses.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Taken from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        _report(path, error)
        return False
    return True


def seize(descriptor: int) -> bool:
    """Lock an open file exclusively until it is closed; False: another process has locked it.

    True where there are no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def is_shared(descriptor: int) -> bool:
    """Return whether another process has locked an open file; false where there are no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def is_named(path: Path) -> bool:
    """Return whether an owner's file stands in for a lock on `path`, of a process that may run."""
    owner = _read(path.with_name(path.name + SUFFIX))
    return owner is not None and not owner.is_gone


def _report(path: Path, error: OSError) -> Path:
    """Return the owner's file that stands in for a lock on `path`, and report once that it does."""
    file = path.with_name(path.name + SUFFIX)
    why = f"{path.parent}: this file system has no locks ({error.strerror})"
    report_once("locks", f"{why}; files such as {file.name} say which process owns what")
    return file


def _own(file: Path, wait: bool) -> Lock:
    begun = time.monotonic()
    reported = False
    while True:
        try:
            descriptor = _created(file)
        except FileExistsError:
            owner = _read(file)
            if owner is not None and owner.is_gone and _taken_over(file, owner):
                continue
            who = f"{owner or 'an unknown process'}; if it is gone, remove {file}"
            if not wait:
                raise Taken(who) from None
            if not reported and time.monotonic() - begun > PATIENCE_S:
                report_once(str(file), f"waiting for {who}")
                reported = True
            time.sleep(POLL_S)
        else:
            try:
                with os.fdopen(descriptor, "w") as stream:
                    stream.write(json.dumps(asdict(Owner.me()), allow_nan=False))
            except BaseException:  # a file without an owner would lock every process out
                file.unlink(missing_ok=True)
                raise
            return Lock(file)


def _created(file: Path) -> int:
    """Create a file that does not exist, and return its descriptor.

    Raises:
        FileExistsError: it exists.
    """
    return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)


def _read(file: Path) -> Owner | None:
    """Return the owner that a file names; None: the file is gone, or names no owner."""
    for attempt in range(5):
        try:
            return Owner(**json.loads(file.read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError):  # it is being written
            time.sleep(0.02 * attempt)
    return None


def _taken_over(file: Path, gone: Owner) -> bool:
    """Remove the file of a process that has ended; False: another process removes it, or did.

    Several processes may see that the owner has ended. Only one of them has the marker at a time,
    and reads the file again before it removes it, so none removes the file of the next owner.
    """
    marker = file.with_name(f"{file.name}.{gone.pid}-{gone.started}")
    try:
        os.close(_created(marker))
    except FileExistsError:
        return False
    try:
        if _read(file) != gone:
            return False
        file.unlink()
        return True
    finally:
        marker.unlink(missing_ok=True)


@cache
def boot_id() -> str:
    """Return the id of this machine's boot; empty if the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Return the start of a process of this machine; empty if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "" if Path("/proc/self").exists() or not _lives(pid) else "?"
    state, *rest = text.rpartition(")")[2].split()
    return "" if state in "ZX" else rest[18]


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
