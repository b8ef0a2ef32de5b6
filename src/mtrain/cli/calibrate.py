"""`plan --calibrate`: the rates of a kind of machine from measured steps and kernels, as a choice
of `cluster`.

Measurements are run folders, files of measured rows, and results of kernels/bench/run.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from math import exp, log
from os.path import expanduser
from pathlib import Path
from statistics import median
from typing import Any

from mtrain import strict_json
from mtrain.api import load
from mtrain.cli.output import refusal
from mtrain.config.compose.dump import spell
from mtrain.config.compose.lock_file import read_run_file
from mtrain.config.compose.paths import METRICS
from mtrain.config.disk.files import YAML_ENDINGS, read_bytes
from mtrain.config.engine.formats import Format
from mtrain.config.machine.devices import facts_of
from mtrain.config.schema.cluster import ClusterConfig
from mtrain.config.schema.run import RunConfig
from mtrain.errors import ConfigError, say_page
from mtrain.plan.compare import FIRST_STEPS, first_full, lines_of_run
from mtrain.plan.time.calibrate import EXPECTED, Fit, Measured, Rates, fitted
from mtrain.plan.time.device import missing
from mtrain.units import duration, number_of

USAGE = (
    "plan --calibrate RUN_OR_FILE... out=FILE.yaml, with cluster=NAME where only kernels of a GPU"
    " were measured"
)
# Rates that are shares of a data sheet; a measured share outside of the bounds is an error.
SHARES = ("products", "memory")
LEAST = 0.02
MOST = 1.25
# If half of the steps take so many times longer or shorter than the fitted plan, something else
# slowed the machine.
FARTHEST = 3
# Keys that a file of rates does not write, because a measurement knows nothing of them.
UNSAID = ("price_per_device_hour",)


def run(argv: Sequence[str], *, as_json: bool = False) -> int:
    """Fit the rates of a machine to measurements in run folders and files, and write them; return
    the exit code.

    Raises:
        ConfigError: nothing is measured, on different machines, or the file exists already.
    """
    given = [
        word
        for word in argv
        if "=" in word and word.partition("=")[0].partition(".")[0] in ("out", "cluster")
    ]
    outs = [word.removeprefix("out=") for word in given if word.startswith("out=")]
    words = [word for word in argv if word not in given]
    if not words or len(outs) != 1 or not outs[0]:
        rule = "cannot calibrate because it takes run folders or measured files, and out=FILE once"
        raise bad(rule, USAGE)
    out = Path(expanduser(outs[0]))
    if "\0" in outs[0] or not out.name:
        raise bad("out= is no name of a file", "out=FILE.yaml", "MT704")
    # without one it would be no choice
    if out.suffix not in YAML_ENDINGS and not out.exists():
        out = out.with_name(f"{out.name}.yaml")
    if out.exists() or out.is_symlink():
        raise bad(
            f"{out} is there already; nothing is written over",
            "out=FILE with another name",
            "MT704",
        )
    measured = found([Path(expanduser(word)) for word in words])
    best = _fitted(measured, [word for word in given if not word.startswith("out=")])
    best = replace(
        best, cluster=best.cluster.model_copy(update={"name": _name(out), "software": _software()})
    )
    _write(out, best, measured)
    say_page(_as_json(measured, best) if as_json else _page(measured, best, out))
    return 0


def _fitted(measured: Found, words: Sequence[str]) -> Fit:
    runs = [one.run for _, one in measured.runs]
    if words and runs:
        raise bad(f"{words[0]}: the runs say on which cluster they were", USAGE)
    for name, value in (("device", _device), ("number format", _format)):
        if len(kinds := {value(run) for run in runs}) > 1:
            raise bad(
                f"cannot fit rates because the runs differ in their {name}:"
                f" {' and '.join(sorted(kinds))}",
                "runs of one kind of machine",
            )
    _one_format(runs)
    start = runs[0].cluster if runs else _named(words)
    _stated_enough(start, measured)
    try:
        best = fitted([one for _, one in measured.runs], start, measured.kernels)
    except ValueError as error:
        rule = f"cannot fit rates because {error}"
        raise bad(rule, "runs of another model", "MT254") from None
    # The median ignores a few disturbed runs.
    if runs and (off := median(abs(log(1 + error)) for error in best.errors)) > log(FARTHEST):
        rule = (
            "cannot fit rates because none explain the runs: with the best, a step is planned"
            f" {exp(off):.3g} times too long or too short"
        )
        raise bad(
            rule, "seconds of whole steps, and the cluster that they were measured on", "MT254"
        )
    for name, share in best.cluster.reached.items():
        if name in SHARES and not LEAST <= share <= MOST:
            rule = (
                f"cannot use the rate of {name} because the kernels reached {share:.2g} of what"
                f" {start.name} states, so they ran on something else"
            )
            raise bad(rule, "the cluster that they were measured on", "MT254")
    return best


def _one_format(runs: Sequence[RunConfig]) -> None:
    """Refuse runs whose GEMM format has no rate on a CPU."""
    for run in runs:
        p = run.precision
        if facts_of(run.cluster.device).on_host and p.multiplies_in != p.format:
            rule = f"cannot fit rates because products in {p.multiplies_in} have none on a CPU"
            raise bad(rule, "runs whose products are in the format of their weights", "MT254")


def _named(words: Sequence[str]) -> ClusterConfig:
    """Return the cluster that words name, or this machine's CPU without words."""
    return load(
        ["model=llama_tiny", "data=mock", *(words or ["cluster=cpu"])], environment={}, to_run=False
    ).run.cluster


