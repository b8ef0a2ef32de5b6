"""The interface of sinks: places outside of mtrain that show or keep the numbers of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from mtrain.config.schema.run import RunConfig
from mtrain.events.log import ALERT, EVALUATION, MEMORY, STATISTICS, STEP
from mtrain.events.read import Event

NAMES = {
    "loss": "lm loss",
    "grad_norm": "grad-norm",
    "lr": "learning-rate",
    "batch_size": "batch-size",
    "loss_scale": "loss-scale",
    "step_s": "iteration-time",
    "tflops_per_rank": "throughput",
    "valid_loss": "lm loss validation",
}
"""Names of `metrics.jsonl` -> those of Megatron-LM, which existing boards show; the others stay."""
OTEL_GAUGES = {
    "loss": ("loss", 1.0),
    "grad_norm": ("grad_norm", 1.0),
    "lr": ("learning_rate", 1.0),
    "tflops_per_rank": ("throughput_tflops", 1.0),
    "tokens_per_s": ("tokens_per_sec", 1.0),
    "peak_bytes": ("memory_allocated_gb", 2.0**-30),
    "valid_loss": ("validation_loss", 1.0),
}
"""Names of `metrics.jsonl` -> those of Megatron's OpenTelemetry gauges, behind
`megatron.training.`, and the factor of their unit.
"""


@dataclass(frozen=True)
class Session:
    """A run as its sinks see it."""

    run: RunConfig
    folder: Path
    """The run folder."""
    id: str
    """The id of the run, the same after each resume: 21 lower-case letters and digits."""
    step: int
    """The last step that the sink has taken; 0: none."""

    @property
    def name(self) -> str:
        """Return the name of the run."""
        return self.folder.name


class Sink:
    """A place that events are sent to, from a thread of its own on rank 0.

    A package publishes a subclass under the entry point group `mtrain.sinks`, and `log.sinks` names
    it. Any method may take its time, and raise: the run goes on, and after a while a new sink of
    the class is opened, which gets the same events again.
    """

    purges = False
    """True if `open` removes the steps after `session.step` from the place, so that steps which a
    resumed run makes again may be sent again.
    """

    batch = 500
    """The most events that `send` gets; 1 if a retried `send` would repeat some events."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def open(self) -> int | None:
        """Connect, and return the last step that the place has, 0 if it has none; None: it cannot
        tell.

        The place may have more steps than `session.step`, or fewer: a process can be killed after
        it sent a step and before it noted that, or while a library still holds unsent values.
        """
        return None

    def send(self, events: Sequence[Event]) -> None:
        """Send events, in order; once it returns, they are not sent again."""

    def close(self) -> None:
        """Disconnect at the end of the run, or after a failure."""


class RunSink(Sink):
    """A sink whose library has a run with `log` and `finish`, which `open` puts into `run`."""

    run: Any = None

    def send(self, events: Sequence[Event]) -> None:
        """Log a row for each event that has numbers."""
        for event in events:
            row = usual(event)
            if row:
                self.log(event, row)

    def log(self, event: Event, row: dict[str, float]) -> None:
        """Log the numbers of an event."""
        self.run.log(row, step=event["step"])

    def close(self) -> None:
        """Finish the run: waits until the library has sent or written everything."""
        if self.run is not None:
            self.run.finish()


def numbers(event: Event) -> dict[str, float]:
    """Return the numbers of a step or an evaluation by their names in `metrics.jsonl`; empty for
    other events, and without values that are not finite.
    """
    values: Mapping[str, object] = event.get("values", {})
    if event["kind"] not in (STEP, EVALUATION):
        return {}
    # A line says `skipped` only of steps that were; a gauge would stay at 1.
    found = {"skipped": 0.0} if event["kind"] == STEP else {}
    return found | {n: float(v) for n, v in values.items() if isinstance(v, int | float)}


def memory_of(event: Event) -> dict[str, float]:
    """Return the most of each kind of memory on a rank, in a sample; empty for other events."""
    if event["kind"] != MEMORY:
        return {}
    known = {
        key: [size for size in sizes if size is not None] for key, sizes in event["by_rank"].items()
    }
    return {key: float(max(sizes)) for key, sizes in known.items() if sizes}


def alert_of(event: Event) -> tuple[str, str] | None:
    """Return the name and the text of an alert; None for other events."""
    return (str(event["name"]), str(event["text"])) if event["kind"] == ALERT else None


def usual(event: Event) -> dict[str, float]:
    """Return the same numbers by the names of Megatron-LM, statistics as `gradients/norm/NAME`,
    samples of memory as `memory/KIND`, and an alert as `alert/NAME`, which is 1.
    """
    alert = alert_of(event)
    if alert is not None:
        return {f"alert/{alert[0]}": 1.0}
    if event["kind"] == MEMORY:
        return {f"memory/{key}": size for key, size in memory_of(event).items()}
    if event["kind"] == STATISTICS:
        return {
            f"{event['of']}/{column}/{name}": float(value)
            for name, row in event["rows"].items()
            for column, value in zip(event["columns"], row, strict=True)
            if value is not None
        }
    return {NAMES.get(name, name): value for name, value in numbers(event).items()}


def seconds_of(event: Event) -> float:
    """Return the time of an event in seconds of the epoch."""
    return datetime.fromisoformat(event["time"]).timestamp()
