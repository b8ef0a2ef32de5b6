"""The way of samples to a step: read ahead by a thread, and of them only what this rank's stages
need.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch

from mtrain.config.schema.run import RunConfig
from mtrain.data.batch import GlobalBatches
from mtrain.data.prefetch import Prefetcher
from mtrain.mcore import api as mcore
from mtrain.mcore.context import context_positions
from mtrain.mcore.local_params import unwrap
from mtrain.models.registry import family_of
from mtrain.train.ring import Ring, Slot
from mtrain.train.tally import TALLY, tally_of
from mtrain.world.init import World

Batch = Mapping[str, Any]
"""A `MicroBatch` with its `Tally`; a packed one has its `Documents` beside it."""
DOCUMENTS = "documents"
BOUNDS = ("cu_seqlens", DOCUMENTS)
"""Parts of a packed micro-batch that every part of the sequence has whole."""
WHOLE = (*BOUNDS, TALLY)
"""Those of any micro-batch."""
Place = tuple[int, int]
"""A step: the samples consumed before it, and those that it takes."""
OWNERS = ("pre_process", "post_process", "mtp_process")
"""What a chunk of megatron-core has on that embeds tokens or makes losses of them."""


class Documents(NamedTuple):
    """The documents of a packed micro-batch, as the host knows them: asking the device would hold
    it up.
    """

    bounds: list[int]
    """The first token of each, and the end of the last."""
    longest: int
    """Tokens."""


Needs = frozenset[str] | None
"""What of its samples the stages of a rank use; None: all."""


def needs_of(run: RunConfig, chunks: Sequence[Any], *, padded: bool) -> Needs:
    """What the chunks of a rank use of samples, of which some may be `padded`.

    Stages in between use nothing of most: what they compute on comes from the stage before.
    """
    dealt = run.parallel.hybrid_context_parallel  # documents are dealt out after they are read
    if dealt or family_of(run.model).reads_between or run.parallel.pp == 1:
        return None
    if any(getattr(unwrap(chunk), name, False) for chunk in chunks for name in OWNERS):
        return None
    counts = padded and counts_tokens(run)
    return frozenset(BOUNDS if run.data.packed else ()) | frozenset(["padding"] if counts else ())


def counts_tokens(run: RunConfig) -> bool:
    """Return whether layers count tokens: routers of experts, and the indexers of
    sparse attention.
    """
    return run.model.moe is not None or run.model.dsa is not None


class Feed:
    """The micro-batches of steps, in this rank's memory as the step takes them."""

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
        ready = _Ready(data, world, needs, ring)
        self._ahead = Prefetcher(ready, following, 0 if needs is not None and not needs else depth)
        self.waited_s = 0.0
        """How long the last step waited for its samples to be read."""

    def take(self, consumed: int, size: int) -> list[Batch]:
        """Return the micro-batches of the step of `size` samples after `consumed`, on this rank's
        device.

        Raises whatever reading them raised.
        """
        begun = time.perf_counter()
        found, slot = self._ahead.take((consumed, size))
        self.waited_s = time.perf_counter() - begun
        batches = [_copied(batch, self._world) for batch in found]
        if slot is not None:
            slot.copied = self._world.device.event()
        return batches

    def expect(self, consumed: int, size: int) -> None:
        """Begin to read for the step that `take` will be asked for."""
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
    """Return a micro-batch on this rank's device, split to this rank's part of the sequence under
    context parallelism.
    """
    batch = _measured(batch)
    return _copied(_part_of_context(batch, world) if world.grid.cp > 1 else batch, world)


def documents_of(batch: Batch) -> Documents:
    """Return the documents of a packed micro-batch; one that came by no feed is asked for them."""
    if DOCUMENTS in batch:
        return cast(Documents, batch[DOCUMENTS])
    bounds = batch["cu_seqlens"].tolist()
    return Documents(bounds, max(stop - start for start, stop in pairwise(bounds)))


def _measured(batch: Batch) -> Batch:
    found = {**batch, DOCUMENTS: documents_of(batch)} if "cu_seqlens" in batch else {**batch}
    bounds = found[DOCUMENTS].bounds if DOCUMENTS in found else None
    return {**found, TALLY: tally_of(batch, bounds)}


def _copied(batch: Batch, world: World) -> Batch:
    return {
        key: value.to(world.torch_device, non_blocking=True)
        if isinstance(value, torch.Tensor)
        else value
        for key, value in batch.items()
    }


def _part_of_context(batch: Batch, world: World) -> Batch:
    """This rank's part of the sequence under context parallelism."""
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
