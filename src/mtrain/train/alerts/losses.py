"""Detectors that read the loss and the norm of the gradient."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, isfinite, log
from statistics import median
from typing import Any

from mtrain.train.alerts.detector import Detector, Line, number
from mtrain.train.running_median import RunningMedian

EVALUATED = "valid_loss"
JUDGED = "valid_reward"
SKIPPED = "skipped"


class NonFinite(Detector):
    """A number that is not finite, apart from the norm of a gradient that fp16 skipped."""

    name = "non_finite"

    def see(self, line: Line) -> str | None:
        """Name the numbers of a line that are not finite."""
        skipped = bool(line.get(SKIPPED))
        found = [
            f"{key} is {value}"
            for key, value in line.items()
            if isinstance(value, float)
            and not isfinite(value)
            and not (skipped and key == "grad_norm")
        ]
        return ", ".join(found)


class Level:
    """The level of a number, and the noise around it, which a trend does not widen.

    The level is the median of the last few normal values. The noise is that of the differences
    between values and the level before them.
    """

    FEW = 9
    WINDOW = 100
    LEAST = 15

    def __init__(self) -> None:
        self.values = RunningMedian(self.FEW, self.FEW)
        self.residuals = RunningMedian(self.WINDOW, self.LEAST)

    def add(self, value: float) -> None:
        """Add a normal value."""
        if self.values.is_known:
            self.residuals.add(value - self.values.middle)
        self.values.add(value)

    def clear(self) -> None:
        """Forget all values."""
        self.values.clear()
        self.residuals.clear()

    @property
    def is_known(self) -> bool:
        """Return whether there were enough values."""
        return self.residuals.is_known

    def state(self) -> dict[str, list[float]]:
        """Return what a resumed run needs."""
        return {"values": list(self.values.values), "residuals": list(self.residuals.values)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`."""
        self.values.load(state["values"])
        self.residuals.load(state["residuals"])


@dataclass(frozen=True)
class Excess:
    """The distance from the level above which a value is high."""

    spreads: float
    """Multiples of the noise."""
    share: float
    """A share of the level."""

    def bound(self, level: Level, logarithms: bool) -> float:
        """Return the largest value that is not high; infinity while that is unknown."""
        if not level.is_known:
            return math.inf
        middle = level.values.middle
        least = log(1 + self.share) if logarithms else self.share * abs(middle)
        return middle + max(self.spreads * level.residuals.spread, least)


class Spike(Detector):
    """A value far above its running median, or two of the last five above a lower bound.

    Noise of small batches has heavy tails, so a single value must be far away.
    """

    RECENT = 5
    LASTING = 50
    """High values in a row that are a new level."""

    def __init__(
        self, key: str, words: str, alone: Excess, repeated: Excess, *, logarithms: bool = False
    ) -> None:
        """Read `key` of lines; `logarithms`: compare ratios, for positive values of wide range."""
        self.name = f"{key}_spike"
        self.key = key
        self.words = words
        self.alone = alone
        self.repeated = repeated
        self.logarithms = logarithms
        self.level = Level()
        self.high: deque[bool] = deque(maxlen=self.RECENT)
        self.in_a_row = 0

    def see(self, line: Line) -> str | None:
        """Compare a value with the level of those before."""
        value = number(line, self.key)
        if value is None or line.get(SKIPPED) or (self.logarithms and value <= 0):
            return None
        compared = log(value) if self.logarithms else value
        is_high = compared > self.repeated.bound(self.level, self.logarithms)
        self.high.append(is_high)
        text = ""
        if is_high and (
            sum(self.high) > 1 or compared > self.alone.bound(self.level, self.logarithms)
        ):
            middle = self.level.values.middle
            usual = exp(middle) if self.logarithms else middle
            text = f"the {self.words} is {value:.4g}, and was {usual:.4g} in the median before"
        self.in_a_row = self.in_a_row + 1 if is_high else 0
        # A run that stays high has a new level, which later spikes are compared with.
        if self.in_a_row >= self.LASTING:
            self.level.clear()
            self.in_a_row = 0
        if self.in_a_row == 0:
            self.level.add(compared)
        return text

    def state(self) -> dict[str, Any]:
        """Return the level and the last comparisons."""
        return {"level": self.level.state(), "high": list(self.high), "row": self.in_a_row}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on with the level of the resumed run."""
        self.level.load(state["level"])
        self.high.extend(state["high"])
        self.in_a_row = state["row"]


def untrained(vocabulary: int) -> float:
    """Return the loss of a model that predicts all tokens alike, in nats."""
    return log(max(2, vocabulary))


def loss_spike() -> Spike:
    """Return the detector of spikes of the loss."""
    return Spike("loss", "loss", Excess(12, 0.15), Excess(6, 0.05))


def norm_spike() -> Spike:
    """Return the detector of spikes of the gradient's norm."""
    return Spike("grad_norm", "gradient norm", Excess(8, 7.0), Excess(6, 2.0), logarithms=True)


