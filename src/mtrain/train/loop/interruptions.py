"""What a run does every so many minutes: the clock of rank 0 says when, and all ranks learn it with
a step's report.

The report of a step is added up over all ranks anyway, so nothing waits for the clock. What is done
after a step changes no number of the steps behind it, so a resumed run makes the same steps
whenever its clock rings.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType

from mtrain.config.schema.run import RunConfig


class StopRequest:
    """Requests to stop that this rank got."""

    def __init__(self) -> None:
        self.asked = False

    def listen(self, names: Sequence[str]) -> None:
        """Note the signals of `trainer.stop_signals` instead of ending with them.

        But for SIGTERM, one that this process was started to ignore stays ignored, as SIGHUP is
        under nohup, and SIGINT where a launcher forwards Ctrl-C itself.
        """
        for name in names:
            number = signal.Signals[name]
            if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


EVALUATE = 1
SAVE = 2
"""Bits of what is due."""


class ByTime:
    """The clock of a run."""

    def __init__(self, run: RunConfig, clock: Callable[[], float] = time.monotonic) -> None:
        minutes = {EVALUATE: run.trainer.eval_minutes, SAVE: run.checkpoint.save_minutes}
        self._every = {bit: 60.0 * value for bit, value in minutes.items() if value is not None}
        self._clock = clock
        self._last = dict.fromkeys(self._every, clock())
        self.now = 0
        """What all ranks know to be due after the step that was made last."""

    def begin(self) -> None:
        """Count from now on."""
        self._last = dict.fromkeys(self._every, self._clock())

    def asks(self, rank: int) -> int:
        """Return what this rank asks for with its next step: of all ranks the first one does."""
        if rank or not self._every:
            return 0
        now = self._clock()
        return sum(bit for bit, seconds in self._every.items() if now - self._last[bit] >= seconds)

    def done(self, bit: int) -> None:
        """Count from now on: it was just done, whoever asked for it."""
        self.now &= ~bit
        if bit in self._every:
            self._last[bit] = self._clock()
