"""One rank under another launcher: torchrun, srun, mpirun, or any that sets their variables; and
the process of one machine, as `srun --ntasks-per-node=1` starts it, which starts the machine's
ranks itself.

Rank 0, or the process of the first machine, composes and validates the configuration and offers it
in the store, where the others read it.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain import startup, strict_json
from mtrain.ckpt.folder import is_checkpoint
from mtrain.config.compose.dump import run_yaml
from mtrain.config.compose.lock_file import read_run_file
from mtrain.config.compose.paths import RUN_FILE, program
from mtrain.config.resolve.defaults import usual_join_timeout_s
from mtrain.config.schema.run import RunConfig
from mtrain.errors import BadEnvironment, ConfigError, MtrainError, Preempted, TrainingError, say
from mtrain.launching import folder, matmul
from mtrain.launching.child_process import prepare
from mtrain.launching.signals import scratch_folder
from mtrain.launching.start import PARENT, execute, importable, placed, python, without_launcher
from mtrain.launching.supervise import Supervisor
from mtrain.launching.warming import Warming
from mtrain.launching.worker import describe, enter, environment_fault, leave, revive
from mtrain.world import launchers
from mtrain.world.fingerprints import DESCRIPTOR, shared
from mtrain.world.launchers import Launched
from mtrain.world.rank_env import LAUNCHER
from mtrain.world.stacks import ERRORS

# Seconds in which another machine of a shared filesystem has to see a file that rank 0 wrote
SEEN_S = 30.0
# The variable with the configuration's file, if a machine's launcher composed it
RUN_GIVEN = "MTRAIN_RUN"


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
        given = os.environ.get(RUN_GIVEN)
        run = read_run_file(Path(given)) if given else compose()
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
            prepare(run, None)
        startup.mark(startup.DATA)
        kernels.begin(prepared=True)
    with ExitStack() as stack:
        if kernels is not None:
            stack.callback(kernels.close)

        def locate(world: World) -> Paths:
            decision = ""
            if world.is_rank0:
                decision = _decide(run, argv, stack)
            body = json.loads(world.tell(decision))
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
            fault = None if isinstance(error, MtrainError) else environment_fault(error)
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
    """Return how long to wait for rank 0 without a configuration, from `argv` or by default."""
    key = "trainer.join_timeout_s="
    given = next((word.removeprefix(key) for word in reversed(argv) if word.startswith(key)), "")
    try:
        return max(0.0, float(given))
    except ValueError:
        size, local = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        machines = int(size) // max(1, int(local)) if size.isdigit() and local.isdigit() else 1
        return usual_join_timeout_s(machines)


def _unseen(home: Path, digest: str) -> str:
    """Return why this machine does not see the run folder that rank 0 made; empty if it sees it."""
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
    """End this process from any thread; one rank per machine writes the reason, past locks that may
    hold sys.stderr.
    """
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
        _refuse_local(run)
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
        chosen = stack.enter_context(folder.opened(run, planned, argv, launch=launch))
    except MtrainError as error:
        return json.dumps(describe(error))
    for note in chosen.notes:
        say(note)
    say(f"run folder: {chosen.folder}")
    places = {"folder": chosen.folder, "checkpoint": chosen.checkpoint, "weights": chosen.weights}
    body: dict[str, str | None] = {key: str(path) if path else None for key, path in places.items()}
    return json.dumps({**body, "cpu_matmul": run.kernels.cpu_matmul, "digest": run.digest()})


def _refuse_local(run: RunConfig) -> None:
    """Refuse local checkpoints where other machines have ranks of the run.

    Raises:
        ConfigError: there are such machines.
    """
    local = run.checkpoint.local_dir
    here = ranks_here()
    if local is not None and here < run.parallel.ranks:
        rule = f"{here} of {run.parallel.ranks} ranks are on this machine"
        fix = "checkpoint.local_dir=null checkpoint.local_interval=null"
        raise ConfigError.of("MT455", "checkpoint.local_dir", local, rule, fix)


def rank() -> str:
    """Return the rank of this process, as the launcher wrote it."""
    return os.environ["RANK"]


if TYPE_CHECKING:
    from torch.distributed import TCPStore

# The key of the number of ranks, or of the reason why there are no ranks
SHARE = "mtrain/share"
# The key of the number of machines that have read it
READ = "mtrain/share read"
# Seconds that the first machine stays, so that the others can read why it ends
FAREWELL_S = 5.0


def launch(place: Launched, argv: list[str], compose: Callable[[int], RunConfig]) -> int:
    """Start the ranks of this machine and watch them to the end; return the exit code of the first
    that failed.

    `compose`, given the number of machines, returns a configuration whose share this machine can
    run.

    Raises:
        MtrainError: no configuration can be run, or the first machine does not answer.
    """
    if place.rank:
        return _start(place, argv, None, _share(place), None)
    run: RunConfig | None = None
    failure: MtrainError | None = None
    try:
        run = compose(place.size)
        _divide(run, place.size)
    except MtrainError as error:
        failure = error
    store = _serve(place, run, failure)
    if failure is not None:
        deadline = time.monotonic() + FAREWELL_S
        while store.add(READ, 0) < place.size - 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        raise failure
    assert run is not None
    return _start(place, argv, run, run.parallel.ranks, store)


def _divide(run: RunConfig, machines: int) -> None:
    """Refuse a number of ranks that the number of machines does not divide.

    Raises:
        BadEnvironment: names both numbers.
    """
    ranks = run.parallel.ranks
    if ranks % machines:
        raise BadEnvironment(
            f"the layout has {ranks} ranks, and one process was started on each of {machines}"
            " machines: as many ranks run on each",
            f"  fix: a number of machines that divides {ranks}, or a task for each rank",
        )


def _serve(place: Launched, run: RunConfig | None, failure: MtrainError | None) -> TCPStore:
    from torch.distributed import TCPStore

    share = {
        "ranks": run.parallel.ranks if run is not None else 0,
        "failure": str(failure or ""),
    }
    try:
        store = TCPStore(place.host, place.port, is_master=True, wait_for_workers=False)
    except (RuntimeError, OSError) as error:
        raise BadEnvironment(
            f"port {place.port} of this machine cannot serve the ranks:"
            f" {str(error).splitlines()[0]}",
            "  fix: MASTER_PORT=PORT, one that is free, on every machine",
        ) from None
    store.set(SHARE, strict_json.dumps(share))
    return store


def _share(place: Launched) -> int:
    """Read the number of all ranks from the first machine.

    Raises:
        BadEnvironment: the machine does not answer, or has no configuration to run.
    """
    from torch.distributed import TCPStore

    patience_s = usual_join_timeout_s(place.size)
    deadline = time.monotonic() + patience_s
    why = ""
    while time.monotonic() < deadline:
        try:  # torch's own attempts to connect are loud
            socket.create_connection((place.host, place.port), timeout=1.0).close()
            store = TCPStore(place.host, place.port, is_master=False, wait_for_workers=False)
            store.wait([SHARE], timedelta(seconds=patience_s))
            share = json.loads(store.get(SHARE))
            store.add(READ, 1)
            break
        except (OSError, RuntimeError) as error:
            why = str(error).splitlines()[0]
            time.sleep(0.2)
    else:
        raise BadEnvironment(
            f"the process of the first machine, {place.host}:{place.port}, did not answer within"
            f" {patience_s:g} s: {why}",
            "  fix: see whether it runs there; MASTER_ADDR and MASTER_PORT name another place",
        )
    if share["failure"]:
        text = f"the first machine has no configuration to run: {share['failure']}"
        raise BadEnvironment(*text.split("\n"))
    ranks: int = share["ranks"]
    return ranks


def _start(
    place: Launched, argv: list[str], run: RunConfig | None, ranks: int, store: TCPStore | None
) -> int:
    here = ranks // place.size
    first = place.rank * here
    with scratch_folder() as scratch, shared(here) as fingerprints:
        given = scratch / RUN_FILE
        if run is not None:
            given.write_text(run_yaml(run))

        def start(local_rank: int) -> int:
            values = {
                **importable(without_launcher(os.environ)),  # each rank sets what its run needs
                **placed(first + local_rank, ranks, place.host, place.port, first, here),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                PARENT: str(os.getpid()),
                DESCRIPTOR: str(fingerprints),
            }
            if first + local_rank == 0:
                values[RUN_GIVEN] = str(given)
            return execute(python("mtrain", *argv), values, fingerprints)

        supervisor = Supervisor(scratch / ERRORS, "")
        supervisor.start(start, here)
        try:
            supervisor.wait()
        except Preempted as stop:
            return stop.exit_code
        except MtrainError:  # each rank has printed its own error
            pass
    codes = [ended.code for ended in supervisor.ended if ended.code]
    del store  # it served the ranks to their end
    return codes[0] if codes else 0
