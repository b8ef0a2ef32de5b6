"""A run as every launcher needs it: machines, ranks on each, and the words that start mtrain.

A job carries the resolved configuration, so no machine reads a recipe or a group file.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mtrain.config.compose.dump import override, run_yaml
from mtrain.config.compose.write_paths import CACHE, LOCAL, REMOTE, RESUME, RUNS
from mtrain.config.machine.devices import facts_of
from mtrain.config.messages.keys import field_of
from mtrain.config.schema.launch import LaunchConfig
from mtrain.config.schema.run import RunConfig

MOST_LETTERS = 40
"""Letters of a job's name: Kubernetes appends the numbers of its pods and allows 63."""
AGAIN = "checkpoint.resume=auto"
"""The word of a start after the first: it continues the run of the same job, or begins it."""


@dataclass(frozen=True)
class Job:
    """A validated run and where it starts."""

    run: RunConfig

    @property
    def launch(self) -> LaunchConfig:
        """Return the section that says where."""
        return self.run.launch

    @property
    def ranks(self) -> int:
        """Return the number of all ranks."""
        return self.run.parallel.ranks

    @property
    def machines(self) -> int:
        """Return the number of machines, of which each has a rank."""
        return min(self.run.cluster.nodes, self.ranks)

    @property
    def ranks_each(self) -> int:
        """Return the number of ranks on a machine."""
        return -(-self.ranks // self.machines)

    @property
    def devices_each(self) -> int:
        """Return the number of accelerators to request for a machine; 0 on a CPU."""
        return 0 if facts_of(self.run.cluster.device).on_host else self.ranks_each

    @cached_property
    def name(self) -> str:
        """Return the job's name, a DNS label."""
        return self.launch.job_name or label(self.run.log.name or self.run.model.name)

    @cached_property
    def digest(self) -> str:
        """Return the digest of the run, which `check` prints as well."""
        return self.run.digest()

    @cached_property
    def yaml(self) -> str:
        """Return the configuration as `run=FILE` reads it.

        The words on the command line repeat the keys that no file may set.
        """
        checkpoint = self.run.checkpoint.model_copy(update={"resume": None})
        return run_yaml(self.run.without_launcher().model_copy(update={"checkpoint": checkpoint}))

    @cached_property
    def file(self) -> str:
        """Return the path of that file: in the folder of runs, which all machines share."""
        content = hashlib.sha256(self.yaml.encode()).hexdigest()
        return str(Path(self.run.log.runs_dir) / f".job-{content[:16]}.yaml")

    @property
    def identity(self) -> str:
        """Return the name by which a restarted job finds the run that it began."""
        where = self.launch.namespace or "default"
        return f"{self.launch.kind} {where}/{self.name} {self.digest[:16]}"

    def words(self, file: str | None = None) -> list[str]:
        """Return the words that start mtrain on a machine, without the resumption.

        `file`: the configuration's path, if it is not in the folder of runs.
        """
        given = [*self.launch.command, word("run", file or self.file)]
        checkpoint = self.run.checkpoint
        places = {
            CACHE: self.run.data.cache_dir,
            LOCAL: checkpoint.local_dir,
            REMOTE: checkpoint.remote,
        }
        if file is not None:
            places[RUNS] = self.run.log.runs_dir
        # A file may not name places outside of the working folder; the command line may.
        for key, value in places.items():
            field = field_of(key)
            if field is not None and value != field.default:
                given.append(word(key, value))
        return given

    @property
    def first(self) -> list[str]:
        """Return the words that only the first start has: the checkpoint that the user resumes."""
        resume = self.run.checkpoint.resume
        return [word(RESUME, resume)] if resume is not None else []


def word(key: str, value: object) -> str:
    """Return one word of a command line, as a program receives it and Hydra's grammar reads it."""
    (text,) = shlex.split(override(key, value))
    return text


def label(text: str) -> str:
    """Return a text as a DNS label: lower case letters, digits and dashes, a letter first."""
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    named = plain if plain[:1].isalpha() else f"run-{plain}"
    return named[:MOST_LETTERS].strip("-")
