"""The comparison of a run's plan with its measurements."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from mtrain.config.compose.paths import CHECKPOINTS, METRICS
from mtrain.config.disk.files import read_bytes
from mtrain.config.machine.devices import facts_of
from mtrain.config.resolve.batches import counted, stages
from mtrain.config.schema.run import RunConfig
from mtrain.errors import ConfigError, CorruptData
from mtrain.plan.report import report

PEAKS = "memory.json"
PLAN = "plan.json"
ALLOCATED = "peak_bytes"
# Measured memory of a device -> its prefix before `memory of stage`. torch reports the bytes of
# tensors and of its allocator; the driver reports all memory in use.
MEASURED = {ALLOCATED: "", "reserved_bytes": "reserved ", "driver_bytes": "driver "}
# Planned parts that a measurement cannot see: torch's allocator knows nothing of CUDA's context.
BESIDE = {ALLOCATED: ("context", "reserve"), "reserved_bytes": ("context",), "driver_bytes": ()}
# A process compiles kernels and allocates memory in its first steps, so their times say nothing.
FIRST_STEPS = 3
# Limits against damaged files: characters of a line, any number, bytes of a file of a run.
LONGEST = 1 << 20
LARGEST = 1e18
MOST_BYTES = 64 << 20
# Parts of a step that the trainer measures as one: the update of the weights.
UPDATE = ("optimizer", "offload", "dp")
# Kind of part -> accepted deviation, as a share of the plan. A process on a host has no bound:
# its memory holds every imported library.
BOUNDS = {"time": 0.15, "memory": 0.1, "size": 0.01}


@dataclass(frozen=True)
class Row:
    """One part."""

    part: str
    kind: str
    """time: seconds; memory, size, process: bytes."""
    planned: float | None
    """None: it was not known."""
    measured: float | None
    """None: it was not measured."""

    @property
    def off(self) -> float | None:
        """Return measured minus planned, as a share of planned."""
        return (
            self.measured / self.planned - 1 if self.planned and self.measured is not None else None
        )

    @property
    def beyond(self) -> bool:
        """Return whether the deviation exceeds the bound of its kind."""
        return self.off is not None and abs(self.off) > BOUNDS.get(self.kind, inf)

    def data(self) -> dict[str, Any]:
        """Return the row as JSON."""
        return {**asdict(self), "off": self.off, "beyond": self.beyond}


def planned(run: RunConfig) -> dict[str, Any] | None:
    """Return a plan's measurable values, null if unknown; None: a family without weights."""
    try:
        found = report(run)
    except ValueError:
        return None
    time = found["time"]
    parts = time.get("parts_s", {})
    update = sum(parts.get(name, 0.0) for name in UPDATE)
    known = time["step_s"] is not None
    return {
        "step_s": time["step_s"],
        "forward_backward_s": time["step_s"] - update if known else None,
        "optimizer_s": update if known else None,
        "peak_bytes_by_stage": [stage["peak"] for stage in found["memory"]["stages"]],
        "memory_by_stage": {
            key: [
                stage["peak"] - sum(stage["parts"][part] for part in parts)
                for stage in found["memory"]["stages"]
            ]
            for key, parts in BESIDE.items()
        },
        "checkpoint_bytes": found["checkpoint"]["bytes"],
    }


def rows(
    run: RunConfig,
    plan: Mapping[str, Any],
    lines: Sequence[Mapping[str, Any]],
    peaks: Mapping[str, Sequence[int | None]],
    saved: int | None,
) -> list[Row]:
    """Return planned and measured values, part by part.

    Args:
        run: resolved.
        plan: of `planned`.
        lines: of a metrics file; the first steps are left out where there are others, and those of
            smaller batches.
        peaks: by the keys of `MEASURED`, bytes of each rank; None where a rank reported nothing.
        saved: bytes of a checkpoint; None: it has no checkpoint.
    """
    full = first_full(run)
    steps = [line for line in lines if "step_s" in line and line.get("step", full) >= full]
    steps = steps[FIRST_STEPS:] or steps
    steps = [line for line in steps if not line.get("profiled")] or steps
    out = []
    for key in ("step_s", "forward_backward_s", "optimizer_s"):
        seen = [line[key] for line in steps if _number(line.get(key))]
        out.append(
            Row(
                key.removesuffix("_s").replace("_", " and "),
                "time",
                plan[key],
                median(seen) if seen else None,
            )
        )
    return [
        *out,
        *_memory(run, plan, peaks),
        Row("checkpoint", "size", plan["checkpoint_bytes"], saved),
    ]


