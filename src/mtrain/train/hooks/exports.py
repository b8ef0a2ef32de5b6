"""Checkpoints as Hugging Face folders, written by a process next to the run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import IO, Any

from mtrain import units
from mtrain.ckpt import folder
from mtrain.ckpt.meeting import Meeting
from mtrain.config.compose.paths import CHECKPOINTS
from mtrain.errors import warn
from mtrain.train.hooks.base import Hook
from mtrain.train.hooks.progress import Progress
from mtrain.train.loop.context import TrainContext
from mtrain.train.loop.result import StepResult
from mtrain.world.heartbeat import tick

FOLDER = "hf"
"""The folder of the exports in that of the run; retention deletes only checkpoints."""
DRAFT = ".exporting-"
"""The beginning of the name that `convert export` gives a folder which is not complete."""
POLL_S = 0.2
SLACK_S = 60.0
"""Seconds that other ranks wait for rank 0 longer than that one waits for its export."""
ENVIRONMENT = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR")
"""Variables that an export gets from the rank. Without the others it knows no ranks and no GPU."""
LIBRARIES = ("LD_LIBRARY_PATH", "VIRTUAL_ENV", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
STARTER = "import sys, mtrain.processes as p; p.in_background(int(sys.argv[1]), sys.argv[2:])"


@dataclass
class Export:
    """The export of one checkpoint, which nobody deletes until it has ended."""

    checkpoint: Path
    out: Path
    process: subprocess.Popen[bytes] | None = None
    said: IO[bytes] | None = None
    held: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.held.enter_context(folder.reading(self.checkpoint))

    def start(self) -> None:
        """Start `convert export` with the lowest priority.

        Raises:
            OSError: no process can be started.
        """
        home = self.checkpoint.parent.parent
        # Relative to the run: a word with "=" would be read as an option.
        paths = [os.path.relpath(path, home) for path in (self.checkpoint, self.out)]
        command = [sys.executable, "-P", "-m", "mtrain", "convert", "export", *paths]
        descriptor, name = tempfile.mkstemp(prefix="mtrain-export-")
        os.unlink(name)
        self.said = self.held.enter_context(os.fdopen(descriptor, "w+b"))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", STARTER, str(os.getpid()), *command, "logits=false"],
            cwd=home,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=self.said,
            stderr=subprocess.STDOUT,
            # A Ctrl-C of the terminal is for the run, which saves first.
            start_new_session=True,
        )

    def ended(self) -> int | None:
        """Return the exit code; None: it still runs."""
        return None if self.process is None else self.process.poll()

    def reason(self) -> str:
        """Return the first line that a failed export printed."""
        if self.said is None:
            return "no output"
        self.said.seek(0)
        lines = self.said.read(1 << 16).decode(errors="replace").split("\n")
        return next((line.strip() for line in lines if line.strip()), "no output")

    def stop(self) -> None:
        """End the process and remove its draft."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            shutil.rmtree(self.out.with_name(f"{DRAFT}{self.out.name}"), ignore_errors=True)
        self.held.close()


