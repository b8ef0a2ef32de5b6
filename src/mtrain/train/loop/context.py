"""The parts of a training run on one rank, shared by its steps and hooks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import torch

from mtrain.ckpt.state import TrainState
from mtrain.config.resolve.batches import Stage, samples_of, size_after, stages
from mtrain.config.schema.run import RunConfig
from mtrain.data.batch import GlobalBatches
from mtrain.goodput.meter import Meter
from mtrain.mcore import api as mcore
from mtrain.mcore.adapter.cuda_graphs import whole_steps
from mtrain.mcore.layers.routes import Layers
from mtrain.train.loop.interruptions import ByTime, StopRequest
from mtrain.train.loop.prefetch import Batch, BatchPrefetcher, Needs, Place, Ring, needs_of
from mtrain.train.loop.readings import Board, Flops, MetricTable, may_pad
from mtrain.train.loop.result import StepResult
from mtrain.train.objectives import Objective, objective_of
from mtrain.world.init import World

Measure = Callable[["TrainContext", StepResult], dict[str, float]]


class Moments:
    """The moments of a run at which hooks act: no hooks, unless a trainer sets them."""

    def call(self, moment: str, context: TrainContext, *args: object, **kwargs: object) -> None:
        """Call a moment of every hook, in order."""

    def log(self, context: TrainContext, step: int, metrics: Mapping[str, Any]) -> None:
        """Give the metrics of a step, or of an evaluation after it, to every hook."""
        self.call("log", context, step, metrics)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the hooks that have one, by name."""
        return {}


class Stopped(Exception):
    """A rank got a request to stop while the samples of a step were made; it was not begun."""


class Feed(Protocol):
    """A source of micro-batches; see `BatchPrefetcher`."""

    waited_s: float

    def take(self, consumed: int, size: int) -> Sequence[Batch]: ...

    def read_for(self, dp_rank: int, consumed: int, size: int) -> Sequence[Batch]: ...

    def expect(self, consumed: int, size: int) -> None: ...

    def close(self) -> None: ...


