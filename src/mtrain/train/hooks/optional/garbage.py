"""Python's garbage collector at the same steps on every rank.

The collector runs after some number of allocations, which differs between ranks: each of its pauses
makes one rank a straggler, and all others wait for it. Collected together, they pause once.
"""

from __future__ import annotations

import gc

from mtrain.train.hooks.base import Hook
from mtrain.train.loop.context import TrainContext
from mtrain.train.loop.result import StepResult

INTERVAL = 100
"""Steps between collections: garbage of a step is freed by reference counts, cycles are rare."""


class Garbage(Hook):
    """Collects every `INTERVAL` steps, and never in between."""

    def __init__(self) -> None:
        self.was_enabled = False

    def start(self, context: TrainContext) -> None:
        """Collect the garbage of building the model, and turn the automatic collector off."""
        self.was_enabled = gc.isenabled()
        gc.disable()
        gc.collect()

    def waits_for(self, context: TrainContext, step: int) -> bool:
        """Return whether ranks collect after this step: they do so between the same two steps."""
        return step % INTERVAL == 0

    def after_step(self, context: TrainContext, result: StepResult) -> None:
        """Collect at the interval."""
        if result.step % INTERVAL == 0:
            gc.collect()

    def close(self) -> None:
        """Turn the automatic collector on again if it was on."""
        if self.was_enabled:
            gc.enable()


HOOK = Garbage
