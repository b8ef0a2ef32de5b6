"""Scaling of a run: the table of `plan --scale`, refused lists, and a comparison with published
tables.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mtrain.cli.main import main
from tests.support.commands import ROOT
from tests.support.launched import light

sys.path.insert(0, str(ROOT / "benchmarks"))
import plan_scale as published

from tests.support.tables import tables

TABLES = tables("plan_scale")

ONE_B = (
    "model=llama32_1b",
    "cluster=h100",
    "data=mock",
    "data.seq_length=4096",
    "trainer.global_batch_size=64",
)


def test_plan_scale_strong_has_a_row_for_each_count() -> None:
    """Run in a fresh process, as a user does."""
    done = light("plan", "--scale", "8,16,...,48", *ONE_B, "--json", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    points = json.loads(done.stdout)["points"]
    assert [point["devices"] for point in points] == [8, 16, 32, 48]
    assert [point["global_batch_size"] for point in points] == [64] * 4
    for point in points:
        per_device = point["tokens_per_s"] / point["devices"]
        assert per_device == pytest.approx(point["tokens_per_s_per_device"])
        assert point["efficiency"] == pytest.approx(
            per_device / points[0]["tokens_per_s_per_device"]
        )
        assert point["step_s"] * point["tokens_per_s"] == pytest.approx(64 * 4096)


def test_plan_scale_row_has_first_layout_of_tune(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--scale", "16", *ONE_B, "--json"]) == 0
    point = json.loads(capsys.readouterr().out)["points"][0]
    assert main(["tune", *ONE_B, "cluster.nodes=2", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["layouts"][0]
    assert (point["layout"], point["step_s"]) == (first["layout"], pytest.approx(first["seconds"]))


def test_plan_scale_weak_has_batch_and_model_for_each_count(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["plan", "--weak", "--scale", "8,16", *ONE_B, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [point["global_batch_size"] for point in report["points"]] == [64, 128]
    page = tmp_path / "scale.html"
    words = ["model=llama32_1b,llama32_3b", *ONE_B[1:-1], "trainer.global_batch_size=32,96"]
    assert main(["plan", "--weak", "--scale", "8,16", *words, "--html", str(page)]) == 0
    text = page.read_text()
    assert "model=llama32_3b" in text
    assert text.count("<svg") == 3
    capsys.readouterr()
    assert main(["plan", "--weak", "--scale", "8,16", *words]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:4]]
    assert [row[:3] for row in rows] == [
        ["8", "model=llama32_1b", "32"],
        ["16", "model=llama32_3b", "96"],
    ]


def test_plan_scale_unfit_count_states_reason(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=llama3_8b", "cluster=h100", "data=mock", "trainer.global_batch_size=32"]
    assert main(["plan", "--scale", "1,4", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "32 samples" in lines[2]
    assert "no layout fits" in lines[2]
    assert main(["plan", "--scale", "1", *words]) == 2
    assert "no layout fits" in capsys.readouterr().err


WRONG = TABLES["wrong"]


@pytest.mark.parametrize("name", WRONG)
def test_plan_scale_bad_list_is_refused_in_words(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words, said = WRONG[name]
    assert main(["plan", *words, *ONE_B]) == 2
    error = capsys.readouterr().err
    for text in said:
        assert text in error


def test_plan_scale_documented_tables_equal_results() -> None:
    stored = json.loads(published.RESULTS.read_text())
    text = published.DOCS.read_text()
    assert published.written(text, stored) == text
    assert [row["gpus"] for row in stored["strong"]] == [row["gpus"] for row in published.strong()]
    assert [row["published"] for row in stored["weak"]] == [
        row["published"] for row in published.weak()
    ]
    assert "docs/reference/scaling.md" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(("name", "place"), [("strong", 7), ("weak", 0)])
def test_plan_scale_documented_row_equals_prediction(name: str, place: int) -> None:
    rows = {"strong": published.strong, "weak": published.weak}[name]()
    made = published.table(rows[place : place + 1], published.COMMON, is_weak=name == "weak")[0]
    stored = json.loads(published.RESULTS.read_text())[name][place]
    assert made["as_published"]["error"] == pytest.approx(
        stored["as_published"]["error"], abs=0.005
    )
    assert made["tune"]["tflops"] == pytest.approx(stored["tune"]["tflops"], rel=0.005)


def test_plan_scale_published_figures_equal_source() -> None:
    """Compare with the source: its text states the ends of the strong scaling; its chart and table
    have one point in common.
    """
    mfu = [row["published"] / published.PEAK for row in published.strong()]
    assert (round(mfu[0], 2), round(mfu[-1], 2)) == (0.47, 0.42)
    shared = [row["published"] for rows in (published.strong(), published.weak()) for row in rows
              if (row["model"], row["gpus"]) == ("gpt_177b", 2304)]  # fmt: skip
    assert shared[0] == pytest.approx(shared[1], rel=1e-3)
