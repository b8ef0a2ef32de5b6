"""A run of Weights & Biases, online or (`WANDB_MODE=offline`) in the run folder.

The library finds its key, its server and its mode in its own variables and files, as well as
`WANDB_ENTITY` and `WANDB_PROJECT`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from mtrain.events.read import Event
from mtrain.events.sink import Sink, seconds_of, usual

PROJECT = "mtrain"
AXIS = "iteration"


class Wandb(Sink):
    """A row for each step and for each evaluation, with the step as `iteration`.

    The library's own step counts rows. It would hold back a row until a later step follows, and a
    killed process would lose it.
    """

    run: Any = None

    def open(self) -> int | None:
        """Begin a run, or go on with it; return the last step that the server has."""
        import wandb

        session = self.session
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
        # Offline there is no server to ask.
        last = self.run.summary.get(AXIS) if self.run.resumed else None
        return int(last) if isinstance(last, int | float) else None

    def send(self, events: Sequence[Event]) -> None:
        """Log rows."""
        for event in events:
            found = usual(event)
            if found:
                self.run.log({AXIS: event["step"], "_timestamp": seconds_of(event), **found})

    def close(self) -> None:
        """Finish the run: waits until the server has everything."""
        if self.run is not None:
            self.run.finish()


SINK = Wandb
