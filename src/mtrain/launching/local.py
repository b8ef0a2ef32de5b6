"""Ranks of a run on this machine, in the environment that torchrun would give them.

Where the device allows it, ranks are forked from this process after it has imported torch and megatron-core once: an
import costs seconds of a core each. Other devices get a fresh interpreter per rank.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from mtrain.config.run import RunConfig
from mtrain.errors import BadEnvironment, BadInput, Damaged, MtrainError, Problem, show
from mtrain.launching import folder, preflight
from mtrain.launching.supervise import Supervisor
from mtrain.launching.worker import leave, run_rank

PR_SET_PDEATHSIG = 1
HOST = "127.0.0.1"


def launch(run: RunConfig, argv: list[str]) -> Path:
    """Train `run` in local processes; returns the run folder.

    `preflight.check` has found no shortage.

    Raises:
        BadInput, BadEnvironment, Damaged: before any rank is started.
        MtrainError: what the first failing rank ended with.
    """
    chosen = folder.plan(run)
    if run.log.progress != "none":
        print("starting: data, torch, megatron-core", flush=True)
    prepared = Forked(lambda: _prepare(run))
    _warm(run)
    prepared.result()
    with folder.opened(run, chosen, argv):
        print(f"run folder: {chosen.folder}", flush=True)
        _run_ranks(run, chosen.folder, lambda: _train(run, chosen))
    return chosen.folder


def generate(run: RunConfig, checkpoint: Path, prompt: str, tokens: int, temperature: float) -> None:
    """Print text from a checkpoint, in local processes of `run`'s layout."""
    _warm(run)
    with tempfile.TemporaryDirectory(prefix="mtrain-") as scratch:
        _run_ranks(run, Path(scratch), lambda: _generate(run, checkpoint, prompt, tokens, temperature))


def _prepare(run: RunConfig) -> None:
    from mtrain.data import prepare

    prepare(run.data)


def _train(run: RunConfig, chosen: folder.Plan) -> None:
    from mtrain.train.assemble import Paths, train

    train(run, lambda world: Paths(chosen.folder, chosen.checkpoint))


def _generate(run: RunConfig, checkpoint: Path, prompt: str, tokens: int, temperature: float) -> None:
    from mtrain.train.assemble import generate_text

    generate_text(run, checkpoint, prompt, tokens, temperature)


def _warm(run: RunConfig) -> None:
    """Import everything a rank needs, before the ranks are forked."""
    threads = str(preflight.threads_per_rank(run.parallel.ranks or 1))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, threads)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    from mtrain import mcore as door
    from mtrain.devices import registry

    device = registry.get(run.cluster.device)
    if device.fork_safe:
        door.open_door(device)
        import mtrain.train.assemble  # noqa: F401


def _run_ranks(run: RunConfig, home: Path, job: Callable[[], None]) -> None:
    """Fork one process per rank, each running `job`, and watch them to the end."""
    errors = home / "errors"
    shutil.rmtree(errors, ignore_errors=True)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((HOST, 0))
    listener.listen(2048)
    gc.freeze()
    ranks = run.parallel.ranks or 1
    sys.stdout.flush()
    sys.stderr.flush()
    supervisor = Supervisor({}, errors)
    supervisor.start(lambda rank: _fork(rank, ranks, listener, job, errors), ranks)
    listener.close()
    supervisor.wait()


def _fork(rank: int, size: int, listener: socket.socket, job: Callable[[], None], errors: Path) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR=HOST,
        MASTER_PORT=str(listener.getsockname()[1]),
    )
    if rank == 0:
        os.environ["MTRAIN_LISTEN_FD"] = str(os.dup(listener.fileno()))
    listener.close()
    leave(run_rank(job, errors, rank))
    raise AssertionError("unreachable")


def die_with(parent: int) -> None:
    """Have the kernel end this process when its parent ends, however that happens (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


class Forked:
    """A function that runs in a forked process beside this one; its errors are raised here."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.read_end, write_end = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            die_with(parent)
            os.close(self.read_end)
            with os.fdopen(write_end, "w") as pipe:
                code = _report(work, pipe)
            leave(code)
        os.close(write_end)

    def result(self) -> None:
        """Wait for its end.

        Raises:
            MtrainError: what the function raised; anything else as BadEnvironment with the text.
        """
        with os.fdopen(self.read_end) as pipe:
            text = pipe.read()
        _, status = os.waitpid(self.pid, 0)
        if text:
            raise _revive(json.loads(text))
        if status:
            raise BadEnvironment(f"preparing the data ended with {os.waitstatus_to_exitcode(status)}")


def _report(work: Callable[[], None], pipe: TextIO) -> int:
    try:
        work()
    except KeyboardInterrupt:
        return 130
    except BadInput as error:
        problems = [{**asdict(p), "value": show(p.value)} for p in error.problems]
        pipe.write(json.dumps({"kind": "BadInput", "problems": problems}))
    except MtrainError as error:
        pipe.write(json.dumps({"kind": type(error).__name__, "message": str(error)}))
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        pipe.write(json.dumps({"kind": "BadEnvironment", "message": f"preparing the data failed:\n{trace}"}))
    return 0


def _revive(body: dict[str, Any]) -> MtrainError:
    if body["kind"] == "BadInput":
        return BadInput([Problem(**p) for p in body["problems"]])
    return {"Damaged": Damaged}.get(body["kind"], BadEnvironment)(body["message"])
