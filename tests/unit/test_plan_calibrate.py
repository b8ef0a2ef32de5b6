"""Rates that are fitted on measured steps: known ones are found again, and bad files are refused in
a line.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from mtrain.api import load
from mtrain.cli import calibrate
from mtrain.cli.main import main
from mtrain.config.compose.dump import run_yaml
from mtrain.config.schema.cluster import ClusterConfig
from mtrain.config.schema.run import RunConfig
from mtrain.plan.compare import FIRST_STEPS, METRICS, first_full
from mtrain.plan.time import step_time
from mtrain.plan.time.calibrate import Measured, Rates, fitted
from mtrain.plan.time.efficiencies import own

KNOWN = ClusterConfig(
    name="box",
    device="cpu",
    peak_tflops={"fp32": 0.21},
    memory_gbps=11.0,
    operation_us=23.0,
    fast_link_gbps=2.3,
    fast_link_devices=2,
    link_latency_us=310.0,
    reached={"attention": 0.7},
)
ON = ["model=llama_tiny", "cluster=cpu", "data=mock"]
SHAPES = [
    [
        "parallel=tp2",
        "data.seq_length=256",
        "trainer.micro_batch_size=2",
        "trainer.global_batch_size=4",
    ],
    [
        "parallel=tp2",
        "data.seq_length=16",
        "trainer.micro_batch_size=1",
        "trainer.global_batch_size=4",
    ],
    [
        "parallel=tp2",
        "data.seq_length=1024",
        "trainer.micro_batch_size=1",
        "trainer.global_batch_size=2",
    ],
    [
        "parallel=pp2",
        "data.seq_length=256",
        "trainer.micro_batch_size=1",
        "trainer.global_batch_size=4",
    ],
    [
        "parallel=dp2",
        "data.seq_length=64",
        "trainer.micro_batch_size=1",
        "trainer.global_batch_size=4",
    ],
]


def run_of(words: list[str]) -> RunConfig:
    return load([*ON, *words], environment={}, to_run=False).run


def of_known(run: RunConfig) -> dict[str, float]:
    step = step_time(run.model_copy(update={"cluster": KNOWN}))
    return {"step_s": step.seconds, "optimizer_s": step.parts["optimizer"]}


def rows(tmp_path: Path, shapes: list[list[str]] = SHAPES) -> Path:
    path = tmp_path / "rows.json"
    path.write_text(
        json.dumps([{"overrides": [*ON, *words], **of_known(run_of(words))} for words in shapes])
    )
    return path


def test_calibrate_recovers_known_rates() -> None:
    runs = [run_of(words) for words in SHAPES]
    found = fitted([Measured(run, **of_known(run)) for run in runs], runs[0].cluster)
    for key in ("memory_gbps", "operation_us", "fast_link_gbps", "link_latency_us"):
        assert getattr(found.cluster, key) == pytest.approx(getattr(KNOWN, key), rel=0.1), key
    assert found.cluster.peak_tflops["fp32"] == pytest.approx(0.21, rel=0.1)
    assert found.cluster.fast_link_devices == 2
    assert max(map(abs, found.errors)) < 0.01


def test_calibrate_cluster_gives_cpu_a_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "box.yaml"
    words = [
        "data.seq_length=128",
        "parallel=tp2",
        "model.num_layers=6",
        "trainer.global_batch_size=4",
    ]
    assert main(["plan", *ON, *words]) == 0
    assert "not known without" in capsys.readouterr().out
    assert main(["plan", "--calibrate", str(rows(tmp_path)), f"out={out.with_suffix('')}"]) == 0
    assert "software: torch " in out.read_text().replace('"', "")
    capsys.readouterr()
    assert main(["plan", ON[0], ON[2], *words, f"cluster={out}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["time"]
    assert found["step_s"] == pytest.approx(of_known(run_of(words))["step_s"], rel=0.03)
    assert found["software"].startswith("torch ")


def test_calibrate_run_folder_skips_first_steps(tmp_path: Path) -> None:
    folders = []
    for number, words in enumerate(SHAPES):
        run = run_of(words)
        folder = tmp_path / f"run{number}"
        folder.mkdir()
        (folder / "run.yaml").write_text(run_yaml(run))
        slow = {"step_s": 50.0, "optimizer_s": 9.0}
        lines = [
            {"step": n, **values}
            for n, values in enumerate([slow] * FIRST_STEPS + [of_known(run)] * 3, 1)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "metrics.jsonl").write_text(text + '{"step": 7, "step_')  # a kill cut it off
        folders.append(str(folder))
    assert main(["plan", "--calibrate", *folders, f"out={tmp_path / 'a.yaml'}"]) == 0
    assert main(["plan", "--calibrate", str(rows(tmp_path)), f"out={tmp_path / 'b.yaml'}"]) == 0
    assert (tmp_path / "a.yaml").read_text() == (tmp_path / "b.yaml").read_text().replace(
        "name: b", "name: a"
    )


def test_calibrate_growing_batch_steps_are_skipped(tmp_path: Path) -> None:
    run = run_of([*SHAPES[0], "trainer.rampup_batch_size=[2,2,10]"])
    (tmp_path / "run.yaml").write_text(run_yaml(run))
    assert first_full(run) == 6
    lines = [{"step": n, "step_s": 9.0 if n < 6 + FIRST_STEPS else 1.0} for n in range(1, 11)]
    (tmp_path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    ((_, one),) = calibrate.found([tmp_path]).runs
    assert one.step_s == 1.0


def test_calibrate_never_overwrites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "box.yaml"
    out.write_text("mine")
    assert main(["plan", "--calibrate", str(rows(tmp_path, SHAPES[:1])), f"out={out}"]) == 2
    assert "is there already" in capsys.readouterr().err
    assert out.read_text() == "mine"


ROW = {"overrides": [*ON, "parallel=tp2"], "step_s": 1.0}
KERNELS = {
    "dtype": "bfloat16",
    "ceilings": {"gemm_flop_per_s": 6.6e14, "copy_bytes_per_s": 2.6e12},
    "rows": [],
}
BAD = {
    "no JSON": ("{", "cannot be read as JSON"),
    "no list": ('{"step_s": 1}', "no list"),
    "no rows": ("[]", "no list"),
    "deep": ("[" * 100_000, "cannot be read as JSON"),
    "no words": ('[{"step_s": 1}]', "row 1: cannot be read because overrides"),
    "no time": (
        json.dumps([ROW, ROW | {"step_s": None}]),
        "row 2: cannot be read because the time is",
    ),
    "a time below 0": (
        json.dumps([ROW | {"step_s": -1}]),
        "row 1: cannot be read because the time is",
    ),
    "no number": (
        '[{"overrides": [], "step_s": NaN}]',
        "row 1: cannot be read because the time is",
    ),
    "a large number": (
        f"[{json.dumps(ROW)[:-4]}1{'0' * 400}}}]",
        "row 1: cannot be read because the time is",
    ),
    "a GPU without its rates": (
        json.dumps([ROW | {"overrides": [*ON[::2], "cluster=h100", "cluster.memory_gbps=null"]}]),
        "needs cluster.memory_gbps",
    ),
    "kernels without numbers": (
        '{"dtype": "float32", "ceilings": {}}',
        "cannot be read because gemm_flop_per_s is",
    ),
    "kernels of no format": (
        '{"dtype": ["float32"], "ceilings": {}}',
        "and not one of bfloat16",
    ),
    "ceilings of the wrong type": ('{"dtype": "float32", "ceilings": 3}', "no mapping of rates"),
    "ceilings of infinity": (
        json.dumps(KERNELS | {"ceilings": {"gemm_flop_per_s": float("inf")}}),
        "a number above 0",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_calibrate_bad_file_is_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, says = BAD[name]
    path = tmp_path / "rows.json"
    out = tmp_path / "out.yaml"
    path.write_text(text)
    assert main(["plan", "--calibrate", str(path), f"out={out}"]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "Traceback" not in said
    assert said.count("error[") == 1
    assert not out.exists()


@pytest.mark.parametrize("word", ["~nobody-of-that-name", "a\0b", "/dev/zero", "/"])
def test_calibrate_missing_file_is_reported(
    word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--calibrate", word, f"out={tmp_path / 'a.yaml'}"]) == 2
    assert main(["plan", "--calibrate", str(rows(tmp_path, SHAPES[:1])), f"out={word}"]) == 2 * (
        word[0] != "~"
    )
    assert "unexpected" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["out=a.yaml"], ["rows.json"], ["rows.json", "out="], ["none.json", "out=a.yaml"]]
)
def test_calibrate_missing_data_is_reported(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert (
        main(
            ["plan", "--calibrate", *(w.replace("a.yaml", str(tmp_path / "a.yaml")) for w in words)]
        )
        == 2
    )
    assert "error[MT0" in capsys.readouterr().err


def test_calibrate_kernels_give_gpu_rates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.json"
    out = tmp_path / "box.yaml"
    path.write_text(json.dumps(KERNELS))
    assert main(["plan", "--calibrate", str(path), "cluster=h100", f"out={out}", "--json"]) == 0
    reached = json.loads(capsys.readouterr().out)["cluster"]["reached"]
    assert reached["memory"] == pytest.approx(2.6e12 / 3.35e12, rel=1e-3)
    # tiles and depth lose the rest
    assert 6.6e14 / 989e12 < reached["products"] < 1.1 * 6.6e14 / 989e12
    words = ["model=llama3_8b", "data=mock", "parallel=dp8", "--json"]
    seconds = []
    for cluster in (f"cluster={out}", "cluster=h100"):
        assert main(["plan", *words, cluster, "cluster.device_memory_gib=1000"]) == 0
        seconds.append(json.loads(capsys.readouterr().out)["time"]["parts_s"]["memory"])
    assert seconds[0] / seconds[1] == pytest.approx(own().memory / reached["memory"], rel=1e-6)


def test_calibrate_foreign_kernels_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.json"
    out = tmp_path / "box.yaml"
    path.write_text(
        json.dumps(KERNELS | {"ceilings": {"gemm_flop_per_s": 3e10, "copy_bytes_per_s": 8e9}})
    )
    assert main(["plan", "--calibrate", str(path), "cluster=h100", f"out={out}"]) == 2
    assert "ran on something else" in capsys.readouterr().err
    assert not out.exists()


def test_calibrate_runs_give_gpu_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "model=llama3_8b",
        "data=mock",
        "parallel=dp8",
        "cluster=h100",
        "cluster.device_memory_gib=1000",
    ]
    run = load(words, environment={}, to_run=False).run
    rows = [{"overrides": words, "step_s": 1.25 * step_time(run).seconds}]
    path = tmp_path / "rows.json"
    out = tmp_path / "box.yaml"
    path.write_text(json.dumps(rows))
    assert main(["plan", "--calibrate", str(path), f"out={out}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"][0]["error"] == pytest.approx(0, abs=0.01)
    assert found["cluster"]["reached"]["speed"] == pytest.approx(1 / 1.25, rel=0.05)


def test_calibrate_runs_give_gpu_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fit the host to two steps that wait for it and two that do not."""
    on = ["data=mock", "parallel=single", "cluster=h200", "cluster.devices_per_node=1"]
    on += ["data.seq_length=1024", "trainer.micro_batch_size=1", "trainer.global_batch_size=4"]
    models = ("llama32_1b", "llama_tiny", "llama3_8b model.num_layers=8", "llama3_8b")
    rows = []
    for model in models:
        words = [*f"model={model}".split(), *on, "cluster.device_memory_gib=1000"]
        slow = load([*words, "cluster.reached={host:0.5,speed:1.2}"], environment={}, to_run=False)
        rows.append({"overrides": words, "step_s": step_time(slow.run).seconds})
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    out = tmp_path / "box.yaml"
    assert main(["plan", "--calibrate", str(path), f"out={out}", "--json"]) == 0
    reached = json.loads(capsys.readouterr().out)["cluster"]["reached"]
    assert reached["host"] == pytest.approx(0.5, rel=0.1)
    assert reached["speed"] == pytest.approx(1.2, rel=0.1)


