"""Room in the folder of tokenized corpora: which of them are in use, and which go when another one
is built.

A corpus goes that no run has used for `UNUSED_DAYS`. Where all of them have more than
`LIMIT_BYTES`, those that were used longest ago go too, but for those of the last `RECENT_DAYS`. One
that a running process reads never goes: the process holds a shared lock on the file `.used` of the
corpus, whose time of change is that of the last use. On a file system without locks nobody can tell
who reads, so none goes.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mtrain import locks, units
from mtrain.errors import BadEnvironment

UNUSED_DAYS = 90
RECENT_DAYS = 1
LIMIT_BYTES = 100 * units.GIB
USED = ".used"
META = "meta.json"
FILES = ("tokens.bin", "tokens.idx", "tokenizer.json")
OF_CHATS = ("learned.bin", "chats.bin", "rejects.jsonl", "windows.bin")
"""What prepared chats have beside them."""
ORDERS = (
    "sequences.npy",
    "starts.npy",
    "shuffled.npy",
    "fitted.npy",
    "long.npy",
    "pieces.npy",
    "counts.npy",
)
"""Files of an order of samples, which is kept as corpora are."""
DAY_S = 86_400

_held: dict[str, int] = {}
"""Corpora that this process uses -> descriptor that holds the lock; processes forked from it hold
it too.
"""


def use(folder: Path) -> bool:
    """Use a corpus until this process and those forked from it end; False where it is being
    removed.

    In a folder that cannot be written nothing is noted: who can write there has to know who reads.
    """
    name = os.path.abspath(folder)
    path = folder / USED
    try:
        if name in _held and not _is_open(_held[name], path):  # it was built again
            os.close(_held.pop(name))
        if name not in _held:
            descriptor = _shared(path)
            if descriptor is None:
                return False
            _held[name] = descriptor
        os.utime(path)
    except OSError:
        pass
    return True


def _shared(path: Path) -> int | None:
    """Return a descriptor with a shared lock on a file; None: somebody removes it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        locks.share(descriptor, path)
        if _is_open(descriptor, path):
            return descriptor
    except locks.Taken:
        pass
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def made(
    folder: Path, meta: Callable[[], dict[str, Any] | None], make: Callable[[Path], None]
) -> dict[str, Any]:
    """Use the folder of a cache, which `make` fills where `meta` finds that it is not complete;
    returns its meta.

    One of several processes makes it, in a folder beside it that is renamed, and the others wait.
    """
    found = meta()
    if found is not None and use(folder):
        return found
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f"{folder.name}.lock")):
        found = meta()
        if found is None:
            for stale in folder.parent.glob(f".building-{folder.name}-*"):  # of one that was killed
                shutil.rmtree(stale, ignore_errors=True)
            building = folder.parent / f".building-{folder.name}-{os.getpid()}"
            building.mkdir()
            try:
                make(building)
                shutil.rmtree(folder, ignore_errors=True)
                building.rename(folder)
            except BaseException:
                shutil.rmtree(building, ignore_errors=True)
                raise
            found = meta()
        use(folder)
    assert found is not None
    return found


def make_room(cache: Path) -> list[Path]:
    """Remove what the rule of this module removes; returns the corpora that are gone.

    A folder with any other file in it is no corpus. Notes of source files that are as old go too.
    """
    now = time.time()
    gone = []
    corpora = sorted(
        (_last_use(folder), folder) for folder in cache.iterdir() if _is_corpus(folder)
    )
    sizes = {folder: sum(file.stat().st_size for file in folder.iterdir()) for _, folder in corpora}
    total = sum(sizes.values())
    for used, folder in corpora:
        idle_days = (now - used) / DAY_S
        if idle_days > UNUSED_DAYS or (total > LIMIT_BYTES and idle_days > RECENT_DAYS):
            with contextlib.suppress(OSError):  # somebody else removes it, or it is not ours
                if _remove(folder):
                    total -= sizes[folder]
                    gone.append(folder)
    for note in (cache / "seen").glob("*"):
        if note.stat().st_mtime < now - UNUSED_DAYS * DAY_S:
            note.unlink(missing_ok=True)
    return gone


def _is_corpus(folder: Path) -> bool:
    if (
        folder.is_symlink()
        or not folder.is_dir()
        or not re.fullmatch(r"[^.].*-[0-9a-f]{16}", folder.name)
    ):
        return False
    names = set(os.listdir(folder))
    return META in names and names <= {META, USED, *FILES, *OF_CHATS, *ORDERS}


def _last_use(folder: Path) -> float:
    noted = folder / USED
    return (noted if noted.exists() else folder / META).stat().st_mtime


def _remove(folder: Path) -> bool:
    """Remove a corpus unless a process uses it or builds it again."""
    with locked(folder.with_name(f"{folder.name}.lock"), wait=False) as free:
        if not free:
            return False
        with open(folder / USED, "ab") as file:
            try:
                held = locks.lock(file.fileno(), folder / USED)
            except locks.Taken:
                return False
            if held.file is not None:  # a file system without locks: it is not known who reads
                held.release()
                return False
            doomed = folder.with_name(f".removed-{folder.name}")
            shutil.rmtree(doomed, ignore_errors=True)
            folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
        folder.with_name(f"{folder.name}.lock").unlink(missing_ok=True)
    return True


@contextlib.contextmanager
def writing(cache: Path) -> Iterator[None]:
    """Turn a failure of the cache folder's disk into a message."""
    try:
        yield
    except OSError as error:
        there = next((p for p in (cache, *cache.parents) if os.path.isdir(p)), Path("/"))
        free = units.bytes_(shutil.disk_usage(there).free)
        why = f"{error.filename or ''} {error.strerror or type(error).__name__}"
        said = f"data.cache_dir = {cache}: {why} ({free} free at {there})"
        raise BadEnvironment(said, "  fix: data.cache_dir=FOLDER that can be written") from error


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold an advisory lock on a file that its holders may delete; it goes when the process dies.

    Yields whether it is held, which it always is with `wait`.
    """
    while True:
        with open(path, "ab") as file:
            try:
                held = locks.lock(file.fileno(), path, wait=wait)
            except locks.Taken:
                yield False
                return
            try:
                if _is_open(file.fileno(), path):
                    yield True
                    return
            finally:
                held.release()


def _is_open(descriptor: int, path: Path) -> bool:
    """Return whether a path still leads to the file that is open: nobody has removed it
    meanwhile.
    """
    return os.path.exists(path) and os.path.samestat(os.fstat(descriptor), os.stat(path))
