"""The one way to read a file that a user names: a regular file of bounded size, whatever stands behind its name.

Pipes, sockets and devices are never opened, so nothing here waits for a writer or reads without an end.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from mtrain.config.paths import conf_dir, near_files, recipes_dir
from mtrain.errors import BadInput, Problem

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


def kind_of(path: str | Path) -> str:
    """What stands at a path where it is no regular file, such as `a named pipe`; empty for a regular file.

    Raises:
        OSError: nothing is there, or it cannot be asked.
        ValueError: no path can be spelled so.
    """
    return _kind(os.stat(path).st_mode)


def _kind(mode: int) -> str:
    if stat.S_ISREG(mode):
        return ""
    return next((name for test, name in _KINDS if test(mode)), "no regular file")


def read_bytes(path: Path, source: str, limit: int = MAX_BYTES, endings: Sequence[str] = ()) -> bytes:
    """What is in a regular file.

    Args:
        path: the file; a symbolic link is followed.
        source: how problems name it.
        limit: most bytes that are read.
        endings: of the names that a file outside of the working folder may have; empty: any. What is wrong with a
            file is shown with its lines, and a file of another kind may hold what nobody meant to be shown.

    Raises:
        BadInput: missing, no regular file, unreadable, too large, or refused by its name.
    """
    try:
        kind = kind_of(path)
        if not kind:
            _refuse_foreign(path, source, endings)
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                kind = _kind(os.fstat(descriptor).st_mode)  # another thing may stand there since it was asked
                data = b"" if kind else file.read(limit + 1)
    except (OSError, ValueError) as error:
        raise BadInput([missing(path, source, error)]) from None
    if kind:
        raise BadInput([_not_regular(path, source, kind)])
    if len(data) > limit:
        raise BadInput([Problem("MT005", "", None, f"larger than the limit of {limit} bytes", "write less", source)])
    return data


def read_text(path: Path, source: str, endings: Sequence[str] = YAML_ENDINGS) -> str:
    """The UTF-8 text of `read_bytes`.

    Raises:
        BadInput: as there, or it is not UTF-8.
    """
    return _decoded(read_bytes(path, source, endings=endings), source)


def read_stdin() -> str:
    """The UTF-8 text on standard input, of bounded size.

    Raises:
        BadInput: too large, or not UTF-8.
    """
    data = sys.stdin.buffer.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        rule = f"larger than the limit of {MAX_BYTES} bytes"
        raise BadInput([Problem("MT005", "", None, rule, "write less", "standard input")])
    return _decoded(data, "standard input")


def _decoded(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        rule = f"byte {data[error.start]:#04x} is not UTF-8; a configuration is UTF-8 text"
        raise BadInput(
            [Problem("MT003", "", None, rule, "delete it, or save the file as UTF-8", f"{source}:{line}")]
        ) from None


def missing(path: Path, source: str, error: OSError | ValueError) -> Problem:
    """The problem of a file that cannot be read, with the names near it."""
    near = _near(path)
    if isinstance(error, FileNotFoundError):
        rule = "there is no such file"
    else:
        rule = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    fix = f"did you mean {', '.join(near)}?" if near else "name a file that is there"
    return Problem("MT002", "", None, rule, fix, source)


def _not_regular(path: Path, source: str, kind: str) -> Problem:
    near = sorted(str(p) for p in path.glob("*.yaml"))[:3] if kind == "a folder" else _near(path)
    fix = f"did you mean {', '.join(near)}?" if near else "name a file that is there"
    return Problem("MT002", "", None, f"is {kind}; a regular file is needed", fix, source)


def _near(path: Path) -> list[str]:
    """Regular files beside a path, of names like its own."""
    return [name for name in near_files(path) if os.path.isfile(name) and name != str(path)]


def _refuse_foreign(path: Path, source: str, endings: Sequence[str]) -> None:
    """Refuses a file outside of the working folder, and not shipped, whose name has none of the `endings`."""
    real = os.path.realpath(path)
    inside = (os.path.realpath(folder) for folder in (".", conf_dir(), recipes_dir()))
    if not endings or real.endswith(tuple(endings)) or any(real.startswith(f"{f}/") for f in inside):  # never in /
        return
    rule = f"is outside of the working folder, and there only files ending in {', '.join(endings)} are read"
    fix = f"copy it to a file that ends in {endings[0]}, if it is a configuration"
    raise BadInput([Problem("MT002", "", None, rule, fix, source)])
