"""The part of one rank under another launcher: torchrun, srun, mpirun, or whatever sets their
variables.

Rank 0 composes and validates the configuration and offers it over the store; the other ranks read
it there.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from mtrain.ckpt.folder import is_checkpoint
from mtrain.config.compose.paths import RUN_FILE, program
from mtrain.config.compose.run_file import read_run_file
from mtrain.config.resolve.defaults import usual_join_timeout_s
from mtrain.config.schema.run import RunConfig
from mtrain.errors import BadEnvironment, ConfigError, MtrainError, Problem, TrainingError, say
from mtrain.launching import folder, matmul
from mtrain.launching.beside import prepare
from mtrain.launching.causes import of_environment
from mtrain.launching.worker import describe, enter, leave, revive
from mtrain.world import launchers
from mtrain.world.rank_env import LAUNCHER

SEEN_S = 30.0
"""Seconds until another machine of a shared filesystem has to see a file that rank 0 wrote."""
RUN_GIVEN = "MTRAIN_RUN"
"""The variable that names the file with the configuration, where the launcher of a machine composed
it for rank 0.
"""


def here() -> launchers.Launched | None:
    """Return the place that a launcher gave this process, after setting torchrun's variables to it.

    Raises:
        BadEnvironment: it is one of several processes that were not told how to find each other, or
            variables contradict each other.
    """
    found = launchers.launched(os.environ)
    if found is not None and found.launcher != "torchrun" and not found.one_a_machine:
        os.environ.update({**found.variables(), LAUNCHER: found.launcher})
    return found


def stray() -> str:
    """Return a warning where only one of RANK and WORLD_SIZE is set, and is therefore unused; else
    an empty text.

    A scheduler, or a user for a job, sets some of a launcher's variables: the run starts its own
    ranks then.
    """
    here = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if os.environ.get(name)}
    if len(here) != 1 or here.get("WORLD_SIZE") == "1":
        return ""
    name = next(iter(here))
    other = "WORLD_SIZE" if name == "RANK" else "RANK"
    return (
        f"{name}={here[name]} is set and {other} is not: this process starts all ranks of its run"
        " itself"
    )


def agreed(argv: Sequence[str], compose: Callable[[], RunConfig]) -> RunConfig:
    """Return the configuration of all ranks: rank 0 alone composes it, and the others read its
    offer.

    A rank that was called with other words, or with another number of ranks, composes for itself,
    so that the ranks can name each difference.

    Raises:
        MtrainError: the configuration is refused, or rank 0 says that its own is.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch reads it when it is imported
    from mtrain.world import join

    attempt = join.arrive(_join_timeout_s(argv), _end)
    if rank() == "0":
        given = os.environ.get(RUN_GIVEN)
        run = read_run_file(Path(given)) if given else compose()
        join.announce(folder.anchored(run), _end, argv)
        return run
    offer = attempt.read_offer()
    if offer is not None and offer.failure:
        attempt.present(join.bare_info(attempt.env), {}, attempt.join_timeout_s)
        attempt.together()
        text = f"rank 0 has no configuration: {offer.failure}"
        raise BadEnvironment(*text.split("\n"))
    if offer is None or offer.words != tuple(argv):
        return compose()
    run = RunConfig.model_validate_json(offer.run)
    same_size = str(run.parallel.ranks) == os.environ["WORLD_SIZE"]
    return run if same_size else compose()


def train(run: RunConfig, argv: list[str]) -> int:
    """Train as the rank that the environment names; return the exit code.

    Rank 0 makes the run folder and tells the others. After a failure the process ends at once, so
    that no destructor waits for a rank that is gone.
    """
    run = folder.anchored(run)
    enter(run, _end)
    from mtrain.train.run import Paths
    from mtrain.train.run import train as train_rank
    from mtrain.world.init import World
    from mtrain.world.join import working

    if is_first_here():
        with (
            working()
        ):  # a corpus is tokenized once per machine, while the others wait for this rank
            prepare(run, None)
    with ExitStack() as stack:

        def locate(world: World) -> Paths:
            told = ""
            if world.is_rank0:
                told = _decide(run, argv, stack)
            body = json.loads(world.tell(told))
            if "kind" in body:
                raise revive(body)
            checkpoint, weights = (
                Path(body[key]) if body[key] else None for key in ("checkpoint", "weights")
            )
            home = Path(body["folder"])
            unseen = _unseen(home, body["digest"]) if is_first_here() else ""
            unseen = world.first_problem(unseen)
            if unseen:
                raise BadEnvironment(*unseen.split("\n"))
            return Paths(home, checkpoint, weights, body["cpu_matmul"])

        try:
            together = train_rank(run, locate, _end)
        except Exception as error:
            fault = None if isinstance(error, MtrainError) else of_environment(error)
            if fault is not None:
                raise fault from error
            if not describe(error)["peer_lost"]:
                raise
            first = str(error).strip().splitlines()[0]
            raise TrainingError(f"another rank has failed or ended: {first}") from error
    if not together:
        leave(0)
    return 0


