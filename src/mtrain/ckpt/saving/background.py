"""Checkpoints that training does not wait for: a rank copies its tensors to host memory that its
writer shares, and goes on.

Tensors that may change at any time are copied before `begin` returns. All others change only in
the next update: a thread copies them during the forward and backward before it, and `secured`
waits for the rest. On a device the copies have a stream of their own.

The ranks need not meet while files are written. Writers find each other through the draft, and a
rank learns of the end of a save from `poll`, once per step.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mtrain.ckpt import folder, shard_file, space
from mtrain.ckpt.contents import Contents, flat_bytes
from mtrain.ckpt.meeting import Meeting
from mtrain.ckpt.retention import Policy
from mtrain.ckpt.saving import staging
from mtrain.ckpt.saving.channel import Closed
from mtrain.ckpt.saving.process import WriterProcess
from mtrain.devices.base import Device
from mtrain.units import MIB
from mtrain.world.heartbeat import tick, waiting

PAUSE_S = 0.001
"""The pause between two looks at the writer."""
STORE_S = 0.05
"""The pause between two looks for failures of other ranks, of which up to `FEW` look."""
FEW = 64
SENT_BYTES = 64 * MIB
"""Bytes that are copied at once, before the writer hears of them. For each copy this thread gets
the interpreter's lock again, which the forward holds most of the time.
"""
MAX_SENT = 128
"""Messages of a save whose bytes fit in memory. The socket holds twice as many, so that a rank
does not wait for a writer that is busy.
"""


@dataclass(frozen=True)
class Job:
    """Everything that one save writes."""

    root: Path
    step: int
    contents: tuple[Contents, ...]
    """The files of this rank."""
    manifest: dict[str, Any]
    """The manifest without tensors and files."""
    run_yaml: str
    policy: Policy
    linked: dict[str, Any] | None = None
    """`path` and `index` of a file of an earlier checkpoint that this one links to."""

    @property
    def room(self) -> int:
        """Return the bytes of memory that are enough for the copies of this rank."""
        # Each file begins at the place in a page that it has on the disk.
        return sum(contents.nbytes + 2 * staging.PAGE for contents in self.contents)

    def starts(self) -> list[int]:
        """Return the position in memory of the first byte of each file."""
        found = []
        end = 0
        for contents in self.contents:
            offset = shard_file.data_at(contents.file) % staging.PAGE
            found.append(staging.next_page(end) + offset)
            end = found[-1] + contents.nbytes
        return found

    @property
    def path(self) -> Path:
        """Return the folder of the checkpoint."""
        return self.root / folder.folder_name(self.step)


@dataclass(frozen=True)
class Limits:
    """The memory and the time that saves may take."""

    staging_bytes: int | None
    """The most bytes that are copied at once; None: as much as is free."""
    free_bytes: Callable[[], int]
    """Returns the host memory that this rank may take now."""
    retries: int
    timeout_s: float


@dataclass
class _Pending:
    """A save that is under way."""

    number: int
    job: Job
    thread: threading.Thread | None
    written: list[dict[str, Any]] | None = None
    """The index of this rank's files, once they are on disk."""
    committed: bool = False
    seconds: float = 0.0
    """The time of the writer, to the commit on rank 0 and to the end of its files on others."""
    stop: bool = False
    """The thread should end without copying the rest."""


