"""Half a period of a cosine (Loshchilov and Hutter, 2017, arXiv:1608.03983), without restarts."""

from __future__ import annotations

import math

from mtrain.config.schema.schedule import Run, Schedule, progress


def factor(step: int, run: Run) -> float:
    """Return (1 + cos(pi t)) / 2 at the share t of the decay."""
    return 0.5 * (math.cos(math.pi * progress(step, run)) + 1.0)


SCHEDULE = Schedule(factor=factor, megatron_name="cosine")
