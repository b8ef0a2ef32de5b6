"""The work of each step's end: gradients and weights travel between data-parallel ranks, and
weights are updated.
"""

from __future__ import annotations

from mtrain.config.engine.formats import bytes_of, is_half
from mtrain.config.optimizers import OPTIMIZERS
from mtrain.config.schema.run import RunConfig
from mtrain.layout.grid import RankGrid
from mtrain.plan.states import fsdp_shards, main_weight_bytes
from mtrain.plan.time.device import GIGA, Device
from mtrain.plan.time.efficiencies import Efficiencies
from mtrain.plan.time.links import Group, Links, Share
from mtrain.plan.time.sharded import sharded_seconds

# Assumed: bytes of state that the host's share for one device updates in a second.
HOST_UPDATE = 20e9


def done_once(
    run: RunConfig,
    grid: RankGrid,
    weights: tuple[float, float],
    device: Device,
    reached: Efficiencies,
    computes: float,
    micro: float,
) -> dict[str, float]:
    """Return the seconds of data-parallel communication and of the update, by part.

    Args:
        run: resolved.
        grid: of its ranks.
        weights: elements that are trained on a rank, of experts and the others.
        device: it computes on.
        reached: of what that states.
        computes: seconds in which the rank has work.
        micro: of them, for one micro-batch.
    """
    shares = shares_of(run, grid, weights)
    if run.parallel.fsdp != "none":
        left = sharded_seconds(run, shares, computes, device, reached)
    else:
        sent = _sent(run, shares, Links(device, reached))
        # with virtual stages, gradients of a chunk leave while the last micro-batches go through
        # the others
        window = min(computes, micro * (grid.pp if run.parallel.vpp > 1 else 1))
        left = sent
        if run.parallel.overlap_grad_reduce:
            left -= min(window, sent) * reached.overlapped["dp"]
    again = 0.0 if reached.host is None else reached.host.step_bytes
    update = _moved(run, shares, again) / (device.memory * reached.memory)
    return {"dp": left, "optimizer": update, "offload": _offloaded(run, shares)}


def shares_of(run: RunConfig, grid: RankGrid, weights: tuple[float, float]) -> tuple[Share, ...]:
    """Return the shares of a rank's experts and other weights, with the groups that hold the same;
    without empty ones.
    """
    copies = run.parallel.hsdp_replicas
    every = zip(weights, (grid.edp, grid.dp * grid.cp), (grid.etp * grid.ep, grid.tp), strict=True)
    return tuple(
        Share(n, _group(ranks // copies, stride), Group(copies, stride * max(1, ranks // copies)))
        for n, ranks, stride in every
        if n
    )


def _group(size: int, stride: int) -> Group:
    return Group(max(1, size), stride)


def gradient_bytes(run: RunConfig) -> int:
    """Return the bytes of an element of a gradient."""
    return bytes_of("fp32" if run.precision.grad_reduce_in_fp32 else run.precision.format)


def _sent(run: RunConfig, shares: tuple[Share, ...], links: Links) -> float:
    """Return the seconds of gradients and weights without FSDP: gradients are reduced on all ranks,
    or each rank gets those of its shard, and sends back its weights.
    """
    element = bytes_of(run.precision.format)
    gradient = gradient_bytes(run)
    if not run.parallel.distributed_optimizer:
        return sum(
            links.collective(share.group, "reduce", share.elements * gradient) for share in shares
        )
    total = 0.0
    for share in shares:
        total += links.collective(share.group, "gather", share.elements * element)
        total += links.collective(share.group, "scatter", share.elements * gradient)
        total += links.collective(
            share.copies, "reduce", share.elements * gradient / share.group.size
        )
    return total


def _moved(run: RunConfig, shares: tuple[Share, ...], again: float) -> float:
    """Return the bytes that the update reads and writes, and the clearing of gradients; `again`: of
    each element on top.
    """
    p = run.parallel
    element = bytes_of(run.precision.format)
    gradient = gradient_bytes(run)
    alone = p.distributed_optimizer or p.fsdp != "none"
    updated = sum(share.elements / (share.group.size if alone else 1) for share in shares)
    spread = fsdp_shards(run, "gradients")
    cleared = (
        sum(share.elements / (share.group.size if spread else 1) for share in shares) * gradient
    )
    return (
        updated
        * (
            2 * update_bytes(run)
            + 2 * gradient
            + element * (1 + is_half(run.precision.format))
            + again
        )
        + cleared
    )


def _offloaded(run: RunConfig, shares: tuple[Share, ...]) -> float:
    """Return the seconds of an update in host memory: gradients go there, weights come back, and
    the host reads and writes its state.
    """
    part = run.optim.cpu_offload
    link = run.cluster.host_link_gbps
    if not part or link is None:
        return 0.0
    number = sum(
        s.elements / (s.group.size if run.parallel.distributed_optimizer else 1) for s in shares
    )
    moved = bytes_of("fp32") + bytes_of(run.precision.format)
    updated = 2 * (update_bytes(run) + bytes_of("fp32"))
    return part * number * (moved / (link * GIGA) + updated / HOST_UPDATE)


def update_bytes(run: RunConfig) -> int:
    """Return the bytes of an element's main weight and moments."""
    return main_weight_bytes(run) + sum(
        map(bytes_of, OPTIMIZERS[run.optim.name].states(run).values())
    )
