"""Causes of failure: a cause differs from its consequences, and a fault of the environment from one
of the training.
"""

from __future__ import annotations

import errno
import faulthandler
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtrain.errors import BadEnvironment, CorruptData, MtrainError, Preempted, TrainingError
from mtrain.launching import supervise, worker
from mtrain.launching.supervise import Supervisor
from tests.support.tables import tables

TABLES = tables("causes")

REMOTE = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3763, remote process"
    " exited or there was a network error, NCCL version 2.28.8\nncclRemoteError: A call failed"
    " possibly due to a network error or a remote process exiting prematurely.\nLast"
    " error:\nNET/OFI Request completed with error."
)
INTERNAL = (
    "internal error, NCCL version 2.14.3\nncclInternalError: Internal check failed.\nLast error:\n"
)
SYSTEM = (
    "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version"
    " 2.27.7\nncclSystemError: System call (e.g. socket, malloc) or external library call failed or"
    " device error.\nLast error:\n"
)
TIMED_OUT = (
    "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=266392,"
    " OpType=ALLGATHER, NumelIn=1, NumelOut=4, Timeout(ms)=1800000) ran for 1803169 milliseconds"
    " before timing out."
)
CONSEQUENCES = TABLES["consequences"]
CAUSES = TABLES["causes"]


@pytest.mark.parametrize("name", CONSEQUENCES)
def test_causes_error_caused_by_another_rank_is_consequence(name: str) -> None:
    assert worker.describe(RuntimeError(CONSEQUENCES[name]))["peer_lost"]


@pytest.mark.parametrize("name", CAUSES)
def test_causes_own_error_is_a_cause(name: str) -> None:
    assert not worker.describe(RuntimeError(CAUSES[name]))["peer_lost"]


NAMELESS = (
    "The IPv6 network addresses of (head, 29500) cannot be retrieved (gai error: -2 - Name or"
    " service not known)."
)
GLOO = "[enforce fail at /gloo/transport/tcp/"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RuntimeError(f"{GLOO}device.cc:84] ifa != nullptr. Unable to find address for: bogus0"),
            "interface bogus0",
        ),
        (
            RuntimeError(
                f"{GLOO}loop.cc:105] fd_ != -1. -1 vs -1. epoll_create: Too many open files"
            ),
            "ulimit -n",
        ),
        (OSError(errno.EMFILE, "Too many open files", "x.bin"), "ulimit -n"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "Cannot allocate memory"),
        (RuntimeError("can't start new thread"), "no more threads"),
        (socket.gaierror(-2, "Name or service not known"), "MASTER_ADDR"),
        (RuntimeError(NAMELESS), "MASTER_ADDR"),
        (
            RuntimeError(
                f"{SYSTEM}Error while creating shared memory segment /dev/shm/nccl-x (size 9637888)"
            ),
            "/dev/shm",
        ),
        (
            ValueError("Invalid value for environment variable: TORCH_NCCL_BLOCKING_WAIT"),
            "unset TORCH_NCCL_BLOCKING_WAIT",
        ),
    ],
)
def test_causes_environment_fault_comes_with_advice(error: Exception, said: str) -> None:
    body = worker.describe(error)
    assert (body["exit_code"], body["expected"], body["peer_lost"]) == (
        BadEnvironment.exit_code,
        True,
        False,
    )
    assert said in body["message"]
    assert "fix: " in body["message"]
    assert "enforce" not in body["message"]
    assert isinstance(worker.revive(body), BadEnvironment)


@pytest.mark.parametrize(
    "error",
    [
        BlockingIOError(
            errno.EAGAIN, "Resource temporarily unavailable"
        ),  # a lock that another process holds
        RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 5767168 bytes"
        ),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "x"),
    ],
)
def test_causes_lookalike_is_no_environment_fault(error: Exception) -> None:
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    assert worker.describe(error)["exit_code"] == 1


