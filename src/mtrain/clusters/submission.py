"""Submission of a job through the scheduler's own programs."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from mtrain import startup
from mtrain.clusters.launchers import FILE, LAUNCHERS
from mtrain.config.compose.paths import program
from mtrain.errors import BadEnvironment, ConfigError


def submit(kind: str, file: Path, tell: Callable[[str], None]) -> None:
    """Run the commands of a launcher on a job's file, and pass on what each prints.

    Raises:
        ConfigError: the launcher has no scheduler, or the scheduler refuses the job.
        BadEnvironment: a program is not installed.
    """
    commands = LAUNCHERS[kind].commands
    if not commands:
        detail = "no scheduler takes it"
        fix = f"{program()} render launch={kind} --out job.sh, and run job.sh with bash"
        raise ConfigError.of("MT022", "launch.kind", kind, detail, fix)
    for command in commands:
        _run([str(file) if word == FILE else word for word in command], kind, tell)


def _run(words: list[str], kind: str, tell: Callable[[str], None]) -> None:
    if shutil.which(words[0]) is None:
        raise BadEnvironment(
            f"{words[0]} is not installed on this machine, and launch.kind={kind} submits with it",
            f"  fix: submit where {words[0]} is installed, or render the job to a file",
        )
    done = subprocess.run(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # Schedulers pass the environment on to the job, which cannot tell how long it was queued.
        env={**os.environ, startup.SUBMITTED: str(int(time.time()))},
        check=False,
    )
    output = done.stdout.decode(errors="replace").strip()
    if output:
        tell(output)
    if done.returncode:
        last = output.splitlines()[-1] if output else "it printed nothing"
        command = shlex.join([words[0], *(word for word in words[1:] if word.startswith("-"))])
        detail = f"{command} ended with {done.returncode}: {last}"
        raise ConfigError.of("MT022", "launch.kind", kind, detail, f"{program()} explain launch")
