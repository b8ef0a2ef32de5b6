"""Comparison of a run's plan with its measurements, part by part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtrain.cli.main import main
from mtrain.config.compose.composer import compose
from mtrain.config.compose.dump import run_yaml
from mtrain.config.resolve.resolution import resolve
from mtrain.config.schema.run import RunConfig
from mtrain.plan.compare import first_full, peaks_in, planned, rows
from mtrain.plan.report import report
from tests.support.configs import LAPTOP

RUN: RunConfig = resolve(
    compose(["model=llama3_8b", "parallel=pp2", "cluster=h100x8", "data=mock"]).run, LAPTOP
)
PLAN: dict[str, Any] = planned(RUN) or {}


def lines(share: float) -> list[dict[str, Any]]:
    """Return steps that take so much of the planned time, after three that take ten times as
    long.
    """
    keys = ("step_s", "forward_backward_s", "optimizer_s")
    slow, usual = ({key: PLAN[key] * times for key in keys} for times in (10 * share, share))
    return [{"step": n + 1, **(slow if n < 3 else usual)} for n in range(12)]


def test_compare_covers_each_part() -> None:
    peaks = [PLAN["memory_by_stage"]["peak_bytes"][rank // 4] for rank in range(8)]
    peaks[6] = round(peaks[6] * 1.2)
    found = rows(
        RUN, PLAN, lines(1.1), {"peak_bytes": [None, *peaks[1:]]}, PLAN["checkpoint_bytes"]
    )
    off = {row.part: row.off for row in found}
    assert off["step"] == pytest.approx(0.1)
    assert off["optimizer"] == pytest.approx(0.1)
    assert off["memory of stage 0"] == 0
    assert off["memory of stage 1"] == pytest.approx(0.2)
    assert [row.part for row in found if row.beyond] == ["memory of stage 1"]
    assert "step" in [row.part for row in rows(RUN, PLAN, lines(1.3), {}, None) if row.beyond]
    assert all(row.off is None for row in rows(RUN, PLAN, [], {}, None))


def test_compare_memory_is_compared_by_kind(tmp_path: Path) -> None:
    """Exclude the context and the allocator's reserve from tensors; the driver counts both."""
    stage = report(RUN)["memory"]["stages"][1]
    context = stage["parts"]["context"]
    reserve = stage["parts"]["reserve"]
    assert context > 0
    assert reserve > 0
    own = {
        "peak_bytes": stage["peak"] - context - reserve,
        "reserved_bytes": stage["peak"] - context,
    }
    measured = {
        f"{key}_by_rank": [value] * 8
        for key, value in (own | {"driver_bytes": stage["peak"]}).items()
    }
    (tmp_path / "memory.json").write_text(json.dumps(measured))
    found = {row.part: row for row in rows(RUN, PLAN, [], peaks_in(tmp_path), None)}
    for name in ("memory", "reserved memory", "driver memory"):
        assert found[f"{name} of stage 1"].off == 0, name
    measured |= {name: [None] * 4 + values[4:] for name, values in measured.items()}
    measured["driver_bytes_by_rank"] = [None] * 4 + [2 * stage["peak"]] * 4
    (tmp_path / "memory.json").write_text(json.dumps(measured))
    beyond = [row.part for row in rows(RUN, PLAN, [], peaks_in(tmp_path), None) if row.beyond]
    assert beyond == ["driver memory of stage 1"]


def test_compare_accepts_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text(run_yaml(RUN))
    made = "".join(json.dumps(line) + "\n" for line in lines(2.0))
    (tmp_path / "metrics.jsonl").write_text(made + '{"step": 13, "st')
    (tmp_path / "memory.json").write_text(json.dumps({"peak_bytes_by_rank": [1 << 30] * 8}))
    assert main(["plan", "--compare", str(tmp_path), "--json"]) == 0
    parts = {row["part"]: row for row in json.loads(capsys.readouterr().out)["parts"]}
    assert parts["step"]["off"] == pytest.approx(1.0)
    assert parts["step"]["beyond"]
    assert parts["memory of stage 1"]["measured"] == 1 << 30
    assert parts["checkpoint"]["measured"] is None
    assert main(["plan", "--compare", str(tmp_path)]) == 0
    assert "+100.0%  beyond its bound" in capsys.readouterr().out
    (tmp_path / "memory.json").write_text('{"peak_bytes_by_rank": ["many"]}')
    assert main(["plan", "--compare", str(tmp_path)]) == 4
    assert main(["plan", "--compare", str(tmp_path / "no")]) == 2
    assert main(["plan", "--compare", str(tmp_path), "model=llama3_8b"]) == 2
    capsys.readouterr()


