"""The watchdog: it writes stacks and names the straggler after a soft timeout, and ends the run
after a hard one.

It has two threads next to the one that trains. One talks to the other ranks over its own store
connection, where it may block for ever: a store whose process is stopped answers nothing. The other
watches the clock, and acts.
"""

from __future__ import annotations

import faulthandler
import os
import platform
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from torch.distributed import PrefixStore, Store

from mtrain.config.compose.paths import CHECKPOINTS, MANIFEST
from mtrain.config.schema.run import RunConfig
from mtrain.errors import TrainingError, say_page
from mtrain.world import fingerprints, stacks, stall
from mtrain.world.abandon import FAILED, WATCH, abandon
from mtrain.world.fingerprints import Fingerprint, Memory, Ring
from mtrain.world.heartbeat import heartbeat, noting_waits
from mtrain.world.init import World
from mtrain.world.rank_env import End, RankEnv
from mtrain.world.stacks import stacks_name
from mtrain.world.stall import Finding, Recorder, Status

SILENT_TICKS = 10
RECENT = 8
"""Collectives that a rank publishes, for ranks of other machines."""
# The largest share of the soft timeout that one tick counts, as after a suspension
LONGEST_TICK = 0.25


@contextmanager
def watching(run: RunConfig, world: World, folder: Path, end: End) -> Iterator[None]:
    """Watch this rank inside the block, together with all other ranks.

    `folder` gets the stacks and the record of torch's flight recorder. After
    `trainer.soft_timeout_s` without progress on any rank, each rank writes its own, and one names
    the straggler; after `trainer.timeout_s`, `end` gets a TrainingError that names it again. Both
    say in which collective each rank is.
    """
    watchdog = Watchdog(run, world, folder, end)
    watchdog.start()
    try:
        with noting_waits(), fingerprints.recording(watchdog.ring):
            yield
    except Exception:
        # Another rank ended because of the same stall a moment earlier. This rank is about to
        # report the cause too, and that report must come before the broken connection.
        if watchdog.reported:
            watchdog.over.wait(1.0 + 10 * watchdog.tick_s)
        raise
    finally:
        watchdog.stop()


def flight_name(rank: int) -> str:
    """Return the name of the file with the flight recorder's record of a rank's collectives."""
    return f"flight_rank_{rank:05d}.json"


