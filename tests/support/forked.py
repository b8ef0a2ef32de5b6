"""Runs a function on several gloo ranks, forked from the test's own process."""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import multiprocessing
import os
import pickle
import pkgutil
import struct
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.patience import patient

_FORK = multiprocessing.get_context("fork")


class RankFailed(AssertionError):
    """A rank raised, died or was late; the message holds the rank and, where it raised, its
    traceback.
    """


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 120.0
) -> list[Any]:
    """Fork `world_size` ranks, call `fn(*args)` on each inside a gloo world, return the values by
    rank.

    Ranks are forked from this process: install the adapter first (every rank then has it at no
    cost) and do no multi-threaded tensor work before. `fn` finds its rank with
    `torch.distributed.get_rank()`; it may be a closure, its return value must pickle. Each rank
    computes with one thread. No rank outlives the call.

    Raises `RankFailed` with the traceback of the first rank that failed, or with the names of the
    ranks that had not returned after `timeout_s` seconds of a machine that does nothing else.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    limit_s = patient(timeout_s)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        store = str(Path(folder) / "store")
        pipes = [_FORK.Pipe(duplex=False) for _ in range(world_size)]
        ranks = [
            _FORK.Process(
                target=_serve,
                args=(r, world_size, store, pipes[r][1], limit_s, fn, args),
                daemon=True,
            )
            for r in range(world_size)
        ]
        try:
            for process in ranks:
                process.start()
            for _, sender in pipes:
                sender.close()
            return _collect([receiver for receiver, _ in pipes], limit_s)
        finally:
            for process in ranks:
                if process.pid is not None:
                    process.kill()
                    process.join()


def run_alone(fn: Callable[[], Any], timeout_s: float = 120.0) -> Any:
    """Return `fn()` of a forked process without torch.distributed; its value must pickle.

    Raises `RankFailed` as `run_ranks` does.
    """
    receiver, sender = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_answer, args=(sender, fn))
    try:
        process.start()
        sender.close()
        return _collect([receiver], patient(timeout_s))[0]
    finally:
        process.kill()
        process.join()


def run_without_privileges(fn: Callable[[], Any]) -> Any:
    """Return `fn()` of a forked process that obeys the permissions of files, even if the tests run
    as root.

    Raises `RankFailed` as `run_ranks` does.
    """

    def bound() -> Any:
        if (
            os.geteuid() == 0
        ):  # the version of capset(2) with 64 capabilities, this process, none of any set
            header = struct.pack("=Ii", 0x20080522, 0)
            nothing = bytes(24)
            if ctypes.CDLL(None, use_errno=True).capset(header, nothing):
                raise OSError(ctypes.get_errno(), "capset")
        return fn()

    return run_alone(bound)


def _answer(sender: Connection, fn: Callable[[], Any]) -> None:
    torch.set_num_threads(1)
    try:
        sender.send_bytes(pickle.dumps((True, fn())))
    except BaseException:
        sender.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        sender.close()
        os._exit(0)


def _serve(
    rank: int,
    world_size: int,
    store: str,
    sender: Connection,
    timeout_s: float,
    fn: Callable[..., Any],
    args: Any,
) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        OMP_NUM_THREADS="1",
    )
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        value = fn(*args)
        dist.barrier()
        sender.send_bytes(pickle.dumps((True, value)))
    except BaseException:
        sender.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        sender.close()
        os._exit(0)


def _collect(receivers: list[Connection], timeout_s: float) -> list[Any]:
    values: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    while len(values) < len(receivers):
        waiting = {r: c for r, c in enumerate(receivers) if r not in values}
        ready = wait(list(waiting.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(f"ranks {sorted(waiting)} had not returned after {timeout_s:g} s")
        for rank, receiver in waiting.items():
            if receiver not in ready:
                continue
            try:
                succeeded, value = pickle.loads(receiver.recv_bytes())
            except EOFError:
                raise RankFailed(f"rank {rank} died without a word") from None
            if not succeeded:
                raise RankFailed(f"rank {rank} raised\n{value}")
            values[rank] = value
    return [values[r] for r in range(len(receivers))]


NOT_IMPORTED = ("mtrain.__main__", "mtrain.train.generate.harness")
"""A program, and what needs lm-eval."""


@cache
def import_engine(without: tuple[str, ...] = ()) -> None:
    """Install the adapter without the patches named, and import all of mtrain, once for all forks.

    A rank that finds its modules imported needs half of the time. This process has one thread from
    then on: a pool of threads does not survive a fork.
    """
    import mtrain_kernels.registry

    import mtrain
    from mtrain import mcore
    from mtrain.assembly import philox
    from mtrain.devices import registry

    torch.set_num_threads(1)
    mcore.install(registry.get("cpu"), without=without)
    for module in pkgutil.walk_packages(mtrain.__path__, "mtrain."):
        if module.name not in NOT_IMPORTED:
            importlib.import_module(module.name)
    mtrain_kernels.registry.ops()
    philox.edges()
    gc.collect()
    atexit.register(gc.unfreeze)  # else libraries report what is not freed at the end
    gc.freeze()  # no forked process looks through it for garbage, which would copy it
