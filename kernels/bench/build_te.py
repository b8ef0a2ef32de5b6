"""TransformerEngine for a machine without a network: packages in parts of at most 60 MB, joined and
built there.

    # where there is a network: the packages of one release, for the Python and CUDA of the other
    machine pip download --no-deps --only-binary :all: --platform manylinux_2_28_x86_64 --platform
    manylinux_2_17_x86_64 \\
        --python-version 3.12 -d packages transformer-engine==2.20.2 transformer-engine-cu13==2.20.2
        \\ onnxscript onnx onnx-ir ml-dtypes setuptools wheel ninja
    # and transformer_engine_torch-2.20.2.tar.gz from PyPI's page of files: pip would build it to
    read its metadata python kernels/bench/build_te.py split packages --out parts

    # on the machine with the card, as parts arrive, in one folder or in several
    python kernels/bench/build_te.py join parts --out packages
    python kernels/bench/build_te.py build packages --site site
    PYTHONPATH=src:kernels:site python launch.py kernels=te

The core library comes as a wheel, whose size is what needs parts; `transformer_engine_torch` is
compiled against the torch that is installed. Each part lies in a folder of its own with parts.json,
which has the sizes and SHA-256 of all files and parts, so any part may come alone. `build --plan`
prints the commands and does nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT = 60_000_000
"""Bytes of a part."""
BLOCK = 1 << 20
MANIFEST = "parts.json"
EXTENSION = "transformer_engine_torch-*.tar.gz"
SWITCHES = {
    "NVTE_PYTORCH_FORCE_BUILD": "TRUE",  # else it asks GitHub for a wheel first
    # else it takes the commit of a git tree around it for its own, and no longer fits
    "NVTE_NO_LOCAL_VERSION": "1",
    "NVTE_FRAMEWORK": "pytorch",
    # headers of NCCL's expert parallelism, which no layer of mtrain calls
    "NVTE_WITH_NCCL_EP": "0",
}


class Wrong(Exception):
    """Packages or parts with which nothing can be built, and what to do."""


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def split(packages: list[Path], out: Path, limit: int = LIMIT) -> list[Path]:
    """Cut files into parts of at most `limit` bytes; returns the parts, each in a folder of its
    own.

    Raises:
        Wrong: there is nothing to cut, or `out` holds parts already.
    """
    if not packages:
        raise Wrong("there are no packages to cut; see --help for the commands that fetch them")
    if out.exists() and any(out.iterdir()):
        raise Wrong(
            f"{out} is not empty: parts of two releases would be mixed up; name a new folder"
        )
    files: dict[str, Any] = {}
    parts: list[Path] = []
    for package in packages:
        names: list[dict[str, Any]] = []
        for piece in _pieces(package, limit):
            name = f"{package.name}.{len(names):03d}"
            place = out / f"{len(parts):03d}"
            place.mkdir(parents=True)
            (place / name).write_bytes(piece)
            parts.append(place / name)
            names.append(
                {"name": name, "bytes": len(piece), "sha256": hashlib.sha256(piece).hexdigest()}
            )
        files[package.name] = {
            "bytes": package.stat().st_size,
            "sha256": digest(package),
            "parts": names,
        }
    for part in parts:
        (part.parent / MANIFEST).write_text(json.dumps(files, indent=1) + "\n")
    return parts


def _pieces(path: Path, limit: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(limit):
            yield piece


def join(parts: Path, out: Path) -> list[Path]:
    """Put the parts anywhere below a folder together again; returns the files.

    Raises:
        Wrong: there is no list of parts, two lists differ, a part is absent, or it is not what was
            cut.
    """
    lists = {path.read_text() for path in parts.rglob(MANIFEST)}
    if len(lists) != 1:
        raise Wrong(
            f"{parts} holds {len(lists)} different {MANIFEST}: it needs the parts of one call of"
            " split"
        )
    files = json.loads(lists.pop())
    places = {path.name: path for path in parts.rglob("*") if path.is_file()}
    wanted = [part["name"] for file in files.values() for part in file["parts"]]
    absent = [name for name in wanted if name not in places]
    if absent:
        raise Wrong(
            f"{len(wanted) - len(absent)} of {len(wanted)} parts are here; absent:"
            f" {', '.join(absent)}"
        )
    out.mkdir(parents=True, exist_ok=True)
    made = []
    for name, file in files.items():
        target = out / name
        draft = out / f"{name}.draft"
        with draft.open("wb") as whole:
            for part in file["parts"]:
                if digest(places[part["name"]]) != part["sha256"]:
                    raise Wrong(
                        f"{places[part['name']]} is not the part that was cut: bring it again"
                    )
                with places[part["name"]].open("rb") as piece:
                    shutil.copyfileobj(piece, whole, BLOCK)
        if digest(draft) != file["sha256"]:
            raise Wrong(f"{name} is not the file that was cut, though its parts are: cut it again")
        draft.replace(target)
        made.append(target)
    return made


@dataclass(frozen=True)
class Step:
    """A command of the build, and what it adds to the environment."""

    argv: tuple[str, ...]
    environment: dict[str, str]


def steps(packages: Path, site: Path, jobs: int, nvidia_wheels: bool) -> list[Step]:
    """Return the commands that build and install what lies in a folder.

    nvidia_wheels: headers of CUDA and cuDNN are those of NVIDIA's wheels, which torch depends on.

    Raises:
        Wrong: a package is absent, comes twice, or the three are not of one release.
    """
    source = _one(packages, EXTENSION)
    version = source.name.removeprefix("transformer_engine_torch-").removesuffix(".tar.gz")
    _one(packages, f"transformer_engine-{version}-*.whl")
    _one(packages, f"transformer_engine_cu1[23]-{version}-*.whl")
    pip = (sys.executable, "-m", "pip")
    alone = ("--no-index", "--no-deps")
    tools = packages / "tools"
    build = SWITCHES | {"MAX_JOBS": str(jobs), "PYTHONPATH": os.pathsep.join(_paths(tools))}
    build |= {"NVTE_BUILD_USE_NVIDIA_WHEELS": "1"} if nvidia_wheels else {}
    kinds = ("setuptools", "wheel", "ninja")
    compilers = [str(path) for kind in kinds for path in sorted(packages.glob(f"{kind}-*.whl"))]
    if compilers:
        made = [
            Step((*pip, "install", *alone, "--upgrade", "--target", str(tools), *compilers), {})
        ]
    else:
        made = []
    made.append(
        Step(
            (*pip, "wheel", *alone, "--no-build-isolation", "-w", str(packages), str(source)), build
        )
    )
    # one command: pip puts no second package into a folder that another one made
    built = packages / f"transformer_engine_torch-{version}-*.whl"
    others = (
        set(packages.glob("*.whl"))
        - set(packages.glob(built.name))
        - {Path(path) for path in compilers}
    )
    wheels = [*(str(path) for path in sorted(others)), str(built)]
    return [*made, Step((*pip, "install", *alone, "--upgrade", "--target", str(site), *wheels), {})]


def _paths(tools: Path) -> list[str]:
    return [path for path in (str(tools), os.environ.get("PYTHONPATH", "")) if path]


def _one(packages: Path, pattern: str) -> Path:
    found = sorted(packages.glob(pattern))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise Wrong(
            f"{packages} must hold one {pattern}; it holds {names}; the three packages are of one"
            " release"
        )
    return found[0]


def has_cudnn_header() -> bool:
    """Return whether the CUDA toolkit of this machine has cuDNN's header, which the extension
    includes.
    """
    compiler = shutil.which("nvcc")
    homes = [
        os.environ.get("CUDA_HOME", ""),
        str(Path(compiler).parents[1]) if compiler else "",
        "/usr/local/cuda",
    ]
    return any(home and (Path(home) / "include" / "cudnn.h").exists() for home in homes)


def build(packages: Path, site: Path, jobs: int) -> None:
    """Build and install.

    Raises:
        Wrong: see `steps`, or a command failed.
    """
    for step in steps(packages, site, jobs, not has_cudnn_header()):
        argv = [path for word in step.argv for path in _expanded(word)]
        print(shlex.join(argv), flush=True)
        done = subprocess.run(argv, env={**os.environ, **step.environment})
        if done.returncode:
            raise Wrong(f"the command above ended with {done.returncode}")


def _expanded(word: str) -> list[str]:
    """Return a pattern of a wheel that an earlier command made; the word itself if
    it is no pattern.
    """
    if "*" not in word:
        return [word]
    found = [str(path) for path in sorted(Path(word).parent.glob(Path(word).name))]
    if not found:
        raise Wrong(f"{word} was not built")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Do what the command line says; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, what in (
        ("split", "a folder of packages"),
        ("join", "a folder of parts"),
        ("build", "packages"),
    ):
        named = verbs.add_parser(verb)
        named.add_argument("folder", type=Path, help=what)
        named.add_argument(
            "--site" if verb == "build" else "--out", dest="out", type=Path, required=True
        )
    verbs.choices["split"].add_argument(
        "--limit", type=int, default=LIMIT, help=f"bytes of a part ({LIMIT:,})"
    )
    verbs.choices["build"].add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    verbs.choices["build"].add_argument(
        "--plan", action="store_true", help="print the commands and do nothing"
    )
    chosen = parser.parse_args(arguments)
    try:
        if chosen.verb == "split":
            packages = sorted(path for path in chosen.folder.iterdir() if path.is_file())
            made = split(packages, chosen.out, chosen.limit)
        elif chosen.verb == "join":
            made = join(chosen.folder, chosen.out)
        elif chosen.plan:
            for step in steps(chosen.folder, chosen.out, chosen.jobs, not has_cudnn_header()):
                print(
                    shlex.join(
                        [*(f"{key}={value}" for key, value in step.environment.items()), *step.argv]
                    )
                )
            return 0
        else:
            build(chosen.folder, chosen.out, chosen.jobs)
            made = [chosen.out]
    except (Wrong, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    print("\n".join(str(path) for path in made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
