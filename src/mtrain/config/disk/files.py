"""Bounded inspection of the disk: files that a user names, text corpora, and folders to write to.

mtrain never opens pipes, sockets and devices here, so nothing waits for a writer or reads without
end.
"""

from __future__ import annotations

import codecs
import errno
import json
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from mtrain.config.compose.paths import conf_dir, names_near, recipes_dir, user_path
from mtrain.errors import ConfigError, Problem

MAX_BYTES = 1 << 20
STDIN = "-"
YAML_ENDINGS = (".yaml", ".yml")
SCRIPT_ENDINGS = (".sh", ".bash", ".slurm", ".sbatch", ".txt", ".args", ".conf", *YAML_ENDINGS)
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)
MAX_ENTRIES = 20_000
MAX_SECONDS = 0.1
# Folders of a Python installation that are not the standard library, or are its tests.
SKIPPED_FOLDERS = frozenset(
    ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test")
)
# A corpus in one file is split at blank lines into documents of at least this many characters.
PIECE = 16 << 10
# Kinds of file systems that hold no user files.
PSEUDO = frozenset(
    (
        "proc",
        "sysfs",
        "cgroup",
        "cgroup2",
        "devpts",
        "debugfs",
        "tracefs",
        "securityfs",
        "bpf",
        "pstore",
        "configfs",
    )
)
# The bytes of a file that decide whether it is text.
LOOKED_AT = 1 << 16


def kind_of(path: str | Path) -> str:
    """Return the kind of a path that is no regular file, such as `a named pipe`; empty for a
    regular file.

    Raises:
        OSError: the path does not exist or cannot be examined.
        ValueError: no path can have this name.
    """
    return _kind(os.stat(path).st_mode)


def _kind(mode: int) -> str:
    if stat.S_ISREG(mode):
        return ""
    return next((name for test, name in _KINDS if test(mode)), "no regular file")


def _beginning(path: Path, limit: int) -> tuple[str, bytes]:
    """Return `kind_of` a path, and the first bytes of a regular file."""
    if kind := kind_of(path):
        return kind, b""
    # Without O_NONBLOCK, opening a named pipe waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        # something else may be at this path by now
        kind = _kind(os.fstat(descriptor).st_mode)
        return kind, b"" if kind else file.read(limit)


def read_bytes(
    path: Path, source: str, limit: int = MAX_BYTES, endings: Sequence[str] = ()
) -> bytes:
    """Return the contents of a regular file.

    Args:
        path: the file; a symbolic link is followed.
        source: how problems name it.
        limit: most bytes that are read.
        endings: of the names that a file outside of the working folder may have; empty: any.
            Problems show lines of the file, and a file of another kind may hold secrets.

    Raises:
        ConfigError: missing, no regular file, unreadable, too large, or refused by its name.
    """
    try:
        kind = kind_of(path)
        if not kind:
            _refuse_foreign(path, source, endings)
            kind, data = _beginning(path, limit + 1)
    except (OSError, ValueError) as error:
        raise ConfigError([missing(path, source, error)]) from None
    if kind:
        raise ConfigError([_not_regular(path, source, kind)])
    if len(data) > limit:
        rule = f"larger than the limit of {limit} bytes"
        raise ConfigError.of("MT005", "", None, rule, "write less", source)
    return data


def read_text(path: Path, source: str, endings: Sequence[str] = YAML_ENDINGS) -> str:
    """Return the UTF-8 text of `read_bytes`.

    Raises:
        ConfigError: as there, or the file is not UTF-8.
    """
    return _decoded(read_bytes(path, source, endings=endings), source)


def read_stdin() -> str:
    """Return the UTF-8 text on standard input, of bounded size.

    Raises:
        ConfigError: too large, or not UTF-8.
    """
    data = sys.stdin.buffer.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        rule = f"larger than the limit of {MAX_BYTES} bytes"
        raise ConfigError.of("MT005", "", None, rule, "write less", "standard input")
    return _decoded(data, "standard input")


def _decoded(data: bytes, source: str) -> str:
    try:
        # Editors on Windows begin files with a byte order mark.
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        rule = f"byte {data[error.start]:#04x} is not UTF-8; a configuration is UTF-8 text"
        raise ConfigError.of(
            "MT003", "", None, rule, "delete it, or save the file as UTF-8", f"{source}:{line}"
        ) from None


def missing(path: Path, source: str, error: OSError | ValueError) -> Problem:
    """Return the problem of a file that cannot be read, with similar names."""
    near = files_near(path)
    gone = isinstance(error, FileNotFoundError) and not os.path.islink(path)
    rule = "there is no such file" if gone else unreachable(path, error)
    fix = f"did you mean {', '.join(near)}?" if near else "name an existing file"
    return Problem("MT002", "", None, rule, fix, source)


