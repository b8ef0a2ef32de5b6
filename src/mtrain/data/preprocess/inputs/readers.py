"""The documents of a part of a file, one after the other: texts, and records that have none."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import BinaryIO

from mtrain.data.preprocess.inputs.record import Reading, Rejected, Text, rejected
from mtrain.data.preprocess.inputs.sources import Source
from mtrain.data.preprocess.inputs.tables import rows
from mtrain.data.preprocess.inputs.units import BLOCK, BOM, Member, Part, as_record, sample_of
from mtrain.errors import CorruptData

Found = Text | Rejected


def documents(part: Part, source: Source, reading: Reading) -> Iterator[tuple[int, Found | None]]:
    """Yield the number of each record in this part, from 1, and its text; None for a blank line.

    Raises:
        CorruptData: the file cannot be read, or is not what its format is.
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
        return f"no JSON: {error.msg} at column {error.colno}"
    return "nested too deep" if isinstance(error, RecursionError) else str(error)[:300]


def surrogate_fault(error: UnicodeEncodeError) -> str:
    """Return why UTF-8 cannot represent a text from JSON."""
    return f"character {error.start} is half of a letter ({ord(error.object[error.start]):#x})"


def _too_long(size: int, reading: Reading) -> str:
    return (
        f"has {size} bytes; a document may have {reading.max_bytes} (max_document, or lines=true)"
    )


def _lines(part: Part, source: Source, limit: int) -> Iterator[bytes | None]:
    """Yield the lines of a part without their ends; None: one that is longer than the limit."""
    if isinstance(part.data, bytes):
        yield from _cut(part.data, limit)
        return
    try:
        with open(source.path, "rb") as file:
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
        yield from _cut(body.removeprefix(BOM) if not part.first else body, limit, end)


def _rest(file: BinaryIO, limit: int) -> bytes:
    """Return the rest of a line, up to somewhat more than the limit."""
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
    for line in (*lines, *([last] if last else [])):
        yield None if len(line) > limit else line.removesuffix(b"\r")
