"""Headers of safetensors files, read without trust. Needs no torch.

Source: the format's specification, https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from mtrain.ckpt.hashes import LENGTH_BYTES, WIDTHS
from mtrain.ckpt.reading import read_once
from mtrain.durable import not_read
from mtrain.errors import CorruptData

BYTES = WIDTHS
MAX_HEADER_BYTES = 100_000_000
"""Limit on a header, the same as in the format's own readers."""
MAX_DIMENSIONS = 16


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file, where its bytes are."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    """Byte of the file."""

    @property
    def width(self) -> int:
        """Return bytes of a number."""
        return BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Return its size."""
        return prod(self.shape) * self.width

    def read_into(self, buffer: memoryview) -> None:
        """Fill `buffer`, which has its size.

        Raises:
            CorruptData: the file ended, or cannot be read.
            BadEnvironment: it may not be read.
        """
        try:
            with self.path.open("rb", buffering=0) as file:
                done = 0
                while done < len(buffer):
                    count = read_once(file.fileno(), buffer[done:], self.start + done)
                    if not count:
                        raise CorruptData(f"{self.path}: the file ends within {self.name}")
                    done += count
        except OSError as error:
            raise not_read(self.path, error) from None


def read_header(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name, in the order of their bytes.

    Raises:
        CorruptData: the file is missing, or its header does not describe it exactly.
        BadEnvironment: it may not be read.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for
            raise CorruptData(f"{path} is no plain file")
        size = status.st_size
        with path.open("rb") as file:
            first = file.read(LENGTH_BYTES)
            length = int.from_bytes(first, "little")
            # the header may claim more bytes than the file has
            if len(first) < LENGTH_BYTES or length > min(size - LENGTH_BYTES, MAX_HEADER_BYTES):
                raise CorruptData(
                    f"{path}: no safetensors file: its header is cut or has {length} bytes"
                )
            # readers differ in which of two equal names they take
            body = json.loads(file.read(length), object_pairs_hook=once)
    except OSError as error:
        raise not_read(path, error) from None
    except (ValueError, RecursionError) as error:
        raise CorruptData(f"{path}: its header cannot be read: {str(error)[:200]}") from None
    if not isinstance(body, dict):
        raise CorruptData(f"{path}: its header is no JSON object")
    body.pop("__metadata__", None)
    return _tensors(path, body, LENGTH_BYTES + length, size)


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object whose names are there once each.

    Raises:
        ValueError: one is there twice.
    """
    out = dict(pairs)
    if len(out) < len(pairs):
        raise ValueError("a name is there twice")
    return out


def _tensors(path: Path, body: Mapping[str, Any], data_at: int, size: int) -> dict[str, Tensor]:
    found: list[tuple[int, int, Tensor]] = []
    for name, entry in body.items():
        try:
            dtype = entry["dtype"]
            shape = entry["shape"]
            start, stop = entry["data_offsets"]
        except (TypeError, KeyError, ValueError):
            raise CorruptData(f"{path}: {name[:200]} lacks dtype, shape or data_offsets") from None
        # `type`, as true is an instance of int
        numbers = [*shape, start, stop] if isinstance(shape, list) else [None]
        if (
            not all(type(n) is int and 0 <= n <= size for n in numbers)
            or len(numbers) > MAX_DIMENSIONS + 2
        ):
            raise CorruptData(f"{path}: {name[:200]} has a shape or offsets that cannot be")
        if not isinstance(dtype, str) or dtype not in BYTES:
            raise CorruptData(f"{path}: {name[:200]} has numbers of kind {str(dtype)[:40]!r}")
        if prod(shape) * BYTES[dtype] != stop - start:
            raise CorruptData(
                f"{path}: {name[:200]} of shape {shape} does not have {stop - start} bytes"
            )
        found.append((start, stop, Tensor(name, dtype, tuple(shape), path, data_at + start)))
    # empty tensors share an offset with their successor
    found.sort(key=lambda item: item[:2])
    at = 0
    for start, stop, tensor in found:
        # an overlap would make two names for the same bytes, a gap would hide some
        if start != at:
            raise CorruptData(
                f"{path}: the bytes of {tensor.name[:200]} do not follow those before it"
            )
        at = stop
    if data_at + at != size:
        raise CorruptData(f"{path} has {size} bytes, and its header says {data_at + at}")
    return {tensor.name: tensor for _, _, tensor in found}