def _stated_enough(start: ClusterConfig, measured: Found) -> None:
    """Require the rates of a GPU's data sheet, of which only the reached share is measured."""
    if facts_of(start.device).on_host:
        return
    formats = [one.format for one in measured.kernels]
    lacks = list(missing(start, tuple(formats), 1))
    for _, one in measured.runs:
        p = one.run.precision
        lacks += missing(start, (p.format, p.multiplies_in), one.run.parallel.ranks)
    if lacks:
        rule = (
            f"cannot fit rates because the reached share of the peak of {start.name} needs"
            f" {', '.join(dict.fromkeys(lacks))}"
        )
        raise bad(rule, "cluster=h100, or those keys from a data sheet in a cluster file", "MT254")


def _device(run: RunConfig) -> str:
    c = run.cluster
    if facts_of(c.device).on_host:
        return c.device
    return f"{c.device} sm_{c.sm} with {c.memory_gbps} GB/s"


def _format(run: RunConfig) -> str:
    return run.precision.format


def _name(out: Path) -> str:
    plain = "".join(
        c if c.isascii() and (c.isalnum() or c in "_.-") else "_" for c in out.stem
    ).lstrip("_.-")
    return plain[:100] or "calibrated"


def _software() -> str:
    return ", ".join(f"{name} {_version(name)}" for name in ("torch", "megatron-core"))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def _write(out: Path, best: Fit, measured: Found) -> None:
    values = best.cluster.model_dump(exclude_defaults=True, exclude=set(UNSAID))
    lines = [f"{key}: {spell(value)}\n" for key, value in values.items()]
    head = f"# Rates from {_counted(measured)} on a machine, with the releases named below.\n"
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(head + "".join(lines))
    except OSError as error:
        rule = error.strerror or ""
        raise bad(rule, "out=FILE in another folder", "MT704", str(out)) from None


def _counted(measured: Found) -> str:
    runs = len(measured.runs)
    files = len(measured.kernels)
    words = [number_of(runs, "measured run")] if runs else []
    words += [f"{number_of(files, 'file')} of kernels"] if files else []
    return " and ".join(words)


def _as_json(measured: Found, best: Fit) -> str:
    rows = [
        {"run": name, "step_s": one.step_s, "error": error}
        for (name, one), error in zip(measured.runs, best.errors, strict=True)
    ]
    data = {
        "cluster": best.cluster.model_dump(mode="json"),
        "runs": rows,
        "kernels": len(measured.kernels),
    }
    return strict_json.dumps(data, indent=2)


def _page(measured: Found, best: Fit, out: Path) -> str:
    lines = [f"measured  planned  {'':7}  run"] if measured.runs else []
    for (name, one), error in zip(measured.runs, best.errors, strict=True):
        planned = duration(one.step_s * (1 + error))
        lines.append(f"{duration(one.step_s):>8}  {planned:>7}  {error:+7.1%}  {name}")
    # Fewer measurements than rates: the fit stays near the expected values where nothing pulls it
    # away.
    if len(measured.runs) < len(EXPECTED) and facts_of(best.cluster.device).on_host:
        lines.append(
            f"note: {_counted(measured)} for {len(EXPECTED)} rates: what they do not show is near"
            " what is usual"
        )
    lines += [f"reached: {name} {share:.3g}" for name, share in best.cluster.reached.items()]
    return "\n".join(
        [
            *lines,
            f"{out}: take it as cluster=./{out}" if not out.is_absolute() else f"cluster={out}",
        ]
    )


# Bytes of a file of measurements at most: a larger one was not meant.
LARGEST_FILE = 64 << 20
ROWS = '[{"overrides": ["model=llama_tiny"], "step_s": 0.2}]'
# torch's name of a format -> that in a cluster file.
FORMATS: dict[str, Format] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
KERNELS = '{"dtype": "bfloat16", "ceilings": {"copy_bytes_per_s": 3e12, "gemm_flop_per_s": 7e14}}'
# Bounds of a measured number: one outside of them was not measured.
SMALLEST_NUMBER = 1e-12
LARGEST_NUMBER = 1e21
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
        return json.loads(read_bytes(path, str(path), LARGEST_FILE))
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
    if not number or not SMALLEST_NUMBER <= value <= LARGEST_NUMBER:
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
