"""The text of a corpus: which files are read, in which order, and what each document says."""

from __future__ import annotations

import codecs
import difflib
import hashlib
import os
import re
import stat
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mtrain import units
from mtrain.config.disk.files import PIECE, SKIPPED_FOLDERS, files_below
from mtrain.config.schema.data import DataConfig
from mtrain.errors import ConfigError, Problem


@dataclass(frozen=True)
class SourceFile:
    """One file of a corpus; `name` is relative to the corpus and makes its place in the order."""

    name: str
    path: Path
    stamp: tuple[int, ...]
    """Size, modification and change time in ns, inode: one differs when the file was written again.
    """


@dataclass
class TextCorpus:
    """The documents of a text corpus, iterated as (name, text); see `open_corpus`."""

    name: str
    """Short name, fit for a file name."""
    files: tuple[SourceFile, ...]
    """In reading order: a shuffle by name, so that a split by position is not a split by topic."""
    limit_bytes: int | None
    shown: str
    """What messages call the corpus."""
    skipped: list[str] = field(default_factory=list)
    """Files met so far that are not UTF-8."""

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Yield each document's name and text, none of them empty, `limit_bytes` of UTF-8 at most.

        Raises ConfigError for a file that cannot be read, and at the end if there was no text.
        """
        self.skipped.clear()
        left = self.limit_bytes
        empty = True
        for file in self.files:
            text, read = self._read(file, left)
            if len(self.files) > 1:
                documents = [(file.name, text)]
            else:
                pieces = ((f"{file.name}#{i}", piece) for i, piece in enumerate(cut(text)))
                documents = sorted(pieces, key=lambda piece: _place(piece[0]))
            for name, document in documents:
                if document:
                    empty = False
                    yield name, document
            if left is not None:
                left -= read
                if left <= 0:
                    break
        if empty:
            skipped = f", {len(self.skipped)} of them not UTF-8" if self.skipped else ""
            raise _problem(
                self.shown,
                f"the corpus holds no text: {len(self.files)} files{skipped}, the rest empty",
                "data.path=FOLDER with text files in UTF-8",
            )

    def _read(self, file: SourceFile, limit_bytes: int | None) -> tuple[str, int]:
        """Return the text of a file, of its first `limit_bytes` if there is a limit, and how many
        bytes it counts for.

        A file that is not UTF-8, as far as it is read, has none.
        """
        try:
            with file.path.open("rb") as stream:
                data = stream.read(-1 if limit_bytes is None else limit_bytes)
                whole = limit_bytes is None or len(data) < limit_bytes or not stream.read(1)
        except OSError as error:
            raise _problem(
                self.shown,
                f"{file.path} cannot be read: {error.strerror}",
                "make the file readable, or data.path=another",
            ) from error
        try:
            # a letter that the limit cuts is left out
            return codecs.getincrementaldecoder("utf-8")().decode(data, final=whole), len(data)
        except UnicodeDecodeError:
            self.skipped.append(file.name)
            return "", 0


def cut(text: str, piece: int = PIECE) -> Iterator[str]:
    """Cut a text into documents at blank lines, else at line ends, else anywhere; joined, they are
    the text.

    Each but the last has `piece` to 4 * `piece` characters.
    """
    at = 0
    while at < len(text):
        first = at + piece
        last = at + 4 * piece
        end = min(last, len(text))
        for stop in ("\n\n", "\n"):
            found = text.find(stop, first, end)
            if found >= 0:
                end = found + len(stop)
                break
        yield text[at:end]
        at = end


def open_corpus(data: DataConfig) -> TextCorpus:
    """List the files of a text corpus: nothing is read yet.

    `data.path` null stands for the Python standard library found here: sources, texts and licences,
    no tests. Raises ConfigError for a path that is missing, unreadable or has no file with these
    suffixes.
    """
    limit = None if data.limit_mib is None else max(1, int(data.limit_mib * units.MIB))
    if data.path is None:
        root = Path(sysconfig.get_path("stdlib"))
        name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        shown = f"null ({root})"
        if not root.is_dir():
            raise _problem(
                "null",
                f"the Python standard library is not a folder here: {root}",
                "data.path=FOLDER",
            )
        files = _walk(root, data.suffixes, shown, SKIPPED_FOLDERS, licences=True)
    elif not data.path:
        raise _problem(
            "", "an empty path", "data.path=FOLDER, or null for the Python standard library"
        )
    else:
        root = Path(os.path.expanduser(data.path))
        shown = data.path
        mode = _mode(root, shown)
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", root.resolve().name).strip(".-")[:40] or "corpus"
        if stat.S_ISREG(mode):
            files = [_source(root.name, root)]
        elif stat.S_ISDIR(mode):
            files = _walk(root, data.suffixes, shown)
        else:
            raise _problem(shown, "neither a file nor a folder", "data.path=FOLDER")
    if not files:
        raise _problem(
            shown,
            f"no file ends in any of {', '.join(data.suffixes) or '(no suffixes given)'};"
            f" {_endings(root)}",
            "data.suffixes=[.ending] that the folder has, or another data.path",
        )
    return TextCorpus(
        name, tuple(sorted(files, key=lambda f: (_place(f.name), f.name))), limit, shown
    )


def _walk(
    root: Path,
    suffixes: tuple[str, ...],
    shown: str,
    skip: frozenset[str] = frozenset(),
    licences: bool = False,
) -> list[SourceFile]:
    """Return regular files below `root` with one of the suffixes; not those in hidden folders or
    behind links to folders.
    """

    def wanted(name: str) -> bool:
        return name.endswith(suffixes) or (licences and name.startswith("LICENSE"))

    try:
        return [
            _source(os.path.relpath(path, root), path) for path in files_below(root, wanted, skip)
        ]
    except OSError as error:
        raise _problem(
            shown,
            f"{error.filename} cannot be read: {error.strerror}",
            "make it readable, or data.path=another",
        ) from error


def _source(name: str, path: Path) -> SourceFile:
    s = path.stat()
    return SourceFile(name, path, (s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino))


def _place(name: str) -> bytes:
    """Where a name comes in the order: fixed for the name, whatever other names there are."""
    return hashlib.blake2b(os.fsencode(name), digest_size=16, salt=b"mtrain order 1").digest()


def _mode(path: Path, shown: str) -> int:
    try:
        return path.stat().st_mode
    except OSError as error:
        raise _problem(shown, f"{path}: {error.strerror}", near_paths(path)) from error
    except ValueError as error:
        raise _problem(shown, f"no path: {error}", "data.path=FOLDER") from error


def near_paths(path: Path, names: list[str] | None = None) -> str:
    """Return a fix for a path that is missing: the nearest names beside it, or the part of it that
    does exist.
    """
    if not os.access(path.parent, os.R_OK | os.X_OK):
        there = next(p for p in (*path.absolute().parents, Path("/")) if os.path.isdir(p))
        return f"data.path= a path that exists; of this one {there} does"
    names = sorted(os.listdir(path.parent)) if names is None else names
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5) or names[:3]
    return (
        " or ".join(f"data.path={path.parent / n}" for n in near)
        or f"{path.parent} is empty: data.path=another"
    )


def _endings(root: Path) -> str:
    """What endings a folder has instead, for a message."""
    counts: dict[str, int] = {}
    for _, _, names in os.walk(root):
        for name in names:
            ending = os.path.splitext(name)[1] or "none"
            counts[ending] = counts.get(ending, 0) + 1
    most = sorted(counts.items(), key=lambda item: -item[1])[:4]
    if most:
        return "endings found: " + ", ".join(f"{e} ({n})" for e, n in most)
    return "the folder is empty"


def _problem(value: str, rule: str, fix: str) -> ConfigError:
    return ConfigError([Problem("MT601", "data.path", value, rule, fix)])
