"""The files that a user names, directly or by their folder, and the units that workers read."""

from __future__ import annotations

import gzip
import os
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Self

from mtrain import units
from mtrain.config.disk.files import files_below
from mtrain.config.disk.token_files import SUFFIX
from mtrain.data.preprocess.encoder import library
from mtrain.data.preprocess.record import Reading
from mtrain.errors import ConfigError, CorruptData

# Format -> endings of its files
FORMATS = {
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
    "tar": (".tar", ".tgz"),
    "text": (".txt", ".text", ".md", ".rst"),
}
COMPRESSED = {".gz": "gz", ".tgz": "gz", ".zst": "zst", ".zstd": "zst"}
# Formats that may be compressed as a whole
PACKED = ("jsonl", "tar", "text")
# Ending of the folder in which a corpus grows, and a file in it
PARTIAL = ".partial"
LOCK = "lock"
REJECTED = ".rejects.jsonl"
REMOVED = ".removed.jsonl"
# Endings of the files of a corpus that are not documents
OF_CORPORA = (SUFFIX, REJECTED, REMOVED)
# Metadata of Hugging Face's datasets next to .arrow files
OF_DATASETS = ("dataset_info.json", "state.json", "dataset_dict.json")


@dataclass(frozen=True)
class Source:
    """One file."""

    name: str
    """The path as the user wrote it, or below the folder that the user named."""
    path: str
    form: str
    """One of FORMATS."""
    packing: str
    """`gz`, `zst`, or empty."""
    size: int
    changed_ns: int

    @property
    def is_changed(self) -> bool:
        """Return whether the file was changed, replaced or removed since it was found."""
        try:
            return self != _source(Path(self.path), self.name, self.form, self.packing)
        except OSError:
            return True

    def describe(self) -> dict[str, Any]:
        """Return the fields that identify this version of the file, ready for JSON."""
        return asdict(self)


def form_of(name: str) -> tuple[str, str] | None:
    """Return format and compression of a file by its name, or None for an unknown one."""
    base, ending = os.path.splitext(name.lower())
    packing = COMPRESSED.get(ending, "")
    if packing and ending != ".tgz":
        ending = os.path.splitext(base)[1]
    form = next((form for form, endings in FORMATS.items() if ending in endings), None)
    # Parquet and arrow are read at any place, which a compressed file does not allow
    if form is None or (packing and form not in PACKED):
        return None
    return form, packing


def find_sources(inputs: Sequence[Path], form: str | None = None) -> list[Source]:
    """Return the files of all inputs, those of a folder by name.

    With `form`, all files have this format, whatever their ending.

    Raises:
        ConfigError: an input is missing, is neither a file nor a folder, has an unknown format, or
            has no file.
    """
    out = [source for path in inputs for source in _of_input(path, form)]
    seen = set[str]()
    for source in out:
        if source.path in seen:
            rule = "cannot be read twice because its documents would be in the corpus twice"
            raise _wrong(source.name, rule, "each input once")
        seen.add(source.path)
    return out


def _of_input(path: Path, form: str | None) -> list[Source]:
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            return _of_folder(path, form)
        if not stat.S_ISREG(mode):
            rule = "cannot be read because it is neither a file nor a folder"
            raise _wrong(str(path), rule, "a file or a folder")
        with open(path, "rb"):
            pass
    except (OSError, ValueError) as error:
        rule = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise _wrong(str(path), rule, "a file or a folder that can be read") from None
    known = form_of(path.name)
    if known is None and form is None:
        endings = ", ".join(ending for of in FORMATS.values() for ending in of)
        rule = (
            f"cannot be read because its ending is not that of a format ({endings}, and .gz, .zst)"
        )
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
        raise _wrong(str(folder), rule, "make it readable, or another folder") from None
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
        rule = f"cannot be read because no file in it is {kinds}"
        raise _wrong(str(folder), rule, "a folder with such files, or files with format=")
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
    return ConfigError.of("MT601", "input", value, rule, fix, "command line")


