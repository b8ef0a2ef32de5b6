"""SLURM from Debian's packages, unpacked into an ignored folder of the project.

Nothing is installed, and the machine's lists of packages stay as they are.

`python -m tests.support.slurm_packages` fetches them before the tests, or prints why it cannot.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.commands import ROOT

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins")
CACHE = ROOT / "build" / "slurm"
LIMIT_S = 120
"""The limit of one download."""


class Unavailable(Exception):
    """The packages cannot be had here; its text is the reason."""


def unpacked() -> Path:
    """Return the folder of the unpacked packages, downloaded on the first call.

    Raises:
        Unavailable: this is no Debian, or its packages cannot be downloaded.
    """
    for program in ("apt-get", "dpkg"):
        if shutil.which(program) is None:
            raise Unavailable(f"SLURM comes from Debian's packages, and {program} is not installed")
    with _alone():
        tree = CACHE / "tree"
        if not tree.is_dir():
            with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
                _unpack(Path(scratch))
                (Path(scratch) / "tree").rename(tree)
        return tree


def _unpack(scratch: Path) -> None:
    """Download the packages and unpack them into `scratch/tree`.

    Raises:
        Unavailable: apt-get or dpkg fails.
    """
    files = scratch / "files"
    files.mkdir()
    try:
        names = _missing([])
        lists: list[str] = []
    except Unavailable:
        # Images of containers come without lists, and the machine's own stay as they are.
        lists = _own_lists()
        names = _missing(lists)
    _run(["apt-get", *lists, "-q", "download", *names], files)
    for file in sorted(files.glob("*.deb")):
        _run(["dpkg", "-x", str(file), str(scratch / "tree")], scratch)


def _own_lists() -> list[str]:
    """Download lists of packages into the cache; return the options with which apt-get reads them.

    Raises:
        Unavailable: apt-get fails.
    """
    lists = CACHE / "lists"
    (lists / "partial").mkdir(parents=True, exist_ok=True)
    options = ["-o", f"Dir::State::Lists={lists}", "-o", f"Dir::Cache={CACHE}"]
    _run(["apt-get", *options, "-q", "update"], CACHE)
    return options


def _missing(lists: list[str]) -> list[str]:
    """Return the packages of SLURM and those that they need and this machine lacks.

    Raises:
        Unavailable: apt-get does not know them.
    """
    words = ["apt-get", *lists, "-q", "--simulate", "--no-install-recommends", "install", *PACKAGES]
    lines = _run(words, CACHE).splitlines()
    needed = {line.split()[1] for line in lines if line.startswith("Inst ")}
    return sorted(needed | set(PACKAGES))


def _run(words: list[str], folder: Path) -> str:
    """Run a program of Debian and return its output.

    Raises:
        Unavailable: it fails, or takes too long.
    """
    # Root's apt-get would download as a user of its own, who may not write here.
    options = ["-o", "APT::Sandbox::User=root", "-o", "Debug::NoLocking=1"]
    command = [words[0], *(options if words[0] == "apt-get" else []), *words[1:]]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{words[0]} took more than {LIMIT_S} s: {' '.join(words)}") from None
    if done.returncode:
        last = (done.stderr.strip() or "it printed nothing").splitlines()[-1]
        raise Unavailable(f"{' '.join(words)} ended with {done.returncode}: {last}")
    return done.stdout


@contextmanager
def _alone() -> Iterator[None]:
    """Let one process at a time use the cache."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    try:
        print(unpacked())
    except Unavailable as reason:
        sys.exit(f"no SLURM: {reason}")
