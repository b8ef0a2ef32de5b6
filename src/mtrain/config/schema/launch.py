"""The section `launch`: the scheduler that starts a run, for `render` and `submit`."""

from typing import Annotated, Literal

from pydantic import Field

from mtrain.config.schema.base import Degree, Key, Section

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

Word = Annotated[str, Field(pattern=WORD, max_length=100)]
Variable = Annotated[str, Field(pattern=VARIABLE, max_length=100)]
Mount = Annotated[str, Field(pattern=MOUNT, max_length=500)]


class LaunchConfig(Section):
    """`launch`: where `render` and `submit` start a run. No key changes a number, none is part of
    the digest, and no recipe may set one.
    """

    kind: Literal["local", "torchrun", "slurm"] = "local"
    """The launcher: a script for this machine, a script for each machine, or a batch job."""
    job_name: Annotated[str, Field(pattern=LABEL, max_length=40)] | None = None
    """The name of the job; null: log.name or the model's name, in lower case with dashes."""
    command: tuple[str, ...] = Field(default=("python", "-m", "mtrain"), strict=False)
    """The words that start mtrain on each machine."""
    workdir: str | None = None
    """The folder in which every machine starts; relative paths of the run begin there. null: the
    folder in which the job is submitted.
    """
    setup: str | None = None
    """A shell file that each machine reads first, such as the `bin/activate` of an environment."""
    env: tuple[Variable, ...] = Field(default=(), strict=False)
    """Names of environment variables that the run needs. The job passes their values on, or
    refuses to start without them; no script holds a value.
    """
    image: Annotated[
        Annotated[str, Field(pattern=IMAGE, max_length=500)] | None,
        Key(when="launch.kind=slurm", aka="container_image"),
    ] = None
    """The container image, in which mtrain is installed; null: no container."""
    mounts: Annotated[tuple[Mount, ...], Key(when="launch.image", aka="container_mounts")] = Field(
        default=(), strict=False
    )
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
        Annotated[int, Field(ge=1, le=65535)], Key(when="launch.kind=slurm", unit="seconds")
    ] = 120
    """Seconds before the time limit at which SLURM sends TERM. The run saves a checkpoint
    meanwhile.
    """
    relayout: Annotated[bool, Key(when="launch.kind=slurm")] = False
    """Search a layout with parallel=auto if the job has another number of machines than
    cluster.nodes, for example after `scontrol update NumNodes=`.
    """
