"""Being one rank of a launcher that is not ours: torchrun, or whatever sets its environment."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path

from mtrain.config.run import RunConfig
from mtrain.errors import BadEnvironment, BadInput, MtrainError, TrainingFault, say
from mtrain.launching import folder, matmul
from mtrain.launching.worker import describe, enter, leave, revive


def is_worker() -> bool:
    """Whether this process was started as a rank."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def train(run: RunConfig, argv: list[str]) -> int:
    """Train as the rank that the environment says; returns the exit code.

    Rank 0 makes the run folder and tells the others. The process ends at once after a failure, so that no
    destructor waits for a rank that is gone.
    """
    run = folder.anchored(run)
    enter(run, _end)
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
            return Paths(Path(body["folder"]), Path(checkpoint) if checkpoint else None, body["cpu_matmul"])

        try:
            together = train_rank(run, locate, _end)
        except Exception as error:
            if not describe(error)["peer_lost"]:
                raise
            first = str(error).strip().splitlines()[0]
            raise TrainingFault(f"another rank has failed or ended: {first}") from error
    if not together:
        leave(0)
    return 0


def _end(error: MtrainError, speaks: bool) -> None:
    """End this process from any thread; one rank of each machine says why, past whatever holds Python's stderr."""
    if speaks or is_first_here():
        os.write(2, f"rank {rank()}: {error}\n".encode())
    os._exit(error.exit_code)


def tell_others(error: BaseException) -> bool:
    """Tell the ranks that wait for this one why it ends; returns whether they know."""
    from mtrain.world import arrival

    return arrival.give_up(error)


def is_for_this_rank(error: BaseException, *, known: bool) -> bool:
    """Whether this rank prints an error: what all ranks know, one rank of each machine says."""
    from mtrain.world.verdict import Refused

    shared = known and (isinstance(error, BadInput | BadEnvironment) or getattr(error, "shared", False))
    return not shared or is_first_here() or (isinstance(error, Refused) and error.speaks)


def is_first_here() -> bool:
    """Whether this is the first rank of its machine, or rank 0."""
    return rank() == "0" or os.environ.get("LOCAL_RANK", "0") == "0"


def ranks_here() -> int:
    """How many ranks the launcher started on this machine; 1 where it does not say."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isdigit() else 1


def _decide(run: RunConfig, argv: list[str], stack: ExitStack) -> str:
    try:
        planned = folder.plan(run)
        run = matmul.chosen(run, planned.checkpoint)
        chosen = stack.enter_context(folder.opened(run, planned, argv))
    except MtrainError as error:
        return json.dumps(describe(error))
    say(f"run folder: {chosen.folder}")
    checkpoint = str(chosen.checkpoint) if chosen.checkpoint else None
    return json.dumps({"folder": str(chosen.folder), "checkpoint": checkpoint, "cpu_matmul": run.kernels.cpu_matmul})


def rank() -> str:
    """This process's rank, as the launcher wrote it."""
    return os.environ["RANK"]
