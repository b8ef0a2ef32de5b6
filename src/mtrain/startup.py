"""Seconds from the command to the first step, by part, over all processes of a start.

The clock is the system's monotonic one, which all processes of a machine share. A launcher passes
its parts on to the ranks in an environment variable.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from mtrain import strict_json, units

VARIABLE = "MTRAIN_STARTUP"
"""The parts so far, as JSON: the clock at the beginning, then the name and the end of each part."""
SUBMITTED = "MTRAIN_SUBMITTED"
"""The time at which `submit` gave the job to its scheduler, seconds of the epoch."""
LEAST_S = 0.05
"""Parts shorter than this are left out of the line, and not of the file."""

COMMAND = "command line"
COMPOSITION = "composition"
DATA = "data"
LIBRARIES = "imports"
FOLDER = "run folder"
PROCESS = "process start"
JOINING = "joining"
BUILDING = "building"
LOADING = "loading"
STEP = "first step"


class Startup:
    """The parts of a start: each ends where the next one begins."""

    def __init__(self, begun: float, ends: list[tuple[str, float]] | None = None) -> None:
        """Record the start; `begun` and the ends of parts are monotonic seconds."""
        self.begun = begun
        self.ends = [] if ends is None else ends

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Startup | None:
        """Return the start that a launcher passed on, if one did."""
        try:
            begun, ends = json.loads(environment[VARIABLE])
            return cls(float(begun), [(str(name), float(end)) for name, end in ends])
        except (KeyError, ValueError, TypeError):
            return None

    def mark(self, name: str) -> None:
        """End a part now."""
        self.ends.append((name, time.monotonic()))

    def passed_on(self) -> str:
        """Return the value of `VARIABLE` for a process that continues this start."""
        return strict_json.dumps(
            [round(self.begun, 4), [[n, round(end, 4)] for n, end in self.ends]]
        )

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part, in the order in which the parts first ended."""
        found: dict[str, float] = {}
        last = self.begun
        for name, end in self.ends:
            found[name] = found.get(name, 0.0) + end - last
            last = end
        return found

    def total(self) -> float:
        """Return the seconds from the beginning to the end of the last part."""
        return self.ends[-1][1] - self.begun if self.ends else 0.0

    def line(self, compiled: int, ahead: int = 0) -> str:
        """Return the parts as a line of text, without those below `LEAST_S`; `compiled` counts
        kernels, and `ahead` those that other processes compiled meanwhile.
        """
        parts = self.seconds().items()
        shown = [f"{name} {units.seconds(spent)}" for name, spent in parts if spent >= LEAST_S]
        more = f", with {compiled} kernels compiled" if compiled else ""
        more += f", {ahead} kernels compiled ahead" if ahead else ""
        return f"start-up: {units.seconds(self.total())}: {', '.join(shown)}{more}"


class Compilations:
    """The kernels that Triton compiles or loads in this process, and the seconds that it takes."""

    def __init__(self) -> None:
        self.compiled = 0
        self.cached = 0
        self.seconds = 0.0

    def listen(self) -> None:
        """Count from now on, if Triton is imported and can report."""
        knobs = sys.modules.get("triton.knobs")
        if knobs is None or not hasattr(knobs.compilation, "listener"):
            return
        before = knobs.compilation.listener

        def heard(*, times: Any, cache_hit: bool, **others: Any) -> None:
            self.compiled += not cache_hit
            self.cached += cache_hit
            self.seconds += times.total / 1e6
            if before is not None:
                before(times=times, cache_hit=cache_hit, **others)

        knobs.compilation.listener = heard


def process_began() -> float:
    """Return the monotonic clock at this process's start, to 0.01 s; now if unknown."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        # Field 22 of the file, in ticks since the machine started; the name ends with field 2.
        since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        asleep = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
        return since_boot - asleep
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic()


_current: Startup | None = None


def current() -> Startup:
    """Return the start of this process's run; one that begins now, if none has begun."""
    global _current
    if _current is None:
        _current = Startup(time.monotonic())
    return _current


def begin() -> None:
    """Begin with this process, which is that of a command."""
    global _current
    _current = Startup(process_began())


def forget() -> None:
    """End the start of a run: the next run of this process begins a new one."""
    global _current
    _current = None


def continued() -> bool:
    """Continue the start that a launcher passed on in the environment; return whether one did."""
    global _current
    passed = Startup.of(os.environ)
    if passed is not None:
        _current = passed
    return passed is not None


def mark(name: str) -> None:
    """End a part of the start of this process's run now."""
    current().mark(name)
