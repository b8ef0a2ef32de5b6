"""torch's flight recorder, read in this process: how many collectives of each group this rank
launched.

In a stall under NCCL, every rank waits in the same line, for its device. The recorder still shows
the straggler: the rank that has launched fewer collectives of a group than the group's other ranks.
mtrain reads only the recorder's JSON; its pickle is for torch's own `torchfrtrace`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mtrain.world.stall import UNKNOWN, Calls

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
