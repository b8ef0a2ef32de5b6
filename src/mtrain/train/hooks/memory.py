"""The memory of every rank: its peak in `memory.json` of the run folder, samples as events."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from mtrain import strict_json
from mtrain.config.machine.hardware import free_memory_bytes, memory_bytes
from mtrain.events import log
from mtrain.plan.compare import ALLOCATED, MEASURED, PEAKS, by_rank_of
from mtrain.train.hooks.base import Hook
from mtrain.train.hooks.metrics import Metrics
from mtrain.train.loop.context import TrainContext
from mtrain.train.loop.result import StepResult
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


def sample_of(world: World, staging_bytes: int = 0) -> dict[str, float]:
    """Return the memory of this rank now.

    Keys: those of `Device.memory_stats`; fragmentation, the share of the allocator's memory that no
    tensor has, if it keeps any; host_rss_bytes, of this process; staging_bytes, for checkpoints
    that are written in the background; host_bytes and host_free_bytes, of the machine.
    """
    found: dict[str, float] = dict(world.device.memory_stats())
    if held := found.get("held_bytes"):
        found["fragmentation"] = round(1 - found["allocated_bytes"] / held, 4)
    return found | {
        "host_rss_bytes": psutil.Process().memory_info().rss,
        "host_bytes": memory_bytes(),
        "host_free_bytes": free_memory_bytes(),
        "staging_bytes": staging_bytes,
    }


class MemorySamples(Hook):
    """An event with the memory of every rank, about every `log.memory_interval` steps.

    Each rank writes a sample to the store and waits for nobody: neither for the device nor for
    other ranks. Rank 0 reads it when it takes the next one, as of `Stragglers`.
    """

    def __init__(
        self,
        interval: int,
        metrics: Metrics,
        staging_bytes: Callable[[], int],
        see: Callable[[int, Mapping[str, Any]], None] = lambda step, line: None,
    ) -> None:
        """Give samples to `metrics` and, on rank 0, to `see`."""
        self.interval = interval
        self.metrics = metrics
        self.staging_bytes = staging_bytes
        self.see = see
        self.began = 0
        self.step = 0
        """The step of the last sample; 0: there was none."""
        self.taken = 0

    def start(self, context: TrainContext) -> None:
        """Begin to count at the state's step."""
        self.began = context.state.step

    def after_step(self, context: TrainContext, result: StepResult) -> None:
        """Take a sample where one is due, after the last of the steps that are reported at once."""
        due = result.step // self.interval > max(self.step, self.began) // self.interval
        if not due or result.step != context.state.step:
            return
        if self.step:
            self._emit(context)
        self.step = result.step
        self.taken += 1
        sample = {"step": self.step, **sample_of(context.world, self.staging_bytes())}
        context.world.store.set(self._key(context.world.rank), strict_json.dumps(sample))

    def finish(self, context: TrainContext) -> None:
        """Read the last sample: `Memory`, which is called before, waits for the other ranks."""
        if self.step:
            self._emit(context)

    def _emit(self, context: TrainContext) -> None:
        """Add the event of the last sample, on rank 0; a rank that has none is null."""
        store = context.world.store
        if not context.world.is_rank0:
            return
        keys = [self._key(rank) for rank in range(context.world.size)]
        # Waiting for a rank that is late would hold up all others.
        if not store.check(keys):
            return
        ranks = [json.loads(text) for text in store.multi_get(keys)]
        # A store that outlived an earlier start of the ranks may have a sample of that one.
        found = [rank if rank.pop("step") == self.step else None for rank in ranks]
        known = [rank for rank in found if rank is not None]
        # A line of numbers by key stays short enough for readers, whatever the number of ranks.
        by_rank = {key: [rank and rank.get(key) for rank in found] for key in known[0]}
        self.metrics.note(log.MEMORY, self.step, by_rank=by_rank)
        self.see(self.step, {"ranks": known})

    def _key(self, rank: int) -> str:
        """Return where a sample is: rank 0 reads one while other ranks may write the next."""
        return f"memory/{self.taken % 2}/{rank}"
