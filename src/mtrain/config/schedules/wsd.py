"""Warmup, stable, decay (Hu et al., 2024, arXiv:2404.06395): `optim.lr` up to the last
`optim.wsd_decay_iters` steps, which fall by `optim.wsd_decay_style`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from mtrain.config.schema.schedule import Run, Schedule, end_of_decay, warmup_of

# Style of the final decay -> the factor at the share of it that is over.
STYLES: dict[str, Callable[[float], float]] = {
    "linear": lambda t: 1.0 - t,
    "cosine": lambda t: 0.5 * (math.cos(math.pi * t) + 1.0),
    # As megatron-core has it: from 1 to 0, not towards 0.
    "exponential": lambda t: 2.0 * math.pow(0.5, t) - 1.0,
    "minus_sqrt": lambda t: 1.0 - math.sqrt(t),
}


def factor(step: int, run: Run) -> float:
    """Return 1 before the final decay, and the factor of its style in it."""
    start = end_of_decay(run) - _decay_steps(run)
    if step <= start:
        return 1.0
    return STYLES[run.optim.wsd_decay_style]((step - start) / _decay_steps(run))


def unchanged_until(run: Run, end: int) -> int:
    """Return the step before the final decay of a run whose decay ends at `end`."""
    return max(warmup_of(run), end - _decay_steps(run))


def _decay_steps(run: Run) -> int:
    # the rule MT424 refuses a run without it; a curve must be drawn nonetheless
    return int(run.optim.wsd_decay_iters or 1)


SCHEDULE = Schedule(factor=factor, megatron_name="WSD", unchanged_until=unchanged_until)
