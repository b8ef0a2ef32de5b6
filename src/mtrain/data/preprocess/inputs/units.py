"""Units of work: parts of files, each of about as much text, in the order of the corpus, the same
at every run.

Lines of a plain file are read where they are worked on; what cannot be entered in the middle is
read here, in order, and handed over.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, BinaryIO, Self

from mtrain import units
from mtrain.data.preprocess.encoders.base import library
from mtrain.data.preprocess.inputs.record import Reading
from mtrain.data.preprocess.inputs.sources import Source
from mtrain.errors import CorruptData

UNIT = 4 * units.MIB
BLOCK = units.MIB
MAX_NAME = units.MIB
"""Bytes of a tar's header that holds a long name."""
MAX_RATIO = 2000
"""What is compressed more is no archive of documents."""
Member = tuple[str, bytes | str]
"""Of a tar: name, and content, or why it is left out."""
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Part:
    """Part of a file."""

    source: int
    """Place in the list of sources."""
    first: int = 0
    stop: int = 0
    """Bytes, or rows of a table; the lines or documents that begin in between."""
    data: bytes | tuple[Member, ...] | None = None
    """What was read already: whole lines, or samples of a tar."""
    size: int = 0
    """Bytes of the file that it is, for progress."""


Unit = tuple[Part, ...]
Tables = Callable[[Source], list[tuple[int, int, int]]]
"""Cuts a Parquet or arrow file: first, stop, bytes."""


def plan(sources: Sequence[Source], reading: Reading, tables: Tables) -> Iterator[Unit]:
    """Yield all units in their order."""
    waiting = list[Part]()
    size = 0
    for number, source in enumerate(sources):
        for part in _parts(number, source, reading, tables):
            waiting.append(part)
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
        CorruptData: it is not what its name says, is cut off, or cannot be read.
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
                        said = (
                            f"{source.name}: offset {raw.tell()}: no zstd data, or cut off: {error}"
                        )
                        raise CorruptData(said) from None
            elif source.packing == "gz":
                with gzip.open(raw, "rb") as plain:
                    yield plain  # type: ignore[misc]
            else:
                yield raw
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise CorruptData(f"{source.name}: no gzip data, or cut off: {error}") from None
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
                del held[limit + 1 :]  # the rest of this line is passed over
        if held:
            yield Part(number, data=bytes(held), size=len(held))


def _of_tar(number: int, source: Source, reading: Reading) -> Iterator[Part]:
    """Yield members of a tar by whole samples, which are neighbours with one name up to its dot."""
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
    """A member whose name is not read where it would take the memory, of an archive that is not cut
    off.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        if not buf:
            raise tarfile.ReadError("cut off: the blocks of zeros that end an archive are missing")
        return super().frombuf(buf, encoding, errors)

    def _proc_member(self, tar: tarfile.TarFile) -> Any:
        if self.type not in tarfile.REGULAR_TYPES and self.size > MAX_NAME:
            raise tarfile.ReadError(f"a header of {self.size} bytes; {MAX_NAME} are read")
        return super()._proc_member(tar)  # type: ignore[misc]


def _members(source: Source, reading: Reading) -> Iterator[Member]:
    """Yield names of the members of a tar, and contents where keys are in; nothing is written, no
    link is followed.
    """
    place = 0
    most = source.size * (MAX_RATIO if source.packing else 1)
    with opened(source) as stream:
        try:
            with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member) as tar:
                for member in tar:
                    tar.members = []  # type: ignore[attr-defined]  # they would pile up
                    place = member.offset
                    if member.size > most:
                        raise tarfile.ReadError(
                            f"it has {member.size} bytes, as it says, and the archive {source.size}"
                        )
                    if not member.isdir():
                        yield member.name, _content(tar, member, reading)
                _refuse_more(tar)
        except (tarfile.TarError, ValueError, OverflowError, MemoryError, UnicodeError) as error:
            raise CorruptData(f"{source.name}: member at offset {place}: no tar: {error}") from None


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
    """Refuse what stands behind the end of an archive, as where several were joined: readers pass
    it over.
    """
    while block := tar.fileobj.read(BLOCK):  # type: ignore[union-attr]
        if block.strip(b"\0"):
            raise tarfile.ReadError(
                "the last one, and more stands behind the end: several archives in one file?"
            )


def sample_of(name: str) -> tuple[str, str]:
    """Return key and ending of a member: what stands before and behind the first dot of its last
    name.
    """
    folder, slash, last = name.rpartition("/")
    key, _, ending = last.partition(".")
    return f"{folder}{slash}{key}", ending.lower()


def as_record(members: Sequence[Member]) -> dict[str, Any]:
    """Return a sample as a record: each ending a key, JSON as what it says."""
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
