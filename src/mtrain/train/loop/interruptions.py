"""Reasons to do something between two steps: signals that request a stop, and a clock.

The clock of rank 0 decides when to evaluate or save by time. All ranks learn it with a step's
report, which is added up over all ranks anyway, so nothing waits for the clock. Evaluating and
saving change no number of later steps, so a resumed run makes the same steps whenever its clock
rings.

A save in the background ends at some moment of a step, which differs between ranks. They learn of
its end in the same way, and so all after the same step.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType

from mtrain.config.schema.run import RunConfig

EVALUATE = 1
SAVE = 2
COMMITTED = 4
PROFILE = 8
"""Bits of what is due. COMMITTED: a save that goes on in the background has become a checkpoint;
PROFILE: rank 0 got a request to profile steps.
"""
FAILED = 16
"""The number that each rank adds whose part of a save in the background failed. It is above all
bits, so any number of ranks may add it.
"""


class StopRequest:
    """Requests to stop that this rank got, noted at any time and heeded between two steps."""

    def __init__(self) -> None:
        self.requested = False

    def listen(self, names: Sequence[str]) -> None:
        """Note the signals of `trainer.stop_signals` instead of ending with them.

        Apart from SIGTERM, a signal that this process was started to ignore stays ignored: SIGHUP
        under nohup, SIGINT where a launcher forwards Ctrl-C itself.
        """
        for name in names:
            # Ignored signals of the parent are respected; schedulers send SIGTERM.
            number = signal.Signals[name]
            if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True


class ByTime:
    """The clock of a run."""

    def __init__(self, run: RunConfig, clock: Callable[[], float] = time.monotonic) -> None:
        minutes = {EVALUATE: run.trainer.eval_minutes, SAVE: run.checkpoint.save_minutes}
        self._every = {bit: 60.0 * value for bit, value in minutes.items() if value is not None}
        self._clock = clock
        self._last = dict.fromkeys(self._every, clock())
        self.now = 0
        """Bits that all ranks know to be due after the last step."""
        self.profile = False
        """True on rank 0 while a request to profile steps waits."""
        self.saving = 0
        """COMMITTED or FAILED, as this rank knows of its save in the background."""

    def begin(self) -> None:
        """Count from now on."""
        self._last = dict.fromkeys(self._every, self._clock())

    def due_on(self, rank: int) -> int:
        """Return this rank's requests with its next step: rank 0's, or a failed save's."""
        # Clocks of ranks differ: if each had a say, a step could be due for half of them.
        if rank:
            return self.saving & FAILED
        asked = self.saving + PROFILE * self.profile
        if not self._every:
            return asked
        now = self._clock()
        due = (bit for bit, seconds in self._every.items() if now - self._last[bit] >= seconds)
        return asked + sum(due)

    @property
    def save_failed(self) -> bool:
        """Return whether all ranks know that a save in the background failed on one of them."""
        return self.now >= FAILED

    def save_settled(self) -> None:
        """Forget how the save in the background ended: all ranks have acted on it."""
        self.saving = 0
        self.now &= EVALUATE | SAVE | PROFILE

    def done(self, bit: int) -> None:
        """Count from now on: it was just done, whatever the reason."""
        self.now &= ~bit
        if bit in self._every:
            self._last[bit] = self._clock()
