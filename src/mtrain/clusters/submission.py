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
from mtrain.config.messages.problem import plain, value_at
from mtrain.config.schema.run import RunConfig
from mtrain.errors import BadEnvironment, ConfigError, Problem


def submit(run: RunConfig, file: Path, tell: Callable[[str], None]) -> None:
    """Run the commands of a launcher on a job's file, and pass on their output.

    Raises:
        ConfigError: the launcher has no scheduler, or the scheduler refuses the job.
        BadEnvironment: a program is not installed.
    """
    kind = run.launch.kind
    commands = LAUNCHERS[kind].commands(run.launch)
    if not commands:
        detail = "no scheduler takes it"
        fix = f"{program()} render launch={kind} --out job.sh, and run job.sh with bash"
        raise ConfigError.of("MT022", "launch.kind", kind, detail, fix)
    for command in commands:
        _run(command, file, run, tell)


def _run(command: Command, file: Path, run: RunConfig, tell: Callable[[str], None]) -> None:
    kind = run.launch.kind
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
        shown = shlex.join([needed, *(word for word in words[1:] if word.startswith("-"))])
        detail = f"{shown} ended with {done.returncode}: {_reason(output)}"
        key, fix = _refused(output, kind)
        raise ConfigError.of("MT022", key, plain(value_at(run, key)), detail, fix)


def _reason(output: str) -> str:
    """Return the line of a failed program's output that says the most."""
    lines = [line for line in output.splitlines() if not line.startswith("Try ")]
    # The last line is often a summary without the name that the first error has.
    errors = [line for line in lines if "error:" in line]
    return (errors or lines[-1:] or ["it printed nothing"])[0]


def _refused(output: str, kind: str) -> tuple[str, str]:
    """Return the key that a scheduler refuses, and a remedy."""
    for part, key, fix in LAUNCHERS[kind].refusals:
        if part in output.lower():
            return key, fix
    return "launch.kind", f"{program()} explain launch"
