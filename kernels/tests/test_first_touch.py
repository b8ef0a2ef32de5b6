"""A lease of a GPU, walked on a CPU: results as they come, going on, what dies, takes too long or
does not fit.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"


@pytest.fixture
def touch(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the program as a module."""
    monkeypatch.syspath_prepend(str(BENCH))
    import first_touch

    return first_touch


def walk(folder: Path, *words: str) -> tuple[int, str]:
    """Return the exit code and output of a dry run."""
    command = [
        sys.executable,
        str(BENCH / "first_touch.py"),
        "--dry-run",
        "--out",
        str(folder),
        *words,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    return done.returncode, done.stdout + done.stderr


def ends(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the last line of each unit."""
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return {f"{line['stage']} {line['unit']}": line for line in lines}


@pytest.mark.full
def test_first_touch_compares_measures_and_resumes(tmp_path: Path) -> None:
    some = ("--ops", "norm", "--stages")
    code, said = walk(tmp_path, *some, "environment,parity")
    assert code == 0, said
    found = ends(tmp_path)
    assert found["environment machine"]["result"]["versions"]["torch"]
    assert found["parity rms_norm tiny"]["result"]["triton"] == "as fp64"
    results = tmp_path / "results.jsonl"
    before = [
        line for line in results.read_text().splitlines() if '"layer_norm tiny", ' not in line
    ]
    # cut off here
    results.write_text("\n".join(before) + '\n{"stage": "parity", "unit": "layer_norm ti')
    code, said = walk(tmp_path, *some, "parity")
    assert code == 0, said
    after = results.read_text().splitlines()
    assert after[: len(before)] == before
    assert [json.loads(line)["unit"] for line in after[len(before) + 1 :]] == [
        "plan",
        *["layer_norm tiny"] * 2,
    ]


@pytest.mark.full
def test_first_touch_special_numbers_find_wrong_function(
    touch: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    import first_touch_edges as edges

    assert edges.functions("cpu") == {}
    right = edges.reference.encode
    monkeypatch.setattr(
        edges.reference, "encode", lambda x, format: right(x.nan_to_num(nan=1.0), format)
    )
    assert sorted(edges.functions("cpu")) == ["e4m3", "e5m2"]
    zero = edges.torch.zeros(1)
    assert edges._other(-zero, zero, 0.0)
    assert not edges._other(-zero, zero, 1e-5)


@pytest.mark.full
@pytest.mark.timeout(1800)  # a bench of every op, all runs and two trainings, in the interpreter
def test_first_touch_walks_all_ops_on_cpu(tmp_path: Path) -> None:
    code, said = walk(
        tmp_path, "--whole", "--stages", "environment,parity,train,profile,ops,autotune"
    )
    assert code == 0, said
    found = ends(tmp_path)
    assert all(
        any(end in line for end in ("result", "skipped", "units")) for line in found.values()
    ), found
    assert len(found["train tiny bf16 triton"]["result"]["losses"]) == 3
    assert found["profile tiny bf16 triton"]["result"]["gaps"]


def test_first_touch_dead_or_slow_stage_is_a_result(
    touch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = touch.Results(tmp_path)
    tried = []

    def start(
        stage: Any, results: Any, walk: Any, limit_s: float, worker: int, of: int
    ) -> tuple[int | None, str]:
        name = stage.name
        tried.append(name)
        results.add(name, "plan", units=["one", "two"])
        done = results.done(name)
        for unit in ("one", "two"):
            if unit not in done:
                results.add(name, unit, begin=True)
                if (name, unit) == ("parity", "one"):
                    return -11, "Segmentation fault"
                if (name, unit) == ("ops", "two"):
                    return None, ""
                if (name, unit) == ("train", "one"):
                    return touch.STUCK, ""
                results.add(name, unit, result=1)
        return 0, ""

    monkeypatch.setattr(touch, "_start", start)
    assert touch.drive(["parity", "ops", "train"], results, touch.Walk(True), 36000)
    found = ends(tmp_path)
    assert found["parity one"]["error"] == "died with -11: Segmentation fault"
    assert found["ops two"]["error"] == "ran past the limit of its stage"
    assert found["train one"]["error"] == f"took longer than {touch.BY_NAME['train'].unit_s:g} s"
    assert (
        found["parity two"]["result"]
        == found["ops one"]["result"]
        == found["train two"]["result"]
        == 1
    )
    assert tried == ["parity", "parity", "ops", "train", "train"]


def test_first_touch_hanging_unit_ends_before_its_stage(touch: ModuleType, tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            assert touch._wait(child, lambda: 0, 60, 0.5) == touch.STUCK
            assert touch._wait(child, lambda: 0, 0.5, 60) is None
        finally:
            child.kill()
    with subprocess.Popen(["sleep", "0"]) as child:
        assert touch._wait(child, lambda: 0, 60, 60) == 0


def test_first_touch_over_budget_unit_is_left_to_next_call(
    touch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = touch.Results(tmp_path)

    def cut(stage: Any, results: Any, *_: Any) -> tuple[int | None, str]:
        results.add(stage.name, "plan", units=["one", "two"])
        results.add(stage.name, "one", begin=True)
        return None, ""

    monkeypatch.setattr(touch, "_start", cut)
    assert not touch.drive(["parity", "ops"], results, touch.Walk(True), 5)
    found = ends(tmp_path)
    for unit in ("parity one", "parity two", "ops two"):
        assert found[unit]["skipped"].startswith(
            "did not fit: the stage ends when its share of the budget of 5 s"
        )
    assert results.done("parity") == set()
    assert not touch.drive(["parity"], results, touch.Walk(True), 5)
    assert results.done("parity") == {"one"}, "longer than two budgets is longer than all"
    assert "two calls" in ends(tmp_path)["parity one"]["error"]


def test_first_touch_stage_shares_the_remaining_budget(
    touch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {}

    def at_once(stage: Any, results: Any, walk: Any, limit_s: float, *_: Any) -> tuple[int, str]:
        given[stage.name] = limit_s
        results.add(stage.name, "plan", units=[])
        return 0, ""

    monkeypatch.setattr(touch, "_start", at_once)
    monkeypatch.setattr(touch, "workers_of", lambda stage, dry: 1)
    assert touch.drive(["gate", "parity", "ops"], touch.Results(tmp_path), touch.Walk(False), 400)
    shares = {name: touch.BY_NAME[name].until for name in given}
    assert given == {name: pytest.approx(400 * share, abs=5) for name, share in shares.items()}
    order = [stage.until for stage in touch.STAGES]
    assert order == sorted(order)
    assert order[-1] == 1.0


def test_first_touch_closed_gate_tries_no_run(
    touch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = touch.Results(tmp_path)
    tried: list[str] = []

    def start(stage: Any, results: Any, *_: Any) -> tuple[int, str]:
        tried.append(stage.name)
        results.add(stage.name, "plan", units=["launch.py"])
        said = {"error": "Cannot re-initialize CUDA"} if stage.name == "gate" else {"result": {}}
        results.add(stage.name, "launch.py", **said)
        return 0, ""

    monkeypatch.setattr(touch, "_start", start)
    touch.drive(
        ["gate", "parity", "runs", "train", "host", "rivals"], results, touch.Walk(True), 400
    )
    assert sorted(set(tried)) == ["gate", "host", "parity", "rivals"]
    assert (
        ends(tmp_path)["runs stage"]["skipped"]
        == "launch.py does not start: Cannot re-initialize CUDA"
    )


def test_first_touch_restarted_stages_keep_the_others(touch: ModuleType, tmp_path: Path) -> None:
    results = touch.Results(tmp_path)
    for stage in ("gate", "parity", "runs"):
        results.add(stage, "one", result=stage)
    results.forget(["gate", "runs"])
    assert [line["stage"] for line in results.lines()] == ["parity"]


def test_first_touch_stage_processes_share_units(
    touch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import first_touch_stages as stages

    units = {f"unit {i}": lambda i=i: {"is": i} for i in range(7)}
    monkeypatch.setitem(stages.UNITS, "parity", lambda walk, folder: units)
    results = touch.Results(tmp_path)
    for worker in (2, 0, 1):
        assert touch.run_stage("parity", results, touch.Walk(True), worker, 3) == 0
    begun = [line["unit"] for line in results.lines() if line.get("begin")]
    assert sorted(begun) == sorted(units)
    assert {unit: line["result"]["is"] for unit, line in results.ends("parity").items()} == {
        f"unit {i}": i for i in range(7)
    }


def test_first_touch_error_shows_last_line_of_cause(touch: ModuleType) -> None:
    import run

    error = RuntimeError("compilation of kernel")
    error.__cause__ = ValueError("at 3:5:\n    x = tl.dot(a, b)\n\nshapes do not fit\n")
    assert run.last_line(error) == "ValueError: shapes do not fit"


def test_first_touch_trace_gaps_are_idle_time(touch: ModuleType) -> None:
    import first_touch_train as stages

    def event(name: str, start: float, length: float, cat: str = "kernel") -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": length}

    trace = [
        event("a", 0, 10),
        event("b", 5, 10),
        event("c", 40, 10),
        event("a", 52, 8),
        event("host", 0, 99, "cpu_op"),
    ]
    found = stages.gaps_of(trace)
    assert found["gaps"] == [
        {"us": 25, "behind": "b", "before": "c"},
        {"us": 2, "behind": "c", "before": "a"},
    ]
    assert found["busy_share"] == round(33 / 60, 4)
    assert found["longest"][0] == {"us": 18, "name": "a"}
    assert stages.gaps_of(trace[-1:])["of"] == "operations of the host"


def test_first_touch_bench_finds_wrong_gradient(
    touch: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import run
    import torch
    from mtrain_kernels.registry import MODELS, ops

    case = ops()["norm"].cases[0]
    clock = run.Clock(torch.device("cpu"), 1, True)
    rates = run.ceilings(clock, torch.bfloat16, True)
    setting = run.Setting(clock, torch.bfloat16, rates, ["eager", "auto"])
    assert [row.agrees for row in run.measure("norm", case, MODELS["tiny"], setting)] == [
        None,
        True,
    ]
    made = case.make(MODELS["tiny"], torch.device("cpu"), torch.bfloat16)
    first = run._values_and_gradients(lambda: case.call(made, "auto"), made)
    wrong = [first[0], *(2 * x for x in first[1:])]
    assert run.agree(first, first)
    assert not run.agree(wrong, first)


def test_first_touch_liger_is_measured_last(touch: ModuleType, tmp_path: Path) -> None:
    import first_touch_train

    names = list(first_touch_train.rivals(touch.Walk(False), tmp_path))
    assert ["liger" in name for name in names] == [False] * 2 + [True] * 4


def test_first_touch_tiles_are_measured_for_moe_and_attention(
    touch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import first_touch_ops as stages
    import torch
    from mtrain_kernels import tune

    asked: list[Any] = []
    monkeypatch.setattr(stages, "needs_device", lambda walk: None)
    for name in ("measure", "measure_attention", "measure_loss"):
        monkeypatch.setattr(
            tune, name, lambda path, device, *sizes, seconds: asked.append(sizes[:4]) or {}
        )
    assert not stages.autotune(touch.Walk(False, ("norm",)), tmp_path)
    for unit in stages.autotune(touch.Walk(False, ()), tmp_path).values():
        assert unit() == {}
    assert asked == [
        (65536, 128, 2048, 768),
        (65536, 256, 7168, 2048),
        (32, 8, (128, 128), 8192),
        (128, 128, (192, 128), 8192),
        (8192, 4096, 128256, torch.bfloat16),
        (8192, 7168, 129280, torch.bfloat16),
    ]


def test_first_touch_bench_uses_run_tiles(
    touch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import run
    import torch
    from mtrain_kernels import tuning

    tuning.add(tmp_path / "gpu.json", "kernel", "shapes", "variant")
    monkeypatch.setattr(tuning, "file_of", lambda device: tmp_path / "gpu.json")
    try:
        run.use_measured(torch.device("cpu"))
        assert tuning.recorded("kernel", "shapes") is None
        run.use_measured(torch.device("cuda"))
        assert tuning.recorded("kernel", "shapes") == "variant"
    finally:
        tuning.use({})


@pytest.mark.full
def test_first_touch_optimizer_step_compares_changes(
    touch: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import first_touch_ops as stages
    from mtrain_kernels import parity
    from mtrain_kernels.registry import MODELS, ops

    walk = touch.Walk(True, ())
    seen = []
    near = parity.assert_near
    monkeypatch.setattr(
        parity, "assert_near", lambda *given: seen.append(given[1].norm()) or near(*given)
    )
    for case in ops()["optimizer"].cases:
        said = stages._compare(walk, "optimizer", case, MODELS["tiny"])
        assert said["triton"] == "as the definition in its own format", said
    assert len(seen) == 3 * 3 * 5
    assert all(seen)
    for old, new in (
        ("m = m * beta1 + rest1 * g", "m = m + rest1 * g"),
        ("v = v * beta2 + rest2 * (g * g)", "v = v * beta2"),
        ("w *= kept", "w *= 1"),
        ("w -= lr_over_bias1", "w += lr_over_bias1"),
    ):
        with parity.mutated("mtrain_kernels.optimizer.triton", old, new):
            said = stages._compare(walk, "optimizer", ops()["optimizer"].cases[1], MODELS["tiny"])
            assert said["wrong"] == ["triton"], (new, said)


def test_first_touch_gpu_unrunnable_kernel_is_wrong(
    touch: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import first_touch_ops as stages
    from mtrain_kernels.registry import MODELS, ops

    monkeypatch.setattr("mtrain_kernels.runtime.HAS_TRITON", False)
    monkeypatch.setattr(stages, "needs_device", lambda walk: None)
    for oldest, wrong in ((80, ["triton"]), (100, None)):
        monkeypatch.setattr("mtrain_kernels.runtime.capability", lambda device: 90)
        op = dataclasses.replace(ops()["norm"], oldest=oldest)
        monkeypatch.setitem(ops(), "norm", op)
        said = stages._compare(touch.Walk(False, ()), "norm", op.cases[0], MODELS["tiny"])
        assert said["triton"].startswith("cannot run")
        assert said.get("wrong") == wrong


def test_first_touch_incomparable_is_timed(
    touch: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import run
    import torch
    from mtrain_kernels.registry import MODELS, ops

    def refuse(*_: Any) -> None:
        raise RuntimeError("out of memory")

    clock = run.Clock(torch.device("cpu"), 1, True)
    setting = run.Setting(
        clock, torch.bfloat16, run.ceilings(clock, torch.bfloat16, True), ["eager", "auto"]
    )
    monkeypatch.setattr(run, "agree", refuse)
    _, auto = run.measure("norm", ops()["norm"].cases[0], MODELS["tiny"], setting)
    assert auto.note == "not compared: RuntimeError: out of memory"
    assert auto.forward_s is not None
    assert auto.backward_s is not None


def test_first_touch_tensors_compare_to_the_end_in_pieces(
    touch: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import run
    import torch

    monkeypatch.setattr(run, "PIECE", 8)
    x = torch.randn(5, 4)
    wrong = x.clone()
    wrong[-1, -1] += 1
    assert run.agree([x], [x])
    assert not run.agree([wrong], [x])
    assert not run.agree([x.t()], [x])
