"""The life log of a run: signs of life of rank 0, and the account of all attempts at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mtrain import startup
from mtrain.errors import Preempted
from mtrain.goodput.account import furthest, write
from mtrain.goodput.log import recorded
from mtrain.goodput.meter import Meter
from mtrain.train.hooks.base import Hook
from mtrain.train.hooks.progress import Progress
from mtrain.train.loop.context import TrainContext
from mtrain.world.init import World


class Life(Hook):
    """A sign of life in the log after each checkpoint: steps that are saved are never unknown."""

    def saved(self, context: TrainContext, path: Path) -> None:
        """Write the sign."""
        context.meter.give_sign()


@contextmanager
def life_of(folder: Path, world: World, progress: Progress) -> Iterator[Meter]:
    """Yield the clock of the causes of this attempt.

    Rank 0 logs it in the run folder, and at the end of the block writes the account of all
    attempts. It prints the account in a line unless the run failed.
    """
    start = startup.current()
    if not world.is_rank0:
        yield Meter(start)
        return
    meter = Meter(start, furthest(folder))
    failed = True
    try:
        with recorded(folder, meter, os.environ):
            yield meter
        failed = False
    except Preempted:
        failed = False
        raise
    finally:
        account = write(folder)
        if account is not None and not failed:
            progress.note(account.line())
