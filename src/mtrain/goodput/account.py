"""The account of a run's life: each second, from the first attempt to the last, has one cause.

Within an attempt the monotonic clock counts. Between two attempts it counts if they ran in the same
boot of one machine, and otherwise the wall clock, whose difference is never taken as negative. The
step that a failed attempt did not finish is charged when it is lost, as `down`; finished steps that
are lost are charged when they are run again, as `recomputing`. No second is charged twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mtrain import strict_json
from mtrain.config.compose.paths import program
from mtrain.errors import ConfigError, CorruptData
from mtrain.goodput.log import (
    BEGIN,
    END,
    FAILED,
    FINISHED,
    FORMAT,
    LAUNCHER_END,
    LOG,
    SIGN,
    STOPPED,
)
from mtrain.goodput.meter import CAUSES, DOWN, ENDING, LOADING, QUEUED, STARTING, STEPPING
from mtrain.units import number_of, seconds

FILE = "goodput.json"
RUNNING = "running"
KILLED = "killed"
"""The end of an attempt that left no word: it was killed, or its machine was lost."""
KINDS = (BEGIN, SIGN, END, LAUNCHER_END)
ENDS = (FINISHED, STOPPED, FAILED)
LATEST = 1e11
"""Numbers of seconds from here on are damage."""
LEAST = 0.0005
"""The line leaves out causes of a smaller share."""
LONGEST = 1 << 16
"""The most bytes of a line; longer ones are damage."""


@dataclass
class Attempt:
    """One attempt of a run."""

    begun: float
    """Wall clock, seconds of the epoch."""
    boot: str
    clock: float
    """Monotonic clock at the beginning, in that boot."""
    last: float = 0.0
    """Wall clock at the last sign of life."""
    elapsed_s: float = 0.0
    """Seconds from the beginning to the last sign of life."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The first line: machine, and times of the scheduler's job."""
    sign: Mapping[str, Any] = field(default_factory=dict)
    """The last sign of life of rank 0."""
    end: str = ""
    """One of `ENDS`; empty: there is no word of its end."""
    why: str = ""
    launcher_s: float = 0.0
    """Seconds from the beginning to the end that the launcher saw; 0: it saw none."""
    before: dict[str, float] = field(default_factory=dict)
    """Seconds by cause between the attempt before and this one."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of this attempt by cause."""

    @property
    def has_loaded(self) -> bool:
        """Return whether it came to where its steps begin."""
        return self.sign.get("first") is not None

    def number(self, key: str) -> int:
        """Return a count of the last sign of life, 0 where there is none."""
        value = self.sign.get(key, 0)
        return value if isinstance(value, int) and value >= 0 else 0


@dataclass(frozen=True)
class Account:
    """All attempts of a run, and the causes of their seconds."""

    home: Path
    attempts: list[Attempt]

    @property
    def seconds(self) -> dict[str, float]:
        """Return the seconds of each cause."""
        parts = [part for one in self.attempts for part in (one.before, one.seconds)]
        return {cause: sum(part.get(cause, 0.0) for part in parts) for cause in CAUSES}

    @property
    def wall_s(self) -> float:
        """Return the seconds of the run's life."""
        return sum(self.seconds.values())

    @property
    def step(self) -> int:
        """Return the furthest step that an attempt finished."""
        return max(one.number("step") for one in self.attempts)

    @property
    def first(self) -> int:
        """Return the step that the first attempt of the log continued from."""
        return next((one.number("first") for one in self.attempts if one.has_loaded), 0)

    @property
    def goodput(self) -> float:
        """Return the share of `STEPPING`."""
        return self.seconds[STEPPING] / self.wall_s if self.wall_s > 0 else 0.0

    def report(self) -> dict[str, Any]:
        """Return the account as data."""
        return {
            "format": FORMAT,
            "run": str(self.home),
            "state": self.attempts[-1].end,
            "goodput": round(self.goodput, 6),
            "wall_s": round(self.wall_s, 3),
            "seconds": _rounded(self.seconds),
            "step": self.step,
            "steps": sum(one.number("steps") for one in self.attempts),
            "steps_again": sum(one.number("again") for one in self.attempts),
            "first_step": self.first,
            "attempts": [_row(one) for one in self.attempts],
        }

    def line(self) -> str:
        """Return the account in one line."""
        others = sorted(
            ((spent, cause) for cause, spent in self.seconds.items() if cause != STEPPING),
            reverse=True,
        )
        least = LEAST * self.wall_s
        shares = [
            f"{cause} {percent(spent / self.wall_s)}" for spent, cause in others if spent > least
        ]
        lasted = f"{seconds(self.wall_s)} in {number_of(len(self.attempts), 'attempt')}"
        return f"goodput {percent(self.goodput)} of {lasted}; {', '.join(shares)}".rstrip("; ")


