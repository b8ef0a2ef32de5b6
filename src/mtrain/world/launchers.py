"""Launchers, and the variables by which each numbers its processes.

Each set is translated into torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
MASTER_ADDR, MASTER_PORT), which the rest of mtrain reads. A launcher is one entry of `LAUNCHERS`.

Sources: `man srun` and `man sbatch` (output environment variables), Open MPI's "Environment
variables set by mpirun", the PMI of MPICH and PMIx, Flux's job shell (`flux run`), Kubernetes'
documentation of indexed jobs, and SkyPilot's "Distributed multi-node jobs".
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from mtrain.clusters.variables import JOB, MACHINE, MACHINES
from mtrain.config.machine.hardware import tasks_per_node
from mtrain.errors import BadEnvironment
from mtrain.world.rank_env import number

# The variables that make a process a rank
PLACE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LOCAL_HOST = "127.0.0.1"
# Linux takes the ports of outgoing connections from 32768 on, so these are free of them.
PORTS = range(12_000, 30_000)
# From this number on, SLURM numbers steps that no `srun` of a user made: batch scripts and
# interactive shells.
SPECIAL_STEPS = 0xFFFFFFF0
USUAL_PORT = 29_500
Environment = Mapping[str, str]
# Variables for the same fact; the first one that is set counts
Names = tuple[str, ...]


@dataclass(frozen=True)
class Launched:
    """A process that a launcher started as one of several."""

    launcher: str
    rank: int
    """Number of the process."""
    size: int
    """Number of processes."""
    local_rank: int
    local_size: int
    """Processes on this machine."""
    host: str
    """The host of process 0, which serves the store."""
    port: int
    machines: int = 0
    """The number of machines; 0: unknown."""
    read: Mapping[str, str] = field(default_factory=dict)
    """torchrun's variable -> the launcher's variable that was read for it."""

    @property
    def one_a_machine(self) -> bool:
        """Return whether each machine has one process, which may start the ranks of its machine."""
        return self.machines > 1 and self.size == self.machines

    def variables(self) -> dict[str, str]:
        """Return the process as a rank, in torchrun's variables."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }


