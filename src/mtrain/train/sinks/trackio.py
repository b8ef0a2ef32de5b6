"""A run of Trackio: in a database of this user, in a Space of Hugging Face, or on a server, as
`TRACKIO_SPACE_ID` and `TRACKIO_SERVER_URL` say.
"""

from __future__ import annotations

import os

from mtrain.events.sink import RunSink

PROJECT = "mtrain"
REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


class Trackio(RunSink):
    """A row for each step and each evaluation."""

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


SINK = Trackio
