"""The weights of data-parallel replicas, compared by checksums."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from mtrain.errors import DeviceFault
from mtrain.mcore import api as mcore
from mtrain.mcore.state.local_params import local_params
from mtrain.train.hooks.base import Hook
from mtrain.train.loop.context import TrainContext
from mtrain.units import number_of
from mtrain.world.heartbeat import begin_phase, waiting
from mtrain.world.init import World

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of a number -> the integers that its bits are read as."""
NAMED = 3
"""Tensors that a message names."""


@dataclass(frozen=True)
class Difference:
    """A difference between replicas."""

    ranks: list[int]
    """Ranks that differ from a majority; without one, all ranks of the group."""
    others: list[int]
    """Ranks of the majority; empty: there is none."""
    tensors: list[int]
    """Numbers of the tensors that differ."""


class Replicas(Hook):
    """A comparison of the weights of replicas every `resilience.replica_check_interval` steps.

    Replicas are the ranks of a data-parallel group, context-parallel ones included, and for weights
    of experts those of an expert-data-parallel group. In a healthy run their weights are the same
    bits. The device adds up each tensor as integers, which any flipped bit changes, and one small
    all-reduce shows whether all ranks have the same sums.

    They are compared after backward: the gather of a distributed optimizer, which comes after the
    update, would write over a bit that flipped meanwhile.
    """

    collective = True

    def __init__(self, interval: int) -> None:
        """Compare after each `interval` steps."""
        self.interval = interval

    def before_update(self, context: TrainContext) -> None:
        """Compare at the interval the weights that the step has used.

        Raises:
            DeviceFault: replicas differ; the same on every rank.
        """
        step = context.state.step + 1
        if step % self.interval:
            return
        found = compared(context, step)
        if found is not None:
            rank, text = found
            raise DeviceFault.of(f"step {step}: {text}; nothing of this step is saved", rank)


def compared(context: TrainContext, step: int) -> tuple[int | None, str] | None:
    """Compare the weights of all replicas, on all ranks together.

    Returns:
        None if they are equal; otherwise the rank at fault, if a majority names one, and a
        sentence. The same on every rank.
    """
    begin_phase("comparing replicas")
    with torch.no_grad():
        problems = [
            _problem(context.world, step, kind, group, weights)
            for kind, group, weights in _replicated(context)
        ]
    # Ranks of other groups have to end, too, and for the same reason.
    found = context.world.first_problem(next(filter(None, problems), ""))
    if not found:
        return None
    rank, text = found.split("\n")
    return int(rank) if rank else None, text


def _replicated(
    context: TrainContext,
) -> Iterator[tuple[str, dist.ProcessGroup, dict[str, torch.Tensor]]]:
    """Yield the weights of this rank by the group of ranks that have the same ones."""
    dense: dict[str, torch.Tensor] = {}
    experts: dict[str, torch.Tensor] = {}
    chunks = context.state.chunks
    for number, chunk in enumerate(chunks):
        place = f"chunk {number} " if len(chunks) > 1 else ""
        for own in local_params(chunk):
            # megatron-core's mark of weights that only expert-data-parallel ranks share
            kind = dense if getattr(own.param, "allreduce", True) else experts
            kind[f"{place}{own.name}"] = own.weight
    state = mcore.parallel_state
    yield "dense", state.get_data_parallel_group(with_context_parallel=True), dense
    if experts:
        yield "experts", state.get_expert_data_parallel_group(), experts


def _problem(
    world: World, step: int, kind: str, group: dist.ProcessGroup, weights: dict[str, torch.Tensor]
) -> str:
    """Return the rank at fault and a sentence, if the replicas of a group differ; otherwise ""."""
    if dist.get_world_size(group) == 1 or not weights:
        return ""
    sums = torch.stack([checksum(weight) for weight in weights.values()])
    # The largest complement is that of the smallest sum: one all-reduce finds both.
    bounds = torch.cat([sums, ~sums])
    with waiting():
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
        if torch.equal(bounds[: len(sums)], ~bounds[len(sums) :]):
            return ""
        rows = [torch.empty_like(sums) for _ in range(dist.get_world_size(group))]
        dist.all_gather(rows, sums, group=group)
    ranks = dist.get_process_group_ranks(group)
    found = difference([row.tolist() for row in rows])
    machines = _machines(world, f"replicas/{step}/{kind}", ranks)
    names = list(weights)
    found = replace(
        found,
        ranks=[ranks[place] for place in found.ranks],
        others=[ranks[place] for place in found.others],
    )
    at_fault = found.ranks[0] if found.others and len(found.ranks) == 1 else ""
    return f"{at_fault}\n{in_words(found, machines, [names[number] for number in found.tensors])}"


def checksum(weight: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's numbers, their bits read as integers (int64 scalar).

    Integers add up to the same in any order, and one flipped bit changes the sum.
    """
    return weight.view(INTEGERS[weight.element_size()]).sum(dtype=torch.int64)


def difference(rows: Sequence[Sequence[int]]) -> Difference:
    """Return how the rows of sums differ: a row for each rank, a column for each tensor.

    For each tensor a majority of the ranks decides. Without one, as with two ranks, all differ.
    """
    ranks = range(len(rows))
    wrong: set[int] = set()
    tensors = []
    for number, column in enumerate(zip(*rows, strict=True)):
        usual, count = Counter(column).most_common(1)[0]
        if count == len(rows):
            continue
        tensors.append(number)
        wrong |= {rank for rank in ranks if column[rank] != usual or 2 * count <= len(rows)}
    return Difference(sorted(wrong), [rank for rank in ranks if rank not in wrong], tensors)


def in_words(found: Difference, machines: dict[int, str], tensors: Sequence[str]) -> str:
    """Return a sentence about a difference, without its step."""
    who = " and ".join(f"rank {rank} on {machines[rank]}" for rank in found.ranks)
    more = len(tensors) - NAMED
    names = ", ".join(tensors[:NAMED])
    where = f"{names} and {number_of(more, 'more tensor')}" if more > 0 else names
    if found.others:
        right = ", ".join(map(str, found.others))
        return f"the weights of {who} differ from those of its replicas, ranks {right}: {where}"
    return f"the weights of the replicas {who} differ, and no majority says which is right: {where}"


def _machines(world: World, key: str, ranks: Sequence[int]) -> dict[int, str]:
    """Return the machine of each rank of a group; all of them call this."""
    world.store.set(f"{key}/{world.rank}", platform.node())
    return {rank: world.store.get(f"{key}/{rank}").decode() for rank in ranks}
