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
from mtrain.clusters.launchers import FILE, INPUT, LAUNCHERS, Command
from mtrain.config.compose.paths import program
from mtrain.config.schema.launch import LaunchConfig
from mtrain.errors import BadEnvironment, ConfigError, Problem


def submit(launch: LaunchConfig, file: Path, tell: Callable[[str], None]) -> None:
    """Run the commands of a launcher on a job's file, and pass on what each prints.

    Raises:
        ConfigError: the launcher has no scheduler, or the scheduler refuses the job.
        BadEnvironment: a program is not installed.
    """
    kind = launch.kind
    commands = LAUNCHERS[kind].commands(launch)
    if not commands:
        detail = "no scheduler takes it"
        fix = f"{program()} render launch={kind} --out job.sh, and run job.sh with bash"
        raise ConfigError.of("MT022", "launch.kind", kind, detail, fix)
    for command in commands:
        _run(command, file, kind, tell)


def _run(command: Command, file: Path, kind: str, tell: Callable[[str], None]) -> None:
    needed = command.program or command.words[0]
    if shutil.which(needed) is None:
        fix = f"a machine where {needed} is installed, or {program()} render launch={kind}"
        lacking = Problem("MT478", "launch.kind", kind, f"{needed} is not installed", fix)
        raise BadEnvironment(*lacking.render().split("\n"))
    words = [str(file) if word == FILE else word for word in command.words]
    given = b""
    if INPUT in words:
        text = file.read_text(encoding="utf-8")
        given = (command.part(text) if command.part is not None else text).encode()
    done = subprocess.run(
        words,
        input=given,
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
        shown = shlex.join([needed, *(word for word in words[1:] if word.startswith("-"))])
        detail = f"{shown} ended with {done.returncode}: {last}"
        raise ConfigError.of("MT022", "launch.kind", kind, detail, f"{program()} explain launch")
