"""Hashes over everything in a checkpoint's files, each computed at most once in a process.

Needs no torch.

A shard is a safetensors file. Its header holds a hash of every block of every entry, and the
manifest holds the sha256 of the header. A reader of a part of an entry hashes the header and the
blocks of that part, and no byte of the file is left uncovered. In files of format 2, and wherever a
header does not say how long blocks are, an entry is one block.

Since format 4 the hash of a block is xxh3_128, or sha256 if `checkpoint.hash` is; before, it was
sha256. xxh3 is many times faster and not cryptographic. It finds damage: one in 2^128 of the
blocks that a disk, a cable or a copy could make instead has the same hash. It does not keep out
somebody who forges a block with a given hash. The levels above are sha256: the manifest has that
of each header, and of itself, which is the identity of a checkpoint. So nobody can exchange a
header, and with it the hashes of blocks, without changing that identity. Where bytes come from
a place that others write to, `checkpoint.hash=sha256` extends this to every block.
"""

from __future__ import annotations

import hashlib
import json
import resource
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import xxhash

from mtrain.ckpt import sources
from mtrain.ckpt.sources import DiskFile, Identity, StoredObject, identity
from mtrain.errors import CorruptData
from mtrain.world.heartbeat import tick

HASHED_BYTES = 1 << 24
BLOCK_BYTES = 1 << 18
"""The bytes of an entry that are hashed together, and so the least that is read of it."""
LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header, little endian."""
MAX_HEADER_BYTES = 1 << 30
ENTRY_HASHES = "sha256"
"""The key of the header's metadata in format 2: JSON of entry -> hex sha256 of all its bytes."""
SHA256_DIGITS = 64


@dataclass(frozen=True)
class Algorithm:
    """A hash of blocks."""

    name: str
    """Value of `checkpoint.hash`."""
    key: str
    """The key of the header's metadata: JSON of `block_bytes` and `entries`, entry -> hex hashes of
    its blocks, concatenated.

    `whole`, entry -> hex sha256 of all its bytes, is there where the writer knew it: an export need
    not hash again then. It is the only key: safetensors writes several in any order, and the same
    state must make the same bytes.
    """
    digits: int
    """Hex digits of one hash."""


SHA256 = Algorithm("sha256", "sha256_of_blocks", SHA256_DIGITS)
"""The algorithm of format 3."""
XXH3 = Algorithm("xxh3", "xxh3_128_of_blocks", 32)
ALGORITHMS = {algorithm.name: algorithm for algorithm in (XXH3, SHA256)}
MOST_OPEN = 4096
"""Files that are open at a time where the system has no limit; else half of its limit."""
WIDTHS = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "BOOL": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
}
"""Number format -> bytes of one number."""


