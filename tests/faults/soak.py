"""A run that loses a process every minute: a rank, its launcher and a writer in turn.

It trains in tp2dp2, saves in the background and keeps local checkpoints. A killed launcher is
started again with `resume`, as a scheduler would; all else is up to the run itself. In the end the
run must have the state of one that nothing disturbed, and have left nothing behind.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.test_restarted_runs import restarts, result
from tests.faults.pace import STEP_S, pace
from tests.faults.promises import differing as values_apart
from tests.support.commands import ROOT, environment, latest, metrics
from tests.support.forked import import_engine
from tests.support.launched import Launched, mtrain
from tests.support.patience import slowness

VICTIMS = ("rank", "launcher", "writer")
MINUTE_S = 60.0
SHARE = 0.92
"""The share of the time for which steps are planned; restarts take the rest."""
LOST = 0.1
"""The largest share of the time that is no goodput, on a machine that does nothing else."""
APART = 0.01
"""The most by which the causes of `goodput.json` may miss the wall clock."""
RECOVERY_S = 60.0
TRIES = 5
"""Writers that are killed in the same minute until one had work to lose."""
IN_FLIGHT = 1
"""Descriptors that a rank may hold for the save that is under way."""
SHORT = 10.0
"""Minutes below which launchers are forked from this process: the seconds of their imports weigh
ten times as much in three minutes as in thirty.
"""
RANKS = 4
INTERVAL = 8
"""Steps between local checkpoints."""
RUN = (
    "data=mock",
    "data.seq_length=16",
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.ffn_hidden_size=64",
    "model.vocab_size=128",
    "parallel=tp2dp2",
    "trainer.global_batch_size=4",
    "trainer.eval_iters=0",
    "trainer.eval_interval=0",
    "log.interval=1",
    "log.name=run",
)
SAVES = (
    "checkpoint.async_save=true",
    "checkpoint.save_interval=40",
    "checkpoint.local_dir=local",
    f"checkpoint.local_interval={INTERVAL}",
)
WORST_LOSS = 2 * INTERVAL
"""Steps that a kill may cost: the save under way is lost with it."""


@dataclass
class Kill:
    """A kill, and how the run went on."""

    victim: str
    rank: int
    at_s: float
    """Seconds since the beginning of the soak."""
    gone_s: float = 0.0
    """Seconds until no process of the killed ones' attempt was left."""
    first_step_s: float = 0.0
    """Seconds until the first line of a step that a later attempt made; 0: nothing restarted."""


@dataclass
class Tally:
    """The resources of an attempt, at their least between two kills: what it always holds."""

    launcher: int = sys.maxsize
    """Descriptors of the launcher."""
    ranks: int = sys.maxsize
    """Descriptors of all ranks."""
    listening: int = sys.maxsize
    """Sockets on which launcher and ranks listen."""


@dataclass
class Soaked:
    """The result of a soak."""

    kills: list[Kill] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    measured: list[dict[str, float]] = field(default_factory=list)
    """Numbers of the promises, by the keys of `MEASURES`."""
    problems: list[str] = field(default_factory=list)


class Command:
    """A launcher in an interpreter of its own, as a shell starts it."""

    def __init__(self, *words: str, cwd: Path) -> None:
        path = os.pathsep.join([str(ROOT), *(entry for entry in sys.path if entry)])
        self._output = (cwd / "output.txt").open("a")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.pace", *latest(*words)],
            cwd=cwd,
            env=environment() | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""
        return self._process.poll()


