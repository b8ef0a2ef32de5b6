"""`report`: the page says what the run folder has, and nothing in a folder becomes markup."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import cycle
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from mtrain.cli.charts import thinned
from mtrain.cli.main import main
from mtrain.config.resolve.resolution import resolve
from mtrain.plan.compare import planned
from tests.support.commands import environment
from tests.support.configs import LAPTOP, tiny
from tests.support.page_numbers import shown_in
from tests.support.patience import patient
from tests.support.run_folders import Line, event, folder, life, lines_of, reported

TAGS = (
    "html head meta title style body h1 h2 p div b span i table tr th td svg rect text path polygon"
    " details summary"
)
ATTRIBUTES = (
    "lang charset name content http-equiv class style viewbox role d x y width height fill stroke"
    " stroke-width stroke-linejoin points text-anchor data-from title"
)


BAD = (
    "<script>alert(%d)</script>",
    '"><img src=x onerror=alert(%d)>',
    "' onmouseover='alert(%d)",
    "</title><script>%d</script>",
    "</style></svg></table><iframe src=//x/%d>",
    "<!-- %d -->",
    "]]><b>%d</b>&lt;i&gt;",
    "&#60;script&#62;%d&#60;/script&#62;",
    "javascript:%d//\u202e\x00\x1b[31m\u2028",
    "<a href='data:text/html,%d'>" + "x" * 400 + "</a>",
)
HOSTILE = [bad % number for number in range(20) for bad in BAD]


def poisoned(home: Path, names: Iterator[str]) -> Path:
    """Write a run folder with hostile names wherever a folder has names and texts."""
    lines = lines_of(40)
    for line in lines:
        line.update(dict.fromkeys(HOSTILE[:12], line["step"] / 7))
    columns = [next(names) for _ in range(5)]
    slow = {"rank": 1, "own_s": 0.009, "usual_s": 0.003}
    events = [event("start", 0, attempt=1)]
    events += [
        event(
            "statistics",
            2,
            of=next(names),
            columns=columns,
            rows={next(names): [1.0, 2.0, 3.0, 4.0, 5.0] for _ in range(30)},
        )
    ]
    events += [event("alert", 3, name=next(names), text=next(names)) for _ in range(30)]
    events += [event("warning", 4, text=next(names)) for _ in range(30)]
    events += [event("straggler", 5, machine=next(names), **slow)]
    events += [event("checkpoint", 6, name=next(names))]
    events += [event("restart", 7, facts={"error": next(names)})]
    events += [event("end", 8, how="failed", why=next(names))]
    folder(home, lines, events)
    life(home, {"stepping": 4.0}, 40)
    versions = {next(names): next(names) for _ in range(20)}
    (home / "env.json").write_text(json.dumps({"versions": versions}))
    return home


def test_report_page_shows_hostile_text_as_text(tmp_path: Path) -> None:
    names = cycle(HOSTILE)
    first = poisoned(tmp_path / "<b>one", names)
    other = folder(tmp_path / 'other"><script>', lines_of(9))
    with (other / "run.yaml").open("a") as file:
        file.write("later:\n")
        file.writelines(f"  {json.dumps(name)}: {json.dumps(name)}\n" for name in HOSTILE[::9])
    for homes in ((first,), (other,), (first, other)):
        text, page = reported(*homes)
        (tmp_path / "page.html").unlink()
        assert page.tags <= set(TAGS.split())
        assert page.attributes <= set(ATTRIBUTES.split())
        assert "default-src 'none'" in text
        assert not re.search(r"https?://|[\x00-\x08\x0b-\x1f\u202e]", text)
    assert any("<script>alert(" in word for word in page.words)


def test_report_page_numbers_are_those_of_the_folder(tmp_path: Path) -> None:
    lines = lines_of(100)
    for line in lines:
        line["loss"] = 2 + 5 / line["step"]
        line["tokens_per_s"] = 900.0 + line["step"]
    lines.append({"step": 100, "valid_loss": 2.3456})
    home = folder(tmp_path / "run", lines)
    life(home, {"stepping": 10.0, "saving": 6.0, "starting": 4.0}, 100)
    (home / "memory.json").write_text('{"peak_bytes_by_rank": [3145728]}')
    _, page = reported(home)
    tail = fmean(line["loss"] for line in lines[90:100])
    assert page.cards["loss, mean of the last 10 steps"].startswith(f"{tail:.4f} ± ")
    rate = median(line["tokens_per_s"] for line in lines[3:100])
    assert {key: value for key, value in page.cards.items() if "mean" not in key} == {
        "steps": f"100 of {resolve(tiny(), LAPTOP).trainer.steps}",
        "validation loss at step 100": "2.3456",
        "tokens/s, median": f"{rate:.0f}",
        "MFU, median": "40.0%",
        "goodput": "50.0%",
        "lived": "20.0s",
        "state": "finished",
    }
    assert page.row("optimizer")[2] == "20 ms"
    assert page.row("saving") == ["saving", "6.0s", "30.0%"]
    tokens = sum(line["tokens_per_s"] * 0.1 for line in lines[:100])
    cost = tokens / 14 - tokens / 20
    assert page.row("saves that blocked the loop") == [
        "saves that blocked the loop",
        "6.0s",
        f"{cost:.0f}",
    ]
    assert "The most is 3.0 MiB, on rank 0." in page.words


class Sources(HTMLParser):
    """The texts with digits of each part of a page that names its files; those of pictures are
    the marks of their axes.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.depth = 0
        self.files = ""
        self.inside: list[str] = []
        self.found: dict[str, list[str]] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        own = dict(attrs).get("data-from")
        # Elements inside of a part name their own keys.
        if own is not None and tag == "div" and not self.files:
            self.files = own
            self.depth = 0
        self.depth += tag == "div"
        self.inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.inside and self.inside.pop() != tag:
            pass
        self.depth -= tag == "div"
        if not self.depth:
            self.files = ""

    def handle_data(self, data: str) -> None:
        apart = {"svg", "style", "title", "h1", "meta"} & set(self.inside)
        if not apart and re.search(r"\d", data):
            self.found.setdefault(self.files, []).append(data)