@dataclass
class TrainContext:
    """The model, data and state of a run on this rank, which all steps share."""

    run: RunConfig
    world: World
    state: TrainState
    train_data: GlobalBatches
    valid_data: GlobalBatches | None
    schedule: Callable[..., list[torch.Tensor]] | None = None
    """A function that runs the micro-batches of a step, with the arguments of `run_schedule`; None:
    the pipeline of `run_pipeline`.
    """
    compute: Callable[..., list[torch.Tensor]] | None = None
    """A function that computes the gradients of a step, with the arguments of `step.gradients`;
    None: that one.
    """
    prepare: Callable[[TrainContext], None] | None = None
    """A function that all ranks call once before they read the first sample, with the weights that
    the run begins with.
    """
    feed: Callable[[TrainContext], Feed] | None = None
    """A function that returns the source of training samples; None: a `BatchPrefetcher`."""
    critic: Critic | None = None
    """The critic of an objective that has one."""
    tokenizer: Path | None = None
    """The `tokenizer.json` of answers that are sampled."""
    valid_answers: Callable[[TrainContext], Mapping[str, float] | None] | None = None
    """A function that samples and judges answers to the validation split, in the place of a loss;
    it returns their metrics, and None if a rank has a request to stop.
    """
    routes: Layers | None = None
    """Layers whose routers get the experts that a sampler recorded; None: all choose themselves."""
    stop: StopRequest = field(default_factory=StopRequest)
    """Requests to stop that this rank got."""
    stops: bool = False
    """All ranks know of a request to stop: the run ends here."""
    hooks: Moments = field(default_factory=Moments)
    """Set by the trainer."""
    meter: Meter = field(default_factory=Meter)
    """The clock of the causes of `goodput`."""
    profiled: range = range(0)
    """The steps of the last profile: their times are not those of other steps."""
    measures: list[Measure] = field(default_factory=list)
    """Functions that add to the record of a step; hooks append theirs in `start`."""

    @property
    def stop_requested(self) -> bool:
        """Return whether this rank got a request to stop."""
        return self.stop.requested

    @property
    def times_own(self) -> bool:
        """Return whether the time is counted in which ranks work themselves in the next step."""
        every = self.run.resilience.straggler_interval
        # Each collective takes two events of the device, which one step in a while can afford.
        return every is not None and (
            not self.world.device.runs_ahead or (self.state.step + 1) % every == 0
        )

    @cached_property
    def by_time(self) -> ByTime:
        """Return the clock of everything that happens every so many minutes."""
        return ByTime(self.run)

    @cached_property
    def objective(self) -> Objective:
        """Return the objective that the run minimises."""
        return objective_of(self.run)

    @cached_property
    def table(self) -> MetricTable:
        """Return the metrics that ranks add up in each step."""
        return MetricTable(self.objective.metrics())

    @cached_property
    def board(self) -> Board:
        """Return the host memory that the numbers of steps are copied to."""
        # one number more than metrics: the norm of a gradient that the host did not wait for
        return Board(self.world.device, len(self.table) + 1)

    @cached_property
    def valid_ring(self) -> Ring | None:
        """Return the host memory that samples of evaluations are copied from."""
        return Ring.of(self.world.device, self.run.data.prefetch)

    @cached_property
    def batch_sizes(self) -> tuple[Stage, ...]:
        """Return samples per step, from the samples that are consumed."""
        return stages(self.run)

    @cached_property
    def flops(self) -> Flops:
        """Return the counter of the model FLOPs of documents."""
        return Flops(self.run)

    def needs(self, data: GlobalBatches) -> Needs:
        """Return the parts of samples that the stages of this rank read."""
        return needs_of(self.run, self.state.chunks, padded=data.pads or may_pad(self.run))

    @cached_property
    def prefetcher(self) -> Feed:
        """Return the source of the training samples."""
        if self.prepare is not None:
            self.prepare(self)
        if self.feed is not None:
            return self.feed(self)
        plan = self.batch_sizes
        end = samples_of(plan, self.run.trainer.steps)
        prefetch = self.run.data.prefetch
        ring = Ring.of(self.world.device, prefetch)
        following = partial(next_step, plan, end)
        # Intermediate stages read almost nothing: their thread would wake for no data.
        needs = self.needs(self.train_data)
        return BatchPrefetcher(self.train_data, self.world, needs, following, prefetch, ring)

    @cached_property
    def pipeline(self) -> Callable[..., Any]:
        """Return megatron-core's schedule of micro-batches, captured as one CUDA graph if the run
        asks for whole steps.
        """
        schedule = mcore.get_forward_backward_func()
        steps = self.run.trainer.cuda_graph_warmup_steps
        if self.run.trainer.cuda_graph_impl == "full_iteration" and steps is not None:
            return whole_steps(schedule, steps)
        return schedule  # type: ignore[no-any-return]

    def begin(self) -> None:
        """Begin to read samples for the next step."""
        consumed = self.state.consumed_samples
        if self.state.step < self.run.trainer.steps:
            self.prefetcher.expect(consumed, size_after(self.batch_sizes, consumed))

    def close(self) -> None:
        """End the thread that prefetches samples, if it was started."""
        if "prefetcher" in self.__dict__:
            self.prefetcher.close()


def next_step(plan: Sequence[Stage], end: int, place: Place) -> Place | None:
    """Return the step after the one at `place`, or None if that was the last before `end`."""
    consumed = sum(place)
    return (consumed, size_after(plan, consumed)) if consumed < end else None


@dataclass
class Critic(TrainContext, ABC):
    """A second model that is trained with the policy; see `train.critic_model`."""

    @abstractmethod
    def values(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        """Return the value before each label [b, s] of micro-batches on the last stage; elsewhere
        nothing.
        """

    @abstractmethod
    def learn(self, batches: Sequence[Batch], step: int) -> None:
        """Make one update from the micro-batches of a step."""
