"""A run of Weights & Biases, online or (`WANDB_MODE=offline`) in the run folder.

The library finds its key, its server and its mode in its own variables and files, as well as
`WANDB_ENTITY` and `WANDB_PROJECT`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from mtrain.events.leveldb import records
from mtrain.events.read import Event
from mtrain.events.sink import RunSink, alert_of, seconds_of

PROJECT = "mtrain"
AXIS = "iteration"


class Wandb(RunSink):
    """A row for each event that has numbers, with the step as `iteration`, and the texts of alerts.

    The library's own step counts rows. It would hold back a row until a later step follows, and a
    killed process would lose it.
    """

    def open(self) -> int | None:
        """Begin a run, or go on with it; return the last step that the server, or offline the run
        folder, has: the library's process ends with this one, and loses what it has not written.
        """
        import wandb

        session = self.session
        written = (session.folder / "wandb").glob("offline-run-*/*.wandb")
        last = max((last_step(file) for file in written), default=0)
        quiet = wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            id=session.id,
            name=session.name,
            dir=str(session.folder),
            config=session.run.model_dump(mode="json"),
            resume="allow",
            settings=quiet,
        )
        self.run.define_metric("*", step_metric=AXIS)
        if self.run.offline:
            return last
        known = self.run.summary.get(AXIS) if self.run.resumed else 0
        return int(known) if isinstance(known, int | float) else None

    def log(self, event: Event, row: dict[str, float]) -> None:
        """Log the numbers of an event with their step and time, and of an alert its text."""
        alert = alert_of(event)
        text = {} if alert is None else {f"alerts/{alert[0]}": alert[1]}
        self.run.log({AXIS: event["step"], "_timestamp": seconds_of(event), **row, **text})


def last_step(file: Path) -> int:
    """Return the last step that an offline run's file has; 0: none."""
    from wandb.proto.wandb_internal_pb2 import Record

    last = 0
    for data in records(file.read_bytes()):
        for item in Record.FromString(data).history.item:
            if AXIS in (item.key, *item.nested_key):
                last = max(last, int(json.loads(item.value_json)))
    return last


SINK = Wandb