class Watchdog:
    """The watchdog of one rank."""

    def __init__(self, run: RunConfig, world: World, folder: Path, end: End) -> None:
        self.world = world
        self.folder = folder
        self.end = end
        self.soft_s = run.trainer.soft_timeout_s
        self.hard_s = run.trainer.timeout_s
        # Thousands of ranks share one store, so they talk to it less often.
        self.tick_s = min(1.0, max(0.1, self.soft_s / 20)) * max(1.0, world.size / 1000)
        self.silent_s = max(SILENT_TICKS * self.tick_s, min(2.0, 0.8 * self.soft_s))
        """Without a status for this long, a rank counts as stopped or dead."""
        # A rank counts as silent only after silent_s, so comparing begins that much before the
        # report.
        self.alert_s = max(2 * self.tick_s, self.soft_s - self.silent_s - 2 * self.tick_s)
        self.wakes = run.resilience.in_process
        """True if a failure of another rank ends this one's wait."""
        self.idle_s = 0.0
        """Time since this rank made progress."""
        self.reported = False
        self.over = threading.Event()
        self.recorder = Recorder(world.torch_device, world.rank)
        self.memory = Memory.here()
        self.ring = Ring(self.memory, world.local_rank, ahead=world.device.runs_ahead)
        self.wire = Wire(self)
        self.file: TextIO | None = None
        work = {"watchdog": self._watch, "heartbeat": self.wire.talk}
        names = ((f"{stacks.WATCHING}{name}", target) for name, target in work.items())
        self.threads = [
            threading.Thread(target=target, name=name, daemon=True) for name, target in names
        ]

    def start(self) -> None:
        """Start watching."""
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.file = (self.folder / stacks_name(self.world.rank)).open("a")
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        """Stop watching, and leave no empty file."""
        self.over.set()
        for thread in self.threads:
            thread.join(1.0)
        faulthandler.cancel_dump_traceback_later()
        self.recorder.close()
        path = self.folder / stacks_name(self.world.rank)
        if self.file is not None:
            with suppress(OSError):
                self.file.close()
                if path.stat().st_size == 0:
                    path.unlink()
                    # This fails, as it should, while other ranks have files there.
                    self.folder.rmdir()

    def _watch(self) -> None:
        seen = (heartbeat.count, heartbeat.ticks)
        before = time.monotonic()
        while not self.over.wait(self.tick_s):
            now = time.monotonic()
            latest = (heartbeat.count, heartbeat.ticks)
            passed = min(now - before, self.tick_s + LONGEST_TICK * self.soft_s)
            self.idle_s = 0.0 if latest != seen else self.idle_s + passed
            seen = latest
            before = now
            if self.file is not None:
                # A thread that holds Python's lock blocks this one too; faulthandler needs no lock.
                faulthandler.dump_traceback_later(self.soft_s + self.silent_s, file=self.file)
            if self.idle_s >= self.alert_s:
                self._act()
            else:
                self.reported = False

    def _act(self) -> None:
        finding, speaks = self._conclude()
        files = self.folder / "stacks_rank_*.txt"
        if finding.idle_s >= self.soft_s and not self.reported:
            self.reported = True
            self._write_stacks(finding)
            if speaks:
                _say(
                    f"warning: no progress for {finding.idle_s:.1f} s"
                    f" (trainer.soft_timeout_s={self.soft_s:g}): {finding.words};"
                    f" stacks of every rank: {files}; the run ends after {self.hard_s:g} s"
                    " (trainer.timeout_s)"
                )
            self.recorder.write(self.folder / flight_name(self.world.rank))
        if finding.idle_s >= self.hard_s:
            text = (
                f"no progress for {finding.idle_s:.1f} s (trainer.timeout_s={self.hard_s:g}):"
                f" {finding.words}; stacks: {files}{self._advice()}"
            )
            error = TrainingError(text)
            error.rank = finding.rank
            self.end(error, speaks)

    def _advice(self) -> str:
        """Return the advice to resume; empty where this run has saved no checkpoint."""
        saved = any((self.folder.parent / CHECKPOINTS).glob(f"step_*/{MANIFEST}"))
        return "; resume with checkpoint.resume=latest" if saved else ""

    def _conclude(self) -> tuple[Finding, bool]:
        """Return the finding about the stall, and whether this rank is to report it."""
        rank = self.world.rank
        wire = self.wire
        now = time.monotonic()
        finding = wire.finding
        env = RankEnv.here()
        if now - wire.heard < self.silent_s:
            if finding is not None:
                idle_s = min(self.idle_s, finding.idle_s + now - wire.found_at)
                return replace(finding, idle_s=idle_s), finding.observer == rank
            # No rank has compared all yet; if none does, this rank ends with what it knows.
            idle_s = self.idle_s if self.idle_s > self.soft_s + 2 * self.silent_s else 0.0
            return Finding(idle_s, "the straggler is unknown", rank, 0), env.speaks
        # The store is silent: the process that serves it is stopped or dead.
        first = 0 if env.launcher_serves else min(1, self.world.size - 1)
        straggler = (
            f"{env.server}, which serves the store of all ranks, gives no sign of life (stopped or"
            " dead)"
        )
        found = Finding(self.idle_s, straggler, first, 0, None if env.launcher_serves else 0)
        if finding is not None:
            found = replace(found, straggler=finding.straggler, rank=finding.rank)
        return replace(found, collectives=self.collectives({})[0]), rank == first

    def collectives(self, known: Mapping[int, Status]) -> tuple[str, int | None]:
        """Return in words in which collective each rank is, and a rank that made another one than
        all the others.

        `known` are statuses, of which those of stopped ranks are old. The memory of this machine is
        exact.
        """
        calls: dict[int, Sequence[Fingerprint]] = {r: s.recent for r, s in known.items()}
        if self.memory.shared:
            env = RankEnv.here()
            first = env.rank - env.local_rank
            calls |= {first + place: self.memory.read(place) for place in range(env.local_size)}
        if not any(calls.values()):
            return "", None
        words, culprit = fingerprints.disagreement(calls)
        return words or fingerprints.places(calls), culprit

    def _write_stacks(self, finding: Finding) -> None:
        title = (
            f"rank {self.world.rank} in {heartbeat.place}: no progress for {finding.idle_s:.1f} s"
        )
        with suppress(OSError):
            stacks.write(self.folder / stacks_name(self.world.rank), title)
            fingerprints.write(self.folder, self.world.rank, self.memory.read(self.ring.place))