def _join_timeout_s(argv: Sequence[str]) -> float:
    """Return the seconds to wait for rank 0 while there is no configuration: from `argv`, else the
    default.
    """
    key = "trainer.join_timeout_s="
    said = next((word.removeprefix(key) for word in reversed(argv) if word.startswith(key)), "")
    try:
        return max(0.0, float(said))
    except ValueError:
        size, local = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        machines = int(size) // max(1, int(local)) if size.isdigit() and local.isdigit() else 1
        return usual_join_timeout_s(machines)


def _unseen(home: Path, digest: str) -> str:
    """Return why this machine does not see the run folder that rank 0 made; empty where it does."""
    path = home / RUN_FILE
    deadline = time.monotonic() + SEEN_S
    while True:
        try:
            if read_run_file(path).digest() == digest:
                return ""
            why = f"it holds another configuration than rank 0 wrote (digest {digest[:12]})"
        except (MtrainError, OSError) as error:
            why = str(error).strip().splitlines()[0]
        if time.monotonic() > deadline:
            machine = os.uname().nodename
            return (
                f"machine {machine} does not see the run folder of rank 0, {path}: {why}\n"
                "  fix: log.runs_dir=FOLDER of a filesystem that all machines share"
            )
        time.sleep(0.5)


def _end(error: MtrainError, speaks: bool) -> None:
    """End this process from any thread; one rank of each machine says why, past locks that may hold
    sys.stderr.
    """
    if speaks or is_first_here():
        os.write(2, f"rank {rank()}: {error}\n".encode())
    os._exit(error.exit_code)


def tell_others(error: BaseException) -> bool:
    """Tell the ranks that wait for this one why it ends; return whether they know."""
    from mtrain.world import join

    return join.give_up(error)


def is_for_this_rank(error: BaseException, *, known: bool) -> bool:
    """Return whether this rank prints an error: one that all ranks know is printed by one rank of
    each machine.
    """
    from mtrain.world.rank_info import Refused

    shared = known and (
        isinstance(error, ConfigError | BadEnvironment) or getattr(error, "shared", False)
    )
    return not shared or is_first_here() or (isinstance(error, Refused) and error.speaks)


def is_first_here() -> bool:
    """Return whether this is the first rank of its machine, or rank 0."""
    return rank() == "0" or os.environ.get("LOCAL_RANK", "0") == "0"


def ranks_here() -> int:
    """Return the number of ranks that the launcher started on this machine; 1 where it does not
    say.
    """
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isdigit() else 1


def _decide(run: RunConfig, argv: list[str], stack: ExitStack) -> str:
    try:
        planned = folder.plan(run, launch=launchers.restarted(os.environ))
        if planned.weights is not None and not is_checkpoint(planned.weights):
            rule = "a Hugging Face folder is imported before the ranks of a launcher start"
            fix = f"{program()} convert import {planned.weights} RUN, and checkpoint.init_from=RUN"
            raise ConfigError(
                [Problem("MT436", "checkpoint.init_from", str(planned.weights), rule, fix)]
            )
        run = matmul.chosen(run, planned.checkpoint)
        launch = launchers.identity(os.environ)
        chosen = stack.enter_context(folder.opened(run, planned, argv, launch=launch))
    except MtrainError as error:
        return json.dumps(describe(error))
    for note in chosen.notes:
        say(note)
    say(f"run folder: {chosen.folder}")
    places = {"folder": chosen.folder, "checkpoint": chosen.checkpoint, "weights": chosen.weights}
    body: dict[str, str | None] = {key: str(path) if path else None for key, path in places.items()}
    return json.dumps({**body, "cpu_matmul": run.kernels.cpu_matmul, "digest": run.digest()})


def rank() -> str:
    """Return the rank of this process, as the launcher wrote it."""
    return os.environ["RANK"]
