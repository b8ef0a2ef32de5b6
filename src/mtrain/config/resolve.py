"""The one place where `auto` and null become values: device, ranks, kernels, micro-batch, warmup, sample."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mtrain.config import hardware
from mtrain.config.batches import stages
from mtrain.config.conditional import CONDITIONAL
from mtrain.config.kernels import resolved as resolved_kernels
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
    triton: bool = False
    """Whether Triton is installed."""
    triton_interpreted: bool = False
    """Whether Triton's kernels run in its interpreter, on a CPU."""

    unusable_gpus: int = 0
    """GPUs of AMD that the installed torch was not built for."""

    @classmethod
    def here(cls, environment: Mapping[str, str] = os.environ, root: Path = hardware.ROOT) -> Machine:
        """This machine as far as this process may use it, without asking any driver."""
        gpus, amd = hardware.nvidia_gpus(environment, root), hardware.amd_gpus(environment, root)
        usable = amd if amd and not gpus and hardware.torch_is_for_amd() else 0
        engine = gpus > 0 and find_spec("transformer_engine") is not None
        interpreted = environment.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
        triton = find_spec("triton") is not None
        cores, memory = hardware.cpu_cores(root), hardware.memory_bytes(root)
        return cls(cores, memory, gpus + usable, engine, triton, interpreted, amd - usable)


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
        needed = run.parallel.ranks or world_size or smallest_world(run.parallel)
        device = "cuda" if machine.gpus * run.cluster.nodes >= needed else "cpu"
    ranks, per_node = _ranks(run, device, machine, world_size)
    kernels: dict[str, Any] = {}
    if device == "cpu" or machine.gpus:  # elsewhere the machine that runs it decides
        kernels = resolved_kernels(run, device, machine)
    cluster: dict[str, Any] = {"device": device, "devices_per_node": per_node}
    run = run.model_copy(
        update={
            "cluster": run.cluster.model_copy(update=cluster),
            "parallel": run.parallel.model_copy(update={"ranks": ranks}),
            "kernels": run.kernels.model_copy(update=kernels),
            "optim": run.optim.model_copy(update=_schedule(run)),
            "trainer": run.trainer.model_copy(update=_sample(run) | _micro_batch(run, ranks)),
        }
    )
    for key in CONDITIONAL:
        if key.value(run) is None and key.active(run):
            run = _with(run, key.path.split("."), key.default(run))
    return run


def _with(node: Any, path: list[str], value: Any) -> Any:
    """A copy of a section with one key set."""
    inner = value if len(path) == 1 else _with(getattr(node, path[0]), path[1:], value)
    return node.model_copy(update={path[0]: inner})


def _schedule(run: RunConfig) -> dict[str, Any]:
    o = run.optim
    filled: dict[str, Any] = {}
    if o.warmup_iters is None:
        filled["warmup_iters"] = (o.decay_iters or run.trainer.train_iters) // 20
    if o.min_lr is None:
        filled["min_lr"] = tenth(o.lr)
    return filled


def tenth(rate: float) -> float:
    """A tenth of a learning rate, as one would write it."""
    return float(f"{rate / 10:.6g}")


def _sample(run: RunConfig) -> dict[str, Any]:
    if run.trainer.sample_tokens is not None:
        return {}
    tokenizer = run.data.kind == "text" or (run.data.kind == "indexed" and run.data.tokenizer is not None)
    return {"sample_tokens": 64 if tokenizer and run.parallel.cp == 1 else 0}


def _micro_batch(run: RunConfig, ranks: int) -> dict[str, Any]:
    t, p = run.trainer, run.parallel
    if t.micro_batch_size is not None:
        return {}
    shares = [size // max(1, ranks // p.model_ranks) for _, size in stages(run)]  # of a data-parallel rank in a step
    even = [size for size in (8, 4, 2, 1) if all(share and share % size == 0 for share in shares)]
    if p.vpp > 1:
        even = [size for size in even if all(share // size % p.pp == 0 for share in shares)] or even
    filling = [size for size in even if min(shares) // size >= p.pp]
    return {"micro_batch_size": filling[0] if filling else (even or [1])[-1]}


def smallest_world(parallel: ParallelConfig) -> int:
    """The fewest ranks whose dense grid (tp pp cp) and expert grid (etp ep pp) are both whole.

    With replicas (`hsdp_replicas`) both divide into as many equal parts, and a dense one is spread over two ranks.
    """
    replicas, dense = parallel.hsdp_replicas, parallel.tp * parallel.cp
    expert = (parallel.etp or parallel.tp) * parallel.ep
    if replicas > 1:
        copies = math.lcm(parallel.cp, replicas)
        dense, expert = parallel.tp * copies * (2 if copies == replicas else 1), expert * replicas
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
