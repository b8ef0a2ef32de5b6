"""The straggler of a stall, found from the status that each rank publishes and from torch's flight
recorder.

In a stall under NCCL, every rank waits in the same line, for its device. The recorder still shows
the straggler: the rank that has launched fewer collectives of a group than the group's other
ranks. mtrain reads only the recorder's JSON; its pickle is for torch's own `torchfrtrace`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mtrain.world.fingerprints import Fingerprint

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
    """Number of statuses published by the rank; it stops when the rank is stopped or dead."""
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
    recent: tuple[Fingerprint, ...] = ()
    """Its last collectives, the oldest first."""

    def text(self) -> str:
        """Return the status as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str | bytes) -> Status:
        """Return the status that `text` describes."""
        body = json.loads(text)
        calls = {name: Calls(**numbers) for name, numbers in body.pop("calls").items()}
        recent = tuple(map(Fingerprint.of, body.pop("recent")))
        return cls(**body, calls=calls, recent=recent)

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
    rank: int | None = None
    """The straggler; None: there are several, or it is unknown."""
    collectives: str = ""
    """The collective of each rank, in words, or those that differ."""

    @property
    def words(self) -> str:
        """Return the straggler and the collectives, in words."""
        return "; ".join(filter(None, (self.straggler, self.collectives)))

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
    stragglers = [known[rank] for rank in _behind(known, busy, lacking)]
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


def straggler_of(known: Mapping[int, Status], silent: set[int], size: int) -> int | None:
    """Return the rank that `name_straggler` names; None: it names several."""
    ranks = [rank for rank in range(size) if rank not in known] or sorted(silent)
    if not ranks:
        busy = {rank for rank, status in known.items() if not status.waits}
        ranks = _behind(known, busy, awaited(known))
    return ranks[0] if len(ranks) == 1 else None


def _behind(known: Mapping[int, Status], busy: set[int], lacking: Mapping[int, Lack]) -> list[int]:
    suspects = busy or set(known)
    suspects = (suspects & lacking.keys()) or suspects
    fewest = min(known[rank].count for rank in suspects)
    return [rank for rank in sorted(suspects) if known[rank].count == fewest]


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
    """Return the missing call of each rank that others wait for; only of ranks that do not wait
    themselves, if there are any.

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


# The variable with the prefix of the pipes, one per rank, on which a thread of torch waits for a
# request to dump.
PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"


@dataclass(frozen=True)
class Group:
    """A process group of NCCL, as this process knows it."""

    uid: int
    """Its number in the recorder's status."""
    name: str
    what: str
    launched: int
    """Number of collectives launched, without transfers between two ranks."""


def calls_of_entries(text: str | bytes) -> dict[str, Calls]:
    """Return the calls by name of the process group, from a dump that includes its entries.

    Transfers between two ranks are left out, because each rank numbers them on its own.
    """
    calls: dict[str, Calls] = {}
    for entry in json.loads(text).get("entries", ()):
        if entry.get("is_p2p"):
            continue
        name, what = entry["process_group"]
        number = int(entry["collective_seq_id"])
        known = calls.get(name, Calls(what, 0, UNKNOWN, 0))
        # A collective of gloo is retired at its end and has no other state; one of NCCL may have
        # timed out.
        by_gloo = entry["profiling_name"].startswith("gloo:")
        done = bool(entry.get("retired")) if by_gloo else entry["state"] == "completed"
        started = entry["state"] in ("started", "completed") and bool(
            entry.get("time_discovered_started_ns")
        )
        calls[name] = Calls(
            known.what,
            max(known.launched, number),
            max(known.started, number) if started else known.started,
            max(known.done, number) if done else known.done,
        )
    return calls


def calls_of_status(text: str | bytes, groups: Iterable[Group]) -> dict[str, Calls]:
    """Return the calls by name of the process group, from the status in a dump, which needs no
    entries.

    The status counts transfers between two ranks as collectives. Where it disagrees with a group's
    own number of collectives, only that number is used.
    """
    status: Mapping[str, Mapping[str, Any]] = json.loads(text).get("pg_status", {})
    calls = {}
    for group in groups:
        numbers = status.get(str(group.uid), {})
        known = Calls(group.what, group.launched, UNKNOWN, UNKNOWN)
        if int(numbers.get("last_enqueued_collective", UNKNOWN)) == group.launched:
            started = int(numbers.get("last_started_collective", UNKNOWN))
            known = replace(
                known, started=started, done=int(numbers.get("last_completed_collective", UNKNOWN))
            )
        calls[group.name] = known
    return calls


class Recorder:
    """The flight recorder of this rank, for the process groups on `device`."""

    def __init__(self, device: torch.device, rank: int) -> None:
        from torch._C import _distributed_c10d as c10d

        self.device = device
        self.rank = rank
        self.of_nccl, self.of_others = (
            getattr(c10d, name, None) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json")
        )
        self.known: dict[str, Calls] = {}

    def calls(self) -> dict[str, Calls]:
        """Return the calls by name of the process group; empty where nothing is recorded.

        This does not request NCCL's entries: the recorder would query events of the device while it
        holds Python's lock, and a device that hangs may not answer.
        """
        with suppress(
            RuntimeError, ValueError, KeyError, TypeError
        ):  # no reading may end the thread that watches
            groups = list(self._groups())
            if groups and self.of_nccl is not None:
                return calls_of_status(self.of_nccl(False, False), groups)
            if self.of_others is not None:
                # The recorder forgets its oldest entries, and no number ever falls.
                self.known |= calls_of_entries(self.of_others(True, False))
        return self.known

    def write(self, path: Path) -> None:
        """Write the record to `path`; torch itself writes NCCL's to TORCH_FR_DUMP_TEMP_FILE."""
        with suppress(OSError, RuntimeError):
            prefix = os.environ.get(PIPE)
            if prefix and Path(f"{prefix}{self.rank}.pipe").is_fifo():
                # Without O_NONBLOCK the open would wait for a reader, and torch's thread may have
                # ended.
                pipe = os.open(f"{prefix}{self.rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
                os.write(pipe, b"dump\n")
                os.close(pipe)
            elif self.of_others is not None and not list(self._groups()):
                path.write_bytes(self.of_others(True, False))

    def close(self) -> None:
        """Remove the pipe of this rank, which torch leaves behind."""
        if prefix := os.environ.get(PIPE):
            with suppress(OSError):
                Path(f"{prefix}{self.rank}.pipe").unlink()

    def _groups(self) -> Iterable[Group]:
        """Yield the NCCL process groups that this rank belongs to."""
        # The main thread may make a group at this moment, so this iterates over a copy.
        for group in list(dist.distributed_c10d._world.pg_map):
            with suppress(RuntimeError):
                # A group that has no backend for the device raises RuntimeError; it records
                # nothing.
                uid = getattr(group._get_backend(self.device), "uid", None)
                if uid is not None:
                    launched = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
                    yield Group(
                        uid, group.group_name, group.group_desc or group.group_name, launched
                    )