class Wire:
    """The exchange of statuses, which one rank compares in a stall."""

    def __init__(self, watchdog: Watchdog) -> None:
        self.watchdog = watchdog
        self.world = watchdog.world
        self.heard = time.monotonic()
        """The time of the store's last answer."""
        self.finding: Finding | None = None
        """The straggler, in a stall; None: there is no stall, or no finding yet."""
        self.found_at = 0.0
        """The time when this rank learned it."""
        self.published = 0
        self.stall: int | None = None
        self.observes = False
        self.changed: dict[int, tuple[int, float]] = {}
        """By rank: the number of its last status, and when this rank first saw it."""

    def talk(self) -> None:
        """Publish and compare until the watch is over, or the store is lost."""
        with suppress(
            RuntimeError
        ):  # torch's error for a lost store; the clock notices the silence
            # A call on this connection may block for ever, so no other thread shares it.
            store = PrefixStore(WATCH, self.world.store.clone())  # type: ignore[attr-defined]
            while not self.watchdog.over.wait(self.watchdog.tick_s):
                self._publish(store)
                over = self.watchdog.wakes and store.check([FAILED])
                if over and not self.watchdog.over.is_set():
                    abandon(first=False)
                if self.watchdog.idle_s >= self.watchdog.alert_s:
                    self._look(store)
                elif self.stall is not None:
                    self._recover(store)
                self.heard = time.monotonic()

    def _publish(self, store: Store) -> None:
        frame = stacks.main_frame()
        self.published += 1
        stalled = self.watchdog.idle_s >= self.watchdog.alert_s
        calls = self.watchdog.recorder.calls() if stalled else {}
        status = Status(
            rank=self.world.rank,
            host=platform.node(),
            pid=os.getpid(),
            number=self.published,
            count=heartbeat.count,
            phase=heartbeat.place,
            waits=stacks.is_waiting(frame),
            place=stacks.place(frame),
            idle_s=self.watchdog.idle_s,
            calls=calls,
            recent=tuple(self.watchdog.memory.read(self.watchdog.ring.place)[-RECENT:]),
        )
        store.set(f"status/{status.rank}", status.text())

    def _look(self, store: Store) -> None:
        """Learn the straggler from the observing rank; become the observer if there is no other."""
        number = store.add("stalls", 0)
        if number != self.stall:
            self._forget()
            self.stall = number
        key = f"finding/{number}"
        if not self.observes:
            if store.check([key]):
                self._learn(Finding.of(store.get(key)))
            last = self.finding.number if self.finding else 0
            stale = last == 0 or time.monotonic() - self.found_at > self.watchdog.silent_s
            # Of all ranks that add to the counter, the first compares for the others.
            self.observes = stale and store.add(f"observer/{number}/{last}", 1) == 1
        if self.observes:
            finding = self._observe(store)
            store.set(key, finding.text())
            self._learn(finding)

    def _learn(self, finding: Finding) -> None:
        if self.finding is None or self.finding.number != finding.number:
            self.found_at = time.monotonic()
            self.finding = finding

    def _forget(self) -> None:
        self.stall = None
        self.observes = False
        self.finding = None
        self.changed = {}

    def _observe(self, store: Store) -> Finding:
        """Compare the statuses of all ranks."""
        keys = [f"status/{rank}" for rank in range(self.world.size)]
        # One call suffices unless a rank has not published anything yet.
        if not store.check(keys):
            keys = [key for key in keys if store.check([key])]
        now = time.monotonic()
        known = {status.rank: status for status in map(Status.of, store.multi_get(keys))}
        for rank, status in known.items():
            if self.changed.get(rank, (0, 0.0))[0] != status.number:
                self.changed[rank] = (status.number, now)
        silent = {
            rank for rank in known if now - self.changed[rank][1] >= self.watchdog.silent_s * 0.8
        }
        number = self.finding.number + 1 if self.finding else 1
        straggler = stall.name_straggler(known, silent, self.world.size)
        behind = stall.straggler_of(known, silent, self.world.size)
        collectives, culprit = self.watchdog.collectives(known)
        return Finding(
            stall.idle_s(known, silent),
            straggler,
            self.world.rank,
            number,
            behind if culprit is None else culprit,
            collectives,
        )

    def _recover(self, store: Store) -> None:
        """End the stall on this rank; the observer makes way for the next stall's."""
        if self.observes:
            store.add("stalls", 1)
        self._forget()


def _say(text: str) -> None:
    with suppress(OSError, ValueError):
        say_page(text, error=True)
