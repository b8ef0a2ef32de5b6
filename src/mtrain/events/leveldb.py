"""Logs in the format of LevelDB, in which some libraries of sinks keep unsent values."""

from __future__ import annotations

from collections.abc import Iterator

BLOCK = 1 << 15
HEADER = 7
ENDS = (1, 4)
"""Kinds of parts that end a record: a whole one, and the last one of several."""


def records(data: bytes) -> Iterator[bytes]:
    """Yield the whole records of a file: blocks of 32 KiB hold parts of records, each behind a
    checksum, its size and its kind.
    """
    at = HEADER
    parts = b""
    while at + HEADER <= len(data):
        room = BLOCK - at % BLOCK
        if room < HEADER:
            at += room
            continue
        size = int.from_bytes(data[at + 4 : at + 6], "little")
        kind = data[at + 6]
        part = data[at + HEADER : at + HEADER + size]
        if len(part) < size:
            return
        at += HEADER + size
        parts += part
        if kind in ENDS:
            yield parts
            parts = b""
