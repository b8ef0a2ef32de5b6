"""A straight line from `optim.lr` to `optim.min_lr`."""

from __future__ import annotations

from mtrain.config.schema.schedule import Run, Schedule, progress


def factor(step: int, run: Run) -> float:
    """Return the share of the decay that is left at a step."""
    return 1.0 - progress(step, run)


SCHEDULE = Schedule(factor=factor, megatron_name="linear")
