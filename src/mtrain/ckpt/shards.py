"""Safetensors files as others may read them: written through the library, with the mode that the umask gives."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import save_file


def write(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file.

    The library writes a temporary file that only this user may read, and renames it, whatever the umask says
    (safetensors issue 782). So a new file is asked for its mode first.

    Raises:
        OSError, SafetensorError: the disk refuses.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
    finally:
        os.close(descriptor)
    save_file(dict(tensors), path, metadata=dict(metadata))
    with suppress(PermissionError, NotImplementedError):  # a file system whose files all have one mode
        os.chmod(path, mode)
