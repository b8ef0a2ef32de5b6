"""Event files in the run folder, which TensorBoard shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mtrain.events.read import Event
from mtrain.events.sink import Sink, alert_of, seconds_of, usual

FOLDER = "tensorboard"
"""The folder of event files in the run folder: `tensorboard --logdir runs` shows all runs."""


class TensorBoard(Sink):
    """Scalars of events, and the texts of alerts, by torch's `SummaryWriter`."""

    # TensorBoard hides what a file before holds of steps that a new one purges.
    purges = True
    writer: Any = None

    def open(self) -> None:
        """Open a file."""
        from torch.utils.tensorboard import SummaryWriter

        folder = str(self.session.folder / FOLDER)
        self.writer = SummaryWriter(folder, purge_step=self.session.step + 1)

    def send(self, events: Sequence[Event]) -> None:
        """Write them, and wait until the file has them."""
        for event in events:
            at = seconds_of(event)
            for name, value in usual(event).items():
                self.writer.add_scalar(name, value, event["step"], walltime=at)
            alert = alert_of(event)
            if alert is not None:
                name, text = alert
                self.writer.add_text(f"alerts/{name}", text, event["step"], walltime=at)
        self.writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self.writer is not None:
            self.writer.close()


SINK = TensorBoard
