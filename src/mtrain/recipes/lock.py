"""A lock: a resolved configuration with the versions and data of its making, in one file that runs.

`run=FILE` reads the configuration. Everything else stands above it in comments, which are YAML
after their `# `: so the file is also a run file, without keys beyond the schema.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

import mtrain
from mtrain.config.compose.dump import run_yaml, spell
from mtrain.config.compose.lock_file import HEAD, Lock, content
from mtrain.config.engine import release
from mtrain.config.machine.devices import facts_of
from mtrain.config.resolve.resolution import Machine
from mtrain.config.schema.run import RunConfig

PACKAGES = ("megatron-core", "torch", "transformer-engine")
NONE = "none"

What = Literal["file", "version", "device", "data", "tokenizer", "source"]


@dataclass(frozen=True)
class Mismatch:
    """A difference between a lock and this machine."""

    what: What
    name: str
    locked: str
    here: str

    @property
    def damaged(self) -> bool:
        """Return whether the file or the data differs; missing data is no damage."""
        return self.what in ("file", "data", "tokenizer", "source") and self.here != NONE


def versions() -> dict[str, str]:
    """Return the versions of installed packages that compute, without imports."""
    out = {"python": platform.python_version(), "mtrain": mtrain.__version__}
    for name in PACKAGES:
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            out[name] = NONE
    # a copy on PYTHONPATH has no metadata
    out["megatron-core"] = release.version() or NONE
    return out


def lock_text(
    run: RunConfig, digests: Mapping[str, str], sources: Mapping[str, str], machine: Machine
) -> str:
    """Return the lock of a resolved configuration.

    Args:
        run: the configuration.
        digests: those of its data and its tokenizer.
        sources: name -> digest of every file that it was composed from.
        machine: the machine that makes it.
    """
    body = run_yaml(run.without_launcher())
    facts = {
        "digest": run.digest(),
        "content": content(body),
        "versions": versions(),
        "device": {"name": run.cluster.device, "gpus": machine.gpus},
        "digests": dict(digests),
    }
    lines = [HEAD, *(f"# {key}: {spell(value)}" for key, value in facts.items()), "# sources:"]
    lines += [f"#   - {spell(f'{digest} {name}')}" for name, digest in sources.items()] or [
        "#   []"
    ]
    return "\n".join(lines) + "\n" + body


def mismatches(
    lock: Lock, digests: Mapping[str, str], sources: Mapping[str, str], machine: Machine
) -> list[Mismatch]:
    """Return the differences between a lock and this machine, whose digests are `digests` and
    `sources`.

    Fewer GPUs than the run needs are a difference only if the machine of the lock had more.
    """
    out: list[Mismatch] = []

    def compare(what: What, name: str, locked: object, here: object) -> None:
        if str(locked) != str(here):
            out.append(Mismatch(what, name, str(locked)[:80], str(here)))

    if lock.edited is not None:
        compare("file", *lock.edited)
    # the file is as it was written, so this version reads it otherwise
    elif lock.facts["digest"] != lock.run.digest():
        here = f"{lock.run.digest()} with this version's {', '.join(lock.new_keys)}"
        compare("version", "digest", lock.facts["digest"], here)
    for name, here in versions().items():
        compare("version", name, lock.facts["versions"].get(name, NONE), here)
    if facts_of(lock.run.cluster.device).counted:
        needed = min(lock.run.parallel.ranks, lock.run.cluster.devices_per_node or 1)
        had = lock.facts["device"].get("gpus")
        # a lock made on a laptop cannot describe GPUs
        if machine.gpus < needed and (not isinstance(had, int) or machine.gpus < had):
            wanted = f"{had} GPUs, of which it needs {needed}"
            compare("device", lock.run.cluster.device, wanted, f"{machine.gpus} GPUs")
    for name, locked in lock.sources.items():
        compare("source", name, locked, sources.get(name, NONE))
    for name in ("data", "tokenizer"):
        if name in lock.facts["digests"]:
            what: What = "data" if name == "data" else "tokenizer"
            compare(what, name, lock.facts["digests"][name], digests.get(name, NONE))
    return out
