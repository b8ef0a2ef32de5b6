"""Host memory that micro-batches are copied to a device from: pinned, allocated once, and used in
turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mtrain.devices.base import Device, Event

ALIGNMENT = 64
"""Bytes of which every tensor begins at a multiple."""


class Slot:
    """Memory of one step's micro-batches."""

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None
        """uint8."""
        self.copied: Event | None = None
        """The moment at which the device has read it; None: it was not asked to."""


class Ring:
    """Slots for the steps that are read ahead, one that is taken, and one whose copy may be under
    way.
    """

    def __init__(self, device: Device, slots: int) -> None:
        self._device = device
        self._slots = [Slot() for _ in range(slots)]
        self._turn = 0

    @classmethod
    def of(cls, device: Device, prefetch: int) -> Ring | None:
        """Return the ring of a feed that reads `prefetch` steps ahead; None where no memory is
        pinned for the device.
        """
        return cls(device, prefetch + 2) if device.pin_memory else None

    def put(self, batches: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], Slot]:
        """Return the micro-batches with their tensors in the next slot, once the device has read
        what was there.
        """
        self._turn = (self._turn + 1) % len(self._slots)
        slot = self._slots[self._turn]
        if slot.copied is not None:
            slot.copied.synchronize()
            slot.copied = None
        tensors = [
            value
            for batch in batches
            for value in batch.values()
            if isinstance(value, torch.Tensor)
        ]
        memory = self._memory(slot, sum(map(_room, tensors)))
        placed = []
        start = 0
        for batch in batches:
            inside = dict(batch)
            for key, value in batch.items():
                if isinstance(value, torch.Tensor):
                    inside[key] = _written(memory[start : start + value.nbytes], value)
                    start += _room(value)
            placed.append(inside)
        return placed, slot

    def _memory(self, slot: Slot, size: int) -> torch.Tensor:
        """Return a slot's memory, of the next power of two: steps of other documents need a little
        more or less.
        """
        if slot.memory is None or slot.memory.numel() < size:
            slot.memory = self._device.pinned(1 << max(12, (size - 1).bit_length()))
        return slot.memory


def _room(value: torch.Tensor) -> int:
    return -(-value.nbytes // ALIGNMENT) * ALIGNMENT


def _written(memory: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the tensor in a part of the memory (uint8, as many bytes)."""
    if value.nbytes:
        # by numpy: the thread that reads ahead must not start threads of torch's beside those of
        # the step
        flat = value.contiguous().reshape(-1).view(torch.uint8)
        np.copyto(memory.numpy(), flat.numpy())
    return memory.view(value.dtype).view(value.shape)
