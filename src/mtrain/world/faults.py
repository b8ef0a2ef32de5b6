"""Faults on purpose, for tests: `--inject FAULT@STEP[:RANK]` has a rank fail while it makes a step.

A kind of fault is one entry of `KINDS`: the moment at which a rank fails, and the way it does. The
code that passes a moment calls `reach`. Importing this module does not import torch.
"""

from __future__ import annotations

import math
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from mtrain.world.heartbeat import heartbeat

FORWARD = "forward"
BACKWARD = "backward"
SPARE_BYTES = 256 << 20
"""The memory that a rank may still take after it ran out on purpose: it has to report that."""
IN_COLLECTIVE_S = 0.1
"""Seconds in a collective after which a rank dies there."""
FLIP = "flip"
"""The first letters of kinds that flip a bit of a tensor, which `hooks.injected` does itself."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    moment: str
    """The moment of a step at which it happens, as `reach` names it."""
    act: Callable[[], None]
    """The fault itself."""
    lasts: bool = False
    """True if it also happens in every later step, after a restart too."""


def _send(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _raise() -> None:
    raise RuntimeError("injected fault")


def _hang() -> None:
    while True:
        time.sleep(3600)


def _run_out_of_memory() -> None:
    import torch

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.empty(2 * SPARE_BYTES, dtype=torch.uint8)


def _die_in_collective() -> None:
    from torch import distributed

    threading.Timer(IN_COLLECTIVE_S, _send(signal.SIGKILL)).start()
    distributed.barrier()  # the other ranks make another collective


class _Slowness:
    """Threefold time of this process: at each call it works twice as long as since the last one."""

    def __init__(self) -> None:
        self.since = math.inf

    def __call__(self) -> None:
        now = time.thread_time()
        until = now + 2 * max(0.0, now - self.since)
        while time.thread_time() < until:
            pass
        self.since = time.thread_time()


KINDS = {
    "kill": Kind(FORWARD, _send(signal.SIGKILL)),
    "kill_backward": Kind(BACKWARD, _send(signal.SIGKILL)),
    "kill_collective": Kind(FORWARD, _die_in_collective),
    "raise": Kind(FORWARD, _raise),
    "hang": Kind(FORWARD, _hang),
    "stop": Kind(FORWARD, _send(signal.SIGSTOP)),
    "oom": Kind(FORWARD, _run_out_of_memory),
    "exit": Kind(FORWARD, lambda: os._exit(1)),
    "flip_weight": Kind(FLIP, lambda: None),
    "flip_activation": Kind(FLIP, lambda: None),
    "flip_gradient": Kind(FLIP, lambda: None),
    "slow": Kind(FORWARD, _Slowness(), lasts=True),
}
ALWAYS = "always:"
FORM = re.compile(rf"({ALWAYS})?([a-z_]+)@(\d+)(?::(\d+))?")


@dataclass(frozen=True)
class Fault:
    """A fault of one rank in one step."""

    kind: str
    """A key of `KINDS`."""
    step: int
    """The step during which it happens, from 1."""
    rank: int = 0
    always: bool = False
    """True if it happens each time that the step is made, also after a restart, or if it is
    computed again. A weight then keeps the flipped bit; otherwise the forward has it once.
    """

    @property
    def lasts(self) -> bool:
        """Return whether it also happens in every later step."""
        return KINDS[self.kind].lasts

    def __str__(self) -> str:
        return f"{ALWAYS if self.always else ''}{self.kind}@{self.step}:{self.rank}"


def parse(text: str) -> tuple[Fault, ...]:
    """Return the faults of a text such as `kill@5:1` or `always:raise@3,exit@9`; without a rank,
    rank 0 fails.

    Raises:
        ValueError: names the part that is no fault.
    """
    return tuple(map(parsed, text.split(",")))


def parsed(text: str) -> Fault:
    """Return the fault of a text such as `kill@5:1`.

    Raises:
        ValueError: it is no fault.
    """
    found = FORM.fullmatch(text)
    if found is None or found[2] not in KINDS or not int(found[3]):
        raise ValueError(f"{text} is no fault; faults are {', '.join(KINDS)}, at steps from 1")
    return Fault(found[2], int(found[3]), int(found[4] or 0), always=bool(found[1]))


def left(faults: Iterable[Fault], step: int) -> tuple[Fault, ...]:
    """Return the faults that may still happen in a run that failed while it made `step`."""
    return tuple(fault for fault in faults if fault.always or fault.lasts or fault.step > step)


_armed: list[Fault] = []


def arm(texts: Iterable[str], rank: int) -> None:
    """Have this process, of `rank`, do its faults among those that `str` of them describes."""
    _armed[:] = (fault for fault in map(parsed, texts) if fault.rank == rank)


def armed() -> bool:
    """Return whether this process has a fault to do."""
    return bool(_armed)


def flips() -> list[Fault]:
    """Return the flips of bits that this process does."""
    return [fault for fault in _armed if KINDS[fault.kind].moment == FLIP]


def reach(moment: str, step: int | None = None) -> None:
    """Do the fault of this moment of a step, if there is one.

    `step` is for a process that makes no steps itself; None: the step that this process makes.
    """
    now = heartbeat.step if step is None else step
    for fault in _armed:
        kind = KINDS[fault.kind]
        if kind.moment == moment and (fault.step == now or (fault.lasts and fault.step < now)):
            kind.act()
