"""The launchers of a run on several machines: that of the first machine directs the others.

Each of the others holds one connection to the first, on which lines of JSON go both ways. A process
that ends closes its connection at once; a machine that is lost answers no probe of the kernel. No
launcher has a thread, so each may fork its ranks again.

The first machine sends `prepare`, `show` (local checkpoints), `vouch` (for a copy of another
machine's part), `give` and `take` (such a part), `start` (the ranks of one attempt), `halt` (end
them) and `end`. The others answer `ready`, `held`, `done` (an order about a part), `failing` (a
rank has failed) and `report` (all ranks have ended).
"""

from __future__ import annotations

import json
import platform
import secrets
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any

from mtrain import strict_json
from mtrain.ckpt.local import Elsewhere, Held
from mtrain.config.schema.run import RunConfig
from mtrain.errors import BadEnvironment, ConfigError, MtrainError, Problem, TrainingError
from mtrain.launching.jobs import Job
from mtrain.launching.replication import Replication
from mtrain.launching.start import ANY_HOST, Share, listening
from mtrain.launching.supervise import CAUSE_S, END_S, GRACE_S, Ended, Failure, Supervisor
from mtrain.launching.worker import revive
from mtrain.layout.grid import RankGrid
from mtrain.world.launchers import Launched

# Seconds between two looks for ranks that have ended
POLL_S = 0.05
# Seconds that another machine has to end its ranks and report, before it counts as lost
REPORT_S = GRACE_S + CAUSE_S + END_S + 10.0
# Seconds that the first machine waits for others that shall read why it does not start
FAREWELL_S = 5.0
SEND_S = 10.0
# A machine that answers nothing counts as lost after IDLE_S + PROBES * PROBE_S seconds.
IDLE_S = 4
PROBE_S = 2
PROBES = 3
# The most bytes of a message; a longer one is not of a launcher
LONGEST = 1 << 26


class Lost(Exception):
    """The process at the other end has ended, or its machine does not answer."""


class Connection:
    """One end of the connection of two launchers."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self.read = b""
        end.settimeout(SEND_S)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", IDLE_S),
            ("TCP_KEEPINTVL", PROBE_S),
            ("TCP_KEEPCNT", PROBES),
            ("TCP_USER_TIMEOUT", 1000 * (IDLE_S + PROBES * PROBE_S)),
        ):
            if hasattr(socket, name):  # Linux
                end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        """Return the descriptor, by which `wait` finds out whether something has arrived."""
        return self.socket.fileno()

    def send(self, body: dict[str, Any]) -> None:
        """Send a message.

        Raises:
            Lost: nobody takes it.
        """
        try:
            self.socket.sendall(strict_json.dumps(body).encode() + b"\n")
        except OSError as error:
            raise Lost(error.strerror or str(error)) from None

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that the next bytes complete.

        Raises:
            Lost: the connection has ended, or somebody else than a launcher is at its other end.
        """
        # The first machine may be silent for minutes, and the kernel notices if it is lost.
        wait([self.socket])
        try:
            data = self.socket.recv(1 << 16)
        except OSError as error:
            raise Lost(error.strerror or str(error)) from None
        self.read += data
        if not data or len(self.read) > LONGEST:
            raise Lost("the connection was closed")
        *lines, self.read = self.read.split(b"\n")
        try:
            bodies = [json.loads(line) for line in lines]
        except ValueError:
            raise Lost("no launcher speaks there") from None
        if not all(isinstance(body, dict) for body in bodies):
            raise Lost("no launcher speaks there")
        return bodies

    def close(self) -> None:
        """Close this end."""
        self.socket.close()


def ready(
    connections: Sequence[Connection], seconds: float | None, listener: socket.socket | None = None
) -> list[Connection] | None:
    """Return the connections on which something arrives within so many seconds, None: ever.

    Returns None if somebody connects to `listener`.
    """
    found: list[Any] = wait([*connections, *([listener] if listener else [])], seconds)  # type: ignore[list-item]
    return None if listener in found else found


