"""The rank of a process as each launcher says it in the environment, and what cannot be true."""

from __future__ import annotations

import platform
import re

import pytest

from mtrain.errors import BadEnvironment
from mtrain.launching.start import placed
from mtrain.world.launchers import expanded, identity, launched, restarted
from mtrain.world.rank_env import LAUNCHER, RankEnv

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29501",
    "TORCHELASTIC_RUN_ID": "id",
}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_NNODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "MASTER_PORT": "29501",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29501",
}
HYDRA = {
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "4",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29501",
}
FLUX = {
    "FLUX_TASK_RANK": "5",
    "FLUX_JOB_SIZE": "8",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_NNODES": "2",
    "FLUX_JOB_ID": "f2oPC",
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29501",
}
MACHINE = {"MTRAIN_MACHINE": "2", "MTRAIN_MACHINES": "4", "MASTER_ADDR": "train-master-0"}
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "2",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5\n10.0.0.6\n10.0.0.7",
    "SKYPILOT_TASK_ID": "sky-managed-2026-11-28-07-00-00_train_1-0",
}
# a pod of a TrainJob, whose torch runtime sets torchrun's options as variables
TRAINJOB = {
    "JOB_COMPLETION_INDEX": "2",
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29400",
    "HOSTNAME": "train-node-0-2",
}
POD = {"JOB_COMPLETION_INDEX": "2", "JOB_COMPLETIONS": "4", "HOSTNAME": "train-2"}


@pytest.mark.parametrize(
    "environment",
    [TORCHRUN, SRUN, MPIRUN, HYDRA, FLUX],
    ids=["torchrun", "srun", "mpirun", "pmi", "flux"],
)
def test_launchers_give_the_same_place(environment: dict[str, str]) -> None:
    found = launched(environment)
    assert found is not None
    assert (found.rank, found.size, found.local_rank, found.local_size) == (5, 8, 1, 4)
    assert found.host == ("gpu07" if environment is SRUN else "a")
    assert found.port == 29501
    env = RankEnv.here({**environment, **found.variables()})
    assert (env.rank, env.size, env.local_rank, env.local_size) == (5, 8, 1, 4)


def test_launchers_indexed_pods_find_the_first() -> None:
    found = launched(POD)
    assert found is not None
    assert (found.rank, found.size, found.host) == (2, 4, "train-0")
    assert found.one_a_machine


@pytest.mark.parametrize(
    ("environment", "host"),
    [(MACHINE, "train-master-0"), (SKYPILOT, "10.0.0.4"), (TRAINJOB, "train-node-0-0.train")],
    ids=["job", "skypilot", "trainjob"],
)
def test_launchers_one_process_a_machine_starts_ranks(
    environment: dict[str, str], host: str
) -> None:
    found = launched(environment)
    assert found is not None
    assert (found.rank, found.size, found.host) == (2, 4, host)
    assert found.one_a_machine
    # A rank that it starts is no launcher, although it inherits those variables.
    rank = launched({**environment, **placed(19, 32, host, found.port, 16, 8)})
    assert rank is not None
    assert (rank.rank, rank.size, rank.local_size, rank.one_a_machine) == (19, 32, 8, False)


