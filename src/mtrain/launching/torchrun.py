"""Being one rank of a launcher that is not ours: torchrun, or whatever sets its environment."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path

from mtrain import mcore as door
from mtrain.config.run import RunConfig
from mtrain.devices import registry
from mtrain.errors import MtrainError
from mtrain.launching import folder
from mtrain.launching.worker import describe, revive


def is_worker() -> bool:
    """Whether this process was started as a rank."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def train(run: RunConfig, argv: list[str]) -> int:
    """Train as the rank that the environment says; returns the exit code.

    Rank 0 makes the run folder and tells the others. The process ends at once after a failure, so that no
    destructor waits for a rank that is gone.
    """
    door.open_door(registry.get(run.cluster.device))
    from mtrain.train.assemble import Paths
    from mtrain.train.assemble import train as train_rank
    from mtrain.world.init import World

    with ExitStack() as stack:

        def locate(world: World) -> Paths:
            told = ""
            if world.is_first:
                told = _decide(run, argv, stack)
            body = json.loads(world.tell(told))
            if "kind" in body:
                raise revive(body)
            checkpoint = body["checkpoint"]
            return Paths(Path(body["folder"]), Path(checkpoint) if checkpoint else None)

        train_rank(folder.anchored(run), locate)
    return 0


def _decide(run: RunConfig, argv: list[str], stack: ExitStack) -> str:
    try:
        chosen = stack.enter_context(folder.opened(run, folder.plan(run), argv))
    except MtrainError as error:
        return json.dumps(describe(error))
    print(f"run folder: {chosen.folder}", flush=True)
    return json.dumps(
        {"folder": str(chosen.folder), "checkpoint": str(chosen.checkpoint) if chosen.checkpoint else None}
    )


def rank() -> int:
    """This process's rank."""
    return int(os.environ["RANK"])
