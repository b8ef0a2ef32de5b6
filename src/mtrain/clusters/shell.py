"""Parts of shell scripts. No text of a user stands in one outside of `shlex.quote`, except the
configuration, which mtrain's own emitter writes into a quoted here-document.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from mtrain.clusters.job import Job
from mtrain.units import number_of

END = "END_OF_RUN_YAML"
# A task reads the file of `launch.setup`, then becomes the program.
SOURCED = '. "$1"; shift; exec "$@"'
# The process may have ended.
KILL = '[ -z "$step" ] || kill -TERM "$step" 2>/dev/null || true'


def head(job: Job) -> list[str]:
    """Return the comments above a script: the digest and the size of the run."""
    return [
        f"# digest {job.digest}",
        f"# {number_of(job.ranks, 'rank')} on {number_of(job.machines, 'machine')},"
        f" {job.ranks_each} on each",
    ]


def place(path: str) -> str:
    """Return a path as a shell word; a leading `~/` stays the home folder of the machine."""
    if path == "~" or path.startswith("~/"):
        return f'"$HOME"{shlex.quote(path[1:])}' if path != "~" else '"$HOME"'
    # A path that begins with a dash would be an option.
    return shlex.quote(f"./{path}" if path.startswith("-") else path)


def begin(job: Job, workdir: str | None = None) -> list[str]:
    """Return the lines that enter the working folder and look for the variables.

    `workdir`: the folder if `launch.workdir` is null.
    """
    lines = ["set -euo pipefail"]
    folder = job.launch.workdir or workdir
    if folder is not None:
        lines.append(f"cd {place(folder)}")
    if job.launch.env:
        lines += [
            array("needed", job.launch.env),
            'for name in "${needed[@]}"; do',
            '  if [ -z "${!name:-}" ]; then',
            '    echo "$name is not set: the run needs it (launch.env)" >&2',
            "    exit 3",
            "  fi",
            "done",
        ]
    return lines


def configuration(job: Job) -> list[str]:
    """Return the lines that write the configuration into the folder of runs.

    Raises:
        ValueError: a line of it would end the here-document.
    """
    return [
        f"file={place(job.file)}",
        'mkdir -p "$(dirname "$file")"',
        # A rename: another job of the same configuration may read the file meanwhile. Machines may
        # have processes of the same number.
        'part="$file.$HOSTNAME.$$"',
        *here_document('"$part"', job.yaml, END),
        'mv "$part" "$file"',
    ]


def here_document(file: str, text: str, end: str) -> list[str]:
    """Return the lines that write a text to a file, which is a quoted word.

    Raises:
        ValueError: a line of the text is `end`.
    """
    lines = text.splitlines()
    if end in lines:
        raise ValueError(f"{end} is a line of the text")
    return [f"cat > {file} <<'{end}'", *lines, end]


def array(name: str, words: Iterable[str], sign: str = "=") -> str:
    """Return the assignment of words to an array of bash."""
    return f"{name}{sign}({shlex.join(words)})"


def prepared(job: Job) -> list[str]:
    """Return the lines after which `words` first reads the file of `launch.setup`."""
    if job.launch.setup is None:
        return []
    inner = shlex.join(["bash", "-c", SOURCED, "mtrain"])
    return [f'words=({inner} {place(job.launch.setup)} "${{words[@]}}")']


def forwarded(command: str, send: Iterable[str] = (KILL,)) -> list[str]:
    """Return the lines that start a command, forward TERM to it, and set `code` to its exit code.

    `command`: an array of bash, expanded; `send`: lines that send TERM to the process `$step`,
    which is empty before its start.
    """
    return [
        "stopping=no",
        "step=",
        "stop() {",
        "  stopping=yes",
        *(f"  {line}" for line in send),
        "}",
        "trap stop TERM",
        f"{command} &",
        "step=$!",
        "code=0",
        # TERM may have arrived before the step had a number.
        '[ "$stopping" = no ] || stop',
        "while true; do",
        "  stopping=no",
        '  ended=0; wait "$step" || ended=$?',
        # 127: an earlier wait has collected the exit code already.
        '  [ "$ended" -eq 127 ] || code=$ended',
        '  [ "$stopping" = yes ] || break',
        "done",
    ]


def script(*parts: Iterable[str]) -> str:
    """Return lines as a bash script."""
    return "\n".join(["#!/bin/bash", *(line for part in parts for line in part)]) + "\n"
