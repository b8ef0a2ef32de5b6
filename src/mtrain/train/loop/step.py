"""One optimizer step and one evaluation, through megatron-core's pipeline schedules."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from mtrain_kernels.fp8_linear.op import weights_leave, weights_stay

from mtrain.ckpt.state import TrainState, generators_kept
from mtrain.config.resolve.batches import Stage, samples_of, size_after, stages
from mtrain.config.schema.run import RunConfig
from mtrain.data.batch import GlobalBatches, MicroBatch
from mtrain.mcore import api as mcore
from mtrain.mcore.adapter.cuda_graphs import whole_steps
from mtrain.mcore.layers.balance import ROUTER_LOSS_SHARE
from mtrain.mcore.layers.padding import padding_is
from mtrain.mcore.models.language_model import FURTHER_LOSS_SHARES
from mtrain.mcore.state.optimizer_state import loss_scale
from mtrain.mcore.state.sharding import gathered
from mtrain.models.registry import family_of
from mtrain.train.loop.interruptions import ByTime, StopRequest
from mtrain.train.loop.prefetch import (
    DOCUMENTS,
    Batch,
    Feed,
    Needs,
    Place,
    Ring,
    counts_tokens,
    documents_of,
    needs_of,
)
from mtrain.train.loop.readings import AHEAD, Board, Clock, Means, Reading, summed_report
from mtrain.train.loop.readings import reduce_report as reduce_report
from mtrain.train.loop.result import Launched
from mtrain.train.loop.result import StepResult as StepResult
from mtrain.train.loop.tally import TALLY, Flops, may_pad
from mtrain.world.heartbeat import begin_phase, begin_step
from mtrain.world.init import World

Forward = Callable[[Iterator[Batch], Any], tuple[torch.Tensor, Any]]
"""One micro-batch through one chunk of the model: see `forward_step`."""


@dataclass
class TrainContext:
    """What a run consists of on this rank."""

    run: RunConfig
    world: World
    state: TrainState
    train_data: GlobalBatches
    valid_data: GlobalBatches | None
    schedule: Callable[..., list[torch.Tensor]] | None = None
    """How the micro-batches of a step are run, with the arguments of `run_schedule`; None: through
    the pipeline.
    """
    stop: StopRequest = field(default_factory=StopRequest)
    """Requests that this rank got."""
    stops: bool = False
    """All ranks know that one was asked to stop: the run ends here."""

    @cached_property
    def by_time(self) -> ByTime:
        """What is done every so many minutes."""
        return ByTime(self.run)

    @property
    def stop_requested(self) -> bool:
        """Return true once this rank was asked to stop."""
        return self.stop.asked

    @cached_property
    def board(self) -> Board:
        """Return the way of the numbers of steps to the host."""
        return Board(self.world.device)

    @cached_property
    def valid_ring(self) -> Ring | None:
        """Host memory that the samples of evaluations are copied from."""
        return Ring.of(self.world.device, self.run.data.prefetch)

    @cached_property
    def batch_sizes(self) -> tuple[Stage, ...]:
        """Return samples per step, from the samples that are consumed."""
        return stages(self.run)

    @cached_property
    def flops(self) -> Flops:
        """What counts the work of documents."""
        return Flops(self.run)

    def needs(self, data: GlobalBatches) -> Needs:
        """What of its samples this rank's stages use."""
        return needs_of(self.run, self.state.chunks, padded=data.pads or may_pad(self.run))

    @cached_property
    def feed(self) -> Feed:
        """Return the way of the training samples to the steps."""
        plan = self.batch_sizes
        end = samples_of(plan, self.run.trainer.steps)
        prefetch = self.run.data.prefetch
        ring = Ring.of(self.world.device, prefetch)
        following = partial(_next_step, plan, end)
        needs = self.needs(self.train_data)
        return Feed(self.train_data, self.world, needs, following, prefetch, ring)

    @cached_property
    def pipeline(self) -> Callable[..., Any]:
        """megatron-core's schedule of micro-batches, in one CUDA graph where that is asked for."""
        schedule = mcore.get_forward_backward_func()
        steps = self.run.trainer.cuda_graph_warmup_steps
        if self.run.trainer.cuda_graph_impl == "full_iteration" and steps is not None:
            return whole_steps(schedule, steps)
        return schedule  # type: ignore[no-any-return]

    def begin(self) -> None:
        """Begin to read for the next step."""
        consumed = self.state.consumed_samples
        if self.state.step < self.run.trainer.steps:
            self.feed.expect(consumed, size_after(self.batch_sizes, consumed))

    def close(self) -> None:
        """End the thread that reads samples ahead."""
        if "feed" in self.__dict__:
            self.feed.close()