ON_GPUS = ["model=llama3_8b", "data=mock", "parallel=dp8", "cluster.device_memory_gib=1000"]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([("h100x8", 10.0), ("a100", 20.0)], "cuda sm_80 with 2039"),
        ([("h100x8", 1e-4)], "none explain the runs"),
        ([("h100x8", 1e6)], "none explain the runs"),
    ],
)
def test_calibrate_foreign_runs_are_refused(
    rows: list[tuple[str, float]], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    out = tmp_path / "box.yaml"
    path.write_text(
        json.dumps([{"overrides": [*ON_GPUS, f"cluster={on}"], "step_s": s} for on, s in rows])
    )
    assert main(["plan", "--calibrate", str(path), f"out={out}"]) == 2
    assert says in capsys.readouterr().err
    assert not out.exists()


def test_calibrate_fits_cpu_kernels_and_runs_together(tmp_path: Path) -> None:
    kernels = Rates("fp32", 0.21e12, 11e9)
    run = run_of(SHAPES[0])
    alone = fitted([], run.cluster, [kernels]).cluster
    assert alone.peak_tflops["fp32"] == pytest.approx(0.21, rel=0.02)
    assert alone.memory_gbps == pytest.approx(11.0, rel=0.02)
    both = fitted([Measured(run, **of_known(run))], run.cluster, [kernels])
    assert abs(both.errors[0]) < 0.03
    assert both.cluster.peak_tflops["fp32"] == pytest.approx(0.21, rel=0.15)


@pytest.mark.timeout(60)
def test_calibrate_benchmark_output_may_exceed_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location(
        "calibrate", Path(__file__).parents[2] / "benchmarks/plan_calibrate.py"
    )
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    said = [{"step": float(i)} for i in range(20_000)]
    monkeypatch.setattr(benchmark, "turn", lambda words, steps, store, send: send.send(said))
    assert benchmark.apart("dp2", "words", 4, tmp_path) == said

    def dies(words: str, steps: int, store: Path, send: Any) -> None:
        os._exit(1)

    monkeypatch.setattr(benchmark, "turn", dies)
    with pytest.raises(SystemExit, match="dp2: a rank failed"):
        benchmark.apart("dp2", "words", 4, tmp_path)