def test_report_page_numbers_come_from_the_files_it_names(tmp_path: Path) -> None:
    """Take away the files that a part names: a number that stays came from elsewhere."""
    lines = lines_of(60)
    for line in lines:
        for key in ("loss", "grad_norm", "lr", "tokens_per_s", "mfu"):
            line[key] *= 2 - line["step"] / 60
    lines += [{"step": 50, "valid_loss": 2.4567}, {"step": 60, "valid_loss": 2.3456}]
    events = [event("alert", 7, name="loss", text="at 7.25"), event("checkpoint", 50, name="s")]
    events += [event("memory", n, by_rank={"allocated_bytes": [n << 30]}) for n in range(60)]
    events += [event("straggler", 9, rank=3, machine="box", own_s=0.08, usual_s=0.05)]
    home = folder(tmp_path / "run", lines, events)
    life(home, {"stepping": 10.0, "saving": 6.0, "starting": 4.0}, 60)
    (home / "memory.json").write_text('{"peak_bytes_by_rank": [3145728]}')
    (home / "env.json").write_text('{"versions": {"torch": "2.9"}}')
    page, _ = reported(home)
    shown = shown_in(page, home)
    assert [(one.where, one.text) for one in shown if not one.holds(one.text)] == []
    assert not any(one.holds(wrong) for one in shown for wrong in one.wrong())
    whole = Sources(page).found
    assert not [text for text in whole.get("", []) if "tiny" not in text]
    assert {"events", "life.jsonl", "memory.json plan.json run.yaml"} <= whole.keys()
    for files in whole.keys() - {"", "run.yaml"}:
        other = tmp_path / files.replace(" ", "-")
        shutil.copytree(home, other)
        for name in set(files.split()) - {"run.yaml"}:
            path = other / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        (tmp_path / "page.html").unlink()
        left = Sources(reported(other)[0]).found
        same = set(left.get(files, ())) & set(whole[files])
        # The configuration stays, and what is planned from it.
        assert set(whole[files]) - same, files
        assert not same or "run.yaml" in files, (files, same)


