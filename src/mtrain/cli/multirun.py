"""`-m`: one run, or one validation, for each combination of the values on a command line."""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from mtrain.cli.main import main
from mtrain.cli.output import problem_report, say_json
from mtrain.config.compose.overrides import Job, jobs
from mtrain.config.compose.paths import METRICS, user_path
from mtrain.config.resolve.resolution import Machine, resolve, world_size_of
from mtrain.config.schema.run import RunConfig
from mtrain.errors import ConfigError, MtrainError, say, say_page, visible
from mtrain.launching import signals, start
from mtrain.loading import checkpoints
from mtrain.loading.configuration import REPLACED, load, settled
from mtrain.plan.compare import lines_of

# Exit codes from good to bad; any other code is worse.
ORDER = (0, 75, 2, 3, 4, 5)


@dataclass
class Row:
    """The result of one run."""

    name: str
    differs: str
    code: int
    loss: float | None = None
    validation: float | None = None
    tokens_per_s: float | None = None


def train(argv: Sequence[str], *, debug: bool, as_json: bool = False) -> int:
    """Train every combination, one after the other, and print a table; return the worst exit code.

    A run that fails does not keep the others from running; an
    interrupt does, after the run that it interrupted.

    Raises:
        ConfigError: the sweep cannot be read, or this is a rank of another launcher.
    """
    if world_size_of() is not None:
        raise ConfigError(
            "a sweep starts its own runs: leave torchrun out, or start each run with it"
        )
    wanted = jobs(argv)
    names = _names(wanted)
    sweep = _Sweep()
    rows = list[Row]()
    file: Path | None = None
    for index, (job, name) in enumerate(zip(wanted, names, strict=True)):
        if sweep.stopped:
            break
        say(f"[{index + 1}/{len(wanted)}] {name}: {job.differs}")
        rest = [word for word in job.argv if not word.startswith("log.name=")]
        # Two runs would share a folder if each had the name that the command line gives to all.
        words = list(job.argv) if "log.name" in job.swept else [*rest, f"log.name={name}"]
        run = _composed(words)
        if file is None and run is not None:
            file = _file(user_path(run.log.runs_dir), wanted, names)
        code = sweep.run([*words, *(["--debug"] if debug else [])], run)
        rows.append(_row(job, name, code, run))
        if file is not None:
            _write(file, _table(rows, len(wanted)))
    code = worst([*(row.code for row in rows), *([sweep.stopped] if sweep.stopped else [])])
    if as_json:
        say_json([vars(row) for row in rows])
    else:
        say_page(_table(rows, len(wanted)))
    if file is not None and file.is_file():
        say(f"table: {file}", error=as_json)
    return code


def check(argv: Sequence[str], *, as_json: bool = False) -> int:
    """Validate every combination without running any; return the worst exit code."""
    out: list[dict[str, Any]] = []
    for job in jobs(argv):
        try:
            loaded = load(job.argv, to_run=False)
            facts = {**problem_report(loaded.warnings, loaded.run.digest()), "code": 0}
        except ConfigError as error:
            facts = {**problem_report(error.problems, None), "code": error.exit_code}
        out.append({"differs": job.differs, **facts})
    if as_json:
        say_json(out)
    else:
        width = max(len(row["differs"]) for row in out)
        for row in out:
            broken = [p for p in row["problems"] if p["severity"] == "error"]
            first = (
                f"{broken[0]['code']} {broken[0]['path']}: {broken[0]['rule']}" if broken else "ok"
            )
            more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
            say(f"{row['differs']:<{width}}  {first}{more}")
            for problem in row["problems"]:
                if problem["code"] == REPLACED:
                    say(f"  {problem['path']}={problem['value']}: {problem['rule']}")
        say_page(f"{sum(row['ok'] for row in out)} of {len(out)} pass")
    return worst([row["code"] for row in out])


def worst(codes: Sequence[int]) -> int:
    """Return the worst of some exit codes; 0 for none."""
    return max(
        codes, key=lambda code: ORDER.index(code) if code in ORDER else len(ORDER), default=0
    )


