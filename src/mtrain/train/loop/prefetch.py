"""Prefetching of samples: a thread reads ahead, and copies only what this rank's stages need."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from mtrain.config.schema.run import RunConfig
from mtrain.data.batch import GlobalBatches
from mtrain.data.prefetch import Prefetcher
from mtrain.devices.base import Device, Event
from mtrain.mcore import api as mcore
from mtrain.mcore.layers.context import context_positions
from mtrain.mcore.state.local_params import unwrap
from mtrain.models.registry import family_of
from mtrain.train.loop.readings import TALLY, tally_of
from mtrain.world.init import World

Batch = Mapping[str, Any]
"""A `MicroBatch` with its `Tally`; a packed one also has its `Documents`."""
DOCUMENTS = "documents"
BOUNDS = ("cu_seqlens", DOCUMENTS)
"""Keys of a packed micro-batch that context parallelism does not split."""
WHOLE = (*BOUNDS, TALLY)
"""The same of any micro-batch."""
Place = tuple[int, int]
"""A step: the samples consumed before it, and those that it takes."""
OWNERS = ("pre_process", "post_process", "mtp_process")
"""Attributes that are true on a chunk of megatron-core that embeds tokens or computes losses."""


class Documents(NamedTuple):
    """The documents of a packed micro-batch on the host, as asking the device would wait."""

    bounds: list[int]
    """The first token of each, and the end of the last."""
    longest: int
    """Tokens."""


Needs = frozenset[str] | None
"""Keys of its samples that the stages of a rank use; None: all."""


def needs_of(run: RunConfig, chunks: Sequence[Any], *, padded: bool) -> Needs:
    """Return the keys that the chunks of a rank use of samples, which may be `padded`.

    Intermediate stages use almost nothing: their input comes from the stage before.
    """
    dealt = run.parallel.hybrid_context_parallel  # documents are dealt out after they are read
    if dealt or family_of(run.model).reads_between or run.parallel.pp == 1:
        return None
    if any(getattr(unwrap(chunk), name, False) for chunk in chunks for name in OWNERS):
        return None
    counts = padded and counts_tokens(run)
    return frozenset(BOUNDS if run.data.packed else ()) | frozenset(["padding"] if counts else ())


def counts_tokens(run: RunConfig) -> bool:
    """Return whether layers count tokens: routers of experts, and sparse attention's indexers."""
    return run.model.moe is not None or run.model.dsa is not None


class BatchPrefetcher:
    """The micro-batches of steps, on this rank's device as the step takes them."""

    def __init__(
        self,
        data: GlobalBatches,
        world: World,
        needs: Needs,
        following: Callable[[Place], Place | None],
        depth: int,
        ring: Ring | None = None,
    ) -> None:
        self._data = data
        self._world = world
        self._needs = needs
        # A stage that needs no key reads nothing: no thread for it.
        ready = _Ready(data, world, needs, ring)
        self._ahead = Prefetcher(ready, following, 0 if needs is not None and not needs else depth)
        self.waited_s = 0.0
        """Seconds that the last step waited for its samples to be read."""

    def take(self, consumed: int, size: int) -> list[Batch]:
        """Return the micro-batches of the step of `size` samples after `consumed`, on this rank's
        device.

        Raises whatever reading them raised.
        """
        begun = time.perf_counter()
        ready, slot = self._ahead.take((consumed, size))
        self.waited_s = time.perf_counter() - begun
        batches = [_copied(batch, self._world) for batch in ready]
        if slot is not None:
            slot.copied = self._world.device.event()
        return batches

    def read_for(self, dp_rank: int, consumed: int, size: int) -> list[Batch]:
        """Return another data-parallel rank's micro-batches on this device, not ahead."""
        ready = _Ready(self._data.of_rank(dp_rank), self._world, self._needs, None)
        batches, _ = ready((consumed, size))
        return [_copied(batch, self._world) for batch in batches]

    def expect(self, consumed: int, size: int) -> None:
        """Begin to read for the step that `take` will return."""
        self._ahead.expect((consumed, size))

    def close(self) -> None:
        """End the thread that reads ahead."""
        self._ahead.close()