@dataclass
class Peer:
    """The launcher of another machine, as the first machine knows it."""

    number: int
    host: str
    connection: Connection
    ready: bool = False
    report: dict[str, Any] | None = None
    """The end of its ranks; None: they still run."""
    reported: float = 0.0
    refused: dict[str, Any] | None = None
    """The error with which it cannot run its share."""
    held: Held | None = None
    """The parts of local checkpoints that it holds; None: not asked, or silent."""
    done: str | None = None
    """The error of the last order about a part, or an empty text; None: not given, or not done."""
    port: int = 0
    """The port at which it takes copies of other machines' parts."""

    @property
    def name(self) -> str:
        """Return the machine in words."""
        return f"machine {self.number} ({self.host})"


@dataclass
class Director:
    """The launcher of the first machine, which directs the others."""

    place: Launched
    peers: dict[int, Peer] = field(default_factory=dict)
    lost: list[tuple[float, int, str]] = field(default_factory=list)
    """Machines lost in this attempt: the time, the number and the host."""
    halted: bool = False
    """True once the ranks of all machines have to end."""
    words: Sequence[str] = ()
    run: RunConfig | None = None
    replication: Replication | None = None
    """The copies of local checkpoints on other machines; None: the run has none."""

    def __enter__(self) -> Director:
        """Listen at the port of the run.

        Raises:
            BadEnvironment: the port is taken.
        """
        try:
            self.listener = listening(ANY_HOST, self.place.port)
        except OSError as error:
            raise BadEnvironment(
                f"port {self.place.port} of this machine cannot serve the other machines:"
                f" {error.strerror or error}",
                "  fix: MASTER_PORT=PORT, one that is free, on every machine",
            ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Tell the others how the run has ended."""
        text = str(error or "")
        if isinstance(error, MtrainError) and self.run is None:
            self._gather(FAREWELL_S)
            text = f"the first machine has no configuration to run: {text}"
        usual = 0 if error is None else 1
        code = getattr(error, "exit_code", 130 if kind is KeyboardInterrupt else usual)
        for peer in list(self.peers.values()):
            self._send(peer, {"do": "end", "code": code, "text": text})
        self.leave()

    def leave(self) -> None:
        """Close all connections, also in a process that was forked from this one."""
        self.listener.close()
        if self.replication is not None:
            self.replication.close()
        for peer in self.peers.values():
            peer.connection.close()

    @property
    def share(self) -> Share:
        """Return the ranks of this machine."""
        return share_of(self.place, self.run)

    def begin(self, run: RunConfig, words: Sequence[str]) -> None:
        """Have all machines prepare for a run, whose command has these `words`.

        Raises:
            ConfigError: there are too few machines for the copies of local checkpoints.
            BadEnvironment: a machine did not come in time.
        """
        self.run = run
        self.words = words
        replicas = run.checkpoint.local_replicas
        if replicas is not None:
            if replicas >= self.place.size:
                why = f"mtrain was started on {self.place.size} machines"
                fix = f"checkpoint.local_replicas={self.place.size - 1}"
                raise ConfigError(
                    [Problem("MT479", "checkpoint.local_replicas", replicas, why, fix)]
                )
            self.replication = Replication(0, self.place.size, secrets.token_hex(32))
        absent = self._complete()
        if absent:
            missing = ", ".join(map(str, absent))
            raise BadEnvironment(
                f"no process of machine {missing} of 0 to {self.place.size - 1} came within"
                f" {run.trainer.join_timeout_s:g} s",
                "  fix: see whether the command runs there, with MASTER_ADDR"
                f"={self.place.host} and MASTER_PORT={self.place.port}; or, where machines start"
                f" further apart, trainer.join_timeout_s={run.trainer.join_timeout_s * 10:g}",
            )

    def wait_ready(self) -> None:
        """Wait until every machine is prepared.

        Raises:
            MtrainError: one cannot run its share, or is lost.
        """
        while not self.lost:
            for peer in self.peers.values():
                if peer.refused is not None:
                    raise revive(peer.refused, f"machine {peer.number} ({peer.host}): ")
            if all(peer.ready for peer in self.peers.values()):
                return
            self._hear(None)
        for _, number, host in self.lost:
            raise TrainingError(f"machine {number} ({host}) is lost: its launcher has ended")

    @property
    def elsewhere(self) -> Elsewhere:
        """Return the other machines, as holders of local checkpoints."""
        assert self.run is not None
        return Elsewhere(RankGrid.of(self.run).sizes, self.place.size, self._held, self._bring)

    def _held(self, home: Path, than: int) -> dict[int, Held]:
        for peer in list(self.peers.values()):
            peer.held = None
            self._send(peer, {"do": "show", "home": str(home.absolute()), "than": than})
        while any(peer.held is None for peer in self.peers.values()):
            self._hear(None)
        found = {peer.number: peer.held or Held(peer.name) for peer in self.peers.values()}
        # One without a launcher now shows nothing, and another one may come without the files.
        return found | {number: Held(f"machine {number} ({host})") for _, number, host in self.lost}

    def _bring(self, home: Path, step: int, machine: int, holder: int) -> str:
        """Have a machine get its part of a local checkpoint from another one; return the error."""
        if self.replication is None:
            return "this start has no checkpoint.local_replicas"
        if why := self._ordered({holder: {"do": "vouch", "of": machine}}, home, step):
            return why
        address = self.addresses[machine]
        orders: dict[int, dict[str, Any]] = {
            machine: {"do": "take"},
            holder: {"do": "give", "of": machine, "to": address},
        }
        return self._ordered(orders, home, step)

    def _ordered(self, orders: dict[int, dict[str, Any]], home: Path, step: int) -> str:
        """Have machines, maybe this one, act on a part together; return the first error."""
        assert self.replication is not None
        place = {"home": str(home.absolute()), "step": step}
        peers = [self.peers.get(number) for number in orders if number]
        for peer in peers:
            if peer is None:
                return "a machine is lost"
            peer.done = None
            self._send(peer, orders[peer.number] | place)
        found = [self.replication.act(orders[0] | place)] if 0 in orders else []
        while waiting := [one for one in peers if one is not None and one.done is None]:
            if any(one.number not in self.peers for one in waiting):
                return "a machine is lost"
            self._hear(None)
        found += [peer.done or "" for peer in peers if peer is not None]
        return next(filter(None, found), "")

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Return the places where machines take copies of local checkpoints."""
        assert self.replication is not None
        found = {0: (self.place.host, self.replication.port)}
        for peer in self.peers.values():
            found[peer.number] = (peer.connection.socket.getpeername()[0], peer.port)
        return [found.get(number, ("", 0)) for number in range(self.place.size)]

    def replace(self) -> list[int]:
        """Wait for new launchers of the lost machines; return the numbers that are still absent."""
        self.lost.clear()
        absent = self._complete()
        if not absent:
            self.wait_ready()
        return absent

    def share_of(self, run: RunConfig, home: Path, job: Job, step: int) -> Share:
        """Return this machine's ranks for an attempt from `step` that starts those of others."""
        return replace(
            self.share, begin=lambda port: self._start(run, home, job, step, port), leave=self.leave
        )

    def _start(self, run: RunConfig, home: Path, job: Job, step: int, port: int) -> None:
        """Have the others start their ranks, whose store is that of rank 0 at `port`."""
        self.lost.clear()
        self.halted = False
        for peer in list(self.peers.values()):
            peer.report = None
            self._send(
                peer,
                {
                    "do": "start",
                    "run": run.model_dump_json(),
                    "home": str(home.absolute()),
                    "job": job.name,
                    "arguments": dict(job.arguments),
                    "port": port,
                    "step": step,
                    "addresses": self.addresses if self.replication is not None else [],
                },
            )

    def attend(self, seconds: float) -> bool:
        """Read what the others report within so many seconds; return whether all have to halt."""
        self._hear(seconds)
        return self.halted

    def halt(self) -> None:
        """Have the others end their ranks."""
        self.halted = True
        for peer in list(self.peers.values()):
            self._send(peer, {"do": "halt"})

    def collect(self, supervisor: DirectingSupervisor) -> list[Ended]:
        """Wait for the reports of all machines; return the ranks that failed there."""
        told = self.halted
        deadline = time.monotonic() + REPORT_S
        while waiting := [peer for peer in self.peers.values() if peer.report is None]:
            if self.attend(POLL_S) and not told:
                told = True
                self.halt()
                deadline = time.monotonic() + REPORT_S
            if told and time.monotonic() > deadline:
                for peer in waiting:
                    self._lose(peer)
        failed: list[Ended] = []
        for peer in self.peers.values():
            assert peer.report is not None
            at = peer.reported
            ended = {
                rank: Ended(rank, status, at - ago) for rank, status, ago in peer.report["ended"]
            }
            supervisor.ended += ended.values()
            supervisor.stopped_elsewhere |= peer.report["stops"] > 0
            for rank, record, ago in peer.report["records"]:
                supervisor.records[rank] = {**record, "time": at - ago}
            failed += [ended[rank] for rank in peer.report["failed"]]
        return failed

    def _complete(self) -> list[int]:
        """Wait until every machine has a prepared launcher; return the absent numbers."""
        assert self.run is not None
        absent = self._gather(self.run.trainer.join_timeout_s)
        token = None if self.replication is None else self.replication.token
        body = {
            "do": "prepare",
            "run": self.run.model_dump_json(),
            "words": list(self.words),
            "token": token,
        }
        for peer in list(self.peers.values()):
            if not peer.ready and not absent:
                self._send(peer, body)
        return absent

    def _gather(self, seconds: float) -> list[int]:
        """Wait for the launchers of all machines; return the numbers of absent ones."""
        deadline = time.monotonic() + seconds
        strangers: list[Connection] = []
        while absent := [n for n in range(1, self.place.size) if n not in self.peers]:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            known = {peer.connection: peer for peer in self.peers.values()}
            heard = ready([*strangers, *known], left_s, self.listener)
            if heard is None:
                strangers.append(Connection(self.listener.accept()[0]))
                continue
            for one in heard:
                try:
                    messages = one.receive()
                except Lost:
                    if one in known:
                        self._lose(known[one])
                    else:
                        strangers.remove(one)
                        one.close()
                    continue
                if one in strangers and messages:
                    strangers.remove(one)
                    self._admit(one, messages[0])
        for one in strangers:
            one.close()
        return absent

    def _admit(self, connection: Connection, hello: dict[str, Any]) -> None:
        number = hello.get("machine")
        host = str(hello.get("host"))
        if not isinstance(number, int) or number not in range(1, self.place.size):
            connection.close()
            return
        taken = self.peers.get(number)
        if taken is None:
            self.peers[number] = Peer(number, host, connection)
            return
        text = f"machine {number} is given twice: to {taken.host} and to {host}"
        with suppress(Lost):
            connection.send({"do": "end", "code": BadEnvironment.exit_code, "text": text})
        connection.close()

    def _hear(self, seconds: float | None) -> None:
        """Record the others' messages within so many seconds, None: the next ones."""
        known = {peer.connection: peer for peer in self.peers.values()}
        for one in ready(list(known), seconds) or ():
            peer = known[one]
            try:
                messages = one.receive()
            except Lost:
                self._lose(peer)
                continue
            for message in messages:
                if "report" in message:
                    peer.reported = time.monotonic()
                peer.report = message.get("report", peer.report)
                peer.refused = message.get("error", peer.refused)
                peer.done = message.get("done", peer.done)
                peer.port = message.get("port", peer.port)
                if "held" in message:
                    copies = {int(of): steps for of, steps in message["copies"].items()}
                    peer.held = Held(peer.name, message["held"], copies)
                peer.ready = peer.ready or "ready" in message
                self.halted = self.halted or "failing" in message

    def _send(self, peer: Peer, body: dict[str, Any]) -> None:
        try:
            peer.connection.send(body)
        except Lost:
            self._lose(peer)

    def _lose(self, peer: Peer) -> None:
        if self.peers.pop(peer.number, None) is not None:
            peer.connection.close()
            self.lost.append((time.monotonic(), peer.number, peer.host))
            self.halted = True


class DirectingSupervisor(Supervisor):
    """The supervisor of the first machine, which judges the ranks of all machines."""

    def __init__(self, errors: Path, advice: str, director: Director) -> None:
        super().__init__(errors, advice)
        self.director = director
        self.records: dict[int, dict[str, Any]] = {}
        """The records of failed ranks of other machines."""

    def _next(self) -> None:
        if not self._reap(block=False):
            self.halted = self.director.attend(POLL_S)

    def _announce(self) -> None:
        self.director.halt()

    def _of_all(self, failed: list[Ended]) -> list[Ended]:
        failed = [*failed, *self.director.collect(self)]
        return sorted(failed, key=lambda ended: ended.at)

    def _record(self, rank: int) -> dict[str, Any] | None:
        return self.records.get(rank) or super()._record(rank)

    def _lost(self, failed: list[Ended]) -> Failure | None:
        """Return the failure of the machine that was lost before any rank failed by itself."""
        if not self.director.lost:
            return None
        at, number, host = self.director.lost[0]
        records = [record for ended in failed if (record := self._record(ended.rank))]
        own = [record["time"] for record in records if not record["peer_lost"]]
        own += [ended.at for ended in failed if ended.signal == signal.SIGKILL]
        if min(own, default=at) < at:
            return None
        here = self.director.share.here
        text = (
            f"machine {number} ({host}, ranks {number * here} to {number * here + here - 1}) is"
            " lost: its launcher has ended, or the machine does not answer"
        )
        step = max((record["step"] for record in records), default=0)
        error = TrainingError(self._advised(text))
        return Failure(number * here, "machine lost", text, error, step, restart_helps=True)


def share_of(place: Launched, run: RunConfig | None) -> Share:
    """Return the ranks of a run that the machine of a launcher starts.

    Raises:
        BadEnvironment: the number of machines does not divide that of the ranks.
    """
    assert run is not None
    ranks = run.parallel.ranks
    if ranks % place.size:
        raise BadEnvironment(
            f"the layout has {ranks} ranks, and one process was started on each of {place.size}"
            " machines: as many ranks run on each",
            f"  fix: a number of machines that divides {ranks}, or a task for each rank",
        )
    here = ranks // place.size
    return Share(place.rank * here, here, place.host)


def connected(place: Launched, patience_s: float) -> Connection:
    """Return a connection to the launcher of the first machine, which knows this one.

    Raises:
        BadEnvironment: it does not answer.
    """
    deadline = time.monotonic() + patience_s
    why = ""
    while time.monotonic() < deadline:
        try:
            end = socket.create_connection((place.host, place.port), timeout=1.0)
        except OSError as error:
            why = error.strerror or str(error)
            time.sleep(0.1)
            continue
        connection = Connection(end)
        with suppress(Lost):
            connection.send({"machine": place.rank, "host": platform.node()})
            return connection
    raise BadEnvironment(
        f"the process of the first machine, {place.host}:{place.port}, did not answer within"
        f" {patience_s:g} s: {why}",
        "  fix: see whether it runs there; MASTER_ADDR and MASTER_PORT name another place",
    )
