"""The section `launch`: the scheduler that starts a run, for `render` and `submit`."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from mtrain.config.schema.base import Degree, Key, NonNegativeInt, Section

# Names that schedulers use in directives and labels, where no shell may find anything to expand.
WORD = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
# A job's name is a DNS label, because pods of Kubernetes are hosts of that name.
LABEL = r"^[a-z][a-z0-9-]*[a-z0-9]$"
VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
# A registry's address, a name, a tag and a digest, or the path of an image file.
IMAGE = r"^[A-Za-z0-9/.][A-Za-z0-9._/:@#+-]*$"
# SOURCE:TARGET or SOURCE:TARGET:FLAGS, which pyxis separates by commas
MOUNT = r"^/[A-Za-z0-9._/+-]*:/[A-Za-z0-9._/+-]*(:[a-z+]+)?$"
# D-HH:MM:SS, HH:MM:SS, MM:SS or minutes, as `man sbatch` lists them
TIME = r"^([0-9]+-)?[0-9]+(:[0-9]{1,2}){0,2}$"

# A folder in a container; SkyPilot would replace a variable in it
FOLDER = r"^(/[A-Za-z0-9._+-]+)+$"
# A claim on a volume, a volume of SkyPilot, or a bucket
VOLUME = r"^([a-z0-9]+://)?[A-Za-z0-9][A-Za-z0-9._/-]*$"
# A resource of Kubernetes, such as cpu or rdma/hca
RESOURCE = r"^([a-z0-9][a-z0-9.-]*/)?[a-z0-9][A-Za-z0-9._-]*$"
# A quantity of Kubernetes, such as 64, 500m or 1800Gi
QUANTITY = r"^[0-9]+(\.[0-9]+)?([mkMGTPE]|[KMGTPE]i)?$"
# A cloud, with its region and zone, or a context of Kubernetes
INFRA = r"^[A-Za-z0-9*][A-Za-z0-9*._/@:-]*$"

Word = Annotated[str, Field(pattern=WORD, max_length=100)]
Variable = Annotated[str, Field(pattern=VARIABLE, max_length=100)]
Mount = Annotated[str, Field(pattern=MOUNT, max_length=500)]
Label = Annotated[str, Field(pattern=LABEL, max_length=63)]
Folder = Annotated[str, Field(pattern=FOLDER, max_length=500)]
Volume = Annotated[str, Field(pattern=VOLUME, max_length=253)]
Resource = Annotated[str, Field(pattern=RESOURCE, max_length=253)]
Quantity = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
    Field(pattern=QUANTITY, max_length=40),
]


class LaunchConfig(Section):
    """`launch`: where `render` and `submit` start a run. No key changes a number, none is part of
    the digest, and no recipe may set one.
    """

    kind: Literal["local", "torchrun", "slurm", "kubernetes", "skypilot", "ray"] = "local"
    """The launcher: a script for this machine, a script for each machine, a batch job of SLURM, a
    manifest of Kubernetes, a task of SkyPilot, or a script that submits to a Ray cluster.
    """
    job_name: Annotated[str, Field(pattern=LABEL, max_length=40)] | None = None
    """The name of the job; null: log.name or the model's name, in lower case with dashes."""
    command: tuple[str, ...] = Field(default=("python", "-m", "mtrain"), strict=False)
    """The words that start mtrain on each machine."""
    workdir: str | None = None
    """The folder in which every machine starts; relative paths of the run begin there. null: the
    folder in which the job is submitted, or the first of `launch.volumes`.
    """
    setup: str | None = None
    """A shell file that each machine reads first, such as the `bin/activate` of an environment."""
    env: tuple[Variable, ...] = Field(default=(), strict=False)
    """Names of environment variables that the run needs. The job passes their values on, or
    refuses to start without them; no script holds a value.
    """
    image: Annotated[
        Annotated[str, Field(pattern=IMAGE, max_length=500)] | None,
        Key(when="launch.kind=slurm|kubernetes|skypilot", aka="container_image"),
    ] = None
    """The container image, in which mtrain is installed; null: no container."""
    mounts: Annotated[
        tuple[Mount, ...],
        Key(when="launch.kind=slurm and launch.image", aka="container_mounts"),
    ] = Field(default=(), strict=False)
    """Folders in the container as /SOURCE:/TARGET. The working folder is always one of them."""
    partition: Annotated[Word | None, Key(when="launch.kind=slurm")] = None
    """SLURM's partition; null: the site's default."""
    account: Annotated[Word | None, Key(when="launch.kind=slurm")] = None
    """SLURM's account; null: the user's default."""
    qos: Annotated[Word | None, Key(when="launch.kind=slurm")] = None
    """SLURM's quality of service; null: the default."""
    time: Annotated[
        Annotated[str, Field(pattern=TIME)] | None, Key(when="launch.kind=slurm", aka="time_limit")
    ] = None
    """SLURM's time limit, as minutes, HH:MM:SS or D-HH:MM:SS; null: the partition's."""
    segment: Annotated[Degree | None, Key(when="launch.kind=slurm")] = None
    """Machines that SLURM's block topology places together; null: no request."""
    exclusive: Annotated[bool, Key(when="launch.kind=slurm")] = True
    """Reserve whole machines, with all of their cores and memory."""
    tasks: Annotated[Literal["machine", "device"], Key(when="launch.kind=slurm")] = "machine"
    """Tasks of srun: one for each machine, which starts the machine's ranks, or one for each
    rank.
    """
    grace_s: Annotated[
        Annotated[int, Field(ge=1, le=65535)],
        Key(when="launch.kind=slurm|kubernetes", unit="seconds"),
    ] = 120
    """Seconds between TERM and the end, in which the run saves a checkpoint: SLURM sends TERM that
    long before the time limit, and Kubernetes waits that long for a pod to end.
    """
    relayout: Annotated[bool, Key(when="launch.kind=slurm")] = False
    """Search a layout with parallel=auto if the job has another number of machines than
    cluster.nodes, for example after `scontrol update JobId=N NumNodes=1-1 NumTasks=1`.
    """
    resource: Annotated[
        Literal["jobset", "trainjob", "pytorchjob", "rayjob"], Key(when="launch.kind=kubernetes")
    ] = "jobset"
    """The kind of Kubernetes: JobSet, TrainJob of Kubeflow Trainer, PyTorchJob of its predecessor,
    or RayJob of KubeRay. Its controller must be installed.
    """
    namespace: Annotated[Label | None, Key(when="launch.kind=kubernetes")] = None
    """Kubernetes' namespace; null: that of the user's context."""
    queue: Annotated[Word | None, Key(when="launch.kind=kubernetes", aka="queue_name")] = None
    """The local queue of Kueue that admits the job; null: no queue."""
    secret: Annotated[Label | None, Key(when="launch.kind=kubernetes", aka="secret_name")] = None
    """The Secret of Kubernetes with a key for each name in `launch.env`."""
    volumes: Annotated[
        dict[Folder, Volume], Key(when="launch.kind=kubernetes|skypilot", aka="pvc")
    ] = {}
    """Folders on which each machine sees shared storage: a claim of Kubernetes, a volume of
    SkyPilot, or a bucket (`s3://name`) that SkyPilot mounts. One must hold the folder of runs.
    """
    shm_gib: Annotated[Degree | None, Key(when="launch.kind=kubernetes", unit="GiB")] = None
    """Shared memory of a pod in GiB (/dev/shm); null: 8 for each rank on a machine."""
    resources: Annotated[
        dict[Resource, Quantity], Key(when="launch.kind=kubernetes", aka="limits")
    ] = {}
    """Resources of a pod besides its GPUs, as Kubernetes names them: {cpu: 96, memory: 1800Gi}."""
    restarts: Annotated[NonNegativeInt, Key(when="launch.kind=kubernetes", aka="max_restarts")] = 3
    """Restarts of a JobSet or TrainJob after failures. A run that was stopped and has saved (exit
    code 75) restarts without a limit, and one with invalid input, a faulty environment or damaged
    data (2, 3, 4) never.
    """
    infra: Annotated[
        Annotated[str, Field(pattern=INFRA, max_length=200)] | None,
        Key(when="launch.kind=skypilot", aka="cloud"),
    ] = None
    """The infrastructure that SkyPilot uses: CLOUD/REGION/ZONE, or k8s/CONTEXT; null: any."""
    accelerator: Annotated[Word | None, Key(when="launch.kind=skypilot", aka="accelerators")] = None
    """SkyPilot's name of the GPU; null: that of the cluster file's GPU."""
    spot: Annotated[bool, Key(when="launch.kind=skypilot", aka="use_spot")] = False
    """Use spot machines, which the cloud may take back."""
