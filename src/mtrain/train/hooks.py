"""What a run does around its steps: metrics, progress, evaluation, checkpoints, memory,
a profile.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TextIO

import torch

from mtrain import strict_json, units
from mtrain.ckpt import state as ckpt_state
from mtrain.errors import warn
from mtrain.models.registry import family_of
from mtrain.plan.compare import ALLOCATED, MEASURED, METRICS, PEAKS, by_rank_of, lines_of
from mtrain.train.by_time import EVALUATE, SAVE
from mtrain.train.progress import Progress
from mtrain.train.step import Parts, StepResult, summed
from mtrain.train.tally import may_pad
from mtrain.train.trainer import Hook
from mtrain.world.init import World

PEAKS_S = 10.0
"""How long rank 0 waits for the memory peaks of the other ranks."""


class Metrics(Hook):
    """One line of JSON per step in `metrics.jsonl`, written by rank 0.

    Keys: time (when the line was written, RFC 3339 in UTC), step, loss, grad_norm, lr, tokens (that
    are predicted), batch_size, samples (consumed so far), tokens_per_s (that are there, predicted
    from or not: never padding), step_s and its parts data_s, forward_backward_s, optimizer_s;
    data_wait_s, the part of data_s in which samples were waited for, and data_wait_share, its share
    of the step; model_flops of these tokens, each document as long as it is, by the causal count,
    tflops_per_rank, and, where the cluster states a peak, mfu (causal) and mfu_full (attention
    counted in full), of the peak of the format that linear layers multiply in; where weights have
    another, mfu_bf16 or mfu_fp16 of its peak. Where samples may be padded: padding_share, of their
    positions.
    `trainer.z_loss_coeff`: z_loss, which is no part of loss. `log.token_accuracy`: token_accuracy.
    fp16: loss_scale, and skipped where the update was; the norm of a gradient that overflowed is
    null, as is every number that is not finite. `beside` is what is planned of the step. Lines of
    an evaluation have time, step, valid_loss, and valid_samples and valid_tokens, which it is over.
    """

    def __init__(
        self, folder: Path, beside: Callable[[Parts, StepResult], dict[str, float]] | None = None
    ) -> None:
        self.path = folder / METRICS
        self.beside = beside
        self.file: TextIO | None = None
        self.known: set[tuple[int, str]] = set()

    def start(self, parts: Parts) -> None:
        """Open the file; after a resume, without the lines of steps that are made again."""
        if not parts.world.is_rank0:
            return
        kept = [line for line in lines_of(self.path) if line["step"] <= parts.state.step]
        self.known = {
            (line["step"], key)
            for line in kept
            for key in line
            if key == "lr" or key.endswith("_loss")
        }
        draft = self.path.with_suffix(".draft")
        draft.write_text("".join(strict_json.dumps(line) + "\n" for line in kept))
        draft.replace(self.path)
        self.file = self.path.open("a")

    def after_step(self, parts: Parts, result: StepResult) -> None:
        """Write the step's line."""
        self._write(
            step_record(parts, result) | (self.beside(parts, result) if self.beside else {})
        )

    def evaluation(self, step: int, name: str, loss: float, samples: int, tokens: int) -> None:
        """Write the line of an evaluation over so many samples, unless a resumed run has it
        already.
        """
        if (step, f"{name}_loss") not in self.known:
            over = {f"{name}_samples": samples, f"{name}_tokens": tokens}
            self._write({"step": step, f"{name}_loss": loss, **over})

    def owes(self, step: int, name: str) -> bool:
        """Return whether a resumed run made a step and did not evaluate after it. Rank 0 knows."""
        return (step, "lr") in self.known and (step, f"{name}_loss") not in self.known

    def close(self) -> None:
        """Close the file once it is on disk."""
        if self.file is not None:
            self._try(self._sync)
        self._release()

    def _write(self, record: dict[str, Any]) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        text = strict_json.dumps({"time": now, **record}) + "\n"
        if self.file is not None:
            self._try(lambda: self._append(text))

    def _append(self, text: str) -> None:
        assert self.file is not None
        self.file.write(text)
        self.file.flush()

    def _sync(self) -> None:
        assert self.file is not None
        self.file.flush()
        os.fsync(self.file.fileno())

    def _try(self, work: Callable[[], None]) -> None:
        """Work on the file; where that fails, say so and write no more: a run is worth more than
        its log.
        """
        try:
            work()
        except OSError as error:
            warn(
                f"{self.path} cannot be written ({error.strerror or error}); training goes on"
                " without it"
            )
            self._release()

    def _release(self) -> None:
        if self.file is not None:
            with suppress(OSError):  # what could not be written is still in its buffer
                self.file.close()
            self.file = None


