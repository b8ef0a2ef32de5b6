"""The life log of a run folder: lines of JSON that are only ever appended.

No line needs another one: each has the beginning of its attempt, and all its seconds up to then. A
lost or torn line, or a process that is killed at any moment, loses at most the time since the line
before.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mtrain import locks, startup, strict_json
from mtrain.errors import Preempted, warn
from mtrain.goodput.meter import CAUSES, Meter, Sign

LOG = "life.jsonl"
FORMAT = 1
BEGIN = "begin"
SIGN = "sign"
END = "end"
LAUNCHER_END = "launcher_end"
FINISHED = "finished"
STOPPED = "stopped"
FAILED = "failed"
SHORTEST_S = 1.0
LONGEST_S = 60.0
SHARE = 0.01
"""A sign of life comes after a hundredth of the attempt so far, within these bounds."""
LONGEST_WHY = 300
JOIN_S = 5.0


@dataclass(frozen=True)
class Begun:
    """The beginning of an attempt; every line of the attempt repeats it."""

    attempt: str
    """The name of the attempt, the same in the launcher and in rank 0."""
    begun: float
    """Wall clock at the beginning, seconds of the epoch."""
    boot: str
    """The id of the machine's boot in which `clock` counts; empty: unknown."""
    clock: float
    """The monotonic clock at the beginning."""

    @classmethod
    def at(cls, clock: float) -> Begun:
        """Return the beginning at a reading of this machine's monotonic clock."""
        wall = time.time() - (time.monotonic() - clock)
        # A launcher passes its clock on to four digits, see `startup`.
        return cls(f"{clock:.4f}", round(wall, 3), locks.boot_id(), round(clock, 4))


class LifeLog:
    """The log of a run folder, open to append the lines of one attempt.

    A log that cannot be written is reported once: the run is worth more than its log.
    """

    def __init__(self, home: Path, begun: Begun) -> None:
        self.path = home / LOG
        self.begun = begun
        self.broken = False

    def append(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Append a line."""
        if self.broken:
            return
        line = {"format": FORMAT, "kind": kind, **asdict(self.begun), "at": round(time.time(), 3)}
        data = strict_json.dumps({**line, **facts}).encode() + b"\n"
        try:
            self._write(data)
        except OSError as error:
            self.broken = True
            why = error.strerror or error
            warn(f"{self.path} cannot be written ({why}); the run goes on without it")

    def _write(self, data: bytes) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self.path, flags, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            # A process that died while it wrote may have left a line without an end.
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                data = b"\n" + data
            os.write(descriptor, data)
        finally:
            os.close(descriptor)


def facts_of(sign: Sign) -> dict[str, Any]:
    """Return a sign of life as values of a line, times to a tenth of a millisecond."""
    seconds = {cause: round(sign.seconds[cause], 4) for cause in CAUSES if sign.seconds[cause] > 0}
    open_s = round(sign.open_s, 4)
    return {**asdict(sign), "elapsed_s": round(sign.elapsed_s, 4)} | {
        "seconds": seconds,
        "open_s": open_s,
    }


def scheduled(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the times of the scheduler's job that this process belongs to, as far as its variables
    tell: `job_started` and `submitted`, in seconds of the epoch, and True for `requeued` where the
    job was started before.
    """
    found: dict[str, Any] = {}
    for key, name in (("job_started", "SLURM_JOB_START_TIME"), ("submitted", startup.SUBMITTED)):
        with suppress(KeyError, ValueError):
            found[key] = float(environment[name])
    count = environment.get("SLURM_RESTART_COUNT", "")
    if count.isdigit() and int(count) > 0:
        found["requeued"] = True
    return found


@contextmanager
def recorded(home: Path, meter: Meter, environment: Mapping[str, str]) -> Iterator[None]:
    """Log the life of an attempt in a run folder inside the block, whose end is the attempt's.

    A thread writes the signs of life, so the main thread may be busy or hang for as long as it
    likes.
    """
    log = LifeLog(home, Begun.at(meter.begun))
    origin = {"machine": platform.node(), "process": os.getpid()}
    log.append(BEGIN, {**origin, **scheduled(environment), **facts_of(meter.sign())})
    meter.give_sign = lambda: log.append(SIGN, facts_of(meter.sign()))
    over = threading.Event()
    thread = threading.Thread(target=_signs, args=(meter, over), name="life log", daemon=True)
    thread.start()
    how = FAILED
    why = ""
    try:
        yield
        how = FINISHED
    except Preempted:
        how = STOPPED
        raise
    except BaseException as error:
        how = FINISHED if meter.done else FAILED
        why = _reason(error)
        if not meter.done:
            meter.fail()
        raise
    finally:
        over.set()
        # A file system that hangs does not keep the process from ending.
        thread.join(JOIN_S)
        log.append(END, {"end": how, "why": why, **facts_of(meter.sign())})


def _signs(meter: Meter, over: threading.Event) -> None:
    while not over.wait(pause_s(time.monotonic() - meter.begun)):
        meter.give_sign()


def pause_s(elapsed_s: float) -> float:
    """Return the seconds from one sign of life to the next, `elapsed_s` after the beginning."""
    return min(LONGEST_S, max(SHORTEST_S, SHARE * elapsed_s))


@contextmanager
def ended(home: Path, begun: Begun, advice: str) -> Iterator[None]:
    """Log how the ranks of an attempt ended, as their launcher sees it: they may all be killed.

    `advice` at the end of an error's text is for the user, and no part of the reason.
    """
    how = FAILED
    why = ""
    try:
        yield
        how = FINISHED
    except (Preempted, KeyboardInterrupt):
        how = STOPPED
        raise
    except BaseException as error:
        why = _reason(error).removesuffix(f"; {advice}")
        raise
    finally:
        begun = _newest(home, begun)
        elapsed_s = round(time.monotonic() - begun.clock, 4)
        LifeLog(home, begun).append(
            LAUNCHER_END,
            {"end": how, "why": why, "elapsed_s": elapsed_s, "machine": platform.node()},
        )


def explain(home: Path, until: float, why: str) -> None:
    """Log why the last attempt failed, at a reading of the monotonic clock, where ranks restart
    within their processes: its own log has the error of rank 0, which may have lost a peer.
    """
    begun = _newest(home, Begun("", 0.0, locks.boot_id(), 0.0))
    facts = {"end": FAILED, "why": why[:LONGEST_WHY], "elapsed_s": round(until - begun.clock, 4)}
    LifeLog(home, begun).append(LAUNCHER_END, {**facts, "machine": platform.node()})


def _newest(home: Path, begun: Begun) -> Begun:
    """Return the last attempt of the log since `begun`: ranks that restart within their processes
    begin some that the launcher does not know.
    """
    names = [field.name for field in fields(Begun)]
    found = begun
    with suppress(OSError):
        for text in (home / LOG).read_bytes().splitlines():
            with suppress(ValueError, KeyError, TypeError):  # a line that was cut short
                line = json.loads(text)
                one = Begun(*(line[name] for name in names))
                found = one if one.boot == begun.boot and one.clock >= found.clock else found
    return found


def _reason(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return (first or type(error).__name__)[:LONGEST_WHY]
