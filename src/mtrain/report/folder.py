"""The configuration and the curves of a run folder, as far as they can be read.

A folder may be of another version, of a run that still trains, or damaged: what cannot be read is
left out, and `Record.problem` says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtrain.config.compose.lock_file import read_run_file
from mtrain.config.compose.paths import METRICS, RUN_FILE
from mtrain.config.compose.yaml_reader import load
from mtrain.config.schema.run import RunConfig
from mtrain.errors import ConfigError
from mtrain.events.log import metrics_line
from mtrain.events.read import events
from mtrain.plan.compare import LARGEST, lines_of

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Record:
    """A run folder that was read."""

    home: Path
    config: RunConfig | None
    """None: `run.yaml` is of another version, or damaged."""
    values: Mapping[str, Any]
    """The leaves of `run.yaml` by their dotted keys."""
    problem: str = ""
    """The reason for a missing `config`."""
    steps: Mapping[int, Line] = field(default_factory=dict)
    """Step -> its line of `metrics.jsonl`, in order; of a step that was made again, the last."""
    evaluations: Mapping[int, Line] = field(default_factory=dict)
    """The same for evaluations."""

    @property
    def name(self) -> str:
        """Return the name of the folder."""
        return self.home.name or str(self.home)


def read(home: Path) -> Record:
    """Read a run folder.

    Raises:
        ConfigError: it has no `run.yaml`, or one that is no YAML.
        OSError: a file cannot be read.
    """
    file = home / RUN_FILE
    if not file.is_file():
        rule = f"{home} has no {RUN_FILE}" if home.exists() else f"{home} does not exist"
        raise ConfigError.of("MT524", "", None, rule, "runs/NAME")
    config: RunConfig | None = None
    problem = ""
    try:
        config = read_run_file(file)
        values = config.recorded().flat()
    except ConfigError as error:
        problem = error.problems[0].rule
        values = dict(_leaves("", load(file).values))
    found = lines_of(home / METRICS)
    if not found:
        whole = (event for event in events(home) if isinstance(event.get("values"), dict))
        lines = (metrics_line({"time": None, **event}) for event in whole)
        found = [line for line in lines if line is not None]
    steps = {line["step"]: line for line in found if "lr" in line}
    evaluations = {line["step"]: line for line in found if "valid_loss" in line}
    return Record(home, config, values, problem, _in_order(steps), _in_order(evaluations))


def number(value: Any) -> float | None:
    """Return a finite number; None for anything else, also for numbers that no run has."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < LARGEST and math.isfinite(value) else None


def curve(lines: Mapping[int, Line], key: str) -> list[tuple[int, float]]:
    """Return the steps at which a key has a number, with it."""
    pairs = ((step, number(line.get(key))) for step, line in lines.items())
    return [(step, value) for step, value in pairs if value is not None]


def _in_order(lines: Mapping[int, Line]) -> dict[int, Line]:
    return dict(sorted(lines.items()))


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield leaves by their dotted keys, without a recipe's metadata."""
    if not isinstance(value, dict) or not value:
        yield prefix, value
        return
    for key, inner in value.items():
        if prefix or key not in ("recipe", "launch"):
            yield from _leaves(f"{prefix}.{key}" if prefix else str(key), inner)