def train_step(context: TrainContext, *, stop_requested: bool) -> StepResult:
    """Return one step, up to its end on the device; see `launch_step`."""
    return launch_step(context, stop_requested=stop_requested).result()


def launch_step(context: TrainContext, *, stop_requested: bool) -> Launched:
    """Read a global batch, run forward and backward over its micro-batches, update the weights.

    The device gets the work and the host goes on; it waits only where what to do depends on a
    number of the device.
    """
    clock = Clock(context.world.device)
    state = context.state
    size = size_after(context.batch_sizes, state.consumed_samples)
    begin_step(state.step + 1)
    with clock.phase("data"):
        batches = context.feed.take(state.consumed_samples, size)
    clock.waited_s = context.feed.waited_s
    with clock.phase("forward_backward"):
        reports = gradients(context, batches)
    begin_phase("optimizer")
    scale, may_fall = loss_scale(state.optimizer) or (None, False)
    with clock.phase("optimizer"):
        updated, norm, lr = update(state, context.run.optim.schedule_counts)
    state.step += 1
    state.consumed_samples += size
    work = context.flops.of(batch[TALLY] for batch in batches) if reads(context) else ()
    due = context.by_time.asks(context.world.rank)
    values = summed_report(
        context.world, reports, stop_requested or context.stop_requested, due, work
    )
    if isinstance(norm, torch.Tensor):
        values = torch.cat([values, norm.reshape(1).to(values)])
    # before the reading, which waits for its own moment: the clock's are then past, too
    clock.stop()
    reading = context.board.copy(values)
    known = {
        "step": state.step,
        "grad_norm": norm,
        "lr": lr,
        "updated": updated,
        "skipped_updates": state.skipped_updates,
        "loss_scale": scale,
        "loss_scale_may_fall": may_fall,
        "positions": size * context.run.data.length,
        "batch_size": size,
        "consumed_samples": state.consumed_samples,
    }
    return Launched(reading, clock, known)


def gradients(context: TrainContext, batches: Sequence[Batch]) -> list[torch.Tensor]:
    """Forward and backward over the micro-batches of a step, from gradients of zero; see
    `run_schedule`.
    """
    for chunk in context.state.chunks:
        chunk.zero_grad_buffer()
    context.state.optimizer.zero_grad()
    _share_out(context, batches)
    return run_schedule(context, batches, forward_only=False)


def reads(context: TrainContext) -> bool:
    """Return whether this rank counts samples for all that have the same, or are other stages of
    the model.
    """
    run = context.run
    coords = context.world.coords
    first = (
        all(coords[axis] == 0 for axis in ("tp", "cp"))
        and coords["pp"] == context.world.grid.pp - 1
    )
    # of dynamic context parallelism every rank reads all samples
    return first and (coords["dp"] == 0 or not run.parallel.hybrid_context_parallel)


def _share_out(context: TrainContext, batches: Sequence[Batch]) -> None:
    """Keep losses beside that of the next token averages over their own tokens, where a step is
    divided by its own.

    Those of routers and indexers add up over all tokens that are there; those of further tokens
    over their predictions, of which short documents have fewer. Without this each would weigh more
    or less than its coefficient says. What each is multiplied by stays on the device, in one place,
    where graphs find it.
    """
    run = context.run
    world = context.world
    depths = context.train_data.depths
    if not depths and not (counts_tokens(run) and _leaves_out(run)):
        return
    values = torch.zeros(2 + depths, dtype=torch.float64, device=world.torch_device)
    if reads(context):
        tallies = [batch[TALLY] for batch in batches]
        tokens = sum(int(tally.lengths(run.data.length).sum()) for tally in tallies)
        further = (
            sum(counts) for counts in zip(*(tally.further for tally in tallies), strict=True)
        )
        for place, number in enumerate((sum(tally.losses for tally in tallies), tokens, *further)):
            values[place] = float(number)
    dist.all_reduce(values)
    shares = torch.where(values[1:] > 0, values[0] / values[1:], 0.0).float()
    for chunk in context.state.chunks:
        for name, share in ((ROUTER_LOSS_SHARE, shares[0]), (FURTHER_LOSS_SHARES, shares[1:])):
            held = getattr(chunk.config, name, None)
            if held is None:
                setattr(chunk.config, name, share.clone())
            else:
                held.copy_(share)


