"""A line of JSON per step and per evaluation in `metrics.jsonl`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from mtrain import strict_json
from mtrain.config.compose.paths import METRICS
from mtrain.errors import warn
from mtrain.plan.compare import lines_of
from mtrain.train.hooks.base import Hook
from mtrain.train.loop.context import TrainContext


class Metrics(Hook):
    """One line of JSON per step in `metrics.jsonl`, written by rank 0.

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
    z_loss with `trainer.z_loss_coeff` (no part of loss), token_accuracy with `log.token_accuracy`.
    fp16: loss_scale, and skipped where the update was; the norm of a gradient that overflowed is
    null, as is every number that is not finite. `hooks.planned` adds what was planned of the step.
    Lines of an evaluation have time, step, valid_loss, and valid_samples and valid_tokens, which it
    is over.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / METRICS
        self.file: TextIO | None = None
        self.known: set[tuple[int, str]] = set()
        """Steps and evaluations that a resumed run has lines of."""

    def start(self, context: TrainContext) -> None:
        """Open the file; after a resume, without the lines of steps that are made again."""
        if not context.world.is_rank0:
            return
        kept = [line for line in lines_of(self.path) if line["step"] <= context.state.step]
        for line in kept:
            self.known |= {(line["step"], key) for key in line if _identifies(key)}
        # Write a copy and rename it: a run that is killed here keeps the lines that it had.
        draft = self.path.with_suffix(".draft")
        draft.write_text("".join(strict_json.dumps(line) + "\n" for line in kept))
        draft.replace(self.path)
        self.file = self.path.open("a")

    def log(self, context: TrainContext, step: int, metrics: Mapping[str, Any]) -> None:
        """Write a line, unless a resumed run has this evaluation already."""
        if any((step, key) in self.known for key in metrics if _identifies(key)):
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        text = strict_json.dumps({"time": now, "step": step, **metrics}) + "\n"
        if self.file is not None:
            self._try(lambda: self._append(text))

    def owes(self, step: int, name: str) -> bool:
        """Return whether a resumed run made a step and did not evaluate after it; only rank 0
        knows.
        """
        return (step, "lr") in self.known and (step, f"{name}_loss") not in self.known

    def close(self) -> None:
        """Close the file once it is on disk."""
        if self.file is not None:
            self._try(self._sync)
        self._release()

    def _append(self, text: str) -> None:
        assert self.file is not None
        self.file.write(text)
        # Unflushed, the lines of a run that is killed would be lost, and its checkpoint not.
        self.file.flush()

    def _sync(self) -> None:
        assert self.file is not None
        self.file.flush()
        os.fsync(self.file.fileno())

    def _try(self, work: Callable[[], None]) -> None:
        """Work on the file; if that fails, warn and write no more: a run is worth more than its
        log.
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


def _identifies(key: str) -> bool:
    """Return whether a key marks a step's line (`lr`) or an evaluation's (`valid_loss`)."""
    return key == "lr" or key.endswith("_loss")
