"""The events of a run that a page shows: saves, resumes, restarts, alerts, spikes and skips, slow
ranks, samples of memory, and statistics of modules.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import fmean, median

from mtrain.events.log import (
    CHECKPOINT,
    END,
    MEMORY,
    OWN_TIME,
    RESTART,
    START,
    STRAGGLER,
    WARNING,
)
from mtrain.events.read import Event, events
from mtrain.report.folder import Record, curve, number

SAVE = "save"
RESUME = "resume"
ALERT = "alert"
SPIKE = "spike"
SKIP = "skipped update"
STATISTICS = "statistics"
FAILURE = "failure"
NORM = "norm"
LAYER = re.compile(r"\blayers\.(\d+)\.")
Rows = dict[str, list[tuple[int, float]]]
WINDOW = 64
"""Steps before a step whose losses are its usual ones."""
FEWEST = 16
DEVIATIONS = 8.0
LEAST = 0.02
"""A spike is above the usual loss by so many median deviations, and by this share of it."""
MOST_ROWS = 512
MOST_SAMPLES = 20_000
MOST_TEXT = 300
MOST_REPORTS = 100
"""Reports of the own times of ranks that are kept, the last ones."""


@dataclass(frozen=True)
class Mark:
    """A moment of a run."""

    step: int
    kind: str
    text: str = ""


@dataclass(frozen=True)
class Slow:
    """A rank that was slower than others of its pipeline stage."""

    step: int
    rank: int
    machine: str
    own_s: float
    usual_s: float


@dataclass
class Story:
    """The events of a run."""

    marks: list[Mark] = field(default_factory=list)
    slow: list[Slow] = field(default_factory=list)
    statistics: dict[tuple[str, str], Rows] = field(default_factory=dict)
    """Kind and column -> row -> the values at steps."""
    samples: int = 0
    """Events of statistics that were read."""
    memory: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """Key of a sample -> steps, and the most that a rank had then."""
    fullest: dict[str, int] = field(default_factory=dict)
    """Key of a sample -> the rank that had the most in the last one."""
    own_s: list[list[float]] = field(default_factory=list)
    """The own time of a step of each rank, in the reports that all ranks gave."""
    loads: list[float] = field(default_factory=list)
    """The load of the most loaded expert-parallel rank of each layer, over that of an equal one,
    the mean of the layers: one number for each step that was described.
    """

    def of(self, kind: str) -> list[Mark]:
        """Return the marks of a kind."""
        return [mark for mark in self.marks if mark.kind == kind]


def tell(record: Record) -> Story:
    """Read the events of a run, as far as they can be read."""
    story = Story()
    with suppress(OSError):
        for event in events(record.home):
            _add(story, event)
    story.marks += spikes(record)
    story.marks += [
        Mark(step, SKIP, "the update was skipped")
        for step, line in record.steps.items()
        if line.get("skipped") is True
    ]
    story.marks.sort(key=lambda mark: mark.step)
    return story


def _add(story: Story, event: Event) -> None:
    step = event["step"]
    kind = event["kind"]
    if number(step) is None:
        return
    if kind == STATISTICS:
        _describe(story, event)
    elif kind == MEMORY:
        _remember(story, event)
    elif kind == OWN_TIME:
        found = event.get("own_s")
        own = [number(value) for value in found] if isinstance(found, list) else []
        known = [value for value in own if value is not None]
        if own and len(known) == len(own):
            story.own_s = [*story.own_s[1 - MOST_REPORTS :], known]
    elif kind == CHECKPOINT:
        story.marks.append(Mark(step, SAVE, _text(event.get("name"))))
    elif kind == START and (step or event.get("attempt") != 1):
        story.marks.append(Mark(step, RESUME, f"attempt {_text(event.get('attempt'))}"))
    elif kind == RESTART:
        facts = event.get("facts")
        error = facts.get("error") if isinstance(facts, dict) else ""
        story.marks.append(Mark(step, RESTART, _text(error)))
    elif kind == ALERT:
        text = f"{_text(event.get('name'))}: {_text(event.get('text'))}"
        story.marks.append(Mark(step, ALERT, text))
    elif kind == WARNING:
        story.marks.append(Mark(step, WARNING, _text(event.get("text"))))
    elif kind == STRAGGLER:
        own_s = number(event.get("own_s"))
        usual = number(event.get("usual_s"))
        rank = number(event.get("rank"))
        if own_s is not None and usual is not None and rank is not None:
            story.slow.append(Slow(step, int(rank), _text(event.get("machine")), own_s, usual))
    elif kind == END and event.get("how") == "failed":
        story.marks.append(Mark(step, FAILURE, _text(event.get("why"))))


def _text(value: object) -> str:
    return "" if value is None else str(value)[:MOST_TEXT]


def _remember(story: Story, event: Event) -> None:
    """Keep the most that a rank has of each kind of memory."""
    by_rank = event.get("by_rank")
    for key, values in by_rank.items() if isinstance(by_rank, dict) else ():
        sizes = [number(value) for value in values] if isinstance(values, list) else []
        most = max((size for size in sizes if size is not None), default=None)
        if most is not None:
            points = story.memory.setdefault(_text(key), [])
            # Of steps that an attempt made again, its samples count.
            while points and points[-1][0] >= event["step"]:
                points.pop()
            points.append((event["step"], most))
            story.fullest[_text(key)] = sizes.index(most)


def _load(loads: object) -> float | None:
    """Return the mean over layers of the most loaded rank's share over an equal one."""
    if not isinstance(loads, dict):
        return None
    found = []
    for layer in loads.values():
        ranks = [number(load) or 0.0 for load in layer] if isinstance(layer, list) else []
        if len(ranks) > 1 and sum(ranks) > 0:
            found.append(max(ranks) * len(ranks) / sum(ranks))
    return fmean(found) if found else None


