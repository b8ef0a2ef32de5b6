"""Files of a folder that somebody else made: opened only where they are plain files in it.

Needs no torch.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from mtrain import units
from mtrain.durable import not_read
from mtrain.errors import CorruptData


def open_plain(path: Path) -> BinaryIO:
    """Return a file, open to be read and not buffered.

    Raises:
        CorruptData: it is not there, or it is a link, a pipe or anything else that is no file.
        BadEnvironment: it may not be read.
    """
    try:
        # O_NONBLOCK: opening a pipe waits for its writer. The check is of the open file, not of its
        # name
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise CorruptData(f"{path} is a link, and none is followed") from None
        raise not_read(path, error) from None
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise CorruptData(f"{path} is no plain file")
    return os.fdopen(number, "rb", buffering=0)


def read_plain(path: Path, limit: int) -> bytes:
    """Return all bytes of a file.

    Raises:
        CorruptData: see `open_plain`; or it has more than `limit` bytes.
    """
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise CorruptData(
                f"{path} has {units.bytes_(size)}; at most {units.bytes_(limit)} are read"
            )
        data = bytearray()
        # the file may grow after its size was taken
        while piece := file.read(min(1 << 20, limit + 1 - len(data))):
            data += piece
        return bytes(data)
