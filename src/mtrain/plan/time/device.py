"""The rates of a device and its links, as the cluster of a run states them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mtrain.config.machine.devices import facts_of
from mtrain.config.schema.cluster import ClusterConfig

# Compute capability -> multiprocessors of its largest device on sale, from NVIDIA's white
# papers.
MULTIPROCESSORS = {80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 103: 160}
# Compute capability -> exponentials per FLOP of dense products in 16 bits, from the same papers.
# Attention waits for its softmax where they are few.
EXPONENTIALS = {
    80: 16 / 2048,
    86: 16 / 1024,
    89: 16 / 1024,
    90: 16 / 4096,
    100: 16 / 8192,
    103: 32 / 8192,
}
# Generation -> watts, and peaks in TFLOP/s, of its first server device, from its data sheet.
FIRST = {
    8: (400, {"bf16": 312, "fp16": 312}),
    9: (700, {"bf16": 989, "fp16": 989, "fp8": 1979}),
    10: (1000, {"bf16": 2250, "fp16": 2250, "fp8": 4500, "fp4": 9000}),
}
BLACKWELL = 10
MICRO = 1e-6
GIGA = 1e9
TERA = 1e12


@dataclass(frozen=True)
class Device:
    """One device in bytes and operations a second."""

    peaks: dict[str, float]
    """Format -> operations a second."""
    memory: float
    """Bytes a second."""
    fast: float
    """Bytes a second to a device of its fast domain, one way."""
    domain: int
    """Devices of a fast domain."""
    network: float
    """Bytes a second to the others, one way."""
    multiprocessors: int
    exponentials: float
    """Exponentials a second for each FLOP/s of products in 16 bits."""
    on_host: bool
    """True if the device is the host: a cluster's stated rates are measured, and reached."""
    power: dict[str, float]
    """Format -> watts for a FLOP/s of the peak, relative to the first device of its generation."""
    blackwell: bool
    """True for Blackwell and later generations."""


def missing(cluster: ClusterConfig, formats: tuple[str, ...], ranks: int) -> tuple[str, ...]:
    """Return the missing keys without which the time of a run on so many ranks is unknown."""
    found = [f"cluster.peak_tflops.{form}" for form in formats if form not in cluster.peak_tflops]
    found += ["cluster.memory_gbps"] if cluster.memory_gbps is None else []
    if facts_of(cluster.device).on_host and cluster.operation_us is None:
        found.append("cluster.operation_us")
    if ranks > 1:
        found += [
            f"cluster.{key}"
            for key in ("fast_link_gbps", "fast_link_devices")
            if getattr(cluster, key) is None
        ]
        if cluster.network_gbitps is None and ranks > (cluster.fast_link_devices or ranks):
            found.append("cluster.network_gbitps")
    return tuple(found)


def device_of(cluster: ClusterConfig) -> Device:
    """Return the device of a cluster that states enough."""
    memory = cluster.memory_gbps or 0.0
    fast = cluster.fast_link_gbps or memory
    network = GIGA / 8 * cluster.network_gbitps if cluster.network_gbitps else fast * GIGA
    peaks: dict[str, float] = {form: peak * TERA for form, peak in cluster.peak_tflops.items()}
    on_host = facts_of(cluster.device).on_host
    number = 1 if on_host else MULTIPROCESSORS.get(cluster.sm or 0, 132)
    exponentials = math.inf if on_host else EXPONENTIALS.get(cluster.sm or 0, EXPONENTIALS[90])
    domain = cluster.fast_link_devices or 1
    generation = (cluster.sm or 0) // 10
    power = dict[str, float]()
    # FIRST is of devices for servers, which those of 86 and 89 are not.
    if cluster.power_watts is not None and generation in FIRST and cluster.sm not in (86, 89):
        watts, first = FIRST[generation]
        more = cluster.power_watts / watts
        power = {
            form: more * peak * TERA / peaks[form] for form, peak in first.items() if form in peaks
        }
    rates = (peaks, memory * GIGA, fast * GIGA, domain, network)
    return Device(*rates, number, exponentials, on_host, power, generation >= BLACKWELL)
