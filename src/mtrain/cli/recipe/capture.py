"""`recipe import --capture`: runs somebody's own script and reads what it would have started."""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mtrain.cli.recipe.stand_ins import RECORDED, environment, for_bash, prepare
from mtrain.config.compose.yaml_reader import UNSHOWN, refuse_hidden
from mtrain.config.disk.files import MAX_BYTES
from mtrain.errors import ConfigError, Problem, say
from mtrain.recipes.imported import Imported, exported_keys, name_of
from mtrain.recipes.megatron.importer import import_commands
from mtrain.recipes.megatron.processes import directives
from mtrain.recipes.secrets import Secrets, names_secret
from mtrain.recipes.shell.reader import read_calls

Record = dict[str, Any]
"""`words`, `cwd` and `env` of a command that was not started."""
TIMEOUT_S = 120.0
GRACE_S = 5.0
LAST_LINES = 5


def capture(command: Sequence[str], extra: Sequence[str], timeout_s: float = TIMEOUT_S) -> Imported:
    """Run a command with recorders in place of all that starts training, and imports what they
    were given.

    Args:
        command: the user's own script with its arguments, as `bash pretrain.sh`.
        extra: overrides in our own grammar.
        timeout_s: seconds after which it is ended.

    Raises:
        ConfigError: it cannot be started, or starts no program that trains a GPT.
    """
    shown = shlex.join(command)
    say(
        f"runs `{shown}`: all that it does is done, but nothing is trained: {', '.join(RECORDED)}"
        " only record what they are given; other Python programs run",
        error=True,
    )
    text, source = _script(command)
    calls, code, late, output = recorded(command, text, timeout_s)
    named = {**os.environ, **{name: value for call in calls for name, value in call["env"].items()}}
    values = {name: [value] for name, value in named.items() if names_secret(name)}
    values["secret"] = [
        call["env"][name] for call in calls for name in values if name in call["env"]
    ]
    if not calls:
        raise ConfigError(
            [
                _nothing(
                    shown,
                    code,
                    late,
                    output,
                    Secrets({"secret": [v for held in values.values() for v in held]}),
                )
            ]
        )
    for call in calls:
        refuse_hidden(shlex.join(call["words"]), "the command line", UNSHOWN)
    script = read_calls([(call["words"], f"call {n}") for n, call in enumerate(calls, 1)])
    script.secrets |= values
    script.notes += [
        f"not run: {' '.join(call['words'])[:80]}"
        for call in calls
        if not _names_program(call["words"])
    ]
    if late:
        script.notes.append(
            f"the script was ended after {timeout_s:g} s; what it would have started then is not"
            " read"
        )
    elif code:
        script.notes.append(f"the script ended with exit code {code}")
    name = name_of(Path(source)) if source else "imported"
    return import_commands(
        script, name, source or shown, extra, directives(text), exported_keys(text, source)
    )


def recorded(
    command: Sequence[str], text: str, timeout_s: float
) -> tuple[list[Record], int, bool, str]:
    """Run a command; return the calls of its recorders, its exit code, whether it was ended late,
    and its output.

    `text` is its script: recorders replace its absolute paths of launchers, too.
    """
    with TemporaryDirectory(prefix="capture-") as folder:
        prepare(Path(folder), text)
        code, late = _run(for_bash(list(command), text), Path(folder), timeout_s)
        output = (Path(folder) / "output").read_bytes()[-20_000:].decode("utf-8", "replace")
        return _calls(Path(folder) / "calls"), code, late, output


def _names_program(words: Sequence[str]) -> bool:
    return any(".py" in word or word == "-m" for word in words)


def _script(command: Sequence[str]) -> tuple[str, str]:
    """Return the text and the name of the script in a command; both empty: none can be read."""
    for word in command:
        with suppress(OSError, ValueError):
            path = Path(word)
            if (
                path.is_file()
                and path.stat().st_size <= MAX_BYTES
                and b"\0" not in path.read_bytes()[:1000]
            ):
                return path.read_text(errors="replace"), word
    return "", ""


def _run(command: Sequence[str], folder: Path, timeout_s: float) -> tuple[int, bool]:
    """Return the exit code, and whether the command was ended before its end; it leaves no
    process behind.
    """
    env = environment(folder)
    until = time.monotonic() + timeout_s
    reading, writing = os.pipe()
    try:
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                list(command),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(writing,),
            )
    except (OSError, ValueError) as error:
        os.close(reading)
        why = getattr(error, "strerror", None) or error
        rule = f"{command[0]} cannot be started: {why}"
        raise ConfigError(
            [Problem("MT010", "", None, rule, "-- bash pretrain.sh", "command line")]
        ) from None
    finally:
        os.close(writing)
    with _ended(process):
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return 0, True
        # what the script left in the background is waited for as long as it is short
        left = max(0.0, min(GRACE_S, until - time.monotonic()))
        select.select([reading], [], [], left)
        os.close(reading)
        return code, False


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kill a process and everything that it started at the end of the block."""
    try:
        yield
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _calls(path: Path) -> list[Record]:
    """Return the recorded calls."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text("utf-8", "surrogateescape").splitlines()]


def _nothing(shown: str, code: int, late: bool, output: str, secrets: Secrets) -> Problem:
    """Return the problem of a script that started nothing."""
    end = "was ended after its time" if late else f"ended with exit code {code}"
    last = "; ".join(line.strip() for line in output.splitlines() if line.strip())[-300:]
    rule = f"`{shown}` {end}, and no training program was started by {', '.join(RECORDED[:8])}"
    rule += ": one that it started in another way has run for real"
    rule += f"; it ended with: {secrets.hide(last)}" if last else ""
    return Problem(
        "MT701",
        "",
        None,
        rule,
        "run it as you train with it, with the same arguments and variables",
        "",
    )
