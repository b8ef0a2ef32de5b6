"""The time from the command to the first step by part, in `startup.json` of the run folder."""

from __future__ import annotations

import os
from pathlib import Path

from mtrain import startup, strict_json
from mtrain.train import warm_cache
from mtrain.train.hooks.base import Hook
from mtrain.train.hooks.progress import Progress
from mtrain.train.loop.context import TrainContext
from mtrain.train.loop.result import StepResult
from mtrain.world.init import World
from mtrain.world.rank_env import RankEnv

FILE = "startup.json"


class Startup(Hook):
    """The seconds of each part of the start, on rank 0.

    The first step is measured to the end of its work on the device, and includes compilation of
    kernels in it. `triton` counts the kernels that this process compiled, and those that it loaded
    from the cache; its `ahead` is the report of the processes that compiled them meanwhile. Where
    the host runs ahead of the device, the run prints a line, too: on a CPU the start takes a few
    seconds of imports. The binaries that were needed are recorded for the next start.
    """

    def __init__(self, folder: Path, progress: Progress) -> None:
        self.path = folder / FILE
        self.progress = progress
        self.compilations = startup.Compilations()
        self.reported = False

    def start(self, context: TrainContext) -> None:
        """Count the compilations from here on."""
        startup.mark(startup.LOADING)
        self.compilations.listen()

    def waits_for(self, context: TrainContext, step: int) -> bool:
        """Return whether this is the first step of this process."""
        return not self.reported

    def after_step(self, context: TrainContext, result: StepResult) -> None:
        """Report once."""
        if self.reported:
            return
        self.reported = True
        startup.mark(startup.STEP)
        if first_of_stage(context.world):
            warm_cache.keep(context.run, context.world.coords["pp"])
        if not context.world.is_rank0:
            return
        known = startup.current()
        counted = self.compilations
        ahead = warm_cache.told(os.environ)
        facts = {
            "seconds": round(known.total(), 3),
            "parts": {name: round(seconds, 3) for name, seconds in known.seconds().items()},
            "triton": {
                "compiled": counted.compiled,
                "cached": counted.cached,
                "seconds": round(counted.seconds, 3),
                "ahead": ahead,
            },
        }
        self.path.write_text(strict_json.dumps(facts, indent=1))
        if context.world.device.runs_ahead:
            self.progress.note(known.line(counted.compiled, (ahead or {}).get("compiled", 0)))


def first_of_stage(world: World) -> bool:
    """Return whether no rank before this one on its machine has its pipeline stage."""
    before = range(world.rank - RankEnv.here().local_rank, world.rank)
    return all(world.grid.coords(rank)["pp"] != world.coords["pp"] for rank in before)