def _leaves_out(run: RunConfig) -> bool:
    """Return whether a step may be divided by something else than its tokens."""
    d = run.data
    whole = d.kind in ("text", "indexed", "mock") and not d.packed and not d.eod_mask_loss
    return not (whole and run.trainer.loss_average == "token" and family_of(run.model).predicts_all)


def update(state: TrainState, counts: str) -> tuple[bool, float | torch.Tensor, float]:
    """Update the weights at the rate that the schedule has by what it `counts`
    (`optim.schedule_counts`).

    Returns:
        Whether the update was not skipped (fp16, `optim.skip_above_grad_norm`), the gradient's norm
        before clipping (a tensor where the host did not wait for it), and the rate.
    """
    ahead = 0 if counts == "past_updates" else 1
    state.schedule.step(ahead)
    lr = float(mcore.get_canonical_lr_for_logging(state.optimizer.param_groups))
    updated, norm, _ = state.optimizer.step()
    counted = 1 if updated or counts == "steps" else 0
    state.schedule.step(counted - ahead)
    state.skipped_updates = 0 if updated else state.skipped_updates + 1
    if norm is None:
        return bool(updated), float("nan"), lr
    return bool(updated), norm if isinstance(norm, torch.Tensor) else float(norm), lr


def evaluate(context: TrainContext, data: GlobalBatches, iters: int) -> float | None:
    """Mean cross entropy per token over the first `iters` global batches of an evaluation, in nats;
    see `summed`.
    """
    found = summed(context, data, iters)
    return None if found is None else found[0] / max(1, found[1])


def summed(
    context: TrainContext, data: GlobalBatches, iters: int, *, until_stop: bool = False
) -> tuple[float, int] | None:
    """Return the cross entropy of the first `iters` global batches of an evaluation in nats, and
    the tokens that it is over.

    There are as many batches as its samples fill. With `until_stop`, None as soon as a rank was
    asked to stop. Training goes on with the random numbers that it would have had: a router may
    draw in an evaluation too.
    """
    size = context.run.trainer.batch
    iters = iters if data.limit is None else min(iters, data.steps)
    found = _Sum()
    plan = (Stage(0, size),)
    following = partial(_next_step, plan, iters * size)
    prefetch = context.run.data.prefetch
    feed = Feed(data, context.world, context.needs(data), following, prefetch, context.valid_ring)
    behind = AHEAD if context.world.device.runs_ahead else 0
    with (
        closing(feed),
        gathered(context.state.chunks),
        generators_kept(context.world),
        torch.no_grad(),
    ):
        for chunk in context.state.chunks:
            chunk.eval()
        for i in range(iters):
            begin_phase("evaluation")
            reports = run_schedule(context, feed.take(i * size, size), forward_only=True)
            report = summed_report(context.world, reports, until_stop and context.stop_requested)
            found.waiting.append(context.board.copy(report))
            found.add(behind)
            if found.stops:
                break
        found.add(0)
        for chunk in context.state.chunks:
            chunk.train()
    return None if found.stops else (found.total, found.count)


class _Sum:
    """The sum of an evaluation, and of the reports that the device has not come to yet."""

    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0
        self.stops = 0
        self.waiting: deque[Reading] = deque()

    def add(self, behind: int) -> None:
        """Add all reports but the last `behind`."""
        while len(self.waiting) > behind:
            means = Means.of(self.waiting.popleft().read())
            self.total += means.loss * means.tokens
            self.count += means.tokens
            self.stops += means.stops


