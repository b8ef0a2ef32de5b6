"""Being one rank of a launcher that is not ours: torchrun, or whatever sets its environment."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path

from mtrain.ckpt.folder import is_checkpoint
from mtrain.config.paths import program
from mtrain.config.run import RunConfig
from mtrain.errors import BadEnvironment, ConfigError, MtrainError, Problem, TrainingError, say
from mtrain.launching import folder, matmul
from mtrain.launching.worker import describe, enter, leave, revive

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What makes a process a rank."""


def is_worker() -> bool:
    """Whether this process was started as a rank.

    Raises:
        BadEnvironment: it is one of several, and not told how they find each other.
    """
    here, lacking = _variables()
    if lacking and "RANK" in here and here.get("WORLD_SIZE", "1") != "1":
        said, names = " ".join(f"{name}={value}" for name, value in here.items()), " and ".join(lacking)
        raise BadEnvironment(
            f"{said} is set for one of several processes, which do not find each other without {names}",
            f"  fix: start them with torchrun, which sets {', '.join(VARIABLES)}; or, for a run that starts its own "
            "ranks, unset RANK WORLD_SIZE",
        )
    return not lacking


def stray() -> str:
    """What to warn of where a number of processes, or of this one, is set and goes unused; empty where none is.

    Schedulers set some of a launcher's variables, or a user does for a job: a run here starts its own ranks then.
    """
    here, _ = _variables()
    if ("RANK" in here) == ("WORLD_SIZE" in here) or here.get("WORLD_SIZE") == "1":
        return ""
    name, other = ("RANK", "WORLD_SIZE") if "RANK" in here else ("WORLD_SIZE", "RANK")
    return f"{name}={here[name]} is set and {other} is not: this process starts all ranks of its run itself"


def _variables() -> tuple[dict[str, str], list[str]]:
    """A launcher's variables that are set, and those that lack."""
    here = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    return here, [name for name in VARIABLES if name not in here]


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
            if world.is_rank0:
                told = _decide(run, argv, stack)
            body = json.loads(world.tell(told))
            if "kind" in body:
                raise revive(body)
            checkpoint, weights = (Path(body[key]) if body[key] else None for key in ("checkpoint", "weights"))
            return Paths(Path(body["folder"]), checkpoint, weights, body["cpu_matmul"])

        try:
            together = train_rank(run, locate, _end)
        except Exception as error:
            if not describe(error)["peer_lost"]:
                raise
            first = str(error).strip().splitlines()[0]
            raise TrainingError(f"another rank has failed or ended: {first}") from error
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
    from mtrain.world import join

    return join.give_up(error)


def is_for_this_rank(error: BaseException, *, known: bool) -> bool:
    """Whether this rank prints an error: what all ranks know, one rank of each machine says."""
    from mtrain.world.rank_info import Refused

    shared = known and (isinstance(error, ConfigError | BadEnvironment) or getattr(error, "shared", False))
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
        if planned.weights is not None and not is_checkpoint(planned.weights):
            rule = "a Hugging Face folder is imported before the ranks of a launcher start"
            fix = f"{program()} convert import {planned.weights} RUN, and checkpoint.init_from=RUN"
            raise ConfigError([Problem("MT436", "checkpoint.init_from", str(planned.weights), rule, fix)])
        run = matmul.chosen(run, planned.checkpoint)
        chosen = stack.enter_context(folder.opened(run, planned, argv))
    except MtrainError as error:
        return json.dumps(describe(error))
    say(f"run folder: {chosen.folder}")
    places = {"folder": chosen.folder, "checkpoint": chosen.checkpoint, "weights": chosen.weights}
    body: dict[str, str | None] = {key: str(path) if path else None for key, path in places.items()}
    return json.dumps({**body, "cpu_matmul": run.kernels.cpu_matmul})


def rank() -> str:
    """This process's rank, as the launcher wrote it."""
    return os.environ["RANK"]
