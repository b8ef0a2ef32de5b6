"""Activity of this rank's threads, read from their Python stacks."""

from __future__ import annotations

import sys
import threading
import traceback
from pathlib import Path
from types import FrameType

from mtrain.world import fingerprints
from mtrain.world import heartbeat as heartbeat_module
from mtrain.world.heartbeat import heartbeat

# The folder, in a run folder, where each rank records its failure, and its stacks when it hangs
ERRORS = "errors"
# The files whose frames stand between a wait and its caller
NOTES_WAITS = (heartbeat_module.__file__, fingerprints.__file__)
# The prefix of the names of watching threads, which do none of the work
WATCHING = "mtrain "


def stacks_name(rank: int) -> str:
    """Return the name of the file that holds a rank's stacks."""
    return f"stacks_rank_{rank:05d}.txt"


def main_frame() -> FrameType | None:
    """Return the current frame of the main thread."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def is_waiting(frame: FrameType | None) -> bool:
    """Return whether the main thread, whose frame is `frame`, waits for other ranks.

    It has noted a wait, or its frame is in torch.distributed: NCCL connects the ranks of a group in
    the group's first collective, which blocks before any work exists to wait on.
    """
    if heartbeat.waits:
        return True
    parts = Path(frame.f_code.co_filename).parts if frame is not None else ()
    return "torch" in parts and "distributed" in parts


def place(frame: FrameType | None) -> str:
    """Return the place of a frame, as `step.py:12 in forward`, without noting frames."""
    while (
        frame is not None and frame.f_code.co_filename in NOTES_WAITS and frame.f_back is not None
    ):
        frame = frame.f_back
    if frame:
        return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
    return "nowhere"


def write(path: Path, title: str) -> None:
    """Append the stacks of all threads except the watching ones, with the main thread's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    text = [f"{title}\n"]
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        name = names.get(ident, "a thread that Python did not start")
        if not name.startswith(WATCHING):
            text += [f"\n{name}, most recent call last:\n", *traceback.format_stack(frame)]
    path.parent.mkdir(parents=True, exist_ok=True)
    # A run may stall, recover and stall again.
    with path.open("a") as file:
        file.write("".join(text) + "\n")