def furthest(home: Path) -> int:
    """Return the last step that an attempt in a run folder finished, 0 without a log."""
    found = attempts_of(home / LOG)
    return max((one.number("step") for one in found), default=0)


def account(home: Path, *, alive: bool = False) -> Account:
    """Return the account of a run folder; `alive`: a process owns the folder, so the last attempt
    without an end still runs.

    Raises:
        ConfigError: the folder has no log.
        CorruptData: no line of the log can be read.
    """
    path = home / LOG
    if not path.is_file():
        rule = f"{home} has no {LOG}"
        fix = f"{program()} resume {home}, which begins one"
        raise ConfigError.of("MT460", "", None, rule, fix)
    found = attempts_of(path)
    if not found:
        raise CorruptData(f"{path}: no line of it can be read")
    for number, one in enumerate(found):
        one.end = one.end or (RUNNING if alive and number + 1 == len(found) else KILLED)
        one.seconds = _within(one)
        one.before = _between(found[number - 1] if number else None, one)
    return Account(home, found)


def write(home: Path) -> Account | None:
    """Write the account of a run folder after its last attempt; None without a readable log."""
    try:
        found = account(home)
        draft = home / f".{FILE}"
        draft.write_text(strict_json.dumps(found.report(), indent=1) + "\n")
        draft.replace(home / FILE)
    except (ConfigError, CorruptData, OSError):  # the run is worth more than its account
        return None
    return found


def attempts_of(path: Path) -> list[Attempt]:
    """Return the attempts of a log in the order in which they began, without damaged lines.

    A line of an attempt that comes after the beginning of the next one is left out: the process of
    a lost attempt may take its time to end.
    """
    found: dict[str, Attempt] = {}
    for line in _lines(path):
        name = line["attempt"]
        if name not in found:
            found[name] = Attempt(line["begun"], line["boot"], line["clock"], facts=line)
        elif name != next(reversed(found)):
            continue
        _add(found[name], line)
    return list(found.values())


def _add(attempt: Attempt, line: Mapping[str, Any]) -> None:
    if line["elapsed_s"] >= attempt.elapsed_s:
        attempt.elapsed_s = line["elapsed_s"]
        attempt.last = line["at"]
    if line["kind"] == LAUNCHER_END:
        attempt.launcher_s = line["elapsed_s"]
    elif line["elapsed_s"] >= attempt.sign.get("elapsed_s", 0.0):
        attempt.sign = line
    if line["kind"] in (END, LAUNCHER_END):
        # Of a failure, rank 0 knows its own error; the launcher names the rank that failed first.
        attempt.end = line["end"]
        attempt.why = line.get("why") or ""


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole lines of a log."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for text in iter(lambda: file.readline(LONGEST), b""):
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if isinstance(line, dict) and _is_whole(line):
                yield line


def _is_whole(line: Mapping[str, Any]) -> bool:
    if line.get("format") != FORMAT or line.get("kind") not in KINDS:
        return False
    if not isinstance(line.get("attempt"), str) or not isinstance(line.get("boot"), str):
        return False
    if not all(_is_time(line.get(key)) for key in ("begun", "clock", "at", "elapsed_s")):
        return False
    if line["kind"] in (END, LAUNCHER_END) and line.get("end") not in ENDS:
        return False
    if line["kind"] == LAUNCHER_END:
        return True
    seconds = line.get("seconds")
    return (
        isinstance(seconds, dict)
        and all(cause in CAUSES and _is_time(spent) for cause, spent in seconds.items())
        and _is_time(line.get("open_s"))
        and line.get("open_cause") in CAUSES
    )