@pytest.mark.parametrize(
    "environment",
    [
        {"MTRAIN_MACHINE": "0", "MTRAIN_MACHINES": "1"},
        {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.4"},
        {**TRAINJOB, "JOB_COMPLETION_INDEX": "0", "PET_NNODES": "1"},
    ],
)
def test_launchers_only_machine_starts_own_ranks(environment: dict[str, str]) -> None:
    assert launched(environment) is None


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("solo", ["solo"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[09-10,12],gpu-a[1-2]b", ["n09", "n10", "n12", "gpu-a1b", "gpu-a2b"]),
        ("r[1-2]n[3-4]", ["r1n3", "r1n4", "r2n3", "r2n4"]),
        ("", []),
    ],
)
def test_launchers_node_lists_expand_in_order(nodes: str, names: list[str]) -> None:
    assert list(expanded(nodes)) == names


def test_launchers_port_is_equal_in_a_launch_only() -> None:
    without = {name: value for name, value in SRUN.items() if name != "MASTER_PORT"}
    ports = [launched({**without, "SLURM_PROCID": rank}) for rank in ("0", "7")]
    other = launched({**without, "SLURM_JOB_ID": "78"})
    assert ports[0] is not None
    assert ports[1] is not None
    assert other is not None
    assert ports[0].port == ports[1].port != other.port


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_ID": "4294967291"},  # the batch script
        {"SLURM_STEP_ID": "4294967290"},  # an interactive shell
        {"SLURM_STEP_ID": "", "ENVIRONMENT": "BATCH", "SLURM_PROCID": "0"},
        {"SLURM_PROCID": ""},
        {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_NNODES": "1", "SLURM_LOCALID": "0"},
    ],
)
def test_launchers_single_task_starts_own_ranks(changes: dict[str, str]) -> None:
    assert launched({**SRUN, **changes}) is None


def test_launchers_task_per_node_differs_from_task_per_rank() -> None:
    several = launched(SRUN)
    one = launched({**SRUN, "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"})
    assert several is not None
    assert one is not None
    assert not several.one_a_machine
    assert one.one_a_machine
    flux = launched({**FLUX, "FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "1", "FLUX_TASK_LOCAL_ID": ""})
    assert flux is not None
    assert flux.launcher == "flux"
    assert flux.one_a_machine


def test_launchers_tasks_of_one_machine_meet_locally() -> None:
    here = launched(
        {**SRUN, "SLURM_NNODES": "1", "SLURM_STEP_NODELIST": platform.node(), "MASTER_ADDR": ""}
    )
    assert here is not None
    assert here.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (
            {**TORCHRUN, "RANK": "8"},
            "RANK is 8 and WORLD_SIZE is 8: processes are numbered from 0 to 7",
        ),
        (
            {**TORCHRUN, "LOCAL_RANK": "4"},
            "LOCAL_RANK is 4 and LOCAL_WORLD_SIZE puts 4 processes on this machine",
        ),
        (
            {**TORCHRUN, "LOCAL_WORLD_SIZE": "9"},
            "LOCAL_WORLD_SIZE puts 9 processes on this machine and WORLD_SIZE is 8",
        ),
        ({**TORCHRUN, "MASTER_PORT": "0"}, "MASTER_PORT is 0"),
        ({**TORCHRUN, "RANK": "five"}, "RANK is 'five'"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE is 0 in the environment"),
        (
            {**SRUN, **TORCHRUN, "TORCHELASTIC_RUN_ID": "", "RANK": "0"},
            "RANK is 0 and SLURM_PROCID is 5, each of 8",
        ),
        ({**MPIRUN, "MASTER_ADDR": ""}, "set MASTER_ADDR"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT"),
    ],
)
def test_launchers_contradictions_are_refused(environment: dict[str, str], words: str) -> None:
    with pytest.raises(BadEnvironment, match=words):
        launched(environment)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({**SRUN, "SLURM_PROCID": "8"}, "SLURM_PROCID is 8 and SLURM_NTASKS is 8: "),
        (
            {**SRUN, "SLURM_STEP_NUM_TASKS": "4"},
            "SLURM_PROCID is 5 and SLURM_STEP_NUM_TASKS is 4: ",
        ),
        ({**SRUN, "SLURM_NTASKS": ""}, "SLURM_PROCID is 5 and SLURM_NTASKS is not set: "),
        (
            {**SRUN, "SLURM_LOCALID": "4"},
            "SLURM_LOCALID is 4 and SLURM_TASKS_PER_NODE puts 4 processes",
        ),
        (
            {**MPIRUN, "OMPI_COMM_WORLD_RANK": "8"},
            "OMPI_COMM_WORLD_RANK is 8 and OMPI_COMM_WORLD_SIZE is 8: ",
        ),
        (
            {**MPIRUN, "OMPI_COMM_WORLD_SIZE": ""},
            "OMPI_COMM_WORLD_RANK is 5 and OMPI_COMM_WORLD_SIZE is not set: ",
        ),
        (
            {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "9"},
            "OMPI_COMM_WORLD_LOCAL_SIZE puts 9 processes",
        ),
        (
            {**FLUX, "FLUX_TASK_LOCAL_ID": "4"},
            "FLUX_TASK_LOCAL_ID is 4 and FLUX_JOB_NNODES puts 4 processes",
        ),
        ({**HYDRA, "PMI_RANK": "8"}, "PMI_RANK is 8 and PMI_SIZE is 8: "),
        ({**HYDRA, "PMIX_RANK": "9", "PMIX_SIZE": "9"}, "PMIX_RANK is 9 and PMIX_SIZE is 9: "),
        (
            {**HYDRA, "MPI_LOCALRANKID": "4"},
            "MPI_LOCALRANKID is 4 and MPI_LOCALNRANKS puts 4 processes",
        ),
        ({**HYDRA, "MPI_LOCALNRANKS": "0"}, "MPI_LOCALNRANKS is 0 in the environment"),
        (
            {**POD, "JOB_COMPLETION_INDEX": "4"},
            "JOB_COMPLETION_INDEX is 4 and JOB_COMPLETIONS is 4: ",
        ),
        (
            {**POD, "JOB_COMPLETIONS": "", "NNODES": "2"},
            "JOB_COMPLETION_INDEX is 2 and NNODES is 2: ",
        ),
        ({**POD, "PET_MASTER_PORT": "99999"}, "PET_MASTER_PORT is 99999: "),
        ({**MACHINE, "MTRAIN_MACHINE": "4"}, "MTRAIN_MACHINE is 4 and MTRAIN_MACHINES is 4: "),
        ({**MACHINE, "MASTER_ADDR": ""}, "set MASTER_ADDR"),
        ({**SKYPILOT, "SKYPILOT_NODE_RANK": "x"}, "SKYPILOT_NODE_RANK is 'x'"),
    ],
)
def test_launchers_contradiction_names_launcher_variables(
    environment: dict[str, str], words: str
) -> None:
    with pytest.raises(BadEnvironment) as refused:
        launched(environment)
    said = str(refused.value)
    assert words in said
    absent = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"} - environment.keys()
    assert absent.isdisjoint(re.findall(r"\w+", said))


