"""How many processes a command line starts, in the words of torchrun, SLURM and MPI."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mtrain.recipes.gaps import Unread, Word, shown

_NODES = ("--nnodes", "--num-nodes", "--nodes")
_PER_NODE = (
    *("--nproc-per-node", "--num-gpus", "--gpus-per-node", "--num-workers-per-node", "--npernode", "--ppn"),
    "--ntasks-per-node",
)
"""The later ones count where no earlier one is said: one task of a machine may start a process for each GPU."""
_TASKS = ("--np", "--ntasks", "--gpus")
_SHORT = {
    "-N": "--nodes",
    "-n": "--ntasks",
    "-G": "--gpus",
    "-np": "--np",
    "-npernode": "--npernode",
    "-ppn": "--ppn",
}
_SBATCH = re.compile(r"^#SBATCH\s+(?:(--[a-z-]+)(?:[= ]\s*|$)|(-[NnG])\s*)(\S*)", re.MULTILINE)


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


def world_of(words: Sequence[Word], directives: Mapping[str, str]) -> World | None:
    """The world that a launcher's words, and failing them the directives of a batch script, ask for.

    None where they do not say, or where only running the script could tell.
    """
    said = _flags(words)
    given = {**{flag: value for flag, value in directives.items() if flag not in said}, **said}
    nodes, per_node, tasks = _first(given, _NODES), _first(given, _PER_NODE), _first(given, _TASKS)
    if any(
        isinstance(w, Unread) and w.whole and not w.absent and not _is_value(words, i) for i, w in enumerate(words)
    ):
        return None
    if nodes is None and not given.keys().isdisjoint(_NODES):
        return None
    if per_node is None and tasks is not None and tasks % (nodes or 1) == 0:
        return World(nodes or 1, tasks // (nodes or 1))
    if per_node is None:
        return None
    if nodes is None and tasks is not None and "--np" in given and tasks % per_node == 0:
        nodes = tasks // per_node
    return World(1 if nodes is None else nodes, per_node)


def directives(text: str) -> dict[str, str]:
    """The `#SBATCH` lines of a script that say how many machines and processes."""
    return _with_gres({_SHORT.get(short, flag): value for flag, short, value in _SBATCH.findall(text)})


def _with_gres(given: dict[str, str]) -> dict[str, str]:
    """The same with the GPUs of `--gres`, as gpu:8 and gpu:h100:8, and of the types of `--gpus-per-node`."""
    gres = re.search(r"\bgpu(?::[\w.-]+)??:([0-9]+)", given.get("--gres", ""))
    if gres:
        given.setdefault("--gpus-per-node", gres[1])
    for flag in ("--gpus-per-node", "--gpus"):
        if flag in given:
            given[flag] = given[flag].rpartition(":")[2]
    return given


def _is_value(words: Sequence[Word], index: int) -> bool:
    return index > 0 and shown(words[index - 1]).startswith("-") and "=" not in shown(words[index - 1])


def _flags(words: Sequence[Word]) -> dict[str, str]:
    out: dict[str, str] = {}
    for index, word in enumerate(map(shown, words)):
        attached = re.fullmatch(r"(-[NnG])([0-9]+)", word)
        name, equals, value = attached.group(1, 0, 2) if attached else word.partition("=")
        name = _SHORT.get(name, name)
        if name.startswith("--"):
            behind = shown(words[index + 1]) if index + 1 < len(words) else ""
            out[name.replace("_", "-")] = value if equals else behind
    return _with_gres(out)


def _first(given: Mapping[str, str], names: Sequence[str]) -> int | None:
    for name in names:
        text = given.get(name, "")
        if re.fullmatch(r"[0-9]{1,6}", text) and int(text) > 0:
            return int(text)
    return None
