"""The median of the last normal values of a number, which outliers do not move."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from math import inf

NORMAL_IQR = 1.349
"""Standard deviations between the quartiles of normal noise."""


class RunningMedian:
    """The median of the last `window` values that were added, and the noise around it.

    Callers add normal values only: those that are high would raise the median.
    """

    def __init__(self, window: int, least: int) -> None:
        """Know no median before `least` values."""
        self.least = least
        self.values: deque[float] = deque(maxlen=window)
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self.values)

    def add(self, value: float) -> None:
        """Add a finite value; the oldest one of a full window leaves."""
        if len(self.values) == self.values.maxlen:
            del self._sorted[bisect_left(self._sorted, self.values[0])]
        self.values.append(value)
        insort(self._sorted, value)

    def clear(self) -> None:
        """Forget all values."""
        self.values.clear()
        self._sorted.clear()

    @property
    def is_known(self) -> bool:
        """Return whether there are enough values."""
        return len(self.values) >= self.least

    @property
    def middle(self) -> float:
        """Return the median; infinity with too few values, so that nothing exceeds it."""
        return median_of(self._sorted) if self.is_known else inf

    @property
    def spread(self) -> float:
        """Return the standard deviation that normal noise with these quartiles has; infinity while
        there are too few values.
        """
        count = len(self._sorted)
        if not self.is_known or count < 4:
            return inf
        return (self._sorted[3 * count // 4] - self._sorted[count // 4]) / NORMAL_IQR

    def load(self, values: Iterable[float]) -> None:
        """Go on with values of an earlier process."""
        self.clear()
        for value in values:
            self.add(value)


def median_of(ordered: Sequence[float]) -> float:
    """Return the median of sorted values; there is at least one."""
    half, odd = divmod(len(ordered), 2)
    return ordered[half] if odd else (ordered[half - 1] + ordered[half]) / 2
