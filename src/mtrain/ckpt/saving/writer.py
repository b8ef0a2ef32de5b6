"""The process that writes the checkpoints of one rank: `python -m mtrain.ckpt.saving.writer`.

It needs no torch and touches no device. Each rank has one. It writes the rank's files into the
draft, and leaves an index of them there when they are on disk. The writer of rank 0 makes the
draft, waits for the indices of all ranks, and commits. So a checkpoint appears as soon as it is
complete, whatever the ranks do meanwhile; and a rank never waits for a disk.

A writer that fails reports that and handles no further save: its rank ends it. It ends with its
rank in any case, and leaves a draft that no reader takes for a checkpoint.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from mtrain import durable, units
from mtrain.ckpt import folder, index, local, retention, shard_file, space
from mtrain.ckpt.new_file import Ring
from mtrain.ckpt.saving import staging
from mtrain.ckpt.saving.channel import Channel, Closed
from mtrain.ckpt.saving.staging import PART_BYTES, Staging
from mtrain.ckpt.shard_file import Entry, ShardFile
from mtrain.config.compose.paths import RUN_FILE
from mtrain.errors import MtrainError
from mtrain.processes import die_with

NICE = 10
"""Steps of the run come first; at 19 a writer would hardly get a core that ranks keep busy."""
SHORTEST_S = 0.002
LONGEST_S = 0.1
"""The first and the longest pause between two looks for files of other ranks."""
RETRY_S = 1.0
"""The pause before the first further try; each one after it is twice as long."""


class Failed(Exception):
    """A save that cannot be finished, in words."""


class Save:
    """One save, from the message that begins it."""

    def __init__(self, body: dict[str, Any], channel: Channel, memory: Staging) -> None:
        self.number: int = body["number"]
        self.rank: int = body["rank"]
        self.size: int = body["size"]
        self.draft = Path(body["draft"])
        self.final = Path(body["final"])
        self.files = [ShardFile.from_json(one) for one in body["files"]]
        self.linked: dict[str, Any] | None = body["linked"]
        self.manifest: dict[str, Any] | None = body["manifest"]
        self.run_yaml: str = body["run_yaml"]
        self.policy = retention.Policy(**body["policy"])
        self.total: int = body["total"]
        self.retries: int = body["retries"] if body["whole"] else 0
        self.timeout_s: float = body["timeout_s"]
        self._channel = channel
        self._counters = memory.counters
        self.starts: list[int] = body["starts"]
        """Position of the first byte of each file."""
        self._ring = memory.open(body["capacity"])
        self._copied = 0
        """The position up to which the rank has copied."""

    def perform(self) -> None:
        """Write this rank's files; on rank 0 also commit. Reports each over the channel.

        Raises:
            Failed: it cannot be finished.
            Closed: the rank is gone.
        """
        begun = time.monotonic()
        try:
            if self.rank == 0:
                self._retried(self._make_draft)
            else:
                self._await(lambda: (self.draft / RUN_FILE).exists(), "rank 0 has made no folder")
            written = self._retried(self._write_files)
            with self._disk():
                index.write(self.draft, self.rank, self.size, written)
            self._gather()
            self._report(written=written, seconds=time.monotonic() - begun)
            if self.manifest is not None:
                self._commit(self.manifest)
                self._report(committed=True, seconds=time.monotonic() - begun)
        except OSError as error:
            raise Failed(self._cannot(error)) from None
        except MtrainError as error:
            raise Failed(f"the checkpoint {self.final} cannot be written: {error}") from None

    def _make_draft(self) -> None:
        with self._disk():
            root = self.draft.parent
            root.mkdir(parents=True, exist_ok=True)
            # Left by saves that failed or were killed: of this run, one is under way at a time.
            folder.sweep(root)
            new = self.draft.with_name(f"{self.draft.name}.new")
            new.mkdir()
            space.require(root, self.total, self.size)
            durable.sync(root.parent)
            durable.write(new / RUN_FILE, self.run_yaml.encode())
            # The other writers begin as soon as they see it.
            new.rename(self.draft)

    def _retried(self, work: Any) -> Any:
        """Return the result of work, which may fail a few times where the bytes are still there."""
        pause_s = RETRY_S
        for _ in range(self.retries):
            try:
                return work()
            except OSError:
                # After the commit there is nothing left to try again.
                if self.final.exists() and not self.draft.exists():
                    raise
                self._sleep(pause_s)
                pause_s *= 2
        return work()

    def _write_files(self) -> list[dict[str, Any]]:
        written = [
            self._write_file(file, start)
            for file, start in zip(self.files, self.starts, strict=True)
        ]
        return written + self._link_known()

    def _write_file(self, file: ShardFile, start: int) -> dict[str, Any]:
        at = start

        def parts(entry: Entry) -> Iterator[memoryview]:
            """Yield the bytes of the next entry as they come from the rank."""
            nonlocal at
            end = at + entry.nbytes
            while at < end:
                self._await_copy(at)
                begin = at % len(self._ring)
                # at most up to the ring's end
                part = self._ring[begin : begin + min(PART_BYTES, end - at, self._copied - at)]
                at += len(part)
                self._enter(staging.ON_DISK)
                yield part

        source = Ring(self._ring, start, self._free)
        with self._disk():
            return shard_file.write(self.draft / file.name, file, parts, source)

    def _await_copy(self, position: int) -> None:
        """Wait until the rank has copied the byte at a position, and note how far it has come."""
        if self._copied > position:
            return
        self._enter(staging.FOR_RANK)
        while self._copied <= position:
            body = self._channel.receive()
            assert body is not None
            self._copied = body["copied"]

    def _free(self, position: int) -> None:
        self._counters[staging.FREED] = position

    def _link_known(self) -> list[dict[str, Any]]:
        """Give the file of tensors that no step changes a name in the draft."""
        if self.linked is None:
            return []
        source = Path(self.linked["path"])
        target = self.draft / source.name
        with self._disk():
            target.unlink(missing_ok=True)
            if not durable.linked(source, target):
                shutil.copyfile(source, target)
                durable.sync(target)
        known: dict[str, Any] = self.linked["index"]
        return [known]

    def _commit(self, manifest: dict[str, Any]) -> None:
        """Wait for the files of all ranks, and give the folder its name."""
        self._await_ranks(index.of_all(self.draft, self.size))
        with self._disk():
            part = local.PART in manifest["state"]
            body = manifest | index.merged(self.draft, self.size, part=part)
        self._retried(lambda: self._name(body))
        self._enter(staging.ON_DISK)
        # Whatever becomes of older checkpoints, this one is committed.
        with suppress(OSError):
            retention.prune(self.final.parent, self.policy)
        self._enter(staging.WORKING)

    def _name(self, body: dict[str, Any]) -> None:
        with self._disk():
            folder.commit(self.draft, self.final, body)

    def _gather(self) -> None:
        """Merge the indices of the ranks of a group, on the first of them."""
        awaited = index.of_group(self.draft, self.rank, self.size)
        if awaited is not None:
            self._await_ranks(awaited)
            with self._disk():
                index.gather(self.draft, self.rank, self.size)

    def _await_ranks(self, awaited: index.Awaited) -> None:
        missing: set[int] = set()

        def arrived() -> bool:
            missing.clear()
            missing.update(awaited.missing())
            return not missing

        self._await(arrived, "", missing)

    def _await(self, arrived: Any, lacking: str, missing: set[int] | None = None) -> None:
        deadline = time.monotonic() + self.timeout_s
        pause_s = SHORTEST_S
        # Many writers look into one folder: the more there are, the more rarely each does.
        longest_s = LONGEST_S * max(1.0, self.size / 500)
        while not arrived():
            if time.monotonic() > deadline:
                text = lacking or f"{_named(missing or set())} wrote nothing"
                raise Failed(
                    f"the checkpoint {self.final} is not complete: {text} within"
                    f" checkpoint.barrier_timeout_s={self.timeout_s:g} s"
                )
            self._sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    def _sleep(self, seconds: float) -> None:
        """Sleep, with signs of life."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._counters[staging.TICKS] += 1
            time.sleep(min(left, LONGEST_S))

    def _enter(self, phase: int) -> None:
        self._counters[staging.PHASE] = phase
        self._counters[staging.TICKS] += 1

    def _disk(self) -> _Phase:
        return _Phase(self)

    def _report(self, **body: Any) -> None:
        self._channel.send({"number": self.number, **body})

    def _cannot(self, error: OSError) -> str:
        existing = next(p for p in (self.draft, *self.draft.parents) if os.path.exists(p))
        free = units.bytes_(shutil.disk_usage(existing).free)
        return f"the checkpoint {self.final} cannot be written ({free} free): {error}"


