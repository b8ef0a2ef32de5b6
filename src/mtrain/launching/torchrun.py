"""One rank under another launcher: torchrun, srun, mpirun, or any that sets their variables.

Rank 0 composes and validates the configuration and offers it in the store, where the others read
it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from mtrain import startup
from mtrain.ckpt.folder import is_checkpoint
from mtrain.config.compose.paths import program
from mtrain.config.resolve.defaults import usual_join_timeout_s
from mtrain.config.schema.run import RunConfig
from mtrain.errors import (
    BadEnvironment,
    ConfigError,
    MtrainError,
    TrainingError,
    first_line,
    say,
)
from mtrain.launching import folder, from_store, matmul, uploads
from mtrain.launching.child_process import prepare
from mtrain.launching.warming import Warming
from mtrain.launching.worker import describe, enter, environment_fault, leave, revive
from mtrain.world import launchers
from mtrain.world.rank_env import LAUNCHER


def here() -> launchers.Launched | None:
    """Return the place that a launcher gave this process, after setting torchrun's variables to it.

    Raises:
        BadEnvironment: it is one of several processes without the address of the others, or
            variables contradict each other.
    """
    place = launchers.launched(os.environ)
    if place is not None and place.launcher != "torchrun" and not place.one_a_machine:
        os.environ.update({**place.variables(), LAUNCHER: place.launcher})
    return place


def unused_variable() -> str:
    """Return a warning if only one of RANK and WORLD_SIZE is set, and therefore unused; otherwise
    "".

    A scheduler, or a user for a job, sets some of a launcher's variables; the run then starts its
    own ranks.
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


def shared_config(argv: Sequence[str], compose: Callable[[], RunConfig]) -> RunConfig:
    """Return the configuration of all ranks: only rank 0 composes it, and the others read its
    offer.

    A rank that was started with other words, or with another number of ranks, composes its own, so
    that the ranks can name each difference.

    Raises:
        MtrainError: the configuration of this rank, or of rank 0, is refused.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch reads it when it is imported
    from mtrain.world import join

    attempt = join.arrive(_join_timeout_s(argv), _end)
    if rank() == "0":
        run = compose()
        join.announce(folder.anchored(run), _end, argv)
        return run
    offer = attempt.read_offer()
    # all ranks end together, and one of each machine prints the reason
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

    Rank 0 makes the run folder and broadcasts its plan. After a failure the process ends at once,
    so that no destructor waits for a rank that has ended.
    """
    run = folder.anchored(run)
    resumed = run
    kernels = None
    if is_first_here():
        lowest = int(rank()) - int(os.environ.get("LOCAL_RANK", "0"))
        kernels = Warming(run, lowest, ranks_here(), apart=True)
        kernels.begin(prepared=False)
    enter(run, _end)
    from mtrain.train.run import Paths
    from mtrain.train.run import train as train_rank
    from mtrain.world.init import World
    from mtrain.world.join import working

    if kernels is not None:
        startup.mark(startup.LIBRARIES)
        # A corpus is tokenized once per machine, while the others wait for this rank.
        with working():
            if rank() == "0":
                resumed = _brought(run)
            prepare(run, None)
        startup.mark(startup.DATA)
        kernels.begin(prepared=True)
    with ExitStack() as stack:
        if kernels is not None:
            stack.callback(kernels.close)

        def locate(world: World) -> Paths:
            decision = ""
            if world.is_rank0:
                decision = _decide(resumed, argv, stack)
            body = json.loads(world.tell(decision))
            if "kind" in body:
                raise revive(body)
            checkpoint, weights = (
                Path(body[key]) if body[key] else None for key in ("checkpoint", "weights")
            )
            home = Path(body["folder"])
            unseen = folder.unseen(home, body["digest"]) if is_first_here() else ""
            unseen = world.first_problem(unseen)
            if unseen:
                raise BadEnvironment(*unseen.split("\n"))
            return Paths(home, checkpoint, weights, body["cpu_matmul"])

        try:
            together = train_rank(run, locate, _end)
        except Exception as error:
            fault = None if isinstance(error, MtrainError) else environment_fault(error)
            if fault is not None:
                raise fault from error
            if not describe(error)["peer_lost"]:
                raise
            first = first_line(error)
            raise TrainingError(f"another rank has failed or ended: {first}") from error
    if not together:
        leave(0)
    return 0


