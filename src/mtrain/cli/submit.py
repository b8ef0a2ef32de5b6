"""`render` and `submit`: a run as the job of a scheduler, and its submission."""

from __future__ import annotations

from pathlib import Path

from mtrain.api import load
from mtrain.cli.output import write_new
from mtrain.clusters.job import Job
from mtrain.clusters.launchers import LAUNCHERS, render
from mtrain.clusters.submission import submit as submit_file
from mtrain.config.schema.run import RunConfig
from mtrain.errors import say, say_page
from mtrain.launching.signals import scratch_folder
from mtrain.units import number_of


def render_job(words: list[str], *, out: str | None) -> int:
    """Write the job of a validated run to a new file, or print it; return the exit code.

    Raises:
        ConfigError: the configuration has errors, or the file exists.
    """
    run = _validated(words)
    text = render(run)
    if out is None:
        say_page(text)
        return 0
    write_new(Path(out), text)
    say(f"{out}: {_summary(run)}")
    return 0


def submit(words: list[str]) -> int:
    """Render the job of a validated run and submit it; return the exit code.

    Raises:
        ConfigError: the configuration has errors, or the scheduler refuses the job.
        BadEnvironment: the scheduler's program is not installed.
    """
    run = _validated(words)
    with scratch_folder("mtrain-submit-") as scratch:
        file = scratch / f"{Job(run).name}{LAUNCHERS[run.launch.kind].suffix}"
        file.write_text(render(run), encoding="utf-8")
        say(_summary(run))
        submit_file(run, file, say_page)
    return 0


def _validated(words: list[str]) -> RunConfig:
    loaded = load(words, to_run=False)
    for warning in loaded.warnings:
        say_page(warning.render(), error=True)
    return loaded.run


def _summary(run: RunConfig) -> str:
    job = Job(run)
    machines = number_of(job.machines, "machine")
    each = number_of(job.ranks_each, "rank")
    return f"{run.launch.kind} job {job.name}: {machines} with {each} each, digest {job.digest}"
