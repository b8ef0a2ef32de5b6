"""Safetensors files for other readers: written by the library, with the umask's mode."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from mtrain import durable

NO_MODES = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}
"""The errors by which a file system says that it does not change the mode of a file."""


def write(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file.

    The library writes a temporary file that only this user may read, and renames it, whatever the
    umask says (safetensors issue 782). So an empty file is created first, for the mode that the
    umask gives. Where that mode cannot be set afterwards, the file is kept, and a warning says once
    that others may not be able to read it.

    Raises:
        OSError, SafetensorError: the disk refuses.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
    finally:
        os.close(descriptor)
    save_file(dict(tensors), path, metadata=dict(metadata))
    if stat.S_IMODE(os.stat(path).st_mode) == mode:  # as it always is where all files have one mode
        return
    try:
        os.chmod(path, mode)
    except OSError as error:
        if error.errno not in NO_MODES:
            raise
        durable.report_once(
            "modes of files",
            f"{path}: this file system cannot change the mode of a file ({error.strerror}); other"
            " users may not be able to read it",
        )
