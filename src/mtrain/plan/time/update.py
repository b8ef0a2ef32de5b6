"""The work of each step's end: gradients and weights travel between data-parallel ranks, and
weights are updated, whole matrices or element by element; under FSDP they travel during the
computation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Literal

from mtrain.config.engine.formats import bytes_of, is_half
from mtrain.config.optimizers import OPTIMIZERS
from mtrain.config.schema.optimizer import Orthogonal, Rotated
from mtrain.config.schema.run import RunConfig
from mtrain.layout.grid import RankGrid
from mtrain.models.graph import FP32, Exchange, Product
from mtrain.plan.states import Matrix, fsdp_shards, main_weight_bytes, shared_out, update_of
from mtrain.plan.time.device import GIGA, MICRO, Device
from mtrain.plan.time.efficiencies import Efficiencies
from mtrain.plan.time.kernels import Group, Kernels, Links, Share
from mtrain.plan.time.work import Linear

# Elements of equal matrices in one batched product, as `BATCH` of
# `mtrain_kernels.optimizer.muon`.
TOGETHER = 1 << 24
# A Newton-Schulz step reads or writes the square of a matrix and the matrix so often, for sums
# outside of its products.
SQUARES = 7
WIDES = 5
# Bytes per element around the steps: stacking, normalising and scaling, each in fp32.
AROUND = 9 * FP32
# Bytes per element that Adam divides in the rotated bases, and per element of the average of
# products of a side.
TURNED = 16 * FP32
COUNTED = 3 * FP32
# FLOPs of a QR decomposition of n columns with its basis, as a share of n^3 (Golub and Van Loan,
# 5.2).
QR = 8 / 3
# Assumed: a QR decomposition reaches a tenth of the rate of products, because its own are
# narrow.
QR_RATE = 0.1


def matrix_seconds(
    run: RunConfig,
    grid: RankGrid,
    matrices: Mapping[Matrix, int],
    device: Device,
    reached: Efficiencies,
) -> float:
    """Return the seconds of the slowest rank.

    Under the distributed optimizer each matrix belongs to one of the data-parallel ranks that share
    its state (with replicas, those of one of them): its gradient goes there, and its update comes
    back. Every tensor-parallel rank gathers its matrices whole, unless each takes its own block.
    """
    how = update_of(run)
    if how is None:
        return 0.0
    total = 0.0
    kinds = {(one.expert, len(one.parts)) for one in matrices}
    for expert, parts in kinds:
        of = {
            one: n for one, n in matrices.items() if (one.expert, len(one.parts)) == (expert, parts)
        }
        copies = grid.edp if expert else grid.dp * grid.cp
        ranks = copies // run.parallel.hsdp_replicas if run.parallel.distributed_optimizer else 1
        total += max(
            _seconds(run, how, owned, device, reached) for owned in shared_out(of, ranks, how)
        )
        if ranks > 1:
            size = sum(prod(one.shape) * n for one, n in of.items()) * FP32 // ranks
            sharing = Group(ranks, grid.etp * grid.ep if expert else grid.tp)
            total += sum(how.sent) * Links(device, reached).seconds(
                sharing, Exchange("ep", "all_to_all", size)
            )
    return total


def _seconds(
    run: RunConfig,
    how: Orthogonal | Rotated,
    owned: Iterable[tuple[Matrix, int]],
    device: Device,
    reached: Efficiencies,
) -> float:
    """Return the seconds of one rank's matrices."""
    p = run.parallel
    links = Links(device, reached)
    kernels = Kernels(device, reached, how.format, how.format, how.format, bytes_of(how.format))
    total = 0.0
    for one, number in owned:
        for rows, columns in one.parts:
            if isinstance(how, Rotated):
                total += number * _rotated(how, rows, columns, kernels)
            else:
                total += _orthogonal(how.steps, number, rows, columns, kernels)
        if one.gathered:
            size = sum(rows * columns for rows, columns in one.parts) * how.sent[0] * FP32
            ranks = Group(p.etp or p.tp if one.expert else p.tp, 1)
            total += number * links.seconds(ranks, Exchange("tp", "gather", size))
    return total


def _product(kernels: Kernels, shape: tuple[int, int, int], batch: int = 1) -> float:
    return kernels.linear(Linear(Product(*shape, batch), low=False, grouped=False))


def _orthogonal(steps: int, number: int, rows: int, columns: int, kernels: Kernels) -> float:
    """Return the seconds of `steps` times X X^T, its square, and that times X."""
    short, long = sorted((rows, columns))
    batch = min(number, max(1, TOGETHER // (short * long)))
    shapes = (short, short, long), (short, short, short), (short, long, short)
    each = sum(_product(kernels, shape, batch) for shape in shapes)
    moved = steps * (SQUARES * short + WIDES * long) * short * kernels.element + (
        AROUND + 2 * kernels.element
    ) * (short * long)
    return number * (steps * each / batch + kernels.moved(moved))


def _rotated(how: Rotated, rows: int, columns: int, kernels: Kernels) -> float:
    """Return the seconds of one matrix: three rotations and an average of products for each side,
    and a share of a new basis.
    """
    total = 0.0
    moved = TURNED * rows * columns
    for n in how.sides(rows, columns):
        other = rows * columns // n
        total += 3 * _product(kernels, (n, other, n)) + _product(kernels, (n, n, other))
        cube = _product(kernels, (n, n, n))
        total += cube * (1 + QR / 2 / QR_RATE) / how.frequency
        moved += COUNTED * n * n
    return total + kernels.moved(moved)


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
    passes = run.micro_batches
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
    """Return the bytes that torch's FSDP2 reads and writes to unpack gathered weights, twice, and
    to pack gradients for their reduction; megatron-core's FSDP computes in the buffers themselves.
    """
    if run.parallel.fsdp != "fsdp2":
        return 0.0
    return sum(share.elements for share in shares if share.group.size > 1) * (
        2 * 2 * element + element + gradient
    )


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
    """Return the shares of a rank's experts and other weights, with the groups that hold them."""
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
    """Return the bytes of update and clearing of gradients; `again`: extra per element."""
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
