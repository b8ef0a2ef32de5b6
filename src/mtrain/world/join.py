"""This rank on its way into the world: visible to the others once torch is imported, a member once
all agree.

A separate thread talks to the store, for two reasons. The others see this rank while it still
imports. And a store whose process is stopped answers no call, not even with a timeout, so no call
to it may block the rank itself.
"""

from __future__ import annotations

import os
import platform
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import mtrain
from mtrain.config.machine import nvml
from mtrain.config.machine.devices import facts_of
from mtrain.config.machine.hardware import nvidia_gpus
from mtrain.config.machine.installed import version_of
from mtrain.config.resolve.defaults import usual_join_timeout_s
from mtrain.config.schema.run import RunConfig
from mtrain.devices import registry
from mtrain.errors import BadEnvironment, MtrainError
from mtrain.layout.grid import RankGrid
from mtrain.world.rank_env import End, RankEnv
from mtrain.world.rank_info import RankInfo, Refused
from mtrain.world.rendezvous import (
    DECIDING,
    IMPORT_FACTOR,
    Coordinator,
    Member,
    Offer,
    newest,
    offer_of,
    pause_of,
    started_before,
)

BACKLOG = 2048
# How long the rank that serves the store stays, so that the others can read why there is no world
FAREWELL_S = 2.0
# The share of the join timeout after which a rank that found no rendezvous opens one itself
PATIENCE = 0.8


