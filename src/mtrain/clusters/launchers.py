"""The launchers of `render` and `submit`, by the value of `launch.kind`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from mtrain.clusters import kubernetes, local, placement, skypilot, slurm
from mtrain.clusters.job import Job
from mtrain.clusters.kubernetes import TRAINJOB
from mtrain.clusters.manifest import documents
from mtrain.config.schema.launch import LaunchConfig
from mtrain.config.schema.run import RunConfig

FILE = "FILE"
"""The word of a command in the place of the job's file."""
INPUT = "-"
"""The word of a command that reads the job's file from its standard input."""


@dataclass(frozen=True)
class Command:
    """One command of a submission."""

    words: tuple[str, ...]
    part: Callable[[str], str] | None = None
    """Returns the part of the file that it reads; None: it reads the whole file."""
    program: str = ""
    """The program that must be installed; empty: the first word."""


@dataclass(frozen=True)
class Launcher:
    """One kind of job."""

    render: Callable[[Job], str]
    """Returns the text of the job's file."""
    suffix: str = ".sh"
    """Ending of that file."""
    commands: Callable[[LaunchConfig], Sequence[Command]] = lambda launch: ()
    """Returns the scheduler's own commands of a submission, in order; none without one."""
    refusals: tuple[tuple[str, str, str], ...] = ()
    """Parts of the scheduler's messages, in lower case, with the refused key and a remedy."""


def _slurm(launch: LaunchConfig) -> list[Command]:
    return [Command(("sbatch", "--test-only", FILE)), Command(("sbatch", FILE))]


def _kubernetes(launch: LaunchConfig) -> list[Command]:
    apply = ("kubectl", "apply")
    dry = "--dry-run=server"
    if launch.resource != "trainjob":
        return [Command((*apply, dry, "-f", INPUT)), Command((*apply, "-f", INPUT))]
    # The server refuses a TrainJob, also in a dry run, until its runtime exists.
    first = partial(documents, but=TRAINJOB)
    last = partial(documents, only=TRAINJOB)
    return [
        Command((*apply, dry, "-f", INPUT), first),
        Command((*apply, "-f", INPUT), first),
        Command((*apply, dry, "-f", INPUT), last),
        Command((*apply, "-f", INPUT), last),
    ]


def _skypilot(launch: LaunchConfig) -> list[Command]:
    secrets = [word for name in launch.env for word in ("--secret", name)]
    return [Command(("sky", "jobs", "launch", "--yes", "--detach-run", *secrets, FILE))]


def _ray(launch: LaunchConfig) -> list[Command]:
    return [Command(("bash", FILE), program="ray")]


LAUNCHERS: Mapping[str, Launcher] = {
    "local": Launcher(local.render_local),
    "torchrun": Launcher(local.render_torchrun),
    "slurm": Launcher(slurm.render, ".sbatch", _slurm, slurm.REFUSALS),
    "kubernetes": Launcher(kubernetes.render, ".yaml", _kubernetes),
    "skypilot": Launcher(skypilot.render, ".yaml", _skypilot),
    "ray": Launcher(placement.render, commands=_ray),
}


def render(run: RunConfig) -> str:
    """Return the file of a run's job: equal runs give equal files."""
    return LAUNCHERS[run.launch.kind].render(Job(run))
