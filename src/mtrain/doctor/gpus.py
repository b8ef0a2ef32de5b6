"""Checks of the GPUs: driver, number, memory, clocks, errors, links and topology."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.machine.devices import facts_of
from mtrain.config.machine.nvml_health import LEVELS, SLOWING, GpuHealth
from mtrain.doctor.facts import Facts
from mtrain.doctor.rows import Row, ok, slow, wrong
from mtrain.launching.gpus import shortages
from mtrain.units import GIB, bytes_, number_of
from mtrain.world.launchers import launched

# Code of a shortage -> the name of its row.
NAMES = {
    "MT051": "gpus",
    "MT052": "visible gpus",
    "MT053": "gpu memory in use",
    "MT054": "driver",
    "MT055": "driver",
    "MT056": "kind of gpu",
}
# Part of the stated memory that a driver may keep for itself.
KEPT = 0.1
# Part of the stated power below which a limit was lowered on purpose.
LOWERED = 0.98


def check(facts: Facts) -> Iterator[Row]:
    """Yield the rows of a device that is counted; a CPU has none."""
    if not facts_of(facts.run.cluster.device).counted:
        return
    yield from _driver(facts)
    yield from _number(facts)
    yield from _memory(facts)
    if facts.health is None:
        return
    for index, gpu in enumerate(facts.health.gpus):
        yield from _errors(f"gpu {index}", gpu)
        yield from _speed(f"gpu {index}", gpu, facts)
    yield from _links(facts)
    if facts.health.farthest is not None:
        level = LEVELS.get(facts.health.farthest, "an unknown place")
        yield ok("topology", f"the farthest two GPUs share {level}")


def _driver(facts: Facts) -> Iterator[Row]:
    seen = facts.machine.nvidia
    if not seen.count:
        return
    container = "start the container with the GPUs (docker: --gpus all)"
    install = container if facts.container else "install NVIDIA's driver"
    if not facts.software.cuda_library:
        yield wrong("driver library", "libcuda.so.1 is missing or does not load", install)
    if not facts.software.nvml:
        text = "libnvidia-ml.so.1 does not answer: kind and state of the GPUs are unknown"
        capability = "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        yield slow("management library", text, capability if facts.container else install)
    if seen.driver is not None:
        cuda = seen.driver.cuda
        served = f", for CUDA up to {cuda[0]}.{cuda[1]}" if cuda else ""
        yield ok("driver version", f"{seen.driver.version}{served}")


def _number(facts: Facts) -> Iterator[Row]:
    """Yield the shortages that a run would be refused for, or warned of."""
    siblings = launched(facts.environment) is not None
    found = list(shortages(facts.run, facts.machine, facts.ranks_here, siblings))
    for shortage in found:
        name = NAMES.get(shortage.code, "gpus")
        row = slow if shortage.warning else wrong
        yield row(name, shortage.text, shortage.fix, facts.machine.gpus, "GPUs")
    if not any(shortage.code == "MT051" for shortage in found):
        kind = facts.machine.nvidia.kind
        what = f" x {kind.name}" if kind else ""
        yield ok("gpus", f"{facts.machine.gpus}{what}", facts.machine.gpus, "GPUs")


def _memory(facts: Facts) -> Iterator[Row]:
    stated = facts.run.cluster.device_memory_gib
    sizes = [gpu.memory_bytes for gpu in facts.machine.nvidia.gpus if gpu.memory_bytes]
    if not sizes:
        return
    least = min(sizes)
    if stated is not None and least < (1 - KEPT) * stated * GIB:
        text = f"{bytes_(least)}; cluster {facts.run.cluster.name} states {stated:g} GiB"
        fix = "cluster=local, or the cluster file of these GPUs"
        yield wrong("gpu memory", text, fix, least, "bytes")
    else:
        yield ok("gpu memory", bytes_(least), least, "bytes")


def _errors(name: str, gpu: GpuHealth) -> Iterator[Row]:
    reset = "drain the machine and reset the GPU (nvidia-smi -r)"
    if gpu.rows_failed:
        text = "a faulty row of memory could not be replaced"
        yield wrong(f"{name} memory rows", text, "replace the GPU, or hide it")
    elif gpu.rows_pending:
        text = "faulty rows of memory are replaced at the next reset"
        yield slow(f"{name} memory rows", text, reset)
    if gpu.uncorrected:
        text = f"{number_of(gpu.uncorrected, 'uncorrected error')} of memory since the last reset"
        yield wrong(f"{name} ecc", text, f"{reset}; replace it if they return", gpu.uncorrected)
    elif gpu.ecc is False:
        text = "off: a flipped bit of memory changes the run unnoticed"
        yield slow(f"{name} ecc", text, "nvidia-smi -e 1, then a reset")
    elif gpu.ecc:
        yield ok(f"{name} ecc", "on, no uncorrected errors", 0)


def _speed(name: str, gpu: GpuHealth, facts: Facts) -> Iterator[Row]:
    reasons = [text for bit, text in SLOWING.items() if (gpu.slowing or 0) & bit]
    heat = "" if gpu.celsius is None else f" at {gpu.celsius} C"
    if reasons:
        text = f"slowed by {' and '.join(reasons)}{heat}"
        fix = "look at cooling and power of the machine (nvidia-smi -q -d PERFORMANCE)"
        yield slow(f"{name} throttling", text, fix, gpu.celsius, "C")
    elif gpu.slowing is not None:
        yield ok(f"{name} throttling", f"none{heat}", gpu.celsius, "C")
    if gpu.sm_mhz is not None and gpu.sm_most_mhz:
        # An idle GPU lowers its clock, so a low one is only reported.
        yield ok(f"{name} clock", f"{gpu.sm_mhz} of {gpu.sm_most_mhz} MHz", gpu.sm_mhz, "MHz")
    stated = facts.run.cluster.power_watts
    limit = gpu.power_limit_watts
    if limit is not None and stated is not None and limit < LOWERED * stated:
        text = f"{limit:.0f} W; cluster {facts.run.cluster.name} states {stated:.0f} W"
        yield slow(f"{name} power limit", text, f"nvidia-smi -pl {stated:.0f}", limit, "W")
    lanes = gpu.pcie_lanes
    if lanes is not None and gpu.pcie_most_lanes is not None and lanes < gpu.pcie_most_lanes:
        text = f"{lanes} of {gpu.pcie_most_lanes} lanes"
        yield slow(f"{name} pcie", text, "reseat the card, or its riser", lanes, "lanes")


def _links(facts: Facts) -> Iterator[Row]:
    """Yield the state of NVLink, where the cluster states links faster than those to the host."""
    assert facts.health is not None
    cluster = facts.run.cluster
    gpus = facts.health.gpus
    fast = (cluster.fast_link_gbps or 0) > (cluster.host_link_gbps or 0)
    if len(gpus) < 2 or not (fast or any(gpu.links for gpu in gpus)):
        return
    for index, gpu in enumerate(gpus):
        up = gpu.links_up or 0
        if not up:
            text = f"gpu {index} has no NVLink connection that works"
            fix = "nvidia-smi nvlink -s; start nvidia-fabricmanager on machines with NVSwitch"
            yield slow("nvlink", text, fix, 0, "links")
            return
        if up < (gpu.links or 0):
            text = f"gpu {index}: {up} of {gpu.links} connections work"
            yield slow("nvlink", text, "nvidia-smi nvlink -s names the faulty ones", up, "links")
            return
    most = gpus[0].links or 0
    yield ok("nvlink", f"{most} connections of each GPU work", most, "links")