class BackgroundSaves:
    """The saves of one rank, at most one at a time."""

    def __init__(
        self,
        ranks: Meeting,
        device: Device,
        local_rank: int,
        limits: Limits,
        writer: WriterProcess | None = None,
    ) -> None:
        """Save with `writer`, which is this object's from here on; None: start one if needed."""
        self.device = device
        self.local_rank = local_rank
        self._world = ranks
        self._ranks = ranks
        """The ranks of the save under way: all, or those of this machine."""
        self._limits = limits
        self._number = 0
        self._total = 0
        """Bytes that all ranks write for the save under way."""
        self.in_waves = False
        """True if the memory of a rank holds a part of the save at a time, so that `secured` waits
        for its disk; the same on every rank.
        """
        self._pending: _Pending | None = None
        self._token = ""
        """A word of this run's process, the same on every rank, in the names of its drafts."""
        self._writer = writer
        self._unpin: Callable[[], None] = lambda: None
        self._memory: torch.Tensor | None = None
        self._reserving: threading.Thread | None = None
        self._reserved = 0
        """Bytes of memory that the thread above asks for."""
        self.problem = ""
        """The reason why the save under way will not be finished, as far as this rank knows."""

    @property
    def pending(self) -> Job | None:
        """Return the save under way."""
        return None if self._pending is None else self._pending.job

    @property
    def committed(self) -> bool:
        """Return whether the save under way is committed; only rank 0 knows."""
        return self._pending is not None and self._pending.committed

    @property
    def seconds(self) -> float:
        """Return the time that the writer has taken for its part of the save under way."""
        return 0.0 if self._pending is None else self._pending.seconds

    @property
    def written(self) -> list[dict[str, Any]]:
        """Return the indices of this rank's files of the save under way; empty: not on disk yet."""
        return (self._pending and self._pending.written) or []

    def reserve(self, nbytes: int) -> None:
        """Get the memory for saves of `nbytes` in another thread: the first save would wait for the
        kernel, which clears it, and for the device, which pins it.
        """
        with suppress(OSError):  # the first save reports it
            writer = self._started()
            self._reserved = self._capacity(writer, nbytes)
            self._reserving = threading.Thread(
                target=self._reserve, args=(writer,), name="staging", daemon=True
            )
            self._reserving.start()

    def _reserve(self, writer: WriterProcess) -> None:
        self.use_device()
        with suppress(OSError):  # the first save tries again, and reports it
            # Each page enters the process's table when it is touched.
            self.memory_for(writer, self._reserved)[:: staging.PAGE].zero_()

    def await_reserved(self) -> None:
        """Wait until the memory is there."""
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None

    def use_device(self) -> None:
        """Make the device of this rank that of the calling thread."""
        if self.device.runs_ahead:
            self.device.set_index(self.local_rank)

    @property
    def leads(self) -> bool:
        """Return whether this rank commits the save under way."""
        return self._ranks.rank == 0

    def begin(self, job: Job, ranks: Meeting | None = None) -> None:
        """Begin a save of `ranks`, of which none is under way, on every rank; None: all ranks.

        When it returns, tensors that may change at any time are copied. The others must not be
        written to until `secured`.
        """
        assert self._pending is None
        self.problem = ""
        self._number += 1
        self._ranks = ranks or self._world
        self._token = self._token or self._agreed_token()
        refused = ""
        try:
            # By this thread: a process that another one started would end with that.
            writer = self._started()
            capacity = self._capacity(writer, job.room)
        except OSError as error:
            capacity = 0
            refused = f"the checkpoint {job.path}: no process can be started to write it: {error}"
        self._total, waves = self._ranks.total(
            space.to_write(one.file for one in job.contents),
            "in waves" if capacity < job.room else "",
        )
        if ranks is not None:  # those of other machines must wait for waves here as well
            waves = self._world.barrier(waves)
        self.in_waves = bool(waves)
        if refused:
            self._pending = _Pending(self._number, job, None)
            self.fail(refused)
            return
        stage = _Stage(self, job, writer, capacity)
        thread = threading.Thread(target=stage.run, name="staging", daemon=True)
        stage.pending = _Pending(self._number, job, thread)
        self._pending = stage.pending
        thread.start()

    def secured(self) -> None:
        """Wait until everything is copied, or the copying failed: tensors may be written to."""
        pending = self._pending
        if pending is None or pending.thread is None:
            return
        with waiting():
            while pending.thread.is_alive():
                pending.thread.join(STORE_S)
                tick()
                # A full ring waits for the writer: one that ended would never empty it.
                self.poll()
                if self.problem:
                    pending.stop = True

    def poll(self) -> None:
        """Read the writer's messages, without waiting."""
        pending = self._pending
        if pending is None or self._writer is None or self.problem:
            return
        for message in self._writer.messages():
            self._heed(pending, message)
        done = pending.written is not None and (self._ranks.rank != 0 or pending.committed)
        if not done and not self.problem and (how := self._writer.problem()):
            # It may have said why before it ended.
            for message in self._writer.messages():
                self._heed(pending, message)
            if not self.problem:
                self.fail(
                    f"the checkpoint {pending.job.path} is not complete: the writer of rank"
                    f" {self._world.rank} (process {self._writer.pid}) {how}"
                )

    def finish_alone(self, limit_s: float) -> None:
        """Wait for the end of the save under way, where the ranks failed and meet no more.

        It can be committed if every rank has begun it: the writers have all copied bytes.
        """
        if self._pending is not None:
            self.finish(limit_s)
        else:
            self._announce(self._number + 1, "a rank failed before its part was copied")

    def finish(self, limit_s: float = math.inf) -> None:
        """Wait until this rank has done its part of the save under way: rank 0 until the commit.

        It ends early where the save failed, see `problem`, and after `limit_s`.
        """
        self.secured()
        pending = self._pending
        if pending is None:
            return
        asked = 0.0
        pause_s = STORE_S * max(1.0, self._ranks.size / FEW)
        deadline = time.monotonic() + limit_s
        with waiting():
            while not self.problem and time.monotonic() < deadline:
                self.poll()
                if pending.committed or (self._ranks.rank and pending.written is not None):
                    return
                now = time.monotonic()
                # A writer waits for the folder that rank 0 makes, and rank 0 for all files.
                if now - asked > pause_s:
                    asked = now
                    self._hear_others(pending)
                tick()
                time.sleep(PAUSE_S)

    def done(self) -> Job:
        """Forget the save under way, which is committed, and return it."""
        assert self._pending is not None
        job = self._pending.job
        self._forget()
        return job

    def abort(self) -> None:
        """Give the save under way up: it will not be committed from here on."""
        pending = self._pending
        if pending is not None:
            pending.stop = True
        if self._writer is not None:
            # It may be anywhere in its work, and may not answer.
            self._end_writer(kill=True)
        if pending is not None:
            if pending.thread is not None:
                pending.thread.join()
            self._forget()
        self.problem = ""

    def sweep(self, root: Path) -> None:
        """Remove the draft of a save that was given up; on rank 0, after all ranks gave it up."""
        with suppress(OSError, Closed):
            self._started().channel.send({"sweep": str(root)})

    def close(self) -> None:
        """End the writer; a save under way is given up."""
        if self._pending is not None:
            self.abort()
        elif self._writer is not None:
            self._end_writer(kill=False)

    @property
    def staging_bytes(self) -> int:
        """Return the host memory that tensors are copied to."""
        return 0 if self._writer is None else self._writer.memory.capacity

    def _agreed_token(self) -> str:
        """Return a word that no earlier process of this run had."""
        return self._world.tell(f"{time.time_ns():x}" if self._world.rank == 0 else "")

    def _started(self) -> WriterProcess:
        """Return a writer that is well."""
        if self._writer is not None and self._writer.problem():
            self._end_writer(kill=True)
        if self._writer is None:
            self._writer = WriterProcess(self._limits.timeout_s)
        return self._writer

    def _capacity(self, writer: WriterProcess, nbytes: int) -> int:
        """Return the size of the memory that a save of `nbytes` is copied to."""
        limit = self._limits.staging_bytes
        held = max(self._reserved, writer.memory.capacity)
        if limit is None and held < nbytes:
            limit = held + self._limits.free_bytes()
        # Memory of an earlier save is kept: later saves are of about the same size.
        return max(held, staging.capacity_for(nbytes, limit))

    def memory_for(self, writer: WriterProcess, capacity: int) -> torch.Tensor:
        """Return the memory that is shared with a writer, of the size that `_capacity` returned:
        uint8 [n].

        Raises:
            OSError: there is not so much memory.
        """
        if capacity > writer.memory.capacity:
            self._unpinned()
            writer.memory.resize(capacity)
        if self._memory is None:
            self._memory = torch.frombuffer(writer.memory.ring, dtype=torch.uint8)
            self._unpin = self.device.pin(self._memory)
        writer.memory.begin()
        return self._memory

    def _unpinned(self) -> None:
        self._unpin()
        self._unpin = lambda: None
        self._memory = None

    def _end_writer(self, *, kill: bool) -> None:
        assert self._writer is not None
        self.await_reserved()
        self._reserved = 0
        self._unpinned()
        if kill:
            self._writer.kill()
        else:
            self._writer.close()
        self._writer = None

    def _heed(self, pending: _Pending, message: dict[str, Any]) -> None:
        if message["number"] != pending.number:
            return
        if "failed" in message:
            self.fail(message["failed"])
        pending.written = message.get("written", pending.written)
        pending.committed |= "committed" in message
        pending.seconds = message.get("seconds", pending.seconds)

    def fail(self, text: str) -> None:
        """Note a failure, for this rank and for the others, which may wait for its files."""
        self.problem = text
        self._announce(self._number, text)

    def _announce(self, number: int, text: str) -> None:
        with suppress(RuntimeError):  # a store that is gone: the run ends anyway
            self._ranks.store.set(f"save/{number}/failed", text)

    def _hear_others(self, pending: _Pending) -> None:
        key = f"save/{pending.number}/failed"
        with suppress(RuntimeError):
            if self._ranks.store.check([key]):
                self.problem = self._ranks.store.get(key).decode()

    def _forget(self) -> None:
        assert self._pending is not None
        if self._ranks.rank == 0:
            with suppress(RuntimeError):
                self._ranks.store.delete_key(f"save/{self._pending.number}/failed")
        self._pending = None

    def message_of(self, job: Job, writer: WriterProcess, starts: list[int]) -> dict[str, Any]:
        """Return the message that begins a save, whose files begin at these positions."""
        capacity = writer.memory.capacity
        draft = folder.draft_of(job.root, job.step)
        return {
            "number": self._number,
            "rank": self._ranks.rank,
            "size": self._ranks.size,
            "draft": str(draft.with_name(f"{draft.name}.{self._token}-{self._number}")),
            "final": str(job.path),
            "files": [contents.file.to_json() for contents in job.contents],
            "starts": starts,
            "linked": job.linked,
            # only rank 0 writes them
            "manifest": job.manifest if self._ranks.rank == 0 else None,
            "run_yaml": job.run_yaml if self._ranks.rank == 0 else "",
            "policy": asdict(job.policy),
            "total": self._total,
            "capacity": capacity,
            "whole": job.room <= capacity,
            "retries": self._limits.retries,
            "timeout_s": self._limits.timeout_s,
        }