def _not_regular(path: Path, source: str, kind: str) -> Problem:
    near = (
        sorted(str(p) for p in path.glob("*.yaml"))[:3] if kind == "a folder" else files_near(path)
    )
    fix = f"did you mean {', '.join(near)}?" if near else "name an existing file"
    return Problem("MT002", "", None, f"is {kind}; a regular file is needed", fix, source)


def files_near(path: Path) -> list[str]:
    """Return regular files in the folder of a path with similar names."""
    return [name for name in names_near(path) if os.path.isfile(name) and name != str(path)]


def _refuse_foreign(path: Path, source: str, endings: Sequence[str]) -> None:
    """Refuse an outside file that does not ship and has none of the `endings`."""
    # After links are followed: a link named x.yaml may lead to any file.
    real = os.path.realpath(path)
    inside = (os.path.realpath(folder) for folder in (".", conf_dir(), recipes_dir()))
    if (
        not endings
        or real.endswith(tuple(endings))
        or any(real.startswith(f"{f}/") for f in inside)
    ):  # never in /
        return
    rule = (
        f"is outside of the working folder, and there only files ending in {', '.join(endings)} are"
        " read"
    )
    fix = f"copy it to a file that ends in {endings[0]}, if it is a configuration"
    raise ConfigError.of("MT002", "", None, rule, fix, source)


@dataclass
class Bound:
    """The limit of a walk through folders; `spent` tells that the walk stopped early."""

    entries: int = MAX_ENTRIES
    until: float = field(default_factory=lambda: time.monotonic() + MAX_SECONDS)
    spent: bool = False

    def step(self) -> bool:
        """Count an entry; return whether the walk may continue."""
        self.entries -= 1
        self.spent = self.spent or self.entries < 0 or time.monotonic() > self.until
        return not self.spent


def files_below(
    root: Path,
    wanted: Callable[[str], bool],
    skip: frozenset[str] = frozenset(),
    bound: Bound | None = None,
) -> Iterator[Path]:
    """Yield regular files below a folder with `wanted` names, unordered, within `bound`.

    Hidden folders, folders named in `skip` and linked folders are left out.

    Raises:
        OSError: a folder cannot be read.
    """
    waiting = [os.fspath(root)]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if bound is not None and not bound.step():
                    return
                # A linked folder may lead back to one above it.
                if entry.is_dir(follow_symlinks=False):
                    if entry.name not in skip and not entry.name.startswith("."):
                        waiting.append(entry.path)
                elif wanted(entry.name) and Path(entry.path).is_file():
                    yield Path(entry.path)


def unreadable(path: Path) -> str | None:
    """Return why a path, a file or a folder, cannot be read, or None."""
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
    """Return why a path cannot be reached, from the error of examining it."""
    number = getattr(error, "errno", None)
    if number == errno.ELOOP:
        return "a symbolic link leads back to itself"
    if number in (errno.ENOENT, errno.ENOTDIR):
        if os.path.islink(path):
            return "a symbolic link leads nowhere"
        return "there is no such file or folder"
    return f"cannot be read: {getattr(error, 'strerror', None) or error}"


def no_text(path: Path) -> str | None:
    """Return why the start of a file is not UTF-8 text, or None."""
    try:
        kind, head = _beginning(path, LOOKED_AT)
        if kind:
            return f"is {kind}"
        codecs.getincrementaldecoder("utf-8")().decode(head, final=len(head) < LOOKED_AT)
    except UnicodeDecodeError as error:
        return f"byte {error.object[error.start]:#04x} at offset {error.start} is not UTF-8"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None


def unwritable(path: Path) -> str | None:
    """Return why a folder cannot be created or written to, or None."""
    # The nearest folder that exists decides: the ones below it would be created in it.
    for place in (path, *path.parents):
        try:
            mode = os.stat(place).st_mode
        except (OSError, ValueError) as error:
            if os.path.islink(place) or getattr(error, "errno", None) not in (
                errno.ENOENT,
                errno.ENOTDIR,
            ):
                return f"{place}: {unreachable(place, error)}"
            continue
        if not stat.S_ISDIR(mode):
            return f"{place} is a file, and a folder is needed"
        if not os.access(place, os.W_OK | os.X_OK):
            # os.access() says only that it is denied; a read-only file system needs another remedy.
            read_only = os.statvfs(place).f_flag & os.ST_RDONLY
            return (
                f"{place} cannot be written:"
                f" {'its file system is read-only' if read_only else 'permission denied'}"
            )
        return f"{place} cannot be written: it is the kernel's" if _is_no_storage(place) else None
    return None


