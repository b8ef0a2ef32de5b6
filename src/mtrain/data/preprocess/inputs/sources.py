"""The files that are read, in their order: what a user names, and what lies in folders that a user
names.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mtrain.config.disk.files import files_below
from mtrain.config.disk.manifest import SUFFIX
from mtrain.errors import ConfigError, Problem

FORMATS = {
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
    "tar": (".tar", ".tgz"),
    "text": (".txt", ".text", ".md", ".rst"),
}
"""Format -> endings of its files."""
COMPRESSED = {".gz": "gz", ".tgz": "gz", ".zst": "zst", ".zstd": "zst"}
PACKED = ("jsonl", "tar", "text")
"""Formats that may be compressed as a whole."""
PARTIAL = ".partial"
LOCK = "lock"
"""Ending of the folder in which a corpus grows, and a file in it."""
REJECTED = ".rejects.jsonl"
REMOVED = ".removed.jsonl"
OF_CORPORA = (SUFFIX, REJECTED, REMOVED)
"""Endings of the files of a corpus that are not documents."""
OF_DATASETS = ("dataset_info.json", "state.json", "dataset_dict.json")
"""Metadata of Hugging Face's datasets next to .arrow files."""


@dataclass(frozen=True)
class Source:
    """One file."""

    name: str
    """As the user named it, or its folder."""
    path: str
    form: str
    """One of FORMATS."""
    packing: str
    """`gz`, `zst`, or empty."""
    size: int
    changed_ns: int

    @property
    def is_changed(self) -> bool:
        """Return whether another file, or none, stands there now."""
        try:
            return self != _source(Path(self.path), self.name, self.form, self.packing)
        except OSError:
            return True

    def describe(self) -> dict[str, Any]:
        """Return what identifies this version of the file, ready for JSON."""
        return asdict(self)


def form_of(name: str) -> tuple[str, str] | None:
    """Return format and compression of a file by its name; None: neither is known."""
    base, ending = os.path.splitext(name.lower())
    packing = COMPRESSED.get(ending, "")
    if packing and ending != ".tgz":
        ending = os.path.splitext(base)[1]
    form = next((form for form, endings in FORMATS.items() if ending in endings), None)
    return (form, packing) if form is not None and (not packing or form in PACKED) else None


def find_sources(inputs: Sequence[Path], form: str | None = None) -> list[Source]:
    """Return the files of what was named, those of a folder by name; `form`: of any ending, all are
    of this format.

    Raises:
        ConfigError: an input is missing, is no file or folder, is of no known format, or has no
            file.
    """
    out = [source for path in inputs for source in _of_input(path, form)]
    seen = set[str]()
    for source in out:
        if source.path in seen:
            raise _wrong(
                source.name,
                "is named twice, and its documents would be there twice",
                "each input once",
            )
        seen.add(source.path)
    return out


def _of_input(path: Path, form: str | None) -> list[Source]:
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            return _of_folder(path, form)
        if not stat.S_ISREG(mode):
            raise _wrong(str(path), "is neither a file nor a folder", "name a file or a folder")
        with open(path, "rb"):
            pass
    except (OSError, ValueError) as error:
        rule = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise _wrong(str(path), rule, "name a file or a folder that can be read") from None
    known = form_of(path.name)
    if known is None and form is None:
        endings = ", ".join(ending for of in FORMATS.values() for ending in of)
        rule = f"its ending says no format; known: {endings}, and .gz, .zst"
        raise _wrong(str(path), rule, f"format={'|'.join(FORMATS)}")
    return [_source(path, str(path), *_chosen(path.name, known, form))]


def _chosen(name: str, known: tuple[str, str] | None, form: str | None) -> tuple[str, str]:
    if form is None:
        assert known is not None
        return known
    return form, COMPRESSED.get(os.path.splitext(name.lower())[1], "")


def _of_folder(folder: Path, form: str | None) -> list[Source]:
    try:
        paths = sorted(files_below(folder, lambda name: form_of(name) is not None), key=os.fsencode)
    except OSError as error:
        rule = f"{error.filename} cannot be read: {error.strerror}"
        raise _wrong(str(folder), rule, "make it readable, or name another") from None
    found = [(path, form_of(path.name) or ("", "")) for path in paths if not _is_of_corpus(path)]
    forms = {kind for _, (kind, _) in found}
    if "arrow" in forms:
        found = [
            (p, k)
            for p, k in found
            if p.name not in OF_DATASETS and not p.name.startswith("cache-")
        ]
        forms = {kind for _, (kind, _) in found}
    if form is not None:
        found = [(path, kind) for path, kind in found if kind[0] == form]
    elif forms > {"text"}:  # a README next to data is not a document
        found = [(path, kind) for path, kind in found if kind[0] != "text"]
    if not found:
        kinds = form or ", ".join(FORMATS)
        raise _wrong(
            str(folder),
            f"no file in it is {kinds}",
            "name a folder with such files, or files with format=",
        )
    return [_source(path, str(path), *kind) for path, kind in found]


def _is_of_corpus(path: Path) -> bool:
    """Return whether a file belongs to a corpus or a draft that the data commands wrote."""
    if path.parent.suffix == PARTIAL:
        return (path.parent / LOCK).exists()
    return any(
        path.with_name(f"{path.name.removesuffix(e)}.idx").exists()
        for e in OF_CORPORA
        if path.name.endswith(e)
    )


def _source(path: Path, name: str, form: str, packing: str) -> Source:
    held = path.stat()
    return Source(name, os.path.realpath(path), form, packing, held.st_size, held.st_mtime_ns)


def _wrong(value: str, rule: str, fix: str) -> ConfigError:
    return ConfigError([Problem("MT601", "input", value, rule, fix, "command line")])