class Soak:
    """One soak in a folder of its own."""

    def __init__(self, folder: Path, minutes: float, seed: int, say: Callable[[str], None]) -> None:
        self.folder = folder
        self.minutes = minutes
        self.dice = random.Random(seed)
        self.say = say
        self.home = folder / "runs/run"
        self.steps = round(minutes * MINUTE_S * SHARE / STEP_S)
        self.words = (*RUN, f"trainer.train_iters={self.steps}")
        self.sessions: list[int] = []
        """Each launcher leads a session, which ranks and writers stay in."""
        self.tallies: list[Tally] = []
        self.launcher: Launched | Command
        self.done = Soaked()

    def run(self) -> Soaked:
        """Soak, train the same steps undisturbed, and compare."""
        import_engine()
        shared = shared_names()
        began = time.monotonic()
        try:
            self._start(*self.words, *SAVES, "--restarts", "1000")
            for number in range(int(self.minutes)):
                at = began + number * MINUTE_S + self.dice.uniform(10, 50)
                if self._ended_before(at):
                    break
                # A writer that had written its last byte is no loss: another one has to go.
                for _ in range(TRIES):
                    self.done.kills.append(self._killed(VICTIMS[number % len(VICTIMS)], began))
                    if self.done.kills[-1].first_step_s:
                        break
            self._ended_before(began + self.minutes * MINUTE_S * 3)
            wall_s = time.monotonic() - began
        finally:
            left = self.mine()
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self._require(self.launcher.poll() == 0, f"the run ended with {self.launcher.poll()}")
        self._require(not left, f"processes are left: {left}")
        leaked = unowned(shared_names() - shared)
        self._require(not leaked, f"shared memory is left: {sorted(leaked)}")
        self._require(not list((self.folder / "local").iterdir()), "local checkpoints are left")
        if self.done.problems:
            return self.done
        self._check_resources()
        self._check_account(wall_s)
        self._check_restarts()
        self._check_state()
        for kill in self.done.kills:
            gone = {"rank": "dead_rank_s", "launcher": "orphans_s", "writer": "writer_s"}
            if kill.first_step_s:
                values = {gone[kill.victim]: kill.gone_s, "first_step_s": kill.first_step_s}
                self.done.measured.append(values)
        return self.done

    def _require(self, holds: bool, problem: str) -> None:
        if not holds:
            self.done.problems.append(problem)

    def _start(self, *words: str) -> None:
        if self.minutes < SHORT:
            self.launcher = Launched(*words, cwd=self.folder, patch=pace)
        else:
            self.launcher = Command(*words, cwd=self.folder)
        self.sessions.append(self.launcher.pid)
        self.tallies.append(Tally())

    def mine(self) -> list[psutil.Process]:
        """Return the living processes of all launchers so far."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                mine = os.getsid(process.pid) in self.sessions
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def _ranks(self) -> list[psutil.Process]:
        """Return the running ranks; [] while not all of them run."""
        try:
            children = psutil.Process(self.launcher.pid).children()
            alive = [one for one in children if one.status() != psutil.STATUS_ZOMBIE]
        except psutil.NoSuchProcess:
            return []
        return sorted(alive, key=lambda one: one.pid) if len(alive) == RANKS else []

    def _steps_since(self, moment: float) -> int:
        """Return the steps that the run's metrics note after a moment of the wall clock."""
        lines = metrics(self.home)[-4:]
        return sum(_epoch(line["time"]) > moment for line in lines if "lr" in line)

    def _ended_before(self, deadline: float) -> bool:
        """Wait until a moment of the monotonic clock; return True once the launcher has ended."""
        looks = 0
        while self.launcher.poll() is None and time.monotonic() < deadline:
            if looks % 10 == 0:
                self._count()
            looks += 1
            time.sleep(0.1)
        return self.launcher.poll() is not None

    def _count(self) -> None:
        """Take note of the resources that the attempt holds now."""
        ranks = self._ranks()
        tally = self.tallies[-1]
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            # Writers start with the first save: before it a rank holds less.
            if not ranks or not all(rank.children() for rank in ranks):
                return
            launcher = psutil.Process(self.launcher.pid)
            listening = [
                socket
                for process in (launcher, *ranks)
                for socket in process.net_connections("tcp")
                if socket.status == psutil.CONN_LISTEN
            ]
            tally.launcher = min(tally.launcher, launcher.num_fds())
            tally.ranks = min(tally.ranks, sum(rank.num_fds() for rank in ranks))
            tally.listening = min(tally.listening, len(listening))

    def _killed(self, victim: str, began: float) -> Kill:
        """Kill a process, wait until the run makes steps again, and return how long that took."""
        ranks = self._wait(lambda: self._steps_since(0) and self._ranks(), "ranks that train")
        rank = self.dice.randrange(RANKS)
        if victim == "launcher":
            pid = self.launcher.pid
        elif victim == "rank":
            pid = ranks[rank].pid
        else:
            pid = self._writer_at_work(ranks[rank]).pid
        noted = len(restarts(self.home))
        moment = time.time()
        kill = Kill(victim, rank, time.monotonic() - began)
        os.kill(pid, signal.SIGKILL)
        if victim == "launcher":
            self._wait(lambda: not self.mine(), "the end of a killed launcher's processes")
            kill.gone_s = time.time() - moment
            self.launcher.poll()
            self._start("resume", "runs/run")
        else:
            self._wait(lambda: self._goes_on(moment, noted), "a step or a restart")
            if len(restarts(self.home)) == noted:  # it was killed after its last byte
                self.say(f"{kill.at_s:6.1f} s  {victim} {rank} killed: nothing was lost")
                return kill
            self.tallies.append(Tally())
            kill.gone_s = _epoch(restarts(self.home)[-1]["time"]) - moment
        restarted = time.time()
        self._wait(lambda: self._steps_since(restarted), "a step after the kill")
        kill.first_step_s = time.time() - moment
        name = victim if victim == "launcher" else f"{victim} {rank}"
        self.say(
            f"{kill.at_s:6.1f} s  {name} killed: gone after {kill.gone_s:.2f} s, first step after"
            f" {kill.first_step_s:.2f} s"
        )
        return kill

    def _goes_on(self, moment: float, noted: int) -> bool:
        """Return whether the run has noted a restart, or has made many steps without one."""
        return len(restarts(self.home)) > noted or self._steps_since(moment + 12 * STEP_S) > 0

    def _writer_at_work(self, rank: psutil.Process) -> psutil.Process:
        """Return the writer of a rank while it works on a draft."""

        def at_work() -> psutil.Process | None:
            drafts = [*self.folder.glob("**/.saving-*")]
            return next(iter(rank.children()), None) if drafts else None

        found: psutil.Process = self._wait(at_work, "a writer at work", pause_s=0.001)
        return found

    def _wait(self, found: Callable[[], Any], thing: str, pause_s: float = 0.05) -> Any:
        deadline = time.monotonic() + RECOVERY_S
        while time.monotonic() < deadline:
            with suppress(psutil.NoSuchProcess):
                if value := found():
                    return value
            time.sleep(pause_s)
        raise AssertionError(f"waited for {thing} in vain")

    def _check_resources(self) -> None:
        """Require that no attempt held more than the first two: one began, the other resumed."""
        whole = [tally for tally in self.tallies if tally.launcher < sys.maxsize]
        for name, more in (("launcher", 0), ("ranks", RANKS * IN_FLIGHT), ("listening", 0)):
            counts = [getattr(tally, name) for tally in whole]
            usual = max(counts[:2])
            self._require(max(counts) <= usual + more, f"{name} held {counts} descriptors")
            self.done.figures[f"{name}_descriptors"] = max(counts)

    def _check_account(self, wall_s: float) -> None:
        life = json.loads((self.home / "goodput.json").read_text())
        total_s = sum(life["seconds"].values())
        apart = abs(total_s - wall_s) / wall_s
        self._require(
            apart <= APART, f"the causes add up to {total_s:.2f} s of {wall_s:.2f} s ({apart:.2%})"
        )
        goodput = life["goodput"]
        most = LOST * slowness()
        self._require(1 - goodput <= most, f"goodput is {goodput:.2%}: {life['seconds']}")
        self.done.measured.append({"goodput": goodput})
        self.done.figures |= {
            "wall_s": wall_s,
            "goodput": goodput,
            "apart": apart,
            "attempts": len(life["attempts"]),
            "steps": life["steps"],
            "steps_again": life["steps_again"],
            "slowness": slowness(),
        }

    def _check_restarts(self) -> None:
        """Require that each restart names its cause, and lost no more than an interval."""
        words = {"rank": "rank {} was ended by SIGKILL", "writer": "the writer of rank {} ("}
        causes = [
            words[kill.victim].format(kill.rank)
            for kill in self.done.kills
            if kill.victim in words and kill.first_step_s
        ]
        noted = restarts(self.home)
        named = [cause in line["error"] for cause, line in zip(causes, noted, strict=False)]
        self._require(
            len(noted) == len(causes) and all(named), f"restarts are {noted}, not of {causes}"
        )
        lost = [line["steps_lost"] for line in noted]
        self._require(max(lost, default=0) <= WORST_LOSS, f"steps lost: {lost}")
        self.done.figures |= {"named": sum(named), "most_steps_lost": max(lost, default=0)}
        self.done.measured.append({"kills_named": sum(named), "misnamed": named.count(False)})

    def _check_state(self) -> None:
        """Train the same steps without faults, at full speed, and compare the bits."""
        whole = self.folder / "whole"
        whole.mkdir()
        done = mtrain(*self.words, "checkpoint.save_interval=0", cwd=whole, timeout_s=600)
        if done.returncode:
            self.done.problems.append(f"the undisturbed run failed: {done.stderr}")
            return
        expected = result(whole / "runs/run", self.steps)
        found = result(self.home, self.steps)
        differing = [name for name in expected if expected[name] != found[name]]
        self._require(not differing, f"the run without faults has another {differing}")
        self.done.measured.append({"states": 1, "differing": values_apart(found, expected)})
        self.done.figures["shards_equal"] = sum(
            found["shards"].get(name) == value for name, value in expected["shards"].items()
        )


def _epoch(text: str) -> float:
    """Return a time of a log in seconds of the epoch."""
    from datetime import datetime

    return datetime.fromisoformat(text).timestamp()


def shared_names() -> set[str]:
    """Return the files of /dev/shm and the segments of System V."""
    names = {str(path) for path in Path("/dev/shm").glob("*")}
    with suppress(OSError):
        names |= set(Path("/proc/sysvipc/shm").read_text().splitlines()[1:])
    return names


def unowned(names: set[str]) -> set[str]:
    """Return those names that no living process has mapped: others belong to runs of others."""
    if not names:
        return set()
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            mapped += maps.read_text()
    return {name for name in names if name not in mapped}
