"""A run of SwanLab: in its cloud, on a server, or, as `SWANLAB_MODE` says, in the run folder.

The library finds its key and its server in its own variables and files.
"""

from __future__ import annotations

import os
from pathlib import Path

from mtrain.events.leveldb import records
from mtrain.events.sink import RunSink

PROJECT = "mtrain"


class SwanLab(RunSink):
    """Numbers of each step and each evaluation."""

    def open(self) -> int | None:
        """Begin a run, or go on with it; return the last step that offline files have: the library
        writes them at the end of the process, so a killed one leaves little.
        """
        import swanlab

        session = self.session
        # It would ask for a key, and take over what the run prints.
        quiet = swanlab.Settings(interactive=False, terminal={"proxy_type": "none"})
        is_offline = os.environ.get("SWANLAB_MODE") == "offline"
        files = session.folder.glob("swanlog/*/*.swanlab") if is_offline else ()
        last = max(map(last_step, files), default=0)
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
        return last if is_offline else None


def last_step(file: Path) -> int:
    """Return the last step that an offline run's file has; 0: none."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    found = (Record.FromString(data).scalar for data in records(file.read_bytes()))
    return max((scalar.step for scalar in found), default=0)


SINK = SwanLab
