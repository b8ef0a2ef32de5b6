"""The weights of a stage on a rank, and which of them an update takes whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heapify, heapreplace

from mtrain.config.optimizers import OPTIMIZERS
from mtrain.config.resolve.stages import Stage
from mtrain.config.schema.optimizer import Orthogonal, Rotated
from mtrain.config.schema.run import RunConfig
from mtrain.models.registry import family_of
from mtrain.models.weights import Weight


@dataclass(frozen=True)
class Matrix:
    """A weight whose update is made of the whole, and how ranks share it."""

    shape: tuple[int, ...]
    """Shape of one rank's part."""
    parts: tuple[tuple[int, int], ...]
    """Rows and columns of what is taken for a matrix, gathered as far as the update gathers it."""
    expert: bool
    gathered: bool


def stage_weights(run: RunConfig, held: Stage) -> list[Weight]:
    """Return the weights of a (virtual) stage on one rank with their adapters, in the order in
    which the builder makes them.

    Raises:
        ValueError: the family of the model does not say which these are.
    """
    family = family_of(run.model)
    if family.weights is None:
        raise ValueError(f"the family {family.name} does not say which weights a stage has")
    weights = family.weights(run.model, run.parallel, held)
    if run.peft.kind is None:
        return list(weights)
    if family.adapted is None:
        raise ValueError(f"the family {family.name} does not say which adapters a stage has")
    return list(family.adapted(weights, run))


def update_of(run: RunConfig) -> Orthogonal | Rotated | None:
    """Return how the update treats whole matrices; None: it treats only elements."""
    whole = OPTIMIZERS[run.optim.name].whole_matrices
    return None if whole is None else whole(run)


def matrices(run: RunConfig, held: Stage) -> Iterator[tuple[Weight, Matrix]]:
    """Yield the matrices of a (virtual) stage of a rank, in the order of its weights."""
    how = update_of(run)
    family = family_of(run.model)
    p = run.parallel
    if how is None or family.weights is None:
        return
    # The shapes without tensor parallelism, to which an update of whole matrices gathers.
    alone = p.model_copy(update={"tp": 1, "etp": 1}) if how.whole else p
    for weight, whole in zip(
        stage_weights(run, held), family.weights(run.model, alone, held), strict=True
    ):
        parts = () if weight.frozen else how.matrices(weight.name, whole.shape)
        if parts:
            yield weight, Matrix(weight.shape, parts, weight.expert, weight.shape != whole.shape)


def matrices_of(run: RunConfig, held: Iterable[Stage]) -> Counter[Matrix]:
    """Return the matrices of the (virtual) stages of a rank; empty where the update treats only
    elements.
    """
    return Counter(one for stage in held for _, one in matrices(run, stage))


def factor_bytes(how: Orthogonal | Rotated, one: Matrix) -> int:
    """Return the bytes of the factors of a whole matrix, on top of the state of its elements."""
    return sum(how.factor_bytes(*part) for part in one.parts)


def shared_out(
    found: Mapping[Matrix, int], ranks: int, how: Orthogonal | Rotated
) -> set[frozenset[tuple[Matrix, int]]]:
    """Return the work of each rank, as `owners` assigns it; ranks with the same are one."""
    if ranks == 1:
        return {frozenset(found.items())}
    loads = [(0, rank) for rank in range(ranks)]
    owned = [Counter[Matrix]() for _ in range(ranks)]
    heapify(loads)
    # The largest first, each to the rank with the least work so far, as in training.
    for one, number in sorted(found.items(), key=lambda item: -how.work(item[0].shape)):
        for _ in range(number):
            load, rank = loads[0]
            heapreplace(loads, (load + how.work(one.shape), rank))
            owned[rank][one] += 1
    return {frozenset(one.items()) for one in owned}
