"""The disk of checkpoints: bytes of one, the most that exist at once; host memory of a save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm, prod

from mtrain.config.engine.formats import bytes_of
from mtrain.config.schema.base import MOST
from mtrain.config.schema.run import RunConfig
from mtrain.models.weights import Weight, expert_tensors
from mtrain.plan.critic import critic_of
from mtrain.plan.fits import is_small
from mtrain.plan.rank import StageMemory, stage_memories
from mtrain.plan.states import factor_bytes, state_bytes_of, update_of
from mtrain.units import MIB


@dataclass(frozen=True)
class Storage:
    """The checkpoints of a run on a disk."""

    first: int
    """Bytes of one."""
    further: int
    """Bytes that each further one adds: it links to frozen weights that exist already."""
    at_once: int
    """The most that exist while one more is written; those of `checkpoint.save_minutes` count as
    far as `checkpoint.keep` keeps them.
    """

    exports: int = 0
    """Bytes of all exports of `checkpoint.hf_every`, which stay; none are counted by the clock."""

    @property
    def checkpoints(self) -> int:
        """Return the bytes of all checkpoints that exist at once."""
        return self.first + (self.at_once - 1) * self.further if self.at_once else 0

    @property
    def total(self) -> int:
        """Return the bytes of checkpoints and exports."""
        return self.checkpoints + self.exports


def storage(run: RunConfig) -> Storage | None:
    """Return the disk that a resolved run needs for its checkpoints; None: it is unknown, or would
    take long to find.

    Raises:
        ValueError: stages do not fit the model.
    """
    return storage_of(run, stage_memories(run)) if is_small(run) else None


def storage_of(run: RunConfig, stages: Sequence[StageMemory]) -> Storage:
    """Return the disk that a run with these stages needs for its checkpoints: every weight once,
    and main weight, moments and factors of trained ones.
    """
    each = bytes_of(run.precision.format)
    how = update_of(run)
    frozen = 0
    trained = 0
    weights = 0
    for stage in stages:
        matrices = dict(stage.states.matrices)
        for weight in stage.states.weights:
            if is_again(stage, weight):
                continue
            number = whole(run, weight)
            weights += number * each
            if weight.frozen:
                frozen += number * each
                continue
            trained += number * each + state_bytes_of(run, weight, number)
            if how is not None and (one := matrices.get(weight)) is not None:
                trained += number // sum(map(prod, one.parts)) * factor_bytes(how, one)
    linked = frozen if run.peft.kind is not None else 0
    exported = saves(run) // (run.checkpoint.hf_every or MOST) * weights
    reference = weights if run.objective.copies else 0
    critic = critic_of(run)
    if critic is not None:
        trained += storage_of(critic, stage_memories(critic)).first
    first = trained + frozen + reference
    return Storage(first, trained + frozen - linked, at_once(run), exported)


def staged(run: RunConfig, stages: Sequence[StageMemory]) -> int:
    """Return the bytes of host memory that a rank takes for the copies of a save in the background;
    0: it saves none in this way.

    It is that of the rank with the most: the first replica, which writes whole weights.
    """
    c = run.checkpoint
    if not c.async_save or not c.saves:
        return 0
    most = max(stage.parts["weights"] + stage.parts["optimizer"] for stage in stages)
    return most if c.staging_mib is None else min(most, c.staging_mib * MIB)


def copies(run: RunConfig) -> int | None:
    """Return `staged` of a resolved run; None: it is unknown, or would take long to find.

    Raises:
        ValueError: stages do not fit the model.
    """
    return staged(run, stage_memories(run)) if is_small(run) else None


@dataclass(frozen=True)
class Replicated:
    """The local checkpoints of a machine that `checkpoint.local_replicas` copies; bytes at most."""

    part: int
    """Bytes of its part of one, which each copy sends and another one receives."""
    disk: int
    """Bytes in its `local_dir`: two parts that are being sent, the two newest, and one that is
    written; of each copy two, and one that is received.
    """


def replicated(run: RunConfig, stages: Sequence[StageMemory], whole_bytes: int) -> Replicated:
    """Return the local checkpoints of a machine, of a run whose checkpoints have `whole_bytes`."""
    ranks = -(-run.parallel.ranks // run.cluster.nodes)
    most = max(stage.parts["weights"] + stage.parts["optimizer"] for stage in stages)
    part = min(whole_bytes, ranks * most)
    return Replicated(part, part * (5 + 3 * (run.checkpoint.local_replicas or 0)))


def is_again(stage: StageMemory, weight: Weight) -> bool:
    """Return whether an earlier stage has the same table."""
    return weight.shared and stage.stage > 0


def whole(run: RunConfig, weight: Weight) -> int:
    """Return the elements of a weight over all ranks of a stage that hold a part of it."""
    p = run.parallel
    if weight.kind == "experts" or weight.expert:
        # Biases of experts count in the same way: their own expert-tensor parallelism is 1.
        return weight.numel * p.ep * expert_tensors(p)
    return weight.numel * (1 if weight.whole else p.tp)


def at_once(run: RunConfig) -> int:
    """Return the most checkpoints of a run that exist at the same time, the one that is being
    written included; 0: it saves none.
    """
    c = run.checkpoint
    if not c.saves:
        return 0
    steps = run.trainer.steps
    every = c.save_interval
    if c.keep is None:
        return max(1, saves(run))
    permanent = steps // lcm(c.keep_every, every) if c.keep_every and every else 0
    kept = c.keep + permanent + (c.keep_best is not None)
    # how often the clock saves is unknown
    return kept + 1 if c.save_minutes is not None else max(1, min(kept + 1, saves(run)))


def saves(run: RunConfig) -> int:
    """Return how often a run saves by its steps; the clock may save more often."""
    c = run.checkpoint
    steps = run.trainer.steps
    every = c.save_interval
    by_steps = steps // every if every else 0
    return by_steps + (c.save_final and not (every and steps % every == 0))