def _next_step(plan: Sequence[Stage], end: int, place: Place) -> Place | None:
    """Return the step after the one at `place`; None where that was the last before
    sample `end`.
    """
    consumed = sum(place)
    return (consumed, size_after(plan, consumed)) if consumed < end else None


def run_schedule(
    context: TrainContext, batches: Sequence[Batch], *, forward_only: bool
) -> list[torch.Tensor]:
    """Run the micro-batches of a step; on the last stage, what `sum_loss` reports of each."""
    with _weights(context.run, forward_only):
        return (context.schedule or run_pipeline)(context, batches, forward_only=forward_only)


def _weights(run: RunConfig, forward_only: bool) -> AbstractContextManager[None]:
    """For how long a weight that was quantised is what it was: a captured graph knows nothing of
    other graphs.
    """
    if run.parallel.frees_weights:
        return weights_leave()
    stays = (
        not forward_only and run.parallel.fsdp == "none" and run.trainer.cuda_graph_impl == "none"
    )
    return weights_stay() if stays else nullcontext()


def run_pipeline(
    context: TrainContext,
    batches: Sequence[Batch],
    *,
    forward_only: bool,
    forward: Forward | None = None,
) -> list[torch.Tensor]:
    """`run_schedule` by megatron-core's schedules, with or without stages; `forward` stands for
    `forward_step`.
    """
    chunks = context.state.chunks
    run = context.run
    iterators = [iter(batches) for _ in chunks]
    reports = (mcore.get_forward_backward_func() if forward else context.pipeline)(
        forward_step_func=forward or forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(batches),
        seq_length=run.data.length * (run.trainer.micro if run.data.packed else 1),
        micro_batch_size=1 if run.data.packed else run.trainer.micro,
        forward_only=forward_only,
    )
    return [report["loss"] for report in reports]


def forward_step(iterator: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
    """Return one micro-batch through one chunk of the model."""
    begin_phase("forward")
    batch = next(iterator)
    # a stage in between has none of them
    tokens, places, labels, mask = (
        batch.get(key) for key in ("tokens", "position_ids", "labels", "loss_mask")
    )
    packed = packed_params(batch.get("cu_seqlens"))
    if packed is not None:
        packed.max_seqlen_q = packed.max_seqlen_kv = documents_of(batch).longest
    listed = (*MicroBatch.__annotations__, DOCUMENTS, TALLY)
    own = {key: value for key, value in batch.items() if key not in listed}
    with padding_is(batch.get("padding")):
        output = model(
            tokens, places, None, labels=labels, loss_mask=mask, packed_seq_params=packed, **own
        )
    return output, partial(sum_loss, mask, batch.get("loss_counts"))


def packed_params(cu_seqlens: torch.Tensor | None) -> Any:
    """megatron-core's description of packed documents that start at `cu_seqlens` (int32 [n + 1]);
    None for None.

    The length of the longest is left out.
    """
    if cu_seqlens is None:
        return None
    return mcore.PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens,
        cu_seqlens_kv_padded=cu_seqlens,
    )


def sum_loss(
    mask: torch.Tensor | None, counts: torch.Tensor | None, total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Loss of a micro-batch as megatron-core's per-token form: the sum, the count it is divided by,
    and a report.

    Gradients are divided by the count of the whole global batch at the end, so no layout weighs a
    sample differently. `mask` [b, s] weighed the tokens of `total`, a scalar, or what
    `mcore.language_model.told_apart` made; `counts` [b, s] add up to the count, or `mask` does. The
    report is `[loss sum, count, predictions that count]`, behind it stand the sum of z-losses, no
    part of the first then, and the labels with the largest logit, if they are told.
    """
    assert mask is not None  # megatron-core asks for losses on the last stage alone
    count = mask.sum() if counts is None else counts.sum()
    told = total.detach()[1:] if total.ndim else total.new_zeros(0)
    # a pipeline frees what it sent on, which no view can be
    total = total[0].clone() if total.ndim else total
    loss = total.detach() - told[:1].sum()
    report = torch.cat([torch.stack([loss, count, (mask > 0).sum().to(count)]), told])
    return total, count.int(), {"loss": report}
