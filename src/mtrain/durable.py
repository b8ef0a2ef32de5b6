"""Files that are on disk, and not in the kernel's memory alone, when a call returns."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on disk.

    Raises:
        OSError: the disk refused some of it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write(path: Path, data: bytes) -> None:
    """Write a file, and wait until it is on disk; raises as `sync` does."""
    path.write_bytes(data)
    sync(path)
