"""Notes of `tune` on its list: families, the error of the model of time, and the reason why a named
layout is not the first.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from mtrain.cli.main import main
from mtrain.cli.tune import tuned
from mtrain.config.compose.composer import compose
from mtrain.plan.time import report
from tests.support.commands import ROOT
from tests.support.launched import light

ONE_B = (
    "model=llama32_1b",
    "cluster=h100",
    "data.seq_length=4096",
    "cluster.devices_per_node=4",
    "trainer.global_batch_size=16",
)


def test_tune_rows_differ_and_ties_are_marked() -> None:
    """Run in a fresh process, as a user does."""
    done = light("tune", "model=llama32_1b", "cluster=h100x8", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    rows = [line for line in lines if re.match(r"\s*~?\d+ +[\d.]+ s ", line)]
    cuts = [re.match(r"(?:[tcpe]+p\d+|vpp\d+)*", line.rpartition("GiB  ")[2]) for line in rows]
    families = [re.sub(r"vpp\d+|etp\d+", "", found[0]) for found in cuts if found is not None]
    assert len(families) == len(set(families)) > 5
    assert rows[1].startswith("~2")
    assert not rows[-1].lstrip().startswith("~")
    report = yaml.safe_load((ROOT / "src/mtrain/plan/time/accuracy.yaml").read_text())
    assert f"off by {report['median']:.1%} in the median" in done.stdout


def test_tune_printed_error_equals_benchmark() -> None:
    results = json.loads((ROOT / "benchmarks/results/plan_time.json").read_text())
    stored = report.shipped()
    assert (stored.rows, stored.pairs) == (results["rows"], results["pairs"]["of"])
    assert stored.median == pytest.approx(results["model_left_out"]["median"], abs=1e-4)
    assert stored.p95 == pytest.approx(results["model_left_out"]["p95"], abs=1e-4)
    calibrated = compose([*ONE_B, "cluster.reached={speed: 0.9}"]).run.cluster
    assert report.accuracy_of(calibrated) is None


WHY_NOT: dict[str, tuple[str, dict[str, Any]]] = {
    "a rule": ("tp3", {"broken": ["MT101"], "fits": False}),
    "memory": ("dp4 trainer.micro_batch_size=4", {"broken": [], "fits": False}),
    "time": ("tp4", {"broken": [], "fits": True}),
    "nothing": ("dp4 parallel.recompute.granularity=full", {"broken": [], "fits": True}),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", WHY_NOT)
def test_tune_explains_rank_of_named_layout(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    named, expected = WHY_NOT[name]
    words = [*ONE_B, "cluster.device_memory_gib=24", "--why-not", named]
    assert main(["tune", *words]) == 0
    text = capsys.readouterr().out
    assert main(["tune", *words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    mine = report["mine"]
    first = report["layouts"][0]
    assert {one["code"] for one in mine["broken"]} >= {*expected["broken"]}
    assert bool(mine["broken"]) == bool(expected["broken"])
    assert mine["fits"] is expected["fits"]
    if mine["fits"]:
        assert mine["as_named"]["slower"] == pytest.approx(
            mine["as_named"]["seconds"] / first["seconds"] - 1
        )
        assert mine["as_named"]["peak_bytes"] <= mine["room_bytes"]
    elif not mine["broken"]:
        assert mine["as_named"]["peak_bytes"] > mine["room_bytes"]
        assert "does not fit: stage 0 needs" in text
    assert f"\n{named}: " in text


def test_tune_kept_choice_is_compared_with_fastest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["tune", *ONE_B, "parallel=tp4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    free = report["without_kept"]
    assert free["seconds"] == pytest.approx(tuned(ONE_B)[0].best[0].seconds)
    assert free["slower"] > 0.1
    assert report["mine"] is None


def test_tune_recipe_layout_is_compared_with_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["tune", "recipe=llama3/8b_h100x8", "--json"]) == 0
    mine = json.loads(capsys.readouterr().out)["mine"]
    assert mine["named"] == "recipe=llama3/8b_h100x8"
    assert mine["as_named"]["slower"] >= 0 or not mine["fits"]
    assert mine["completed"]["slower"] >= 0
    assert main(["tune", *ONE_B, "--why-not"]) == 2
    assert "--why-not LAYOUT" in capsys.readouterr().err
