"""One optimizer step and one evaluation, through megatron-core's pipeline schedules."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from mtrain_kernels.fp8_linear.op import weights_leave, weights_stay

from mtrain.ckpt.state import TrainState, generators_kept
from mtrain.config.resolve.batches import Stage, size_after
from mtrain.config.schema.run import RunConfig
from mtrain.data.batch import GlobalBatches, MicroBatch
from mtrain.mcore import api as mcore
from mtrain.mcore.layers.balance import ROUTER_LOSS_SHARE
from mtrain.mcore.layers.padding import padding_is
from mtrain.mcore.models.language_model import FURTHER_LOSS_SHARES, LESSON
from mtrain.mcore.state.optimizer_state import loss_scale
from mtrain.mcore.state.sharding import gathered
from mtrain.models.registry import family_of
from mtrain.train.loop.context import TrainContext, next_step
from mtrain.train.loop.prefetch import (
    DOCUMENTS,
    Batch,
    BatchPrefetcher,
    counts_tokens,
    documents_of,
)
from mtrain.train.loop.readings import (
    AHEAD,
    TALLY,
    Clock,
    MetricTable,
    Reading,
    packed,
    summed_report,
)
from mtrain.train.loop.readings import reduce_report as reduce_report
from mtrain.train.loop.result import Launched, StepResult
from mtrain.train.objectives import Objective
from mtrain.train.pairs import ADDED, BASELINE, REFERENCE, mismatch_of, others_of
from mtrain.train.reference import as_reference
from mtrain.train.teacher import Teacher, with_lesson
from mtrain.world.heartbeat import begin_phase, begin_step
from mtrain.world.labels import labelled

Forward = Callable[[Iterator[Batch], Any], tuple[torch.Tensor, Any]]
"""One micro-batch through one chunk of the model: `forward_step` of an objective."""


def train_step(context: TrainContext, *, stop_requested: bool) -> StepResult:
    """Run one step, up to its end on the device; see `launch_step`."""
    return launch_step(context, stop_requested=stop_requested).result()


def launch_step(context: TrainContext, *, stop_requested: bool) -> Launched:
    """Read a global batch, run forward and backward over its micro-batches, update the weights.

    The device gets the work and the host goes on; it waits only where what to do depends on a
    number of the device.
    """
    clock = Clock(context.world.device, own=context.times_own)
    state = context.state
    size = size_after(context.batch_sizes, state.consumed_samples)
    begin_step(state.step + 1)
    with clock.phase("data"):
        batches = context.prefetcher.take(state.consumed_samples, size)
    clock.waited_s = context.prefetcher.waited_s
    with clock.phase("forward_backward"):
        reports = (context.compute or gradients)(context, batches)
    begin_phase("optimizer")
    context.hooks.call("before_update", context)
    scale, may_fall = loss_scale(state.optimizer) or (None, False)
    with clock.phase("optimizer"):
        updated, norm, lr = update(state, context.run.optim.schedule_counts)
    if context.critic is not None:
        begin_phase("critic")
        with clock.phase("critic"):
            context.critic.learn(batches, state.step + 1)
    context.hooks.call("after_update", context)
    state.step += 1
    state.consumed_samples += size
    own: dict[str, float | torch.Tensor] = {
        "stops": stop_requested or context.stop_requested,
        "due": context.by_time.due_on(context.world.rank),
    }
    if reads(context):
        work = context.flops.of(batch[TALLY] for batch in batches)
        own |= zip(("read", "flops", "full_flops"), work, strict=True)
    if context.routes is not None:
        own |= context.routes.counted()
    values = summed_report(context.world, context.table, reports, own)
    if isinstance(norm, torch.Tensor):
        values = torch.cat([values, norm.reshape(1).to(values)])
    # Before the reading, which waits for an event of its own: those of the clock are then past too.
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
    return Launched(reading, context.table, clock, known)


def gradients(context: TrainContext, batches: Sequence[Batch]) -> list[torch.Tensor]:
    """Run forward and backward over the micro-batches of a step, from gradients of zero; see
    `run_schedule`.
    """
    for chunk in context.state.chunks:
        chunk.zero_grad_buffer()
    context.state.optimizer.zero_grad()
    _share_out(context, batches)
    return run_schedule(context, batches, forward_only=False)


def reads(context: TrainContext) -> bool:
    """Return whether this rank counts samples for all ranks that read the same ones or are other
    stages of the model.
    """
    run = context.run
    coords = context.world.coords
    last_stage = coords["pp"] == context.world.grid.pp - 1
    first = last_stage and coords["tp"] == 0 and coords["cp"] == 0
    # With dynamic context parallelism every rank reads all samples.
    return first and (coords["dp"] == 0 or not run.parallel.hybrid_context_parallel)


def _share_out(context: TrainContext, batches: Sequence[Batch]) -> None:
    """Scale the auxiliary losses of a step that is not divided by its number of tokens.

    Losses of routers and indexers add up over all tokens of a step; those of further tokens over
    their predictions, of which short documents have fewer. Without this scale, each would weigh
    more or less than its coefficient says.
    """
    run = context.run
    world = context.world
    depths = context.train_data.depths
    if not depths and not (counts_tokens(run) and _leaves_out(run)):
        return
    values = torch.zeros(2 + depths, dtype=torch.float64, device=world.torch_device)
    if reads(context):
        tallies = [batch[TALLY] for batch in batches]
        losses = sum(tally.losses for tally in tallies)
        tokens = sum(int(tally.lengths(run.data.length).sum()) for tally in tallies)
        further = [sum(counts) for counts in zip(*(t.further for t in tallies), strict=True)]
        for place, number in enumerate([losses, tokens, *further]):
            values[place] = float(number)
    dist.all_reduce(values)
    shares = torch.where(values[1:] > 0, values[0] / values[1:], 0.0).float()
    for chunk in context.state.chunks:
        for name, share in ((ROUTER_LOSS_SHARE, shares[0]), (FURTHER_LOSS_SHARES, shares[1:])):
            held = getattr(chunk.config, name, None)
            # A captured graph reads the scale from its memory: it must stay the same tensor.
            if held is None:
                setattr(chunk.config, name, share.clone())
            else:
                held.copy_(share)


def _leaves_out(run: RunConfig) -> bool:
    """Return whether a step may be divided by something else than its tokens."""
    if run.objective.answers:
        return True
    d = run.data
    whole = d.kind in ("text", "indexed", "mock") and not d.packed and not d.eod_mask_loss
    return not (whole and run.trainer.loss_average == "token" and family_of(run.model).predicts_all)


def update(state: TrainState, counts: str) -> tuple[bool, float | torch.Tensor, float]:
    """Update the weights at the rate of the schedule, which counts by `optim.schedule_counts`.

    Returns:
        Whether the update was not skipped (fp16, `optim.skip_above_grad_norm`), the gradient's norm
        before clipping (a tensor where the host did not wait for it), and the rate.
    """
    # The schedule counts this update before it is made; if it is skipped, that is taken back below.
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
    """Return the mean loss over the first `iters` global batches of an evaluation, in nats; see
    `summed`.
    """
    means = summed(context, data, iters)
    return None if means is None else means["loss"]


def summed(
    context: TrainContext, data: GlobalBatches, iters: int, *, until_stop: bool = False
) -> dict[str, float] | None:
    """Return the metrics of the objective over the first `iters` global batches of an evaluation,
    each divided by its own count over all of them; the loss in nats.

    The evaluation has as many batches as its samples fill. With `until_stop`, return None as soon
    as a rank gets a request to stop. Training goes on with the random numbers that it would have
    had: a router may draw in an evaluation too.
    """
    if context.prepare is not None:
        context.prepare(context)
    size = context.run.trainer.batch
    iters = iters if data.limit is None else min(iters, data.steps)
    total = _Sum(context.table)
    plan = (Stage(0, size),)
    following = partial(next_step, plan, iters * size)
    prefetch = context.run.data.prefetch
    needs = context.needs(data)
    prefetcher = BatchPrefetcher(
        data, context.world, needs, following, prefetch, context.valid_ring
    )
    behind = AHEAD if context.world.device.runs_ahead else 0
    unchanged = generators_kept(context.world)
    with closing(prefetcher), gathered(context.state.chunks), unchanged, torch.no_grad():
        for chunk in context.state.chunks:
            chunk.eval()
        for i in range(iters):
            begin_phase("evaluation")
            batches = prefetcher.take(i * size, size)
            reports = run_schedule(context, batches, forward_only=True)
            stops = {"stops": until_stop and context.stop_requested}
            report = summed_report(context.world, context.table, reports, stops)
            total.waiting.append(context.board.copy(report))
            total.add(behind)
            if total.stops:
                break
        total.add(0)
        for chunk in context.state.chunks:
            chunk.train()
    return None if total.stops else context.table.divided(total.row)


class _Sum:
    """The sum of an evaluation, and the reports that the device has not computed yet."""

    def __init__(self, table: MetricTable) -> None:
        self.table = table
        self.row = [0.0] * len(table)
        self.stops = False
        self.waiting: deque[Reading] = deque()

    def add(self, behind: int) -> None:
        """Add all reports but the last `behind`."""
        while len(self.waiting) > behind:
            row = self.waiting.popleft().read()
            self.row = [sum(pair) for pair in zip(self.row, row, strict=True)]
            self.stops |= self.row[self.table.place("stops")] > 0


def run_schedule(
    context: TrainContext, batches: Sequence[Batch], *, forward_only: bool
) -> list[torch.Tensor]:
    """Run the micro-batches of a step; return what `sum_loss` packs of each, on the last stage."""
    batches = scored(context, batches)
    with _quantized_weights(context.run, forward_only):
        run = context.schedule or run_pipeline
        return run(context, batches, forward_only=forward_only)


def scored(context: TrainContext, batches: Sequence[Batch]) -> Sequence[Batch]:
    """Return micro-batches with the reference's log-probabilities and, for an objective that reads
    them, the divergence on answers to other prompts, on the last stage.
    """
    o = context.run.objective
    given = o.reference == "precomputed"
    if (
        given
        or not (o.loss_refers or o.mismatches)
        or any(ADDED & batch.keys() for batch in batches)
    ):
        return batches
    begin_phase("reference")
    added: list[dict[str, torch.Tensor]] = [{} for _ in batches]
    if o.loss_refers:
        found = log_probabilities(context, batches, o.reference)
        for own, values in zip(added, found, strict=False):
            own[REFERENCE] = values
    if o.mismatches:
        divergence = _divergence(context, [others_of(batch) for batch in batches])
        for own in added:
            own[BASELINE] = divergence
    return [{**batch, **own} for batch, own in zip(batches, added, strict=True)]


def log_probabilities(
    context: TrainContext, batches: Sequence[Batch], kind: str | None
) -> list[torch.Tensor]:
    """Return the log-probability of each label [b, s] of micro-batches on the last stage, by the
    reference of a kind; elsewhere nothing.
    """
    if kind != "none":
        # A reference is a model of its own, whose routers choose themselves.
        batches = [{key: batch[key] for key in batch if key != "routes"} for batch in batches]
    with as_reference(context.state, kind) as chunks:
        return outputs(context, batches, chunks)


@torch.no_grad()
def outputs(
    context: TrainContext, batches: Sequence[Batch], chunks: list[Any]
) -> list[torch.Tensor]:
    """Return what the chunks of a frozen model give for the labels of micro-batches [b, s], on the
    last stage; elsewhere nothing.
    """
    forward = partial(_score, context.objective)
    return run_pipeline(context, batches, forward_only=True, forward=forward, chunks=chunks)


def _divergence(context: TrainContext, batches: Sequence[Batch]) -> torch.Tensor:
    """Return the mean log(policy / reference) of all answers of the global batch, at least 0."""
    o = context.run.objective
    policy = log_probabilities(context, batches, "none")
    refers = log_probabilities(context, batches, o.reference) if o.refers else None
    ps = mcore.parallel_state
    total = torch.zeros(2, dtype=torch.float64, device=context.world.torch_device)
    for place, values in enumerate(policy):
        other = None if refers is None else refers[place]
        total += mismatch_of(values, batches[place]["loss_mask"], other)
    if policy:
        dist.all_reduce(total, group=ps.get_data_parallel_group())
    return (total[0] / total[1].clamp(min=1)).clamp(min=0)


def _score(objective: Objective, iterator: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
    """Run the next micro-batch through a chunk of a reference model, whose output is its report."""
    output, _ = forward_step(objective, iterator, model)
    return output, _as_report


def _as_report(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    count = torch.ones((), dtype=torch.int32, device=output.device)
    return output.sum(), count, {"metrics": output}


def taught(context: TrainContext, batches: Sequence[Batch]) -> Sequence[Batch]:
    """Return micro-batches with the lesson of the run's teacher, or of the file that stands for
    it, on the last stage.
    """
    if context.run.objective.teacher_file is not None:
        return [with_lesson(context.run, batch) for batch in batches]
    chunks = context.state.teacher
    if not chunks:
        return batches
    begin_phase("teacher")
    forward = partial(_teach, Teacher.of(context.run, chunks), context.objective)
    with torch.no_grad():
        lessons = run_pipeline(context, batches, forward_only=True, forward=forward, chunks=chunks)
    # Stages before the last have no lessons.
    found = zip(batches, lessons, strict=True) if lessons else ()
    return [{**batch, LESSON: lesson} for batch, lesson in found] or batches


def _teach(
    teacher: Teacher, objective: Objective, iterator: Iterator[Batch], model: Any
) -> tuple[torch.Tensor, Any]:
    """Run the next micro-batch through a chunk of the teacher, whose report is its lesson."""
    output, _ = forward_step(objective, iterator, model)

    def report(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        count = torch.ones((), dtype=torch.int32, device=hidden.device)
        return hidden.new_zeros(()), count, {"metrics": teacher.lesson(hidden)}

    return output, report


def _quantized_weights(run: RunConfig, forward_only: bool) -> AbstractContextManager[None]:
    """Return a context that says how long a quantised copy of a weight is valid.

    It is not kept between micro-batches where weights are freed in between, and where graphs are
    captured: a graph knows nothing of the copies that other graphs made.
    """
    if run.parallel.frees_weights:
        return weights_leave()
    captured = run.trainer.cuda_graph_impl != "none"
    stays = not forward_only and run.parallel.fsdp == "none" and not captured
    return weights_stay() if stays else nullcontext()


def run_pipeline(
    context: TrainContext,
    batches: Sequence[Batch],
    *,
    forward_only: bool,
    forward: Forward | None = None,
    chunks: list[Any] | None = None,
) -> list[torch.Tensor]:
    """Run `run_schedule` by megatron-core's schedules, with or without stages; `forward` replaces
    `forward_step`, and `chunks` those that are trained.
    """
    if forward is None:
        batches = taught(context, batches)
    chunks = context.state.chunks if chunks is None else chunks
    run = context.run
    iterators = [iter(batches) for _ in chunks]
    # A function of the caller's has effects on the host, which a replayed graph would not repeat.
    schedule = mcore.get_forward_backward_func() if forward else context.pipeline
    reports = schedule(
        forward_step_func=forward or partial(forward_step, context.objective),
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(batches),
        seq_length=run.data.length * (run.trainer.micro if run.data.packed else 1),
        micro_batch_size=1 if run.data.packed else run.trainer.micro,
        forward_only=forward_only,
    )
    return [report["metrics"] for report in reports]


def forward_step(
    objective: Objective, iterator: Iterator[Batch], model: Any
) -> tuple[torch.Tensor, Any]:
    """Run the next micro-batch through a chunk of the model; return its output and its loss
    function.
    """
    begin_phase("forward")
    batch = next(iterator)
    # An intermediate pipeline stage has neither tokens nor labels.
    tokens, places, labels, mask = (
        batch.get(key) for key in ("tokens", "position_ids", "labels", "loss_mask")
    )
    packed_documents = packed_params(batch.get("cu_seqlens"))
    if packed_documents is not None:
        longest = documents_of(batch).longest
        packed_documents.max_seqlen_q = longest
        packed_documents.max_seqlen_kv = longest
    listed = (*MicroBatch.__annotations__, DOCUMENTS, TALLY)
    own = {key: value for key, value in batch.items() if key not in listed}
    known = padding_is(batch.get("padding"), batch.get("routes"))
    with known, labelled("forward", numbered=True):
        output = model(
            tokens,
            places,
            None,
            labels=None if objective.reads_logits else labels,
            loss_mask=mask,
            packed_seq_params=packed_documents,
            **own,
        )
    return output, partial(sum_loss, objective, batch)


def packed_params(cu_seqlens: torch.Tensor | None) -> Any:
    """Return megatron-core's description of packed documents that start at `cu_seqlens` (int32
    [n + 1]); None for None.

    It leaves out the length of the longest, which only the host knows without a wait.
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
    objective: Objective, batch: Batch, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of a micro-batch in megatron-core's per-token form: the sum, the count that
    divides it, and a report with its packed metrics.

    megatron-core calls it on the last stage only, and divides gradients by the count of the whole
    global batch at the end.
    """
    total, count, metrics = objective.loss(output, batch)
    return total, count.int(), {"metrics": packed(objective.metrics(), metrics)}
