"""A sink of mtrain: `loss.csv` in the run folder has a row for each step."""

from __future__ import annotations

from collections.abc import Sequence

from mtrain.events.read import Event
from mtrain.events.sink import Sink, numbers


class CsvSink(Sink):
    """Rows of step, loss and learning rate."""

    def open(self) -> int | None:
        """Return the last step of the file, without a row that a killed process cut off."""
        self.file = self.session.folder / "loss.csv"
        text = self.file.read_text() if self.file.is_file() else ""
        rows = text.splitlines(keepends=True)
        whole = [row for row in rows if row.endswith("\n")]
        if not text or whole != rows:
            self.file.write_text("".join(whole) or "step,loss,lr\n")
        return int(whole[-1].partition(",")[0]) if len(whole) > 1 else None

    def send(self, events: Sequence[Event]) -> None:
        """Append rows."""
        with self.file.open("a") as file:
            for event in events:
                found = numbers(event)
                if event["kind"] == "step":
                    file.write(f"{event['step']},{found['loss']},{found['lr']}\n")
