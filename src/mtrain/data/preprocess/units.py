"""Units of work: parts of files, each of about as much text, in the order of the corpus, the same at every run.

Lines of a plain file are read where they are worked on; what cannot be entered in the middle is read here, in order,
and handed over.
"""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

from mtrain import units
from mtrain.data.preprocess.encoder import library
from mtrain.data.preprocess.record import Reading
from mtrain.data.preprocess.sources import Source
from mtrain.errors import CorruptData

UNIT = 4 * units.MIB
BLOCK = units.MIB
MAX_NAME = units.MIB
"""Bytes of a tar's header that holds a long name."""
MAX_RATIO = 2000
"""What is compressed more is no archive of documents."""
Member = tuple[str, bytes | None]
"""Of a tar: name, and content; None: it is too large."""


@dataclass(frozen=True)
class Part:
    """Part of a file."""

    source: int
    """Place in the list of sources."""
    first: int = 0
    stop: int = 0
    """Bytes, row groups or record batches; the lines or documents that begin in between."""
    data: bytes | tuple[Member, ...] | None = None
    """What was read already: whole lines, or samples of a tar."""
    size: int = 0
    """Bytes of the file that it is, for progress."""


Unit = tuple[Part, ...]
Tables = Callable[[Source], list[tuple[int, int, int]]]
"""Cuts a Parquet or arrow file: first, stop, bytes."""


def plan(sources: Sequence[Source], reading: Reading, tables: Tables) -> Iterator[Unit]:
    """All units in their order."""
    waiting, size = list[Part](), 0
    for number, source in enumerate(sources):
        for part in _parts(number, source, reading, tables):
            waiting.append(part)
            size += max(part.size, 1 << 12)
            if size >= UNIT:
                yield tuple(waiting)
                waiting, size = [], 0
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
    """The content of a file, decompressed.

    Raises:
        CorruptData: it is not what its name says; OSError of the disk becomes one too.
        BadEnvironment: zstandard is not installed.
    """
    try:
        with open(source.path, "rb") as raw:
            if source.packing == "zst":
                module = library("zstandard", "data", f"{source.name}: a file compressed with zstd")
                stream = module.ZstdDecompressor(max_window_size=1 << 27).stream_reader(
                    raw, read_across_frames=True, closefd=False
                )
                try:
                    with closing(stream):
                        yield io.BufferedReader(stream, BLOCK)  # type: ignore[arg-type]
                except module.ZstdError as error:
                    raise CorruptData(f"{source.name}: offset {raw.tell()}: no zstd data: {error}") from None
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
    """Whole lines of a compressed file, or all of it; a line that is too long is cut where the limit is."""
    limit = reading.max_bytes
    with opened(source) as stream:
        if not lines:
            yield Part(number, data=stream.read(limit + 1), size=source.size)
            return
        held, end = bytearray(), 0
        while block := stream.read(BLOCK):
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
    """Members of a tar, samples whole: those that follow each other with one name up to the first dot."""
    held, size, last = list[Member](), 0, None
    for name, content in _members(source, reading):
        key = sample_of(name)[0]
        if size >= UNIT and key != last:
            yield Part(number, data=tuple(held), size=size)
            held, size = [], 0
        held.append((name, content))
        size += len(content or b"") + 512
        last = key
    if held:
        yield Part(number, data=tuple(held), size=size)


class _Member(tarfile.TarInfo):
    """A member whose name is not read where it would take the memory."""

    def _proc_member(self, tar: tarfile.TarFile) -> Any:
        if self.type not in tarfile.REGULAR_TYPES and self.size > MAX_NAME:
            raise tarfile.ReadError(f"a header of {self.size} bytes; {MAX_NAME} are read")
        return super()._proc_member(tar)  # type: ignore[misc]


def _members(source: Source, reading: Reading) -> Iterator[Member]:
    """Names and contents of the regular files of a tar that keys are in; nothing is written, no link is followed."""
    wanted = {key.split(".")[0] for key in reading.keys}
    place, most = 0, source.size * (MAX_RATIO if source.packing else 1)
    with opened(source) as stream:
        try:
            with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member) as tar:
                for member in tar:
                    place = member.offset
                    if member.size > most:
                        raise tarfile.ReadError(
                            f"it has {member.size} bytes, as it says, and the archive {source.size}"
                        )
                    if not member.isreg() or member.issparse():
                        continue
                    ending = sample_of(member.name)[1]
                    if ending in wanted or ending in reading.keys:
                        yield member.name, _content(tar, member, reading.max_bytes)
                    else:
                        yield member.name, b""
                    tar.members = []  # type: ignore[attr-defined]  # they would pile up
        except (tarfile.TarError, ValueError, OverflowError, MemoryError, UnicodeError) as error:
            raise CorruptData(f"{source.name}: member at offset {place}: no tar: {error}") from None


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo, limit: int) -> bytes | None:
    if member.size > limit:
        return None
    file = tar.extractfile(member)
    data = file.read(limit + 1) if file is not None else b""
    if len(data) != member.size:
        raise tarfile.ReadError(f"{member.name} has {len(data)} of {member.size} bytes")
    return data


def sample_of(name: str) -> tuple[str, str]:
    """Key and ending of a member: what stands before and behind the first dot of its last name."""
    folder, slash, last = name.rpartition("/")
    key, _, ending = last.partition(".")
    return f"{folder}{slash}{key}", ending.lower()


def as_record(members: Sequence[Member]) -> dict[str, Any]:
    """A sample as a record: each ending a key, JSON as what it says."""
    import json

    out = dict[str, Any]()
    for name, content in members:
        ending = sample_of(name)[1]
        if content is None:
            raise ValueError(f"{name} is larger than a document may be")
        if ending == "json" and content:
            out[ending] = json.loads(content.decode())
        else:
            out[ending] = content
    return out
