"""Output of verbs: refusals of their words, tables, JSON and new files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from mtrain import strict_json
from mtrain.config.compose.origins import COMMAND_LINE
from mtrain.errors import BadEnvironment, ConfigError, Problem, say_page


def refusal(
    rule: str,
    fix: str,
    code: str = "MT010",
    path: str = "",
    value: object = None,
    source: str = COMMAND_LINE,
) -> ConfigError:
    """Return the error of one problem, by default of a command line that cannot be read."""
    return ConfigError([Problem(code, path, value, rule, fix, source)])


def needed(words: Sequence[str], usage: str) -> str:
    """Return the first word.

    Raises:
        ConfigError: there are no words.
    """
    if not words:
        raise refusal("cannot run because a word is missing", usage)
    return words[0]


def say_json(data: Any) -> None:
    """Print data as JSON for a machine."""
    say_page(strict_json.dumps(data, indent=2))


def problem_report(problems: Sequence[Problem], digest: str | None) -> dict[str, object]:
    """Return the JSON report: `ok`, every problem, and the digest of a valid configuration."""
    keys = ("code", "path", "value", "source", "rule", "fix", "severity")
    rows: list[dict[str, object]] = []
    for problem in problems:
        row = {key: getattr(problem, key) for key in keys}
        rows.append({**row, "value": _finite(problem.value)})
        related = [
            {"path": key.path, "value": _finite(key.value), "source": key.source}
            for key in problem.related
        ]
        rows[-1]["related"] = related
    return {"ok": digest is not None, "problems": rows, "digest": digest}


def _finite(value: object) -> object:
    """Return a value that strict JSON has."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def table(rows: Sequence[Sequence[str]], *, left: int, ragged: Sequence[int] = ()) -> list[str]:
    """Return aligned columns; the first `left` ones and those in `ragged` are left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            text.ljust(width) if i < left or i in ragged else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"  {'  '.join(cells)}".rstrip())
    return lines


def write_new(path: Path, text: str) -> None:
    """Write a file that does not exist yet.

    Raises:
        ConfigError: it exists.
        BadEnvironment: it cannot be written.
    """
    # Mode x creates the file or fails: another process may create it after a check.
    with _refusals(path), path.open("x", encoding="utf-8") as file:
        file.write(text)


def require_new(path: Path) -> None:
    """Refuse before long work the file that `write_new` would refuse after it.

    Raises:
        ConfigError: it exists.
        BadEnvironment: its folder does not exist, or nothing can be written into it.
    """
    with _refusals(path):
        with suppress(FileNotFoundError):
            # A dangling link is in the way as well, and `exists` follows it.
            path.lstat()
            raise FileExistsError
        # Permissions do not show a full disk, a quota or a mount that is read-only.
        TemporaryFile(dir=path.parent).close()


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        fix = str(path.with_name(f"{path.stem}_2{path.suffix}"))
        rule = f"{path} is there already; nothing is written over"
        raise refusal(rule, fix, "MT704") from None
    except (OSError, ValueError) as error:
        # A path with a null byte is a ValueError without an error of the system.
        why = getattr(error, "strerror", None) or error
        raise BadEnvironment(f"{path} cannot be written: {why}") from None


def new_page(path: Path) -> Path:
    """Return the path of an HTML page that does not exist yet.

    Raises:
        ConfigError: it exists, or its folder does not.
    """
    if path.exists() or path.is_symlink():
        rule = f"{path} is there already; nothing is written over"
        raise refusal(rule, "--html FILE with another name", "MT704", "html", str(path))
    if not path.parent.is_dir():
        raise _unwritten(path, f"{path.parent} is no folder")
    return path


def write_page(to: Path, text: str) -> None:
    """Write an HTML page.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        with to.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise _unwritten(to, error.strerror or "") from None


def _unwritten(path: Path, rule: str) -> ConfigError:
    fix = "--html FILE in an existing folder that can be written to"
    return refusal(rule, fix, "MT704", "html", str(path))
