"""The result of a step, its record for loggers, and a step that the device has not finished."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mtrain.config.schema.run import RunConfig
from mtrain.train.loop.readings import Clock, MetricTable, Reading, may_pad


@dataclass(frozen=True)
class StepResult:
    """The result of one step, the same on every rank apart from `seconds`."""

    step: int
    metrics: Mapping[str, float]
    """Metrics of the objective and of the loop over all ranks, divided; see `MetricTable`."""
    grad_norm: float
    """Global norm of the gradient before clipping; not a number where it overflowed in fp16."""
    lr: float
    """The rate that the update had, or would have had."""
    updated: bool
    """False if the update was skipped: an fp16 overflow, or above `optim.skip_above_grad_norm`."""
    skipped_updates: int
    """Updates skipped in a row, up to this step."""
    loss_scale: float | None
    """fp16: the factor on the loss of this step."""
    loss_scale_may_fall: bool
    """True where skipping updates lowers the loss scale: it exists and is above its floor."""
    positions: int
    """Positions of all samples, padding included."""
    batch_size: int
    """Samples that the step took."""
    consumed_samples: int
    extra: tuple[str, ...] = ()
    """Names of the objective's metrics that are logged next to loss and tokens."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Time of this rank by phase: data, forward_backward, optimizer, and all of the step;
    data_wait: the part of data in which the host waited for samples that were not read yet.
    """

    def result(self) -> StepResult:
        """Return itself: unlike a `Launched` step, the device has finished this one."""
        return self

    @property
    def loss(self) -> float:
        """Return the mean loss of the global batch in nats, as `trainer.loss_average` says."""
        return self.metrics["loss"]

    @property
    def tokens(self) -> int:
        """Return the number of predictions that count."""
        return int(self.metrics["tokens"])

    @property
    def z_loss(self) -> float:
        """Return the mean that z-loss adds to the loss; 0 without `trainer.z_loss_coeff`."""
        return self.metrics.get("z_loss", 0.0)

    @property
    def token_accuracy(self) -> float:
        """Return the share of `tokens` with the largest logit; 0 without `log.token_accuracy`."""
        return self.metrics.get("token_accuracy", 0.0)

    @property
    def read(self) -> int:
        """Return the tokens without padding, predicted from or not: those that speed counts."""
        return int(self.metrics["read"])

    @property
    def flops(self) -> float:
        """Return the model FLOPs of these tokens, each attending to half of its document."""
        return self.metrics["flops"]

    @property
    def full_flops(self) -> float:
        """Return the same with all of attention."""
        return self.metrics["full_flops"]

    @property
    def stop(self) -> bool:
        """Return whether a rank got a request to stop before this step."""
        return self.metrics["stops"] > 0

    @property
    def due(self) -> int:
        """Return the requests of rank 0's clock before this step; see `interruptions`."""
        return int(self.metrics["due"])

    @property
    def padding_share(self) -> float:
        """Return the share of positions that hold no token."""
        return 1 - self.read / self.positions

    @property
    def data_wait_share(self) -> float:
        """Return the share of the step in which this rank waited for samples."""
        return min(1.0, self.seconds["data_wait"] / max(self.seconds["step"], 1e-9))


class Launched:
    """A step that the device has queued; its result is known once the device has finished it."""

    def __init__(
        self, reading: Reading, table: MetricTable, clock: Clock, known: dict[str, Any]
    ) -> None:
        self._reading = reading
        self._table = table
        self._clock = clock
        self._known = known

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Return the divided metrics; waits for the end of the step."""
        return self._table.divided(self._reading.read())

    @property
    def stop(self) -> bool:
        """Return whether a rank got a request to stop before this step; waits for its end."""
        return self.metrics["stops"] > 0

    @property
    def due(self) -> int:
        """Return the requests of rank 0's clock before this step; waits for its end."""
        return int(self.metrics["due"])

    def result(self) -> StepResult:
        """Return the result of the step; waits for its end."""
        row = self._reading.read()
        # A step may be read more than once: the facts of its launch stay as they are.
        known = dict(self._known)
        # Where the host did not wait for the gradient's norm, it comes after the metrics.
        if len(row) > len(self._table):
            known["grad_norm"] = row[len(self._table)]
        return StepResult(
            metrics=self.metrics, extra=self._table.extra, seconds=self._clock.seconds(), **known
        )


def step_record(run: RunConfig, ranks: int, result: StepResult) -> dict[str, Any]:
    """Return a step as a record for loggers; `hooks.metrics` documents its keys."""
    seconds = result.seconds
    rate = result.flops / seconds["step"] / ranks
    record: dict[str, Any] = {
        "step": result.step,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "tokens": result.tokens,
        "batch_size": result.batch_size,
        "samples": result.consumed_samples,
        "tokens_per_s": result.read / seconds["step"],
    }
    record |= {f"{name}_s": round(value, 6) for name, value in seconds.items()}
    record["data_wait_share"] = round(result.data_wait_share, 6)
    record["model_flops"] = result.flops
    record["tflops_per_rank"] = rate / 1e12
    if may_pad(run):
        record["padding_share"] = round(result.padding_share, 6)
    for name in result.extra:
        record[name] = result.metrics[name]
    if result.loss_scale is not None:
        record["loss_scale"] = result.loss_scale
    if not result.updated:
        record["skipped"] = True
    peak = run.cluster.peak_tflops.get(run.precision.multiplies_in)
    if peak:
        record["mfu"] = rate / (peak * 1e12)
        record["mfu_full"] = record["mfu"] * result.full_flops / result.flops
    # In low precision also the MFU of the weights' format, for comparison with bf16 runs.
    other = run.cluster.peak_tflops.get(run.precision.format)
    form = run.precision.format
    if other and form != run.precision.multiplies_in:
        record[f"mfu_{form}"] = rate / (other * 1e12)
    return record