SLOWDOWNS: dict[str, tuple[dict[str, Any], list[Line], dict[str, float], str, float]] = {
    # keys of every step, events, the life, the cause on the page, seconds of a step without it
    "data": (
        {"data_wait_s": 0.03},
        [],
        {"stepping": 70.0, "waiting_for_data": 30.0},
        "waiting for data",
        70.0,
    ),
    "saves": ({}, [], {"stepping": 100.0, "saving": 25.0}, "saves that blocked the loop", 100.0),
    "evaluation": ({}, [], {"stepping": 100.0, "evaluating": 50.0}, "evaluations", 100.0),
    "slow rank": (
        {},
        [
            event("straggler", 3, rank=3, machine="box", own_s=0.08, usual_s=0.05),
        ],
        {"stepping": 100.0},
        "rank 3 on box, 1.6 x its stage, since step 1",
        70.0,
    ),
}


@pytest.mark.parametrize("name", SLOWDOWNS)
def test_report_page_prices_what_slowed_it(name: str, tmp_path: Path) -> None:
    keys, events, seconds, cause, without_s = SLOWDOWNS[name]
    home = folder(tmp_path / "run", lines_of(1000, **keys), events)
    life(home, seconds, 1000)
    _, page = reported(home)
    true = 100_000 / without_s - 100_000 / sum(seconds.values())
    assert float(page.row(cause)[2]) == pytest.approx(true, rel=0.2)
    costs = page.rows[page.rows.index(["cause", "time", "tokens/s"]) + 1 :]
    assert costs[0][0] == cause


def test_report_page_prices_steps_that_became_slower(tmp_path: Path) -> None:
    lines = lines_of(1000)
    for line in lines[400:]:
        line |= {"step_s": 0.2, "tokens_per_s": 500.0}
    _, page = reported(folder(tmp_path / "run", lines))
    true = 100_000 / 100 - 100_000 / 160
    assert float(page.row("steps that became slower")[2]) == pytest.approx(true, rel=0.2)


def test_report_page_marks_what_happened(tmp_path: Path) -> None:
    lines = lines_of(100)
    lines[70]["loss"] = 9.0
    lines[80]["skipped"] = True
    lines[90]["loss"] = None
    events = [event("start", 0, attempt=1), event("checkpoint", 50, name="step_00000050")]
    events += [event("alert", 60, name="loss", text="too high"), event("start", 50, attempt=2)]
    _, page = reported(folder(tmp_path / "run", lines, events))
    happened = {(row[0], row[1]) for row in page.rows if len(row) == 3}
    assert {("50", "resume"), ("60", "alert"), ("71", "spike"), ("91", "spike")} <= happened
    assert ("81", "skipped update") in happened
    assert "save" in page.words


