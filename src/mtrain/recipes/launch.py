"""How many processes a command line starts, in the words of torchrun and SLURM."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_NODES = ("--nnodes", "--num-nodes", "--nodes")
_PER_NODE = ("--nproc-per-node", "--ntasks-per-node", "--gpus-per-node", "--num-gpus", "--num-workers-per-node")
_SBATCH = re.compile(r"^#SBATCH\s+(?:(--[a-z-]+)[= ]|-(N)\s*)\s*(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class World:
    """Machines, and processes on each."""

    nodes: int
    per_node: int

    @property
    def ranks(self) -> int:
        """Processes in all."""
        return self.nodes * self.per_node

    def words(self) -> list[str]:
        """The launcher's part of a command line."""
        nodes = ["--nnodes", str(self.nodes)] if self.nodes > 1 else []
        return ["torchrun", *nodes, "--nproc-per-node", str(self.per_node)]


def world_of(words: Sequence[str], directives: Mapping[str, str]) -> World | None:
    """The world that a launcher's words, and failing them the directives of a batch script, ask for.

    None where they do not say, or where only running the script could tell.
    """
    given = {**directives, **_flags(words)}
    nodes = _first(given, _NODES)
    per_node = _first(given, _PER_NODE)
    if per_node is None or (nodes is None and not given.keys().isdisjoint(_NODES)):
        return None
    return World(1 if nodes is None else nodes, per_node)


def directives(text: str) -> dict[str, str]:
    """The `#SBATCH` lines of a script that say how many machines and processes."""
    return {"--nodes" if short else flag: value for flag, short, value in _SBATCH.findall(text)}


def _flags(words: Sequence[str]) -> dict[str, str]:
    out: dict[str, str] = {}
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if word in ("-N", "-n") or not name.startswith("--"):
            name = {"-N": "--nodes"}.get(word, "")
        if name:
            behind = words[index + 1] if index + 1 < len(words) else ""
            out[name.replace("_", "-")] = value if equals else behind
    return out


def _first(given: Mapping[str, str], names: Sequence[str]) -> int | None:
    for name in names:
        text = given.get(name, "")
        if re.fullmatch(r"[0-9]{1,6}", text) and int(text) > 0:
            return int(text)
    return None
