"""Whether this machine can run a configuration, asked before anything is started."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
from collections.abc import Sequence

from mtrain import units
from mtrain.config import engine
from mtrain.config.devices import facts_of
from mtrain.config.formats import bytes_of
from mtrain.config.hardware import cpu_cores
from mtrain.config.paths import program, user_path
from mtrain.config.resolve import MAX_CPU_RANKS, Machine
from mtrain.config.run import RunConfig
from mtrain.errors import BadEnvironment
from mtrain.launching import limits
from mtrain.launching.environment import Place, conflicts, environment
from mtrain.layout.grid import RankGrid
from mtrain.plan.count import parameters
from mtrain.plan.memory import activation_bytes, bytes_here


def check(
    run: RunConfig, argv: Sequence[str], machine: Machine | None = None, *, ranks_here: int | None = None
) -> None:
    """Compare what a run needs with what is here; `argv` is what the user wrote, for the commands that do work.

    `ranks_here` is how many ranks another launcher started on this machine; None: all are to be started here.

    Raises:
        BadEnvironment: every shortage at once, and which commands work here.
    """
    machine = machine or Machine.here()
    grid, shortages = RankGrid.of(run), list[str]()
    here = min(grid.world, run.cluster.devices_per_node or 0) if ranks_here is None else ranks_here
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("torch") is None:
        shortages.append("needs torch and megatron-core, which are not installed: pip install mtrain")
    elif not engine.is_supported(engine.release() or (0, 0, 0)):
        lies = engine.folder()
        there = f"not what is in {lies}" if lies else "and there is no module megatron.core: pip install mtrain"
        shortages.append(f"needs megatron-core {engine.supported_words()}, {there}")
    if run.cluster.nodes > 1 and ranks_here is None:
        shortages.append(
            f"needs {run.cluster.nodes} machines ({run.cluster.name}); this command starts ranks on one: "
            "start it on each machine with torchrun"
        )
    device = facts_of(run.cluster.device)
    if device.counted and machine.gpus < here:
        shortages.append(f"needs {here} GPUs on this machine; here: {_gpus(machine)}")
    if device.on_host:
        shortages += _cpu_shortages(run, grid, machine, ranks_here)
    shortages += _disk_shortages(run)
    shortages += _faults(run, here or grid.world, grid.world)
    if shortages:
        raise BadEnvironment(*_lines(run, grid, machine, shortages, argv))


def _cpu_shortages(run: RunConfig, grid: RankGrid, machine: Machine, ranks_here: int | None) -> list[str]:
    ranks = grid.world if ranks_here is None else ranks_here
    needed = bytes_here(run) * ranks // grid.world + ranks * activation_bytes(run)
    out = []
    if needed > machine.memory_bytes:
        size, processes = units.count(parameters(run.model)), f"{ranks} rank{'s' if ranks > 1 else ''}"
        out.append(
            f"needs at least {units.bytes_(needed)} of memory for weights, gradients, optimizer state and "
            f"activations of {size} parameters on {processes}; "
            f"here: {units.bytes_(machine.memory_bytes)}"
        )
    if ranks_here is None and grid.world > MAX_CPU_RANKS:
        out.append(f"needs {grid.world} processes; on a CPU at most {MAX_CPU_RANKS} are started")
    return out


def _faults(run: RunConfig, ranks: int, world: int) -> list[str]:
    """What is wrong with the variables and limits that `ranks` ranks of this machine would get."""
    on_host = facts_of(run.cluster.device).on_host
    found = limits.faults(os.environ, limits.Limits.here(), ranks, world=world, on_host=on_host)
    return found + conflicts(environment(run, Place(ranks), os.environ))


def _disk_shortages(run: RunConfig) -> list[str]:
    """A disk that does not hold the weights of one checkpoint."""
    if run.checkpoint.save_interval is None and not run.checkpoint.save_final:
        return []
    folder = user_path(run.log.runs_dir).absolute()
    try:
        place = next(p for p in (folder, *folder.parents) if p.is_dir())
        free = shutil.disk_usage(place).free
    except (OSError, StopIteration):
        return []  # whether the folder can be written is asked when it is made
    needed = parameters(run.model) * bytes_of(run.precision.format)
    if needed <= free:
        return []
    return [f"needs more than {units.bytes_(needed)} of disk for a checkpoint; free at {place}: {units.bytes_(free)}"]


def _lines(run: RunConfig, grid: RankGrid, machine: Machine, shortages: list[str], argv: Sequence[str]) -> list[str]:
    words = shlex.join(argv)
    return [
        f"{run.model.name} with {grid} cannot run here:",
        *(f"  - {s}" for s in shortages),
        f"this machine: {machine.cpu_cores} cores, {units.bytes_(machine.memory_bytes)}, {_gpus(machine)} GPUs",
        "what works here:",
        f"  {program()} check {words}   (validate this configuration without running it)",
        f"  {program()} show {words}   (see every value and who set it)",
        *([f"  {program()} rehearse {words}   (run this layout here, shrunk)"] if grid.model_ranks <= 16 else []),
        f"  {program()}   (train a small model on this machine)",
    ]


def _gpus(machine: Machine) -> str:
    if not machine.unusable_gpus:
        return str(machine.gpus)
    return f"{machine.gpus} (and {machine.unusable_gpus} of AMD, which the installed torch is not built for)"


def threads_per_rank(ranks: int) -> int:
    """Cores for each of `ranks` processes of this machine, at least one."""
    return max(1, cpu_cores() // ranks)