class _Phase:
    """A call to the disk, noted for the rank."""

    def __init__(self, save: Save) -> None:
        self._save = save

    def __enter__(self) -> None:
        self._save._enter(staging.ON_DISK)

    def __exit__(self, *exception: object) -> None:
        self._save._enter(staging.WORKING)


def _named(ranks: set[int]) -> str:
    first = ", ".join(map(str, sorted(ranks)[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {first}"


def serve(channel: Channel, memory: Staging) -> None:
    """Handle the saves of a rank until it ends or one fails."""
    while True:
        memory.counters[staging.PHASE] = staging.IDLE
        try:
            body = channel.receive()
        except Closed:
            return
        assert body is not None
        memory.counters[staging.PHASE] = staging.WORKING
        if "sweep" in body:
            folder.sweep(Path(body["sweep"]))
            continue
        try:
            Save(body, channel, memory).perform()
        except Closed:
            return
        except Failed as error:
            with suppress(Closed):
                channel.send({"number": body["number"], "failed": str(error)})
            return


def main(words: list[str]) -> None:
    """Serve the rank whose process id, socket and memory are named, and end."""
    parent, end, memory = map(int, words)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the rank decides when to stop
    die_with(parent)
    with suppress(OSError):
        os.nice(NICE)
    serve(Channel(socket.socket(fileno=end)), Staging(memory))


if __name__ == "__main__":
    main(sys.argv[1:])
