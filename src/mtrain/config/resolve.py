"""The one place where `auto` and null become values: device, ranks, kernels, micro-batch, warmup, sample."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mtrain.config import hardware
from mtrain.config.batches import stages
from mtrain.config.conditional import CONDITIONAL, Conditional
from mtrain.config.devices import AUTO, CPU, CUDA, facts_of
from mtrain.config.kernels import OPERATIONS, Operation, stands_for
from mtrain.config.parallel import ParallelConfig
from mtrain.config.run import RunConfig
from mtrain.config.watch import watched
from mtrain.errors import Problem

HERE = "resolved on this machine"
MAX_CPU_RANKS = 64
"""Processes that are started on a machine without GPUs."""
USUAL_BATCH = 8
"""Samples of a step where nobody said how many."""


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
    """The number of processes that a launcher such as torchrun started; None where there is none.

    One process that is not told how to find others is a run of its own.
    """
    text = environment.get("WORLD_SIZE", "")
    if not text.isdigit() or not environment.get("RANK"):
        return None
    return None if text == "1" and not environment.get("MASTER_PORT") else int(text)


def resolve(
    run: RunConfig,
    machine: Machine,
    world_size: int | None = None,
    made_from: dict[str, frozenset[str]] | None = None,
) -> RunConfig:
    """The configuration with every `auto` and null of the machine's side filled in.

    Never changes a key that has a value; resolving twice changes nothing. On a CPU devices_per_node stays null: a
    layout has as many processes as it needs, and so has a run that goes on with another layout. `world_size` is
    what a launcher started; it decides `parallel.ranks` where that is null. `made_from`, where it is given, gets for
    each key that is filled in the keys that were looked at for it.
    """
    steps: list[Callable[[RunConfig], Mapping[str, Any]]] = [
        lambda r: _device(r, machine, world_size),
        lambda r: _ranks(r, machine, world_size),
        *(partial(_kernel, op, machine) for op in OPERATIONS),
        _schedule,
        _sample,
        _sequence_parallel,
        _batch,
        _micro_batch,
        *(partial(_conditional, key) for key in CONDITIONAL),
    ]
    for step in steps:
        reads: set[str] = set()
        filled = step(run if made_from is None else watched(run, reads))
        for path, value in filled.items():
            run = _with(run, path.split("."), value)
            if made_from is not None:
                made_from[path] = frozenset(reads - {path})
    return run


def _device(run: RunConfig, machine: Machine, world_size: int | None) -> dict[str, Any]:
    if run.cluster.device != AUTO:
        return {}
    needed = run.parallel.ranks or world_size or smallest_world(run.parallel)
    enough = machine.gpus * run.cluster.nodes >= needed
    return {"cluster.device": CUDA.name if enough else CPU.name}


def _kernel(op: Operation, machine: Machine, run: RunConfig) -> dict[str, Any]:
    word = stands_for(op, run, machine)
    return {} if word is None else {f"kernels.{op.name}": word}


def _conditional(key: Conditional, run: RunConfig) -> dict[str, Any]:
    return {key.path: key.default(run)} if key.value(run) is None and key.active(run) else {}


def _with(node: Any, path: list[str], value: Any) -> Any:
    """A copy of a section with one key set."""
    inner = value if len(path) == 1 else _with(getattr(node, path[0]), path[1:], value)
    return node.model_copy(update={path[0]: inner})


def _schedule(run: RunConfig) -> dict[str, Any]:
    o = run.optim
    filled: dict[str, Any] = {}
    if o.warmup_iters is None:
        filled["optim.warmup_iters"] = (o.decay_iters or run.trainer.train_iters) // 20
    if o.min_lr is None:
        filled["optim.min_lr"] = tenth(o.lr)
    return filled


def tenth(rate: float) -> float:
    """A tenth of a learning rate, as one would write it."""
    return float(f"{rate / 10:.6g}")


def _sample(run: RunConfig) -> dict[str, Any]:
    if run.trainer.sample_tokens is not None:
        return {}
    tokenizer = run.data.kind == "text" or (run.data.kind == "indexed" and run.data.tokenizer is not None)
    return {"trainer.sample_tokens": 64 if tokenizer and run.parallel.cp == 1 else 0}


def _sequence_parallel(run: RunConfig) -> dict[str, Any]:
    p = run.parallel
    return (
        {}
        if p.sequence_parallel is not None
        else {"parallel.sequence_parallel": p.tp > 1 and run.model.moe is not None}
    )


def _batch(run: RunConfig) -> dict[str, Any]:
    """As the micro-batch that nobody set is chosen for the batch, one that somebody set is a part of it."""
    t, p = run.trainer, run.parallel
    if t.global_batch_size is not None:
        return {}
    step = t.micro * max(1, (p.ranks or 1) // p.model_ranks) * (p.pp if p.vpp > 1 else 1)
    return {"trainer.global_batch_size": -(-USUAL_BATCH // step) * step}


def _micro_batch(run: RunConfig) -> dict[str, Any]:
    t, p = run.trainer, run.parallel
    if t.micro_batch_size is not None:
        return {}
    dp = max(1, (p.ranks or 1) // p.model_ranks)
    shares = [size // dp for _, size in stages(run)]  # of a data-parallel rank in a step
    even = [size for size in (8, 4, 2, 1) if all(share and share % size == 0 for share in shares)]
    if p.vpp > 1:
        even = [size for size in even if all(share // size % p.pp == 0 for share in shares)] or even
    filling = [size for size in even if min(shares) // size >= p.pp]
    return {"trainer.micro_batch_size": filling[0] if filling else (even or [1])[-1]}


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


def _ranks(run: RunConfig, machine: Machine, world_size: int | None) -> dict[str, Any]:
    cluster, asked = run.cluster, run.parallel.ranks
    ranks, per_node = asked or world_size, cluster.devices_per_node
    here = machine.gpus if facts_of(cluster.device).counted else 0
    if per_node is None and here:
        per_node = here if ranks is None else min(here, -(-ranks // cluster.nodes))
    filled: dict[str, Any] = {}
    if asked is None:
        filled["parallel.ranks"] = ranks or (cluster.nodes * per_node if per_node else smallest_world(run.parallel))
    if cluster.devices_per_node is None and per_node is not None:
        filled["cluster.devices_per_node"] = per_node
    return filled


def machine_problems(
    run: RunConfig, resolved: RunConfig, machine: Machine, world_size: int | None, source: str
) -> Iterator[Problem]:
    """What is wrong between a configuration and the processes or cores that are here."""
    asked, got = run.parallel.ranks, resolved.parallel.ranks
    if world_size is not None and asked is not None and asked != world_size:
        rule = f"the launcher started {world_size} processes (WORLD_SIZE), the configuration asks for {asked}"
        yield Problem("MT110", "parallel.ranks", asked, rule, f"parallel.ranks={world_size}", source)
    if facts_of(resolved.cluster.device).on_host and got is not None and got > 4 * machine.cpu_cores:
        rule = f"{got} processes on {machine.cpu_cores} CPU cores will be slow, and may not fit in memory"
        if got > MAX_CPU_RANKS:
            rule = f"{got} processes, and on a CPU at most {MAX_CPU_RANKS} are started: a run here is refused"
        yield Problem("MT111", "parallel.ranks", got, rule, "parallel=single", source, "warning")