class JoinAttempt:
    """One attempt of this process to join the others."""

    def __init__(self, env: RankEnv, join_timeout_s: float, end: End | None = None) -> None:
        """Reach the store, in a thread; the others see this rank after `present` describes it."""
        self.env = env
        self.join_timeout_s = join_timeout_s
        self.end = end
        self.info: RankInfo | None = None
        """The description that the others see; None: this rank has no configuration yet."""
        self.config: dict[str, Any] = {}
        self.offer: Offer | None = None
        """The offer of rank 0: made here if this is rank 0, otherwise read from the store."""
        self.offered = threading.Event()
        """Set once the offer of rank 0 has arrived, or this rank no longer waits for it."""
        self.busy = False
        """True while this rank works for all ranks before it is ready, so that they wait for it."""
        self.pause_s = pause_of(env.size)
        self.begun_at = time.monotonic()
        self.reached_at = float("inf")
        """The time from which the store can say whether rank 0 has joined."""
        self.ready = threading.Event()
        self.ready_at = float("inf")
        self.failure: str | None = None
        self.settled = threading.Event()
        self.closed = False
        self.store: dist.Store | None = None
        self.serves = False
        """Whether this process serves the store."""
        self.outcome: dict[str, Any] | None = None
        self.heard = 0.0
        """The time of the store's last answer."""
        self.trouble = ""
        self.note = ""
        threading.Thread(target=self._attend, name="mtrain join", daemon=True).start()

    def present(
        self,
        info: RankInfo,
        config: dict[str, Any],
        join_timeout_s: float,
        offer: Offer | None = None,
    ) -> None:
        """Describe this rank to the others.

        With `offer`, rank 0 offers its configuration to ranks that have none.
        """
        self.config = config
        self.join_timeout_s = join_timeout_s
        if offer is not None:
            self.offer = offer
        # This comes last: the thread reads the other fields once it sees a description.
        self.info = info

    def read_offer(self) -> Offer | None:
        """Wait for the offer of rank 0; None: it did not come in time, so this rank composes its
        own.

        Raises:
            Refused: the store did not answer, or was lost.
        """
        while not self.offered.wait(0.1):
            if self.settled.is_set():
                raise self._lost(f"was lost while the ranks came together: {self.trouble}")
            silent_s = time.monotonic() - max(self.heard, self.begun_at)
            if silent_s > self.join_timeout_s:
                self.closed = True
                raise self._unanswered()
        return self.offer

    def together(self) -> dist.Store:
        """Report this rank as ready, and wait for the others; return a store that only this world
        uses.

        Raises:
            Refused: a rank is absent, came twice, failed, or differs.
        """
        self.ready_at = time.monotonic()
        self.ready.set()
        while not self.settled.wait(0.1):
            # Only a silent store counts as lost. How long to wait for ranks is the coordinator's
            # decision.
            if time.monotonic() - max(self.heard, self.ready_at) > self.join_timeout_s:
                self.closed = True
                raise self._unanswered()
        if self.outcome is None or self.store is None:
            raise self._lost(f"was lost while the ranks came together: {self.trouble}")
        refused = self._refusal(self.outcome)
        if refused is not None:
            raise refused
        return dist.PrefixStore(f"mtrain/world/{self.outcome['number']}", self.store)

    def _unanswered(self) -> Refused:
        why = self.trouble or "it accepts connections and says nothing"
        return self._lost(f"did not answer within {self.join_timeout_s:g} s: {why}")

    def _lost(self, how: str) -> Refused:
        fix = (
            "see whether it runs, and why it ended; correct MASTER_ADDR and MASTER_PORT if it is"
            " elsewhere"
        )
        return Refused(f"{self.env.server} {how}\n  fix: {fix}", speaks=True)

    def _refusal(self, outcome: dict[str, Any]) -> Refused | None:
        if outcome["problem"] is None:
            return None
        text = "\n".join(filter(None, (outcome["problem"], self.note)))
        return Refused(text, speaks=outcome["speaker"] == self.env.rank)

    def give_up(self, why: str) -> bool:
        """Report that this rank will not come; return whether the report arrived."""
        self.failure = why
        self.ready_at = time.monotonic()
        self.ready.set()
        delivered = self.settled.wait(self.join_timeout_s)
        self.closed = True
        return delivered and not self.trouble

    def _attend(self) -> None:
        try:
            self.store = self._reach()
            self.trouble = ""
            self.outcome = self._meet(dist.PrefixStore("mtrain/join", self.store))
        except Exception as error:  # the rank waits for this thread, so it has to learn the reason
            self.trouble = (str(error) or type(error).__name__).splitlines()[0]
        refused = self._refusal(self.outcome) if self.outcome is not None else None
        if refused is not None and self.end is not None and not self.ready.is_set():
            self.end(refused, refused.speaks)  # the imports can take as long again
        self.settled.set()

    def _reach(self) -> dist.Store:
        """Return the store: of an initialised torch.distributed, served here, or elsewhere."""
        env = self.env
        if dist.is_initialized():
            return dist.distributed_c10d._get_default_store()
        if _left is not None:
            self.serves = env.serves
            return _left
        if env.host is None:
            # A process without a launcher is a world of one rank, and needs no port.
            return dist.HashStore()
        served: dict[str, Any] = {
            "world_size": env.size,
            "wait_for_workers": False,
            "timeout": timedelta(seconds=60),
        }
        fd = self._listening() if env.serves else None
        self.serves = fd is not None
        if fd is not None:
            self._wait_for_name(env.host)
            return dist.TCPStore(env.host, env.port, is_master=True, master_listen_fd=fd, **served)
        while not self.closed:
            try:  # torch's own attempts to connect are loud
                socket.create_connection((env.host, env.port), timeout=1.0).close()
                break
            except OSError as error:
                self.trouble = error.strerror or str(error)
                time.sleep(0.1)
        return dist.TCPStore(env.host, env.port, is_master=False, **served)

    def _wait_for_name(self, host: str) -> None:
        """Wait until the name of this machine resolves, which may take a while after the machine
        has started.

        torch would retry for a minute, and log each attempt.
        """
        while not self.closed:
            try:
                socket.getaddrinfo(host, self.env.port)
                break
            except OSError as error:
                self.trouble = f"MASTER_ADDR={host}: {error.strerror or error}"
                time.sleep(0.1)

    def _listening(self) -> int | None:
        """Return a socket listening at the store's port; None if the port is taken."""
        if self.env.listen_fd is not None:
            return self.env.listen_fd
        # The host's name may resolve to either family, so the socket takes both where it can.
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        try:
            listener = socket.create_server(
                ("", self.env.port), family=family, dualstack_ipv6=both, backlog=BACKLOG
            )
        except OSError as error:
            self.trouble = f"port {self.env.port} of this machine: {error.strerror}"
            return None
        # torch's server owns the descriptor from here on; the socket object would close it.
        return listener.detach()

    def _meet(self, root: dist.Store) -> dict[str, Any] | None:
        """Take part in the newest rendezvous until it has an outcome."""
        member: Member | None = None
        coordinator: Coordinator | None = None
        self.reached_at = time.monotonic()
        if self.env.rank == 0:
            # Ranks that wait for an offer then know that one may come, and wait longer.
            root.add(DECIDING, 1)
        while not self.closed:
            self.heard = time.monotonic()
            if self.env.rank == 0 and self.info is not None and coordinator is None:
                coordinator = self._coordinator(root, self.info)
                coordinator.open(root)
                root.add(DECIDING, -1)
            if self.info is None:
                self._look_for_offer(root)
                time.sleep(self.pause_s)
                continue
            number = newest(root)
            if number is not None and (member is None or member.number != number):
                member = Member(root, number, self.info, self.config)
            if member is not None and self.ready.is_set():
                member.report(self.failure)
            elif member is not None and self.busy:
                member.liveness.beat()
            # A coordinator whose rendezvous was replaced is a member of the newer one like any
            # other.
            compares = coordinator is not None and coordinator.number == number
            if coordinator is not None and compares:
                coordinator.look()
            outcome = member.outcome() if member is not None else None
            late = member is not None and member.came_late(outcome)
            if member is not None and not late:
                if outcome:
                    return self._take_leave(member, outcome)
                if self.failure and member.reported and coordinator is None:
                    return None
            waited = time.monotonic() - self.ready_at
            if (member is None or late) and waited > self.join_timeout_s * PATIENCE:
                coordinator = self._coordinator(root, self.info, waited)
                coordinator.open_instead_of(number, root)
            # A coordinator waits at most IMPORT_FACTOR timeouts for imports, and its outcome is due
            # by then.
            limit_s = self.join_timeout_s * (IMPORT_FACTOR + 2)
            if member is not None and not compares and member.is_forsaken(self.ready_at, limit_s):
                raise ValueError("the rank that compares all ranks has fallen silent")
            # A rank that becomes ready during the pause reports at once.
            (time.sleep if self.ready.is_set() else self.ready.wait)(self.pause_s)
        return None

    def _look_for_offer(self, root: dist.Store) -> None:
        """Read the offer of rank 0 from the newest rendezvous; stop waiting for a rank 0 that does
        not come.

        A rank 0 that has reached the store may still search for a layout, so it gets as long as a
        rank that imports.
        """
        if self.offered.is_set() or self.env.rank == 0:
            return
        # Read this first: once rank 0 has decided, its rendezvous exists.
        decides = root.add(DECIDING, 0) > 0
        number = newest(root)
        if number is not None:
            self.offer = offer_of(root, number)
        patience_s = self.join_timeout_s * (IMPORT_FACTOR if decides else PATIENCE)
        if self.offer is not None or time.monotonic() - self.reached_at > patience_s:
            self.offered.set()

    def _coordinator(self, root: dist.Store, info: RankInfo, waited_s: float = 0.0) -> Coordinator:
        if started_before(root):
            self.note = (
                "note: ranks started on this store before; if they still run, RANK is given twice"
            )
        return Coordinator(root, info, self.config, self.join_timeout_s, waited_s, self.offer)

    def _take_leave(self, member: Member, outcome: dict[str, Any]) -> dict[str, Any]:
        """Let the others read a final outcome before this process ends and its store with it."""
        until = time.monotonic() + FAREWELL_S
        if outcome["problem"] is not None:
            if not self.serves:
                member.acknowledge()
            # Ranks that failed read no outcome, and this rank has read it.
            others = outcome["able"] - (self.failure is None)
            while self.serves and not member.all_read(others) and time.monotonic() < until:
                time.sleep(self.pause_s)
        return outcome | {"number": member.number}


