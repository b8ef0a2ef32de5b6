"""`log.on_anomaly=trace`: the report of an anomalous step, and the reference that it needs."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mtrain import strict_json
from mtrain.config.compose.paths import ANOMALIES
from mtrain.config.resolve.batches import size_after
from mtrain.data import Splits
from mtrain.data.samples.origin import documents_of, origin
from mtrain.errors import warn
from mtrain.mcore.state.optimizer_state import loss_scale
from mtrain.train.loop import step as steps
from mtrain.train.loop.context import TrainContext
from mtrain.train.loop.prefetch import Batch
from mtrain.train.preview import previewed
from mtrain.train.sample_page import page_of
from mtrain.train.suspects.judge import BACKWARD, NOT_FINITE, Event, Healthy, facts, first_of
from mtrain.train.suspects.tracer import Tracer

REPORT = "report.json"
PAGE = "samples.html"
FORMAT = 1
FIRST_STEPS = 3
"""Steps of a process that are traced in any case, so that there is a reference."""
LARGEST = 1e300
"""The loss of a micro-batch whose loss is not a number, where losses are compared."""
MOST_REPORTS = 10
"""Reports of a process: a run that stays abnormal must not fill the disk."""


class Tracing:
    """The trace of anomalous steps, and of healthy ones for comparison."""

    def __init__(self, context: TrainContext, splits: Splits, home: Path) -> None:
        """Write reports below the run folder `home`."""
        self.context = context
        self.splits = splits
        self.home = home
        self.interval = context.run.log.trace_interval
        self.tracer = Tracer(context)
        self.healthy = Healthy()
        self.events: list[Event] = []
        self.begun = context.state.step
        self.reported = 0
        self.asked = 0
        self.first: dict[str, Any] | None = None
        """The finding of the first computation of a step that was traced in its turn."""

    def is_due(self, step: int) -> bool:
        """Return whether a step is traced as a reference, the same on every rank."""
        return step % self.interval == 0 or step - self.begun <= FIRST_STEPS

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Trace what is computed inside."""
        with self.tracer.listening():
            yield
        self.events = self.tracer.events()

    def reference(self, context: TrainContext, batches: Sequence[Batch]) -> list[torch.Tensor]:
        """Compute the gradients of a healthy step and keep it as a reference."""
        with self.listening():
            reports = steps.gradients(context, batches)
        self._learn()
        return reports

    def _learn(self) -> None:
        self.healthy.learn(self.events)
        self.tracer.relations.learn()

    def settled(self, anomaly: str) -> str:
        """Keep a healthy traced step as a reference; return its anomaly, or ""."""
        self.first = self.found()
        if self.first is None and not anomaly:
            self._learn()
        # fp16 finds its loss scale by gradients that overflow.
        if self.first is not None and loss_scale(self.context.state.optimizer) is not None:
            overflows = self.first["kind"] == NOT_FINITE and self.first["direction"] == BACKWARD
            self.first = None if overflows else self.first
        if self.first is None or anomaly or self.is_silent:
            return anomaly
        return words(self.first)

    @property
    def is_silent(self) -> bool:
        """Return whether this process has written all reports that it may."""
        return self.reported >= MOST_REPORTS

    def found(self) -> dict[str, Any] | None:
        """Return all ranks' first abnormal output in the last trace, alike on every rank."""
        world = self.context.world
        finding = self.healthy.first_abnormal(self.events)
        own = None if finding is None else facts(finding, world.rank)
        if finding is not None and own is not None:
            own["weights_not_finite"] = self.tracer.bad_weights(finding.event.name)
            own["machine"] = f"{platform.node()}, {world.torch_device}"
        some = torch.tensor([own is not None], dtype=torch.int32, device=world.torch_device)
        dist.all_reduce(some)
        if not bool(some):
            return None
        self.asked += 1
        place = f"trace/{self.context.state.step}/{self.asked}"
        first: dict[str, Any] | None = decided(self.context, first_of(told(world, place, own)))
        # All ranks have read it: rank 0 has decided.
        world.store.delete_key(f"{place}/{world.rank}")
        return first

    def report(self, step: int, anomaly: str, reports: Sequence[torch.Tensor]) -> None:
        """Write the report of a step that was computed again with the tracer."""
        self.reported += 1
        context = self.context
        again = self.found()
        finding = again or self.first
        self.first = None
        report: dict[str, Any] = {"format": FORMAT, "step": step, "anomaly": anomaly}
        report |= {"found": finding, "reproduced": again is not None}
        # Without a wrong module it may be the data: the micro-batch of the largest loss.
        rank, micro_batch = worst_micro_batch(context, reports)
        if finding is not None:
            rank = finding["rank"]
            micro_batch = finding["micro_batch"]
        report |= {"rank": rank, "micro_batch": micro_batch}
        report["samples"] = samples_of(context, rank, micro_batch)
        if context.world.is_rank0:
            file = self.home / ANOMALIES / f"step_{step}" / REPORT
            write(file, report, context, self.splits)
            largest = f"micro-batch {micro_batch} of rank {rank} has the largest loss"
            normal = f"no output of a module is abnormal, and {largest}"
            named = normal if finding is None else words(finding)
            if finding is not None and again is None:
                named += "; computed again, every output is normal"
            told_once = named if named.startswith(anomaly) else f"{anomaly}; {named}"
            warn(f"step {step}: {told_once}; {file}")
        context.hooks.call("on_anomaly", context, report)


