"""The tables in which a kernel over many tensors finds its tensors and their chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mtrain_kernels.device_tables import DeviceTables

_TABLES = DeviceTables(64)
_CHUNKS = DeviceTables(64)


def address(x: Tensor) -> int:
    """Return the address of a tensor's data; 0 for a meta tensor, which has no data."""
    return 0 if x.device.type == "meta" else x.data_ptr()


def tables(
    rows: Sequence[tuple[int, ...]], pointers: int, size_at: int, length: int, device: torch.device
) -> list[tuple[Tensor, Tensor, bool]]:
    """Return (table, chunks of `length`, aligned) of the rows with elements, first those that are
    read 16 bytes at a time.

    Those have their first `pointers` numbers and their size in multiples of 16; one odd tensor
    slows only its like.
    """
    parts: dict[bool, list[tuple[int, ...]]] = {True: [], False: []}
    for row in rows:
        if row[size_at]:
            parts[all(number % 16 == 0 for number in (*row[:pointers], row[size_at]))].append(row)
    return [
        (
            _table(tuple(part), device),
            _chunks(tuple(row[size_at] for row in part), length, device),
            aligned,
        )
        for aligned, part in parts.items()
        if part
    ]


def _table(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Return the rows as int64 on the device, kept while pointers stay."""
    return _TABLES.of(rows, device, lambda: torch.tensor(rows, dtype=torch.int64))


def _chunks(sizes: tuple[int, ...], length: int, device: torch.device) -> Tensor:
    """Return (tensor, chunk) of every chunk of `length` of tensors of these sizes, as int32 on the
    device.
    """

    def make() -> Tensor:
        chunks = [(i, c) for i, size in enumerate(sizes) for c in range(-(-size // length))]
        return torch.tensor(chunks, dtype=torch.int32).view(-1, 2)

    return _CHUNKS.of((sizes, length), device, make)
