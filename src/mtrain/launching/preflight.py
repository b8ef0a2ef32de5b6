"""Whether this machine can run a configuration, asked before anything is started."""

from __future__ import annotations

import importlib.util
import os
import shlex
from collections.abc import Sequence

from mtrain import units
from mtrain.config.paths import program
from mtrain.config.resolve import MAX_CPU_RANKS, Machine
from mtrain.config.run import RunConfig
from mtrain.errors import BadEnvironment
from mtrain.layout.grid import RankGrid
from mtrain.plan.count import parameters
from mtrain.plan.memory import bytes_here


def check(run: RunConfig, argv: Sequence[str], machine: Machine | None = None) -> None:
    """Compare what a run needs with what is here; `argv` is what the user wrote, for the commands that do work.

    Raises:
        BadEnvironment: every shortage at once, and which commands work here.
    """
    machine = machine or Machine.here()
    grid, shortages = RankGrid.of(run), []
    here = run.cluster.devices_per_node or 0
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("torch") is None:
        shortages.append("needs torch and megatron-core, which are not installed: pip install mtrain")
    if run.cluster.nodes > 1:
        shortages.append(
            f"needs {run.cluster.nodes} machines ({run.cluster.name}); this command starts ranks on one: "
            "start it on each machine with torchrun"
        )
    if run.cluster.device == "cuda" and machine.gpus < min(grid.world, here):
        shortages.append(f"needs {min(grid.world, here)} GPUs on this machine; here: {machine.gpus}")
    if run.cluster.device == "cpu":
        shortages += _cpu_shortages(run, grid, machine)
    if shortages:
        raise BadEnvironment(_message(run, grid, machine, shortages, argv))


def _cpu_shortages(run: RunConfig, grid: RankGrid, machine: Machine) -> list[str]:
    needed = bytes_here(run)
    out = []
    if needed > machine.memory_bytes:
        out.append(
            f"needs at least {units.bytes_(needed)} of memory for weights, gradients and optimizer state of "
            f"{units.count(parameters(run.model))} parameters on {grid.world} rank{'s' if grid.world > 1 else ''}; "
            f"here: {units.bytes_(machine.memory_bytes)}"
        )
    if grid.world > MAX_CPU_RANKS:
        out.append(f"needs {grid.world} processes; on a CPU at most {MAX_CPU_RANKS} are started")
    return out


def _message(run: RunConfig, grid: RankGrid, machine: Machine, shortages: list[str], argv: Sequence[str]) -> str:
    words = shlex.join(argv)
    lines = [f"{run.model.name} with {grid} cannot run here:"]
    lines += [f"  - {s}" for s in shortages]
    lines += [
        f"this machine: {machine.cpu_cores} cores, {units.bytes_(machine.memory_bytes)}, {machine.gpus} GPUs",
        "what works here:",
        f"  {program()} check {words}   (judge this configuration without running it)",
        f"  {program()} show {words}   (see every value and who set it)",
        *([f"  {program()} rehearse {words}   (run this layout here, shrunk)"] if grid.model_ranks <= 16 else []),
        f"  {program()}   (train a small model on this machine)",
    ]
    return "\n".join(lines)


def threads_per_rank(ranks: int) -> int:
    """Cores for each of `ranks` processes of this machine, at least one."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)
