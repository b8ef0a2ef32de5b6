"""The resolution of `auto` and null: device, ranks and kernels here, the rest in `defaults`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mtrain.config.engine.kernels import OPERATIONS, Operation, stands_for
from mtrain.config.machine import hardware, nvml
from mtrain.config.machine.devices import AUTO, CPU, CUDA, facts_of
from mtrain.config.machine.nvml import Driver
from mtrain.config.machine.visible import Seen, known
from mtrain.config.messages.problem import problem_of
from mtrain.config.resolve.conditional import CONDITIONAL, Conditional, inside
from mtrain.config.resolve.defaults import STEPS, Derived, Step
from mtrain.config.resolve.watch import watched
from mtrain.config.schema.base import Section
from mtrain.config.schema.cluster import ClusterConfig
from mtrain.config.schema.parallel import UnresolvedParallel
from mtrain.config.schema.run import DERIVED_SECTIONS, RunConfig, UnresolvedRun
from mtrain.errors import Problem
from mtrain.units import GIB

# The prefix of reasons that depend only on the machine.
HERE = "on this machine"
# The cluster that means this machine.
LOCAL = ClusterConfig.model_fields["name"].default
# Keys of a cluster that follow from the kind of its devices.
OF_A_DEVICE = {
    "sm",
    "device_memory_gib",
    "memory_gbps",
    "power_watts",
    "peak_tflops",
    "fast_link_gbps",
    "fast_link_devices",
    "network_gbitps",
    "host_link_gbps",
    "operation_us",
    "link_latency_us",
    "reached",
    "software",
}
# The number of processes on a machine without GPUs.
MAX_CPU_RANKS = 64


NO_GPU = Seen()
# Dotted key -> its value, and the reason.
Filled = Mapping[str, Derived]


@dataclass(frozen=True)
class Machine:
    """The facts of a machine that a configuration is resolved for."""

    cpu_cores: int
    memory_bytes: int
    gpus: int = 0
    transformer_engine: bool = False
    """True if TransformerEngine is installed."""
    triton: bool = False
    """True if Triton is installed."""
    triton_interpreted: bool = False
    """True if Triton's kernels run in its interpreter, on a CPU."""

    unusable_gpus: int = 0
    """GPUs of AMD that the installed torch does not support."""
    nvidia: Seen = NO_GPU
    """NVIDIA's GPUs, as the driver describes them."""

    @classmethod
    def here(
        cls,
        environment: Mapping[str, str] = os.environ,
        root: Path = hardware.ROOT,
        driver: Driver | None = None,
    ) -> Machine:
        """Return this machine, as far as this process may use it.

        Args:
            environment: the variables; some hide GPUs.
            root: the folder in place of `/`. With another one than `/`, no library is called.
            driver: NVIDIA's driver, if its library was called before; None: it is called now.
        """
        if driver is None and root == hardware.ROOT:
            driver = nvml.driver()
        seen = hardware.nvidia_gpus(environment, root, driver)
        amd = hardware.amd_gpus(environment, root)
        # SLURM may show each task one GPU: the machine then has as many as tasks.
        gpus = max(1, hardware.tasks_here(environment)) if seen.count == 1 else seen.count
        usable = amd if amd and not gpus and hardware.torch_is_for_amd() else 0
        engine = gpus > 0 and find_spec("transformer_engine") is not None
        interpreted = environment.get("TRITON_INTERPRET", "").lower() in (
            "1",
            "true",
            "on",
            "yes",
            "y",
        )
        triton = find_spec("triton") is not None
        cores = hardware.cpu_cores(root)
        memory = hardware.memory_bytes(root)
        return cls(cores, memory, gpus + usable, engine, triton, interpreted, amd - usable, seen)