def _describe(story: Story, event: Event) -> None:
    """Keep the first column of an event of statistics, and of columns beyond the usual four the
    last.
    """
    columns = event.get("columns")
    rows = event.get("rows")
    if not isinstance(columns, list) or not isinstance(rows, dict) or not columns:
        return
    if story.samples >= MOST_SAMPLES:
        return
    story.samples += 1
    load = _load(event.get("rank_loads"))
    if load is not None:
        story.loads.append(load)
    kept = {0} | ({len(columns) - 1} if len(columns) > 4 else set())
    for place in kept:
        table = story.statistics.setdefault((_text(event.get("of")), _text(columns[place])), {})
        for name, values in rows.items():
            if not isinstance(values, list) or len(values) <= place:
                continue
            value = number(values[place])
            if value is not None and (name in table or len(table) < MOST_ROWS):
                table.setdefault(name, []).append((event["step"], value))


def by_layer(table: Rows, column: str) -> Rows:
    """Return a row for each layer, and the rows outside of layers.

    The norm of a layer is the root of the sum of squares, and of other columns the largest counts.
    """
    parts: dict[str, dict[int, list[float]]] = {}
    for name, points in table.items():
        found = LAYER.search(name)
        steps = parts.setdefault(f"layer {found[1]}" if found else name, {})
        for step, value in points:
            steps.setdefault(step, []).append(value)
    join: Callable[..., float] = math.hypot if column == NORM else _largest
    return {
        name: [(step, join(*values)) for step, values in steps.items()]
        for name, steps in parts.items()
    }


def _largest(*values: float) -> float:
    return max(values, key=abs)


def spikes(record: Record) -> Iterator[Mark]:
    """Yield the steps whose loss is far above those of the steps before, or not finite."""
    usual: list[float] = []
    for step, line in record.steps.items():
        loss = number(line.get("loss"))
        if loss is None:
            yield Mark(step, SPIKE, "the loss is not finite")
            continue
        if len(usual) >= FEWEST:
            middle = median(usual)
            deviation = median(abs(value - middle) for value in usual)
            if loss - middle > max(DEVIATIONS * deviation, LEAST * abs(middle)):
                yield Mark(step, SPIKE, f"loss {loss:.4g}, usually {middle:.4g}")
        usual = [*usual[1 - WINDOW :], loss]


def slowest(story: Story) -> Slow | None:
    """Return the slowest rank; None: no report named one."""
    return max(story.slow, key=lambda slow: slow.own_s / max(slow.usual_s, 1e-9), default=None)


def totals(record: Record, key: str) -> Mapping[int, float]:
    """Return the running sum of a key over the steps."""
    total = 0.0
    sums: dict[int, float] = {}
    for step, value in curve(record.steps, key):
        total += value
        sums[step] = total
    return sums
