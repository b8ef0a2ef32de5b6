"""The cost of updating matrices whole (muon, soap): their products, and the messages between
ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

from mtrain.config.engine.formats import bytes_of
from mtrain.config.schema.optimizer import Orthogonal, Rotated
from mtrain.config.schema.run import RunConfig
from mtrain.layout.grid import RankGrid
from mtrain.models.graph import FP32, Exchange, Product
from mtrain.plan.time.device import Device
from mtrain.plan.time.efficiencies import Efficiencies
from mtrain.plan.time.kernels import Kernels
from mtrain.plan.time.links import Group, Links
from mtrain.plan.time.work import Linear
from mtrain.plan.weights import Matrix, shared_out, update_of

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
    """Return the seconds of matrices of one shape: X X^T, the square of that, and its product with
    X, `steps` times.
    """
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