def step_record(parts: Parts, result: StepResult) -> dict[str, Any]:
    """Return a step as a record of the metrics file."""
    run = parts.run
    world = parts.world
    seconds = result.seconds
    rate = result.flops / seconds["step"] / world.size
    record: dict[str, Any] = {
        "step": result.step,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "tokens": result.tokens,
        "batch_size": result.batch_size,
        "samples": result.consumed_samples,
        "tokens_per_s": result.read / seconds["step"],
        **{f"{name}_s": round(value, 6) for name, value in seconds.items()},
        "data_wait_share": round(result.data_wait_share, 6),
        "model_flops": result.flops,
        "tflops_per_rank": rate / 1e12,
    }
    if may_pad(run):
        record["padding_share"] = round(result.padding_share, 6)
    if run.trainer.z_loss_coeff:
        record["z_loss"] = result.z_loss
    if run.log.token_accuracy:
        record["token_accuracy"] = result.token_accuracy
    if result.loss_scale is not None:
        record["loss_scale"] = result.loss_scale
    if not result.updated:
        record["skipped"] = True
    peak = run.cluster.peak_tflops.get(run.precision.multiplies_in)
    if peak:
        record["mfu"] = rate / (peak * 1e12)
        record["mfu_full"] = record["mfu"] * result.full_flops / result.flops
    other = run.cluster.peak_tflops.get(run.precision.format)
    form = run.precision.format
    if other and form != run.precision.multiplies_in:
        record[f"mfu_{form}"] = rate / (other * 1e12)
    return record


class Evaluation(Hook):
    """Validation loss during the run and after it."""

    collective = True

    def __init__(self, metrics: Metrics, progress: Progress) -> None:
        self.metrics = metrics
        self.progress = progress
        self.last: tuple[int, float] | None = None
        self.tried = -1
        """The step after which it evaluated last, or was about to."""

    def start(self, parts: Parts) -> None:
        """Evaluate where a resumed run was stopped, or ended, before it had done so after its last
        step.
        """
        if self._is_due(parts) and parts.state.step < parts.run.trainer.steps:
            owes = self.metrics.owes(parts.state.step, "valid") if parts.world.is_rank0 else False
            if parts.world.tell("owes" if owes else "") == "owes":
                self._evaluate(parts)

    def after_step(self, parts: Parts, result: StepResult) -> None:
        """Evaluate every `trainer.eval_interval` steps, and every `trainer.eval_minutes`."""
        # of several steps that are told at once, the model is that of the last
        if result.step == parts.state.step and (
            self._is_due(parts) or parts.by_time.now & EVALUATE
        ):
            self._evaluate(parts)

    def finish(self, parts: Parts) -> None:
        """Evaluate after the last step, unless that was just done; a run that was stopped is not at
        its end.
        """
        if self.tried != parts.state.step and parts.state.step >= parts.run.trainer.steps:
            self._evaluate(parts)

    def _is_due(self, parts: Parts) -> bool:
        interval = parts.run.trainer.eval_interval
        step = parts.state.step
        return bool(interval) and step > 0 and step % (interval or 1) == 0

    def _evaluate(self, parts: Parts) -> None:
        """Evaluate, unless a rank is asked to stop before that is done; a resumed run makes up for
        it.
        """
        iters = parts.run.trainer.eval_iters
        self.tried = parts.state.step
        parts.by_time.done(EVALUATE)
        if parts.valid_data is None or not iters:
            return
        found = None if parts.stops else summed(parts, parts.valid_data, iters, until_stop=True)
        if found is None:
            parts.stops = True
            what = f"the evaluation of step {parts.state.step}"
            if parts.state.step >= parts.run.trainer.steps:
                what = "the run is finished, its last evaluation"
            self.progress.note(f"stopped on request: {what} is left out")
            return
        nats, tokens = found
        loss = nats / max(1, tokens)
        samples = parts.valid_data.counted
        self.last = (parts.state.step, loss)
        self.metrics.evaluation(parts.state.step, "valid", loss, samples, tokens)
        model = parts.run.model
        if family_of(model).tokens_alone(model):
            perplexity = f"perplexity {math.exp(min(loss, 700.0)):.1f}"
        else:
            perplexity = ""
        over = "; ".join(filter(None, (perplexity, model.padding_in_words)))
        said = f"validation loss {loss:.4f}" + (f" ({over})" if over else "")
        asked = iters * parts.run.trainer.batch
        few = f", all that there are of {asked} that are asked for" if samples < asked else ""
        self.progress.note(f"step {parts.state.step}: {said} over {samples} samples{few}")