def world_size_of(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of processes that a launcher such as torchrun started; None without a
    launcher.

    A single process without a rendezvous is a separate run.
    """
    text = environment.get("WORLD_SIZE", "")
    if not text.isdigit() or not environment.get("RANK"):
        return None
    return None if text == "1" and not environment.get("MASTER_PORT") else int(text)


def resolve(
    run: UnresolvedRun,
    machine: Machine,
    world_size: int | None = None,
    made_from: dict[str, frozenset[str]] | None = None,
    why: dict[str, str] | None = None,
) -> RunConfig:
    """Return the configuration with every `auto` and null that model, layout or machine decide
    filled in.

    Never changes a key that has a value; resolving twice changes nothing. On a CPU devices_per_node
    stays null: a layout has as many processes as it needs, and so has a run that goes on with
    another layout.

    Args:
        run: the configuration as composed.
        machine: the machine that it may derive values from.
        world_size: the number of processes that a launcher started; it decides `parallel.ranks`
            where that is null.
        made_from: gets, for each key that is filled in, the keys that decided its value.
        why: gets the reason in words.

    Raises:
        ValidationError: a value that a resolved run always has is still null, which is a bug here.
    """
    draft = _with_sections(run, lambda kind, section: kind.model_construct(**dict(section)))
    steps: tuple[Callable[[RunConfig], Filled], ...] = (
        lambda r: _device(r, machine, world_size),
        lambda r: _described(r, machine),
        lambda r: _ranks(r, machine, world_size),
        *(partial(_default, key, step) for key, step in STEPS.items()),
        _recompute,
        *(partial(_kernel, op, machine) for op in OPERATIONS),
        *(partial(_conditional, key) for key in CONDITIONAL),
    )
    # The order matters: a step reads what earlier ones filled in.
    for step in steps:
        reads: set[str] = set()
        filled = step(draft if made_from is None else watched(draft, reads))
        for path, (value, reason) in filled.items():
            draft = _with(draft, path.split("."), value)
            if made_from is not None:
                _read_before(path, made_from)
                made_from[path] = frozenset(reads - {path})
            if why is not None:
                why[path] = f"resolved {'' if reason.startswith(HERE) else 'from '}{reason}"
    return _checked(draft)


def as_resolved(run: UnresolvedRun) -> RunConfig:
    """Return the run of a file that a resolved run was written to.

    A file of an earlier release may lack keys that are derived since: they are derived here.
    """
    try:
        return _checked(run)
    except ValidationError:
        return resolve(run, Machine.here())


def _checked(run: UnresolvedRun) -> RunConfig:
    return _with_sections(run, lambda kind, section: kind.model_validate(dict(section)))


def _with_sections(
    run: UnresolvedRun, convert: Callable[[type[Section], Section], Section]
) -> RunConfig:
    """Return a run whose sections of derived keys are converted to those of a resolved run.

    The draft that the steps read is not validated: keys that later steps derive are still null.
    """
    sections: dict[str, Any] = dict(run)
    for name, kind in DERIVED_SECTIONS.items():
        sections[name] = convert(kind, sections[name])
    return RunConfig.model_construct(**sections)


def _read_before(path: str, made_from: dict[str, frozenset[str]]) -> None:
    """Mark a key that is filled in now as read by others that used it while it was null."""
    for other, reads in made_from.items():
        if path in reads:
            made_from[other] = reads - {path} | {f"{path}."}


def _device(run: RunConfig, machine: Machine, world_size: int | None) -> Filled:
    if run.cluster.device != AUTO:
        return {}
    needed = run.parallel.ranks or world_size or smallest_world(run.parallel)
    here = machine.gpus * run.cluster.nodes
    if machine.gpus:
        counted = f"{machine.gpus} GPU{'' if machine.gpus == 1 else 's'}"
    else:
        counted = "no GPU"
    fewer = f" for {needed} ranks" if 0 < here < needed else ""
    hidden = f"; {machine.nvidia.fault}" if machine.nvidia.fault else ""
    return {
        "cluster.device": (
            CUDA.name if here >= needed else CPU.name,
            f"{HERE}: {counted}{fewer}{hidden}",
        )
    }


def _described(run: RunConfig, machine: Machine) -> Filled:
    """Fill in the device facts that a cluster leaves out, from this machine's GPUs if all are of
    one kind.

    The driver has precedence over the file of `conf/cluster` whose `driver_names` list its name.
    """
    cluster = run.cluster
    gpu = machine.nvidia.kind
    if gpu is None or not facts_of(cluster.device).counted or not describes_this_machine(cluster):
        return {}
    where = f"{HERE}: {gpu.name}"
    found = known(gpu.name)
    said: dict[str, Any] = {"driver_names": (gpu.name,), "sm": gpu.sm or None}
    said["device_memory_gib"] = round(gpu.memory_bytes / GIB, 2) or None
    filled = {key: (value, where) for key, value in said.items() if value is not None}
    if found is not None:
        filed = found.cluster.model_dump(include=OF_A_DEVICE, exclude_defaults=True)
        filled = {key: (value, f"{where}, {found.source}") for key, value in filed.items()} | filled
    return {f"cluster.{key}": value for key, value in filled.items() if not getattr(cluster, key)}


def describes_this_machine(cluster: ClusterConfig) -> bool:
    """Return whether a cluster leaves its devices to the machine: `local`, or no device facts."""
    if cluster.driver_names:
        return False
    said = (cluster.sm, cluster.device_memory_gib, cluster.memory_gbps, cluster.peak_tflops)
    return cluster.name == LOCAL or not any(said)


def _ranks(run: RunConfig, machine: Machine, world_size: int | None) -> Filled:
    cluster = run.cluster
    p = run.parallel
    ranks = p.ranks or world_size
    per_node = cluster.devices_per_node
    here = machine.gpus if facts_of(cluster.device).counted else 0
    filled: dict[str, Derived] = {}
    if per_node is None and here:
        # A launcher may start fewer processes than the machine has GPUs.
        per_node = here if ranks is None else min(here, -(-ranks // cluster.nodes))
        filled["cluster.devices_per_node"] = (
            per_node,
            f"{HERE}: {here} GPU{'' if here == 1 else 's'}",
        )
    if p.ranks is None and world_size:
        filled["parallel.ranks"] = (world_size, "WORLD_SIZE of the launcher")
    elif p.ranks is None and per_node:
        why = f"cluster {cluster.name}: nodes {cluster.nodes} * devices_per_node {per_node}"
        filled["parallel.ranks"] = (cluster.nodes * per_node, why)
    elif p.ranks is None:
        degrees = " ".join(
            f"{axis} {n}" for axis in ("tp", "pp", "cp", "ep") if (n := getattr(p, axis)) > 1
        )
        filled["parallel.ranks"] = (
            smallest_world(p),
            f"{degrees or 'tp 1 pp 1'}: the fewest ranks",
        )
    return filled


def _default(key: str, derive: Step, run: RunConfig) -> Filled:
    derived = derive(run) if inside(run, key) is None else None
    return {} if derived is None else {key: derived}


def _recompute(run: RunConfig) -> Filled:
    """Recompute nothing where the choice is open and was not made by the plan, which is above."""
    if run.parallel.recompute.granularity not in (None, AUTO):
        return {}
    memory = run.cluster.device_memory_gib
    known = f"device_memory_gib {memory:g}" if memory else "no device_memory_gib"
    return {"parallel.recompute.granularity": ("none", f"cluster {run.cluster.name}: {known}")}


def _kernel(op: Operation, machine: Machine, run: RunConfig) -> Filled:
    word = stands_for(op, run, machine)
    default = run.kernels.default
    why = f"kernels.default {default}" if word == default else f"{HERE}: kernels.default {default}"
    return {} if word is None else {f"kernels.{op.name}": (word, why)}


def _conditional(key: Conditional, run: RunConfig) -> Filled:
    if key.value(run) is not None or not key.active(run):
        return {}
    value = key.default(run)
    return {} if value is None else {key.path: (value, key.needs)}


def _with(node: Any, path: list[str], value: Any) -> Any:
    """Return a copy of a section with one key set."""
    inner = value if len(path) == 1 else _with(getattr(node, path[0]), path[1:], value)
    return node.model_copy(update={path[0]: inner})


def smallest_world(parallel: UnresolvedParallel) -> int:
    """Return the smallest number of ranks whose dense grid (tp pp cp) and expert grid (etp ep pp)
    are whole.

    With `hsdp_replicas` both grids divide into as many equal parts, and a dense one spans two
    ranks.
    """
    replicas = parallel.hsdp_replicas
    dense = parallel.tp * parallel.cp
    expert = (parallel.etp or parallel.tp) * parallel.ep
    if replicas > 1:
        copies = math.lcm(parallel.cp, replicas)
        dense = parallel.tp * copies * (2 if copies == replicas else 1)
        expert = expert * replicas
    return parallel.pp * math.lcm(dense, expert)


def machine_problems(
    run: UnresolvedRun,
    resolved: RunConfig,
    machine: Machine,
    world_size: int | None,
    origins: Mapping[str, str],
) -> Iterator[Problem]:
    """Return the problems between a configuration and the processes or cores of this machine."""
    asked = run.parallel.ranks
    got = resolved.parallel.ranks
    if world_size is not None and asked is not None and asked != world_size:
        rule = (
            f"the launcher started {world_size} processes (WORLD_SIZE), and the configuration needs"
            f" {asked}"
        )
        yield problem_of(
            run, origins, "MT110", "parallel.ranks", rule, f"parallel.ranks={world_size}"
        )
    if facts_of(resolved.cluster.device).on_host and got > 4 * machine.cpu_cores:
        rule = f"{got} processes on {machine.cpu_cores} CPU cores, which may not fit in memory"
        if got > MAX_CPU_RANKS:
            rule = (
                f"{got} processes; mtrain starts at most {MAX_CPU_RANKS} on a CPU and refuses a run"
                " here"
            )
        related = [
            f"parallel.{axis}"
            for axis in ("tp", "pp", "cp", "ep")
            if getattr(resolved.parallel, axis) > 1
        ]
        yield problem_of(
            resolved,
            origins,
            "MT111",
            "parallel.ranks",
            rule,
            "parallel=single",
            severity="warning",
            related=[*related, "cluster.device"],
        )
