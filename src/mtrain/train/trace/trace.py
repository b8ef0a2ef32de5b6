"""One step of one rank without its memory: the training program on tensors that only have shapes.

Model, data parallelism, optimizer and pipeline schedule are those of a run, built in a fake world.
The recorder observes the program itself: no formula is involved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from unittest import mock

import torch

from mtrain.ckpt.state import TrainState
from mtrain.config.machine.devices import CPU
from mtrain.config.schema.run import RunConfig
from mtrain.mcore.adapter.fake_patches import fake_patches
from mtrain.mcore.layers import linear
from mtrain.mcore.state.fsdp import flat_buffers
from mtrain.mcore.state.optimizer_state import inner_optimizers, offloading, state_shards
from mtrain.plan.order import most_in_flight
from mtrain.plan.rank import stage_memories
from mtrain.plan.shrink import portable
from mtrain.train.assemble import assemble, splits_of
from mtrain.train.loop import step as steps
from mtrain.train.loop.dynamic import run_documents
from mtrain.train.loop.prefetch import Batch, to_device
from mtrain.train.trace.recorder import HOST, Recorder
from mtrain.world.fake_world import silent_world


@dataclass(frozen=True)
class Traced:
    """The recorded step of a rank."""

    run: RunConfig
    """The run that was traced."""
    rank: int
    stage: int
    microbatches: int
    """Micro-batches of the step: enough that more would not raise the peak."""
    recorder: Recorder


def trace(run: RunConfig, rank: int) -> Traced:
    """Return a step of rank `rank` of a resolved run, with the portable kernels.

    Raises:
        ValueError: the layout has no such rank.
    """
    run = portable(run)
    recorder = Recorder()
    with silent_world(run, rank, torch.device(CPU.name)) as world, fake_patches():
        splits = splits_of(run)
        with recorder.recording():
            context = assemble(run, world, splits, drawn=False)
            recorder.name(context.state.chunks)
            _watch_host(recorder, context)
            # The first update allocates the optimizer's state.
            steps.update(context.state, run.optim.schedule_counts)
            if context.state.critic is not None:
                steps.update(context.state.critic, run.optim.schedule_counts)
            # Megatron FSDP updates nothing before there is a gradient, so its state is allocated.
            if run.parallel.fsdp == "megatron":
                for shard in state_shards(context.state.chunks, context.state.optimizer):
                    shard.allocate()
            _declare(recorder, context)
        stage = world.coords["pp"]
        number = microbatches(run, stage)
        read = context.train_data.microbatches(0, number * run.trainer.micro * world.grid.dp)
        batches = [to_device(cast(Batch, batch), world) for batch in read]
        with recorder.recording():
            _step(recorder, context, batches)
        return Traced(run, rank, stage, number, recorder)


def microbatches(run: RunConfig, stage: int) -> int:
    """Return the fewest micro-batches with which a rank of a stage has as much in flight as with
    all micro-batches of a step.
    """
    p = run.parallel
    every = run.micro_batches
    # The documents of a rank are chosen among all documents of a step, and a teacher reads all of
    # them before.
    if p.hybrid_context_parallel or run.objective.distils:
        return every
    # 1F1B: pp - stage micro-batches are in flight; one more shows that the peak is reached.
    if p.vpp == 1:
        return min(every, p.pp - stage + 1)
    group = p.microbatch_group_size_per_vp_stage or p.pp
    kept = stage_memories(run)[stage].kept
    most = most_in_flight(run, stage, kept, every)[0]
    enough = (
        number
        for number in range(group, every, group)
        if most_in_flight(run, stage, kept, number)[0] == most
    )
    return next(enough, every)


def _declare(recorder: Recorder, context: steps.TrainContext) -> None:
    """Declare what exists before a step: weights, gradients, the optimizer's state."""
    for state in filter(None, (context.state.critic, context.state)):
        _declare_of(recorder, state)
    recorder.settle()