class Checkpoints(Hook):
    """State on disk every `checkpoint.save_interval` steps and `checkpoint.save_minutes`, at the
    end, and when a stop is asked.

    Also after an error of another hook, where every rank can take part.
    """

    collective = True

    def __init__(self, root: Path, progress: Progress, data_facts: dict[str, Any]) -> None:
        self.root = root
        self.progress = progress
        self.data_facts = data_facts
        self.saved_step = 0
        self.path: Path | None = None

    def start(self, parts: Parts) -> None:
        """What was resumed from needs no saving."""
        self.saved_step = parts.state.step

    def after_step(self, parts: Parts, result: StepResult) -> None:
        """Save at the interval, or when it is time."""
        interval = parts.run.checkpoint.save_interval
        timely = bool(parts.by_time.now & SAVE) and result.step == parts.state.step
        if timely or (interval and result.step % interval == 0):
            self._save(parts)

    def finish(self, parts: Parts) -> None:
        """Save the last state."""
        stopped = parts.state.step < parts.run.trainer.steps
        # a run that is stopped before its first step has something to resume from, too
        unsaved = self.saved_step != parts.state.step or parts.state.step == 0
        if (parts.run.checkpoint.save_final or stopped) and unsaved:
            self._save(parts)

    def on_error(self, parts: Parts, error: BaseException, *, saveable: bool) -> None:
        """Save the steps since the last checkpoint, unless there are none."""
        if saveable and self.saved_step != parts.state.step:
            self._save(parts)

    def _save(self, parts: Parts) -> None:
        self.path = ckpt_state.save(self.root, parts.run, parts.world, parts.state, self.data_facts)
        self.saved_step = parts.state.step
        parts.by_time.done(SAVE)
        if not parts.world.is_rank0:  # of thousands of ranks one looks at the files of all
            return
        size = ""
        with suppress(OSError):  # it is committed, whatever becomes of this
            size = f" ({units.bytes_(sum(f.stat().st_size for f in self.path.iterdir()))})"
        self.progress.note(f"step {parts.state.step}: saved {self.path}{size}")


class Memory(Hook):
    """The memory of every rank, in `memory.json` of the run folder; `plan --compare` puts it beside
    the plan.

    `peak_bytes_by_rank` is the most that was allocated; where they are known,
    `reserved_bytes_by_rank` is the most that the allocator held, and `driver_bytes_by_rank` what is
    in use of the whole device at the end, the context and other processes included. The numbers
    come over the store, so no rank waits for one that has none to give: its place is null.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / PEAKS

    def finish(self, parts: Parts) -> None:
        """Gather the peaks."""
        world = parts.world
        try:
            mine = world.device.memory_stats() | {"driver_bytes": world.device.driver_bytes()}
            told = {key: int(value) for key in MEASURED if (value := mine.get(key)) is not None}
            world.store.set(f"peak/{world.rank}", strict_json.dumps(told))
        finally:
            found = self._of_ranks(world) if world.is_rank0 else []
        if found:
            known = [
                key for key in MEASURED if key == ALLOCATED or any(key in one for one in found)
            ]
            by_rank = {by_rank_of(key): [one.get(key) for one in found] for key in known}
            self.path.write_text(strict_json.dumps(by_rank))

    def _of_ranks(self, world: World) -> list[dict[str, int]]:
        keys = [f"peak/{rank}" for rank in range(world.size)]
        with suppress(RuntimeError):  # torch's errors of a store: some rank has none
            world.store.wait(keys, timedelta(seconds=PEAKS_S))
        return [
            json.loads(world.store.get(key)) if world.store.check([key]) else {} for key in keys
        ]


class Profile(Hook):
    """A torch.profiler trace of step `trainer.profile_step` of the ranks `trainer.profile_ranks`,
    in the run folder as `trace_rank0.json.gz`.
    """

    def __init__(self, folder: Path, step: int, ranks: Sequence[int]) -> None:
        self.folder = folder
        self.step = step
        self.ranks = ranks
        self.profiler: Any = None

    def waits_for(self, parts: Parts, step: int) -> bool:
        """Return the trace has one step alone."""
        return step in (self.step - 1, self.step)

    def start(self, parts: Parts) -> None:
        """Begin at once where the first step is the one."""
        self._begin(parts)

    def after_step(self, parts: Parts, result: StepResult) -> None:
        """End the trace after its step, or begin it after the step before."""
        if self.profiler is not None:
            profiler = self.profiler
            self.profiler = None
            profiler.stop()
            profiler.export_chrome_trace(str(self.folder / f"trace_rank{parts.world.rank}.json.gz"))
        if result.step == parts.state.step:
            self._begin(parts)

    def close(self) -> None:
        """Stop a trace that an error cut off."""
        if self.profiler is not None:
            self.profiler.stop()
            self.profiler = None

    def _begin(self, parts: Parts) -> None:
        if parts.state.step == self.step - 1 and parts.world.rank in self.ranks:
            self.profiler = torch.profiler.profile()
            self.profiler.start()