@dataclass(frozen=True)
class Entry:
    """A tensor of a shard."""

    dtype: str
    """Name of the number format in safetensors."""
    shape: tuple[int, ...]
    at: int
    """The offset of its bytes in the file."""
    nbytes: int
    hashes: str
    """Hex hashes of its blocks, concatenated; empty in files from before block hashes."""
    block_bytes: int
    whole: str = ""
    """Hex sha256 of all its bytes, where the writer knew it."""
    algorithm: Algorithm = SHA256
    """The hash of its blocks."""

    @property
    def sha256(self) -> str:
        """Return hex sha256 of all its bytes; empty where the header does not say it."""
        one_block = self.algorithm is SHA256 and len(self.hashes) == SHA256_DIGITS
        return self.hashes if one_block else self.whole

    def hash_of(self, block: int) -> str:
        """Return the hash that a block was written with."""
        digits = self.algorithm.digits
        return self.hashes[block * digits : (block + 1) * digits]

    def blocks(self, start: int, stop: int) -> range:
        """Return numbers of the blocks that bytes [start, stop) lie in."""
        if start < stop:
            return range(start // self.block_bytes, -(-stop // self.block_bytes))
        return range(0)


@dataclass(frozen=True)
class Header:
    """The header of a shard."""

    sha256: str
    data_at: int
    """Offset of the entries' bytes."""
    entries: Mapping[str, Entry]


@dataclass
class _Sound:
    """The parts of a file that this process has written, or has compared with their hashes."""

    whole: bool = False
    blocks: set[tuple[str, int]] = field(default_factory=set)
    """Entry and number."""


# Of the process: the same file is opened for weights, for the optimizer and for generators.
_sound: dict[Identity, _Sound] = {}


def forget_all() -> None:
    """Forget which files are sound, in a process that begins its run again."""
    _sound.clear()


def hash_bytes(data: Any) -> str:
    """Return hex sha256 of anything with bytes; notes progress while it works."""
    whole = hashlib.sha256()
    view = memoryview(data).cast("B")
    for start in range(0, len(view), HASHED_BYTES):
        whole.update(view[start : start + HASHED_BYTES])
        tick()
    return whole.hexdigest()


class BlockHasher:
    """The hashes of an entry's blocks, from bytes that come in parts."""

    def __init__(self, algorithm: Algorithm = XXH3) -> None:
        self._algorithm = algorithm
        self._done: list[str] = []
        self._block = _begun(algorithm)
        self._held = 0
        """Bytes of the block that is not full yet."""

    def add(self, data: Any) -> None:
        """Hash the next bytes."""
        view = memoryview(data).cast("B")
        while len(view):
            count = min(len(view), BLOCK_BYTES - self._held)
            self._block.update(view[:count])
            view = view[count:]
            self._held += count
            if self._held == BLOCK_BYTES:
                self._finish()

    def hexdigest(self) -> str:
        """Return the hex hash of every block, concatenated; no bytes are one empty block."""
        if self._held or not self._done:
            self._finish()
        return "".join(self._done)

    def _finish(self) -> None:
        self._done.append(self._block.hexdigest())
        self._block = _begun(self._algorithm)
        self._held = 0
        tick()


def _begun(algorithm: Algorithm) -> Any:
    """Return a hash of no bytes yet."""
    return hashlib.sha256() if algorithm is SHA256 else xxhash.xxh3_128()


def hash_blocks(data: Any, algorithm: Algorithm = XXH3) -> str:
    """Return the concatenated hex hashes of an entry's blocks; no bytes are one empty block."""
    blocks = BlockHasher(algorithm)
    blocks.add(data)
    return blocks.hexdigest()


def hash_block(data: Any, algorithm: Algorithm) -> str:
    """Return the hex hash of a block."""
    if algorithm is SHA256:
        return hash_bytes(data)
    tick()
    return xxhash.xxh3_128_hexdigest(data)


def room_for(nbytes: int, algorithm: Algorithm = XXH3) -> str:
    """Return a text as long as the hashes of an entry that has at most `nbytes`."""
    return "0" * algorithm.digits * max(1, -(-nbytes // BLOCK_BYTES))


def metadata_of(
    hashed: Mapping[str, str],
    whole: Mapping[str, str] | None = None,
    algorithm: Algorithm = XXH3,
) -> dict[str, str]:
    """Return a shard's metadata: hashes of `hash_blocks`, and sha256 of known `whole` entries."""
    body: dict[str, Any] = {"block_bytes": BLOCK_BYTES, "entries": dict(hashed)}
    if whole:
        body["whole"] = dict(whole)
    return {algorithm.key: json.dumps(body, sort_keys=True, allow_nan=False)}


def hash_file(path: Path) -> str:
    """Return hex sha256 of a file's content.

    Raises:
        CorruptData, BadEnvironment: it is missing, or may not be read.
    """
    file = sources.opened(path)
    try:
        whole = hashlib.sha256()
        for start in range(0, file.nbytes, HASHED_BYTES):
            whole.update(file.read(start, min(HASHED_BYTES, file.nbytes - start)))
        return whole.hexdigest()
    finally:
        file.close()


def check_file(path: Path, sha256: str) -> None:
    """Compare a whole file with its hash.

    Raises:
        CorruptData: it differs, or is missing.
        BadEnvironment: it may not be read.
    """
    file = sources.opened(path)
    file.close()
    known = _sound_of(file.identity)
    if not known.whole:
        if hash_file(path) != sha256:
            raise CorruptData(f"{file.name} is not what was written: its sha256 differs")
        known.whole = True


class Shard:
    """A shard that is open for reading.

    Its header was compared with nothing; `checked` compares it.

    Raises:
        CorruptData: it is not a shard.
        BadEnvironment: it may not be read.
    """

    def __init__(self, path: Path, *, once: bool = False) -> None:
        """Open a file; `once`: its bytes are read once, so the page cache need not keep them."""
        self._file = sources.opened(path, once=once)
        self.name = self._file.name
        """Its path, or the address that it is read from, for messages."""
        try:
            self.header = _read_header(self._file)
        except BaseException:
            self.close()
            raise

    def __del__(self) -> None:
        # Whoever holds many shards drops them without a `with`: the descriptor goes with the
        # object. One that could not be opened has none.
        if hasattr(self, "_file"):
            self.close()

    @property
    def is_open(self) -> bool:
        """Return true while it holds a descriptor; without one, reading opens the file again."""
        return self._file.is_open

    def close(self) -> None:
        """Give the descriptor back."""
        self._file.close()

    def entry(self, name: str) -> Entry:
        """Return an entry of the header.

        Raises:
            CorruptData: it has no such entry.
        """
        if name not in self.header.entries:
            raise CorruptData(f"{self.name} lacks {name}")
        return self.header.entries[name]

    def read(self, name: str, start: int, stop: int) -> memoryview:
        """Read bytes [start, stop) of an entry, and compare its blocks with their hashes unless
        that was done before.

        Raises:
            CorruptData: they differ, or cannot be read.
        """
        entry = self.entry(name)
        known = _sound_of(self._file.identity)
        if not 0 <= start <= stop <= entry.nbytes:
            raise CorruptData(
                f"{self.name}: {name} has {entry.nbytes} bytes, and {stop} are needed"
            )
        blocks = entry.blocks(start, stop)
        if (
            not entry.hashes
            or known.whole
            or all((name, block) in known.blocks for block in blocks)
        ):
            return self._file.read(entry.at + start, stop - start)
        # Whole blocks, as only they have hashes: up to two more than were requested.
        first = blocks.start * entry.block_bytes
        data = self._file.read(
            entry.at + first, min(blocks.stop * entry.block_bytes, entry.nbytes) - first
        )
        for block in blocks:
            self._compare(
                name, entry, block, data[block * entry.block_bytes - first :][: entry.block_bytes]
            )
        known.blocks.update((name, block) for block in blocks)
        return data[start - first : stop - first]

    def check(self) -> None:
        """Compare every byte with its hash.

        Raises:
            CorruptData: one differs, or no hash covers it.
        """
        if (
            sum(entry.nbytes for entry in self.header.entries.values())
            != self._file.nbytes - self.header.data_at
        ):
            raise CorruptData(f"{self.name} is not what was written: it holds bytes of no entry")
        if _sound_of(self._file.identity).whole:
            return
        for name, entry in self.header.entries.items():
            step = max(1, HASHED_BYTES // entry.block_bytes) * entry.block_bytes
            for start in range(0, entry.nbytes, step):
                self.read(name, start, min(start + step, entry.nbytes))

    def take_as_sound(self) -> None:
        """Let nothing of it be compared any more."""
        _sound_of(self._file.identity).whole = True

    @property
    def nbytes(self) -> int:
        """Return size of the file."""
        return self._file.nbytes

    def _compare(self, name: str, entry: Entry, block: int, data: memoryview) -> None:
        if hash_block(data, entry.algorithm) != entry.hash_of(block):
            raise CorruptData(
                f"{self.name} is not what was written: the {entry.algorithm.name} of {name} differs"
            )


class Files:
    """The shards of a checkpoint by name.

    Each is opened when it is first read, and a limited number stay open.
    """

    def __init__(self, root: Path, facts: Mapping[str, Any], *, once: bool = False) -> None:
        """Take the files of a manifest; `once`: see `Shard`."""
        self._once = once
        self._root = root
        self._facts = facts
        self._lock = threading.Lock()
        self._shards: dict[str, Shard] = {}
        self._open: list[str] = []
        """Names of the shards that hold a descriptor, in the order in which they were opened."""
        # A checkpoint of thousands of ranks has more files than a process may hold open.
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = max(8, limit // 2) if limit != resource.RLIM_INFINITY else MOST_OPEN

    def __getitem__(self, name: str) -> Shard:
        """Return a shard whose header is sound.

        Raises:
            CorruptData: it does not belong to the checkpoint, or is damaged.
            BadEnvironment: it may not be read.
        """
        # Threads read an object store: one of them reads a header.
        with self._lock:
            if name not in self._shards:
                if name not in self._facts:
                    raise CorruptData(f"{self._root / name} does not belong to the checkpoint")
                self._shards[name] = checked(self._root / name, self._facts[name], once=self._once)
                self._open.append(name)
            elif not self._shards[name].is_open:
                self._open.append(name)
            while len(self._open) > self._most:
                self._shards[self._open.pop(0)].close()
            return self._shards[name]


def checked(path: Path, facts: Mapping[str, Any], *, once: bool = False) -> Shard:
    """Open a shard and compare its header with the manifest's `facts` of the file; `once`: see
    `Shard`.

    A file of the first format is compared as a whole.

    Raises:
        CorruptData: it differs, or is no shard.
        BadEnvironment: it may not be read.
    """
    # Format 1 has one hash for the whole file, which no part can be compared with.
    if "header_sha256" not in facts:
        check_file(path, facts["sha256"])
    shard = Shard(path, once=once)
    if shard.header.sha256 != facts.get("header_sha256", shard.header.sha256):
        shard.close()
        raise CorruptData(f"{shard.name} is not what was written: the sha256 of its header differs")
    return shard


def wrote(path: Path) -> dict[str, Any]:
    """Trust a shard that this process has just written; return its facts for the manifest."""
    # Read back, so that the manifest has the hash of the header that is in the file.
    shard = Shard(path)
    shard.take_as_sound()
    shard.close()
    return {"bytes": shard.nbytes, "header_sha256": shard.header.sha256}


def _sound_of(file: Identity) -> _Sound:
    return _sound.setdefault(file, _Sound())


def forget(path: Path) -> None:
    """Forget a file's verdict: a file just removed may have had the same identity."""
    _sound.pop(identity(path.stat()), None)


def _read_header(file: DiskFile | StoredObject) -> Header:
    path = file.name
    size = file.nbytes
    first = bytes(file.read(0, min(size, LENGTH_BYTES)))
    length = int.from_bytes(first, "little")
    # The length is untrusted: it must not make this allocate more than the file has.
    if len(first) < LENGTH_BYTES or length > min(size - LENGTH_BYTES, MAX_HEADER_BYTES):
        raise CorruptData(f"{path} is not what was written: its header is cut")
    text = bytes(file.read(LENGTH_BYTES, length))
    data_at = LENGTH_BYTES + length
    try:
        body = json.loads(text)
        metadata = body.pop("__metadata__", {})
        algorithm = next((a for a in ALGORITHMS.values() if a.key in metadata), SHA256)
        blocks = json.loads(metadata.get(algorithm.key, "{}"))
        hashes = blocks["entries"] if blocks else json.loads(metadata.get(ENTRY_HASHES, "{}"))
        block_bytes = max(0, int(blocks.get("block_bytes", 0)))
        whole = blocks.get("whole", {})
        entries = {
            name: _entry(
                e,
                data_at,
                str(hashes.get(name, "")),
                block_bytes,
                str(whole.get(name, "")),
                algorithm,
            )
            for name, e in body.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptData(
            f"{path} is not what was written: its header cannot be read ({error})"
        ) from None
    for name, entry in entries.items():
        digits = algorithm.digits * (len(entry.blocks(0, entry.nbytes)) or 1)
        if entry.at + entry.nbytes > size or (entry.hashes and len(entry.hashes) != digits):
            raise CorruptData(
                f"{path} is not what was written: its header does not describe {name}"
            )
    return Header(hash_bytes(first + text), data_at, entries)


def _entry(
    facts: Mapping[str, Any],
    data_at: int,
    hashes: str,
    block_bytes: int,
    whole: str,
    algorithm: Algorithm,
) -> Entry:
    start, stop = map(int, facts["data_offsets"])
    shape = tuple(map(int, facts["shape"]))
    nbytes = stop - start
    # Offsets that do not match the shape would read the bytes of another entry.
    if start < 0 or min(shape, default=0) < 0 or nbytes != prod(shape) * WIDTHS[facts["dtype"]]:
        raise ValueError("a tensor has another size than its shape")
    block_bytes = block_bytes or max(1, nbytes)
    at = data_at + start
    return Entry(facts["dtype"], shape, at, nbytes, hashes, block_bytes, whole, algorithm)
