"""The start of the processes of a local run: forked where the device allows it, executed elsewhere.

The launching process never calls a driver: a driver that was called once does not work in a process
that is forked afterwards, and it would hold memory of a device that belongs to the ranks.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

from mtrain import startup, strict_json
from mtrain.config.compose.dump import run_yaml
from mtrain.config.compose.paths import RUN_FILE
from mtrain.config.machine.devices import facts_of
from mtrain.config.schema.run import RunConfig
from mtrain.errors import BadEnvironment
from mtrain.goodput import account
from mtrain.goodput.log import Begun, ended
from mtrain.launching import signals
from mtrain.launching.jobs import TRAIN, Job
from mtrain.launching.supervise import Supervisor
from mtrain.launching.worker import end, leave, run_rank
from mtrain.processes import die_with
from mtrain.world.fingerprints import DESCRIPTOR, Memory, shared
from mtrain.world.rank_env import LISTEN_FD
from mtrain.world.stacks import ERRORS

HOST = "127.0.0.1"
ANY_HOST = ""
BACKLOG = 2048
# The file next to `run.yaml` with the job of the ranks, and the digest of its configuration
START_FILE = "start.json"
# The variable with the process id of the launcher; a rank ends when that process ends
PARENT = "MTRAIN_LAUNCHER_PID"
# Variables by which a launcher gives a process its rank and the address of the store
LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    LISTEN_FD,
    DESCRIPTOR,
)


@dataclass(frozen=True)
class Share:
    """The ranks that this machine starts, of a run on several machines."""

    first: int
    here: int
    host: str = HOST
    """The address of the first machine."""
    port: int = 0
    """The port of rank 0's store; 0: rank 0 starts here, and its store gets a free one."""
    folder: Path | None = None
    """The folder of the start file; None: the run's."""
    begin: Callable[[int], None] = lambda port: None
    """Called with the port of the store before any rank starts."""
    leave: Callable[[], None] = lambda: None
    """Called in a forked rank: it closes what belongs to the launcher."""


def run_ranks(
    run: RunConfig,
    home: Path,
    job: Job,
    environment: Mapping[str, str],
    supervisor: Supervisor | None = None,
    share: Share | None = None,
) -> None:
    """Start one process per rank of this machine, each with `job`, and watch them to the end.

    Files that executed ranks read, and the records of failed ranks, go to `home`. `environment` is
    that of each rank without the rank's own variables. `supervisor` watches the ranks; None: one
    without advice after a failure, and without records of earlier failures. `share` has the ranks
    of this machine; None: it has all.

    Raises:
        MtrainError: the error of the first failing rank.
    """
    if supervisor is None:
        errors = home / ERRORS
        shutil.rmtree(errors, ignore_errors=True)
        supervisor = Supervisor(errors, "")
    ranks = run.parallel.ranks
    bound = HOST if share is None else ANY_HOST
    share = share or Share(0, ranks)
    # A fork copies unwritten output, and every rank would print it again.
    sys.stdout.flush()
    sys.stderr.flush()
    begun = Begun.at(startup.current().begun)
    forks = may_fork(run)
    if not forks:
        _describe(run, home, job, share.folder or home)
    # bound before any rank starts and inherited by rank 0: a free port that is only looked up may
    # be taken before rank 0 binds it
    opened = nullcontext() if share.port else listening(bound)
    with opened as listener, shared(share.here) as fingerprints:
        port = share.port if listener is None else listener.getsockname()[1]
        share.begin(port)
        frozen = gc.get_freeze_count()
        gc.freeze()  # a collection in a forked rank would copy every page that it visits

        def start(rank: int) -> int:
            place = placed(rank, ranks, share.host, port, share.first, share.here)
            own = {
                **environment,
                **place,
                startup.VARIABLE: startup.current().passed_on(),
                DESCRIPTOR: str(fingerprints),
            }
            if forks:
                return _fork(run, home, job, rank, own, listener, share.leave)
            return _execute([home, share.folder or home], rank, own, listener, fingerprints)

        memory = Memory(fingerprints)
        supervisor.memory = memory
        try:
            supervisor.start(start, share.here, share.first)
        finally:
            startup.forget()
            if not frozen:  # a caller that froze earlier unfreezes itself
                gc.unfreeze()
    with closing(memory):
        if job.name != TRAIN or share.first:
            supervisor.wait()
            return
        try:
            with ended(home, begun, supervisor.advice):
                supervisor.wait()
        finally:
            account.write(home)


def may_fork(run: RunConfig) -> bool:
    """Return whether processes forked from this one can work on the run's device.

    The device has to survive a fork, and this process must not have threads: see `has_threads`.
    """
    return facts_of(run.cluster.device).fork_safe and not has_threads()