def _declare_of(recorder: Recorder, state: TrainState) -> None:
    states: list[torch.Tensor] = []
    # Flat buffers come first: the weights that a chunk lists may be the main weights.
    for chunk in state.chunks:
        for group in flat_buffers(chunk):
            for part, tensors in group.items():
                recorder.declare(part, tensors)
    weights = [parameter for chunk in state.chunks for parameter in chunk.parameters()]
    recorder.declare("weights", weights)
    held = (*state.reference, *state.teacher)
    frozen = [weight for chunk in held for weight in chunk.parameters()]
    recorder.declare("weights", frozen)
    gradients = [getattr(weight, "main_grad", None) for weight in weights]
    recorder.declare("gradients", [g for g in gradients if isinstance(g, torch.Tensor)])
    for inner in inner_optimizers(state.optimizer):
        # Main weights are parameters of the optimizer, moments are its state.
        states += [weight for group in inner.param_groups for weight in group["params"]]
        states += [
            t for kept in inner.state.values() for t in kept.values() if isinstance(t, torch.Tensor)
        ]
    # These optimizers hold copies of main weights that are on the device.
    for leaf in offloading(state.optimizer):
        states += [weight for group in leaf.param_groups for weight in group["params"]]
        recorder.declare(HOST, [*leaf.cpu_copys_map_gpu_param, *leaf.cpu_copy_map_grad.values()])
    recorder.declare("optimizer", states)


def _watch_host(recorder: Recorder, context: steps.TrainContext) -> None:
    """Count storages that an optimizer in host memory makes as host memory."""

    def on_host(value: bool) -> Callable[..., None]:
        return lambda *_: setattr(recorder, "on_host", value)

    for leaf in offloading(context.state.optimizer):
        for inner in leaf.cpu_optimizers:
            inner.register_step_pre_hook(on_host(True))
            inner.register_step_post_hook(on_host(False))


def _step(recorder: Recorder, context: steps.TrainContext, batches: list[steps.Batch]) -> None:
    around = partial(
        _watched, recorder, {id(chunk): number for number, chunk in enumerate(context.state.chunks)}
    )
    for chunk in context.state.chunks:
        chunk.zero_grad_buffer()
    context.state.optimizer.zero_grad()
    batches = list(steps.taught(context, steps.scored(context, batches)))
    with recorder.saving(), _own_attributes(context):
        if context.schedule is not None:
            run_documents(context, batches, forward_only=False, around=around)
        else:
            steps.run_pipeline(
                context,
                batches,
                forward_only=False,
                forward=around(partial(steps.forward_step, context.objective)),
            )
    recorder.phase = "optimizer"
    recorder.at = (-1, 0)
    steps.update(context.state, context.run.optim.schedule_counts)
    recorder.phase = ""
    if context.critic is not None:
        context.critic.learn(batches, context.state.step + 1)


def _watched(recorder: Recorder, places: dict[int, int], forward: steps.Forward) -> steps.Forward:
    """Return a forward that is recorded as that of a micro-batch of a chunk."""
    counts = [0] * len(places)

    def watched(iterator: Iterator[steps.Batch], model: Any) -> tuple[torch.Tensor, Any]:
        chunk = places.get(id(model), 0)
        recorder.phase = "forward"
        recorder.at = (counts[chunk], chunk)
        counts[chunk] += 1
        try:
            return forward(iterator, model)
        finally:
            recorder.phase = ""

    return watched


@contextmanager
def _own_attributes(context: steps.TrainContext) -> Iterator[None]:
    """Return weights' attributes after gradients are added: autograd's hook drops them."""
    weights = {
        _place(weight): weight for chunk in context.state.chunks for weight in chunk.parameters()
    }

    def parameter_of(weight: Any) -> Any:
        return weights[_place(weight)]

    with mock.patch.object(linear, "parameter_of", parameter_of):
        yield


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())
