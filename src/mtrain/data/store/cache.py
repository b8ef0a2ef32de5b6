"""The cache of prepared corpora: which are in use, and which are removed when another is built.

A corpus that no run has used for `UNUSED_DAYS` is removed. If all of them exceed `LIMIT_BYTES`, the
least recently used are removed too, except those of the last `RECENT_DAYS`. A corpus that a running
process reads is never removed: the process holds a shared lock on the corpus's file `.used`, whose
modification time is the last use. On a file system without locks, readers are unknown, so nothing
is removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mtrain import durable, locks, strict_json, units
from mtrain.errors import BadEnvironment, CorruptData, first_line

UNUSED_DAYS = 90
RECENT_DAYS = 1
LIMIT_BYTES = 100 * units.GIB
USED = ".used"
META = "meta.json"
FILES = ("tokens.bin", "tokens.idx", "tokenizer.json")
# Further files of prepared chats
OF_CHATS = ("learned.bin", "chats.bin", "rejects.jsonl", "windows.bin")
# Files of a cached order of samples
ORDERS = (
    "sequences.npy",
    "starts.npy",
    "shuffled.npy",
    "fitted.npy",
    "long.npy",
    "pieces.npy",
    "counts.npy",
)
DAY_S = 86_400

# Corpus in use -> descriptor that holds its lock, which forked processes inherit
_held: dict[str, int] = {}


def use(folder: Path) -> bool:
    """Mark a corpus as used until this process and its forks end; return False if it is being
    removed.

    In a read-only folder nothing is marked.
    """
    name = os.path.abspath(folder)
    path = folder / USED
    # in a read-only folder, or that of another user, the use cannot be marked
    with contextlib.suppress(OSError):
        if name in _held and not _is_open(_held[name], path):  # it was built again
            os.close(_held.pop(name))
        if name not in _held:
            descriptor = _shared(path)
            if descriptor is None:
                return False
            _held[name] = descriptor
        os.utime(path)
    return True


def _shared(path: Path) -> int | None:
    """Return a descriptor with a shared lock on a file; None if another process removes it."""
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


def build_once(
    folder: Path, meta: Callable[[], dict[str, Any] | None], make: Callable[[Path], None]
) -> dict[str, Any]:
    """Return the metadata of a cache folder and mark it as used; `make` fills an incomplete one.

    One of several processes builds it in a temporary folder, which is then renamed, while the
    others wait.
    """
    facts = meta()
    if facts is not None and use(folder):
        return facts
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f"{folder.name}.lock")):
        # another process may have built it while this one waited for the lock
        facts = meta()
        if facts is None:
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
            facts = meta()
        use(folder)
    assert facts is not None
    return facts


def name_of(settings: dict[str, Any] | list[Any]) -> str:
    """Return the end of a folder's name: a digest of everything that its contents depend on."""
    text = strict_json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_meta(folder: Path) -> dict[str, Any]:
    """Return the metadata in a folder; raise OSError or ValueError if it has none."""
    meta: dict[str, Any] = json.loads((folder / META).read_text(encoding="utf-8"))
    return meta


def write_meta(folder: Path, meta: dict[str, Any]) -> None:
    """Write the metadata of a folder to the disk."""
    durable.write(folder / META, (strict_json.dumps(meta, indent=1) + "\n").encode())


def tidy(cache: Path, note: Callable[[str], None]) -> None:
    """Remove what `make_room` removes, and report it."""
    with contextlib.suppress(OSError):
        for gone in make_room(cache):
            note(f"{gone}: not used for a long time; removed to make room")


