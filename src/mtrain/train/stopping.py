"""Requests to stop: signals that a rank is sent, noted wherever they come and heeded between two
steps.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import FrameType


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
