"""The straggler of a stall, found from the status that each rank publishes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

MAX_NAMED = 4
# A number of calls that was not recorded
UNKNOWN = -1


@dataclass(frozen=True)
class Calls:
    """Progress of a rank in the collectives of one process group, numbered from 1."""

    what: str
    """The purpose of the group."""
    launched: int
    """The last collective that the host handed to the backend."""
    started: int = UNKNOWN
    """The last one that the device began; UNKNOWN where that is not timed."""
    done: int = UNKNOWN
    """The last one that ended."""


@dataclass(frozen=True)
class Status:
    """The status that a rank's watchdog publishes about once a second."""

    rank: int
    host: str
    pid: int
    number: int
    """Number of statuses published by the rank; it stops growing when the rank is stopped or dead.
    """
    count: int
    """Milestones passed."""
    phase: str
    """Its current step and phase."""
    waits: bool
    """True if its main thread waits for other ranks or for its device."""
    place: str
    """The source line of its main thread."""
    idle_s: float
    """Time since it made progress."""
    calls: Mapping[str, Calls] = field(default_factory=dict)
    """Calls by name of the process group, in a stall and where collectives are recorded."""

    def text(self) -> str:
        """Return the status as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str | bytes) -> Status:
        """Return the status that `text` describes."""
        body = json.loads(text)
        calls = {name: Calls(**numbers) for name, numbers in body.pop("calls").items()}
        return cls(**body, calls=calls)

    @property
    def who(self) -> str:
        """Return the rank with its host and process."""
        return f"rank {self.rank} ({self.host}, process {self.pid})"


@dataclass(frozen=True)
class Finding:
    """The conclusion of the one rank that compares the statuses of all ranks."""

    idle_s: float
    """Time since any live rank made progress."""
    straggler: str
    """The straggler, in words."""
    observer: int
    number: int
    """The number of findings in this stall, including this one."""

    def text(self) -> str:
        """Return the finding as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str | bytes) -> Finding:
        """Return the finding that `text` describes."""
        return cls(**json.loads(text))


def idle_s(known: Mapping[int, Status], silent: set[int]) -> float:
    """Return the time since any live rank made progress."""
    return min((s.idle_s for rank, s in known.items() if rank not in silent), default=float("inf"))


def name_straggler(known: Mapping[int, Status], silent: set[int], size: int) -> str:
    """Name the straggler.

    Ranks that have not begun, or give no sign of life, come first. Otherwise the suspects are the
    ranks that do not wait, or all ranks if every rank waits. If some suspects lack a collective
    that other ranks of a process group have launched or begun, only those remain. Of the remaining
    ones, those with the fewest milestones are the stragglers: a pipeline stage that waits for its
    input has passed fewer milestones than the stage that holds it up.
    """
    missing = [rank for rank in range(size) if rank not in known]
    if missing:
        return f"{_ranks(missing)} {'has' if len(missing) == 1 else 'have'} not begun to train"
    if silent:
        gone = [known[rank] for rank in sorted(silent)]
        last = f"last seen in {gone[0].phase}" if len(gone) == 1 else "stacks may be missing"
        verb = "gives" if len(gone) == 1 else "give"
        return (
            f"{_who(gone)} {verb} no sign of life (stopped, dead, or stuck outside Python; {last})"
        )
    busy = {rank for rank, status in known.items() if not status.waits}
    lacking = awaited(known)
    suspects = busy or set(known)
    suspects = (suspects & lacking.keys()) or suspects
    fewest = min(known[rank].count for rank in suspects)
    stragglers = [known[rank] for rank in sorted(suspects) if known[rank].count == fewest]
    first = stragglers[0]
    if len(stragglers) == size > 1 and not busy:
        return f"every rank waits for the others, in {first.phase}"
    doing = "is" if busy or first.rank in lacking else "waits like all others, and is"
    verb = doing if len(stragglers) == 1 else "are"
    if first.rank in lacking and len(stragglers) == 1:
        why = f"; {lacking[first.rank].words(known, first.rank)}"
    else:
        why = ""
    return f"{_who(stragglers)} {verb} behind, in {first.phase}, at {first.place}{why}"


@dataclass(frozen=True)
class Lack:
    """A collective that a rank has not reached, and other ranks of the process group have."""

    group: str
    begun: bool
    """True: the device has not begun the collective; False: the host has not launched it."""

    def number(self, status: Status) -> int:
        """Return the last collective of the group that a rank launched or began."""
        calls = status.calls[self.group]
        return calls.started if self.begun else calls.launched

    def words(self, known: Mapping[int, Status], rank: int) -> str:
        """Return in words which collective the rank lacks, and which ranks wait for it."""
        members = {other: status for other, status in known.items() if self.group in status.calls}
        number = self.number(known[rank]) + 1
        waiters = [
            other
            for other, s in sorted(members.items())
            if self.number(s) >= number > s.calls[self.group].done
        ]
        verb = "begun" if self.begun else "launched"
        waits = "waits" if len(waiters) == 1 else "wait"
        what = known[rank].calls[self.group].what
        # The source of a broadcast may have finished a collective that others have not begun,
        # and wait in a later one.
        others = f"in which {_ranks(waiters)} {waits}" if waiters else "which is done for others"
        return f"it has not {verb} collective {number} of {what}, {others}"


def awaited(known: Mapping[int, Status]) -> dict[int, Lack]:
    """Return what each rank lacks that others wait for; only ranks that do not wait themselves, if
    there are any.

    A rank waits for the ranks of its process groups that have launched fewer collectives than it
    has, unless all of its own have ended. Where all have launched equally many, the ranks wait
    whose devices have begun more.
    """
    lacking: dict[int, Lack] = {}
    waiting: set[int] = set()
    for name in sorted({name for status in known.values() for name in status.calls}):
        members = {rank: status for rank, status in known.items() if name in status.calls}
        for lack in (Lack(name, begun=False), Lack(name, begun=True)):
            numbers = {rank: lack.number(status) for rank, status in members.items()}
            lowest = min(numbers.values())
            # A rank that reports no number may be ahead or behind.
            if lowest == UNKNOWN:
                continue
            ahead = {
                r: n for r, n in numbers.items() if n > lowest and members[r].calls[name].done < n
            }
            highest = max(ahead.values(), default=lowest)
            waiting |= ahead.keys()
            lacking = {rank: lack for rank, number in numbers.items() if number < highest} | lacking
            # If the hosts differ, how far the devices came says no more.
            if ahead:
                break
    return {rank: lack for rank, lack in lacking.items() if rank not in waiting} or lacking


def _who(ranks: list[Status]) -> str:
    more = f" and {len(ranks) - MAX_NAMED} more ranks" if len(ranks) > MAX_NAMED else ""
    return ", ".join(s.who for s in ranks[:MAX_NAMED]) + more


def _ranks(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"