_attempt: JoinAttempt | None = None
_joined = False
_left: dist.Store | None = None
"""The store of the launch, for a rank that has left its world and joins again."""


def arrive(join_timeout_s: float, end: End | None = None) -> JoinAttempt:
    """Begin to reach the store of the launch, without waiting for it; a second call changes
    nothing.

    `end` ends a process that is refused while it still imports; without it, `together` raises the
    refusal.

    Raises:
        BadEnvironment: the launcher's variables contradict each other.
    """
    global _attempt
    if _attempt is None:
        _attempt = JoinAttempt(RankEnv.here(), join_timeout_s, end)
    return _attempt


def announce(run: RunConfig, end: End | None = None, words: Sequence[str] | None = None) -> None:
    """Make this rank known to the others, without waiting for any; a second call changes nothing.

    `end`: see `arrive`. `words` are the command-line words of rank 0: a rank that was started with
    the same words takes its configuration from rank 0.

    Raises:
        BadEnvironment: the launcher's variables contradict each other, or there is no such device.
    """
    attempt = arrive(timeout_of(run), end)
    if attempt.info is None:
        offer = None if words is None else Offer(run.model_dump_json(), tuple(words))
        attempt.present(_rank_info(run, attempt.env), run.recorded().flat(), timeout_of(run), offer)