def has_threads() -> bool:
    """Return whether this process has threads for which a forked process would wait for ever.

    These are threads of Python, and the pool that torch starts with its first large product, unless
    it uses one thread. The pool of numpy's BLAS survives a fork; it has at most one thread per
    core.
    """
    python_threads = [t for t in threading.enumerate() if not isinstance(t, threading._DummyThread)]
    if len(python_threads) > 1:
        return True
    torch = sys.modules.get("torch")
    if torch is None or torch.get_num_threads() == 1:
        return False
    try:
        native = len(os.listdir("/proc/self/task"))
        cores = len(os.sched_getaffinity(0))
    except (OSError, AttributeError):  # not Linux
        return False
    return native > max(2, cores)


def placed(
    rank: int, size: int, host: str, port: int, first: int = 0, here: int | None = None
) -> dict[str, str]:
    """Return the variables of a rank.

    This machine has `here` ranks, from number `first` on; None: it has all ranks.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank - first),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size if here is None else here),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables by which another launcher numbers ranks."""
    return {
        name: value
        for name, value in environment.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith("TORCHELASTIC_")
    }


def python(module: str, *words: str) -> list[str]:
    """Return the command that runs a module in a new interpreter, outside the working folder."""
    return [sys.executable, "-P", "-m", module, *words]


def importable(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` with a PYTHONPATH that gives a child this process's modules."""
    # without "", the working folder, whose files could replace modules
    return {**environment, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def execute(command: list[str], environment: Mapping[str, str], *inherited: int) -> int:
    """Start a command that inherits some descriptors; return the process id.

    The process leads its own group: a terminal's Ctrl-C reaches only the launcher, which forwards
    it. The process also ignores signals that the launcher ignores, such as SIGHUP under nohup,
    except SIGTERM.

    Raises:
        OSError: no process can be started.
    """
    for descriptor in inherited:
        os.set_inheritable(descriptor, True)
    try:
        return os.posix_spawn(
            command[0], command, environment, setpgroup=0, setsigdef=[signal.SIGTERM]
        )
    finally:
        for descriptor in inherited:
            os.set_inheritable(descriptor, False)


def fork(work: Callable[[], int]) -> int:
    """Fork a process that exits with the result of `work`, and ends when this process ends; return
    its id.

    Raises:
        OSError: no process can be started.
    """
    parent = os.getpid()
    # A signal that arrived before `forget` would run the launcher's handler, and be lost.
    with signals.blocked():
        pid = os.fork()
        if pid == 0:
            signals.forget()
    if pid:
        return pid
    try:
        die_with(parent)
        leave(work())
    finally:  # no exception may unwind the stack of the process that forked
        os._exit(1)


def _describe(run: RunConfig, home: Path, job: Job, folder: Path) -> None:
    """Write the files that `mtrain.launching.rank` reads."""
    body = {"job": job.name, "arguments": dict(job.arguments), "digest": run.digest()}
    try:
        if not (home / RUN_FILE).exists():  # a run folder already has one, with remarks
            (home / RUN_FILE).write_text(run_yaml(run))
        (folder / START_FILE).write_text(strict_json.dumps(body, indent=1))
    except OSError as error:
        raise BadEnvironment(f"the folder {home} cannot be written: {error.strerror}") from None


def read_start(folder: Path) -> tuple[Job, str]:
    """Return the job of ranks from the start file of a folder, and the digest of their
    configuration.

    Raises:
        BadEnvironment: the start file is missing, because the machines do not share the folder or
            no launcher made it.
    """
    path = folder / START_FILE
    try:
        body = json.loads(path.read_text())
        return Job(body["job"], body["arguments"]), body["digest"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadEnvironment(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}",
            "  fix: start runs with a launcher; the folder of a run lies where every machine of it"
            " can read it",
        ) from None


def listening(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at a port of this machine, a free one if it is 0.

    Raises:
        OSError: the port is taken.
    """
    # A name of the machine may resolve to either family, so the socket takes both where it can.
    both = host == ANY_HOST and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server((host, port), family=family, dualstack_ipv6=both, backlog=BACKLOG)


def _execute(
    folders: Sequence[Path],
    rank: int,
    environment: Mapping[str, str],
    listener: socket.socket | None,
    memory: int,
) -> int:
    values = {**importable(environment), PARENT: str(os.getpid())}
    command = python("mtrain.launching.rank", *map(str, folders))
    if rank or listener is None:
        return execute(command, values, memory)
    with listener.dup() as inherited:
        values[LISTEN_FD] = str(inherited.fileno())
        return execute(command, values, inherited.fileno(), memory)


def _fork(
    run: RunConfig,
    home: Path,
    job: Job,
    rank: int,
    environment: Mapping[str, str],
    listener: socket.socket | None,
    leave_launcher: Callable[[], None],
) -> int:
    def work() -> int:
        os.environ.clear()
        os.environ.update(environment)
        leave_launcher()
        if listener is not None:
            if rank == 0:
                os.environ[LISTEN_FD] = str(os.dup(listener.fileno()))
            listener.close()
        errors = home / ERRORS
        return run_rank(
            lambda: job.perform(run, home, lambda error, _: end(error, errors, rank)), errors, rank
        )

    return fork(work)