def ended(tmp_path: Path, *ends: Callable[[Path, int], Any], advice: str = "") -> MtrainError:
    """Start a rank for each of `ends`, 0.05 s after the one before; returns the error that the
    supervisor raises.
    """
    errors = tmp_path / "errors"
    supervisor = Supervisor(errors, advice)

    def fork(rank: int) -> int:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            faulthandler.disable()
            try:
                time.sleep(0.05 * rank)
                ends[rank](errors, rank)
            finally:
                os._exit(1)
        return pid

    supervisor.start(fork, len(ends))
    with pytest.raises(MtrainError) as raised:
        supervisor.wait()
    return raised.value


def aborts(errors: Path, rank: int) -> None:
    os.abort()


def killed(errors: Path, rank: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fails(text: str) -> Callable[[Path, int], None]:
    return lambda errors, rank: worker.record(RuntimeError(text), errors, rank)


def test_causes_torch_abort_yields_to_real_failure(tmp_path: Path) -> None:
    assert "rank 1 failed first: RuntimeError: the cause" in str(
        ended(tmp_path, aborts, fails("the cause"))
    )


def test_causes_killed_precedes_aborted(tmp_path: Path) -> None:
    assert str(ended(tmp_path, aborts, killed)).startswith("rank 1 was ended by SIGKILL")


def test_causes_aborted_rank_explains_its_peers(tmp_path: Path) -> None:
    said = str(ended(tmp_path, fails(REMOTE), aborts))
    assert said.startswith("rank 1 was ended by SIGABRT, as torch does where a collective fails")


def test_causes_exit_without_record_precedes_its_victims(tmp_path: Path) -> None:
    def leaves(errors: Path, rank: int) -> None:
        os._exit(7)

    said = str(ended(tmp_path, fails(REMOTE), leaves))
    assert said == "rank 1 ended with exit code 7 and left no record"


def test_causes_slow_culprit_precedes_its_victims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(errors: Path, rank: int) -> None:
        # Its connections are closed, and a loaded machine gives it no time.
        time.sleep(0.4)
        worker.record(CorruptData("a file is damaged"), errors, rank)
        os._exit(CorruptData.exit_code)

    monkeypatch.setattr(supervise, "GRACE_S", 0.05)
    error = ended(tmp_path, fails(REMOTE), damaged)
    assert (type(error), str(error)) == (CorruptData, "rank 1: a file is damaged")


@pytest.mark.parametrize("saved", [False, True])
def test_causes_only_saved_run_suggests_resume(saved: bool, tmp_path: Path) -> None:
    if saved:
        (tmp_path / "checkpoints/step_00000001").mkdir(parents=True)
        (tmp_path / "checkpoints/step_00000001/manifest.json").touch()
    error = ended(tmp_path, fails("a bug"), advice="go on with it")
    assert isinstance(error, TrainingError)
    assert ("go on with it" in str(error)) == saved
    stopped = ended(
        tmp_path, lambda errors, rank: os._exit(Preempted.exit_code), advice="go on with it"
    )
    assert str(stopped) == ("stopped on request; go on with it" if saved else "stopped on request")


def blames_rank_1(errors: Path, rank: int) -> None:
    """End like a rank that waited for rank 1."""
    error = TrainingError("no progress for 9 s: rank 1 gives no sign of life; stacks: errors")
    error.rank = 1
    worker.record(error, errors, rank)


def sleeps(errors: Path, rank: int) -> None:
    time.sleep(100)


SAMPLER = """#!/bin/sh
test "$1 $2 $3" = "dump --nonblocking --pid" && echo "Process $4 is in step"
"""


@pytest.mark.parametrize("installed", [True, False])
def test_causes_hanging_rank_is_sampled_from_outside(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = tmp_path / "py-spy"
    if installed:
        sampler.write_text(SAMPLER)
        sampler.chmod(0o755)
    monkeypatch.setattr(supervise.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", os.defpath)
    error = ended(tmp_path, blames_rank_1, sleeps)
    assert ("pip install 'mtrain[debug]'" in str(error)) == (not installed)
    stacks = tmp_path / "errors/stacks_rank_00001.txt"
    assert stacks.exists() == installed
    if installed:
        assert stacks.read_text().startswith("Process ")
