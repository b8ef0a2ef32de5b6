"""The promises R1 to R8, and the numbers by which tests of the fault matrix hold them.

A test hands what it measured to `measured`, with the fixture `record_property` of pytest, and
`python -m tests.faults` adds up what the tests of one run handed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.patience import slowness

Record = Callable[[str, object], None]
"""The fixture `record_property`."""


@dataclass(frozen=True)
class Measure:
    """A number that tests measure."""

    promise: str
    text: str
    limit: float | None = None
    """The most, or with `at_least` the least, that is promised; None: it is only counted."""
    unit: str = ""
    at_least: bool = False
    timed: bool = False
    """True if a machine that does other work may take longer in proportion."""

    def of(self, values: Iterable[float]) -> float:
        """Return the worst value; of a number that is only counted, the sum."""
        if self.limit is None:
            return sum(values)
        return min(values) if self.at_least else max(values)

    def holds(self, value: float) -> bool:
        """Return whether a value is within the limit."""
        if self.limit is None:
            return True
        if self.at_least:
            return value >= self.limit
        return value <= self.limit * (slowness() if self.timed else 1)


PROMISES = {
    "R1": "a resumed run is bitwise that of an undisturbed one",
    "R2": "in another layout, weights stay bitwise and losses agree",
    "R3": "no damaged file is loaded without a word",
    "R4": "a committed checkpoint loads whenever a run is killed",
    "R5": "faults are noticed in time, and the first rank that failed is named",
    "R6": "a stop saves, and a second one ends the run at once",
    "R7": "a restart is quick, and a crash loop ends",
    "R8": "bad input is refused before anything starts",
}
MEASURES = {
    "states": Measure("R1", "states compared with an undisturbed run"),
    "differing": Measure("R1", "hashes and steps that differ", 0),
    "reshards": Measure("R2", "resumes in another layout, all weights and moments bitwise equal"),
    "loss_apart": Measure("R2", "relative difference of a loss", 1e-5),
    "mutations": Measure("R3", "damaged files"),
    "silent": Measure("R3", "of them loaded without a word", 0),
    "kill_points": Measure("R4", "kill points"),
    "intervals_lost": Measure("R4", "intervals lost", 1),
    "kills_named": Measure("R5", "failures whose first rank was named"),
    "misnamed": Measure("R5", "failures that name another rank", 0),
    "dead_rank_s": Measure("R5", "from the death of a rank to the end", 2.0, "s", timed=True),
    "hang_s": Measure("R5", "from the time limit to the end of a hang", 5.0, "s", timed=True),
    "stopped_s": Measure("R5", "from the limit to the end of SIGSTOP", 5.0, "s", timed=True),
    "writer_s": Measure("R5", "from the fault of a writer to the error", 5.0, "s", timed=True),
    "orphans_s": Measure(
        "R5", "until no process of a killed launcher is left", 10.0, "s", timed=True
    ),
    "stop_s": Measure("R6", "from SIGTERM to exit 75, saved", 5.0, "s", timed=True),
    "second_stop_s": Measure("R6", "from a second SIGTERM to the end", 2.0, "s", timed=True),
    "first_step_s": Measure("R7", "from a failure to the next step", 10.0, "s", timed=True),
    "futile": Measure("R7", "restarts of a crash loop", 3),
    "goodput": Measure("R7", "goodput with one kill per minute", 0.9, at_least=True),
    "refusal_s": Measure("R8", "until bad input is refused", 2.0, "s", timed=True),
}


def measured(record: Record, **values: float) -> None:
    """Hand over numbers; each keyword is a key of `MEASURES`."""
    for key, value in values.items():
        assert key in MEASURES, key
        record(key, f"{value:g}")


def differing(found: Mapping[str, Any], expected: Mapping[str, Any]) -> int:
    """Return the number of values that differ between two results, which may hold further
    results.
    """
    count = 0
    for key in found.keys() | expected.keys():
        one = found.get(key)
        other = expected.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            count += differing(one, other)
        else:
            count += one != other
    return count


def report(values: Mapping[str, list[float]], *, missing: bool = True) -> tuple[list[str], bool]:
    """Return the lines of all promises, and whether every measured one was held.

    Without `missing`, only what was measured has lines.
    """
    lines = []
    held = True
    for promise, text in PROMISES.items():
        keys = [key for key, measure in MEASURES.items() if measure.promise == promise]
        own = [
            _line(MEASURES[key], values.get(key, [])) for key in keys if missing or key in values
        ]
        if own:
            lines += [f"{promise}  {text}", *(line for line, _ in own)]
        held &= all(fine for _, fine in own)
    return lines, held


def _line(measure: Measure, values: list[float]) -> tuple[str, bool]:
    if not values:
        return f"    {measure.text}: not measured in this run", True
    value = measure.of(values)
    shown = f"    {measure.text}: {value:.4g}"
    shown += f" {measure.unit}" if measure.unit else ""
    if measure.limit is None:
        return shown, True
    bound = "at least" if measure.at_least else "at most"
    shown += f" ({bound} {measure.limit:g}; {len(values)} measured)"
    fine = measure.holds(value)
    return (shown if fine else f"{shown} BROKEN"), fine
