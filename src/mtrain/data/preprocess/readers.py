"""Readers of documents: rows of Parquet and arrow, lines of JSON and text, samples of tar files.

pyarrow, of the extra `data`, reads Parquet and arrow.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any, BinaryIO

from mtrain import units
from mtrain.data.preprocess.encoder import library
from mtrain.data.preprocess.record import Reading, Rejected, Text, rejected, roots
from mtrain.data.preprocess.sources import BLOCK, BOM, Member, Part, Source, as_record, sample_of
from mtrain.errors import CorruptData, MtrainError

# Rows that are read at a time
ROWS = 1024
# The approximate number of bytes of a part
PIECE = 8 * units.MIB
# The place in a file at which this process stopped, and the iterator that continues from there.
# Parquet can only be entered at row groups, so a part in the middle of one would be read again.
_walked: dict[Source, tuple[int, Iterator[tuple[int, Any]]]] = {}


@contextmanager
def _faults_named(source: Source) -> Iterator[None]:
    try:
        yield
    except (MtrainError, GeneratorExit):
        raise
    except Exception as error:  # pyarrow raises errors of many types for a hostile file
        text = " ".join(str(error).split())[:300]
        raise CorruptData(f"{source.name}: cannot be read as {source.form}: {text}") from None


def _arrow(source: Source, name: str = "pyarrow") -> Any:
    return library(name, "data", f"{source.name}: a file of the format {source.form}")


def cut(source: Source) -> list[tuple[int, int, int]]:
    """Return the parts of a file, as (first row, row after the last, bytes), of similar size.

    Raises:
        CorruptData: the file does not have the format of its name.
        BadEnvironment: pyarrow is not installed.
    """
    _arrow(source)
    with _faults_named(source):
        return _pieces(_blocks(source))


def _blocks(source: Source) -> Iterator[tuple[int, int]]:
    """Yield rows and bytes of each row group of Parquet, or record batch of arrow."""
    if source.form == "parquet":
        with _arrow(source, "pyarrow.parquet").ParquetFile(source.path) as file:
            groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
            yield from ((group.num_rows, group.total_byte_size) for group in groups)
    else:
        yield from ((batch.num_rows, batch.nbytes) for batch in _batches(source))


def _pieces(blocks: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return parts of similar size: small blocks joined, and large ones cut to save memory."""
    out = list[tuple[int, int, int]]()
    first = 0
    at = 0
    size = 0
    for rows, held in blocks:
        step = max(1, rows * PIECE // max(PIECE, held) // ROWS) * ROWS
        for start in range(0, rows, step):
            here = min(step, rows - start)
            at += here
            # a hostile file may declare a negative size
            size += max(0, held) * here // rows
            if size >= PIECE // 2:
                out.append((first, at, size))
                first = at
                size = 0
    return [*out, (first, at, size)] if at > first else out


def _batches(source: Source) -> Iterator[Any]:
    """Yield the record batches of a stream, which Hugging Face's datasets writes, or of a file."""
    arrow = _arrow(source)
    with arrow.memory_map(source.path) as data:
        # the magic number of a file; a stream has none
        is_file = data.read(6) == b"ARROW1"
        data.seek(0)
        if is_file:
            reader = arrow.ipc.open_file(data)
            yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            yield from arrow.ipc.open_stream(data)


def rows(
    source: Source, first: int, stop: int, reading: Reading
) -> Iterator[tuple[int, Text | Rejected]]:
    """Yield the number of each row in the part, from 1, and its text.

    Raises:
        CorruptData: the file is damaged.
    """
    number = 0
    with _faults_named(source):
        for table in _parts(source, first, stop, reading):
            for row in table.to_pylist():
                number += 1
                yield number, _text(number, row, reading)


def _parts(source: Source, first: int, stop: int, reading: Reading) -> Iterator[Any]:
    at, walk = _walked.pop(source, (first + 1, None))
    if at > first or walk is None:
        walk = _walk(source, first, reading)
    for begin, batch in walk:
        at = begin + batch.num_rows
        low = max(first, begin)
        high = min(stop, at)
        if low < high:
            part = batch.slice(low - begin, high - low)
            part.validate(full=True)  # offsets of a hostile file lead anywhere
            yield part
        if at >= stop:
            _walked.clear()
            _walked[source] = at, walk
            return


def _walk(source: Source, first: int, reading: Reading) -> Iterator[tuple[int, Any]]:
    """Yield batches and the numbers of their first rows, from the group with the row `first` on."""
    if source.form == "parquet":
        yield from _walk_parquet(source, first, reading)
        return
    begin = 0
    for whole in _batches(source):
        if begin + whole.num_rows > first:
            batch = whole.select(_columns(source, whole.schema.names, reading))
            for start in range(0, batch.num_rows, ROWS):
                yield begin + start, batch.slice(start, ROWS)
        begin += whole.num_rows


def _walk_parquet(source: Source, first: int, reading: Reading) -> Iterator[tuple[int, Any]]:
    parquet = _arrow(source, "pyarrow.parquet")
    begin = 0
    with parquet.ParquetFile(source.path, buffer_size=units.MIB) as file:
        names = _columns(source, file.schema_arrow.names, reading)
        for group in range(file.metadata.num_row_groups):
            end = begin + file.metadata.row_group(group).num_rows
            if end > first:
                for batch in file.iter_batches(ROWS, row_groups=[group], columns=names):
                    yield begin, batch
                    begin += batch.num_rows
            begin = end


def _columns(source: Source, columns: list[str], reading: Reading) -> list[str]:
    """Return the columns that contain keys, and those of learning flags."""
    names = roots(reading.keys, columns)
    missing = [key for key in reading.keys if not roots([key], names)]
    if missing:
        held = ", ".join(columns)[:200]
        raise CorruptData(
            f"{source.name}: there is no column {missing[0]}; columns: {held}", "  fix: key=COLUMN"
        )
    return [*names, *(flag for flag in reading.flags if flag in columns and flag not in names)]


def _text(number: int, row: dict[str, Any], reading: Reading) -> Text | Rejected:
    try:
        return reading.text(row)
    except ValueError as error:
        return rejected(number, error, _why(error))


Found = Text | Rejected


def documents(part: Part, source: Source, reading: Reading) -> Iterator[tuple[int, Found | None]]:
    """Yield the number of each record in this part, from 1, and its text; None for a blank line.

    Raises:
        CorruptData: the file cannot be read, or does not have its format.
    """
    if source.form in ("parquet", "arrow"):
        yield from rows(source, part.first, part.stop, reading)
    elif source.form == "tar":
        assert isinstance(part.data, tuple)
        yield from _samples(part.data, reading)
    elif source.form == "jsonl" or reading.by_line:
        parse = _plain if source.form == "text" else _of_json
        for number, line in enumerate(_lines(part, source, reading.max_bytes), 1):
            yield number, parse(number, line, reading)
    else:
        yield 0, _whole_file(part, source, reading)


def _samples(members: Iterable[Member], reading: Reading) -> Iterator[tuple[int, Found]]:
    for number, (_, held) in enumerate(groupby(members, lambda member: sample_of(member[0])[0]), 1):
        yield number, _sample(number, list(held), reading)


def _sample(number: int, members: list[Member], reading: Reading) -> Found:
    try:
        return reading.text(as_record(members))
    except (ValueError, RecursionError) as error:
        return rejected(number, error, f"{members[0][0]}: {_why(error)}")


def _whole_file(part: Part, source: Source, reading: Reading) -> Found:
    # by its size, before a file that may have terabytes is read
    if part.data is None and source.size > reading.max_bytes:
        return Rejected(0, _too_long(source.size, reading))
    data = part.data if isinstance(part.data, bytes) else _read(source)
    if len(data) > reading.max_bytes:
        return Rejected(0, _too_long(len(data), reading))
    try:
        return data.removeprefix(BOM).decode()
    except UnicodeDecodeError as error:
        return Rejected(0, _why(error))


def _read(source: Source) -> bytes:
    try:
        with open(source.path, "rb") as file:
            return file.read(source.size)
    except OSError as error:
        raise CorruptData(f"{source.name}: cannot be read: {error.strerror or error}") from None


def _plain(number: int, line: bytes | None, reading: Reading) -> Found | None:
    if line is None:
        return Rejected(number, f"is longer than {reading.max_bytes} bytes")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        return Rejected(number, _why(error))


def _of_json(number: int, line: bytes | None, reading: Reading) -> Found | None:
    """Return the text of a line; None for a blank one."""
    if line is None:
        return Rejected(number, f"is longer than {reading.max_bytes} bytes")
    try:
        return reading.text(json.loads(line.decode()))
    except (ValueError, RecursionError) as error:
        return rejected(number, error, _why(error)) if line.strip() else None


def _why(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.object[error.start]:#04x} at offset {error.start} is not UTF-8"
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)[:300]


def surrogate_fault(error: UnicodeEncodeError) -> str:
    """Return why UTF-8 cannot represent a text from JSON."""
    return f"character {error.start} is half of a letter ({ord(error.object[error.start]):#x})"


def _too_long(size: int, reading: Reading) -> str:
    return (
        f"has {size} bytes; a document may have {reading.max_bytes} (max_document, or lines=true)"
    )


def _lines(part: Part, source: Source, limit: int) -> Iterator[bytes | None]:
    """Yield the lines that begin in a part, without their ends; None for one over the limit."""
    if isinstance(part.data, bytes):
        yield from _cut(part.data, limit)
        return
    try:
        with open(source.path, "rb") as file:
            # A part is cut anywhere. Its first line begins after the first line end, unless the
            # byte before the part is one; the line that the cut divides belongs to the part before.
            file.seek(max(0, part.first - 1))
            before = file.read(1) if part.first else b"\n"
            data = file.read(part.stop - part.first)
            begin = 0 if before == b"\n" else data.find(b"\n") + 1
            if not begin and before != b"\n":
                return  # no line begins in this part
            end = b"" if data.endswith(b"\n") or not data else _rest(file, limit)
    except OSError as error:
        raise CorruptData(f"{source.name}: cannot be read: {error.strerror or error}") from None
    if begin < len(data):
        body = data[begin:] if begin else data
        if not part.first:
            body = body.removeprefix(BOM)
        yield from _cut(body, limit, end)


def _rest(file: BinaryIO, limit: int) -> bytes:
    """Return the rest of a line, up to a block more than the limit."""
    out = io.BytesIO()
    while out.tell() <= limit and (block := file.read(BLOCK)):
        found = block.find(b"\n")
        out.write(block if found < 0 else block[:found])
        if found >= 0:
            break
    return out.getvalue()


def _cut(data: bytes, limit: int, end: bytes = b"") -> Iterator[bytes | None]:
    lines = data.split(b"\n")
    last = lines.pop() + end
    if last:
        lines.append(last)
    for line in lines:
        yield None if len(line) > limit else line.removesuffix(b"\r")
