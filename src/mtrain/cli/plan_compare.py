"""`plan --compare RUN`: planned and measured values of a run, part by part."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import expanduser
from pathlib import Path

from mtrain import strict_json
from mtrain.cli.output import refusal
from mtrain.config.compose.lock_file import read_run_file
from mtrain.config.compose.paths import RUN_FILE, program
from mtrain.config.schema.run import RunConfig
from mtrain.errors import CorruptData, say_page
from mtrain.plan.compare import BOUNDS, Row, lines_of_run, peaks_in, planned, rows, saved_in
from mtrain.plan.time.report import no_time, time_report
from mtrain.units import bytes_, duration


def run(folder: str, argv: Sequence[str], *, as_json: bool) -> int:
    """Print the comparison; return the exit code.

    Raises:
        ConfigError: the folder is no run, or further words are given.
        CorruptData: a file of the run cannot be read.
    """
    home = Path(expanduser(folder))
    # Settings would describe another run than the one that was measured.
    if argv:
        rule = f"--compare: a run is what it was; {argv[0]} changes nothing in it"
        raise refusal(rule, f"{program()} plan --compare {folder}")
    try:
        if (home / RUN_FILE).is_file():
            lacks = ""
        else:
            if home.exists():
                lacks = f"has no {RUN_FILE}"
            else:
                lacks = "does not exist"
    except OSError as error:
        lacks = f"cannot be read: {error.strerror}"
    if lacks:
        fix = f"{program()} plan --compare RUN_FOLDER"
        raise refusal(f"{home} {lacks}; --compare needs a run folder", fix, "MT502")
    made = read_run_file(home / RUN_FILE)
    found = compared(made, home)
    if as_json:
        say_page(
            strict_json.dumps({"run": str(home), "parts": [row.data() for row in found]}, indent=2)
        )
    else:
        say_page("\n".join(_lines(made, found)))
    return 0


def compared(made: RunConfig, home: Path) -> list[Row]:
    """Return the parts of the plan of a run, with the values measured in its folder.

    Raises:
        ConfigError: the model of the run cannot be counted.
        CorruptData: a file of the run cannot be read.
    """
    plan = planned(made)
    if plan is None:
        rule = f"the family {made.model.family} does not say which weights a stage has"
        raise refusal(rule, "a family that says so", "MT254", "model.family", made.model.family)
    try:
        lines = lines_of_run(home)
        saved = saved_in(home)
    except OSError as error:
        raise CorruptData(f"{home}: cannot be read: {error}") from None
    return rows(made, plan, lines, peaks_in(home), saved)


def _lines(made: RunConfig, found: Sequence[Row]) -> list[str]:
    cells = [["", "planned", "measured", "off", ""]]
    for row in found:
        say = duration if row.kind == "time" else bytes_
        planned_, measured = (
            "-" if value is None else say(value) for value in (row.planned, row.measured)
        )
        off = "-" if row.off is None else f"{row.off:+.1%}"
        cells.append([row.part, planned_, measured, off, "beyond its bound" if row.beyond else ""])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    out = [f"{made.model.name} on {made.cluster.name}"]
    for part, *others in cells:
        *numbers, said = (text.rjust(w) for text, w in zip(others, widths[1:], strict=True))
        out.append(f"  {part.ljust(widths[0])}  {'  '.join(numbers)}  {said.strip()}".rstrip())
    if all(row.planned is None for row in found if row.kind == "time"):
        out.append(f"the time of a step is {no_time(time_report(made, 0))}")
    bounds = ", ".join(f"{kind} {bound:.0%}" for kind, bound in BOUNDS.items())
    if any(row.kind == "process" for row in found):
        bounds += "; memory of a process has every library in it"
    return [
        *out,
        (
            f"bounds: {bounds}; times are medians without the first steps, memory is that of the"
            " largest rank"
        ),
    ]
