"""A run of Trackio: in a database of this user, in a Space of Hugging Face, or on a server, as
`TRACKIO_SPACE_ID` and `TRACKIO_SERVER_URL` say.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from mtrain.events.read import Event
from mtrain.events.sink import Sink, usual

PROJECT = "mtrain"
REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


class Trackio(Sink):
    """A row for each step and each evaluation."""

    run: Any = None

    def open(self) -> int | None:
        """Begin a run, or go on with it; return the last step of the database, which a thread of
        the library writes.
        """
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        session = self.session
        # Runs of two folders may have one name.
        name = f"{session.name}-{session.id[:6]}"
        is_local = not any(os.environ.get(variable) for variable in REMOTE)
        last = SQLiteStorage.get_max_step_for_run(PROJECT, name) if is_local else None
        config = session.run.model_dump(mode="json")
        self.run = trackio.init(PROJECT, name, config=config, resume="allow", embed=False)
        return (last or 0) if is_local else None

    def send(self, events: Sequence[Event]) -> None:
        """Log rows."""
        for event in events:
            found = usual(event)
            if found:
                self.run.log(found, step=event["step"])

    def close(self) -> None:
        """Finish the run: waits until the library has written everything."""
        if self.run is not None:
            self.run.finish()


SINK = Trackio
