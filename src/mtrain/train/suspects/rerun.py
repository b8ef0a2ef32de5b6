"""`resilience.rerun` and `log.on_anomaly`: a step that looks wrong is computed again before its
update is made.

The same bits twice clear the device, unless it errs the same way each time. That is what replicas
are for: their weights are compared, and each computes the samples of its neighbour. Other bits
convict a device. Which one follows from what ranks sent each other in the two computations: at the
rank at fault something was sent that differs although everything received before is the same.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from mtrain import strict_json
from mtrain.ckpt.state import rng_tensors, set_rng_tensors
from mtrain.config.resolve.batches import size_after
from mtrain.config.schema.resilience import ResilienceConfig
from mtrain.errors import DeviceFault, warn
from mtrain.mcore.state.local_params import local_params, unwrap
from mtrain.mcore.state.optimizer_state import loss_scale
from mtrain.train.hooks.replicas import checksum, compared
from mtrain.train.loop import step as steps
from mtrain.train.loop.context import TrainContext
from mtrain.train.loop.prefetch import Batch
from mtrain.train.loop.readings import summed_report
from mtrain.train.running_median import RunningMedian
from mtrain.train.suspects.blame import Dispute, culprit, roots
from mtrain.train.suspects.recorder import OWN, Recorder
from mtrain.train.suspects.tracing import (
    Tracing,
    decided,
    samples_of,
    told,
    worst_micro_batch,
)
from mtrain.world.heartbeat import begin_phase

WINDOW = 100
"""Normal steps whose median is the reference."""
LEAST = 10
"""Normal steps before anything is compared with their median."""
INTERVAL = "interval"
"""The trigger of a step that is checked because it is its turn."""


@dataclass
class Verdict:
    """The result of a check; the record of its step has it as `attribution`."""

    kind: str
    """data, device, or unknown where the two cannot be distinguished."""
    trigger: str
    rank: int | None = None
    """The rank at fault; None: the data is, or several ranks may be."""
    ranks: list[int] = field(default_factory=list)
    """All ranks that may be at fault."""
    why: str = ""
    machines: list[str] = field(default_factory=list)
    """Machine and device of each of these ranks."""
    documents: list[str] = field(default_factory=list)
    """The samples of the micro-batch with the largest loss, and the documents that they are of."""


@dataclass
class Start:
    """The state of a rank before a step's forward, as far as the forward changes it."""

    rng: dict[str, torch.Tensor]
    buffers: list[tuple[torch.Tensor, torch.Tensor]]
    """Buffers of the model, and copies."""
    weights: torch.Tensor
    """Checksums."""

    @classmethod
    def of(cls, context: TrainContext, *, checks: bool = True) -> Start:
        """Return the state now, without checksums unless it `checks`."""
        model = [unwrap(chunk) for chunk in context.state.chunks]
        buffers = [buffer for chunk in model for buffer in chunk.buffers()]
        copies = [(buffer, buffer.clone()) for buffer in buffers]
        weights = weight_sums(context) if checks else torch.zeros(0, dtype=torch.int64)
        return cls(rng_tensors(context.world), copies, weights)

    def restore(self, context: TrainContext, rng: dict[str, torch.Tensor] | None = None) -> None:
        """Go back to it, with the random numbers of another rank if `rng` has them."""
        set_rng_tensors(context.world, self.rng if rng is None else rng)
        for buffer, copy in self.buffers:
            buffer.copy_(copy)
        context.hooks.call("before_retry", context)


@dataclass
class Computed:
    """One computation of a step's gradients."""

    reports: list[torch.Tensor]
    keys: list[str]
    sums: list[int]
    """Checksums of what this rank sent, and of its results."""
    sizes: list[float]
    local: int
    """The number of them before gradients are added up over replicas."""


