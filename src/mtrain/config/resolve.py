"""The one place where `auto` and null become values: device, devices per node, ranks, kernels."""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from mtrain.config.parallel import ParallelConfig
from mtrain.config.run import RunConfig
from mtrain.errors import Problem

HERE = "resolved on this machine"


@dataclass(frozen=True)
class Machine:
    """What a configuration is resolved on."""

    cpu_cores: int
    memory_bytes: int
    gpus: int = 0
    transformer_engine: bool = False
    """Whether TransformerEngine is installed."""

    @classmethod
    def here(cls, environment: Mapping[str, str] = os.environ) -> Machine:
        """This machine, without asking any driver: device files, and what CUDA_VISIBLE_DEVICES leaves of them."""
        gpus = len(glob.glob("/dev/nvidia[0-9]*"))
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            gpus = min(gpus, _visible(visible))
        try:
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (ValueError, OSError, AttributeError):
            memory = 0
        engine = gpus > 0 and find_spec("transformer_engine") is not None
        return cls(os.cpu_count() or 1, memory, gpus, engine)


def _visible(text: str) -> int:
    """How many devices CUDA sees: it stops at the first entry that is no device."""
    count = 0
    for entry in text.split(","):
        word = entry.strip()
        if not (word.isdigit() or word.startswith(("GPU-", "MIG-"))):
            break
        count += 1
    return count


def world_size_of(environment: Mapping[str, str] = os.environ) -> int | None:
    """The number of processes that a launcher such as torchrun started; None where there is none."""
    text = environment.get("WORLD_SIZE", "")
    return int(text) if text.isdigit() and "RANK" in environment else None


def resolve(run: RunConfig, machine: Machine, world_size: int | None = None) -> RunConfig:
    """The configuration with every `auto` and null of the machine's side filled in.

    Never changes a key that has a value; resolving twice changes nothing. On a CPU devices_per_node stays null: a
    layout has as many processes as it needs, and so has a run that goes on with another layout. `world_size` is
    what a launcher started; it decides `parallel.ranks` where that is null.
    """
    device = run.cluster.device
    if device == "auto":
        device = "cuda" if machine.gpus else "cpu"
    ranks, per_node = _ranks(run, device, machine, world_size)
    kernel = "te" if device == "cuda" and machine.transformer_engine else "reference"
    kernels = {key: kernel for key, value in run.kernels if value == "auto"}
    cluster: dict[str, Any] = {"device": device, "devices_per_node": per_node}
    return run.model_copy(
        update={
            "cluster": run.cluster.model_copy(update=cluster),
            "parallel": run.parallel.model_copy(update={"ranks": ranks}),
            "kernels": run.kernels.model_copy(update=kernels),
        }
    )


def smallest_world(parallel: ParallelConfig) -> int:
    """The fewest ranks whose dense grid (tp pp cp) and expert grid (etp ep pp) are both whole."""
    dense = parallel.tp * parallel.cp
    expert = (parallel.etp or parallel.tp) * parallel.ep
    return parallel.pp * math.lcm(dense, expert)


def _ranks(run: RunConfig, device: str, machine: Machine, world_size: int | None) -> tuple[int, int | None]:
    cluster, ranks = run.cluster, run.parallel.ranks
    if ranks is None:
        ranks = world_size
    if cluster.devices_per_node is not None:
        return ranks or cluster.nodes * cluster.devices_per_node, cluster.devices_per_node
    if device == "cpu":
        return ranks or smallest_world(run.parallel), None
    here = machine.gpus if device == "cuda" else 0
    if not here:
        return ranks or smallest_world(run.parallel), None
    if ranks is None:
        return cluster.nodes * here, here
    return ranks, min(here, -(-ranks // cluster.nodes))


def machine_problems(
    run: RunConfig, resolved: RunConfig, machine: Machine, world_size: int | None, source: str
) -> list[Problem]:
    """What is wrong between a configuration and the processes or cores that are here."""
    problems: list[Problem] = []
    asked, got = run.parallel.ranks, resolved.parallel.ranks
    if world_size is not None and asked is not None and asked != world_size:
        rule = f"the launcher started {world_size} processes (WORLD_SIZE), the configuration asks for {asked}"
        problems.append(Problem("MT110", "parallel.ranks", asked, rule, f"parallel.ranks={world_size}", source))
    if resolved.cluster.device == "cpu" and got is not None and got > 4 * machine.cpu_cores:
        rule = f"{got} processes on {machine.cpu_cores} CPU cores will be slow, and may not fit in memory"
        problems.append(Problem("MT111", "parallel.ranks", got, rule, "parallel=single", source, "warning"))
    return problems
