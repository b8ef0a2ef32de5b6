"""The process of one rank: it runs the job, and leaves a record of a failure with its cause:
another rank's failure, a fault of the environment, or the rank itself.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from mtrain import startup, strict_json
from mtrain.config.schema.run import RunConfig
from mtrain.errors import (
    NO_MEMORY,
    BadEnvironment,
    ConfigError,
    CorruptData,
    MtrainError,
    Preempted,
    Problem,
    Related,
    TrainingError,
    of_the_place,
    say_page,
    show,
)
from mtrain.launching.environment import Place, apply, conflicts, environment
from mtrain.launching.limits import raise_files
from mtrain.units import bytes_
from mtrain.world.heartbeat import heartbeat
from mtrain.world.rank_env import End, RankEnv


def enter(run: RunConfig, end: End) -> None:
    """Announce this rank to the others, then import megatron-core for the run's device, which takes
    seconds.

    `end` ends the process if the others refuse it meanwhile.

    Raises:
        BadEnvironment: a variable that the user set would change the run.
    """
    startup.mark(startup.PROCESS if startup.continued() else startup.COMPOSITION)
    ready_environment(run)
    # before the first connection: a rank of a large world needs one for each peer
    raise_files(RankEnv.here().size)
    from mtrain.world import join

    join.announce(run, end)
    from mtrain import mcore as adapter
    from mtrain.devices import registry

    adapter.install(registry.get(run.cluster.device))


def ready_environment(run: RunConfig) -> None:
    """Set the variables that the launcher has not set, before a library that reads them is
    imported.

    Raises:
        BadEnvironment: a variable that the user set would change the run.
    """
    settings = environment(run, place_here(), os.environ)
    apply(settings, os.environ)
    wrong = conflicts(settings)
    if wrong:
        raise BadEnvironment(*wrong)


def place_here() -> Place:
    """Return the place of this rank, as its launcher set it."""
    env = RankEnv.here()
    return Place.here(env.local_size, on_one_machine=env.size == env.local_size)


def record_name(rank: int) -> str:
    """Return the name of the file that records the failure of a rank."""
    return f"rank_{rank:05d}.json"


def run_rank(job: Callable[[], None], errors: Path, rank: int) -> int:
    """Run `job`; return the exit code, after writing a failure to `errors`."""
    try:
        job()
    except Preempted as stop:
        return stop.exit_code
    except BaseException as error:  # the process ends here, whatever the error
        code: int = record(error, errors, rank)["exit_code"]
        return code
    return 0


def record(error: BaseException, errors: Path, rank: int) -> dict[str, Any]:
    """Record how this rank failed, so that the launcher can find the cause; return the record."""
    body = describe(error) | {
        "rank": rank,
        "step": heartbeat.step,
        "time": time.monotonic(),
        "traceback": "".join(traceback.format_exception(error)),
    }
    try:
        errors.mkdir(parents=True, exist_ok=True)
        # Renamed when complete, as the launcher may read the folder at any time. Another thread of
        # this rank may record the failure of a peer meanwhile.
        draft = errors / f".{record_name(rank)}.{threading.get_native_id()}"
        draft.write_text(strict_json.dumps(body))
        draft.replace(errors / record_name(rank))
    except OSError as why:  # a full disk must not hide the error itself
        with suppress(OSError):
            text = f"rank {rank}: {body['kind']}: {body['message']}"
            say_page(f"{text}\n  no record of it, because of {why}", error=True)
    return body


def end(error: MtrainError, errors: Path, rank: int) -> None:
    """End this process from any thread, leaving a record; its main thread may hang."""
    record(error, errors, rank)
    os._exit(error.exit_code)


def revive(body: dict[str, Any], prefix: str = "") -> MtrainError:
    """Return the error that `describe` described; an unexpected one becomes a training fault."""
    if body["kind"] == "ConfigError":
        return ConfigError([_problem(values) for values in body["problems"]])
    kinds = {error.exit_code: error for error in (BadEnvironment, CorruptData, TrainingError)}
    return kinds.get(body["exit_code"], TrainingError)(*f"{prefix}{body['message']}".split("\n"))


def _problem(values: dict[str, Any]) -> Problem:
    fields = {**values, "related": tuple(Related(**key) for key in values["related"])}
    return Problem(**fields)


def leave(code: int) -> NoReturn:
    """End this process now: no destructor may wait for a rank that has ended."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader may have closed the stream
            stream.flush()
    os._exit(code)


