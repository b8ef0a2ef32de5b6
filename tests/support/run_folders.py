"""Run folders that a test writes, and the page that `report` makes of them, read back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from mtrain.cli.main import main
from mtrain.config.compose.dump import run_yaml
from mtrain.config.resolve.resolution import resolve
from mtrain.config.schema.run import RunConfig
from tests.support.configs import LAPTOP, tiny

Line = dict[str, Any]


class Page(HTMLParser):
    """A page: its tags, attributes, cards and rows of tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.rows: list[list[str]] = []
        self.words: list[str] = []
        self.cards: dict[str, str] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        self.inside = tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self.inside in ("td", "th"):
            self.rows[-1][-1] += data
        if self.inside == "b":
            self.value = data
        if self.inside == "span" and data.strip():
            self.cards[data] = self.value

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    value = ""
    inside = ""

    def row(self, first: str) -> list[str]:
        """Return the row that begins with a cell."""
        (found,) = [row for row in self.rows if row and row[0] == first]
        return found


def lines_of(steps: int, **keys: Any) -> list[Line]:
    """Return lines of steps of 0.1 s and 1,000 tokens/s."""
    usual = {"loss": 3.0, "grad_norm": 1.0, "lr": 1e-3, "tokens": 100.0, "tokens_per_s": 1000.0}
    times = {"step_s": 0.1, "forward_backward_s": 0.08, "optimizer_s": 0.02, "data_wait_s": 0.0}
    return [{"step": n + 1, **usual, **times, "mfu": 0.4, **keys} for n in range(steps)]


def event(kind: str, step: int, **facts: Any) -> Line:
    return {"format": 1, "kind": kind, "time": "2026-01-01T00:00:00Z", "step": step, **facts}


def folder(
    home: Path,
    lines: Sequence[Line],
    events: Sequence[Line] = (),
    run: RunConfig | None = None,
    **keys: Any,
) -> Path:
    """Write the folder of a run, by default of a tiny one with some keys."""
    home.mkdir()
    (home / "run.yaml").write_text(run_yaml(run or resolve(tiny(**keys), LAPTOP)))
    (home / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (home / "events").mkdir()
    text = "".join(json.dumps(one) + "\n" for one in events)
    (home / "events/0001.jsonl").write_text(text)
    return home


def life(home: Path, seconds: dict[str, float], step: int) -> None:
    """Write the life of one attempt."""
    wall = sum(seconds.values())
    facts = {"attempt": "1", "begun": 1e9, "boot": "b", "clock": 1.0, "at": 1e9 + wall}
    sign = {"first": 0, "step": step, "steps": step, "again": 0, "open_s": 0.0}
    line = {"format": 1, "kind": "end", **facts, "elapsed_s": wall, "end": "finished", **sign}
    line |= {"seconds": seconds, "open_cause": "stepping"}
    (home / "life.jsonl").write_text(json.dumps(line) + "\n")


def reported(*homes: Path) -> tuple[str, Page]:
    """Return the page about runs, as text and parsed."""
    out = homes[0].parent / "page.html"
    assert main(["report", *map(str, homes), "--out", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    return text, Page(text)


def number_of_page(words: str) -> float:
    """Return a number of the page."""
    units = {"k": 1e3, "M": 1e6}
    return float(words.rstrip("kM")) * units.get(words[-1], 1.0)