class LossRising(Detector):
    """A median of the last losses above that of the losses before them."""

    name = "loss_rising"
    RECENT = 12
    BEFORE = 24
    SPREADS = 2.5
    """A median of 12 values has a quarter to a half of their noise, if neighbours are alike."""
    SHARE = 0.01

    def __init__(self) -> None:
        self.recent = RunningMedian(self.RECENT, self.RECENT)
        self.before = RunningMedian(self.BEFORE, self.BEFORE)
        self.level = Level()

    def see(self, line: Line) -> str | None:
        """Compare the two medians."""
        loss = number(line, "loss")
        if loss is None or EVALUATED in line:
            return None
        # The two windows do not overlap: what leaves the one enters the other.
        if self.recent.is_known:
            self.before.add(self.recent.values[0])
        self.recent.add(loss)
        self.level.add(loss)
        before = self.before.middle
        noise = self.SPREADS * self.level.residuals.spread
        if self.recent.middle <= before + max(noise, self.SHARE * abs(before)):
            return ""
        return (
            f"the loss rises: its median is {self.recent.middle:.4f} over the last {self.RECENT}"
            f" steps, and was {before:.4f} over the {self.BEFORE} before"
        )

    def state(self) -> dict[str, Any]:
        """Return both windows."""
        return {
            "recent": list(self.recent.values),
            "before": list(self.before.values),
            "level": self.level.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on with the windows of the resumed run."""
        self.recent.load(state["recent"])
        self.before.load(state["before"])
        self.level.load(state["level"])


class LossFlat(Detector):
    """A loss that falls no more: neither since the beginning, nor since a while ago.

    Losses are kept as medians of blocks of steps. When there are `MOST`, neighbours are joined, so
    the blocks always cover the run. The last quarter of them, at least `window` steps, is compared
    with as many before. A healthy loss falls about as a power of the steps, each counted by its
    learning rate, so the ratio of the two falls does not depend on the step. The loss is flat if it
    fell by less than `SHARE` of that, even at the upper bound of its noise. A loss whose noise
    hides its fall is never called flat.
    """

    name = "loss_flat"
    MOST = 128
    BLOCKS = 20
    """Blocks of a window at first."""
    SHARE = 0.25
    UPPER = 2.0
    """Standard errors of the upper bound of a fall."""
    CERTAIN = 5.0
    """Standard errors by which a loss must have fallen before."""
    UNTRAINED = 0.8
    """The share of the untrained loss above which a first loss is that of an untrained model."""
    LEAST_RATE = 0.1
    """The share of the learning rate before below which a loss may stop falling."""

    def __init__(self, window: int, untrained: float) -> None:
        """Compare windows of at least so many steps.

        Args:
            window: steps.
            untrained: the loss of a model that predicts all tokens alike, in nats.
        """
        self.window = window
        self.untrained = untrained
        self.size = max(1, window // self.BLOCKS)
        self.blocks: list[float] = []
        self.rates: list[float] = []
        """The mean learning rate of each block."""
        self.open: list[float] = []
        self.open_rate = 0.0
        self.text = ""

    def see(self, line: Line) -> str | None:
        """Add a loss, and compare when it ends a block."""
        loss = number(line, "loss")
        if loss is None or EVALUATED in line:
            return None
        self.open.append(loss)
        self.open_rate += number(line, "lr") or 0.0
        if len(self.open) == self.size:
            self.blocks.append(median(self.open))
            self.rates.append(self.open_rate / self.size)
            self.open.clear()
            self.open_rate = 0.0
            self.text = self._compared()
            # Twice as long blocks from here on: the memory of a long run stays the same.
            if len(self.blocks) == self.MOST:
                self.blocks = _joined(self.blocks)
                self.rates = _joined(self.rates)
                self.size *= 2
        return self.text

    def _compared(self) -> str:
        blocks = self.blocks
        count = max(-(-self.window // self.size), len(blocks) // 4)
        if len(blocks) < count:
            return ""
        now, noise = _fall(blocks[-count:])
        most = now + self.UPPER * noise
        steps = count * self.size
        first = blocks[0]
        if (
            first > self.UNTRAINED * self.untrained
            and min(blocks) > 0.98 * first
            and most < 0.02 * first
        ):
            return f"the loss has not fallen: it is {blocks[-1]:.4f}, and was {first:.4f} at first"
        # The first window holds the steep fall of the beginning, which no later one repeats.
        if len(blocks) < 3 * count:
            return ""
        # A decaying learning rate slows learning, which is no fault.
        before, doubt = _fall(blocks[-2 * count : -count])
        slower = sum(self.rates[-count:]) / max(sum(self.rates[-2 * count : -count]), 1e-30)
        expected = min(1.0, slower) * before
        is_flat = most < self.SHARE * expected and before > self.CERTAIN * doubt
        if not is_flat or slower < self.LEAST_RATE:
            return ""
        return (
            f"the loss is flat: it fell by {max(0.0, now):.4f} in the last {steps} steps, and by"
            f" {before:.4f} in the {steps} before"
        )

    def state(self) -> dict[str, Any]:
        """Return the blocks."""
        return {
            "size": self.size,
            "blocks": list(self.blocks),
            "rates": list(self.rates),
            "open": list(self.open),
            "open_rate": self.open_rate,
            "text": self.text,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on with the blocks of the resumed run."""
        for name, value in state.items():
            setattr(self, name, list(value) if isinstance(value, list) else value)


def _joined(values: list[float]) -> list[float]:
    """Return the means of neighbours."""
    pairs = zip(values[::2], values[1::2], strict=True)
    return [(one + other) / 2 for one, other in pairs]


def _fall(values: list[float]) -> tuple[float, float]:
    """Return the fall of a line through values from first to last, and its standard error."""
    count = len(values)
    if count < 3:
        return 0.0, math.inf
    centre = (count - 1) / 2
    mean = sum(values) / count
    squares = sum((place - centre) ** 2 for place in range(count))
    slope = sum((place - centre) * value for place, value in enumerate(values)) / squares
    rest = sum((value - mean - slope * (place - centre)) ** 2 for place, value in enumerate(values))
    error = math.sqrt(rest / (count - 2) / squares)
    return -slope * (count - 1), error * (count - 1)


class WorseEvaluation(Detector):
    """A validation loss far above the lowest one so far, or a second one in a row above it."""

    name = "worse_evaluation"
    FAR = 0.02
    NEAR = 0.005

    def __init__(self) -> None:
        self.best: float | None = None
        self.in_a_row = 0

    def see(self, line: Line) -> str | None:
        """Compare an evaluation with the best one."""
        loss = number(line, EVALUATED)
        # Rewards of answers that are sampled vary by more than losses of texts.
        if loss is None or JUDGED in line:
            return None
        if self.best is None or loss < self.best:
            self.best = loss
            self.in_a_row = 0
            return ""
        # A loss may be 0 at its lowest.
        above = (loss - self.best) / max(abs(self.best), 1e-9)
        self.in_a_row = self.in_a_row + 1 if above > self.NEAR else 0
        if above <= self.FAR and self.in_a_row < 2:
            return ""
        return f"the validation loss is {loss:.4f}, and was {self.best:.4f} at its lowest"

    def state(self) -> dict[str, Any]:
        """Return the best evaluation."""
        return {"best": self.best, "row": self.in_a_row}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on with the best evaluation of the resumed run."""
        self.best = state["best"]
        self.in_a_row = state["row"]


class LossScale(Detector):
    """A dynamic loss scale that cannot fall any further."""

    name = "loss_scale"

    def __init__(self, floor: float) -> None:
        self.floor = floor

    def see(self, line: Line) -> str | None:
        """Compare the loss scale with its floor."""
        scale = number(line, "loss_scale")
        if scale is None:
            return None
        if scale > self.floor:
            return ""
        return (
            f"the loss scale is {scale:g}, its floor (precision.min_loss_scale): gradients that"
            " overflow are skipped from now on"
        )
