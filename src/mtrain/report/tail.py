"""The end of a curve: its mean over the last steps, and the noise of that mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from mtrain.plan.compare import FIRST_STEPS
from mtrain.report.folder import Line, curve

SHARE = 0.1
"""The part of the steps that is the tail."""
FEWEST = 10


@dataclass(frozen=True)
class End:
    """The mean of the last values of a curve."""

    mean: float
    noise: float
    """Its standard error."""
    steps: int


def end_of(values: Sequence[float]) -> End | None:
    """Return the end of a curve, which may still fall; None: it has no values.

    The noise comes from the differences of neighbours, which a slow trend does not change (von
    Neumann's estimate of the variance).
    """
    tail = values[-max(FEWEST, round(SHARE * len(values))) :]
    if not tail:
        return None
    squares = [(after - before) ** 2 for before, after in pairwise(tail)]
    noise = math.sqrt(fmean(squares) / 2 / len(tail)) if squares else 0.0
    return End(fmean(tail), noise, len(tail))


def usual(lines: Mapping[int, Line], key: str) -> float | None:
    """Return the median of a key over the steps, without the first ones, which compile kernels."""
    values = [value for _, value in curve(lines, key)]
    values = values[FIRST_STEPS:] or values
    return median(values) if values else None
