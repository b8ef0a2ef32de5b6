"""Lock files: a resolved configuration below comments that record its sources.

The comments are YAML after `# `, so a lock file is a run file too. Readers check that the values
are still those that were locked.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain.config.compose.interpolate import at, refused
from mtrain.config.compose.paths import program
from mtrain.config.compose.recipe import reserved_keys
from mtrain.config.compose.yaml_reader import load, parse
from mtrain.config.disk.files import read_text
from mtrain.config.engine.kernels import ON_CPU
from mtrain.config.machine.devices import CPU
from mtrain.config.messages.validate import validate
from mtrain.config.resolve.resolution import as_resolved
from mtrain.config.schema.run import RunConfig
from mtrain.errors import ConfigError, Problem

HEAD = "# mtrain lock 1"
# The facts that a lock records in addition to the values, with their types.
FACTS = {
    "digest": str,
    "content": str,
    "versions": dict,
    "device": dict,
    "digests": dict,
    "sources": list,
}


ABSENT = object()
# Operations with an implementation `cpu`.
FAST_ON_CPU = ("norm", "rope", "attention", "linear", "experts", "loss")


@dataclass(frozen=True)
class Lock:
    """A lock file that was read."""

    run: RunConfig
    body: str
    facts: dict[str, Any]
    new_keys: tuple[str, ...]
    """Keys of this version that the file lacks because they are newer."""

    @property
    def sources(self) -> dict[str, str]:
        """Name -> digest of every source file."""
        pairs = (str(line).partition(" ") for line in self.facts["sources"])
        return {name: digest for digest, _, name in pairs}

    @property
    def edited(self) -> tuple[str, str, str] | None:
        """Return the fact that the values no longer match, as locked and as found; else None."""
        here = content(self.body)
        if here != self.facts["content"]:
            return "content", self.facts["content"], here
        # A key that came with a later version changes the digest of an intact file.
        if not self.new_keys and self.run.digest() != self.facts["digest"]:
            return "digest", self.facts["digest"], self.run.digest()
        return None


def content(body: str) -> str:
    """Return the text of a lock's values that its digest covers."""
    return hashlib.sha256(body.encode()).hexdigest()


def is_lock(text: str) -> bool:
    """Return whether a text starts like a lock."""
    return text.partition("\n")[0].strip() == HEAD


def read_lock(path: Path) -> Lock:
    """Read a lock file.

    Raises:
        ConfigError: it has no lock, or its configuration is incomplete.
    """
    source = str(path)
    text = read_text(path, source)
    if not is_lock(text):
        rule = f"is no lock: its first line is not `{HEAD}`"
        fix = f"{program()} recipe lock {path} -o {path.stem}.lock.yaml"
        raise ConfigError.of("MT705", "", None, rule, fix, source)
    return parse_lock(text, source)


def parse_lock(text: str, source: str) -> Lock:
    """Return the lock of a text that starts like one.

    Raises:
        ConfigError: a part of it is missing, or its configuration is incomplete.
    """
    lines = text.splitlines(keepends=True)
    end = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    facts = parse("".join(line[2:] for line in lines[1:end]), source).values
    body = "".join(lines[end:])
    document = parse(body, source)
    # The body was parsed without the comments above it; problems name lines of the file.
    document.lines = {key: line + end for key, line in document.lines.items()}
    problems = [
        *reserved_keys(document.values, document),
        *refused(document.values, document.where),
    ]
    run, more = validate(document.values, document.where)
    if run is None or problems:
        raise ConfigError([*problems, *more])
    wrong = [key for key, kind in FACTS.items() if not isinstance(facts.get(key), kind)]
    if wrong:
        rule = f"the lock lacks {' and '.join(wrong)}"
        raise ConfigError.of(
            "MT705", "", None, rule, f"make it again: {program()} recipe lock", source
        )
    new = tuple(key for key in run.flat() if at(document.values, key, ABSENT) is ABSENT)
    return Lock(as_resolved(run), body, facts, new)


def edited(text: str, source: str) -> Problem | None:
    """Return the problem of a lock whose values were edited; None for an intact lock and for other
    files.

    Raises:
        ConfigError: as `parse_lock`.
    """
    found = parse_lock(text, source).edited if is_lock(text) else None
    if found is None:
        return None
    what, locked, here = found
    rule = (
        f"the lock was edited: the {what} of its values is {here[:12]}, and {locked[:12]} was"
        " locked"
    )
    fix = (
        "give changes on the command line, or delete the lines above its values: then it is a plain"
        " run file"
    )
    return Problem("MT705", "", None, rule, fix, source)


def upgrade(values: Any) -> None:
    """Rewrite the values of an older complete file in the words of this version.

    `trainer.objective` is `objective.name` now. Until `kernels.X=cpu` existed, `reference` on a CPU
    included its fast paths. Such a file names no objective, which came with `cpu`; without this, a
    resumed run would round otherwise.
    """
    if at(values, "trainer.objective", ABSENT) is not ABSENT:
        values.setdefault("objective", {"name": values["trainer"].pop("objective")})
    sections: list[Any] = [
        values.get(name) for name in ("kernels", "trainer", "cluster", "precision")
    ]
    if not all(isinstance(section, dict) for section in sections):
        return
    kernels, _, cluster, precision = sections
    if "objective" in values or cluster.get("device") != CPU.name:
        return
    # The fast paths of GEMMs do not apply in low precision.
    quantized = precision.get("fp8") or precision.get("fp4")
    for name in FAST_ON_CPU:
        whole = not (quantized and name in ("linear", "experts"))
        if kernels.get(name) == "reference" and whole:
            kernels[name] = ON_CPU


def read_run_file(path: Path) -> RunConfig:
    """Return the configuration in a resolved file such as `run.yaml`.

    Raises:
        ConfigError: the file cannot be read, or its configuration is incomplete.
    """
    document = load(path)
    upgrade(document.values)
    run, problems = validate(document.values, document.where)
    if run is None:
        raise ConfigError(problems)
    return as_resolved(run)
