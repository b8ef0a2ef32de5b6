"""A measurement of the disk below a folder: room, the rate of a write, fsync, and its clock.

The nearest folder above that exists holds the file, which is deleted.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from typing import Any

from mtrain import strict_json
from mtrain.errors import say_page

BLOCK_BYTES = 4 << 20
MOST_BYTES = 32 << 20
MOST_S = 0.5
SMALL_BYTES = 4096
SMALL_WRITES = 5


def main(folder: str) -> None:
    """Print the measurements of a folder as JSON."""
    wanted = Path(folder).absolute()
    found: dict[str, Any] = {}
    try:
        place = next(path for path in (wanted, *wanted.parents) if path.is_dir())
        found["place"] = str(place)
        room = os.statvfs(place)
        found["free_bytes"] = room.f_bavail * room.f_frsize
        # A file system without a fixed number of inodes reports 0 in all.
        found["free_files"] = room.f_favail if room.f_files else None
        found |= written(place)
    except OSError as error:
        found["error"] = error.strerror or type(error).__name__
    say_page(strict_json.dumps(found))


def written(place: Path) -> dict[str, Any]:
    """Return the rate of a write (bytes/s), the time of an fsync (s) and the skew of clocks (s).

    Raises:
        OSError: the folder takes no file, or no more bytes.
    """
    # Bytes that no file system can compress.
    block = os.urandom(BLOCK_BYTES)
    with TemporaryFile(dir=place, prefix=".doctor-", buffering=0) as file:
        begun = time.perf_counter()
        size = 0
        while size < MOST_BYTES and time.perf_counter() - begun < MOST_S:
            size += file.write(block)
        os.fsync(file.fileno())
        rate = size / (time.perf_counter() - begun)
        before = time.time()
        times = [_small(file.fileno()) for _ in range(SMALL_WRITES)]
        # A server sets the time of a file by its own clock, within these two of ours.
        os.utime(file.fileno())
        after = time.time()
        stamp = os.fstat(file.fileno()).st_mtime
    skew = min(0.0, stamp - before) or max(0.0, stamp - after)
    return {"write_bytes_per_s": rate, "fsync_s": median(times), "skew_s": skew}


def _small(descriptor: int) -> float:
    begun = time.perf_counter()
    os.write(descriptor, bytes(SMALL_BYTES))
    os.fsync(descriptor)
    return time.perf_counter() - begun


if __name__ == "__main__":
    main(sys.argv[1])