@pytest.mark.parametrize(
    "damage", ["never stepped", "another version", "half a line", "bytes", "no metrics", "plan"]
)
def test_report_page_of_damaged_folder_says_what_it_has(damage: str, tmp_path: Path) -> None:
    home = folder(tmp_path / "run", [] if damage == "never stepped" else lines_of(20))
    words = {"never stepped": "The run has made no step.", "another version": "cannot be read by"}
    if damage == "another version":
        run = home / "run.yaml"
        run.write_text(run.read_text().replace("data:", "later: {key: 1}\ndata:", 1))
    if damage == "half a line":
        for file in ("metrics.jsonl", "events/0001.jsonl", "life.jsonl"):
            with (home / file).open("a") as stream:
                stream.write('{"format": 1, "kind": "step", "step": 21, "loss": 3.')
    if damage == "bytes":
        for file in ("metrics.jsonl", "events/0001.jsonl", "memory.json", "plan.json", "env.json"):
            with (home / file).open("ab") as stream:
                stream.write(b'\xff\x00[[{"step": "x"}\n{"step": 1e400, "lr": {}}\n[]\n')
    if damage == "no metrics":
        (home / "metrics.jsonl").unlink()
        lines = [event("step", line["step"], values=line) for line in lines_of(20)]
        lines += [event("step", 21), event("evaluation", 10**400, values={}), event("alert", -1)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (home / "events/0001.jsonl").write_text(text)
    if damage == "plan":
        plan = dict.fromkeys(planned(resolve(tiny(), LAPTOP)) or {}, "x")
        (home / "plan.json").write_text(json.dumps({"planned": plan}))
    text, page = reported(home)
    assert page.cards["steps"].startswith("0" if damage == "never stepped" else "20")
    assert words.get(damage, "steps") in text


def test_report_page_of_several_runs_compares_and_scales(tmp_path: Path) -> None:
    homes = []
    for ranks, rate in ((1, 1000.0), (2, 1800.0)):
        keys = {"parallel__tp": ranks, "parallel__ranks": ranks}
        lines = lines_of(50, tokens_per_s=rate, model_flops=1e9)
        for line in lines:
            line["loss"] += 1 / line["step"]
        homes.append(folder(tmp_path / f"ranks{ranks}", lines, **keys))
    text, page = reported(*homes)
    shown = shown_in(text, *homes)
    assert [(one.where, one.text) for one in shown if not one.holds(one.text)] == []
    assert not any(one.holds(wrong) for one in shown for wrong in one.wrong())
    assert ["parallel.tp", "1", "2", "parallelism"] in page.rows
    assert "equal bitwise in 50 steps." in page.words
    assert ["2", "ranks2", "1.80k", "-", "90.0%", "40.0%"] in page.rows
    for axis in ("steps", "tokens", "seconds of steps", "FLOPs of the model"):
        assert f"Loss over {axis}" in page.words


def test_report_page_refuses_words_without_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = folder(tmp_path / "run", [])
    for words in ([str(home)], ["--out", "x"], [str(tmp_path), "--out", str(tmp_path / "x")]):
        assert main(["report", *words]) == 2
    (tmp_path / "page.html").write_text("mine")
    assert main(["report", str(home), "--out", str(tmp_path / "page.html")]) == 2
    assert "MT704" in capsys.readouterr().err


def test_report_page_keeps_extremes_of_long_curves() -> None:
    points = [(float(x), float(x % 100)) for x in range(100_000)]
    points[54_321] = (54_321.0, 1e6)
    kept = thinned(points)
    assert len(kept) <= 960
    assert (54_321.0, 1e6) in kept
    assert kept == sorted(kept)


MEASURE = """
import resource, sys
from mtrain.cli.main import main
code = main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
sys.exit(code)
"""


@pytest.mark.full
def test_report_page_of_10000_steps_and_1024_ranks_is_small(tmp_path: Path) -> None:
    events = [event("step", line["step"], values=line) for line in lines_of(10_000)]
    names = [f"decoder.layers.{n}.mlp.linear_fc{f}.weight" for n in range(80) for f in (1, 2)]
    for step in range(100, 10_001, 100):
        events.append(event("checkpoint", step, name=f"step_{step:08d}"))
        rows = {name: [step / 3.0 + len(name), 0.1, 0.2, 0.0] for name in names}
        columns = ["norm", "mean", "largest", "zeros"]
        events += [
            event("statistics", step, of=kind, columns=columns, rows=rows)
            for kind in ("weights", "gradients", "updates", "moments")
        ]
    ranks = {"parallel__tp": 8, "parallel__ranks": 1024, "trainer__global_batch_size": 1024}
    home = folder(tmp_path / "run", lines_of(10_000), events, **ranks)
    (home / "memory.json").write_text(json.dumps({"peak_bytes_by_rank": [1 << 36] * 1024}))
    out = tmp_path / "page.html"
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, "report", str(home), "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=patient(20),
        env=environment(),
        check=True,
    )
    assert int(done.stdout.split()[-1]) < 1 << 20
    assert out.stat().st_size < 5 << 20