class Suspects:
    """The computation of gradients, with checks of suspect steps; `TrainContext.compute`."""

    def __init__(self, config: ResilienceConfig, tracing: Tracing | None = None) -> None:
        """Check the steps that `config.rerun` selects, and trace anomalies with `tracing`."""
        self.mode = config.rerun
        self.interval = config.rerun_interval if config.rerun == "every_n" else None
        self.factor = config.spike_factor
        self.usual = {name: RunningMedian(WINDOW, LEAST) for name in ("loss", "gradient norm")}
        self.tracing = tracing
        self.checked = 0
        """Steps that were computed again."""

    def __call__(self, context: TrainContext, batches: Sequence[Batch]) -> list[torch.Tensor]:
        """Compute the gradients of a step; return what `step.gradients` returns.

        Raises:
            DeviceFault: a device is at fault; the same on every rank.
        """
        step = context.state.step + 1
        turn = self.interval is not None and step % self.interval == 0
        tracing = self.tracing
        if tracing is None and self.interval is not None and not turn:
            return steps.gradients(context, batches)
        judges = turn or self.mode == "on_anomaly"
        compute = computed if judges else _computed_only
        start = Start.of(context, checks=judges)
        traced = tracing is not None and tracing.is_due(step)
        with tracing.listening() if tracing is not None and traced else nullcontext():
            first = compute(context, batches)
        anomaly = self._anomaly(context, first.reports)
        if tracing is not None and traced:
            anomaly = tracing.settled(anomaly)
        traced = tracing is not None and bool(anomaly) and not tracing.is_silent
        if not turn and not traced and not (judges and anomaly):
            return first.reports
        self.checked += 1
        begin_phase("computing a step again")
        start.restore(context)
        with tracing.listening() if tracing is not None and traced else nullcontext():
            second = compute(context, batches, measures=True)
        if tracing is not None and traced:
            tracing.report(step, anomaly, second.reports)
        if not judges:
            return second.reports
        return self._judged(context, batches, anomaly, start, first, second)

    def _judged(
        self,
        context: TrainContext,
        batches: Sequence[Batch],
        anomaly: str,
        start: Start,
        first: Computed,
        second: Computed,
    ) -> list[torch.Tensor]:
        """Report who is at fault; return the reports of the present gradients."""
        trigger = anomaly or INTERVAL
        verdict = self._judge(context, trigger, start, first, second)
        if verdict.kind == "data":
            # The last gradients are those of the neighbour's samples.
            start.restore(context)
            second = computed(context, batches)
        if anomaly or verdict.kind == "device":
            self._report(context, context.state.step + 1, verdict, second)
        return second.reports

    def _anomaly(self, context: TrainContext, reports: Sequence[torch.Tensor]) -> str:
        """Return the step's unusual number in words, or "", the same on every rank."""
        row = summed_report(context.world, context.table, reports, {})
        scale = (loss_scale(context.state.optimizer) or (None,))[0]
        values = {
            "loss": context.table.divided(row.tolist())["loss"],
            "gradient norm": gradient_norm(context) / (scale or 1.0),
        }
        # fp16 finds its loss scale by gradients that overflow.
        if scale is not None and not math.isfinite(values["gradient norm"]):
            del values["gradient norm"]
        found = ""
        for name, value in values.items():
            middle = self.usual[name].middle
            if not math.isfinite(value):
                found = found or f"the {name} is {value}"
            elif value > self.factor * middle:
                found = found or (
                    f"the {name} {value:.4g} is above {self.factor:g} times its median {middle:.4g}"
                )
        if not found:
            for name, value in values.items():
                self.usual[name].add(value)
        return found

    def _judge(
        self,
        context: TrainContext,
        trigger: str,
        start: Start,
        first: Computed,
        second: Computed,
    ) -> Verdict:
        """Return who is at fault; the same on every rank."""
        differs = _flags(first, second)
        if _any(context, any(flag for _, flag in differs)):
            found = self._roots(context, differs)
            return _device(trigger, found, "computed again, the step has other bits")
        changed = not torch.equal(weight_sums(context), start.weights)
        # An overlapped gather brings weights up to date in the forward.
        if _any(context, changed and not context.run.parallel.overlap_param_gather):
            found = _named(context, changed)
            return _device(trigger, found, "a weight changed during the step")
        other = compared(context, context.state.step + 1)
        if other is not None:
            rank, text = other
            return Verdict("device", trigger, rank, [] if rank is None else [rank], text)
        grid = context.world.grid
        if grid.dp == 1 or grid.ep > 1:
            lone = "no replica" if grid.dp == 1 else "no replica of all experts"
            why = f"{lone} tells a device that errs the same way each time from the data"
            return Verdict("unknown", trigger, why=why)
        return self._exchange(context, trigger, start, second)

    def _roots(self, context: TrainContext, differs: list[tuple[str, bool]]) -> list[int]:
        """Return the ranks whose computation differs, on every rank."""
        lists = told(context.world, f"suspects/{context.state.step}/sent", differs)
        return list(decided(context, roots(lists)))

    def _exchange(
        self, context: TrainContext, trigger: str, start: Start, second: Computed
    ) -> Verdict:
        """Compute the samples of the next replica and compare."""
        world = context.world
        grid = world.grid
        mates = [_mate(grid, rank) for rank in range(world.size)]
        place = f"suspects/{context.state.step}"
        own = {name: state.tolist() for name, state in start.rng.items()}
        world.store.set(f"{place}/rng/{world.rank}", strict_json.dumps(own))
        theirs = json.loads(world.store.get(f"{place}/rng/{mates[world.rank]}"))
        rng = {name: state.new_tensor(theirs[name]) for name, state in start.rng.items()}
        start.restore(context, rng)
        owner = (world.coords["dp"] + 1) % grid.dp
        consumed = context.state.consumed_samples
        size = size_after(context.batch_sizes, consumed)
        batches = context.prefetcher.read_for(owner, consumed, size)
        third = computed(context, batches, measures=True)
        both = [asdict(_local(context, made)) for made in (second, third)]
        made = told(world, f"{place}/made", both)
        disputes: list[Dispute] = []
        for first in range(grid.dp if made else 0):
            ranks = [rank for rank in range(world.size) if grid.coords(rank)["dp"] == first]
            disputes += _disputes(ranks, mates, made)
        rank = culprit(disputes, self.factor)
        rivals = {rank for each in disputes for rank in (each.computer, each.owner)}
        suspected, at_fault = decided(context, [sorted(rivals), rank])
        # All ranks have read them: rank 0 has decided.
        world.store.delete_key(f"{place}/rng/{world.rank}")
        world.store.delete_key(f"{place}/made/{world.rank}")
        if not suspected:
            return Verdict("data", trigger, why="every replica computes the same bits")
        why = "replicas compute other bits from the same samples"
        ranks = suspected if at_fault is None else [at_fault]
        return _device(trigger, ranks, why)

    def _report(self, context: TrainContext, step: int, verdict: Verdict, made: Computed) -> None:
        """Record the verdict and say it; end the run if a device is at fault."""
        world = context.world
        where = f"{platform.node()}, {world.torch_device}"
        machines = decided(context, told(world, f"suspects/{step}/machines", where))
        verdict.machines = [machines[rank] for rank in verdict.ranks]
        if verdict.kind != "device":
            verdict.documents = worst_documents(context, made.reports)
        context.hooks.log(context, step, {"attribution": asdict(verdict)})
        if verdict.kind == "device":
            raise DeviceFault.of(_words(step, verdict), verdict.rank)
        if world.is_rank0:
            warn(_words(step, verdict))