def make_room(cache: Path) -> list[Path]:
    """Remove corpora by the rule of this module, and return them.

    A folder with any other file is not a corpus. Equally old notes of source files are removed too.
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
            with contextlib.suppress(OSError):  # removed meanwhile, or another user's
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
    # `data.cache_dir` may be a folder that holds more than caches: only known names are removed
    names = set(os.listdir(folder))
    return META in names and names <= {META, USED, *FILES, *OF_CHATS, *ORDERS}


def _last_use(folder: Path) -> float:
    noted = folder / USED
    return (noted if noted.exists() else folder / META).stat().st_mtime


def _remove(folder: Path) -> bool:
    """Remove a corpus unless a process uses or rebuilds it; return whether it was removed."""
    with locked(folder.with_name(f"{folder.name}.lock"), wait=False) as free:
        if not free:
            return False
        with open(folder / USED, "ab") as file:
            try:
                held = locks.lock(file.fileno(), folder / USED)
            except locks.Taken:
                return False
            if held.file is not None:  # a file system without locks: readers are unknown
                held.release()
                return False
            # renamed first, so that no process opens a folder with half of its files
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
        existing = next((p for p in (cache, *cache.parents) if os.path.isdir(p)), Path("/"))
        free = units.bytes_(shutil.disk_usage(existing).free)
        why = f"{error.filename or ''} {error.strerror or type(error).__name__}"
        raise BadEnvironment(
            f"data.cache_dir = {cache}: {why} ({free} free at {existing})",
            "  fix: data.cache_dir=FOLDER that can be written",
        ) from error


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold an advisory lock on a file that its holders may delete; it ends with the process.

    Yields whether the lock is held; with `wait` it always is.
    """
    while True:
        with open(path, "ab") as file:
            try:
                held = locks.lock(file.fileno(), path, wait=wait)
            except locks.Taken:
                yield False
                return
            try:
                # the last holder may have deleted the file: that lock excludes nobody, so try again
                if _is_open(file.fileno(), path):
                    yield True
                    return
            finally:
                held.release()


def _is_open(descriptor: int, path: Path) -> bool:
    """Return whether a path still leads to the open file, which was not removed meanwhile."""
    return os.path.exists(path) and os.path.samestat(os.fstat(descriptor), os.stat(path))


# Orders of fewer numbers are computed in memory, which takes a moment
SMALL = 1 << 20
Arrays = dict[str, np.ndarray]
# A function that requests arrays by name, dtype and length, and fills them
Fill = Callable[[Callable[[str, str, int], np.ndarray]], None]


def build_arrays(folder: Path, size: int, fill: Fill) -> Arrays:
    """Return the arrays that `fill` makes, of about `size` numbers, from `folder` if it has them.

    If the folder cannot be written, they are made in memory.
    """
    if size > SMALL:
        with contextlib.suppress(OSError):
            return build_once(
                folder, lambda: _known(folder), lambda building: _write(building, fill)
            )
    made: Arrays = {}

    def array(name: str, dtype: str, length: int) -> np.ndarray:
        made[name] = np.zeros(length, dtype)
        return made[name]

    fill(array)
    return made


def _known(folder: Path) -> Arrays | None:
    """Return the arrays of a folder, or None if it is incomplete."""
    try:
        meta = read_meta(folder)
        arrays = {
            name: load(folder / f"{name}.npy") for name in meta["arrays"] if f"{name}.npy" in ORDERS
        }
        shapes = [[name, array.dtype.str, len(array)] for name, array in arrays.items()]
    except (OSError, ValueError, KeyError, TypeError, CorruptData):
        return None
    return arrays if shapes == meta.get("shapes") else None


def _write(folder: Path, fill: Fill) -> None:
    made: dict[str, np.memmap] = {}

    def array(name: str, dtype: str, length: int) -> np.ndarray:
        path = folder / f"{name}.npy"
        made[name] = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(length,))
        # a full disk fails here, and not by SIGBUS when the map is written
        with open(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
        return np.asarray(made[name])  # numpy shuffles only plain arrays at full speed

    fill(array)
    for one in made.values():
        one.flush()
    shapes = [[name, one.dtype.str, len(one)] for name, one in made.items()]
    text = strict_json.dumps({"kind": "order", "arrays": list(made), "shapes": shapes})
    (folder / META).write_text(text + "\n", encoding="utf-8")


def load(path: Path) -> np.ndarray:
    """Return the array of a `.npy` file as a memory map, without unpickling anything.

    Raises CorruptData for a file of another format, or one shorter than its header declares.
    """
    try:
        # refuses arrays of objects, the only ones that are pickled
        return np.lib.format.open_memmap(path, mode="r")
    except (ValueError, EOFError, OverflowError, SyntaxError, MemoryError) as error:
        reason = first_line(error)
        raise CorruptData(f"{path}: not an array of numbers in numpy's format: {reason}") from error
