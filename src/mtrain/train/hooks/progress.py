"""Progress on rank 0: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from mtrain import units
from mtrain.config.resolve.batches import stages
from mtrain.config.schema.run import RunConfig
from mtrain.errors import printable, say_page
from mtrain.train.hooks.base import Hook
from mtrain.train.loop.context import TrainContext
from mtrain.train.loop.result import StepResult
from mtrain.views.terminal import Screen, redraws
from mtrain.views.watched import Watched

FRAME_S = 1.0
"""Seconds between two frames of the live view."""
JOIN_S = 5.0


class LiveView:
    """A thread that draws the run from its folder, as `watch` does; a step never waits for it."""

    def __init__(self, folder: Path) -> None:
        self.run = Watched(folder)
        self.screen = Screen()
        self.screen.start()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="live view", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Draw the last frame, and give the terminal back."""
        self._over.set()
        self._thread.join(JOIN_S)
        self.screen.stop()

    def _draw(self) -> None:
        over = False
        while not over:
            over = self._over.wait(FRAME_S)
            self.run.look()
            try:
                self.screen.show([self.run])
            except (OSError, ValueError):  # nobody reads any more
                return


class Progress(Hook):
    """Step, loss, tokens/s and time left: lines, or the view of the run's `folder`."""

    def __init__(self, run: RunConfig, *, speaks: bool, folder: Path | None = None) -> None:
        choice = run.log.progress
        if choice in ("auto", "live"):
            # A log file with a redrawn view would be one of escapes.
            choice = "live" if folder is not None and redraws() else "plain"
        self.choice = choice if speaks else "none"
        self.folder = folder
        self.interval = run.log.interval
        self.goal = run.trainer.steps
        self.z_loss = bool(run.trainer.z_loss_coeff)
        self.accuracy = run.log.token_accuracy
        self.grows = len(stages(run)) > 1
        self.began = 0.0
        self.first_step = 0
        self.view: LiveView | None = None

    def start(self, context: TrainContext) -> None:
        """Begin counting from the state's step."""
        self.began = time.monotonic()
        self.first_step = context.state.step
        if self.choice == "live" and self.folder is not None:
            self.view = LiveView(self.folder)

    def waits_for(self, context: TrainContext, step: int) -> bool:
        """Return whether this is the first step, whose line comes at once."""
        return step == 1

    def after_step(self, context: TrainContext, result: StepResult) -> None:
        """Print a line at the interval."""
        if self.choice != "plain":
            return
        if result.step % self.interval == 0 or result.step in (1, self.goal):
            line = self._line(result)
            self.note(f"step {result.step:>{len(str(self.goal))}}/{self.goal}  {line}")

    def close(self) -> None:
        """Give the terminal back, with the last frame."""
        if self.view is not None:
            view = self.view
            self.view = None
            view.close()

    def note(self, text: str) -> None:
        """Print a line of its own."""
        if self.choice == "none":
            return
        try:
            if self.view is not None:
                self.view.screen.print(printable(text))
            else:
                say_page(text)
        except (OSError, ValueError):
            # Nobody reads any more, or the disk is full: training goes on in silence.
            self.choice = "none"

    def _line(self, result: StepResult) -> str:
        done = result.step - self.first_step
        # From this process's own steps: a resumed run may be on other machines.
        left = (time.monotonic() - self.began) / done * (self.goal - result.step)
        batch = f"batch {result.batch_size}  " if self.grows else ""
        rate = units.count(result.read / result.seconds["step"])
        norm = f"grad norm {result.grad_norm:.3f}"
        if not result.updated:
            at = "" if result.loss_scale is None else f" at loss scale {result.loss_scale:g}"
            norm = f"update skipped{at}" if at else f"{norm}, update skipped"
        more = f"z-loss {result.z_loss:.2e}  " if self.z_loss else ""
        more += f"accuracy {result.token_accuracy:.3f}  " if self.accuracy else ""
        wait = f"data wait {100 * result.data_wait_share:.1f}%"
        padding = (
            f"padding {100 * result.padding_share:.1f}%  " if result.read < result.positions else ""
        )
        return (
            f"loss {result.loss:.4f}  {more}{norm}  lr {result.lr:.2e}  {batch}{rate} tokens/s "
            f" {padding}{wait}  {units.seconds(left)} left"
        )