def words(finding: dict[str, Any]) -> str:
    """Return the module, direction, rank and micro-batch of a finding, and why it is one."""
    backward = finding["direction"] != "forward"
    side = f"gradient of {finding['side']}" if backward else finding["side"]
    weights = finding["weights_not_finite"]
    why = finding["why"] + (f"; {weights} of its weights are not finite" if weights else "")
    return (
        f"the {side} of {finding['module']} on rank {finding['rank']} is {finding['kind']}"
        f" ({finding['direction']}, micro-batch {finding['micro_batch']}: {why})"
    )


def worst_micro_batch(context: TrainContext, reports: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Return the rank and micro-batch with the largest loss of a step, alike on all ranks."""
    world = context.world
    place = context.table.place("loss")
    losses = [float(report[place]) for report in reports]
    losses = [loss if math.isfinite(loss) else LARGEST for loss in losses]
    # Other stages and context-parallel ranks have no whole loss; theirs are left out or smaller.
    worst = torch.full((world.size, 2), -1.0, dtype=torch.float64, device=world.torch_device)
    if losses:
        worst[world.rank] = torch.tensor([max(losses), losses.index(max(losses))])
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    rank = int(worst[:, 0].argmax())
    return rank, int(worst[rank, 1])


def samples_of(context: TrainContext, rank: int, micro_batch: int) -> list[dict[str, Any]]:
    """Return the samples of a micro-batch of a rank, and the documents that they are of."""
    data = context.train_data.of_rank(context.world.grid.coords(rank)["dp"])
    consumed = context.state.consumed_samples
    numbers = data.numbers(consumed, size_after(context.batch_sizes, consumed))[micro_batch]
    found = []
    for number in numbers.tolist():
        corpus, documents = documents_of(data.samples, number)
        named = {"corpus": corpus, "documents": documents}
        found.append({"sample": number, **named, "place": origin(data.samples, number)})
    return found


def write(file: Path, report: dict[str, Any], context: TrainContext, splits: Splits) -> None:
    """Write a report, with the text of its samples, and next to it the page that shows them."""
    folder = file.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        numbers = [each["sample"] for each in report["samples"]]
        if numbers:
            # Without a tokenizer, tokens are numbers.
            between = " " if splits.tokenizer is None else ""
            shown = previewed(context.run, splits, "train", numbers)
            for each, one in zip(report["samples"], shown, strict=False):
                each["text"] = between.join(token.text for token in one.tokens)
            (folder / PAGE).write_text(page_of(shown, splits.remarks()), encoding="utf-8")
        file.write_text(strict_json.dumps(report, indent=1))
    except OSError as error:
        warn(f"{folder} cannot be written ({error.strerror or error}); training goes on")


def told(world: Any, place: str, value: Any) -> list[Any]:
    """Give a value of JSON to rank 0; return those of all ranks there, and nothing elsewhere."""
    world.store.set(f"{place}/{world.rank}", strict_json.dumps(value))
    if not world.is_rank0:
        return []
    return [json.loads(world.store.get(f"{place}/{rank}")) for rank in range(world.size)]


def decided(context: TrainContext, value: Any) -> Any:
    """Return the value of rank 0, on every rank."""
    return json.loads(context.world.tell(strict_json.dumps(value)))
