"""A straight line from `optim.lr` to `optim.min_lr`."""

from __future__ import annotations

from mtrain.config.schema.schedule import Run, Schedule, progress


def factor(step: int, run: Run) -> float:
    """Return the remaining share of the decay at a step."""
    return 1.0 - progress(step, run)


SCHEDULE = Schedule(factor=factor, megatron_name="linear")
