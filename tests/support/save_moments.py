"""A process that ends, waits or ends its rank at a chosen moment of the save of a chosen step: a
rank that saves itself, or the process that writes for it.

A moment is a call to the system on a path of the checkpoint, so it is the same one whatever the
machine's speed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mtrain.ckpt.saving import process, writer

VARIABLE = "SAVE_MOMENT"
# Name -> call, a part of the path in it, and True for the moment after the call
MOMENTS = {
    "before a byte": ("mkdir", ".saving-step_{step:08d}", False),
    "after a shard": ("open", ".json", False),
    "before the rename": ("rename", "/step_{step:08d}", False),
    "after the rename": ("rename", "/step_{step:08d}", True),
}
KILL = "kill"
WAIT = "wait"
RANK = "rank"
STEPS_S = 0.2
"""Seconds in which the rank goes on before its writer ends it."""


def use(moment: str, step: int, fault: str = KILL) -> None:
    """Have the fault happen once among this process, those that it forks and their writers.

    `fault` is `kill`, `wait`: for longer than any test, or `rank`: a writer ends its rank a little
    later.
    """
    os.environ[VARIABLE] = f"{moment}:{step}:{fault}:{Path.cwd() / 'moment'}"
    process.MODULE = __name__
    arm()


def arm() -> None:
    """Watch the calls of this process."""
    moment, step, fault, once = os.environ[VARIABLE].split(":")
    name, part, after = MOMENTS[moment]
    part = part.format(step=int(step))
    real: Callable[..., Any] = getattr(os, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        here = any(part in str(arg) for arg in args) and f"step_{int(step):08d}" in str(args)
        here = here and not Path(once).exists()
        if here and not after:
            _act(fault, Path(once))
        found = real(*args, **kwargs)
        if here and after:
            _act(fault, Path(once))
        return found

    setattr(os, name, watched)


def _act(fault: str, once: Path) -> None:
    once.touch()
    if fault == WAIT:
        time.sleep(600)
    if fault == RANK:
        time.sleep(STEPS_S)
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)  # it ends with its rank
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    arm()
    writer.main(sys.argv[1:])
