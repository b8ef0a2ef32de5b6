"""Locks on files: those of the kernel, and on a file system that has none a file that names the
owner.

An owner's file is created only where there is none, so only one of several processes gets it. The
file of a process of this machine that has ended is taken over. Whether a process of another machine
still runs cannot be seen from
here: the message names it, and a user who knows that it has ended removes the file.
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
"""The errors by which a file system says that it has no locks; EBADF comes from NFS for a folder,
which cannot be opened for writing.
"""
SUFFIX = ".owner"
POLL_S = 0.2
PATIENCE_S = 10.0
"""The wait after which this process says whom it waits for."""


class Taken(Exception):
    """Another process holds the lock. `owner` says which, where that is known."""

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
        return cls(platform.node(), os.getpid(), _boot(), _started(os.getpid()))

    @property
    def is_gone(self) -> bool:
        """Return true where it has certainly ended; that of a process on another machine cannot be
        seen from here.
        """
        if self.host != platform.node():
            return False
        return self.boot != _boot() or _started(self.pid) != self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Lock:
    """A lock that is held: until `release`, or until this process ends."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self._pid = os.getpid()

    def release(self) -> None:
        """Remove the owner's file, if there is one.

        A kernel's lock goes when its descriptor is closed.
        """
        if (
            self.file is not None and self._pid == os.getpid()
        ):  # not a process that was forked from the owner
            with suppress(OSError):
                self.file.unlink()
            self.file = None


def lock(descriptor: int, path: Path, *, wait: bool = False) -> Lock:
    """Lock the file or folder `path`, open as `descriptor`, for this process alone.

    Raises:
        Taken: another process holds it, and `wait` is not asked for.
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
    """Lock `path` together with others that read it; False: this file system has no locks, and
    nobody is kept out.

    Raises:
        Taken: a process has it for itself.
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


def _report(path: Path, error: OSError) -> Path:
    """Return the owner's file that stands in for a lock on `path`, and report once that it does."""
    file = path.with_name(path.name + SUFFIX)
    why = f"{path.parent}: this file system has no locks ({error.strerror})"
    report_once("locks", f"{why}; files such as {file.name} say which process owns what")
    return file


def _own(file: Path, wait: bool) -> Lock:
    begun = time.monotonic()
    told = False
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
            if not told and time.monotonic() - begun > PATIENCE_S:
                report_once(str(file), f"waiting for {who}")
                told = True
            time.sleep(POLL_S)
        else:
            try:
                with os.fdopen(descriptor, "w") as stream:
                    stream.write(json.dumps(asdict(Owner.me()), allow_nan=False))
            except BaseException:  # a file that names nobody would keep everybody out
                file.unlink(missing_ok=True)
                raise
            return Lock(file)


def _created(file: Path) -> int:
    """Create a file that is not there, and return its descriptor.

    Raises:
        FileExistsError: it is there.
    """
    return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)


def _read(file: Path) -> Owner | None:
    """Return the owner that a file names; None: the file is gone, or names none."""
    for attempt in range(5):
        try:
            return Owner(**json.loads(file.read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError):  # it is being written
            time.sleep(0.02 * attempt)
    return None


def _taken_over(file: Path, gone: Owner) -> bool:
    """Remove the file of a process that has ended; False: another process does, or did.

    Several may see that it has ended. Only one of them has the marker at a time, and looks again
    before it removes the file, so none removes the file of the next owner.
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
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Return the start of a process of this machine; empty: there is no such process, or it has
    ended.
    """
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