def _is_time(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and 0 <= value < LATEST


def _within(attempt: Attempt) -> dict[str, float]:
    """Return the seconds of an attempt by cause."""
    sign = attempt.sign
    seconds = {cause: float(spent) for cause, spent in sign.get("seconds", {}).items()}
    open_s = float(sign.get("open_s", 0.0))
    if open_s:
        cause = sign["open_cause"] if attempt.end == RUNNING else DOWN
        seconds[cause] = seconds.get(cause, 0.0) + open_s
    # The launcher sees the end of the last rank after rank 0 wrote its last line.
    rest = attempt.launcher_s - (sign["elapsed_s"] if sign else 0.0)
    if rest > 0:
        cause = ENDING
        if attempt.end == FAILED:
            cause = DOWN if sign else STARTING
        seconds[cause] = seconds.get(cause, 0.0) + rest
    return seconds


def _between(before: Attempt | None, attempt: Attempt) -> dict[str, float]:
    """Return the seconds between two attempts by cause, and of the queue before the first.

    The time after a finished attempt is no part of the run's life. Where the processes of two
    attempts overlapped on one machine, the later one did not yet start.
    """
    facts = attempt.facts
    if before is None:
        queued, started = _of_job(facts, attempt.begun)
        return {QUEUED: queued, STARTING: started} if "submitted" in facts else {}
    if before.end == FINISHED:
        return {}
    gap = attempt.begun - before.last
    if attempt.boot and attempt.boot == before.boot:
        gap = attempt.clock - (before.clock + before.elapsed_s)
        if gap < 0:
            _shorten(attempt, -gap)
    gap = max(0.0, gap)
    queued, started = _of_job(facts, attempt.begun)
    started = min(started, gap)
    if facts.get("requeued") is True:
        queued = gap - started
    queued = min(queued, gap - started)
    return {QUEUED: queued, STARTING: started, DOWN: gap - started - queued}


def _of_job(facts: Mapping[str, Any], begun: float) -> tuple[float, float]:
    """Return the seconds that the scheduler's job waited, and those from its start to an attempt's
    beginning; 0 where they are unknown, or the job may have had other work before.
    """
    started = facts.get("job_started")
    submitted = facts.get("submitted")
    if not _is_time(started) or not (_is_time(submitted) or facts.get("requeued") is True):
        return 0.0, 0.0
    assert started is not None
    waited = max(0.0, started - submitted) if _is_time(submitted) and submitted else 0.0
    return waited, max(0.0, begun - started)


def _shorten(attempt: Attempt, overlap_s: float) -> None:
    """Leave out of an attempt's start the seconds in which the attempt before it still ran."""
    for cause in (STARTING, LOADING):
        taken = min(overlap_s, attempt.seconds.get(cause, 0.0))
        if taken:
            attempt.seconds[cause] -= taken
            overlap_s -= taken


def _row(attempt: Attempt) -> dict[str, Any]:
    began = datetime.fromtimestamp(attempt.begun, UTC).isoformat(timespec="seconds")
    return {
        "began": began.replace("+00:00", "Z"),
        "machine": str(attempt.facts.get("machine", "")),
        "first_step": attempt.number("first") if attempt.has_loaded else None,
        "step": attempt.number("step"),
        "steps": attempt.number("steps"),
        "steps_again": attempt.number("again"),
        "end": attempt.end,
        "why": attempt.why,
        "seconds_before": _rounded(attempt.before),
        "seconds": _rounded(attempt.seconds),
    }


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {cause: round(spent, 3) for cause, spent in seconds.items()}


def percent(share: float) -> str:
    """Return a share in percent."""
    return f"{100 * share:.1f}%"
