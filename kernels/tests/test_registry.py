"""Choices of implementations and their reasons, and the README's claims about the ops."""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from pathlib import Path

import pytest
import torch
from mtrain_kernels import limits, registry, runtime
from mtrain_kernels.registry import (
    MODELS,
    REFERENCE,
    WITH_CPU,
    Cost,
    Implementation,
    Model,
    Op,
    Unavailable,
    choose,
    ops,
)

CPU = torch.device("cpu")
PACKAGES = Path(__file__).resolve().parents[1]


def op(obstacle: str | None) -> Op:
    other = Implementation("other", lambda device: obstacle)
    return Op(
        "an op", (), lambda model: None, implementations={"other": other, "reference": REFERENCE}
    )


def test_registry_named_runs_or_states_reason() -> None:
    assert choose(op(None), "other", CPU)[0] == "other"
    with pytest.raises(Unavailable, match="an op: other cannot run: no such chip"):
        choose(op("no such chip"), "other", CPU)
    with pytest.raises(Unavailable, match="an op: other cannot run: too wide"):
        choose(op(None), "other", CPU, "too wide")
    with pytest.raises(ValueError, match="choose one of auto, other, reference"):
        choose(op(None), "others", CPU)


def test_registry_cpu_obstacle_is_separate() -> None:
    found = Op("an op", (), lambda model: None, implementations=WITH_CPU)
    assert choose(found, "cpu", CPU, "too wide for a kernel")[0] == "cpu"
    assert choose(found, "auto", CPU, "too wide for a kernel")[0] == "cpu"
    assert choose(found, "auto", CPU, "too wide", "too deep")[0] == "reference"
    with pytest.raises(Unavailable, match="an op: cpu cannot run: too deep"):
        choose(found, "cpu", CPU, None, "too deep")
    with pytest.raises(Unavailable, match="it is for a CPU, the tensors are on meta"):
        choose(found, "cpu", torch.device("meta"))


def test_registry_auto_takes_first_and_reports_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry._say_once.cache_clear()
    with caplog.at_level(logging.INFO, "mtrain_kernels"):
        for _ in range(3):
            assert choose(op("no such chip"), "auto", CPU) == ("reference", "other: no such chip")
        assert choose(op(None), "auto", CPU)[0] == "other"
        assert choose(op(None), "auto", CPU, "too wide")[0] == "reference"
    assert [r.message for r in caplog.records].count(
        "an op on cpu: reference (other: no such chip)"
    ) == 1


def test_registry_missing_triton_is_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "HAS_TRITON", False)
    assert runtime.triton_obstacle(CPU) == "triton is not installed"


def test_registry_cpu_triton_needs_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "interpreted", lambda: False)
    assert "TRITON_INTERPRET" in (runtime.triton_obstacle(CPU) or "")


def test_registry_larger_limit_counts() -> None:
    assert Cost(bytes=4, flops=6).seconds(copy=2.0, gemm=2.0) == 3.0
    assert Cost(bytes=4).seconds(copy=2.0, gemm=2.0) == 2.0


def test_registry_op_folders_are_complete() -> None:
    folders = {path.parent for path in (PACKAGES / "mtrain_kernels").glob("*/op.py")}
    for folder in folders:
        assert (folder / "reference.py").exists(), f"{folder.name} has no definition"
        assert (PACKAGES / f"tests/test_{folder.name}.py").exists(), (
            f"{folder.name} has no parity test"
        )
    assert ops().keys() >= {folder.name for folder in folders}, "an op has the name of its folder"


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_registry_cases_know_cost_and_inputs(model: Model) -> None:
    for found in ops().values():
        assert set(found.aot_models) <= set(MODELS)
        for case in found.cases:
            if case.applies(model):
                assert case.forward(model).bytes > 0
                assert case.backward is None or case.backward(model).bytes > 0
                if model.name == "tiny":
                    case.call(case.make(model, CPU, torch.float32), "reference")


def test_registry_readme_holds_limits() -> None:
    said = (PACKAGES / "README.md").read_text()
    inside = said.split("<!-- limits -->\n")[1].split("\n<!-- /limits -->")[0]
    assert inside == limits.table(), (
        "paste what `python -m mtrain_kernels.limits` prints into kernels/README.md"
    )


@pytest.mark.full
def test_registry_bench_measures_every_op(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("bench_run", PACKAGES / "bench/run.py")
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_run", bench)
    spec.loader.exec_module(bench)
    cases = {
        case.name
        for found in ops().values()
        for case in found.cases
        if case.applies(MODELS["tiny"])
    }
    tiny = ["--device", "cpu", "--tiny", "--json", str(tmp_path / "bench.json")]
    report = bench.main([*tiny, "--contenders", "eager"])
    assert {row["case"] for row in report["rows"]} == cases
    assert [row["note"] for row in report["rows"] if row["note"]] == []
    assert all(row["forward_s"] > 0 for row in report["rows"])
    assert {"device", "versions", "commit", "command", "ceilings"} <= report.keys()
    assert json.loads((tmp_path / "bench.json").read_text()) == report
    rows = bench.main(["norm", *tiny, "--contenders", "eager,triton"])["rows"]
    assert all(
        row["agrees"] or "cannot run" in row["note"] for row in rows if row["contender"] == "triton"
    )
    assert "forward | backward" in capsys.readouterr().out
