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


def begin(job: Job) -> list[str]:
    """Return the lines that enter the working folder and look for the variables."""
    lines = ["set -euo pipefail"]
    if job.launch.workdir is not None:
        lines.append(f"cd {place(job.launch.workdir)}")
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
    lines = job.yaml.splitlines()
    if END in lines:
        raise ValueError(f"{END} is a line of the configuration")
    return [
        f"file={place(job.file)}",
        'mkdir -p "$(dirname "$file")"',
        # A rename: another job of the same configuration may read the file meanwhile.
        f"cat > \"$file.$$\" <<'{END}'",
        *lines,
        END,
        'mv "$file.$$" "$file"',
    ]


def array(name: str, words: Iterable[str], sign: str = "=") -> str:
    """Return the assignment of words to an array of bash."""
    return f"{name}{sign}({shlex.join(words)})"


def prepared(job: Job) -> list[str]:
    """Return the lines after which `words` first reads the file of `launch.setup`."""
    if job.launch.setup is None:
        return []
    inner = shlex.join(["bash", "-c", SOURCED, "mtrain"])
    return [f'words=({inner} {place(job.launch.setup)} "${{words[@]}}")']


def script(*parts: Iterable[str]) -> str:
    """Return lines as a bash script."""
    return "\n".join(["#!/bin/bash", *(line for part in parts for line in part)]) + "\n"
