"""A run of SwanLab: in its cloud, on a server, or, as `SWANLAB_MODE` says, in the run folder.

The library finds its key and its server in its own variables and files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mtrain.events.read import Event
from mtrain.events.sink import Sink, usual

PROJECT = "mtrain"


class SwanLab(Sink):
    """Numbers of each step and each evaluation."""

    run: Any = None

    def open(self) -> None:
        """Begin a run, or go on with it."""
        import swanlab

        session = self.session
        # It would ask for a key, and take over what the run prints.
        quiet = swanlab.Settings(interactive=False, terminal={"proxy_type": "none"})
        self.run = swanlab.init(
            project=PROJECT,
            name=session.name,
            id=session.id,
            resume="allow",
            log_dir=str(session.folder / "swanlog"),
            config=session.run.model_dump(mode="json"),
            settings=quiet,
            reinit=True,
        )

    def send(self, events: Sequence[Event]) -> None:
        """Log rows."""
        for event in events:
            found = usual(event)
            if found:
                self.run.log(found, step=event["step"])

    def close(self) -> None:
        """Finish the run: waits until the library has sent everything."""
        if self.run is not None:
            self.run.finish()


SINK = SwanLab
