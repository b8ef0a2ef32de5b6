"""`recipe import --capture`: run somebody's own script, and read what it would have started.

Stand-ins for launchers, interpreters and shells record their words in place of starting anything.
"""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mtrain import strict_json
from mtrain.cli.output import refusal
from mtrain.config.compose.yaml_reader import UNSHOWN, refuse_hidden
from mtrain.config.disk.files import MAX_BYTES
from mtrain.errors import ConfigError, say
from mtrain.recipes.imported import Imported, exported_keys, name_of
from mtrain.recipes.megatron.command import GPT, OTHER_WORDS, TRAINS
from mtrain.recipes.megatron.importer import import_commands
from mtrain.recipes.megatron.processes import directives
from mtrain.recipes.megatron.table import known_flags
from mtrain.recipes.secrets import Secrets, names_secret
from mtrain.recipes.shell.reader import read_calls

# `words`, `cwd` and `env` of a command that was not started
Record = dict[str, Any]
TIMEOUT_S = 120.0
GRACE_S = 5.0
LAST_BYTES = 20_000
# commands that train nothing under capture, besides interpreters named by version
RECORDED = (
    "torchrun",
    "python",
    "python3",
    "srun",
    "mpirun",
    "mpiexec",
    "deepspeed",
    "ray",
    "accelerate",
    "sbatch",
    "ssh",
    "pdsh",
    "docker",
    "singularity",
    "apptainer",
    "horovodrun",
)
_VERSIONS = [f"python3.{minor}" for minor in range(8, 15)]
_PATHS = re.compile(
    rf"(?<![\w.])/[\w./+-]*/(?:{'|'.join(RECORDED)}|env|python3\.[0-9]+)(?![\w./-])"
)
_FILES = Path(__file__).parent
_SITE = """import sys
sys.path.insert(0, FOLDER)
try:
    import recorder
    recorder.as_python_starts()
finally:
    sys.path[:] = [p for p in sys.path if not p.startswith(FOLDER)]
    own = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize
    except ImportError:
        # Python looks for it there, and complains on standard error if it is missing
        sys.modules["sitecustomize"] = own
"""


