"""Input of `plan --calibrate`: run folders, files of measured rows, and results of
kernels/bench/run.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from mtrain.api import load
from mtrain.cli.output import refusal
from mtrain.config.compose.lock_file import read_run_file
from mtrain.config.disk.files import read_bytes
from mtrain.config.engine.formats import Format
from mtrain.errors import ConfigError
from mtrain.plan.compare import FIRST_STEPS, METRICS, first_full, lines_of_run
from mtrain.plan.time.calibrate import Measured, Rates
from mtrain.units import number_of

# Bytes of a file of measurements at most: a larger one was not meant.
LARGEST = 64 << 20
ROWS = '[{"overrides": ["model=llama_tiny"], "step_s": 0.2}]'
# torch's name of a format -> that in a cluster file.
FORMATS: dict[str, Format] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
KERNELS = '{"dtype": "bfloat16", "ceilings": {"copy_bytes_per_s": 3e12, "gemm_flop_per_s": 7e14}}'
# Bounds of a measured number: one outside of them was not measured.
SMALLEST = 1e-12
MOST = 1e21
CEILINGS = ("gemm_flop_per_s", "copy_bytes_per_s")


@dataclass
class Found:
    """Everything that was measured."""

    runs: list[tuple[str, Measured]] = field(default_factory=list)
    """Runs, each with its name in tables."""
    kernels: list[Rates] = field(default_factory=list)


def found(paths: list[Path]) -> Found:
    """Read the measurements of run folders and files.

    Raises:
        ConfigError: one of them is neither, or holds no numbers.
    """
    every = Found()
    for path in paths:
        if path.is_dir():
            every.runs.append((path.name, _of_run(path)))
            continue
        data = _json(path)
        # Only results of kernels/bench/run.py have this key.
        if isinstance(data, dict) and "ceilings" in data:
            every.kernels.append(_of_kernels(data, str(path)))
        else:
            every.runs += _of_rows(data, path)
    return every


def bad(rule: str, fix: str, code: str = "MT010", source: str = "command line") -> ConfigError:
    """Return one problem."""
    return refusal(rule, fix, code, source=source)


def _json(path: Path) -> Any:
    try:
        return json.loads(read_bytes(path, str(path), LARGEST))
    except (ValueError, RecursionError) as error:
        fix = 'a list of {"overrides": [...], "step_s": ...}, or results of kernels/bench/run.py'
        raise bad(f"cannot be read as JSON: {str(error)[:200]}", fix, "MT001", str(path)) from None


def _of_kernels(data: Mapping[str, Any], source: str) -> Rates:
    """Return the rates of a large product and of a copy."""
    word = data.get("dtype")
    ceilings = data["ceilings"]
    form = FORMATS.get(word) if isinstance(word, str) else None
    if form is None:
        rule = (
            f"cannot be read because dtype is {str(word)[:100]!r}, and not one of"
            f" {', '.join(FORMATS)}"
        )
        raise bad(rule, KERNELS, "MT001", source)
    if not isinstance(ceilings, dict):
        rule = "cannot be read because ceilings is no mapping of rates"
        raise bad(rule, KERNELS, "MT001", source)
    products, memory = (
        _above_0(ceilings.get(key), key, f'"{key}": 1e12', source) for key in CEILINGS
    )
    return Rates(form, products, memory)


def _of_rows(rows: Any, path: Path) -> Iterator[tuple[str, Measured]]:
    if not isinstance(rows, list) or not rows:
        rule = "cannot be read because it holds no list of measured rows"
        raise bad(rule, ROWS, "MT001", str(path))
    for number, row in enumerate(rows, start=1):
        yield f"{path.name}, row {number}", _of_row(row, f"{path}: row {number}")


def _of_row(row: Any, source: str) -> Measured:
    words = row.get("overrides") if isinstance(row, dict) else None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise bad(
            "cannot be read because overrides is no list of words",
            '{"overrides": ["model=llama_tiny"]}',
            "MT001",
            source,
        )
    step = _seconds(row.get("step_s"), source)
    update = _seconds(row["optimizer_s"], source) if row.get("optimizer_s") is not None else None
    return Measured(load(words, environment={}, to_run=False).run, step, update)


def _seconds(value: Any, source: str) -> float:
    return _above_0(value, "the time", '"step_s": 0.25', source)


def _above_0(value: Any, what: str, fix: str, source: str) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not SMALLEST <= value <= MOST:
        rule = f"cannot be read because {what} is {str(value)[:100]!r}, and not a number above 0"
        raise bad(rule, fix, "MT001", source)
    return float(value)


def _of_run(folder: Path) -> Measured:
    path = folder / METRICS
    run = read_run_file(folder / "run.yaml")
    full = first_full(run)
    try:
        steps = [line for line in lines_of_run(folder) if "step_s" in line and line["step"] >= full]
    except OSError as error:
        raise bad(f"cannot be read: {error.strerror}", "another run", "MT001", str(path)) from None
    if len(steps) <= FIRST_STEPS:
        of = f" from step {full} on, the first of the whole batch" if full > 1 else ""
        rule = (
            f"cannot be used because it has {number_of(len(steps), 'step')}{of}, and the first"
            f" {FIRST_STEPS} are not counted"
        )
        raise bad(rule, f"a run of more than {FIRST_STEPS} steps", "MT001", str(path))
    warm = steps[FIRST_STEPS:]
    source = f"{path}: step "
    seconds = median(_seconds(line["step_s"], f"{source}{line['step']}") for line in warm)
    updates = [
        _seconds(v, f"{source}{line['step']}")
        for line in warm
        if (v := line.get("optimizer_s")) is not None
    ]
    return Measured(run, seconds, median(updates) if len(updates) == len(warm) else None)
