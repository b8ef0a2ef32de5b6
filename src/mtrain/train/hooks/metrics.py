"""The event stream of a run, and `metrics.jsonl`, which is made of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import mtrain
from mtrain import errors, strict_json
from mtrain.ckpt.folder import step_of
from mtrain.config.compose.paths import METRICS
from mtrain.errors import Preempted
from mtrain.events import log
from mtrain.events.log import Journal, Writer
from mtrain.events.read import parsed
from mtrain.goodput.meter import EVALUATING, SAVING
from mtrain.plan.compare import lines_of
from mtrain.train.hooks.base import Hook, reason
from mtrain.train.loop.context import TrainContext
from mtrain.train.loop.interruptions import SAVE
from mtrain.train.loop.result import StepResult

RESTARTS = "restarts.jsonl"
EVENT = ("anomaly", "found", "reproduced", "rank", "micro_batch")
"""Keys of the report of an anomaly that its event has, too."""
GRACE_S = 0.02
"""Seconds that a step waits for its line, so that a killed process leaves it behind."""
SAVE_S = 5.0
"""The same before a save: a run that resumes from it does not make the step again."""


class Metrics(Hook):
    """Events of the run in `events/`, and of those one line per step and evaluation in
    `metrics.jsonl`, written by a thread of rank 0.

    Keys: time (when the line was written, RFC 3339 in UTC), step, loss, grad_norm, lr, tokens
    (predictions that count), batch_size, samples (consumed so far), tokens_per_s (tokens without
    padding, predicted from or not), step_s and its parts data_s, forward_backward_s, optimizer_s;
    data_wait_s, the part of data_s in which the host waited for samples, and data_wait_share, its
    share of the step; own_s, the part of step_s in which rank 0 did not wait for other ranks, with
    `resilience.straggler_interval` in the steps that are timed; model_flops of these tokens, each
    document as long as it is, by the causal count, tflops_per_rank, and, where the cluster states a
    peak, mfu (causal) and mfu_full (attention counted in full), of the peak of the format that
    linear layers multiply in; where weights have another, mfu_bf16 or mfu_fp16 of its peak. Where
    samples may be padded: padding_share, of their positions. Further metrics of the objective:
    z_loss with `trainer.z_loss_coeff` (no part of loss), token_accuracy with `log.token_accuracy`;
    rewards, lengths and divergences of pairs of answers (`mtrain.train.pairs`). profiled: true in a
    step that a profile made longer. fp16: loss_scale, and skipped where the update was; the norm of
    a gradient that overflowed is null, as is every number that is not finite. `hooks.planned` adds
    what was planned of the step.
    Lines of an evaluation have time, step, valid_loss, and valid_samples and valid_tokens, which it
    is over; of pairs of answers, and of answers to prompts, also their further metrics after
    `valid_`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / METRICS
        self.writer: Writer | None = None
        self.known: set[tuple[int, str]] = set()
        """Steps and evaluations that a resumed run has lines of."""
        self.charged: dict[str, float] = {}
        """Seconds of evaluation and of saves that events have."""
        self.end = {"how": "failed"}
        self.step = 0

    def start(self, context: TrainContext) -> None:
        """Open the files; after a resume, `metrics.jsonl` loses the lines of repeated steps."""
        if not context.world.is_rank0:
            return
        self.step = context.state.step
        kept = [line for line in lines_of(self.path) if line["step"] <= self.step]
        for line in kept:
            self.known |= {(line["step"], key) for key in line if _identifies(key)}
        # Write a copy and rename it: a run that is killed here keeps the lines that it had.
        draft = self.path.with_suffix(".draft")
        draft.write_text("".join(strict_json.dumps(line) + "\n" for line in kept))
        draft.replace(self.path)
        before = log.attempts(self.folder)
        stream = log.next_attempt(self.folder)
        journals = [Journal(stream, lambda event: event), Journal(self.path, log.metrics_line)]
        self.writer = Writer(journals)
        restarts = _restarts(self.folder)
        facts = {"attempt": int(stream.stem), "version": mtrain.__version__}
        facts |= {"ranks": context.world.size, "restarts": len(restarts)}
        self.writer.put(log.START, self.step, **facts)
        for body in restarts[_recorded(before) :]:
            self.writer.put(log.RESTART, body["step"], facts=body)
        errors.listeners.append(self._warned)
        # Sinks need the first line: it tells which steps of earlier attempts are made again.
        self.writer.settle(GRACE_S)

    def log(self, context: TrainContext, step: int, metrics: Mapping[str, Any]) -> None:
        """Write a line, unless a resumed run has this evaluation already."""
        if self.writer is None or any((step, k) in self.known for k in metrics if _identifies(k)):
            return
        self.step = step
        values = {name: value for name, value in metrics.items() if name != "step"}
        if "lr" in metrics:
            self.writer.put(log.STEP, step, values=values)
        else:
            seconds = self._seconds(context, EVALUATING)
            self.writer.put(log.EVALUATION, step, values=values, seconds=seconds)

    def after_step(self, context: TrainContext, result: StepResult) -> None:
        """Wait for a moment until lines are written: what is saved next has them."""
        if self.writer is None or result.step != context.state.step:
            return
        interval = context.run.checkpoint.save_interval
        saves = bool(context.by_time.now & SAVE) or (interval and result.step % interval == 0)
        self.writer.settle(SAVE_S if saves else GRACE_S)

    def saved(self, context: TrainContext, path: Path) -> None:
        """Note a checkpoint, with the seconds that the loop waited for it."""
        if self.writer is not None:
            seconds = self._seconds(context, SAVING)
            self.writer.put(log.CHECKPOINT, step_of(path), name=path.name, seconds=seconds)

    def note(self, kind: str, step: int, **facts: Any) -> None:
        """Add an event of another hook, on rank 0."""
        if self.writer is not None:
            self.writer.put(kind, step, **facts)

    def on_anomaly(self, context: TrainContext, report: Mapping[str, Any]) -> None:
        """Note an anomalous step: the first abnormal output, and its samples."""
        if self.writer is not None:
            samples = [{key: one[key] for key in ("sample", "place")} for one in report["samples"]]
            facts = {name: report[name] for name in EVENT}
            self.writer.put(log.ANOMALY, report["step"], **facts, samples=samples)

    def finish(self, context: TrainContext) -> None:
        """Note that the run came to an end, of its own or on request."""
        finished = context.state.step >= context.run.trainer.steps
        self.end = {"how": "finished" if finished else "stopped"}

    def on_error(self, context: TrainContext, error: BaseException, *, saveable: bool) -> None:
        """Note the error that ends the run."""
        how = "stopped" if isinstance(error, Preempted) else "failed"
        self.end = {"how": how, "why": reason(error)}

    def owes(self, step: int, name: str) -> bool:
        """Return whether a resumed run made a step without evaluation; only rank 0 knows."""
        return (step, "lr") in self.known and (step, f"{name}_loss") not in self.known

    def close(self) -> None:
        """Close the files once they are on disk."""
        if self.writer is not None:
            writer = self.writer
            self.writer = None
            errors.listeners.remove(self._warned)
            writer.put(log.END, self.step, **self.end)
            writer.close()

    def _warned(self, text: str) -> None:
        if self.writer is not None:
            self.writer.put(log.WARNING, self.step, text=text)

    def _seconds(self, context: TrainContext, cause: str) -> float:
        """Return the seconds that were charged to a cause since the last event of it."""
        total = context.meter.sign().seconds[cause]
        spent = total - self.charged.get(cause, 0.0)
        self.charged[cause] = total
        return round(spent, 6)


def _restarts(home: Path) -> list[dict[str, Any]]:
    """Return the lines that the launcher wrote of this run's restarts."""
    found = []
    with suppress(OSError):
        for line in (home / RESTARTS).read_text(errors="replace").splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
    return [body for body in found if isinstance(body, dict) and isinstance(body.get("step"), int)]


def _recorded(before: list[Path]) -> int:
    """Return the number of restarts that the attempts before this one knew of."""
    for file in reversed(before):
        with suppress(OSError), file.open("rb") as stream:
            event = parsed(stream.readline())
            if event is not None and isinstance(event.get("restarts"), int):
                return int(event["restarts"])
    return 0


def _identifies(key: str) -> bool:
    """Return whether a key marks a step's line (`lr`) or an evaluation's (`valid_loss`)."""
    return key == "lr" or key.endswith("_loss")
