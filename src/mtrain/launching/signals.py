"""Signals that ask a run to stop, and what a launcher does with them before and after its ranks are there."""

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

STOPS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2})
"""Ctrl-C, a scheduler's end, a terminal that is closed, and the warnings of SLURM's `--signal`."""


class Stopped(KeyboardInterrupt):
    """A stop was asked while no rank could save anything: what was made for the command is removed on the way out."""

    exit_code = Preempted.exit_code


@contextmanager
def stoppable() -> Iterator[None]:
    """Turn a request to stop into `Stopped`, so that temporary folders and processes go with the command.

    A signal that is ignored stays ignored, as under nohup. Ctrl-C stays a KeyboardInterrupt.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(f"stopped by {signal.Signals(number).name}")

    replaced = replace(stop, STOPS - {signal.SIGINT})
    try:
        yield
    finally:
        restore(replaced)


@contextmanager
def held_back() -> Iterator[None]:
    """Let requests to stop wait until the block is over."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def scratch_folder(prefix: str = "mtrain-") -> Iterator[Path]:
    """Make a temporary folder, and remove it on the way out.

    No stop leaves it behind: one that is asked while the folder is made or removed waits for that.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        with tempfile.TemporaryDirectory(prefix=prefix) as folder:
            try:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                yield Path(folder)
            finally:
                signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def replace(handler: Any, numbers: frozenset[signal.Signals] = STOPS) -> dict[int, Any]:
    """Install a handler for the signals that are not ignored; returns the handlers before, for `restore`."""
    replaced: dict[int, Any] = {}
    for number in numbers:
        before = signal.getsignal(number)
        # SIGINT is ignored in a background job of a shell, where the command still forwards what it is sent.
        ours = before is not signal.SIG_IGN or number == signal.SIGINT
        if ours and before is not None:  # a handler that was not installed from Python cannot be put back
            replaced[number] = before
            signal.signal(number, handler)
    return replaced


def forget() -> None:
    """Let this process, which was forked from a launcher, end by the signals that the launcher handles.

    As after an exec, a signal that is ignored stays ignored; but a launcher stops its processes with SIGTERM. Ctrl-C
    is for the launcher alone, which forwards it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in STOPS - {signal.SIGINT}:
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def restore(replaced: dict[int, Any]) -> None:
    """Put handlers back."""
    for number, handler in replaced.items():
        signal.signal(number, handler)