def timeout_of(run: RunConfig) -> float:
    """Return how long the others wait for a rank that has not joined, in seconds."""
    known = run.trainer.join_timeout_s
    return usual_join_timeout_s(run.cluster.nodes) if known is None else known


@contextmanager
def working() -> Iterator[None]:
    """Keep the others waiting while this rank works in this block, as long as it is alive."""
    attempt = _attempt
    if attempt is not None:
        attempt.busy = True
    try:
        yield
    finally:
        if attempt is not None:
            attempt.busy = False


def together(run: RunConfig) -> dist.Store:
    """Wait for all ranks and agree with them; return a store that only this world uses.

    Raises:
        Refused: the same on every rank: which ranks are absent, came twice, failed, or differ.
    """
    global _attempt, _joined, _left
    announce(run)
    assert _attempt is not None
    store = _attempt.together()
    _left = _attempt.store if run.resilience.in_process else None
    _attempt = None
    _joined = True
    return store


def store_of_launch() -> dist.Store | None:
    """Return the store of the launch, which outlives worlds; None before the first world."""
    return _left


def give_up(error: BaseException) -> bool:
    """Report to the ranks that wait for this one why it will not come; return whether they know.

    Ranks that were in one world, were refused together, or were all interrupted need no report.
    """
    if _joined or isinstance(error, Refused | KeyboardInterrupt):
        return True
    text = str(error) if isinstance(error, MtrainError) else f"{type(error).__name__}: {error}"
    try:
        attempt = arrive(usual_join_timeout_s(1))
    except BadEnvironment:  # the address of the others is unknown
        return False
    if attempt.info is None:
        attempt.present(bare_info(attempt.env), {}, attempt.join_timeout_s, Offer("", (), text))
    return attempt.give_up(text)


def bare_info(env: RankEnv) -> RankInfo:
    """Return the description of a rank that has no configuration."""
    return RankInfo(env.rank, env.size, platform.node(), os.getpid())


def _rank_info(run: RunConfig, env: RankEnv) -> RankInfo:
    facts = {
        "mtrain": mtrain.__version__,
        "megatron-core": version_of("megatron-core") or "not installed",
        "torch": str(torch.__version__),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "backend": registry.get(run.cluster.device).backend,
        "grid": str(RankGrid.of(run)),
    }
    return RankInfo(
        env.rank, env.size, platform.node(), os.getpid(), run.digest(), facts, _only_gpu(run, env)
    )


def _only_gpu(run: RunConfig, env: RankEnv) -> str:
    """Return the UUID of the only GPU that a scheduler shows this rank; empty: it shows several, or
    the UUID is unknown.

    A rank that sees one GPU takes it, whatever the rank's number on the machine. A task cannot find
    out by itself whether each task has a GPU of its own.
    """
    if not env.launcher or not facts_of(run.cluster.device).counted:
        return ""
    gpus = nvidia_gpus(os.environ, driver=nvml.driver()).gpus
    return gpus[0].uuid if len(gpus) == 1 else ""
