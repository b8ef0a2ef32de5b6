"""Rows of Parquet and arrow files, by pyarrow, which is in the extra `data`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mtrain.data.preprocess.encoder import library
from mtrain.data.preprocess.record import Reading, Rejected, Text, roots
from mtrain.data.preprocess.sources import Source
from mtrain.errors import CorruptData, MtrainError

ROWS = 1024
"""Rows that are read at a time."""


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
    """Parts of a file as (first, stop, bytes): row groups of Parquet, record batches of arrow.

    Raises:
        CorruptData: it is not what its name says.
        BadEnvironment: pyarrow is not installed.
    """
    _arrow(source)
    with _faults_named(source):
        if source.form == "parquet":
            with _arrow(source, "pyarrow.parquet").ParquetFile(source.path) as file:
                groups = file.metadata.num_row_groups
                sizes = [file.metadata.row_group(i).total_byte_size for i in range(groups)]
        else:
            sizes = [batch.nbytes for batch in _batches(source)]
    return _merged(sizes)


def _merged(sizes: list[int], least: int = 2 << 20) -> list[tuple[int, int, int]]:
    """Neighbours together until they have some size."""
    out, first, size = list[tuple[int, int, int]](), 0, 0
    for i, one in enumerate(sizes):
        size += max(0, one)
        if size >= least or i == len(sizes) - 1:
            out.append((first, i + 1, size))
            first, size = i + 1, 0
    return out


def _batches(source: Source) -> Iterator[Any]:
    """The record batches of a stream, which Hugging Face's datasets writes, or of a file."""
    arrow = _arrow(source)
    with arrow.memory_map(source.path) as data:
        is_file = data.read(6) == b"ARROW1"
        data.seek(0)
        reader = arrow.ipc.open_file(data) if is_file else arrow.ipc.open_stream(data)
        if is_file:
            yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            yield from reader


def rows(source: Source, first: int, stop: int, reading: Reading) -> Iterator[tuple[int, Text | Rejected]]:
    """Number of the row in the part, from 1, and its text.

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
    if source.form == "parquet":
        with _arrow(source, "pyarrow.parquet").ParquetFile(source.path) as file:
            names = roots(reading.keys, file.schema_arrow.names)
            _must_have(source, names, file.schema_arrow.names, reading)
            yield from file.iter_batches(ROWS, row_groups=list(range(first, stop)), columns=names)
        return
    for i, batch in enumerate(_batches(source)):
        if i >= stop:
            return
        if i >= first:
            names = roots(reading.keys, batch.schema.names)
            _must_have(source, names, batch.schema.names, reading)
            batch.validate(full=True)  # offsets of a hostile file lead anywhere
            for start in range(0, batch.num_rows, ROWS):
                yield batch.slice(start, ROWS).select(names)


def _must_have(source: Source, names: list[str], columns: list[str], reading: Reading) -> None:
    missing = [key for key in reading.keys if not roots([key], names)]
    if missing:
        held = ", ".join(columns)[:200]
        raise CorruptData(f"{source.name}: has no column {missing[0]}; columns: {held}", "  fix: key=COLUMN")


def _text(number: int, row: dict[str, Any], reading: Reading) -> Text | Rejected:
    try:
        return reading.text(row)
    except UnicodeDecodeError as error:
        return Rejected(number, f"byte {error.object[error.start]:#04x} at offset {error.start} is not UTF-8")
    except (ValueError, json.JSONDecodeError) as error:
        return Rejected(number, str(error)[:300])