class Exports(Hook):
    """Every `checkpoint.hf_every`-th checkpoint of the run as a Hugging Face folder.

    One process at a time exports them, in order. A run that ends waits for it; a run that stops or
    fails ends it, and makes up for its exports if it continues and the checkpoints still exist.
    """

    name = "exports"

    def __init__(self, home: Path, progress: Progress) -> None:
        self.home = home
        self.progress = progress
        self.number = 0
        """Checkpoints committed so far, by earlier processes of the run too."""
        self.owed: list[int] = []
        """Steps that an earlier process of the run has not exported."""
        self.queue: deque[Export] = deque()
        """Exports to do; the first one runs."""
        self.complete = False
        """True once the run has made its last step."""

    def start(self, context: TrainContext) -> None:
        """Remove leftovers of a process that was killed, and make up for its exports."""
        if not context.world.is_rank0:
            return
        for draft in (self.home / FOLDER).glob(f"{DRAFT}*"):
            shutil.rmtree(draft, ignore_errors=True)
        due = [context.state.step] if self._is_due(context) else []
        for step in (*self.owed, *due):
            path = self.home / CHECKPOINTS / folder.folder_name(step)
            missing = not (self.home / FOLDER / path.name).exists()
            if missing and folder.is_checkpoint(path):
                self._add(path)

    def saved(self, context: TrainContext, path: Path) -> None:
        """Export a checkpoint that is due."""
        self.number += 1
        if context.world.is_rank0 and self._is_due(context):
            self._add(path)

    def after_step(self, context: TrainContext, result: StepResult) -> None:
        """Report an export that has ended, and start the next one."""
        self._go_on()

    def finish(self, context: TrainContext) -> None:
        """Note whether the run is at its end."""
        self.complete = context.state.step >= context.run.trainer.steps

    def on_error(self, context: TrainContext, error: BaseException, *, saveable: bool) -> None:
        """Note that nobody waits for an export."""
        self.complete = False

    def close(self) -> None:
        """End exports that nobody waits for."""
        if not self.complete:
            self._stop()

    def after_run(self, context: TrainContext) -> None:
        """Wait for the last exports, on every rank: those that leave would wait for rank 0."""
        limit_s = context.run.checkpoint.barrier_timeout_s
        if context.world.is_rank0:
            self._wait(context, limit_s)
        world = context.world
        Meeting(world.store, world.rank, world.size, limit_s + SLACK_S).barrier()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of checkpoints, the current save included, and the steps to export."""
        waiting = [folder.step_of(one.checkpoint) for one in self.queue]
        return {"committed": self.number + 1, "waiting": waiting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue to count."""
        self.number = state["committed"]
        self.owed = state["waiting"]

    def _is_due(self, context: TrainContext) -> bool:
        every = context.run.checkpoint.hf_every
        return every is not None and self.number > 0 and self.number % every == 0

    def _add(self, path: Path) -> None:
        # An export of another course of the run stays.
        names = (f"{path.name}-{number}" for number in count(2))
        out = self.home / FOLDER / path.name
        while out.exists():
            out = out.with_name(next(names))
        self.queue.append(Export(path, out))
        self._go_on()

    def _go_on(self) -> None:
        """Report the first export if it has ended, and start the next one."""
        while self.queue:
            first = self.queue[0]
            try:
                if first.process is None:
                    first.start()
                code = first.ended()
                failure = first.reason() if code else ""
            except OSError as error:
                code = 1
                failure = f"{error.strerror or error}"
            if code is None:
                return
            self.queue.popleft().stop()
            step = folder.step_of(first.checkpoint)
            if code:
                warn(f"the export of step {step} to {first.out} failed; the run goes on: {failure}")
            else:
                self.progress.note(f"step {step}: exported {first.out}")

    def _wait(self, context: TrainContext, limit_s: float) -> None:
        self._go_on()
        if self.queue:
            steps = ", ".join(str(folder.step_of(one.checkpoint)) for one in self.queue)
            many = units.number_of(len(self.queue), "export")
            self.progress.note(f"waiting for {many} (step {steps}), at most {limit_s:g} s")
        deadline = time.monotonic() + limit_s
        while self.queue and not context.stop.requested and time.monotonic() < deadline:
            time.sleep(POLL_S)
            tick()
            self._go_on()
        for one in self.queue:
            warn(f"the export of step {folder.step_of(one.checkpoint)} is left out: {one.out}")
        self._stop()

    def _stop(self) -> None:
        while self.queue:
            self.queue.popleft().stop()


def environment() -> dict[str, str]:
    """Return the environment of an export: this process's modules, one thread and no GPU."""
    names = (*ENVIRONMENT, *LIBRARIES)
    kept = {name: os.environ[name] for name in names if name in os.environ}
    # without "", the working folder, whose files could replace modules
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    return {**kept, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
