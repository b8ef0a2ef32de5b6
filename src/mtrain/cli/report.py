"""`report`: one page that explains a run, or compares several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mtrain.cli import report_page, report_runs
from mtrain.cli.output import refusal, require_new, write_new
from mtrain.config.compose.paths import program
from mtrain.errors import say
from mtrain.processes import without_collecting
from mtrain.report.folder import read

MOST = 64
"""Runs of a page."""


@without_collecting()
def run(words: Sequence[str], *, out: str | None, tune: bool) -> int:
    """Write the page of the run folders that `words` name.

    Raises:
        ConfigError: the words name no run, there is no `--out`, or its file exists.
        BadEnvironment: it cannot be written.
    """
    usage = f"{program()} report runs/NAME --out page.html"
    if not words or out is None or any("=" in word for word in words):
        rule = "cannot report because it takes run folders, and --out with the file of the page"
        raise refusal(rule, usage, "MT002")
    if len(words) > MOST:
        rule = f"cannot report on {len(words)} runs because a page holds at most {MOST}"
        raise refusal(rule, f"{MOST} of them", "MT005")
    to = Path(out).expanduser()
    require_new(to)
    records = [read(Path(word).expanduser()) for word in words]
    if len(records) == 1:
        text = report_page.page_of(records[0], tune=tune)
    else:
        text = report_runs.page_of(records)
    write_new(to, text)
    say(f"wrote {to}")
    return 0
