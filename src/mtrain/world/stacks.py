"""What this rank's threads are doing, read from their Python stacks while they do it."""

from __future__ import annotations

import sys
import threading
import traceback
from pathlib import Path
from types import FrameType

from mtrain.world.heartbeat import heartbeat

ERRORS = "errors"
"""Where in a run folder each rank leaves how it failed, and its stacks when it hung."""
NOTES_WAITS = str(Path(__file__).with_name("waits.py"))
"""The file whose frames lie between a wait and its caller."""
WATCHING = "mtrain "
"""The beginning of the names of threads that watch, and do none of the work."""


def main_frame() -> FrameType | None:
    """Return the frame that the main thread is in."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def is_waiting(frame: FrameType | None) -> bool:
    """Return whether the main thread, which is in `frame`, waits for other ranks.

    It has noted a wait, or is in torch.distributed: NCCL connects the ranks of a group in its first
    collective, which blocks before there is any work to wait on.
    """
    if heartbeat.waits:
        return True
    parts = Path(frame.f_code.co_filename).parts if frame is not None else ()
    return "torch" in parts and "distributed" in parts


def place(frame: FrameType | None) -> str:
    """Return the place of a frame, as `step.py:12 in forward`; frames that only note a wait are
    passed over.
    """
    while (
        frame is not None and frame.f_code.co_filename == NOTES_WAITS and frame.f_back is not None
    ):
        frame = frame.f_back
    if frame:
        return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
    return "nowhere"


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
