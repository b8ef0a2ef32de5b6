"""The inverse square root of the step (Vaswani et al. 2017, arXiv:1706.03762) to `optim.min_lr`."""

from __future__ import annotations

import math

from mtrain.config.schema.schedule import Run, Schedule, warmup_of


def factor(step: int, run: Run) -> float:
    """Return the square root of warmup / step, which is 1 at the end of the warmup."""
    # A run without warmup starts at the full rate.
    return math.sqrt(max(warmup_of(run), 1) / max(step, 1))


def unchanged_until(run: Run, end: int) -> int:
    """Return the end of the decay: only there does the curve jump to `optim.min_lr`."""
    return end


SCHEDULE = Schedule(
    factor=factor,
    megatron_name="inverse-square-root",
    of_lr=True,
    unchanged_until=unchanged_until,
)
