"""Charts as SVG: lines over steps, heat maps, bars of many ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mtrain.cli.html import PAGE, Svg, hue, legend, plain
from mtrain.units import short

Points = Sequence[tuple[float, float]]

LEFT = 62.0
WIDE = PAGE - LEFT - 12
HIGH = 190.0
TOP = 12.0
TICKS = 5
TICK = 10.0
TICK_COLOUR = "#228866"
BUCKETS = 480
"""Columns of a curve: of more points, each column shows the lowest and the highest."""
TINY = 1e-30
"""Values below it are 0 where a scale is logarithmic."""
ROWS = 48
COLUMNS = 120
"""Cells of a heat map, at most."""
CELL = 14.0
SHADES = ("#2b3a67", "#33578f", "#2f7aa8", "#2f9aa0", "#5bb583", "#a5cb62", "#eed34f", "#f4953b")
NAMES = 210.0
"""The width of the names of rows, and how many letters fit into it."""
LETTERS = 34


@dataclass(frozen=True)
class Flag:
    """A moment that a chart marks."""

    at: float
    colour: str
    text: str


@dataclass(frozen=True)
class Axes:
    """The ranges of a chart, and the words below it."""

    below: str
    logarithmic: bool = False
    from_zero: bool = False
    flags: Sequence[Flag] = ()
    ticks: Sequence[float] = ()
    """Moments that are marked only at the lower edge, because there may be many."""


def thinned(points: Points, buckets: int = BUCKETS) -> list[tuple[float, float]]:
    """Return the points, or of many the lowest and the highest of each bucket of the range."""
    if len(points) <= 2 * buckets:
        return list(points)
    first = points[0][0]
    width = (points[-1][0] - first) / buckets or 1.0
    kept: list[tuple[float, float]] = []
    bucket: list[tuple[float, float]] = []
    number = 0
    for point in points:
        here = min(buckets - 1, int((point[0] - first) / width))
        if here != number:
            kept += _extremes(bucket)
            bucket = []
            number = here
        bucket.append(point)
    return [*kept, *_extremes(bucket)]


def _extremes(bucket: Points) -> list[tuple[float, float]]:
    if not bucket:
        return []
    low = min(bucket, key=lambda point: point[1])
    high = max(bucket, key=lambda point: point[1])
    return sorted({low, high})


def chart(curves: Mapping[str, Points], axes: Axes) -> str:
    """Return a chart of curves with its legend; empty without a point."""
    drawn = {name: points for name, points in curves.items() if points}
    if axes.logarithmic:
        drawn = {name: [p for p in points if p[1] > TINY] for name, points in drawn.items()}
        drawn = {name: points for name, points in drawn.items() if points}
    if not drawn:
        return ""
    xs = [point[0] for points in drawn.values() for point in (points[0], points[-1])]
    ys = [point[1] for points in drawn.values() for point in points]
    scale = Scale(min(xs), max(xs), *_range(min(ys), max(ys), axes), axes.logarithmic)
    svg = Svg(PAGE, TOP + HIGH + 36)
    for value, words in ticks(scale.low, scale.high, logarithmic=axes.logarithmic):
        y = scale.y(value)
        svg.line(LEFT, y, LEFT + WIDE, y, "#8883")
        svg.text(0, y + 4, words)
    for value, words in ticks(scale.first, scale.last):
        svg.text(scale.x(value), TOP + HIGH + 16, words, middle=True)
    svg.text(LEFT + WIDE / 2, TOP + HIGH + 32, axes.below, middle=True)
    low = TOP + HIGH - TICK
    svg.boxes([(scale.x(at), low) for at in axes.ticks], 1.5, TICK, TICK_COLOUR)
    for flag in axes.flags:
        x = scale.x(min(scale.last, max(scale.first, flag.at)))
        svg.box(x - 0.75, TOP, 1.5, HIGH, flag.colour, plain(flag.text))
    for number, points in enumerate(drawn.values()):
        placed = [(scale.x(x), scale.y(y)) for x, y in thinned(points)]
        svg.curve(placed, hue(number, len(drawn)))
    names = [(plain(name), hue(n, len(drawn))) for n, name in enumerate(drawn)]
    return legend(names) + svg.markup()


@dataclass(frozen=True)
class Scale:
    """The place of values in a chart."""

    first: float
    last: float
    low: float
    high: float
    logarithmic: bool

    def x(self, value: float) -> float:
        """Return the place of a step."""
        return LEFT + WIDE * (value - self.first) / ((self.last - self.first) or 1.0)

    def y(self, value: float) -> float:
        """Return the place of a value."""
        if self.logarithmic:
            part = math.log(value / self.low) / (math.log(self.high / self.low) or 1.0)
        else:
            part = (value - self.low) / ((self.high - self.low) or 1.0)
        return TOP + HIGH * (1 - min(1.0, max(0.0, part)))


def _range(low: float, high: float, axes: Axes) -> tuple[float, float]:
    if axes.logarithmic:
        return low, high if high > low else 2 * low
    if axes.from_zero:
        low = min(0.0, low)
    room = 0.04 * (high - low) or abs(high) or 1.0
    return (low if axes.from_zero else low - room), high + room


def ticks(low: float, high: float, *, logarithmic: bool = False) -> Iterator[tuple[float, str]]:
    """Yield round numbers between two values, with their words."""
    if logarithmic and high >= 10 * low:
        powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
        for power in powers[:: max(1, len(powers) // TICKS)]:
            yield 10.0**power, words_of(10.0**power)
        return
    if not high > low:
        yield low, words_of(low)
        return
    rough = (high - low) / TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next((digit * unit for digit in (1, 2, 5) if digit * unit >= rough), 10 * unit)
    for number in range(math.ceil(low / step), math.floor(high / step) + 1):
        yield number * step, words_of(number * step)


def words_of(value: float) -> str:
    """Return a number in few characters."""
    if value and not 1e-2 <= abs(value) < 1e15:
        return f"{value:.3g}"
    return f"{value:.4g}" if abs(value) < 1e4 else short(value)


def heat(rows: Mapping[str, Points]) -> str:
    """Return a heat map, a row for each name, by the logarithm of values; empty without values.

    Of many steps, a cell shows the largest value in its range.
    """
    named = dict(list(rows.items())[:ROWS])
    steps = sorted({step for points in named.values() for step, _ in points})
    values = [abs(value) for points in named.values() for _, value in points if abs(value) > TINY]
    if not values:
        return ""
    low = min(values)
    high = max(values)
    columns = min(COLUMNS, len(steps))
    place = {step: number * columns // len(steps) for number, step in enumerate(steps)}
    wide = (PAGE - NAMES) / columns
    cells: dict[int, list[tuple[float, float]]] = {}
    svg = Svg(PAGE, TOP + CELL * len(named) + 22)
    for number, (name, points) in enumerate(named.items()):
        largest: dict[int, float] = {}
        for step, value in points:
            column = place[step]
            largest[column] = max(largest.get(column, 0.0), abs(value))
        for column, value in largest.items():
            shade = _shade(value, low, high)
            cells.setdefault(shade, []).append((NAMES + column * wide, TOP + number * CELL))
        svg.text(0, TOP + number * CELL + 11, plain(_within_model(name))[-LETTERS:])
    for shade, corners in sorted(cells.items()):
        svg.boxes(corners, wide, CELL, SHADES[shade])
    svg.text(NAMES, TOP + CELL * len(named) + 16, f"step {steps[0]}")
    svg.text(PAGE - 80, TOP + CELL * len(named) + 16, f"step {steps[-1]}")
    edges = [low * (high / low) ** (n / len(SHADES)) for n in range(len(SHADES))]
    words = [words_of(edge) for edge in edges]
    if len(set(words)) < len(words):
        words = [f"{edge:.8g}" for edge in edges]
    names = [(f"from {word}", SHADES[n]) for n, word in enumerate(words)]
    return legend(names if high > low else [(words_of(low), SHADES[0])]) + svg.markup()


def _within_model(name: str) -> str:
    """Return the name of a weight or module without the parts that most names have."""
    short_name = name.removesuffix(".weight").removeprefix("decoder.")
    return short_name.removeprefix("layers.")


def _shade(value: float, low: float, high: float) -> int:
    if value <= low or high <= low:
        return 0
    part = math.log(value / low) / math.log(high / low)
    return min(len(SHADES) - 1, int(part * len(SHADES)))


def bars(values: Sequence[float | None], marks: Sequence[float], say: str) -> str:
    """Return a bar for each rank, and a line at the planned value of each; empty without values.

    `marks` has as many values as there are ranks, or none; `say` names both.
    """
    known = [value for value in values if value is not None]
    if not known:
        return ""
    most = max([*known, *marks]) * 1.05 or 1.0
    svg = Svg(PAGE, TOP + HIGH + 24)
    wide = WIDE / len(values)
    cells = [
        (LEFT + n * wide, TOP + HIGH * (1 - value / most), HIGH * value / most)
        for n, value in enumerate(values)
        if value is not None
    ]
    svg.columns(cells, max(0.5, wide * 0.9), hue(0, 2))
    for number, mark in enumerate(marks):
        y = TOP + HIGH * (1 - mark / most)
        begins = number == 0 or marks[number - 1] != mark
        if begins:
            end = next((n for n in range(number, len(marks)) if marks[n] != mark), len(marks))
            svg.line(LEFT + number * wide, y, LEFT + end * wide, y, "#d1242f")
    svg.text(LEFT, TOP + HIGH + 16, "rank 0")
    svg.text(LEFT + WIDE - 60, TOP + HIGH + 16, f"rank {len(values) - 1}")
    svg.text(LEFT + WIDE / 2, TOP + HIGH + 16, say, middle=True)
    return svg.markup()
