"""Free space of a disk, compared with the bytes of a checkpoint before the first one is written.

Needs no torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from mtrain import units
from mtrain.ckpt.hashes import room_for
from mtrain.ckpt.shard_file import ShardFile

PIECE_BYTES = 2048
"""Room for the facts of a piece: in its file's header, the rank's index and the manifest."""
RANK_BYTES = 32 << 10
"""Room of a rank for everything but tensors: ends of blocks of its files, and on rank 0 `run.yaml`
and the trainer's state.
"""


def to_write(files: Iterable[ShardFile]) -> int:
    """Return the bytes of a rank's files with hashes and names, rounded up a little."""
    total = RANK_BYTES
    for file in files:
        for entry in file.entries:
            total += entry.nbytes + len(room_for(entry.nbytes, file.algorithm)) + PIECE_BYTES
    return total


def require(root: Path, nbytes: int, ranks: int) -> None:
    """Compare the bytes that all ranks on a file system are about to write with its free ones.

    A file system that does not report its size, as some in user space, has room.

    Raises:
        OSError: there are fewer; the message has both numbers.
    """
    disk = shutil.disk_usage(root)
    if disk.total and disk.free < nbytes:
        more = units.bytes_(nbytes - disk.free)
        raise OSError(
            f"{units.number_of(ranks, 'rank')} would write {units.bytes_(nbytes)}. Free {more} more"
            " there, or keep fewer checkpoints (checkpoint.keep)"
        )