def _words(step: int, verdict: Verdict) -> str:
    reason = "" if verdict.trigger == INTERVAL else f"{verdict.trigger}; "
    if verdict.kind != "device":
        samples = "; ".join(verdict.documents)
        found = "the data is at fault" if verdict.kind == "data" else "cannot tell"
        return (
            f"step {step}: {reason}computed again with the same bits: {found}, because"
            f" {verdict.why}; {samples}"
        )
    who = " or ".join(
        f"rank {rank} ({machine})"
        for rank, machine in zip(verdict.ranks, verdict.machines, strict=True)
    )
    named = f"the device of {who} is at fault: " if who else "a device is at fault: "
    return f"step {step}: {reason}{named}{verdict.why}; nothing of this step is saved"


def _device(trigger: str, ranks: list[int], why: str) -> Verdict:
    return Verdict("device", trigger, ranks[0] if len(ranks) == 1 else None, ranks, why)


def computed(
    context: TrainContext, batches: Sequence[Batch], *, measures: bool = False
) -> Computed:
    """Compute the gradients of a step and record what this rank sends."""
    recorder = Recorder(context.world.rank, measures)
    config = context.state.chunks[0].config
    finalize = config.finalize_model_grads_func
    buffers = [b.grad_data for group in _bucket_groups(context) for b in group.buckets]
    local = 0

    def finalized(*given: Any, **named: Any) -> Any:
        nonlocal local
        # With overlap, the sums over replicas are under way, and what was given is recorded.
        if not context.run.parallel.overlap_grad_reduce:
            recorder.note_own("gradients", buffers)
        local = len(recorder.keys)
        return finalize(*given, **named)

    config.finalize_model_grads_func = finalized
    try:
        with recorder.listening():
            reports = steps.gradients(context, batches)
    finally:
        config.finalize_model_grads_func = finalize
    recorder.note_own("loss", reports)
    recorder.note_own("summed gradients", buffers)
    device = context.world.torch_device
    sums = torch.stack([each.to(device) for each in recorder.sums]).tolist()
    sizes = [float(each) for each in recorder.sizes]
    return Computed(reports, recorder.keys, sums, sizes, local)


def _computed_only(
    context: TrainContext, batches: Sequence[Batch], *, measures: bool = False
) -> Computed:
    """Compute the gradients of a step and record nothing."""
    return Computed(steps.gradients(context, batches), [], [], [], 0)


