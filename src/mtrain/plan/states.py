"""The weights of a stage on a rank, their gradients and optimizer state, with the padding that
megatron-core's buffers have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace
from math import lcm

from mtrain.config.engine.formats import bytes_of, is_half
from mtrain.config.optimizers import OPTIMIZERS
from mtrain.config.resolve.stages import Stage
from mtrain.config.schema.optimizer import Orthogonal, Rotated
from mtrain.config.schema.run import RunConfig
from mtrain.layout.grid import RankGrid, held_stages, owners
from mtrain.models.registry import family_of
from mtrain.models.weights import Weight
from mtrain.plan.critic import critic_of
from mtrain.plan.teacher import other_model_of

# For the distributed optimizer megatron-core pads the start of a weight to a multiple of START
# elements and the end of a bucket to one of END, or of END_OF_LARGE for NCCL's bandwidth.
START = 64
END = 128
END_OF_LARGE = 1 << 16
# megatron-core's default size of a bucket is the larger of 40 million elements and one million
# per data-parallel rank.
SMALLEST_BUCKET = 40_000_000
BUCKET_PER_RANK = 1_000_000
# An optimizer in eight bits keeps one scale in fp32 for each block of 128 moments.
SCALED = 128
SCALE_BYTES = 4


@dataclass(frozen=True)
class Bucket:
    """Weights that are reduced in one call."""

    start: int
    end: int
    weights: tuple[tuple[int, Weight], ...]
    """Weights, each with its first element in the bucket."""


@dataclass(frozen=True)
class States:
    """The state of one rank, in bytes."""

    run: RunConfig
    weights: tuple[Weight, ...]
    buckets: tuple[tuple[Bucket, int], ...]
    """Buckets, each with the number of ranks that it is sharded over."""
    matrices: tuple[tuple[Weight, Matrix], ...] = ()
    """Weights whose update needs the whole matrix, in the order of the buckets."""
    teacher: int = 0
    """Elements of the weights of a teacher or a model of rewards."""
    critic: States | None = None
    """The state of a critic."""

    @cached_property
    def numbers(self) -> Counter[str]:
        """Return the parameters by kind."""
        found: Counter[str] = Counter()
        for weight in self.weights:
            found[weight.kind] += weight.numel
        return found

    def _trained(self, what: str) -> int:
        """Return the elements of a rank's part of the trained weights; experts have fewer copies to
        shard than other weights.
        """
        sharded = fsdp_shards(self.run, what)
        return sum(
            -(-(bucket.end - bucket.start) // (ranks if sharded else 1))
            for bucket, ranks in self.buckets
        )

    @property
    def _frozen(self) -> int:
        return sum(weight.numel for weight in self.weights if weight.frozen)

    @cached_property
    def weight_bytes(self) -> int:
        """Return the bytes of weights, with those of a critic and of frozen models."""
        held = self._trained("weights") + self._frozen
        if self.run.objective.copies:
            held += sum(weight.numel for weight in self.weights)
        critic = 0 if self.critic is None else self.critic.weight_bytes
        return (held + self.teacher) * bytes_of(self.run.precision.format) + critic

    @cached_property
    def gradient_bytes(self) -> int:
        """Return the bytes of gradients."""
        precision = self.run.precision
        each = bytes_of("fp32" if precision.grad_reduce_in_fp32 else precision.format)
        critic = 0 if self.critic is None else self.critic.gradient_bytes
        return self._trained("gradients") * each + critic

    def optimizer_bytes(self, data_rank: int = 0) -> int:
        """Return the bytes of main weights and moments, for a rank of the data-parallel group.

        Offloaded moments are in host memory: megatron-core keeps main weights on the device.
        """
        total = 0.0
        p = self.run.parallel
        on_device = 1 - self.run.optim.cpu_offload
        sharded = fsdp_shards(self.run, "optimizer")
        main = main_weight_bytes(self.run)
        for bucket, ranks in self.buckets:
            parts = ranks if p.distributed_optimizer else 1
            share = (bucket.end - bucket.start) // parts
            first = bucket.start + data_rank % parts * share
            held = 0.0
            for start, weight in bucket.weights:
                here = min(first + share, start + weight.numel) - max(first, start)
                if here > 0:
                    held += here * main + _moments(self.run, weight, here) * on_device
            total += -(-held // ranks) if sharded else held
        critic = 0 if self.critic is None else self.critic.optimizer_bytes(data_rank)
        return round(total) + self._factors[data_rank % len(self._factors)] + critic

    @property
    def most_optimizer_bytes(self) -> int:
        """Return the bytes of the data-parallel rank with the most: ranks differ in the factors of
        whole matrices.
        """
        more = max(self._factors) - self._factors[0]
        if self.critic is not None:
            more += self.critic.most_optimizer_bytes - self.critic.optimizer_bytes()
        return self.optimizer_bytes() + more

    @cached_property
    def _factors(self) -> list[int]:
        """Return by rank the bytes of the factors of whole matrices, each with one of the ranks
        that share the state.
        """
        how = update_of(self.run)
        p = self.run.parallel
        grid = RankGrid.of(self.run)
        kinds = {False: grid.dp * grid.cp, True: grid.edp}
        found = [0] * max(kinds.values())
        if how is None:
            return found
        for expert, every in kinds.items():
            some = [one for _, one in self.matrices if one.expert == expert]
            ranks = max(1, every // p.hsdp_replicas) if p.distributed_optimizer else 1
            held = [0] * ranks
            for one, owner in zip(
                some, owners([how.work(one.shape) for one in some], ranks), strict=True
            ):
                held[owner] += factor_bytes(how, one)
            found = [size + held[rank % ranks] for rank, size in enumerate(found)]
        return found


def rank_states(run: RunConfig, stage: int) -> States:
    """Return the state of a rank of pipeline stage `stage`; the same on all of them.

    Raises:
        ValueError: the family of the model does not say which weights a stage has.
    """
    every = list[Weight]()
    buckets = list[tuple[Bucket, int]]()
    whole = list[tuple[Weight, Matrix]]()
    grid = RankGrid.of(run)
    copies = run.parallel.hsdp_replicas
    size = bucket_size(run, grid, stage)
    for held in held_stages(run)[stage]:
        weights = stage_weights(run, held)
        every += weights
        whole += reversed(list(matrices(run, held)))
        for expert, ranks in ((False, grid.dp * grid.cp), (True, grid.edp)):
            chosen = [w for w in weights if w.expert == expert and not w.frozen]
            buckets += [
                (b, max(1, ranks // copies))
                for b in buckets_of(run, chosen, max(1, ranks // copies), size)
            ]
    teacher = other_model_of(run)
    taught = 0
    if teacher is not None:
        chunks = held_stages(teacher)[stage]
        taught = sum(weight.numel for held in chunks for weight in stage_weights(teacher, held))
    critic = critic_of(run)
    judging = None if critic is None else rank_states(critic, stage)
    return States(run, tuple(every), tuple(buckets), tuple(whole), taught, judging)


def bucket_size(run: RunConfig, grid: RankGrid, stage: int) -> int | None:
    """Return the elements of a bucket; None: all are in one."""
    p = run.parallel
    if not p.overlap_grad_reduce or stage:
        return None
    return p.ddp_bucket_size or max(SMALLEST_BUCKET, BUCKET_PER_RANK * grid.dp)


def buckets_of(
    run: RunConfig, weights: Sequence[Weight], ranks: int, size: int | None
) -> Iterator[Bucket]:
    """Yield a buffer of weights, the last first, cut into buckets as megatron-core's
    `_ParamAndGradBuffer` cuts it.
    """
    p = run.parallel
    padded = bool(p.distributed_optimizer)
    multiple = lcm(ranks, END, END_OF_LARGE if p.ddp_pad_buckets_for_high_nccl_busbw else 1)
    start = 0
    at = 0
    held: list[tuple[int, Weight]] = []
    for weight in reversed(weights):
        at = _up(at, START) if padded else at
        alone = weight.shared and padded
        if alone and held:
            yield (bucket := _bucket(start, at, held, multiple if padded else 1))
            start = bucket.end
            at = start
            held = []
        held.append((at, weight))
        at += weight.numel
        if alone or (size is not None and at - start >= size):
            yield (bucket := _bucket(start, at, held, multiple if padded else 1))
            start = bucket.end
            at = start
            held = []
    if held:
        yield _bucket(start, at, held, multiple if padded else 1)


def _bucket(start: int, end: int, held: Sequence[tuple[int, Weight]], multiple: int) -> Bucket:
    return Bucket(start, _up(end, multiple), tuple(held))


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def state_bytes_of(run: RunConfig, weight: Weight, elements: int) -> int:
    """Return the bytes of the main weight and moments of so many elements of a weight."""
    return elements * main_weight_bytes(run) + _moments(run, weight, elements)


def _moments(run: RunConfig, weight: Weight, elements: int) -> int:
    formats = list(
        OPTIMIZERS[run.optim.name].states_of(run, weight.name, len(weight.shape)).values()
    )
    scales = -(-elements // SCALED) * SCALE_BYTES * formats.count("fp8")
    return elements * sum(map(bytes_of, formats)) + scales


def main_weight_bytes(run: RunConfig) -> int:
    """Return the bytes of a main weight, on top of its weight of 16 bits; a weight of 32 bits has
    none.
    """
    if not is_half(run.precision.format) or run.optim.main_params_dtype != "fp32":
        return 0
    return 2 if run.optim.store_param_remainders else 4


_ALONE = {"optim": ("optimizer",), "optim_grads": ("optimizer", "gradients")}


def fsdp_shards(run: RunConfig, what: str) -> bool:
    """Return whether FSDP shards weights, gradients or optimizer state."""
    p = run.parallel
    return p.fsdp != "none" and what in _ALONE.get(
        p.fsdp_sharding or "", ("optimizer", "gradients", "weights")
    )


@dataclass(frozen=True)
class Matrix:
    """A weight whose update is made of the whole, and how ranks share it."""

    shape: tuple[int, ...]
    """Shape of one rank's part."""
    parts: tuple[tuple[int, int], ...]
    """Rows and columns of each matrix, gathered as far as the update gathers it."""
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
