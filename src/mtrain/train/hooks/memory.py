"""The peak memory of every rank, in `memory.json` of the run folder."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from mtrain import strict_json
from mtrain.plan.compare import ALLOCATED, MEASURED, PEAKS, by_rank_of
from mtrain.train.hooks.base import Hook
from mtrain.train.loop.context import TrainContext
from mtrain.world.init import World

PEAKS_S = 10.0
"""Time that rank 0 waits for the memory peaks of the other ranks."""


class Memory(Hook):
    """The memory of every rank, in `memory.json` of the run folder; `plan --compare` puts it next
    to the plan.

    `peak_bytes_by_rank` is the most that was allocated; where they are known,
    `reserved_bytes_by_rank` is the most that the allocator held, and `driver_bytes_by_rank` what is
    in use of the whole device at the end, the context and other processes included. The numbers
    come over the store, so no rank waits for one that has none to give: its place is null.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / PEAKS

    def finish(self, context: TrainContext) -> None:
        """Gather the peaks."""
        world = context.world
        # Whatever fails here, rank 0 goes on to gather: others may have reported.
        try:
            mine = world.device.memory_stats() | {"driver_bytes": world.device.driver_bytes()}
            sizes = {key: int(value) for key in MEASURED if (value := mine.get(key)) is not None}
            world.store.set(f"peak/{world.rank}", strict_json.dumps(sizes))
        finally:
            peaks = self._of_ranks(world) if world.is_rank0 else []
        if peaks:
            known = [
                key for key in MEASURED if key == ALLOCATED or any(key in one for one in peaks)
            ]
            by_rank = {by_rank_of(key): [one.get(key) for one in peaks] for key in known}
            self.path.write_text(strict_json.dumps(by_rank))

    def _of_ranks(self, world: World) -> list[dict[str, int]]:
        keys = [f"peak/{rank}" for rank in range(world.size)]
        with suppress(RuntimeError):  # torch's errors of a store: some rank has none
            world.store.wait(keys, timedelta(seconds=PEAKS_S))
        return [
            json.loads(world.store.get(key)) if world.store.check([key]) else {} for key in keys
        ]
