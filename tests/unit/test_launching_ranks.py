"""Starting ranks and watching them: what is left when that fails half-way."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from mtrain.errors import BadEnvironment
from mtrain.launching.supervise import Supervisor


@pytest.mark.parametrize("error", [OSError(errno.EAGAIN, "Resource temporarily unavailable"), MemoryError()])
def test_ranks_that_were_forked_are_ended_where_a_later_one_cannot_be(error: Exception, tmp_path: Path) -> None:
    started: list[int] = []

    def fork(rank: int) -> int:
        if rank == 2:
            raise error
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(60)
            os._exit(0)
        started.append(pid)
        return pid

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    expected = (
        (BadEnvironment, "rank 2 of 4 could not be started") if isinstance(error, OSError) else (MemoryError, None)
    )
    with pytest.raises(expected[0], match=expected[1]):
        Supervisor(tmp_path, "").start(fork, 4)
    assert len(started) == 2
    assert not any(psutil.pid_exists(pid) for pid in started)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