# The approximate number of bytes of a unit, which is the work between two lines of the journal
UNIT = 4 * units.MIB
BLOCK = units.MIB
# The most bytes of a tar's header that holds a long name
MAX_NAME = units.MIB
# gzip reaches about 1,000: an archive that declares more would only fill the memory
MAX_RATIO = 2000
# A member of a tar: its name, and its content or the reason to skip it
Member = tuple[str, bytes | str]
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Part:
    """A part of a file."""

    source: int
    """Its place in the list of sources."""
    first: int = 0
    stop: int = 0
    """End of the part, in bytes or rows of a table; it has the lines or rows that begin before."""
    data: bytes | tuple[Member, ...] | None = None
    """The content if it was read already: whole lines, or samples of a tar."""
    size: int = 0
    """Its bytes in the file, for progress."""


Unit = tuple[Part, ...]
# A function that cuts a Parquet or arrow file: first, stop, bytes
Tables = Callable[[Source], list[tuple[int, int, int]]]


def plan(sources: Sequence[Source], reading: Reading, tables: Tables) -> Iterator[Unit]:
    """Yield all units in their order."""
    # The order and the cuts depend only on the inputs, so that a resumed build has the same units.
    waiting = list[Part]()
    size = 0
    for number, source in enumerate(sources):
        for part in _parts(number, source, reading, tables):
            waiting.append(part)
            # a file takes time even if it is empty: no unit has thousands of them
            size += max(part.size, 1 << 12)
            if size >= UNIT:
                yield tuple(waiting)
                waiting = []
                size = 0
    if waiting:
        yield tuple(waiting)


def _parts(number: int, source: Source, reading: Reading, tables: Tables) -> Iterator[Part]:
    if source.form in ("parquet", "arrow"):
        yield from (Part(number, first, stop, size=size) for first, stop, size in tables(source))
    elif source.form == "tar":
        yield from _of_tar(number, source, reading)
    elif source.packing:
        lines = source.form == "jsonl" or reading.by_line
        yield from _of_stream(number, source, reading, lines)
    elif source.form == "jsonl" or reading.by_line:
        for first in range(0, source.size, UNIT):
            stop = min(first + UNIT, source.size)
            yield Part(number, first, stop, size=stop - first)
    else:
        yield Part(number, 0, source.size, size=source.size)


@contextmanager
def opened(source: Source) -> Iterator[BinaryIO]:
    """Open the decompressed content of a file.

    Raises:
        CorruptData: the file does not have the format of its name, is cut off, or cannot be read.
        BadEnvironment: pyarrow, which reads zstd, is not installed.
    """
    try:
        with open(source.path, "rb") as raw:
            if source.packing == "zst":
                arrow = library("pyarrow", "data", f"{source.name}: a file compressed with zstd")
                with arrow.CompressedInputStream(arrow.PythonFile(raw, "r"), "zstd") as stream:
                    try:
                        yield stream
                    except OSError as error:
                        raise CorruptData(
                            f"{source.name}: offset {raw.tell()}: not zstd data, or cut off:"
                            f" {error}"
                        ) from None
            elif source.packing == "gz":
                with gzip.open(raw, "rb") as plain:
                    yield plain  # type: ignore[misc]
            else:
                yield raw
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise CorruptData(f"{source.name}: not gzip data, or cut off: {error}") from None
    except OSError as error:
        raise CorruptData(f"{source.name}: cannot be read: {error.strerror or error}") from None


def _of_stream(number: int, source: Source, reading: Reading, lines: bool) -> Iterator[Part]:
    """Yield whole lines of a compressed file, or all of it; cut a line at the limit."""
    limit = reading.max_bytes
    with opened(source) as stream:
        if not lines:
            yield Part(number, data=stream.read(limit + 1), size=source.size)
            return
        held = bytearray()
        end = 0
        first = stream.read(len(BOM)).removeprefix(BOM) + stream.read(BLOCK)
        for block in chain([first], iter(lambda: stream.read(BLOCK), b"")):
            if (found := block.rfind(b"\n")) >= 0:
                end = len(held) + found + 1
            held += block
            if end and len(held) >= UNIT:
                yield Part(number, data=bytes(held[:end]), size=end)
                del held[:end]
                end = 0
            elif not end and len(held) > limit + BLOCK:
                # one byte over the limit stays, by which the reader sees that the line is too long
                del held[limit + 1 :]
        if held:
            yield Part(number, data=bytes(held), size=len(held))


