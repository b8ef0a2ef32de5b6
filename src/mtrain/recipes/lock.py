"""A lock: a resolved configuration with the versions and data it was made with, in one file that runs.

The configuration is what `run=FILE` reads. Everything else stands above it in comments, which are YAML behind their
`# `: so the file is at the same time a run file, and no key of it is more than the schema allows.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import mtrain
from mtrain.config.dump import run_yaml, spell
from mtrain.config.files import read_text
from mtrain.config.interpolate import refused
from mtrain.config.load import parse
from mtrain.config.recipe import reserved_keys
from mtrain.config.resolve import Machine
from mtrain.config.run import RunConfig
from mtrain.config.validate import validate
from mtrain.errors import BadInput, Problem

HEAD = "# mtrain lock 1"
PACKAGES = ("megatron-core", "torch", "transformer-engine")
NONE = "none"

What = Literal["file", "version", "device", "data", "tokenizer"]


@dataclass(frozen=True)
class Mismatch:
    """What is not as it was when a lock was made."""

    what: What
    name: str
    locked: str
    here: str

    @property
    def damaged(self) -> bool:
        """Whether the file or the data is another; data that is not here at all is a matter of the machine."""
        return self.what in ("file", "data", "tokenizer") and self.here != NONE


@dataclass(frozen=True)
class Lock:
    """A lock file that was read."""

    run: RunConfig
    body: str
    facts: dict[str, Any]
    new_keys: tuple[str, ...]
    """Keys of this version that the file does not say, because they are younger."""


def versions() -> dict[str, str]:
    """Versions of what computes, as installed here; nothing is imported for it."""
    out = {"python": platform.python_version(), "mtrain": mtrain.__version__}
    for name in PACKAGES:
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            out[name] = NONE
    return out


def lock_text(run: RunConfig, digests: Mapping[str, str], machine: Machine) -> str:
    """The lock of a resolved configuration; `digests` are those of its data and its tokenizer."""
    body = run_yaml(run)
    facts = {
        "digest": run.digest(),
        "content": _content(body),
        "versions": versions(),
        "device": {"name": run.cluster.device, "gpus": machine.gpus},
        "digests": dict(digests),
    }
    lines = [HEAD, *(f"# {key}: {spell(value)}" for key, value in facts.items())]
    return "\n".join(lines) + "\n" + body


def _content(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()


def read_lock(path: Path) -> Lock:
    """Reads a lock file.

    Raises:
        BadInput: it has no lock, or is no complete configuration.
    """
    source = str(path)
    text = read_text(path, source)
    lines = text.splitlines(keepends=True)
    if not lines or lines[0].strip() != HEAD:
        rule = f"is no lock: its first line is not `{HEAD}`"
        fix = f"mtrain recipe lock {path} -o {path.stem}.lock.yaml"
        raise BadInput([Problem("MT705", "", None, rule, fix, source)])
    end = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    facts = parse("".join(line[2:] for line in lines[1:end]), source).values
    body = "".join(lines[end:])
    document = parse(body, source)
    problems = [*reserved_keys(document.values, document), *refused(document.values, document.where)]
    run, more = validate(document.values, document.where)
    if run is None or problems:
        raise BadInput([*problems, *more])
    kinds = {"digest": str, "content": str, "versions": dict, "digests": dict}
    wrong = [key for key, kind in kinds.items() if not isinstance(facts.get(key), kind)]
    if wrong:
        rule = f"the lock does not say {' and '.join(wrong)}"
        raise BadInput([Problem("MT705", "", None, rule, "", source)])
    new = tuple(key for key in run.flat() if not _said(document.values, key))
    return Lock(run, body, facts, new)


def _said(values: Any, key: str) -> bool:
    for name in key.split("."):
        if not isinstance(values, dict) or name not in values:
            return False
        values = values[name]
    return True


def mismatches(lock: Lock, digests: Mapping[str, str], machine: Machine) -> list[Mismatch]:
    """What differs between a lock and this machine."""
    out: list[Mismatch] = []

    def compare(what: What, name: str, locked: object, here: object) -> None:
        if str(locked) != str(here):
            out.append(Mismatch(what, name, str(locked)[:80], str(here)))

    compare("file", "content", lock.facts["content"], _content(lock.body))
    if not out and lock.facts["digest"] != lock.run.digest():
        keys = ", ".join(lock.new_keys) or "the meaning of a key has changed"
        here = f"{lock.run.digest()} with this version's {keys}"
        compare("version" if lock.new_keys else "file", "digest", lock.facts["digest"], here)
    for name, here in versions().items():
        compare("version", name, lock.facts["versions"].get(name, NONE), here)
    if lock.run.cluster.device == "cuda":
        needed = min(lock.run.parallel.ranks or 1, lock.run.cluster.devices_per_node or 1)
        if machine.gpus < needed:
            compare("device", "cuda", f"{needed} GPUs on each machine", f"{machine.gpus} GPUs")
    for name in ("data", "tokenizer"):
        if name in lock.facts["digests"]:
            what: What = "data" if name == "data" else "tokenizer"
            compare(what, name, lock.facts["digests"][name], digests.get(name, NONE))
    return out
