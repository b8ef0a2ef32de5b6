"""The file of a rank's pieces: its description, and its bytes as they come. Needs no torch.

The description is data that JSON can hold, so a rank can send it to the process that writes the
file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from mtrain import strict_json
from mtrain.ckpt import hashes
from mtrain.ckpt.new_file import Ring, Writer, data_offset
from mtrain.world.heartbeat import tick


@dataclass(frozen=True)
class Entry:
    """A tensor of a file."""

    name: str
    dtype: str
    """Name of the number format in safetensors."""
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class ShardFile:
    """The content of a file: tensors in their order, and their facts in the manifest."""

    name: str
    entries: tuple[Entry, ...]
    pieces: tuple[dict[str, Any], ...]
    algorithm: hashes.Algorithm = hashes.XXH3
    """The hash of its blocks."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON that `from_json` reads."""
        entries = [[e.name, e.dtype, list(e.shape), e.nbytes] for e in self.entries]
        return {
            "name": self.name,
            "entries": entries,
            "pieces": list(self.pieces),
            "algorithm": self.algorithm.name,
        }

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Self:
        """Return the description that `to_json` wrote."""
        entries = [Entry(name, dtype, tuple(shape), n) for name, dtype, shape, n in body["entries"]]
        algorithm = hashes.ALGORITHMS[body["algorithm"]]
        return cls(body["name"], tuple(entries), tuple(body["pieces"]), algorithm)


def write(
    path: Path,
    file: ShardFile,
    bytes_of: Callable[[Entry], Iterable[memoryview]],
    source: Ring | None = None,
) -> dict[str, Any]:
    """Write a file and wait until it is on disk; return its index, as a manifest is merged from.

    Args:
        path: where to; a file that an earlier try left is replaced.
        file: its description.
        bytes_of: yields the bytes of an entry in parts of any size. Called once per entry, in
            order.
        source: memory that these bytes stay in until they are written; see `new_file.RingFile`.

    Raises:
        OSError: the disk refuses some of it.
    """
    with suppress(FileNotFoundError):
        path.unlink()
    with Writer(path, _names(file), _room(file), source) as writer:
        hashed: dict[str, str] = {}
        for entry in file.entries:
            writer.begin(entry.name, entry.dtype, entry.shape)
            blocks = hashes.BlockHasher(file.algorithm)
            for data in bytes_of(entry):
                blocks.add(data)
                writer.add(data)
                tick()
            hashed[entry.name] = blocks.hexdigest()
        writer.close(hashes.metadata_of(hashed, algorithm=file.algorithm))
    return {"pieces": list(file.pieces), "file": {"name": path.name, **hashes.wrote(path)}}


def data_at(file: ShardFile) -> int:
    """Return the offset in the file of the first tensor's bytes."""
    return data_offset(_names(file), _room(file))


def _names(file: ShardFile) -> list[str]:
    return [entry.name for entry in file.entries]


def _room(file: ShardFile) -> int:
    """Return the bytes of the header's metadata: hashes are as long as those of as many zeros."""
    longest = {one.name: hashes.room_for(one.nbytes, file.algorithm) for one in file.entries}
    return len(strict_json.dumps(hashes.metadata_of(longest, algorithm=file.algorithm)))


def parts(data: memoryview, limit: int) -> Iterator[memoryview]:
    """Yield bytes in parts of at most `limit`."""
    for start in range(0, len(data), limit):
        yield data[start : start + limit]
