"""`-m`: one run, or one judgement, for each combination of the values that a command line gives for a key."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from mtrain import strict_json
from mtrain.config.compose import compose
from mtrain.config.paths import user_path
from mtrain.config.sweep import Job, jobs
from mtrain.errors import BadInput, say, say_page, visible

ORDER = (0, 75, 2, 3, 4, 5)
"""Exit codes from good to bad; every other one is worse."""
COMMAND = "import sys; from mtrain.cli.main import main; sys.exit(main(sys.argv[1:]))"
METRICS = "metrics.jsonl"


@dataclass
class Row:
    """What became of one run."""

    name: str
    differs: str
    code: int
    loss: float | None = None
    validation: float | None = None
    tokens_per_s: float | None = None


def train(argv: Sequence[str], *, debug: bool, as_json: bool = False) -> int:
    """Trains every combination, one after the other, and prints a table; the worst exit code.

    A run that fails does not keep the others from running; an interrupt does, after the run that it interrupted.

    Raises:
        BadInput: the sweep cannot be read, or this is a rank of another launcher.
    """
    if "WORLD_SIZE" in os.environ:
        raise BadInput("a sweep starts its own runs: leave torchrun out, or start each run with it")
    wanted = jobs(argv)
    names = _names(wanted)
    sweep, rows = _Sweep(), list[Row]()
    for index, (job, name) in enumerate(zip(wanted, names, strict=True)):
        if sweep.stopped:
            break
        say(f"[{index + 1}/{len(wanted)}] {name}: {job.differs}")
        rest = [word for word in job.argv if not word.startswith("log.name=")]
        words = list(job.argv) if "log.name" in job.swept else [*rest, f"log.name={name}"]
        code = sweep.run([*words, *(["--debug"] if debug else [])])
        rows.append(_row(job, name, code, words))
    code = worst([*(row.code for row in rows), *([sweep.stopped] if sweep.stopped else [])])
    say_page(strict_json.dumps([vars(row) for row in rows], indent=2) if as_json else _table(rows, len(wanted)))
    return code


def check(argv: Sequence[str], *, as_json: bool = False) -> int:
    """Judges every combination without running any; the worst exit code."""
    from mtrain.cli.check import verdict
    from mtrain.cli.setup import load

    out: list[dict[str, Any]] = []
    for job in jobs(argv):
        try:
            loaded = load(job.argv)
            facts = {**verdict(loaded.warnings, loaded.run.digest()), "code": 0}
        except BadInput as error:
            facts = {**verdict(error.problems, None), "code": error.exit_code}
        out.append({"differs": job.differs, **facts})
    if as_json:
        say_page(strict_json.dumps(out, indent=2))
    else:
        width = max(len(row["differs"]) for row in out)
        for row in out:
            broken = [p for p in row["problems"] if p["severity"] == "error"]
            first = f"{broken[0]['code']} {broken[0]['path']}: {broken[0]['rule']}" if broken else "ok"
            more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
            say(f"{row['differs']:<{width}}  {first}{more}")
        say_page(f"{sum(row['ok'] for row in out)} of {len(out)} pass")
    return worst([row["code"] for row in out])


def worst(codes: Sequence[int]) -> int:
    """The worst of some exit codes; 0 for none."""
    return max(codes, key=lambda code: ORDER.index(code) if code in ORDER else len(ORDER), default=0)


class _Sweep:
    """Runs commands one after the other until it is told to stop."""

    def __init__(self) -> None:
        self.stopped = 0
        self.child: subprocess.Popen[bytes] | None = None
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopped = 75
        if self.child is not None:
            self.child.send_signal(signal.SIGTERM)

    def run(self, argv: Sequence[str]) -> int:
        """Runs one command to its end; its exit code."""
        from mtrain.launching.local import die_with

        parent = os.getpid()
        paths = os.pathsep.join(path for path in sys.path if path)
        self.child = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *argv],
            env={**os.environ, "PYTHONPATH": paths},
            preexec_fn=lambda: die_with(parent),
        )
        while True:
            try:
                code = self.child.wait()
                break
            except KeyboardInterrupt:  # the terminal has told the run as well: it saves and ends
                self.stopped = 130
        self.child = None
        return 128 - code if code < 0 else code


def _names(wanted: Sequence[Job]) -> list[str]:
    """A run folder for each: of the name that is given or of the time, with a number."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    width = len(str(len(wanted) - 1))
    names = []
    for index, job in enumerate(wanted):
        given = next((word.partition("=")[2] for word in reversed(job.argv) if word.startswith("log.name=")), "")
        if "log.name" in job.swept:
            names.append(job.swept["log.name"])
        else:
            names.append(f"{given or f'{stamp}-sweep'}-{index:0{width}d}")
    return names


def _row(job: Job, name: str, code: int, words: Sequence[str]) -> Row:
    """The numbers that a run left in its folder."""
    row = Row(name, job.differs, code)
    try:
        folder = user_path(compose(words).run.log.runs_dir) / name
    except BadInput:
        return row
    lines = _lines(folder / METRICS)
    rates = [line["tokens_per_s"] for line in lines if line.get("tokens_per_s") is not None]
    row.loss = next((line["loss"] for line in reversed(lines) if "loss" in line), None)
    row.validation = next((line["valid_loss"] for line in reversed(lines) if "valid_loss" in line), None)
    row.tokens_per_s = statistics.median(rates[1:] or rates) if rates else None
    return row


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    out = []
    for text in path.read_text(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        out += [line] if isinstance(line, dict) else []
    return out


def _table(rows: Sequence[Row], wanted: int) -> str:
    """One line a run, whatever became of it."""
    from mtrain.units import count

    head = ("name", "what differs", "loss", "validation", "tokens/s", "exit")
    cells = [head]
    for row in rows:
        numbers = (f"{value:.4f}" if value is not None else "-" for value in (row.loss, row.validation))
        rate = count(row.tokens_per_s) if row.tokens_per_s is not None else "-"
        cells.append((row.name, row.differs, *numbers, rate, str(row.code)))
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    lines = [
        "  ".join(f"{text:<{width}}" for text, width in zip(line, widths, strict=True)).rstrip() for line in cells
    ]
    failed = sum(row.code != 0 for row in rows)
    tail = f"{len(rows)} of {wanted} runs" + (f", {failed} failed" if failed else "")
    return "\n".join(map(visible, [*lines, tail]))