def _join_timeout_s(argv: Sequence[str]) -> float:
    """Return how long to wait for rank 0 without a configuration, from `argv` or by default."""
    key = "trainer.join_timeout_s="
    given = next((word.removeprefix(key) for word in reversed(argv) if word.startswith(key)), "")
    try:
        return max(0.0, float(given))
    except ValueError:
        size, local = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        machines = int(size) // max(1, int(local)) if size.isdigit() and local.isdigit() else 1
        return usual_join_timeout_s(machines)


def _end(error: MtrainError, speaks: bool) -> None:
    """End this process from any thread; one rank per machine writes the reason unlocked."""
    # not sys.stderr: the main thread may hang inside a call that holds its lock
    if speaks or is_first_here():
        os.write(2, f"rank {rank()}: {error}\n".encode())
    os._exit(error.exit_code)


def report_to_others(error: BaseException) -> bool:
    """Report to the ranks that wait for this one why it ends; return whether they know."""
    from mtrain.world import join

    return join.give_up(error)


def is_for_this_rank(error: BaseException, *, known: bool) -> bool:
    """Return whether this rank prints an error; a shared error is printed once per machine."""
    from mtrain.world.rank_info import Refused

    shared = known and (
        isinstance(error, ConfigError | BadEnvironment) or getattr(error, "shared", False)
    )
    return not shared or is_first_here() or (isinstance(error, Refused) and error.speaks)


def is_first_here() -> bool:
    """Return whether this is the first rank of its machine, or rank 0."""
    return rank() == "0" or os.environ.get("LOCAL_RANK", "0") == "0"


def ranks_here() -> int:
    """Return the number of ranks that the launcher started on this machine, 1 if unset."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isdigit() else 1


def _decide(run: RunConfig, argv: list[str], stack: ExitStack) -> str:
    try:
        folder.refuse_local(run, ranks_here())
        planned = folder.plan(run, launch=launchers.restarted(os.environ))
        if planned.weights is not None and not is_checkpoint(planned.weights):
            rule = (
                "cannot be a Hugging Face folder because the ranks of a launcher have started, and"
                " weights are imported before that"
            )
            fix = f"{program()} convert import {planned.weights} RUN, and checkpoint.init_from=RUN"
            raise ConfigError.of("MT436", "checkpoint.init_from", str(planned.weights), rule, fix)
        run = matmul.chosen(run, planned.checkpoint)
        launch = launchers.identity(os.environ)
        claim = stack.enter_context(uploads.claimed(run, planned.folder, launch))
        chosen = stack.enter_context(folder.opened(run, planned, argv, launch=launch))
        process = uploads.uploading(run, chosen.folder, chosen.checkpoint, claim, barred=False)
        stack.enter_context(process)
    except MtrainError as error:
        return json.dumps(describe(error))
    for note in chosen.notes:
        say(note)
    say(f"run folder: {chosen.folder}")
    places = {"folder": chosen.folder, "checkpoint": chosen.checkpoint, "weights": chosen.weights}
    body: dict[str, str | None] = {key: str(path) if path else None for key, path in places.items()}
    return json.dumps({**body, "cpu_matmul": run.kernels.cpu_matmul, "digest": run.digest()})


def _brought(run: RunConfig) -> RunConfig:
    """Return the run of rank 0 after the checkpoint of its address was downloaded."""
    launch = launchers.identity(os.environ)
    restarted = launchers.restarted(os.environ)
    return from_store.brought(run, launch=launch, restarted=restarted, say=say)


def rank() -> str:
    """Return the rank of this process, as the launcher wrote it."""
    return os.environ["RANK"]
