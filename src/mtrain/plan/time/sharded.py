"""The communication of FSDP in a step: layer by layer, weights are gathered and gradients reduced
during the computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from mtrain.config.engine.formats import bytes_of
from mtrain.config.schema.run import RunConfig
from mtrain.plan.states import fsdp_shards
from mtrain.plan.time.device import MICRO, Device
from mtrain.plan.time.efficiencies import Efficiencies
from mtrain.plan.time.links import Group, Links, Share

# Time of a large tensor to the next device of a ring, within a domain and between domains:
# `hwLat` of NCCL's src/graph/tuning.cc (b647562). Gathers and reductions pass every device of a
# group, so this time grows with the group.
NEAR_HOP_US = 3.4
FAR_HOP_US = 14.0
# Share of the computation in the forward: a backward multiplies twice as much. Recomputation
# makes the share smaller, which is left out.
FORWARD = 1 / 3


def sharded_seconds(
    run: RunConfig, shares: Sequence[Share], computes: float, device: Device, reached: Efficiencies
) -> float:
    """Return the seconds of a step in which FSDP's communication exceeds the computation that hides
    it, and those of its copies.

    Sharded weights are gathered in each forward and backward, others once after the update; sharded
    gradients leave each backward, others the last one. Between replicas (HSDP) torch's FSDP2
    reduces as often, megatron-core's once.
    """
    p = run.parallel
    element = bytes_of(run.precision.format)
    gradient = bytes_of("fp32") if run.precision.grad_reduce_in_fp32 else element
    passes = max(1, run.trainer.batch // (run.trainer.micro * p.dp))
    links = Links(device, reached)
    units = max(1.0, run.model.num_layers / p.pp + 1)
    again = fsdp_shards(run, "weights")
    gathers = passes if again else 1
    leaves = passes if fsdp_shards(run, "gradients") else 1
    gather = gathers * sum(
        _in_units(s.elements * element, units, "gather", s.group, links) for s in shares
    )
    reduce = leaves * sum(
        _in_units(s.elements * gradient, units, "scatter", s.group, links) for s in shares
    )
    between = sum(
        links.collective(s.copies, "reduce", s.elements * gradient / s.group.size) for s in shares
    )
    reduce += between * (passes if p.fsdp == "fsdp2" else 1)
    left = 0.0
    forward = FORWARD * computes * gathers / passes
    backward = (1 - FORWARD) * computes * leaves / passes
    for sent, window in ((gather, forward), (gather * again + reduce, backward)):
        left += sent - min(window, sent) * reached.overlapped["dp"]
    return left + passes * _copies(run, shares, element, gradient) / (
        device.memory * reached.memory
    )


def _in_units(
    size: float, units: float, kind: Literal["gather", "scatter"], group: Group, links: Links
) -> float:
    """Return the seconds of a collective for each of so many parts of `size` bytes."""
    if group.size == 1:
        return 0.0
    each = links.collective(group, kind, size / units)
    if links.device.on_host:
        return units * each
    far = -(-group.size // group.inside(links.device)) - 1
    hops = (far * FAR_HOP_US + (group.size - 1 - far) * NEAR_HOP_US) * MICRO
    return units * (each + max(0.0, hops - links.waits(group)))


def _copies(run: RunConfig, shares: Sequence[Share], element: int, gradient: int) -> float:
    """Return the bytes that torch's FSDP2 reads and writes to take weights out of what it gathers,
    twice, and to lay gradients in line for their reduction; megatron-core's FSDP computes in the
    buffers themselves.
    """
    if run.parallel.fsdp != "fsdp2":
        return 0.0
    return sum(share.elements for share in shares if share.group.size > 1) * (
        2 * 2 * element + element + gradient
    )