def test_compare_steps_before_resume_are_another_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(run_yaml(RUN))
    made = [{**line, "step": n} for n, line in enumerate([*lines(5.0), *lines(1.0)], 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in made))
    found = []
    for resumed in ("runs/x/checkpoints/step_00000012", None):
        (tmp_path / "plan.json").write_text(json.dumps({"resumed_from": resumed}))
        assert main(["plan", "--compare", str(tmp_path), "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["parts"][0]["off"])
    assert found[0] == pytest.approx(0)
    assert found[1] > 1


def test_compare_unknown_rates_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = resolve(compose(["model=llama_tiny", "cluster=cpu", "data=mock"]).run, LAPTOP)
    (tmp_path / "run.yaml").write_text(run_yaml(run))
    assert main(["plan", "--compare", str(tmp_path)]) == 0
    said = "the time of a step is not known without cluster.peak_tflops.fp32, "
    assert said in (text := capsys.readouterr().out)
    assert "plan --calibrate" in text


HOSTILE = {
    "a deep line": ("metrics.jsonl", "[" * 100_000 + "\n", 0, ""),
    "numbers of the wrong type": (
        "metrics.jsonl",
        '{"step": 9, "step_s": NaN}\n{"step": 10, "step_s": true}\n',
        0,
        "",
    ),
    "a huge number": ("metrics.jsonl", '{"step": 9, "step_s": 1' + "0" * 400 + "}\n", 0, ""),
    "deep peaks": ("memory.json", "[" * 100_000, 4, "cannot be read"),
    "peaks by name": ("memory.json", '{"peak_bytes_by_rank": {}}', 4, "no bytes"),
    "huge peaks": ("memory.json", '{"peak_bytes_by_rank": [1' + "0" * 400 + "]}", 4, "no bytes"),
    "no peaks": ("memory.json", "{}", 4, "cannot be read"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_compare_missing_data_is_refused_in_a_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, text, code, says = HOSTILE[name]
    (tmp_path / "run.yaml").write_text(run_yaml(RUN))
    (tmp_path / file).write_text(text)
    (tmp_path / "checkpoints" / "step_00000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_00000001" / "manifest.json").write_text("{}")
    (tmp_path / "checkpoints" / "step_00000001" / "gone").symlink_to(tmp_path / "nowhere")
    assert main(["plan", "--compare", str(tmp_path), "--json"]) == code
    said = capsys.readouterr()
    assert says in said.err
    assert "unexpected" not in said.err
    if not code:
        parts = {row["part"]: row for row in json.loads(said.out)["parts"]}
        assert parts["step"]["measured"] is None
        assert parts["checkpoint"]["measured"] == 2


@pytest.mark.parametrize("folder", ["~nobody-of-that-name", "a\0b", "", "x" * 5000])
def test_compare_missing_folder_is_reported(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--compare", folder]) == 2
    assert "unexpected" not in capsys.readouterr().err


def test_compare_smaller_batches_are_skipped() -> None:
    trainer = RUN.trainer.model_copy(
        update={"rampup_batch_size": (RUN.trainer.batch // 2, RUN.trainer.batch // 2, 1024)}
    )
    ramped = RUN.model_copy(update={"trainer": trainer})
    full = first_full(ramped)
    assert full > 1
    made = [
        {"step": step, "step_s": PLAN["step_s"] * (0.5 if step < full else 1.0)}
        for step in range(1, full + 9)
    ]
    found = {row.part: row for row in rows(ramped, PLAN, made, {}, None)}
    assert found["step"].off == pytest.approx(0)
