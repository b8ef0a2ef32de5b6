"""Signals that request a stop of a run, and their handlers in a launcher."""

from __future__ import annotations

import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from mtrain.errors import Preempted

# Ctrl-C, the signal of a scheduler, a closed terminal, and the warnings of SLURM's `--signal`
STOPS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2})


class Stopped(KeyboardInterrupt):
    """A request to stop before a checkpoint can be saved; temporary files are removed."""

    exit_code = Preempted.exit_code


class _Postponed:
    """Requests to stop that wait.

    A mask of signals would not suffice: a thread with another mask would take them.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.pending: list[int] = []

    def hold(self) -> None:
        """Hold requests back until `release` is called."""
        self.depth += 1

    def release(self) -> None:
        """Let requests through again, and raise the first pending one."""
        self.depth -= 1
        if self.depth == 0 and self.pending:
            number = self.pending[0]
            self.pending.clear()
            signal.raise_signal(number)


_postponed = _Postponed()


@contextmanager
def stoppable() -> Iterator[None]:
    """Turn a request to stop into `Stopped`, so that the command removes its temporary folders and
    processes.

    A signal that is ignored stays ignored, as under nohup. Ctrl-C stays a KeyboardInterrupt.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if _postponed.depth:
            _postponed.pending.append(number)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise Stopped(f"stopped by {signal.Signals(number).name}")

    heeded = frozenset(number for number in STOPS if signal.getsignal(number) is not signal.SIG_IGN)
    replaced = replace(stop, heeded)
    try:
        yield
    finally:
        restore(replaced)


@contextmanager
def blocked() -> Iterator[None]:
    """Block requests to stop in this thread, and in a process that it forks."""
    # blocked signals stay pending: none is lost between the fork and its own handlers
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def scratch_folder(prefix: str = "mtrain-") -> Iterator[Path]:
    """Make a temporary folder, and remove it on the way out.

    It does not outlive a stop: a request that arrives while the folder is made or removed waits.
    """
    _postponed.hold()
    try:
        with tempfile.TemporaryDirectory(prefix=prefix) as folder:
            try:
                _postponed.release()
                yield Path(folder)
            finally:
                _postponed.hold()
    finally:
        _postponed.release()


def replace(handler: Any, numbers: frozenset[signal.Signals] = STOPS) -> dict[int, Any]:
    """Handle the signals that are not ignored; return the old handlers for `restore`."""
    replaced: dict[int, Any] = {}
    for number in numbers:
        before = signal.getsignal(number)
        # A shell ignores SIGINT in its background jobs; a launcher there still has to forward one.
        ours = before is not signal.SIG_IGN or number == signal.SIGINT
        # A handler from outside Python reads as None and could not be restored.
        if ours and before is not None:
            replaced[number] = before
            signal.signal(number, handler)
    return replaced


def forget() -> None:
    """Reset the launcher's signal handlers in a process forked from it, so that signals end the
    process.

    As after an exec, an ignored signal stays ignored, except SIGTERM, with which the launcher stops
    its processes. Only the launcher handles Ctrl-C, and forwards it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in STOPS - {signal.SIGINT}:
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def restore(replaced: dict[int, Any]) -> None:
    """Restore handlers that `replace` returned."""
    for number, handler in replaced.items():
        signal.signal(number, handler)
