"""The process that writes checkpoints in the background, with a fault at a chosen point.

The points are its calls to the system: opening, writing, syncing, linking, renaming and removing
files. They are counted, so a fault is at the same place whatever the machine's speed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mtrain.ckpt.saving import process, writer

VARIABLE = "FAULTY_WRITER"
CALLS = ("open", "pwrite", "fsync", "link", "rename", "mkdir", "unlink", "rmdir")


def use(
    fault: str,
    at: int,
    rank: int,
    *,
    errno: int = 0,
    victim: str = "writer",
    counted: Path | None = None,
    once: Path | None = None,
    seconds: float = 3600,
) -> None:
    """Make the writer of `rank` fail at its `at`-th call, for writers that this process starts.

    `fault` is `kill`, `stop`, `sleep`, `none`, `error`, which fails with `errno`, or `errors`:
    that call and all after it fail. `victim` is
    the process that a signal goes to: `writer`, `rank`, or `launcher`, the parent of the rank. The
    file `counted` gets the number of calls at the end. With `once`, a file that the fault makes,
    later writers have none. `seconds`: the duration of `sleep`.
    """
    process.MODULE = __name__
    body = {"fault": fault, "at": at, "rank": rank, "errno": errno, "victim": victim}
    body["seconds"] = seconds
    files = {"counted": str(counted or ""), "once": str(once or "")}
    os.environ[VARIABLE] = json.dumps(body | files)


def running(folder: Path) -> list[int]:
    """Return the writers that still run of a process whose faults are counted in a folder."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{VARIABLE}=".encode() in environ.read_bytes() and (
                str(folder).encode() in environ.read_bytes()
            ):
                words = (environ.parent / "cmdline").read_bytes().split(b"\0")
                found += [int(environ.parent.name)] * (__name__.encode() in words)
        except OSError:  # it ended, or belongs to somebody else
            continue
    return found


class Points:
    """The calls that were made, and the fault at one of them."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        self.count = 0

    def reach(self, name: str) -> None:
        """Note a call, and fail if it is its turn."""
        self.count += 1
        fault = self.body["fault"]
        if self.count < self.body["at"] or (self.count > self.body["at"] and fault != "errors"):
            return
        once = self.body["once"]
        if once and Path(once).exists():
            return
        if once:
            Path(once).touch()
        if fault in ("error", "errors"):
            raise OSError(self.body["errno"], os.strerror(self.body["errno"]))
        if fault == "sleep":
            time.sleep(self.body["seconds"])
        if fault in ("kill", "stop"):
            number = signal.SIGSTOP if fault == "stop" else signal.SIGKILL
            os.kill(self._victim(), number)
            time.sleep(60)  # the kernel ends this process too, wherever the signal went

    def _victim(self) -> int:
        if self.body["victim"] == "writer":
            return os.getpid()
        rank = os.getppid()
        if self.body["victim"] == "rank":
            return rank
        text = Path(f"/proc/{rank}/stat").read_text()
        return int(text.rpartition(")")[2].split()[1])


def main(words: list[str]) -> None:
    """Serve the rank that the fault is for with the fault, and others without."""
    body = json.loads(os.environ.get(VARIABLE, "null"))
    points = Points(body or {"at": 0})
    real = writer.Save.__init__

    def begun(save: writer.Save, message: dict[str, Any], *more: Any) -> None:
        real(save, message, *more)
        if body is not None and message["rank"] == body["rank"] and not points.count:
            for name in CALLS:
                setattr(os, name, _counted(points, name))

    writer.Save.__init__ = begun  # type: ignore[method-assign,assignment]
    writer.main(words)
    if body is not None and body["counted"] and points.count:
        Path(body["counted"]).write_text(str(points.count))


def _counted(points: Points, name: str) -> Callable[..., Any]:
    call = getattr(os, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        points.reach(name)
        return call(*args, **kwargs)

    return counted


if __name__ == "__main__":
    main(sys.argv[1:])