def test_launchers_torchrun_below_srun_counts() -> None:
    found = launched({**SRUN, **TORCHRUN, "RANK": "2"})
    assert found is not None
    assert (found.launcher, found.rank) == ("torchrun", 2)


def test_launchers_restartable_has_an_identity() -> None:
    assert identity(TORCHRUN) == "torchrun id"
    assert identity(SRUN) == "slurm 77"
    assert identity(SKYPILOT) == "skypilot sky-managed-2026-11-28-07-00-00_train_1-0"
    assert identity({"MTRAIN_JOB": "kubernetes default/a 1b2c"}) == "kubernetes default/a 1b2c"
    assert identity({"RANK": "0"}) is None


def test_launchers_requeued_slurm_job_resumes() -> None:
    assert restarted(SRUN) is None
    assert restarted({**SRUN, "SLURM_RESTART_COUNT": "1"}) == "slurm 77"
    assert restarted(TORCHRUN) == "torchrun id"
    assert restarted(SKYPILOT) == identity(SKYPILOT)


def test_launchers_task_seeing_one_device_takes_it() -> None:
    third = {**TORCHRUN, "LOCAL_RANK": "3"}
    assert RankEnv.here(third).device_index(8) == 3
    assert RankEnv.here({**third, LAUNCHER: "slurm"}).device_index(1) == 0
    with pytest.raises(BadEnvironment, match="sees 1 device"):
        RankEnv.here(third).device_index(1)