class _Ready:
    """Reads the micro-batches of a step up to where they only have to be copied to the device."""

    def __init__(self, data: GlobalBatches, world: World, needs: Needs, ring: Ring | None) -> None:
        self.data = data
        self.world = world
        self.needs = needs
        self.ring = ring

    def __call__(self, place: Place) -> tuple[Sequence[Batch], Slot | None]:
        if self.needs is not None and not self.needs:
            return [{} for _ in self.data.numbers(*place)], None
        batches = [_measured(cast(Batch, batch)) for batch in self.data.microbatches(*place)]
        if self.needs is not None:
            batches = [{key: batch[key] for key in self.needs if key in batch} for batch in batches]
        if self.world.grid.cp > 1:
            batches = [_part_of_context(batch, self.world) for batch in batches]
        if self.ring is None:
            return batches, None
        self.world.device.set_index(self.world.local_rank)  # a thread has a device of its own
        return self.ring.put(batches)


def to_device(batch: Batch, world: World) -> Batch:
    """Return a micro-batch on this rank's device, cut to its part under context parallelism."""
    batch = _measured(batch)
    return _copied(_part_of_context(batch, world) if world.grid.cp > 1 else batch, world)


def documents_of(batch: Batch) -> Documents:
    """Return the documents of a packed micro-batch; without a prefetcher, from its bounds."""
    if DOCUMENTS in batch:
        return cast(Documents, batch[DOCUMENTS])
    bounds = batch["cu_seqlens"].tolist()
    return Documents(bounds, max(stop - start for start, stop in pairwise(bounds)))


def documents(batches: Sequence[Batch]) -> list[dict[str, torch.Tensor]]:
    """Return the documents of packed samples, each as `[1, length]` tensors."""
    parts = []
    for batch in batches:
        rows = {key: value for key, value in batch.items() if key not in WHOLE}
        for start, stop in pairwise(documents_of(batch).bounds):
            parts.append({key: value[:, start:stop] for key, value in rows.items()})
    return parts


def _measured(batch: Batch) -> Batch:
    measured = {**batch, DOCUMENTS: documents_of(batch)} if "cu_seqlens" in batch else {**batch}
    bounds = measured[DOCUMENTS].bounds if DOCUMENTS in measured else None
    return {**measured, TALLY: tally_of(batch, bounds)}


def _copied(batch: Batch, world: World) -> Batch:
    copied = dict(batch)
    for key, value in batch.items():
        if isinstance(value, torch.Tensor):
            copied[key] = value.to(world.torch_device, non_blocking=True)
    return copied


def _part_of_context(batch: Batch, world: World) -> Batch:
    """Return this rank's part of the sequence under context parallelism."""
    # Bounds and counts are of the whole sequence: every part needs them.
    whole = {key: value for key, value in batch.items() if key in WHOLE}
    shared = {key: value for key, value in batch.items() if key not in WHOLE}
    bounds = batch.get("cu_seqlens")
    if bounds is None:
        return {**mcore.get_batch_on_this_cp_rank(shared), **whole} if shared else whole
    if not shared:
        return batch
    tokens = int(bounds[-1])
    mine = context_positions(tokens, world.grid.cp, bounds)[world.coords["cp"]]
    return {**{key: value[:, mine] for key, value in shared.items()}, **whole}


ALIGNMENT = 64
"""Every tensor begins at a multiple of so many bytes."""


class Slot:
    """Memory of one step's micro-batches."""

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None
        """uint8."""
        self.copied: Event | None = None
        """The moment at which the device has read it; None: no copy was started."""


class Ring:
    """Slots for the steps read ahead, one in use, and one whose copy may be under way."""

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
        """Return the micro-batches with tensors in the next slot, after the device has read it."""
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
        # by numpy: torch would start threads of its own here, which compete with those of the step
        flat = value.contiguous().reshape(-1).view(torch.uint8)
        np.copyto(memory.numpy(), flat.numpy())
    return memory.view(value.dtype).view(value.shape)
