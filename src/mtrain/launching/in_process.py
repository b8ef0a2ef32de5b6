"""Restarts of a run within its processes (`resilience.in_process`).

A rank that fails wakes the others. Each records its error, releases what it holds, and describes
the failure in the store of the launch, which outlives worlds. Rank 0 decides for all as the
launcher would, by the same limits. Where it refuses, or where a rank has died, the processes end
with their records, and the launcher decides.
"""

from __future__ import annotations

import json
import linecache
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from mtrain import startup, strict_json
from mtrain.ckpt import hashes
from mtrain.config.schema.run import RunConfig
from mtrain.errors import MtrainError, Preempted, say_page
from mtrain.goodput import log
from mtrain.launching.restart import ADVICE, Attempts, Memory, step_in
from mtrain.launching.supervise import NOT_RESTARTED, Supervisor
from mtrain.launching.worker import leave, record
from mtrain.train.loop.interruptions import StopRequest
from mtrain.train.run import Paths, train
from mtrain.world import abandon, faults, heartbeat, join
from mtrain.world.init import GROUP_SLACK_S
from mtrain.world.rank_env import End, RankEnv
from mtrain.world.stacks import ERRORS

if TYPE_CHECKING:
    from torch.distributed import Store

    from mtrain.devices.base import Device

PAUSE_S = 0.01
"""The pause between two questions to the store."""
FAREWELL_S = 2.0
"""Seconds that the rank which serves the store stays, so that the others read that all end."""


def train_with_restarts(
    run: RunConfig, paths: Paths, end: End, injected: Sequence[str], known: int
) -> None:
    """Train to the end, with as many restarts as `resilience` allows; `known`: the size of the file
    of restarts when the launcher began.

    Raises:
        MtrainError, Exception: see `train.run.train`; a failure that no restart helps.
    """
    rank = RankEnv.here().rank
    stop = StopRequest()
    attempts = None
    if rank == 0:
        say = _say if run.log.progress != "none" else _silent
        armed = list(map(faults.parsed, injected))
        attempts = Attempts(run, paths.folder, paths.checkpoint, paths.weights, say, armed)
        attempts.seen = known
        attempts.furthest = step_in(paths.checkpoint)
    number = 0
    while True:
        failed = _attempt(run, paths, end, stop, rank)
        if failed is None:
            return
        number += 1
        decided = _agreed(run, failed | {"stop": stop.requested}, attempts, stop, number)
        if decided is None:
            leave(failed["exit_code"])
        startup.mark(startup.JOINING)
        checkpoint = decided["checkpoint"]
        paths = Paths(paths.folder, checkpoint and Path(checkpoint), paths.weights)
        faults.arm(decided["injected"], rank)


def _attempt(
    run: RunConfig, paths: Paths, end: End, stop: StopRequest, rank: int
) -> dict[str, Any] | None:
    """Train once; return None at the end, else the record of the failure, all released."""
    from mtrain.devices import registry

    device = registry.get(run.cluster.device)
    try:
        train(run, lambda world: paths, end, stop)
        return None
    except Preempted:
        raise
    except Exception as error:
        body = record(error, paths.folder / ERRORS, rank)
        del body["traceback"]
        # A world that was never made has no store in which to agree.
        if body["exit_code"] in NOT_RESTARTED or join.store_of_launch() is None:
            raise
        abandon.abandon()  # the others wait for this rank
        before = _held(device)
    # The error is gone here, and with it the frames that refer to the model.
    startup.forget()
    startup.current()
    heartbeat.begin()
    try:
        alive = abandon.release(device)
        device.synchronize()
    except RuntimeError:  # a device that fails from now on: only a new process can use it
        leave(body["exit_code"])
    hashes.forget_all()
    linecache.clearcache()  # the record has the text of each line of the traceback
    return body | {"before": before, "after": _held(device), "alive": alive}


def _held(device: Device) -> int:
    """Return the bytes that this process holds: those allocated on its device, or on a CPU those in
    memory without the pages of files and of shared memory.
    """
    if device.is_indexed:
        return device.memory_stats()["allocated_bytes"]
    memory = psutil.Process().memory_info()
    return int(memory.rss) - int(getattr(memory, "shared", 0))


def _agreed(
    run: RunConfig,
    failed: dict[str, Any],
    attempts: Attempts | None,
    stop: StopRequest,
    number: int,
) -> dict[str, Any] | None:
    """Return the decision of rank 0 about a failure; None: the processes end."""
    from torch.distributed import PrefixStore

    launch = join.store_of_launch()
    assert launch is not None
    store = PrefixStore(f"mtrain/restart/{number}", launch)
    here = RankEnv.here()
    deadline = time.monotonic() + run.trainer.timeout_s + GROUP_SLACK_S
    with suppress(RuntimeError):  # the process that serves the store is gone
        store.set(f"failed/{here.rank}", strict_json.dumps(failed))
        if attempts is not None:
            keys = [f"failed/{rank}" for rank in range(here.size)]
            come = _await(store, keys, stop, deadline)
            bodies = [json.loads(text) for text in store.multi_get(keys)] if come else []
            store.set("decision", strict_json.dumps(_decision(attempts, bodies)))
        if _await(store, ["decision"], stop, deadline):
            decided: dict[str, Any] | None = json.loads(store.get("decision"))
            if store.add("read", 1) == here.size:
                store.set("all read", "1")
            if decided is None and here.serves:
                # The others lose the store with this process, which may end first.
                _await(store, ["all read"], stop, min(deadline, time.monotonic() + FAREWELL_S))
            return decided
    return None


def _await(store: Store, keys: list[str], stop: StopRequest, deadline: float) -> bool:
    """Wait for keys; return False if this rank is to stop, or they do not come in time."""
    while not store.check(keys):
        # The launcher stops the ranks that wait for a rank that has died.
        if stop.requested or time.monotonic() > deadline:
            return False
        time.sleep(PAUSE_S)
    return True


def _decision(attempts: Attempts, bodies: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the next start of ranks that all failed, on rank 0; None: there is none."""
    if not bodies or any(body["stop"] for body in bodies):
        return None
    failure = Supervisor(attempts.home / ERRORS, ADVICE).first_of(bodies)
    memory = Memory(*([body[key] for body in bodies] for key in ("before", "after", "alive")))
    try:
        attempts.prepare(failure, memory)
    except MtrainError:  # the launcher finds the same reason, and reports it
        return None
    log.explain(attempts.home, startup.current().begun, failure.text)
    checkpoint = attempts.checkpoint
    return {
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "injected": list(map(str, attempts.injected)),
    }


def _say(text: str) -> None:
    with suppress(OSError):
        say_page(text)


def _silent(text: str) -> None:
    """Print nothing."""
