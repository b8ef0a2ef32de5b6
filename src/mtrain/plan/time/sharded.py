"""What FSDP sends in a step: layer by layer, weights are gathered and gradients reduced beside the computation."""

from __future__ import annotations

from collections.abc import Sequence

from mtrain.config.formats import bytes_of
from mtrain.config.run import RunConfig
from mtrain.models.graph import Exchange
from mtrain.plan.time.device import Device
from mtrain.plan.time.efficiencies import Efficiencies
from mtrain.plan.time.links import MICRO, Group, Links

NEAR_HOP_US, FAR_HOP_US = 3.4, 14.0
"""Of a large tensor's way to the next device of a ring, in a domain and to another one: `hwLat` of NCCL's
src/graph/tuning.cc (b647562). Gathers and reductions go around rings, past every device of a group."""
FORWARD = 1 / 3
"""Share of the computation that is there to hide what a forward gathers; a backward multiplies twice as much."""

Shards = Sequence[tuple[float, Group]]
"""Elements of the weights of a rank, and the ranks that share them."""


def sharded_seconds(run: RunConfig, shards: Shards, computes: float, device: Device, reached: Efficiencies) -> float:
    """Of a step, what FSDP's communication takes longer than the computation that hides it, and its copies.

    Weights are gathered in each forward and backward, and gradients leave each backward.
    """
    p, element = run.parallel, bytes_of(run.precision.format)
    gradient = bytes_of("fp32") if run.precision.grad_reduce_in_fp32 else element
    passes = max(1, run.trainer.batch // (run.trainer.micro * p.dp))
    units = max(1.0, run.model.num_layers / p.pp + 1)
    gather, reduce = (
        passes * sum(_in_units(n * size, units, kind, group, device, reached) for n, group in shards if n)
        for size, kind in ((element, "gather"), (gradient, "scatter"))
    )
    left = 0.0
    for sent, window in ((gather, FORWARD * computes), (gather + reduce, (1 - FORWARD) * computes)):
        left += sent - min(window, sent) * reached.overlapped["dp"]
    return left + passes * _copies(run, shards, element, gradient) / (device.memory * reached.memory)


def _in_units(size: float, units: float, kind: str, group: Group, device: Device, reached: Efficiencies) -> float:
    """Seconds of a collective for each of so many parts of `size` bytes."""
    if group.size == 1:
        return 0.0
    links = Links(device, reached)
    each = links.seconds(group, Exchange("tp", "gather" if kind == "gather" else "scatter", int(size / units)))
    if device.on_host:
        return units * each
    far = -(-group.size // group.inside(device)) - 1
    hops = (far * FAR_HOP_US + (group.size - 1 - far) * NEAR_HOP_US) * MICRO
    return units * (each + max(0.0, hops - links.waits(group)))


def _copies(run: RunConfig, shards: Shards, element: int, gradient: int) -> float:
    """Bytes that torch's FSDP2 reads and writes to take weights out of what it gathers, twice, and to lay gradients
    in line for their reduction; megatron-core's FSDP computes in the buffers themselves."""
    if run.parallel.fsdp != "fsdp2":
        return 0.0
    return sum(n for n, group in shards if group.size > 1) * (2 * 2 * element + element + gradient)
