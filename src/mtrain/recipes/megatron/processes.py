"""The number of processes that a command line starts, in the words of torchrun, SLURM and MPI."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mtrain.recipes.shell.gaps import Unread, Word, shown

_NODES = ("--nnodes", "--num-nodes", "--num-machines", "--nodes")
_OWN = ("--nproc-per-node", "--num-gpus", "--num-workers-per-node", "--npernode", "--ppn")
"""Options of a launcher for its processes per machine, which override those of the job."""
# torchrun takes these words in place of a number
_EACH_GPU = ("gpu", "auto")
"""Words by which torchrun starts a process on each GPU; other words mean other devices."""
_GPUS = ("--gpus-per-node", "--gpus-per-task", "--gpus")
_PER_NODE = "--ntasks-per-node"
"""Counts if no number of GPUs is given: one task of a machine may start a process for each GPU."""
_IN_ALL = ("--np", "--num-processes")
_TASKS = (*_IN_ALL, "--ntasks")
_SHORT = {
    "-N": "--nodes",
    "-n": "--ntasks",
    "-G": "--gpus",
    "-np": "--np",
    "-npernode": "--npernode",
    "-ppn": "--ppn",
    "-perhost": "--npernode",
    **dict.fromkeys(("-H", "-host", "-hosts"), "--host"),
    **dict.fromkeys(("-hostfile", "-machinefile", "--machinefile"), "--hostfile"),
}
_MPI = ("mpirun", "mpiexec", "orterun", "prun", "aprun", "horovodrun")
_TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_STARTERS = (
    "torchrun",
    "deepspeed",
    "accelerate",
    "srun",
    "sbatch",
    "mpirun",
    "mpiexec",
    "orterun",
    "prun",
    "jsrun",
    "aprun",
    "horovodrun",
    "ray",
)
"""Programs that start several processes."""
_NUMBER = re.compile(r"[0-9]{1,6}")
# directives of a batch script, which are comments to a shell
_SBATCH = re.compile(r"^#SBATCH[ \t]+(.*)", re.MULTILINE)


@dataclass(frozen=True)
class World:
    """Machines, and processes on each."""

    nodes: int
    per_node: int

    @property
    def ranks(self) -> int:
        """Return the number of processes."""
        return self.nodes * self.per_node

    def words(self) -> list[str]:
        """Return the launcher's part of a command line."""
        nodes = ["--nnodes", str(self.nodes)] if self.nodes > 1 else []
        return ["torchrun", *nodes, "--nproc-per-node", str(self.per_node)]


@dataclass(frozen=True)
class Requested:
    """Machines, and processes on each, that a launcher and its job request."""

    nodes: int | None
    """None: only running the script could tell."""
    per_node: int | None
    """None: it is unset, or only running the script could tell."""
    why: str = "how many processes it starts is not set"

    @property
    def world(self) -> World | None:
        """Return both numbers if both are known."""
        if self.nodes is None or self.per_node is None:
            return None
        return World(self.nodes, self.per_node)


def requested_by(words: Sequence[Word], directives: Mapping[str, str]) -> Requested:
    """Return the request of a launcher's words, completed by the directives of a batch script."""
    for index, word in enumerate(words):
        # after an option, an unknown word is its value and sets nothing else
        if isinstance(word, Unread) and _may_be_any(word) and not _is_value(words, index):
            return Requested(
                None, None, f"{word.text} may set how many processes are started: it {word.why}"
            )
    programs = {shown(word).rpartition("/")[2] for word in words}
    # it counts resource sets, whose size other options give
    if "jsrun" in programs:
        return Requested(None, None, "how many processes jsrun starts is not known here")
    own_options = _flags(words) if programs.isdisjoint(_MPI) else _of_mpi(_flags(words))
    # options of the launcher override those of the job
    given = {**directives, **own_options}
    named = not given.keys().isdisjoint(_NODES)
    tasks = _first(given, _TASKS)
    nodes = _first(given, _NODES)
    machines = nodes if named else 1
    gpus = _gpus(given, machines, tasks)
    own = [flag for flag in _OWN if flag in own_options]
    if own:
        per_node = _first(own_options, own)
        if per_node is None and (
            own_options[own[0]] in _EACH_GPU or not own_options[own[0]].isalpha()
        ):
            per_node = gpus
    elif tasks is not None and not own_options.keys().isdisjoint(_IN_ALL):
        per_node = _share(tasks, machines)
        if not named and gpus and tasks % gpus == 0:
            per_node = gpus
    else:
        per_node = gpus
        if per_node is None:
            per_node = _tasks_of_a_node(given, machines, tasks)
        if per_node is None and given.keys().isdisjoint(_GPUS) and _starts(words, _TORCHRUN):
            # torchrun's default
            per_node = 1
    if not named:
        in_all = tasks is not None and per_node is not None and not given.keys().isdisjoint(_IN_ALL)
        nodes = (
            _share(tasks, per_node) if in_all else _share(tasks, _first(given, [_PER_NODE]))
        ) or 1
        # A file has the number of machines.
        if "--hostfile" in own_options and (not in_all or not own):
            return Requested(
                None,
                per_node if own else None,
                "how many machines --hostfile names is not known here",
            )
        # A launcher that starts torchrun may do so on several machines.
        if per_node is None and _starts(words, _STARTERS[1:]):
            nodes = None
    lost = own if per_node is None else [flag for flag in _NODES if flag in given and nodes is None]
    unread = [f"{flag} {given[flag]}" for flag in lost[:1]]
    return Requested(
        nodes, per_node, *(f"how many processes {text} starts is not known here" for text in unread)
    )


