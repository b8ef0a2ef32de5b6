"""What this rank's threads are doing, read from their Python stacks while they do it."""

from __future__ import annotations

import linecache
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType

ERRORS = "errors"
"""Where in a run folder each rank leaves how it failed, and its stacks when it hung."""
LIBRARIES = ("torch", "megatron", "mtrain")
WAITING = (".wait(", "synchronize(", "wait_tensor(", ".item()", ".tolist()")
"""What the line of a library holds where a rank waits for others, or for a device that waits for others."""
WATCHING = "mtrain "
"""What the names of the threads begin with that watch, and do none of the work."""


def main_frame() -> FrameType | None:
    """The frame that the main thread is in."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def is_waiting(frame: FrameType | None) -> bool:
    """Whether a frame waits inside a collective, a pipeline transfer or for the device."""
    if frame is None:
        return False
    parts = Path(frame.f_code.co_filename).parts
    if "torch" in parts and "distributed" in parts:
        return True
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return any(name in parts for name in LIBRARIES) and any(sign in line for sign in WAITING)


def place(frame: FrameType | None) -> str:
    """Where a frame is: `step.py:12 in forward`."""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}" if frame else "nowhere"


def write(path: Path, title: str) -> None:
    """Append the stacks of all threads but those that watch, the main thread's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    text = [f"{title}\n"]
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        name = names.get(ident, "a thread that Python did not start")
        if not name.startswith(WATCHING):
            text += [f"\n{name}, most recent call last:\n", *traceback.format_stack(frame)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("".join(text) + "\n")
