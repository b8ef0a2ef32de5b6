"""A line of JSON per step and per evaluation in `metrics.jsonl`."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from mtrain import strict_json
from mtrain.errors import warn
from mtrain.plan.compare import METRICS, lines_of
from mtrain.train.hooks.base import Hook
from mtrain.train.loop.step import StepResult, TrainContext
from mtrain.train.loop.tally import may_pad


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
        self,
        folder: Path,
        beside: Callable[[TrainContext, StepResult], dict[str, float]] | None = None,
    ) -> None:
        self.path = folder / METRICS
        self.beside = beside
        self.file: TextIO | None = None
        self.known: set[tuple[int, str]] = set()

    def start(self, context: TrainContext) -> None:
        """Open the file; after a resume, without the lines of steps that are made again."""
        if not context.world.is_rank0:
            return
        kept = [line for line in lines_of(self.path) if line["step"] <= context.state.step]
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

    def after_step(self, context: TrainContext, result: StepResult) -> None:
        """Write the step's line."""
        self._write(
            step_record(context, result) | (self.beside(context, result) if self.beside else {})
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


def step_record(context: TrainContext, result: StepResult) -> dict[str, Any]:
    """Return a step as a record of the metrics file."""
    run = context.run
    world = context.world
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
