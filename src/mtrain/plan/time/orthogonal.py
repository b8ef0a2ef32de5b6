"""What it takes to orthogonalise matrices (muon): Newton-Schulz steps, and what ranks send each other for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import prod

from mtrain.config.formats import bytes_of
from mtrain.config.optimizers import OPTIMIZERS
from mtrain.config.run import RunConfig
from mtrain.config.stages import Stage
from mtrain.layout.grid import RankGrid
from mtrain.models.graph import FP32, Exchange, Product
from mtrain.models.registry import family_of
from mtrain.plan.states import stage_weights
from mtrain.plan.time.device import Device
from mtrain.plan.time.efficiencies import Efficiencies
from mtrain.plan.time.kernels import Kernels
from mtrain.plan.time.links import Group, Links
from mtrain.plan.time.work import Linear

TOGETHER = 1 << 24
"""Elements of matrices of one shape in one product, as `BATCH` of `mtrain_kernels.optimizer.muon`."""
SQUARES, WIDES = 7, 5
"""Times that a step reads or writes the square of a matrix, and the matrix: sums that products do not make."""
AROUND = 9 * FP32
"""Bytes of an element that is stacked, brought to norm one, and scaled, in fp32 one after the other."""


@dataclass(frozen=True)
class Matrix:
    """A weight that is orthogonalised, and how ranks share it."""

    shape: tuple[int, ...]
    """Of a rank's part."""
    parts: tuple[tuple[int, int], ...]
    """Rows and columns of what is orthogonalised, gathered as far as the update gathers it."""
    expert: bool
    gathered: bool

    @property
    def work(self) -> int:
        """What ranks share matrices by, as `mtrain.mcore.muon` does."""
        return prod(self.shape) * min(self.shape)


def matrices_of(run: RunConfig, held: Iterable[Stage]) -> Counter[Matrix]:
    """Those of the (virtual) stages of a rank; none where the optimizer orthogonalises nothing."""
    optimizer, family, found = OPTIMIZERS[run.optim.name], family_of(run.model), Counter[Matrix]()
    if optimizer.orthogonal is None or family.weights is None:
        return found
    p, how = run.parallel, optimizer.orthogonal(run)
    alone = p.model_copy(update={"tp": 1, "etp": 1}) if how.whole else p
    for stage in held:
        pairs = zip(stage_weights(run, stage), family.weights(run.model, alone, stage), strict=True)
        for weight, whole in pairs:
            parts = () if weight.frozen else how.matrices(weight.name, whole.shape)
            if parts:
                found[Matrix(weight.shape, parts, weight.expert, weight.shape != whole.shape)] += 1
    return found


def orthogonal_seconds(
    run: RunConfig, grid: RankGrid, matrices: Mapping[Matrix, int], device: Device, reached: Efficiencies
) -> float:
    """Of the rank that has the most to do.

    Under the distributed optimizer each matrix belongs to one of the data-parallel ranks that share its state (with
    replicas, those of one of them): its momentum goes there, and its update comes back. Every tensor-parallel rank
    gathers its matrices whole, unless each takes its own block.
    """
    total, kinds = 0.0, {(one.expert, len(one.parts)) for one in matrices}
    for expert, parts in kinds:
        of = {one: n for one, n in matrices.items() if (one.expert, len(one.parts)) == (expert, parts)}
        copies = grid.edp if expert else grid.dp * grid.cp
        ranks = copies // run.parallel.hsdp_replicas if run.parallel.distributed_optimizer else 1
        total += max(_seconds(run, owned, device, reached) for owned in shared_out(of, ranks))
        if ranks > 1:
            size = sum(prod(one.shape) * n for one, n in of.items()) * FP32 // ranks
            sharing = Group(ranks, grid.etp * grid.ep if expert else grid.tp)
            total += 2 * Links(device, reached).seconds(sharing, Exchange("ep", "all_to_all", size))
    return total


def shared_out(matrices: Mapping[Matrix, int], ranks: int) -> set[frozenset[tuple[Matrix, int]]]:
    """What each rank orthogonalises, the longest first to who has the least; ranks with the same are one."""
    if ranks == 1:
        return {frozenset(matrices.items())}
    loads, owned = [(0, rank) for rank in range(ranks)], [Counter[Matrix]() for _ in range(ranks)]
    heapify(loads)
    for one, number in sorted(matrices.items(), key=lambda item: -item[0].work):
        for _ in range(number):
            load, rank = loads[0]
            heapreplace(loads, (load + one.work, rank))
            owned[rank][one] += 1
    return {frozenset(one.items()) for one in owned}


def _seconds(run: RunConfig, owned: Iterable[tuple[Matrix, int]], device: Device, reached: Efficiencies) -> float:
    """Of one rank's matrices."""
    orthogonal, p, links = OPTIMIZERS[run.optim.name].orthogonal, run.parallel, Links(device, reached)
    assert orthogonal is not None
    how = orthogonal(run)
    kernels = Kernels(device, reached, how.format, how.format, how.format, bytes_of(how.format))
    total = 0.0
    for one, number in owned:
        for rows, columns in one.parts:
            total += _steps(how.steps, number, rows, columns, kernels)
        if one.gathered:
            size = sum(rows * columns for rows, columns in one.parts) * FP32
            ranks = Group(p.etp or p.tp if one.expert else p.tp, 1)
            total += number * links.seconds(ranks, Exchange("tp", "gather", size))
    return total


def _steps(steps: int, number: int, rows: int, columns: int, kernels: Kernels) -> float:
    """Of matrices of one shape: X X^T, the square of that, and its product with X, `steps` times."""
    short, long = sorted((rows, columns))
    batch = min(number, max(1, TOGETHER // (short * long)))
    shapes = (short, short, long), (short, short, short), (short, long, short)
    each = sum(kernels.linear(Linear(Product(*shape, batch), low=False, grouped=False)) for shape in shapes)
    moved = steps * (SQUARES * short + WIDES * long) * short * kernels.element + (AROUND + 2 * kernels.element) * (
        short * long
    )
    return number * (steps * each / batch + kernels.moved(moved))