def weight_sums(context: TrainContext) -> torch.Tensor:
    """Return the checksum of each weight of this rank, int64 [tensors]."""
    with torch.no_grad():
        own = [own.weight for chunk in context.state.chunks for own in local_params(chunk)]
        return torch.stack([checksum(weight) for weight in own])


def gradient_norm(context: TrainContext) -> float:
    """Return the length of the summed gradients of all ranks as one vector.

    What several ranks hold counts several times, which no comparison of steps notices. In fp32,
    where an overflow is an anomaly, too.
    """
    squares = torch.zeros((), dtype=torch.float64, device=context.world.torch_device)
    for group in _bucket_groups(context):
        for bucket in group.buckets:
            part = bucket.grad_data
            if group.ddp_config.use_distributed_optimizer:
                # The sum over replicas is in this rank's shard only.
                ranks = group.intra_distributed_optimizer_instance_size
                part = part.chunk(ranks)[group.intra_distributed_optimizer_instance_rank]
            squares += torch.linalg.vector_norm(part, dtype=torch.float32).double().square()
    dist.all_reduce(squares)
    return math.sqrt(squares.item())


def worst_documents(context: TrainContext, reports: Sequence[torch.Tensor]) -> list[str]:
    """Return the samples of the micro-batch with the largest loss of a step, on every rank."""
    samples = samples_of(context, *worst_micro_batch(context, reports))
    return [
        f"sample {one['sample']}" + (f" of {one['place']}" if one["place"] else "")
        for one in samples
    ]


def _flags(one: Computed, other: Computed) -> list[tuple[str, bool]]:
    """Return what was sent in both computations, and whether it differs."""
    if one.keys == other.keys:
        pairs = zip(one.sums, other.sums, strict=True)
        return [(key, a != b) for key, (a, b) in zip(one.keys, pairs, strict=True)]
    # Before megatron-core knows in which order gradients become ready, it sends them in another.
    known = dict(zip(other.keys, other.sums, strict=True))
    results = zip(one.keys, one.sums, strict=True)
    return [(key, value != known.get(key)) for key, value in results if key.startswith(OWN)]


def _local(context: TrainContext, made: Computed) -> Computed:
    """Return the part of a computation that depends on samples and weights only: before gradients
    are added up over replicas, and without the gather of each rank's own shard of weights.
    """
    groups = _bucket_groups(context) if context.run.parallel.overlap_param_gather else ()
    names = {group.intra_distributed_optimizer_instance_group.group_name for group in groups}
    kept = [
        place
        for place, key in enumerate(made.keys[: made.local])
        if key.partition(":")[0] not in names or "gather" not in key
    ]
    keys = [made.keys[place] for place in kept]
    sums = [made.sums[place] for place in kept]
    sizes = [made.sizes[place] for place in kept]
    return Computed([], keys, sums, sizes, len(kept))


def _bucket_groups(context: TrainContext) -> list[Any]:
    """Return megatron-core's groups of gradient buckets."""
    chunks = context.state.chunks
    return [
        group
        for chunk in chunks
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
    ]


def _disputes(
    ranks: Sequence[int], mates: Sequence[int], made: Sequence[Sequence[dict[str, Any]]]
) -> list[Dispute]:
    """Return the ranks of a replica that computed other bits than those that own the samples."""
    flags = []
    for rank in ranks:
        own = made[mates[rank]][0]
        done = made[rank][1]
        pairs = zip(done["keys"], done["sums"], own["sums"], strict=False)
        flags.append([(key, a != b) for key, a, b in pairs])
    found = []
    for place in roots(flags):
        rank = ranks[place]
        at = next(i for i, (_, differs) in enumerate(flags[place]) if differs)
        sizes = made[rank][1]["sizes"][at], made[mates[rank]][0]["sizes"][at]
        found.append(Dispute(rank, mates[rank], *sizes))
    return found


def _mate(grid: Any, rank: int) -> int:
    """Return the rank of the same place in the next replica."""
    at = grid.coords(rank)
    dp = (at["dp"] + 1) % grid.dp
    found: int = grid.rank_of(tp=at["tp"], cp=at["cp"], dp=dp, pp=at["pp"])
    return found


def _any(context: TrainContext, flag: bool) -> bool:
    """Return whether any rank has a flag."""
    return bool(_named(context, flag))


def _named(context: TrainContext, flag: bool) -> list[int]:
    """Return the ranks that have a flag, on every rank."""
    world = context.world
    flags = torch.zeros(world.size, dtype=torch.int32, device=world.torch_device)
    flags[world.rank] = int(flag)
    dist.all_reduce(flags)
    return flags.nonzero().flatten().tolist()
