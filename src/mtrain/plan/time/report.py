"""The time of a run as data: a step by part, tokens a second, both MFUs, the time and cost of the
whole run, and the error of such times.

The benchmark of the time model measures the error on published runs; this module reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from mtrain.config.machine.devices import facts_of
from mtrain.config.resolve.batches import counted, stages
from mtrain.config.schema.cluster import ClusterConfig
from mtrain.config.schema.run import RunConfig
from mtrain.plan.time.described import described_seconds
from mtrain.plan.time.device import GIGA
from mtrain.plan.time.efficiencies import reached_by
from mtrain.plan.time.step import StepTime, step_time, unknown
from mtrain.plan.time.update import FORWARD

HOUR = 3600
# Part of the time -> what it is.
HOW = {
    "gemm": (
        "products of layers with weights by their shapes, casts to low precision, sums of gradients"
    ),
    "attention": "the products of attention that are not hidden",
    "memory": (
        "reads and writes of norms, activations, rotary positions, routers and the residual stream"
    ),
    "host": "extra time that the host needs to launch, beyond the device's time to compute",
    "tp": "tensor and sequence parallelism",
    "cp": "context parallelism",
    "ep": "tokens to their experts and back, and waiting for counts",
    "pp": "activations to the next stage and gradients back",
    "bubble": "the slowest stage waits while the pipeline fills and drains",
    "reference": "forwards of a teacher or a reference, and of further answers",
    "critic": "a critic's forward over the answers of a step, and its own step",
    "dp": "gradients and weights of data-parallel ranks, where no computation hides them",
    "optimizer": (
        "the update: its state read and written, and products of whole matrices (muon, soap)"
    ),
    "offload": (
        "the update in host memory: gradients sent there, state read and written, weights sent back"
    ),
}


def time_report(run: RunConfig, checkpoint_bytes: int) -> dict[str, Any]:
    """Return the time plan of a resolved run; null where it is unknown without the keys that are
    `missing`, or for the reason in `unknown`.
    """
    try:
        step = step_time(run)
    except ValueError as error:
        return {"missing": [], "unknown": str(error), "step_s": None}
    found: dict[str, Any] = {
        "missing": list(step.missing),
        "step_s": step.seconds if step.known else None,
        "save_s": _save(run, checkpoint_bytes),
    }
    if not step.known:
        return found
    ranks = run.parallel.ranks
    bar = error_bar(run)
    return found | {
        "error": None if bar is None else asdict(bar) | {"words": bar.words},
        "parts_s": dict(step.parts),
        "tokens_per_s_per_device": step.tokens_per_second_per_device,
        "tokens_per_s": step.tokens_per_second_per_device * ranks,
        "mfu": step.mfu,
        "mfu_all_keys": step.mfu_all_keys,
        "mfu_by_peak": mfu_by_peak(run, step),
        "statistics": _statistics(run, step),
        "run": _run(run, step, found["save_s"]),
        "software": reached_by(run.cluster).software,
        "how": HOW,
    }


def _statistics(run: RunConfig, step: StepTime) -> dict[str, float] | None:
    """Return the seconds that `log.statistics` adds to a step that it describes, and its share of
    the time of all steps; None where it is off.
    """
    interval = run.log.statistics.interval
    if interval is None:
        return None
    seconds = described_seconds(run)
    return {
        "interval": interval,
        "described_s": seconds,
        "share": seconds / interval / step.seconds,
    }


def mfu_by_peak(run: RunConfig, step: StepTime) -> list[dict[str, Any]]:
    """Return both MFUs of a step of a resolved run: against the peak of the format in which linear
    layers multiply, then against that of the weights, where they differ. Peaks are in TFLOP/s.
    """
    p = run.precision
    peaks = run.cluster.peak_tflops
    first = peaks[p.multiplies_in]
    return [
        {
            "format": form,
            "peak_tflops": peaks[form],
            "causal": step.mfu * first / peaks[form],
            "all_keys": step.mfu_all_keys * first / peaks[form],
        }
        for form in dict.fromkeys((p.multiplies_in, p.format))
    ]


def no_time(time: Mapping[str, Any]) -> str:
    """Return why a report has no time of a step."""
    if "unknown" in time:
        return f"not known: {time['unknown']}"
    lacks = time["missing"]
    found = (
        "; plan --calibrate finds them in measured runs" if "cluster.operation_us" in lacks else ""
    )
    return f"not known without {', '.join(lacks)}{found}"


def _save(run: RunConfig, size: int) -> float | None:
    """Return the seconds to write a checkpoint."""
    rate = run.cluster.storage_gbps
    return None if rate is None else size / (rate * GIGA)


def _run(run: RunConfig, step: StepTime, save: float | None) -> dict[str, Any]:
    """Return the whole of it, a smaller batch in the same time for each sample."""
    ranks = run.parallel.ranks
    price = run.cluster.price_per_device_hour
    samples = sum(steps * size for size, steps in counted(stages(run), run.trainer.steps))
    training = samples / run.trainer.batch * step.seconds
    validation = _validation(run, step, training)
    saving = _saving(run, save, training)
    seconds = training + validation + saving
    hours = seconds / HOUR * ranks
    return {
        "steps": run.trainer.steps,
        "tokens": samples * run.data.length,
        "seconds": seconds,
        "training_s": training,
        "validation_s": validation,
        "saving_s": saving,
        "device_hours": hours,
        "cost": None if price is None else hours * price,
    }


def _validation(run: RunConfig, step: StepTime, training: float) -> float:
    """Return the seconds of validation: forwards of its batches, each a third of a step's
    computation, and those of a reference.
    """
    every = run.trainer.eval_interval
    t = run.trainer
    times = t.steps // every + (t.steps % every > 0) if every else 1
    times += _by_time(t.eval_minutes, training)
    once = sum(step.parts[name] for name in ("dp", "optimizer", "offload"))
    reference = step.parts["reference"]
    batch = (step.seconds - once - reference) * FORWARD + reference
    return times * t.eval_iters * batch


def _by_time(minutes: float | None, training: float) -> int:
    """Return how often something happens every so many minutes of `training` seconds."""
    return 0 if minutes is None else int(training / (60 * minutes))


def _saving(run: RunConfig, save: float | None, training: float) -> float:
    """Return the seconds of checkpoints, which a run waits for; 0 if their time is unknown."""
    c = run.checkpoint
    steps = run.trainer.steps
    if save is None:
        return 0.0
    every = c.save_interval
    times = (steps // every if every else 0) + _by_time(c.save_minutes, training)
    return save * (times + (c.save_final and (not every or steps % every > 0)))


# Megatron-LM's default interval of evaluations, for a run whose steps have no known time.
USUAL = 1000


def in_steps(run: RunConfig) -> RunConfig:
    """Return the run with intervals in steps for minutes, by the predicted step time."""
    t = run.trainer
    c = run.checkpoint
    minutes = t.eval_minutes, c.save_minutes
    if minutes == (None, None):
        return run
    seconds = None if unknown(run) else step_time(run).seconds
    evaluated, saved = (_steps(m, seconds, t.steps) for m in minutes)
    trainer = {"eval_interval": t.eval_interval or evaluated, "eval_minutes": None}
    checkpoint = {"save_interval": c.save_interval or saved, "save_minutes": None}
    return run.model_copy(
        update={
            "trainer": t.model_copy(update=trainer),
            "checkpoint": c.model_copy(update=checkpoint),
        }
    )


def _steps(minutes: float | None, seconds: float | None, most: int) -> int:
    if minutes is None:
        return 0
    steps = USUAL if seconds is None else round(float(f"{60 * minutes / seconds:.2g}"))
    return min(max(1, steps), most)


ACCURACY_FILE = Path(__file__).with_name("accuracy.yaml")


@dataclass(frozen=True)
class ErrorBar:
    """Errors of planned seconds for one kind of configuration, as shares."""

    kind: str
    of: str
    """The runs that were compared, and the parts of them that the fit had not seen."""
    rows: int
    median: float
    p95: float

    @property
    def words(self) -> str:
        """Return the errors in a sentence."""
        return (
            f"off by {self.median:.1%} in the median, {self.p95:.0%} at the 95th percentile:"
            f" {self.kind}, {self.rows} {self.of}"
        )


@dataclass(frozen=True)
class Accuracy:
    """Errors of predicted throughput on runs of models outside the fit, as shares."""

    rows: int
    """Published runs."""
    median: float
    p95: float
    """Error at the 95th percentile."""
    pairs: int
    """Pairs of runs of one model and size whose throughput differs by at least `apart`."""
    pairs_right: int
    """Pairs that the prediction ranks as published."""
    apart: float
    kinds: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Kind of configuration -> its error bar."""

    @property
    def words(self) -> str:
        """Return the errors in a sentence."""
        return (
            f"predicted rates are off by {self.median:.1%} in the median, {self.p95:.0%} at the"
            f" 95th percentile ({self.rows} published runs, each model left out of its fit;"
            f" {self.pairs_right} of {self.pairs} pairs of runs that are more than {self.apart:.0%}"
            " apart are ranked right)"
        )


@cache
def shipped() -> Accuracy:
    """Return the error of the efficiencies that ship."""
    return Accuracy(**yaml.safe_load(ACCURACY_FILE.read_text()))


def accuracy_of(cluster: ClusterConfig) -> Accuracy | None:
    """Return the error of a plan on a cluster; None with measured rates and no comparison."""
    # The published runs say nothing about rates that are not fitted to them.
    own = (
        facts_of(cluster.device).on_host
        or cluster.reached
        or cluster.operation_us
        or cluster.software
    )
    return None if own else shipped()


def kind_of(run: RunConfig) -> str:
    """Return the kind of a resolved run whose error bar is known."""
    if run.parallel.ranks == 1:
        return "one device"
    if run.model.moe is not None:
        return "experts"
    return "dense, 16 bits" if run.precision.quantized is None else "dense, 8 bits or fewer"


def error_bar(run: RunConfig) -> ErrorBar | None:
    """Return the error bar of the planned time of a resolved run; None where its rates are measured
    and no plans were compared.
    """
    found = accuracy_of(run.cluster)
    kind = kind_of(run)
    bar = None if found is None else found.kinds.get(kind)
    return None if bar is None else ErrorBar(kind=kind, **bar)
