"""`goodput`: the causes of the seconds of a run's life."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from mtrain import locks
from mtrain.cli.output import refusal, say_json, table
from mtrain.config.compose.paths import RUN_FILE, program
from mtrain.errors import say_page
from mtrain.goodput.account import RUNNING, Account, account, percent
from mtrain.launching.folder import LOCK_FILE
from mtrain.units import number_of, seconds


def run(words: Sequence[str], *, as_json: bool) -> int:
    """Print the account of a run folder.

    Raises:
        ConfigError: the words name no run, or one without a life log.
        CorruptData: no line of the log can be read.
    """
    usage = f"{program()} goodput runs/NAME"
    if len(words) != 1 or "=" in words[0]:
        raise refusal("cannot account for a run because it takes one run folder", usage, "MT002")
    home = run_folder(words[0], usage)
    found = account(home, alive=is_owned(home))
    if as_json:
        say_json(found.report())
    else:
        say_page("\n".join(_lines(found)))
    return 0


def run_folder(word: str, usage: str) -> Path:
    """Return the run folder that a word names.

    Raises:
        ConfigError: it names no folder of a run.
    """
    home = Path(word).expanduser()
    if not (home / RUN_FILE).is_file():
        rule = f"{home} has no {RUN_FILE}" if home.exists() else f"{home} does not exist"
        raise refusal(rule, usage, "MT502")
    return home


def is_owned(home: Path) -> bool:
    """Return whether a process writes to a run folder, as far as its lock tells."""
    with suppress(OSError):
        descriptor = os.open(home / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return locks.is_shared(descriptor) or locks.is_named(home / LOCK_FILE)
        finally:
            os.close(descriptor)
    return False


def _lines(found: Account) -> Iterator[str]:
    attempts = number_of(len(found.attempts), "attempt")
    yield f"{found.home}: {found.attempts[-1].end} at step {found.step}, {attempts}"
    wall = found.wall_s or 1.0
    rows = [["cause", "time", "share"]]
    rows += [
        [cause, seconds(spent), percent(spent / wall)]
        for cause, spent in found.seconds.items()
        if spent
    ]
    yield from table([*rows, ["all", seconds(found.wall_s), ""]], left=1)
    head = ["attempt", "began", "from step", "to step", "again", "lasted", "before", "end"]
    ends = [[head[0], *head[1:]]]
    for number, row in enumerate(found.report()["attempts"], 1):
        end = f"{row['end']}: {row['why']}" if row["why"] else row["end"]
        first = "-" if row["first_step"] is None else str(row["first_step"])
        last = "-" if row["first_step"] is None else str(row["step"])
        lasted = seconds(sum(row["seconds"].values()))
        before = seconds(sum(row["seconds_before"].values()))
        again = str(row["steps_again"])
        ends.append([str(number), row["began"], first, last, again, lasted, before, end])
    yield from table(ends, left=2, ragged=(7,))
    if found.first:
        yield f"the log begins at step {found.first}: what came before is not in it"
    if found.attempts[-1].end == RUNNING:
        yield "the run is still going on: this is its life up to the last sign of it"