def _of_tar(number: int, source: Source, reading: Reading) -> Iterator[Part]:
    """Yield members of a tar by whole samples: neighbours whose names agree up to the first dot."""
    held = list[Member]()
    size = 0
    last = None
    for name, content in _members(source, reading):
        key = sample_of(name)[0]
        if size >= UNIT and key != last:
            yield Part(number, data=tuple(held), size=size)
            held = []
            size = 0
        held.append((name, content))
        size += len(content) + tarfile.BLOCKSIZE
        last = key
    if held:
        yield Part(number, data=tuple(held), size=size)


class _Member(tarfile.TarInfo):
    """A member of a tar that refuses two faults which tarfile accepts: a cut-off archive, and a
    name that would fill the memory.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        # tarfile takes the end of the file for the end of the archive
        if not buf:
            raise tarfile.ReadError("cut off: the blocks of zeros that end an archive are missing")
        return super().frombuf(buf, encoding, errors)

    def _proc_member(self, tar: tarfile.TarFile) -> Any:
        # tarfile reads the whole header of a long name or of pax records into memory
        if self.type not in tarfile.REGULAR_TYPES and self.size > MAX_NAME:
            raise tarfile.ReadError(f"a header of {self.size} bytes; {MAX_NAME} are read")
        return super()._proc_member(tar)  # type: ignore[misc]


def _members(source: Source, reading: Reading) -> Iterator[Member]:
    """Yield the names of a tar's members, with the contents of those that keys name.

    Nothing is written, and no link is followed.
    """
    place = 0
    most = source.size * (MAX_RATIO if source.packing else 1)
    with opened(source) as stream:
        try:
            with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member) as tar:
                for member in tar:
                    # tarfile keeps every member that it has read
                    tar.members = []  # type: ignore[attr-defined]
                    place = member.offset
                    if member.size > most:
                        raise tarfile.ReadError(
                            f"it has {member.size} bytes, as it says, and the archive {source.size}"
                        )
                    if not member.isdir():
                        yield member.name, _content(tar, member, reading)
                _refuse_more(tar)
        except (tarfile.TarError, ValueError, OverflowError, MemoryError, UnicodeError) as error:
            raise CorruptData(
                f"{source.name}: member at offset {place}: not a tar: {error}"
            ) from None


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo, reading: Reading) -> bytes | str:
    ending = sample_of(member.name)[1]
    if ending not in (*reading.keys, *(key.split(".")[0] for key in reading.keys)):
        return b""
    if not member.isreg() or member.issparse():
        return "is a link or no regular file"
    if member.size > reading.max_bytes:
        return f"has {member.size} bytes; a document may have {reading.max_bytes} (max_document)"
    file = tar.extractfile(member)
    data = file.read() if file is not None else b""
    if len(data) != member.size:
        raise tarfile.ReadError(f"{member.name} has {len(data)} of {member.size} bytes")
    return data


def _refuse_more(tar: tarfile.TarFile) -> None:
    """Refuse data after the end of an archive, as in joined archives, which tarfile ignores."""
    while block := tar.fileobj.read(BLOCK):  # type: ignore[union-attr]
        if block.strip(b"\0"):
            raise tarfile.ReadError(
                "the last one, and data follows the end: several archives in one file?"
            )


def sample_of(name: str) -> tuple[str, str]:
    """Return key and ending of a member: its name up to the first dot, and after it.

    Source: the format of WebDataset.
    """
    folder, slash, last = name.rpartition("/")
    key, _, ending = last.partition(".")
    return f"{folder}{slash}{key}", ending.lower()


def as_record(members: Sequence[Member]) -> dict[str, Any]:
    """Return a sample as a record: each ending is a key, and JSON is parsed."""
    import json

    out = dict[str, Any]()
    for name, content in members:
        ending = sample_of(name)[1]
        if isinstance(content, str):
            raise ValueError(f"{name} {content}")
        if ending in out and (content or out[ending]):
            raise ValueError(f"there are two {ending} in the sample")
        if ending == "json" and content:
            out[ending] = json.loads(content.decode())
        else:
            out[ending] = content
    return out