class _Sweep:
    """Commands run one after the other, until a stop is requested.

    torch and megatron-core, whose import costs seconds of a core, are imported here, once, and runs
    are forked.
    """

    def __init__(self) -> None:
        self.stopped = 0
        self.child = 0
        self.device: str | None = None
        """The device that megatron-core was imported for."""
        signals.replace(self._stop, signals.STOPS - {signal.SIGINT})

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopped = 75
        self._forward_stop()

    def _forward_stop(self) -> None:
        if self.child:
            os.kill(self.child, signal.SIGTERM)

    def run(self, argv: Sequence[str], run: RunConfig | None) -> int:
        """Run one command to its end in a process forked from this one; return its exit code.

        A run on another device than the earlier ones imports torch in its own process.
        """
        if run is not None and self.device is None:
            from mtrain.launching.local import import_for

            # The run itself reports what is missing.
            with suppress(MtrainError):
                import_for(run)
                self.device = run.cluster.device
        fresh = run is not None and run.cluster.device != self.device
        # A fork copies unwritten output, and the child would print it again.
        sys.stdout.flush()
        sys.stderr.flush()
        self.child = start.fork(lambda: _command(argv, fresh))
        # A stop that came before the fork has not reached the run.
        if self.stopped:
            self._forward_stop()
        while True:
            try:
                _, status = os.waitpid(self.child, 0)
                break
            except KeyboardInterrupt:
                # The terminal interrupts the run as well: it saves and ends.
                self.stopped = 130
        self.child = 0
        code = os.waitstatus_to_exitcode(status)
        return 128 - code if code < 0 else code


def _command(argv: Sequence[str], fresh: bool) -> int:
    """Run a command in a forked process as if it were started by itself; return its exit code."""
    # a terminal's Ctrl-C reaches the run as well
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if fresh:
        command = start.python("mtrain", *argv)
        # megatron-core was imported for another device here and cannot change: a new interpreter
        # can.
        os.execve(command[0], command, start.importable(os.environ))
    return main(argv)


def _composed(words: Sequence[str]) -> RunConfig | None:
    """Return a run's configuration, resolved here; None if it is refused when it starts."""
    try:
        machine = Machine.here()
        return resolve(settled(checkpoints.composed(words), machine, None)[0].run, machine)
    except ConfigError:
        return None


def _file(folder: Path, wanted: Sequence[Job], names: Sequence[str]) -> Path:
    """Return a new file for the table, next to the run folders."""
    swept = "log.name" in wanted[0].swept
    if swept:
        base = f"{time.strftime('%Y%m%d-%H%M%S')}-sweep"
    else:
        base = Path(names[0]).name.rpartition("-")[0]
    file = folder / f"{base}.sweep.txt"
    number = 2
    while file.exists():
        file = folder / f"{base}.sweep-{number}.txt"
        number = number + 1
    return file


def _write(file: Path, table: str) -> None:
    """Write the results so far; a sweep goes on where that cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{table}\n", encoding="utf-8")
    except OSError as error:
        say(f"{file} cannot be written: {error.strerror}", error=True)


def _names(wanted: Sequence[Job]) -> list[str]:
    """Return a run folder for each: of the name that is given or of the time, with a number."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    width = len(str(len(wanted) - 1))
    names = []
    for index, job in enumerate(wanted):
        given = next(
            (word.partition("=")[2] for word in reversed(job.argv) if word.startswith("log.name=")),
            "",
        )
        if "log.name" in job.swept:
            names.append(job.swept["log.name"])
        else:
            names.append(f"{given or f'{stamp}-sweep'}-{index:0{width}d}")
    return names


def _row(job: Job, name: str, code: int, run: RunConfig | None) -> Row:
    """Return the numbers that a run left in its folder."""
    row = Row(name, job.differs, code)
    if run is None:
        return row
    lines = lines_of(user_path(run.log.runs_dir) / name / METRICS)
    rates = [line["tokens_per_s"] for line in lines if line.get("tokens_per_s") is not None]
    row.loss = next((line["loss"] for line in reversed(lines) if "loss" in line), None)
    row.validation = next(
        (line["valid_loss"] for line in reversed(lines) if "valid_loss" in line), None
    )
    # The first rate has the start of the run in it, unless it is the only one.
    row.tokens_per_s = statistics.median(rates[1:] or rates) if rates else None
    return row


def _table(rows: Sequence[Row], wanted: int) -> str:
    """Return one line a run, whatever became of it."""
    from mtrain.units import count

    head = ("name", "what differs", "loss", "validation", "tokens/s", "exit")
    cells: list[tuple[str, ...]] = [head]
    for row in rows:
        numbers = (
            f"{value:.4f}" if value is not None else "-" for value in (row.loss, row.validation)
        )
        rate = count(row.tokens_per_s) if row.tokens_per_s is not None else "-"
        cells.append((row.name, row.differs, *numbers, rate, str(row.code)))
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    lines = [
        "  ".join(f"{text:<{width}}" for text, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]
    failed = sum(row.code != 0 for row in rows)
    tail = f"{len(rows)} of {wanted} runs" + (f", {failed} failed" if failed else "")
    return "\n".join(map(visible, [*lines, tail]))
