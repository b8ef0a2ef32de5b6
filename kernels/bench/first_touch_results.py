"""The lines of results.jsonl, the plan of a call's time, and what the stages of `first_touch.py`
are given.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PLAN = "plan"
"""The unit of the line that names all units of a stage."""
WHOLE = "stage"
"""The unit of a line that is about a whole stage."""
RUNS = HERE / "gpu_runs.yaml"
GOALS = HERE / "gpu_goals.yaml"


@dataclass(frozen=True)
class Stage:
    """One part of a call: its place in the budget, its limits, and how many processes
    do its units.
    """

    name: str
    until: float
    """The share of the budget that is spent when this stage ends at the latest; what it leaves goes
    to the next.
    """
    limit_s: float
    """The longest that it may take in a call with any budget."""
    unit_s: float
    """The longest that one unit may take."""
    workers: int = 1
    """Processes on a machine with enough cores."""
    starts_runs: bool = False
    """True where its units start `launch.py`; they are skipped where the gate failed."""


STAGES = (
    Stage("environment", 0.10, 60, 60),
    Stage("gate", 0.20, 180, 120),
    Stage("steps", 0.46, 900, 90),
    Stage("rivals", 0.53, 1200, 300),
    Stage("parity", 0.64, 900, 120, workers=7),
    Stage("runs", 0.84, 900, 240, workers=15, starts_runs=True),
    Stage("train", 0.92, 1800, 420, starts_runs=True),
    Stage("host", 0.95, 300, 150),
    Stage("profile", 0.96, 300, 120),
    Stage("ops", 1.0, 1800, 240),
    Stage("autotune", 1.0, 900, 240),
)
"""Stages in the order of their value: finding failures comes before finding slowness."""
BY_NAME = {stage.name: stage for stage in STAGES}


@dataclass(frozen=True)
class Walk:
    """The options of a call that every stage reads."""

    dry: bool
    """True on a CPU: shapes are tiny, and nothing is measured."""
    ops: tuple[str, ...] = ()
    """The ops to compare and to measure; all of them where it is empty."""
    whole: bool = False
    """True where a dry run takes every op, not a sample."""

    def words(self) -> list[str]:
        """Return the same options as words of a command line."""
        words = ["--dry-run"] if self.dry else []
        words += ["--whole"] if self.whole else []
        return words + (["--ops", ",".join(self.ops)] if self.ops else [])


class Results:
    """The lines of OUT/results.jsonl: `stage`, `unit`, and `result`, `error` or `skipped`; a unit
    is done once.

    Several processes append to it. A line with `late` was skipped for want of time only, so the
    next call does it.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.path = folder / "results.jsonl"

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield all of them; the last may be cut off."""
        for text in self.path.read_text().splitlines() if self.path.exists() else ():
            try:
                yield json.loads(text)
            except ValueError:
                continue

    def ends(self, stage: str) -> dict[str, dict[str, Any]]:
        """Return the last line with an end of each unit of a stage."""
        found = {}
        for line in self.lines():
            if line["stage"] == stage and any(
                end in line for end in ("result", "error", "skipped")
            ):
                found[line["unit"]] = line
        return found

    def done(self, stage: str) -> set[str]:
        """Return the units of a stage that need not be done again."""
        return {unit for unit, line in self.ends(stage).items() if not line.get("late")}

    def planned(self, stage: str) -> list[str] | None:
        """Return the units that a stage has; None where it was never started."""
        lines = [line for line in self.lines() if line["stage"] == stage and line["unit"] == PLAN]
        return lines[-1]["units"] if lines else None

    def size(self, stage: str, worker: int) -> int:
        """Return the number of lines that a process has written."""
        return sum(
            line["stage"] == stage and line.get("worker", 0) == worker for line in self.lines()
        )

    def open(self, stage: str, worker: int = 0) -> str | None:
        """Return the unit that a process began last, if it has no end."""
        begun = self._begun(stage, worker)
        return begun[-1] if begun and begun[-1] not in self.done(stage) else None

    def tries(self, stage: str, unit: str) -> int:
        """Return how often a unit was begun."""
        return sum(
            line["stage"] == stage and line["unit"] == unit and bool(line.get("begin"))
            for line in self.lines()
        )

    def _begun(self, stage: str, worker: int) -> list[str]:
        lines = (line for line in self.lines() if line["stage"] == stage and line.get("begin"))
        return [line["unit"] for line in lines if line.get("worker", 0) == worker]

    def forget(self, stages: Iterable[str]) -> None:
        """Begin some stages anew."""
        kept = [
            json.dumps(line) + "\n" for line in self.lines() if line["stage"] not in set(stages)
        ]
        self.path.write_text("".join(kept))

    def add(self, stage: str, unit: str, **said: Any) -> None:
        """Append one line, on disk when this returns."""
        before = b""
        if self.path.exists() and self.path.stat().st_size:  # a line that was cut off ends here
            with self.path.open("rb") as file:
                file.seek(-1, os.SEEK_END)
                before = b"" if file.read() == b"\n" else b"\n"
        with self.path.open(
            "ab", buffering=0
        ) as file:  # one write, so that lines of several processes stay whole
            file.write(before + json.dumps({"stage": stage, "unit": unit, **said}).encode() + b"\n")
            os.fsync(file.fileno())


def gate_error(results: Results) -> str | None:
    """Return the error of the gate; None where plain `launch.py` started or was not tried yet."""
    errors = [line["error"] for line in results.ends("gate").values() if "error" in line]
    return errors[0] if errors else None


def workers_of(stage: Stage, dry: bool) -> int:
    """Return the number of processes that do the units of a stage on this machine."""
    cores = len(os.sched_getaffinity(0))
    if dry:  # importing torch takes longer than the units of a dry run, which those of runs do not
        return 2 if stage.starts_runs and stage.workers > 1 else 1
    return min(stage.workers, max(1, cores - 1))


def read_yaml(path: Path) -> Any:
    """Return a data file next to the programs."""
    import yaml

    return yaml.safe_load(path.read_text())


def tree_environment(added: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a command: this process's, what is added, and the tree before
    whatever is installed.
    """
    given = {**os.environ, **(added or {})}
    first = [(added or {}).get("PYTHONPATH", ""), str(ROOT / "src"), str(ROOT / "kernels")]
    paths = [*first, os.environ.get("PYTHONPATH", "")]
    return given | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