def starts_several(words: Sequence[Word]) -> bool:
    """Return whether the words before a program certainly or perhaps start it several times."""
    return _starts(words, _STARTERS) or any(map(_may_be_any, words))


def _may_be_any(word: Word) -> bool:
    return isinstance(word, Unread) and word.whole and not word.absent


def _starts(words: Sequence[Word], programs: Sequence[str]) -> bool:
    names = [shown(word).rpartition("/")[2] for word in words]
    return any(name in programs or name.startswith("torch.distributed.") for name in names)


def _gpus(given: Mapping[str, str], nodes: int | None, tasks: int | None) -> int | None:
    """Return the GPUs of a machine by the options of SLURM."""
    of_node, of_task, in_all = (_first(given, [flag]) for flag in _GPUS)
    if of_node is not None:
        return of_node
    if of_task is not None:
        of_machine = _first(given, [_PER_NODE]) or (1 if tasks is None else _share(tasks, nodes))
        return None if of_machine is None else of_task * of_machine
    return _share(in_all, nodes)


def _tasks_of_a_node(given: Mapping[str, str], nodes: int | None, tasks: int | None) -> int | None:
    """Return the tasks of a machine; None for one task that starts a process for each GPU."""
    count = _first(given, [_PER_NODE]) or _share(tasks, nodes)
    return None if count == 1 and not given.keys().isdisjoint(_GPUS) else count


def _of_mpi(own_options: Mapping[str, str]) -> dict[str, str]:
    """Return options of MPI by the names of other launchers: its `-N` counts processes."""
    names = {"--ntasks": "--np", "--nodes": "--npernode"}
    out = {names.get(flag, flag): value for flag, value in own_options.items()}
    # `--map-by ppr:8:node` of Open MPI
    mapped = re.match(r"ppr:([^:]*):(\w*)", out.get("--map-by", ""))
    if mapped is not None:
        out["--npernode"] = mapped[1] if mapped[2] == "node" else mapped[0]
    hosts = out.get("--host", "")
    if hosts:
        machines = {host.partition(":")[0] for host in hosts.split(",")}
        out.setdefault(
            "--nnodes", str(len(machines)) if re.fullmatch(r"[\w.:,-]+", hosts) else hosts
        )
    return out


def _share(whole: int | None, parts: int | None) -> int | None:
    """Return a part of an even split; None if the split is not even, or a number is unknown."""
    return None if whole is None or parts is None or whole % parts else whole // parts


def directives(text: str) -> dict[str, str]:
    """Return the options of a script's `#SBATCH` lines, each by its long name."""
    return _with_gres(dict(option for line in _SBATCH.findall(text) for option in _options(line)))


def _options(line: str) -> Iterator[tuple[str, str]]:
    """Yield the options of a line: --a=b, --a b, -Nb and -N b."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # a quote is not closed
        words = line.split()
    for index, word in enumerate(words):
        if index + 1 < len(words) and not words[index + 1].startswith("-"):
            following = words[index + 1]
        else:
            following = ""
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            yield name, value if equals else following
        elif word[:2] in _SHORT:
            yield _SHORT[word[:2]], word[2:].removeprefix("=") or following


def _with_gres(given: dict[str, str]) -> dict[str, str]:
    """Return the options with GPUs as numbers, also those of `--gres gpu:h100:8`."""
    for flag in ("--gres", "--tres-per-node"):
        parts = [
            part for part in given.get(flag, "").split(",") if re.match(r"(gres[/:])?gpu\b", part)
        ]
        if parts:
            given.setdefault(
                "--gpus-per-node", ",".join(part if ":" in part else f"{part}:1" for part in parts)
            )
    for flag in _GPUS:
        if flag in given:
            numbers = [part.partition("(")[0].rpartition(":")[2] for part in given[flag].split(",")]
            given[flag] = (
                str(sum(map(int, numbers))) if all(map(_NUMBER.fullmatch, numbers)) else given[flag]
            )
    return given


def _is_value(words: Sequence[Word], index: int) -> bool:
    return (
        index > 0 and shown(words[index - 1]).startswith("-") and "=" not in shown(words[index - 1])
    )


def _flags(words: Sequence[Word]) -> dict[str, str]:
    out: dict[str, str] = {}
    for index, word in enumerate(map(shown, words)):
        # -N2 and -n8, as SLURM allows
        attached = re.fullmatch(r"(-[NnG])([0-9]+)", word)
        name, equals, value = attached.group(1, 0, 2) if attached else word.partition("=")
        name = _SHORT.get(name, name)
        if name.startswith("--"):
            following = shown(words[index + 1]) if index + 1 < len(words) else ""
            out[name.replace("_", "-")] = value if equals else following
    return _with_gres(out)


def _first(given: Mapping[str, str], names: Sequence[str]) -> int | None:
    """Return the first positive number of these options."""
    for name in names:
        text = given.get(name, "")
        if _NUMBER.fullmatch(text) and int(text) > 0:
            return int(text)
    return None
