"""Processes that a launcher forks or executes: the signals that they heed, stops at any time, and
their errors.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mtrain.config.resolve.resolution import resolve
from mtrain.errors import BadEnvironment, Preempted
from mtrain.launching import child_process, local, signals, start
from mtrain.launching.supervise import Supervisor
from tests.support.configs import LAPTOP, tiny

NOHUP = "import signal; raise SystemExit(signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN)"
STOPPED = "import signal; raise SystemExit(signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)"


@contextmanager
def ignored(number: signal.Signals) -> Iterator[None]:
    """Ignore a signal in this process."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)


def code_of(pid: int) -> int:
    """Return the exit code of a child, once it has ended."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_processes_under_nohup_ignore_hangup_too() -> None:
    with ignored(signal.SIGHUP):
        forked = start.fork(lambda: int(signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN))
        executed = start.execute([sys.executable, "-c", NOHUP], os.environ)
        assert [code_of(forked), code_of(executed)] == [0, 0]


def test_processes_end_by_sigterm_despite_ignoring_launcher() -> None:
    with ignored(signal.SIGTERM):
        forked = start.fork(lambda: int(signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL))
        executed = start.execute([sys.executable, "-c", STOPPED], os.environ)
        assert [code_of(forked), code_of(executed)] == [0, 0]


def test_processes_forked_error_leaves_parent_stack(
    tmp_path: Path,
) -> None:
    def fail() -> int:
        raise KeyboardInterrupt

    try:
        pid = start.fork(fail)
    except BaseException:
        (tmp_path / "unwound").touch()
        raise
    assert code_of(pid) == 1
    assert not (tmp_path / "unwound").exists()


def test_processes_killed_writer_is_an_environment_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def killed(*_: object) -> None:
        os.write(int(os.environ["WRITE_END"]), b'{"value": ')
        os.kill(os.getpid(), signal.SIGKILL)

    def pipe() -> tuple[int, int]:
        ends = os_pipe()
        os.environ["WRITE_END"] = str(ends[1])
        return ends

    os_pipe = os.pipe
    monkeypatch.setenv("WRITE_END", "")
    monkeypatch.setattr(os, "pipe", pipe)
    monkeypatch.setitem(child_process.WORK, "import", killed)
    work = child_process.ChildProcess("import", resolve(tiny(), LAPTOP))
    with pytest.raises(BadEnvironment, match="importing the weights ended with -9"):
        work.result()


def started(*_: object) -> int:
    """Start a process that runs for long, and ask this one to stop."""

    def sleep() -> int:
        time.sleep(10_000)  # longer than the test may take
        return 0

    pid = start.fork(sleep)
    os.kill(os.getpid(), signal.SIGTERM)
    return pid


def test_processes_stop_reaches_starting_rank(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, "")
    supervisor.start(started, 1)
    with pytest.raises(Preempted):
        supervisor.wait()


def _stopped_in(owner: object, name: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Make a function request a stop of this process, twice, before it returns; return a function
    that tells whether it was called.
    """
    real = getattr(owner, name)
    called: list[bool] = []

    def asking(*args: object, **kwargs: object) -> object:
        found = real(*args, **kwargs)
        called.append(True)
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        return found

    monkeypatch.setattr(owner, name, asking)
    return lambda: bool(called)


@pytest.mark.parametrize(
    ("owner", "name"), [(tempfile, "mkdtemp"), (os, "rmdir")], ids=["made", "removed"]
)
def test_processes_stop_leaves_no_temporary_folder(
    owner: object, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    was_called = _stopped_in(owner, name, monkeypatch)
    with pytest.raises(signals.Stopped), signals.stoppable(), signals.scratch_folder() as folder:
        (folder / "inner/deep").mkdir(parents=True)
    assert was_called()
    assert not list(tmp_path.iterdir())


def test_processes_foreign_handler_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    with signals.stoppable():
        pass


def test_processes_remote_rank_is_not_bound_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    run = resolve(tiny(parallel__ranks=4), LAPTOP)
    here = local.environment_of(run)
    assert here["GLOO_SOCKET_IFNAME"] == "lo"
    found = local.environment_of(run, share=start.Share(2, 2, "first"))
    assert "GLOO_SOCKET_IFNAME" not in found, "lo does not lead to the other machine"
    assert "TORCHELASTIC_RUN_ID" not in found
