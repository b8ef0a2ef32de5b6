"""`bisect RUN STEP`: the cause of an anomalous step, from a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mtrain.ckpt import folder as ckpt_folder
from mtrain.cli.output import refusal, say_json
from mtrain.config.compose.paths import ANOMALIES, CHECKPOINTS, METRICS, program
from mtrain.errors import say_page
from mtrain.launching import local, preflight
from mtrain.loading.checkpoints import WITHOUT_START, beneath, relaid, run_file, target_of
from mtrain.loading.configuration import load, say_replaced
from mtrain.object_store import is_remote
from mtrain.plan.compare import lines_of

REPORT = "bisect.json"
WINDOW = 100
"""Steps before whose losses are usual."""


def run(words: list[str], *, as_json: bool) -> int:
    """Print the cause of the anomaly in a step of a run; return the exit code.

    Raises:
        ConfigError: the run lacks the step, or a checkpoint before it.
    """
    usage = f"{program()} bisect runs/NAME STEP"
    if words and is_remote(words[0]):
        rule = f"cannot bisect because {words[0]} has checkpoints, and no losses of steps"
        raise refusal(rule, usage, "MT502")
    target, rest = target_of(words, "bisect", usage)
    if not rest or not rest[0].isdecimal() or not int(rest[0]):
        rule = "cannot bisect because the number of a step is missing"
        raise refusal(rule, usage, "MT002")
    step = int(rest[0])
    unused = ("trainer.sample_tokens=0", "checkpoint.resume=null", WITHOUT_START)
    overrides = [*unused, *relaid(target, rest[1:])]
    said = [f"run={run_file(target)}", *beneath(overrides, rest[1:])]
    loaded = load(said)
    say_replaced(loaded)
    steps = loaded.run.trainer.steps
    if step > steps:
        rule = f"cannot replay step {step} because the run has {steps} steps"
        raise refusal(rule, f"STEP={steps}, or trainer.train_iters={step}", "MT491")
    checkpoint = _before(target, step)
    if checkpoint is None and loaded.run.checkpoint.init_from is not None:
        rule = f"cannot replay step {step} because no checkpoint of {target} is of an earlier step"
        raise refusal(rule, "a later STEP", "MT492")
    preflight.check(loaded.run, said)
    lines = [line for line in lines_of(target / METRICS) if line["step"] < step]
    usual = [line["loss"] for line in lines if isinstance(line.get("loss"), float)][-WINDOW:]
    out = target / ANOMALIES / f"step_{step}" / REPORT
    local.bisect(loaded.run, checkpoint, step, usual, out)
    report = json.loads(out.read_text())
    if as_json:
        say_json(report)
    else:
        say_page("\n".join(_lines(report, out)))
    return 0


def _before(target: Path, step: int) -> Path | None:
    """Return the newest checkpoint of an earlier step, or None."""
    saved = [
        path
        for path in ckpt_folder.committed(target / CHECKPOINTS)
        if ckpt_folder.step_of(path) < step
    ]
    return saved[-1] if saved else None


def _lines(report: dict[str, Any], out: Path) -> Iterator[str]:
    """Yield the cause, the first abnormal module, and the documents."""
    yield f"step {report['step']}, replayed from step {report['replayed_from']}: {report['cause']}"
    yield report["why"]
    found = report.get("found")
    if found is not None:
        yield (
            f"first abnormal output: {found['side']} of {found['module']}, {found['direction']},"
            f" rank {found['rank']}, micro-batch {found['micro_batch']}: {found['why']}"
        )
    for each in report["samples"]:
        yield f"sample {each['sample']}: {each['place'] or 'synthetic tokens'}"
    yield f"report: {out}"
