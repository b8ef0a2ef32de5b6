"""The launchers of a run with one process on each machine: the first starts the run, and the others
follow its orders.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtrain.ckpt import local as ckpt_local
from mtrain.config.resolve.defaults import usual_join_timeout_s
from mtrain.config.schema.run import RunConfig
from mtrain.errors import BadEnvironment, MtrainError, TrainingError, say_page
from mtrain.launching import folder, local, machines, preflight
from mtrain.launching.jobs import Job
from mtrain.launching.machines import POLL_S, Connection, Director, Lost
from mtrain.launching.replication import Replication
from mtrain.launching.signals import scratch_folder
from mtrain.launching.start import Share, run_ranks
from mtrain.launching.supervise import Ended, Supervisor
from mtrain.launching.worker import describe
from mtrain.world.faults import Fault
from mtrain.world.launchers import Launched
from mtrain.world.stacks import ERRORS

# Composes the configuration for a number of machines, and returns one that this machine can run
Compose = Callable[[int], RunConfig]


def launch(place: Launched, argv: list[str], injected: Sequence[Fault], compose: Compose) -> int:
    """Start the ranks of this machine and watch them to the end; return the exit code of the run.

    Raises:
        MtrainError: no configuration can be run, a rank failed first, or a machine is lost.
    """
    if place.rank:
        with scratch_folder() as scratch, ExitStack() as stack:
            connection = machines.connected(place, usual_join_timeout_s(place.size))
            stack.callback(connection.close)
            return Follower(place, argv, compose, connection, scratch, stack).follow()
    with Director(place) as director:
        run = compose(place.size)
        machines.share_of(place, run)
        director.begin(folder.anchored(run), argv)
        with ckpt_local.asking(director.elsewhere):
            local.launch(run, argv, injected, director)
    return 0


class Follower:
    """The launcher of a machine that is not the first."""

    def __init__(
        self,
        place: Launched,
        argv: list[str],
        compose: Compose,
        connection: Connection,
        scratch: Path,
        stack: ExitStack,
    ) -> None:
        self.place = place
        self.argv = argv
        self.compose = compose
        self.connection = connection
        self.scratch = scratch
        self.stack = stack
        """Ends, with this process, what `prepare` has begun."""
        self.supervisor: FollowingSupervisor | None = None
        self.replication: Replication | None = None

    def follow(self) -> int:
        """Follow the first machine's orders until it ends the run; return the run's exit code.

        Raises:
            TrainingError: the first machine is lost.
        """
        waiting: list[dict[str, Any]] = []
        try:
            while True:
                waiting = waiting or self.connection.receive()
                message = waiting.pop(0)
                if message["do"] == "end":
                    return _ended(message)
                if message["do"] == "prepare":
                    self._prepare(message)
                if message["do"] == "show":
                    self.connection.send(self._held(Path(message["home"]), message["than"]))
                if message["do"] in ("vouch", "give", "take"):
                    one = self.replication
                    why = "it is not prepared" if one is None else one.act(message)
                    self.connection.send({"done": why})
                if message["do"] == "start":
                    waiting += self._train(message)
        except Lost:
            where = f"{self.place.host}:{self.place.port}"
            raise TrainingError(
                f"machine 0 ({where}) is lost: its launcher has ended, or the machine does not"
                " answer; the ranks of this machine were ended"
            ) from None

    def _prepare(self, message: dict[str, Any]) -> None:
        run = RunConfig.model_validate_json(message["run"])
        try:
            self._compare(run, message["words"])
            share = machines.share_of(self.place, run)
            preflight.check(run, self.argv, ranks_here=share.here)
            self.stack.enter_context(local.prepared(run, None, share))
            port = 0
            if message["token"] is not None:
                one = Replication(self.place.rank, self.place.size, message["token"])
                self.stack.callback(one.close)
                self.replication = one
                port = one.port
        except MtrainError as error:
            self.connection.send({"error": describe(error)})
        else:
            self.connection.send({"ready": True, "port": port})

    def _held(self, home: Path, than: int) -> dict[str, Any]:
        """Return the local checkpoints that this machine holds, and the copies of others' parts."""
        copies = ckpt_local.replicas(home, than, self.place.rank)
        return {
            "held": ckpt_local.intact(home, than, self.place.rank),
            "copies": ckpt_local.steps_of(copies),
        }

    def _compare(self, run: RunConfig, words: list[str]) -> None:
        """Refuse a command that describes another run than that of the first machine.

        Raises:
            MtrainError: the command is refused, or names each key that differs.
        """
        if words == self.argv:
            return
        own = folder.anchored(self.compose(self.place.size))
        if own.digest() == run.digest():
            return
        theirs = run.recorded().flat()
        ours = own.recorded().flat()
        keys = [key for key in {**theirs, **ours} if theirs.get(key) != ours.get(key)]
        different = "; ".join(f"{key}={ours.get(key)} and {theirs.get(key)}" for key in keys)
        raise BadEnvironment(
            f"this machine and the first have different configurations: {different}",
            "  fix: the same command on every machine",
        )

    def _train(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Start one attempt's ranks, and report their end; return messages that still wait."""
        run = RunConfig.model_validate_json(message["run"])
        home = Path(message["home"])
        share = replace(
            machines.share_of(self.place, run),
            port=message["port"],
            folder=self.scratch,
            leave=self._leave,
        )
        supervisor = FollowingSupervisor(home / ERRORS, self.connection)
        try:
            unseen = folder.unseen(home, run.digest())
            if unseen:
                raise BadEnvironment(*unseen.split("\n"))
            local_dir = run.checkpoint.local_dir
            ckpt_local.follow(home, local_dir, message["step"], self.place.rank)
            job = Job(message["job"], message["arguments"])
            one = self.replication
            with nullcontext() if one is None else one.running(run, home, message["addresses"]):
                given = local.environment_of(run, home, share)
                run_ranks(run, home, job, given, supervisor, share)
        except MtrainError as error:
            self.connection.send({"failing": True})
            self.connection.send({"report": _refusal(error, share)})
        else:
            self.connection.send({"report": supervisor.report()})
        if supervisor.lost:
            raise Lost
        return supervisor.waiting

    def _leave(self) -> None:
        """Close, in a forked rank, what belongs to the launcher."""
        self.connection.close()
        if self.replication is not None:
            self.replication.close()


class FollowingSupervisor(Supervisor):
    """The supervisor of a machine that is not the first, which judges nothing."""

    def __init__(self, errors: Path, connection: Connection) -> None:
        super().__init__(errors, "")
        self.connection = connection
        self.waiting: list[dict[str, Any]] = []
        """Messages other than the one that ends the ranks."""
        self.lost = False
        self.failed: list[Ended] = []

    def wait(self) -> None:
        """Wait until every rank has ended."""
        try:
            self.failed = self.watch()
        finally:
            self._restore()

    def _next(self) -> None:
        if self._reap(block=False) or not machines.ready([self.connection], POLL_S):
            return
        try:
            messages = self.connection.receive()
        except Lost:
            self.lost = True
            messages = []
        self.halted = self.lost or bool(messages)
        self.waiting += [message for message in messages if message["do"] != "halt"]

    def _announce(self) -> None:
        if self._failed():
            self._send({"failing": True})

    def _send(self, body: dict[str, Any]) -> None:
        try:
            self.connection.send(body)
        except Lost:
            self.lost = True

    def report(self) -> dict[str, Any]:
        """Return how the ranks ended; times are seconds before now, as clocks differ."""
        now = time.monotonic()
        records = [(e.rank, self._record(e.rank)) for e in self.failed]
        return {
            "ended": [[e.rank, e.status, now - e.at] for e in self.ended],
            "failed": [e.rank for e in self.failed],
            "records": [[rank, r, now - r["time"]] for rank, r in records if r is not None],
            "stops": self.stops,
        }


def _refusal(error: MtrainError, share: Share) -> dict[str, Any]:
    """Return the report of a machine that could not start its ranks."""
    record = describe(error) | {"rank": share.first, "step": 0}
    return {
        "ended": [[share.first, record["exit_code"] << 8, 0.0]],
        "failed": [share.first],
        "records": [[share.first, record, 0.0]],
        "stops": 0,
    }


def _ended(message: dict[str, Any]) -> int:
    """Report how the first machine has ended the run; return the exit code."""
    code: int = message["code"]
    if code:
        text = f"machine {os.uname().nodename} ends: {message['text']}"
        say_page(text.strip(), error=True)
    return code
