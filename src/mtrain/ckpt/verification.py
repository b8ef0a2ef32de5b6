"""Every byte of a checkpoint next to its hashes, by several threads. Needs no torch."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain.ckpt import folder, hashes
from mtrain.errors import CorruptData
from mtrain.units import MIB

READ_BYTES = 16 * MIB
"""The bytes of an entry that a thread reads and hashes at once."""
MOST_THREADS = 16


@dataclass(frozen=True)
class Verified:
    """The result of reading a checkpoint."""

    files: int
    nbytes: int
    seconds: float
    damage: tuple[str, ...]
    """A line for each file that is not as it was written."""

    @property
    def rate(self) -> float:
        """Return the bytes per second."""
        return self.nbytes / max(self.seconds, 1e-9)


def verified(path: Path, manifest: dict[str, Any], threads: int | None = None) -> Verified:
    """Read every byte of a checkpoint and compare it with the hashes.

    Raises:
        BadEnvironment: a file may not be read.
    """
    threads = threads or min(MOST_THREADS, os.cpu_count() or 1)
    begun = time.monotonic()
    damage: dict[str, str] = {}
    nbytes = 0
    there = folder.objects_of(path)
    with ThreadPoolExecutor(threads) as pool:
        for name, facts in manifest["files"].items():
            try:
                folder.check_file(path, name, facts, verify=False, there=there)
                if name.endswith(".safetensors"):
                    nbytes += _check_shard(pool, path / name, facts)
                else:
                    nbytes += (path / name).stat().st_size
            except CorruptData as error:
                damage.setdefault(name, str(error))
            except (KeyError, TypeError):
                damage.setdefault(name, f"{path / name}: the manifest has no hash of it")
    seconds = time.monotonic() - begun
    return Verified(len(manifest["files"]), nbytes, seconds, tuple(damage.values()))


def _check_shard(pool: ThreadPoolExecutor, path: Path, facts: dict[str, Any]) -> int:
    """Compare a shard with its hashes; return its size.

    Raises:
        CorruptData: a byte differs, or has no hash.
    """
    # A file of format 1 has one hash, which `checked` compares.
    shard = hashes.checked(path, facts, once=True)
    try:
        entries = shard.header.entries
        if sum(entry.nbytes for entry in entries.values()) != shard.nbytes - shard.header.data_at:
            raise CorruptData(f"{path} is not what was written: it holds bytes of no entry")
        bare = [name for name, entry in entries.items() if not entry.hashes]
        if bare and "header_sha256" in facts:
            raise CorruptData(f"{path} has no hash of {bare[0]}")
        if not bare:
            for _ in pool.map(lambda part: shard.read(*part) and None, _parts(shard)):
                pass
        return shard.nbytes
    finally:
        shard.close()


def _parts(shard: hashes.Shard) -> Iterator[tuple[str, int, int]]:
    """Yield the parts of a shard that threads read: whole blocks of its entries."""
    for name, entry in shard.header.entries.items():
        step = max(1, READ_BYTES // entry.block_bytes) * entry.block_bytes
        for start in range(0, entry.nbytes, step):
            yield name, start, min(entry.nbytes, start + step)