@dataclass(frozen=True)
class Variables:
    """A launcher that numbers its processes by variables and nothing else.

    A process is one of its processes if `rank` is set, and `size` or `size_if_unset`.
    """

    launcher: str
    rank: Names
    size: Names
    local_rank: Names
    local_size: Names = ()
    """Processes on this machine; a launcher that sets none of these sets `machines`."""
    machines: Names = ()
    """Machines, over which the processes are spread evenly."""
    launch: Names = ()
    """The name of the launch, which is equal in all of its processes."""
    size_if_unset: int | None = None
    """Processes if none of `size` is set; None: another launcher set `rank`."""

    def __call__(self, environment: Environment) -> Launched | None:
        rank = _first_set(environment, *self.rank)
        size = _first_set(environment, *self.size)
        unset = not environment.get(size)
        if not environment.get(rank) or (unset and self.size_if_unset is None):
            return None
        index = _number(environment, rank)
        count = _count(environment, size, self.size_if_unset)
        local_rank = _first_set(environment, *self.local_rank)
        here = _first_set(environment, *self.local_size, *self.machines)
        machines = 0
        if self.machines:
            machines = _count(environment, here)
            local_size = -(-count // machines)
        else:
            local_size = _count(environment, here, count)
        launch = _value(environment, *self.launch)
        return Launched(
            launcher=self.launcher,
            rank=index,
            size=count,
            # Without a local rank, processes are assumed to fill one machine after the other.
            local_rank=_number(environment, local_rank, index % local_size),
            local_size=local_size,
            # Fewer processes here than in all prove a second machine, which is all that matters.
            host=_host(environment, self.launcher, "", 1 if local_size == count else 2),
            port=_port(environment, f"{self.launcher} {launch}"),
            machines=machines,
            read={
                "RANK": rank,
                "WORLD_SIZE": size,
                "LOCAL_RANK": local_rank,
                "LOCAL_WORLD_SIZE": here,
            },
        )


def launched(environment: Environment) -> Launched | None:
    """Return this process as the launcher numbers it; None: a run here starts its own ranks.

    Raises:
        BadEnvironment: variables contradict each other, are no numbers, or lack the address of
            process 0.
    """
    for launcher in LAUNCHERS:
        place = launcher(environment)
        if place is not None:
            _check(place, environment)
            return place if place.size > 1 or place.launcher == "torchrun" else None
    return None


def identity(environment: Environment) -> str | None:
    """Return the name of the launch, such as `slurm 1234`; None: the launcher does not restart
    processes.

    All restarts of a launch keep the name, so it distinguishes the run of this launch from that of
    another.
    """
    run = environment.get("TORCHELASTIC_RUN_ID")
    if run and run != "none" and environment.get("RANK"):
        return f"torchrun {run}"
    named = environment.get(JOB)
    if named:
        return named
    job = _slurm_job(environment)
    if job is not None:
        return f"slurm {job}"
    task = environment.get("SKYPILOT_TASK_ID")
    return f"skypilot {task}" if task else None


def restarted(environment: Environment) -> str | None:
    """Return the identity of a launch whose earlier start may have begun the run; None: this is the
    first start.

    A SLURM job may train several runs one after another, so it resumes one only after it was
    requeued. Other launchers run a single command, and do not count its restarts, or not alike on
    all machines, so theirs always may.
    """
    launch = identity(environment)
    if launch is None or not launch.startswith("slurm "):
        return launch
    count = environment.get("SLURM_RESTART_COUNT", "0")
    return launch if count.isdigit() and int(count) > 0 else None


def _torchrun(environment: Environment) -> Launched | None:
    """Read the variables of torchrun, which other launchers set too.

    Raises:
        BadEnvironment: this is one of several processes, and no variable has
            the address of process 0.
    """
    here = {name: environment[name] for name in PLACE if environment.get(name)}
    lacking = [name for name in PLACE if name not in here]
    if lacking:
        if "RANK" in here and here.get("WORLD_SIZE", "1") != "1":
            variables = " ".join(f"{name}={value}" for name, value in here.items())
            raise BadEnvironment(
                f"{variables} is set for one of several processes, which cannot find each other"
                f" without {' and '.join(lacking)}",
                f"  fix: start them with torchrun, which sets {', '.join(PLACE)}; or, for a run"
                " that starts its own ranks, unset RANK WORLD_SIZE",
            )
        return None
    return Launched(
        launcher="torchrun",
        rank=_number(environment, "RANK"),
        size=_count(environment, "WORLD_SIZE"),
        local_rank=_number(environment, "LOCAL_RANK", 0),
        local_size=_count(environment, "LOCAL_WORLD_SIZE", 1),
        host=environment["MASTER_ADDR"],
        port=_number(environment, "MASTER_PORT"),
    )


def _slurm(environment: Environment) -> Launched | None:
    """Read the variables of a task of srun; batch scripts and shells are no tasks."""
    if not environment.get("SLURM_PROCID") or not _is_task(environment):
        return None
    # A step of srun may have fewer tasks than its job, so the step's variables come first.
    tasks = _first_set(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    size = _count(environment, tasks, 1)
    hosts = list(expanded(_value(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")))
    count = _value(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    machines = int(count) if count.isdigit() else len(hosts) or 1
    per_node = _first_set(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", tasks)
    job = _slurm_job(environment) or ""
    step = _value(environment, "SLURM_STEP_ID", "SLURM_STEPID") or "0"
    return Launched(
        launcher="slurm",
        rank=_number(environment, "SLURM_PROCID"),
        size=size,
        local_rank=_number(environment, "SLURM_LOCALID", 0),
        local_size=_tasks_here(environment, size, machines),
        host=_host(environment, "slurm", hosts[0] if hosts else "", machines),
        port=_port(environment, f"slurm {job}.{step}"),
        machines=machines,
        read={
            "RANK": "SLURM_PROCID",
            "WORLD_SIZE": tasks,
            "LOCAL_RANK": "SLURM_LOCALID",
            "LOCAL_WORLD_SIZE": per_node,
        },
    )


def _is_task(environment: Environment) -> bool:
    """Return whether SLURM's variables are those of a task of srun."""
    # A batch script has SLURM_PROCID=0, too, and passes it to every process that it starts; only
    # srun sets the number of a step.
    step = _value(environment, "SLURM_STEP_ID", "SLURM_STEPID")
    if step:
        return step.isdigit() and int(step) < SPECIAL_STEPS
    return environment.get("ENVIRONMENT") != "BATCH"


def _slurm_job(environment: Environment) -> str | None:
    """Return the number of SLURM's job, which a requeued job keeps."""
    return _value(environment, "SLURM_JOB_ID", "SLURM_JOBID") or None


def _tasks_here(environment: Environment, size: int, machines: int) -> int:
    """Count the tasks on this machine, from a list such as `4(x3),2`."""
    counts = tasks_per_node(
        _value(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    )
    node = environment.get("SLURM_NODEID", "0")
    # The list may be the job's, which does not fit a smaller step.
    if node.isdigit() and int(node) < len(counts) and sum(counts) == size:
        return counts[int(node)]
    return max(1, size // machines)


def _machine(environment: Environment) -> Launched | None:
    """Read mtrain's own variables of the only process on each machine."""
    if not environment.get(MACHINE) or not environment.get(MACHINES):
        return None
    size = _count(environment, MACHINES)
    return Launched(
        launcher="job",
        rank=_number(environment, MACHINE),
        size=size,
        local_rank=0,
        local_size=1,
        host=_host(environment, "the job", "", size),
        port=_number(environment, "MASTER_PORT", USUAL_PORT),
        machines=size,
        read={"RANK": MACHINE, "WORLD_SIZE": MACHINES},
    )


def _skypilot(environment: Environment) -> Launched | None:
    """Read the variables of a task of SkyPilot, whose command runs once on each machine."""
    hosts = environment.get("SKYPILOT_NODE_IPS", "").split()
    if not environment.get("SKYPILOT_NODE_RANK") or not hosts:
        return None
    return Launched(
        launcher="skypilot",
        rank=_number(environment, "SKYPILOT_NODE_RANK"),
        size=len(hosts),
        local_rank=0,
        local_size=1,
        host=_host(environment, "skypilot", hosts[0], len(hosts)),
        port=_port(environment, f"skypilot {environment.get('SKYPILOT_TASK_ID', '')}"),
        machines=len(hosts),
        read={"RANK": "SKYPILOT_NODE_RANK", "WORLD_SIZE": "SKYPILOT_NODE_IPS"},
    )


def _kubernetes(environment: Environment) -> Launched | None:
    """Read the variables of a pod of an indexed job, whose host names end in the pod's index."""
    if not environment.get("JOB_COMPLETION_INDEX"):
        return None
    size = _first_set(environment, "JOB_COMPLETIONS", "PET_NNODES", "NNODES", "WORLD_SIZE")
    if not environment.get(size):
        return None
    count = _count(environment, size)
    port = _first_set(environment, "PET_MASTER_PORT", "MASTER_PORT")
    index = _number(environment, "JOB_COMPLETION_INDEX")
    # Pods of an indexed job are named JOB-INDEX, so pod 0 follows from this one's name.
    first = re.sub(rf"-{index}$", "-0", environment.get("HOSTNAME", ""))
    return Launched(
        launcher="kubernetes",
        rank=index,
        size=count,
        local_rank=0,
        local_size=1,
        host=_host(environment, "kubernetes", environment.get("PET_MASTER_ADDR") or first, count),
        port=_number(environment, port, USUAL_PORT),
        machines=count,
        read={"RANK": "JOB_COMPLETION_INDEX", "WORLD_SIZE": size, "MASTER_PORT": port},
    )


def expanded(nodes: str) -> Iterator[str]:
    """Yield the host names of a SLURM list, such as `n[01-03,7],gpu-a[1-2]b`, in its order."""
    for group in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", nodes):
        yield from _expanded(group.strip())


def _expanded(group: str) -> Iterator[str]:
    head, bracket, rest = group.partition("[")
    if not bracket:
        if group:
            yield group
        return
    inner, _, tail = rest.partition("]")
    for piece in inner.split(","):
        first, dash, last = piece.partition("-")
        if not (first.isdigit() and (not dash or last.isdigit())):
            continue
        for index in range(int(first), int(last or first) + 1):
            # A list keeps leading zeros: n[08-10] is n08, n09 and n10.
            for end in _expanded(tail) if tail else ("",):
                yield f"{head}{index:0{len(first)}d}{end}"


def _host(environment: Environment, launcher: str, first: str, machines: int) -> str:
    """Return the host of process 0: MASTER_ADDR, this machine if all processes are here, or the
    first of the list.

    Raises:
        BadEnvironment: there are several machines, and no variable names the first.
    """
    named = environment.get("MASTER_ADDR")
    if named:
        return named
    if machines <= 1:
        return LOCAL_HOST
    if first:
        return first
    raise BadEnvironment(
        f"{launcher} started processes on several machines and does not say where the first one is",
        "  fix: set MASTER_ADDR to the host name of the machine with process 0, on every machine",
    )


def _port(environment: Environment, launch: str) -> int:
    """Return MASTER_PORT, or a port computed from the launch, which another launch rarely gets."""
    if environment.get("MASTER_PORT"):
        return _number(environment, "MASTER_PORT")
    # Every process must compute the same port, so this is a checksum and not Python's salted hash.
    return PORTS[zlib.crc32(launch.encode()) % len(PORTS)]


def _first_set(environment: Environment, *names: str) -> str:
    """Return the first of these variables that is set, or the last if none is set."""
    return next((name for name in names if environment.get(name)), names[-1])


def _value(environment: Environment, *names: str) -> str:
    """Return the value of the first of these variables that is set, else ""."""
    return next((environment[name] for name in names if environment.get(name)), "")


def _number(environment: Environment, name: str, default: int | None = None) -> int:
    """Return a variable as a number; an empty one counts as missing.

    Raises:
        BadEnvironment: it is not a number, or is missing and there is no default.
    """
    if default is not None and not environment.get(name):
        return default
    return number(environment, name)


def _count(environment: Environment, name: str, default: int | None = None) -> int:
    """Return a variable as a number of processes, which is 1 or more; raises as `_number` does."""
    count = _number(environment, name, default)
    if count == 0:
        raise BadEnvironment(f"{name} is 0 in the environment: a launch has at least one process")
    return count


def _check(place: Launched, environment: Environment) -> None:
    """Refuse variables that contradict each other.

    Raises:
        BadEnvironment: names the variables and the fix.
    """
    rank, size, local_rank, local_size, port = (
        place.read.get(name, name)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    )
    in_all = f"{size} is {place.size}" if environment.get(size) else f"{size} is not set"
    here = f"{local_size} puts {place.local_size} processes on this machine"
    wrong = []
    if place.rank >= place.size:
        last = place.size - 1
        wrong.append(
            f"{rank} is {place.rank} and {in_all}: processes are numbered from 0 to {last}"
        )
    if place.local_size > place.size:
        wrong.append(f"{here} and {in_all}")
    if place.local_size > 1 and place.local_rank >= place.local_size:
        last = place.local_size - 1
        wrong.append(
            f"{local_rank} is {place.local_rank} and {here}: they are numbered from 0 to {last}"
        )
    if not 0 < place.port < 1 << 16:
        wrong.append(f"{port} is {place.port}: a port is a number from 1 to 65535")
    # torchrun may run under srun, and its workers then have other numbers than srun's tasks.
    if place.launcher == "torchrun" and not environment.get("TORCHELASTIC_RUN_ID"):
        wrong += _differences(place, environment)
    if wrong:
        raise BadEnvironment(
            f"the variables of {place.launcher} contradict each other: {'; '.join(wrong)}",
            "  fix: unset those that do not belong to this launch, on every machine",
        )


def _differences(place: Launched, environment: Environment) -> list[str]:
    """Return a sentence if RANK contradicts srun's or mpirun's number, as if a user set RANK."""
    out = []
    for launcher in (OPEN_MPI, _slurm):
        other = launcher(environment)
        if other is not None and other.size == place.size > 1 and other.rank != place.rank:
            own = other.read["RANK"]
            out.append(
                f"RANK is {place.rank} and {own} is {other.rank}, each of {place.size} processes"
            )
    return out


OPEN_MPI = Variables(
    "mpirun",
    rank=("OMPI_COMM_WORLD_RANK",),
    size=("OMPI_COMM_WORLD_SIZE",),
    local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
    local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    launch=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    # Without a number, each process would otherwise train a run of its own.
    size_if_unset=1,
)
PMI_LOCAL_RANK = ("MPI_LOCALRANKID", "PMI_LOCAL_RANK")
PMI_LOCAL_SIZE = ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
# Readers of each launcher's variables; the first that recognises this process counts. The order
# matters: torchrun and mpirun may run under srun, whose variables their processes then inherit, and
# launchers of MPI set PMI variables next to their own.
LAUNCHERS: tuple[Callable[[Environment], Launched | None], ...] = (
    _torchrun,
    _machine,
    OPEN_MPI,
    _slurm,
    # Flux sets PMI_RANK, too, but no number of processes per machine: it deals them out evenly.
    Variables(
        "flux",
        rank=("FLUX_TASK_RANK",),
        size=("FLUX_JOB_SIZE",),
        local_rank=("FLUX_TASK_LOCAL_ID",),
        machines=("FLUX_JOB_NNODES",),
        launch=("FLUX_JOB_ID",),
    ),
    Variables(
        "PMIx",
        rank=("PMIX_RANK",),
        size=("PMIX_SIZE", "PMI_SIZE"),
        local_rank=PMI_LOCAL_RANK,
        local_size=PMI_LOCAL_SIZE,
        launch=("PMIX_NAMESPACE",),
    ),
    # such as MPICH's Hydra; PMI_ID is the number of the process, not the name of the launch
    Variables(
        "PMI",
        rank=("PMI_RANK",),
        size=("PMI_SIZE", "PMIX_SIZE"),
        local_rank=PMI_LOCAL_RANK,
        local_size=PMI_LOCAL_SIZE,
    ),
    _skypilot,
    _kubernetes,
)
