"""Signals that ask a run to stop, and what a launcher does with them before and after its ranks are there."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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


def replace(handler: Any, numbers: frozenset[signal.Signals] = STOPS) -> dict[int, Any]:
    """Install a handler for the signals that are not ignored; returns the handlers before, for `restore`."""
    replaced: dict[int, Any] = {}
    for number in numbers:
        before = signal.getsignal(number)
        # SIGINT is ignored in a background job of a shell, where the command still forwards what it is sent.
        if before is not signal.SIG_IGN or number == signal.SIGINT:
            replaced[number] = before
            signal.signal(number, handler)
    return replaced


def restore(replaced: dict[int, Any]) -> None:
    """Put handlers back."""
    for number, handler in replaced.items():
        signal.signal(number, handler)
