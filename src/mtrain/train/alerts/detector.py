"""The interface of detectors, and the hysteresis that keeps their alerts few."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

Line = Mapping[str, Any]
"""The numbers of a step, an evaluation or a memory sample, named as in `metrics.jsonl`."""
REST = 100
"""Lines without its condition after which an alert may come a second time."""
LONGEST_REST = 1600


@dataclass(frozen=True)
class Alert:
    """Something that a user should look at."""

    name: str
    step: int
    text: str


class Detector:
    """A condition on numbers of a run.

    Detectors are deterministic functions of the lines that they see, and use neither torch nor the
    clock.
    """

    name = ""

    def see(self, line: Line) -> str | None:
        """Return the condition in words if it holds after a line, "" if it does not; None: the line
        has nothing that this detector reads.
        """
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs, as JSON values."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`."""


@dataclass
class Gate:
    """The hysteresis of one detector.

    An alert comes when its condition begins to hold, and again only after the condition was absent
    for a while, which doubles with each alert.
    """

    alerts: int = 0
    absent: int = 0
    """Lines without the condition since it last held."""
    shut: bool = False
    """True from an alert until the condition was absent for long enough."""

    def passes(self, holds: bool) -> bool:
        """Return whether to raise an alert after one more line."""
        if not holds:
            self.absent += 1
            if self.absent >= min(REST << max(0, self.alerts - 1), LONGEST_REST):
                self.shut = False
            return False
        self.absent = 0
        if self.shut:
            return False
        self.shut = True
        self.alerts += 1
        return True


class Detectors:
    """The detectors of a run, each behind its gate."""

    def __init__(self, detectors: Sequence[Detector]) -> None:
        self.detectors = tuple(detectors)
        self.gates = {detector.name: Gate() for detector in detectors}

    def see(self, step: int, line: Line) -> list[Alert]:
        """Return the alerts that a line raises."""
        found = []
        for detector in self.detectors:
            text = detector.see(line)
            if text is not None and self.gates[detector.name].passes(bool(text)):
                found.append(Alert(detector.name, step, text))
        return found

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs, as JSON values.

        Gates without an alert are left out: those of times would differ between equal runs.
        """
        found: dict[str, Any] = {}
        for detector in self.detectors:
            gate = self.gates[detector.name]
            kept: dict[str, Any] = {}
            if gate.alerts:
                kept["gate"] = [gate.alerts, gate.absent, gate.shut]
            if state := detector.state():
                kept["state"] = state
            if kept:
                found[detector.name] = kept
        return found

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`; detectors that it lacks begin afresh."""
        for detector in self.detectors:
            if detector.name in state:
                saved = state[detector.name]
                self.gates[detector.name] = Gate(*saved.get("gate", ()))
                if "state" in saved:
                    detector.load(saved["state"])


def number(line: Line, key: str) -> float | None:
    """Return a finite number of a line; None if there is none."""
    value = line.get(key)
    if isinstance(value, int | float) and isfinite(value):
        return float(value)
    return None
