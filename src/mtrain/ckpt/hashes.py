"""Hashes over everything in a checkpoint's files, each computed at most once in a process. Needs no torch.

A shard is a safetensors file. Its header holds the sha256 of every entry, and the manifest that of the header:
who reads a few entries hashes the header and those entries, and no byte of the file is left uncovered.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain.errors import CorruptData
from mtrain.world.heartbeat import tick

HASHED_BYTES = 1 << 24
LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header, little endian."""
ENTRY_HASHES = "sha256"
"""Key of the header's metadata: JSON of entry -> sha256."""

Identity = tuple[int, int, int, int]
"""A file as long as nobody writes to it, also under another name."""


@dataclass(frozen=True)
class Header:
    """What the header of a shard says."""

    sha256: str
    data_at: int
    """Offset of the entries' bytes."""
    ranges: Mapping[str, tuple[int, int]]
    """Entry -> where its bytes begin and end behind `data_at`."""
    hashes: Mapping[str, str]
    """Entry -> sha256 of its bytes; empty in files that were written before there were any."""


_headers: dict[Identity, Header] = {}
_sound: set[tuple[Identity, str]] = set()
"""Entries that this process has written, or compared with their hash; a whole file as the entry ''."""


def hash_bytes(data: Any) -> str:
    """Hex sha256 of anything with bytes; notes progress while it works."""
    whole, view = hashlib.sha256(), memoryview(data).cast("B")
    for start in range(0, len(view), HASHED_BYTES):
        whole.update(view[start : start + HASHED_BYTES])
        tick()
    return whole.hexdigest()


def hash_file(path: Path) -> str:
    """Hex sha256 of a file's content."""
    whole = hashlib.sha256()
    with path.open("rb", buffering=0) as f:
        while block := f.read(HASHED_BYTES):
            whole.update(block)
            tick()
    return whole.hexdigest()


def check_file(path: Path, sha256: str) -> None:
    """Compare a whole file with its hash.

    Raises:
        CorruptData: it differs.
    """
    whole = (_identity(path), "")
    if whole not in _sound:
        if hash_file(path) != sha256:
            raise CorruptData(f"{path} is not what was written: its sha256 differs")
        _sound.add(whole)


def header(path: Path) -> Header:
    """The header of a shard, not compared with anything.

    Raises:
        CorruptData: there is none.
    """
    identity = _identity(path)
    if identity not in _headers:
        _headers[identity] = _read_header(path)
    return _headers[identity]


def check_header(path: Path, facts: Mapping[str, Any]) -> Header:
    """The header of a shard as the manifest's `facts` of the file say it was written; a file of the first format is
    compared as a whole.

    Raises:
        CorruptData: it differs.
    """
    if "header_sha256" not in facts:
        check_file(path, facts["sha256"])
        return header(path)
    found = header(path)
    if found.sha256 != facts["header_sha256"]:
        raise CorruptData(f"{path} is not what was written: the sha256 of its header differs")
    return found


def check_entry(path: Path, entry: str, data: Any) -> None:
    """Compare the bytes of an entry, of a shard whose header was checked, with their hash.

    Raises:
        CorruptData: they differ.
    """
    known = (_identity(path), entry)
    expected = header(path).hashes.get(entry)
    if expected is not None and known not in _sound:
        if hash_bytes(data) != expected:
            raise CorruptData(f"{path} is not what was written: the sha256 of {entry} differs")
        _sound.add(known)


def check_shard(path: Path, facts: Mapping[str, Any]) -> None:
    """Compare every byte of a shard with its hash.

    Raises:
        CorruptData: one differs, or no hash covers it.
    """
    found = check_header(path, facts)
    if "header_sha256" not in facts:
        return
    if sum(stop - start for start, stop in found.ranges.values()) != path.stat().st_size - found.data_at:
        raise CorruptData(f"{path} is not what was written: it holds bytes of no entry")
    with path.open("rb") as f:
        for entry, (start, stop) in found.ranges.items():
            if (_identity(path), entry) not in _sound:
                f.seek(found.data_at + start)
                check_entry(path, entry, f.read(stop - start))


def wrote(path: Path) -> str:
    """Take every entry of a shard that this process has just written as sound; returns the hash of its header."""
    found, identity = header(path), _identity(path)
    _sound.update((identity, entry) for entry in found.hashes)
    return found.sha256


def _identity(path: Path) -> Identity:
    try:
        s = path.stat()
    except OSError as error:
        raise CorruptData(f"{path} cannot be read: {error.strerror}") from None
    return s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns


def _read_header(path: Path) -> Header:
    size = path.stat().st_size
    try:
        with path.open("rb") as f:
            first = f.read(LENGTH_BYTES)
            length = int.from_bytes(first, "little")
            if len(first) < LENGTH_BYTES or length > size - LENGTH_BYTES:
                raise CorruptData(f"{path} is not what was written: its header is cut")
            text = f.read(length)
        body = json.loads(text)
        metadata = body.pop("__metadata__", {})
        ranges = {name: (int(start), int(stop)) for name, e in body.items() for start, stop in [e["data_offsets"]]}
        hashes = {str(k): str(v) for k, v in json.loads(metadata.get(ENTRY_HASHES, "{}")).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptData(f"{path} is not what was written: its header cannot be read ({error})") from None
    return Header(hash_bytes(first + text), LENGTH_BYTES + length, ranges, hashes)
