"""The launchers of `render` and `submit`, by the value of `launch.kind`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mtrain.clusters import local, slurm
from mtrain.clusters.job import Job
from mtrain.config.schema.run import RunConfig

FILE = "FILE"
"""The word of a command in the place of the job's file."""


@dataclass(frozen=True)
class Launcher:
    """One kind of job."""

    render: Callable[[Job], str]
    """Returns the text of the job's file."""
    suffix: str = ".sh"
    """Ending of that file."""
    commands: tuple[tuple[str, ...], ...] = ()
    """The scheduler's own commands of a submission, in order; empty: there is no scheduler."""


LAUNCHERS: Mapping[str, Launcher] = {
    "local": Launcher(local.render_local),
    "torchrun": Launcher(local.render_torchrun),
    "slurm": Launcher(slurm.render, ".sbatch", (("sbatch", "--test-only", FILE), ("sbatch", FILE))),
}


def render(run: RunConfig) -> str:
    """Return the file of a run's job: equal runs give equal files."""
    return LAUNCHERS[run.launch.kind].render(Job(run))