def capture(command: Sequence[str], extra: Sequence[str], timeout_s: float = TIMEOUT_S) -> Imported:
    """Run a command with recorders in place of all that starts training, and import their records.

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
    named = dict(os.environ)
    for call in calls:
        named |= call["env"]
    secrets: dict[str, list[Any]] = {
        name: [value] for name, value in named.items() if names_secret(name)
    }
    # A variable may change between calls: `named` has its last value only.
    secrets["secret"] = [call["env"][n] for call in calls for n in secrets if n in call["env"]]
    if not calls:
        raise _nothing(shown, code, late, output, secrets)
    for call in calls:
        refuse_hidden(shlex.join(call["words"]), "the command line", UNSHOWN)
    script = read_calls([(call["words"], f"call {n}") for n, call in enumerate(calls, 1)])
    script.secrets.update(secrets)
    for call in calls:
        if not any(".py" in word or word == "-m" for word in call["words"]):
            script.notes.append(f"not run: {' '.join(call['words'])[:80]}")
    if late:
        left = "what it would have started then is not read"
        script.notes.append(f"the script was ended after {timeout_s:g} s; {left}")
    elif code:
        script.notes.append(f"the script ended with exit code {code}")
    name = name_of(Path(source)) if source else "imported"
    keys = exported_keys(text, source)
    return import_commands(script, name, source or shown, extra, directives(text), keys)


def recorded(
    command: Sequence[str], text: str, timeout_s: float
) -> tuple[list[Record], int, bool, str]:
    """Run a command; return the calls of its recorders, its exit code, whether it was ended late,
    and its output.

    `text` is its script: recorders replace its absolute paths of launchers, too.
    """
    with TemporaryDirectory(prefix="capture-") as name:
        folder = Path(name)
        _prepare(folder, text)
        code, late = _run(_for_bash(list(command), text), folder, timeout_s)
        output = (folder / "output").read_bytes()[-LAST_BYTES:].decode("utf-8", "replace")
        calls = folder / "calls"
        lines = []
        if calls.exists():
            lines = calls.read_text("utf-8", "surrogateescape").splitlines()
        return [json.loads(line) for line in lines], code, late, output


def _script(command: Sequence[str]) -> tuple[str, str]:
    """Return the text and the name of the script in a command; both empty: none can be read."""
    for word in command:
        with suppress(OSError, ValueError):
            path = Path(word)
            if not path.is_file() or path.stat().st_size > MAX_BYTES:
                continue
            if b"\0" not in path.read_bytes()[:1000]:
                return path.read_text(errors="replace"), word
    return "", ""


def _run(command: Sequence[str], folder: Path, timeout_s: float) -> tuple[int, bool]:
    """Return the exit code, and whether the command was ended early; leave no process."""
    until = time.monotonic() + timeout_s
    # The pipe ends when the last process that holds its writing end does, also in the background.
    reading, writing = os.pipe()
    try:
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                list(command),
                env=_environment(folder),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(writing,),
            )
    except (OSError, ValueError) as error:
        os.close(reading)
        why = getattr(error, "strerror", None) or error
        raise refusal(f"{command[0]} cannot be started: {why}", "-- bash pretrain.sh") from None
    finally:
        os.close(writing)
    try:
        code = process.wait(timeout_s)
        left = max(0.0, min(GRACE_S, until - time.monotonic()))
        select.select([reading], [], [], left)
        return code, False
    except subprocess.TimeoutExpired:
        return 0, True
    finally:
        os.close(reading)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _nothing(
    shown: str, code: int, late: bool, output: str, secrets: dict[str, list[Any]]
) -> ConfigError:
    """Return the error of a script that started nothing."""
    end = "was ended after its time" if late else f"ended with exit code {code}"
    last = "; ".join(line.strip() for line in output.splitlines() if line.strip())[-300:]
    rule = f"`{shown}` {end}, and no training program was started by {', '.join(RECORDED[:8])}"
    rule += ": one that it started in another way has run for real"
    if last:
        hidden = Secrets({"secret": [value for held in secrets.values() for value in held]})
        rule += f"; it ended with: {hidden.hide(last)}"
    fix = "run it as you train with it, with the same arguments and variables"
    return refusal(rule, fix, "MT701")


def _prepare(folder: Path, text: str) -> None:
    """Write the stand-ins: commands for PATH, functions for bash, and what Python loads as it
    starts.

    Args:
        folder: an empty one; the records come into it.
        text: that of the script, whose absolute paths of launchers are replaced too.
    """
    recorder = folder / "recorder.py"
    shutil.copyfile(_FILES / "recorder.py", recorder)
    facts = {
        "flags": sorted(known_flags()),
        "gpt": GPT,
        "trains": sorted(TRAINS),
        "other": sorted(OTHER_WORDS),
        "python": sys.executable,
    }
    (folder / "facts.json").write_text(strict_json.dumps(facts))
    site = folder / "site"
    own = folder / "bin"
    site.mkdir()
    own.mkdir()
    (site / "sitecustomize.py").write_text(_SITE.replace("FOLDER", repr(str(folder))))
    # -I and -S: neither the script's PYTHONPATH nor its own sitecustomize reaches a recorder
    run = f"{shlex.quote(sys.executable)} -IS {shlex.quote(str(recorder))}"
    lines = ['if [ -n "${MTRAIN_CAPTURE_BASH_ENV-}" ]; then . "$MTRAIN_CAPTURE_BASH_ENV"; fi']
    for name in dict.fromkeys((*RECORDED, *_VERSIONS, *_interpreters(), "env")):
        file = _executable(own / name, f'#!/bin/sh\nexec {run} {name} "$@"\n')
        # bash takes no name with a dot for a function
        if "." not in name:
            lines.append(f'{name}() {{ {shlex.quote(str(file))} "$@"; }}')
    for path in sorted(set(_PATHS.findall(text))):
        lines.append(f'function {path} {{ {run} {path} "$@"; }}')
    bash = shutil.which("bash")
    if bash is not None:
        # Plain shells read no BASH_ENV as they start: bash takes their place.
        for name in ("sh", "dash"):
            _executable(own / name, f'#!{bash}\nexec {bash} "$@"\n')
            for place in ("/bin", "/usr/bin"):
                lines.append(f'function {place}/{name} {{ {bash} "$@"; }}')
    functions = (_FILES / "capture.bash").read_text()
    for word, path in (("BIN", str(own)), ("SITE", str(site))):
        functions = functions.replace(word, shlex.quote(path))
    (folder / "bash_env").write_text("\n".join([*lines, functions]))


def _executable(file: Path, text: str) -> Path:
    file.write_text(text)
    file.chmod(0o700)
    return file


def _environment(folder: Path) -> dict[str, str]:
    """Return the environment in which the stand-ins of `_prepare` act."""

    def before(name: str, value: object) -> str:
        return os.pathsep.join(filter(None, (str(value), os.environ.get(name))))

    return {
        **os.environ,
        "MTRAIN_CAPTURE": str(folder),
        "MTRAIN_CAPTURE_BASH_ENV": os.environ.get("BASH_ENV", ""),
        "BASH_ENV": str(folder / "bash_env"),
        "PATH": before("PATH", folder / "bin"),
        "PYTHONPATH": before("PYTHONPATH", folder / "site"),
    }


def _for_bash(command: list[str], text: str) -> list[str]:
    """Return the command, with bash before a plain `sh` script, which ignores BASH_ENV."""
    plain = re.match(r"#!\s*(/usr/bin/env\s+)?(\S*/)?(sh|dash)\s*\n", text)
    if plain and Path(command[0]).is_file() and shutil.which("bash"):
        return ["bash", *command]
    return command


def _interpreters() -> list[str]:
    """Return the names that have a version of the interpreters on PATH."""
    folders = [folder for folder in os.get_exec_path() if os.path.isdir(folder)]
    names = {name for folder in folders for name in os.listdir(folder)}
    return sorted(name for name in names if re.fullmatch(r"python[0-9]+(\.[0-9]+)?", name))