def _memory(
    run: RunConfig, plan: Mapping[str, Any], peaks: Mapping[str, Sequence[int | None]]
) -> Iterator[Row]:
    """Yield the most that the ranks of each stage took; on a host, all that a process has."""
    each = max(1, run.parallel.ranks // run.parallel.pp)
    device = counts_memory(run)
    for key, name in MEASURED.items() if device else ((ALLOCATED, ""),):
        sizes = plan["memory_by_stage"][key] if device else plan["peak_bytes_by_stage"]
        found = peaks.get(key, ())
        for stage, size in enumerate(sizes if found or not name else ()):
            known = [peak for peak in found[stage * each : (stage + 1) * each] if peak is not None]
            kind = "memory" if device else "process"
            yield Row(f"{name}memory of stage {stage}", kind, size, max(known, default=None))


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the readable lines of a metrics file; a truncated or foreign line is left out.

    Raises:
        OSError: it cannot be read.
    """
    if not path.is_file():
        return []
    lines = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in iter(lambda: file.readline(LONGEST), ""):
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if (
                isinstance(line, dict)
                and isinstance(line.get("step"), int)
                and _number(line["step"])
            ):
                lines.append(line)
    return lines


def lines_of_run(home: Path) -> list[dict[str, Any]]:
    """Return the metrics lines of a run since it was last resumed: before, it may have had another
    layout.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        resumed = json.loads(read_bytes(home / PLAN, PLAN, MOST_BYTES))["resumed_from"]
        begun = int(Path(resumed).name.rpartition("_")[2])
    except (ConfigError, ValueError, TypeError, KeyError, RecursionError):
        # The run was not resumed, or its plan is missing or damaged.
        begun = 0
    return [line for line in lines_of(home / METRICS) if line["step"] > begun]


def saved_in(home: Path) -> int | None:
    """Return the bytes of the newest checkpoint of a run folder; None: it has no checkpoint.

    Raises:
        OSError: it cannot be read.
    """
    found = sorted((home / CHECKPOINTS).glob("step_*/manifest.json"))
    files = found[-1].parent.iterdir() if found else ()
    return sum(file.stat().st_size for file in files if file.is_file()) if found else None


def by_rank_of(key: str) -> str:
    """Return the name of a key of `MEASURED` in the file of a run."""
    return f"{key}_by_rank"


def peaks_in(home: Path) -> dict[str, list[int | None]]:
    """Return the memory of each rank that a run folder reports, by the keys of `MEASURED`; older
    runs have only the first.

    Raises:
        CorruptData: it cannot be read.
    """
    path = home / PEAKS
    if not path.is_file():
        return {}
    try:
        read = json.loads(read_bytes(path, str(path), MOST_BYTES))
        found: dict[str, list[int | None]] = {
            key: read[by_rank_of(key)] for key in MEASURED if by_rank_of(key) in read
        }
        if ALLOCATED not in found:
            raise ValueError(f"it has no {by_rank_of(ALLOCATED)}")
        for peaks in found.values():
            if not isinstance(peaks, list) or not all(
                peak is None or _is_size(peak) for peak in peaks
            ):
                raise ValueError("it has peaks that are no bytes")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptData(f"{path}: cannot be read: {str(error)[:200]}") from None
    return found


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _number(value: Any) -> bool:
    """Return whether a value can be a measurement."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < LARGEST


def first_full(run: RunConfig) -> int:
    """Return the first step that takes the whole batch, as a plan does."""
    every = counted(stages(run), run.trainer.steps)
    return sum(steps for steps, size in every if size != run.trainer.batch) + 1


def counts_memory(run: RunConfig) -> bool:
    """Return whether a measured peak is the device's only, not a process's with its libraries."""
    return not facts_of(run.cluster.device).on_host