# Texts of the errors that a rank gets because another rank has failed or has not arrived
PEER_LOST = (
    # gloo, and torch's store
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection refused",
    "recv timeout",
    "timed out waiting",
    "application timeout caused pair closure",
    "no more data",
    "connection was likely closed",
    "remote peer closed the connection",
    "wait timeout after",
    "socket timeout",
    # NCCL, and torch's process groups of it
    "remote process exited",
    "ncclremoteerror",
    "connection closed by remote peer",
    "got completion from peer",
    "nccl communicator was aborted",
    "communicator encountered error set by processgroupnccl",
    "watchdog caught collective operation timeout",
    "timed out in blocking wait",
    "some nccl operations have failed or timed out",
    "remote error detected from rank",
    "received a dump signal due to a collective timeout",
    "possible application crash on rank 0",
    # `world.abandon`
    "another rank has failed",
)
# Texts of a fault of this rank, whatever else the error contains: NCCL repeats errors of the device
# or disk.
OWN = (
    "out of memory",
    "cuda error",
    "cuda failure",
    "unhandled cuda error",
    "shared memory segment",
    "no space left on device",
)
NO_DESCRIPTOR = re.compile(r"too many open files", re.IGNORECASE)
ASKED = re.compile(r"allocate (\d+) bytes")
LESS_MEMORY = "fewer ranks on this machine, or a smaller trainer.micro_batch_size"
NO_THREAD = re.compile(
    r"can't start new thread|thread creation failed|resource temporarily unavailable", re.IGNORECASE
)
NO_ADDRESS = re.compile(
    r"(?:unable to find address for|look up the IP address for interface):?\s*(\S*)", re.IGNORECASE
)
NO_HOST = re.compile(
    r"name or service not known|nodename nor servname|temporary failure in name"
    r" resolution|getaddrinfo|gai error|"
    r"unable to resolve hostname|failed to look up the IP address for the hostname",
    re.IGNORECASE,
)
NO_SHARED_MEMORY = re.compile(r"error while creating shared memory segment", re.IGNORECASE)
BAD_VALUE = re.compile(r"invalid value for environment variable:?\s*(\w+)", re.IGNORECASE)


def is_peer_lost(text: str) -> bool:
    """Return whether an error with this text is the consequence of another rank's failure."""
    lower = text.lower()
    return any(sign in lower for sign in PEER_LOST) and not any(sign in lower for sign in OWN)


def describe(error: BaseException) -> dict[str, Any]:
    """Return an error as values that JSON can hold, enough for `worker.revive`.

    A fault of the environment becomes a BadEnvironment.
    """
    if not isinstance(error, MtrainError):
        # EAGAIN means a lock that another process holds, or a process that cannot be started.
        of_place = None if isinstance(error, BlockingIOError) else of_the_place(error)
        fault = environment_fault(error) or of_place
        if fault is not None:
            return describe(fault)
    expected = isinstance(error, MtrainError)
    text = str(error)
    # the problems themselves, so that the launcher prints each with its key, source and fix
    problems = error.problems if isinstance(error, ConfigError) else ()
    return {
        "kind": type(error).__name__,
        "message": text,
        "exit_code": error.exit_code if isinstance(error, MtrainError) else 1,
        "expected": expected,
        # The ranks that wait for a hanging one report it, and none of them is at fault.
        "at_fault": getattr(error, "rank", None),
        "peer_lost": not expected and is_peer_lost(text),
        "problems": [{**asdict(p), "value": show(p.value)} for p in problems],
    }


def environment_fault(error: BaseException) -> BadEnvironment | None:
    """Return the environment's fault that caused an error, with its fix, or None."""
    # torch and gloo raise RuntimeError with the text of the system error and without its number
    text = str(error)
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.EMFILE, errno.ENFILE) or NO_DESCRIPTOR.search(text):
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return _fault(
            f"no more files can be opened: a process may have {files} (ulimit -n)",
            "ulimit -n 4096, or more",
        )
    # with a limit of addresses, memory runs out while the machine has plenty
    addresses = resource.getrlimit(resource.RLIMIT_AS)[0]
    if addresses != resource.RLIM_INFINITY and (
        isinstance(error, MemoryError) or NO_MEMORY.search(text)
    ):
        kib = addresses // 1024
        return _fault(
            f"the address space of a process is limited to {kib} KiB (ulimit -v){_requested(text)}",
            f"ulimit -v unlimited, or {LESS_MEMORY}",
        )
    if number == errno.ENOMEM:
        return _fault(
            f"the system gives no more memory: {text}", f"a larger limit, or {LESS_MEMORY}"
        )
    # An OSError with this text may be about a lock that another process holds.
    if number is None and NO_THREAD.search(text):
        return _fault(
            "no more threads can be started", "ulimit -u 4096, or a higher limit of the container"
        )
    if match := NO_ADDRESS.search(text):
        what = f"there is no network interface {match[1]} with an address"
        return _fault(what, "set GLOO_SOCKET_IFNAME to one that has, or unset it")
    if isinstance(error, socket.gaierror) or NO_HOST.search(text):
        what = text.strip().splitlines()[-1] if text.strip() else "its name is not known"
        return _fault(
            f"a host is not found by its name: {what}",
            "MASTER_ADDR, and the names that this machine knows",
        )
    if NO_SHARED_MEMORY.search(text):
        return _fault(
            "there is no room in /dev/shm for NCCL",
            "a larger /dev/shm (docker: --shm-size or --ipc=host)",
        )
    if match := BAD_VALUE.search(text):
        return _fault(
            f"the environment variable {match[1]} has a value that torch cannot read",
            f"unset {match[1]}",
        )
    return None


def _requested(text: str) -> str:
    """Return in words how much memory was refused, if an error tells."""
    found = ASKED.search(text)
    return f", and {bytes_(int(found[1]))} more were requested" if found else ""


def _fault(what: str, fix: str) -> BadEnvironment:
    return BadEnvironment(what, f"  fix: {fix}")