def _is_no_storage(place: Path) -> bool:
    """Return whether a folder is the kernel's, such as /proc, and holds no user files (Linux)."""
    try:
        mounts = [line.split(" ") for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return False
    path = os.path.realpath(place)
    over = [m for m in mounts if path == m[1] or path.startswith(m[1].rstrip("/") + "/")]
    # Mounts nest: the longest mount point above the folder is its file system.
    return bool(over) and max(over, key=lambda m: len(m[1]))[2] in PSEUDO


_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_FILES = (".json", ".jsonl", ".yaml", ".yml", ".safetensors", ".model", ".txt")


def download_of(text: str, files: str = "") -> tuple[str, str] | None:
    """Return the command that downloads `files` (all if empty) of the hub model that `text` may
    name, and the target folder.

    Return None for the path of a file, or if the path or its folder exists.
    """
    if _NAME.fullmatch(text) is None or text.endswith(_FILES):
        return None
    if Path(user_path(text)).exists() or Path(user_path(text.partition("/")[0])).is_dir():
        return None
    folder = text.rpartition("/")[2]
    words = ["hf download", text, *([files] if files else []), "--local-dir", folder]
    return " ".join(words), folder


ENDING = ".jsonl"
# The number of entries of a folder that are examined: the file is next to folders of images, or
# among few images.
MOST_ENTRIES = 100_000


WHICH = "which text belongs to which image"


def records_of(path: Path, what: str) -> tuple[Path | None, str]:
    """Return the JSON Lines file of a folder or path, or why there is none, in terms of `what`."""
    rule = unreadable(path)
    if rule is not None:
        return None, rule
    if path.is_file():
        if path.name.endswith(ENDING):
            return (path, "")
        return (None, f"is a file that does not end in {ENDING}")
    found = []
    with os.scandir(path) as entries:
        for number, entry in enumerate(entries):
            if number >= MOST_ENTRIES:
                return None, f"holds more than {MOST_ENTRIES} entries: name its {ENDING} file"
            if (
                entry.name.endswith(ENDING)
                and not entry.name.startswith(".")
                and Path(entry.path).is_file()
            ):
                found.append(entry.name)
    if len(found) == 1:
        file = path / found[0]
        rule = unreadable(file)
        return (file, "") if rule is None else (None, f"{found[0]} {rule}")
    said = "no file" if not found else f"{len(found)} files ({', '.join(sorted(found)[:3])})"
    return None, f"holds {said} that ends in {ENDING}, and one must tell {what}"


# The bytes within which the first line must end.
FIRST_BYTES = 1 << 24
# The bytes that may precede it: a byte order mark and empty lines.
BLANK = b"\xef\xbb\xbf \t\r\n"


def kind_of_chats(path: str | None) -> str | None:
    """Return the kind of chats in a file, sft or preference, by its first record; else None."""
    record = _record(path)
    if form_of(record) is not None:
        return "preference"
    if any(isinstance(record.get(key), list) for key in ("messages", "conversations")):
        return "sft"
    return None


PreferenceForm = Literal["pairs", "labels", "scores"]


def form_of(record: dict[str, Any]) -> PreferenceForm | None:
    """Return the form of a preference: pair, labelled or scored answers; else None."""
    if "chosen" in record and "rejected" in record:
        return "pairs"
    if "completion" in record and "label" in record:
        return "labels"
    if "scores" in record and ("answers" in record or "completions" in record):
        return "scores"
    return None


def form_of_preferences(path: str | None) -> PreferenceForm | None:
    """Return the form of the preferences that a file holds, by its first record."""
    return form_of(_record(path))


def is_documents(path: str | None) -> bool:
    """Return whether a file holds a document per line, `{"text": ...}`, by its first record."""
    return isinstance(_record(path).get("text"), str)


def _record(path: str | None) -> dict[str, Any]:
    """Return the first record of a JSON Lines file; empty if it has none."""
    file = user_path(path) if path else None
    if (
        file is None
        or not file.name.endswith(ENDING)
        or unreadable(file) is not None
        or not file.is_file()
    ):
        return {}
    try:
        facts = os.stat(file)
        return _first(file, facts.st_size, facts.st_mtime_ns)
    except OSError:
        return {}


@cache
def _first(file: Path, size: int, changed: int) -> dict[str, Any]:
    """Return the first record; empty if it is no object. The cache key changes with the file."""
    with file.open("rb") as stream:
        head = stream.readline(FIRST_BYTES)
        # Exporters put empty lines first; a bound on the bytes keeps `check` fast on any file.
        while head and not head.strip(BLANK) and stream.tell() < FIRST_BYTES:
            head = stream.readline(FIRST_BYTES)
    try:
        found = json.loads(head.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
