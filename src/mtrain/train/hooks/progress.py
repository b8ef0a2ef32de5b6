"""Progress on rank 0: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from mtrain import units
from mtrain.config.resolve.batches import stages
from mtrain.config.schema.run import RunConfig
from mtrain.errors import printable, say_page
from mtrain.train.hooks.base import Hook
from mtrain.train.loop.context import TrainContext
from mtrain.train.loop.result import StepResult


class Progress(Hook):
    """Step, loss, tokens/s and time left."""

    def __init__(self, run: RunConfig, *, speaks: bool) -> None:
        choice = run.log.progress
        if choice == "auto":
            # A log file with a redrawn line would be one line of escapes.
            choice = "live" if sys.stdout.isatty() else "plain"
        self.choice = choice if speaks else "none"
        self.interval = run.log.interval
        self.goal = run.trainer.steps
        self.z_loss = bool(run.trainer.z_loss_coeff)
        self.accuracy = run.log.token_accuracy
        self.grows = len(stages(run)) > 1
        self.began = 0.0
        self.first_step = 0
        self.bar: Any = None
        self.task: Any = None

    def start(self, context: TrainContext) -> None:
        """Begin counting from the state's step."""
        self.began = time.monotonic()
        self.first_step = context.state.step
        if self.choice == "live":
            # An import of some tenths of a second, for a terminal only.
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Bar

            self.bar = Bar(
                TextColumn("train"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[line]}"),
            )
            self.task = self.bar.add_task(
                "train", total=self.goal, completed=self.first_step, line=""
            )
            self.bar.start()

    def waits_for(self, context: TrainContext, step: int) -> bool:
        """Return whether this is the first step, whose line comes at once."""
        return step == 1

    def after_step(self, context: TrainContext, result: StepResult) -> None:
        """Redraw the line, or print one at the interval."""
        if self.choice == "none":
            return
        line = self._line(result)
        if self.bar is not None:
            self.bar.update(self.task, completed=result.step, line=line)
        elif result.step % self.interval == 0 or result.step in (1, self.goal):
            self.note(f"step {result.step:>{len(str(self.goal))}}/{self.goal}  {line}")

    def close(self) -> None:
        """Give the terminal back, with the line as it is."""
        if self.bar is not None:
            bar = self.bar
            self.bar = None
            bar.stop()

    def note(self, text: str) -> None:
        """Print a line of its own."""
        if self.choice == "none":
            return
        try:
            if self.bar is not None:
                self.bar.console.print(
                    printable(text), highlight=False, markup=False, soft_wrap=True
                )
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