class _Stage:
    """The thread that copies the tensors of one save."""

    def __init__(
        self, saves: BackgroundSaves, job: Job, writer: WriterProcess, capacity: int
    ) -> None:
        self.pending: _Pending
        self._saves = saves
        self._job = job
        self._writer = writer
        self._capacity = capacity
        self._device = saves.device
        # Work that was issued so far has to be done before the copies begin.
        self._reached = self._device.event() if self._device.runs_ahead else None
        self._early = {
            id(contents): [tensor.to("cpu", copy=True) for tensor in contents.changing]
            for contents in job.contents
        }
        """Copies of the tensors that may change at any time."""
        self._ring: torch.Tensor
        self._at = 0
        """The position of the next byte."""
        self._batch: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Parts to copy at once: where to, and from where."""
        self._batch_bytes = 0
        self._most = max(SENT_BYTES, job.room // MAX_SENT)
        """Bytes of a batch."""

    def run(self) -> None:
        """Copy everything, unless the save is given up meanwhile."""
        try:
            self._saves.await_reserved()
            self._saves.use_device()
            self._ring = self._saves.memory_for(self._writer, self._capacity)
            starts = self._job.starts()
            message = self._saves.message_of(self._job, self._writer, starts)
            self._writer.channel.send(message)
            with self._stream():
                for start, contents in zip(starts, self._job.contents, strict=True):
                    self._at = start
                    for tensor in (*self._early[id(contents)], *contents.still):
                        self._add(flat_bytes(tensor))
                self._send()
        except Closed:
            pass  # `poll` finds out how the writer ended
        except Exception as error:
            self._saves.fail(f"the checkpoint {self._job.path} cannot be copied: {error}")

    def _stream(self) -> Any:
        """Return the context in which the device copies next to its other work."""
        if self._reached is None:
            return nullcontext()
        stream = self._device.namespace.Stream()
        stream.wait_event(self._reached)
        return self._device.namespace.stream(stream)

    def _add(self, data: torch.Tensor) -> None:
        """Copy bytes with the next batch."""
        while len(data):
            begin = self._at % self._capacity
            count = min(len(data), staging.PART_BYTES, self._capacity - begin)
            self._await_room(self._at + count)
            self._batch.append((self._ring[begin : begin + count], data[:count]))
            self._batch_bytes += count
            self._at += count
            data = data[count:]
            if self._batch_bytes >= self._most:
                self._send()

    def _await_room(self, end: int) -> None:
        if self._writer.memory.has_room(end):
            return
        self._send()
        while not self._writer.memory.has_room(end):
            if self.pending.stop:
                raise Closed("the save was given up")
            time.sleep(PAUSE_S)

    def _send(self) -> None:
        """Copy the batch, and tell the writer."""
        if not self._batch:
            return
        targets, sources = map(list, zip(*self._batch, strict=True))
        torch._foreach_copy_(targets, sources, non_blocking=True)
        if self._reached is not None:
            self._device.event().synchronize()
        self._batch.clear()
        self._batch_bytes = 0
        self._writer.channel.send({"copied": self._at})
