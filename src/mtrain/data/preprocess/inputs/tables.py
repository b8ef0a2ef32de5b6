"""Rows of Parquet and arrow files, by pyarrow, which is in the extra `data`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from mtrain import units
from mtrain.data.preprocess.encoders.base import library
from mtrain.data.preprocess.inputs.record import Reading, Rejected, Text, rejected, roots
from mtrain.data.preprocess.inputs.sources import Source
from mtrain.errors import CorruptData, MtrainError

ROWS = 1024
"""Rows that are read at a time."""
PIECE = 8 * units.MIB
_walked: dict[Source, tuple[int, Iterator[tuple[int, Any]]]] = {}
"""In each process: where in a file it was last, and what goes on from there.

Parquet is entered at row groups.
"""


@contextmanager
def _faults_named(source: Source) -> Iterator[None]:
    try:
        yield
    except (MtrainError, GeneratorExit):
        raise
    except Exception as error:  # pyarrow's, and what it lets through of a hostile file
        text = " ".join(str(error).split())[:300]
        raise CorruptData(f"{source.name}: cannot be read as {source.form}: {text}") from None


def _arrow(source: Source, name: str = "pyarrow") -> Any:
    return library(name, "data", f"{source.name}: a file of the format {source.form}")


def cut(source: Source) -> list[tuple[int, int, int]]:
    """Return parts of a file as (first row, the row behind the last, bytes), each of about as many
    bytes.

    Raises:
        CorruptData: it is not what its name says.
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
        is_file = data.read(6) == b"ARROW1"
        data.seek(0)
        reader = arrow.ipc.open_file(data) if is_file else arrow.ipc.open_stream(data)
        if is_file:
            yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            yield from reader


def rows(
    source: Source, first: int, stop: int, reading: Reading
) -> Iterator[tuple[int, Text | Rejected]]:
    """Yield number of the row in the part, from 1, and its text.

    Raises:
        CorruptData: a file that does not hold together.
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
    begin = 0
    if source.form == "parquet":
        with _arrow(source, "pyarrow.parquet").ParquetFile(
            source.path, buffer_size=units.MIB
        ) as file:
            names = _columns(source, file.schema_arrow.names, reading)
            for group in range(file.metadata.num_row_groups):
                end = begin + file.metadata.row_group(group).num_rows
                if end > first:
                    for batch in file.iter_batches(ROWS, row_groups=[group], columns=names):
                        yield begin, batch
                        begin += batch.num_rows
                begin = end
        return
    for whole in _batches(source):
        if begin + whole.num_rows > first:
            batch = whole.select(_columns(source, whole.schema.names, reading))
            for start in range(0, batch.num_rows, ROWS):
                yield begin + start, batch.slice(start, ROWS)
        begin += whole.num_rows


def _columns(source: Source, columns: list[str], reading: Reading) -> list[str]:
    """Return the columns that keys are in, and those that say whether a row is learned."""
    names = roots(reading.keys, columns)
    missing = [key for key in reading.keys if not roots([key], names)]
    if missing:
        held = ", ".join(columns)[:200]
        raise CorruptData(
            f"{source.name}: has no column {missing[0]}; columns: {held}", "  fix: key=COLUMN"
        )
    return [*names, *(flag for flag in reading.flags if flag in columns and flag not in names)]


def _text(number: int, row: dict[str, Any], reading: Reading) -> Text | Rejected:
    try:
        return reading.text(row)
    except UnicodeDecodeError as error:
        return Rejected(
            number, f"byte {error.object[error.start]:#04x} at offset {error.start} is not UTF-8"
        )
    except (ValueError, json.JSONDecodeError) as error:
        return rejected(number, error, str(error)[:300])
