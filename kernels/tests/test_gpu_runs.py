"""The small runs of `first_touch.py`: the list, what its runs are held to, the time of the host,
and the summary.
"""

from __future__ import annotations

import cProfile
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "kernels" / "bench"
TRAINS = """
import json, os, sys, time
from pathlib import Path

home, name, losses = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
run = home / name
run.mkdir(parents=True, exist_ok=True)
(run / "run.yaml").touch()
first = int(sys.argv[4]) if len(sys.argv) > 4 else 1
with (run / "metrics.jsonl").open("w") as file:
    for i, loss in enumerate(losses):
        file.write(json.dumps({"step": first + i, "loss": loss, "step_s": 0.1, "mfu": 0.3}) + "\\n")
        file.flush()
if "--stay" in sys.argv:
    time.sleep(10_000)
print("trained", name, os.environ.get("RANK", "without RANK"))
sys.exit(int(os.environ.get("ENDS_WITH", "0")))
"""


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module."""
    monkeypatch.syspath_prepend(str(BENCH))
    import first_touch_runs

    return first_touch_runs


@pytest.fixture
def program(tmp_path: Path) -> str:
    """Write a program that leaves a run folder as a training does."""
    path = tmp_path / "trains.py"
    path.write_text(TRAINS)
    return str(path)


def tried(
    runs: ModuleType, folder: Path, *commands: dict[str, Any], name: str = "one"
) -> dict[str, Any]:
    """Try a run, and note its result where later runs look for it."""
    from first_touch_results import Results, Walk

    made = tuple(runs.Command(**(each | {"argv": tuple(each["argv"])})) for each in commands)
    results = Results(folder)
    said = runs._tried(
        Walk(True), folder / "runs" / name, runs.Entry(name, "a test", made), results
    )
    results.add("runs", name, result=said)
    return dict(said)


def command(program: str, losses: list[float], *more: str, **hold: Any) -> dict[str, Any]:
    return {"program": program, "argv": ["{home}", "run", json.dumps(losses), *more], "hold": hold}


def test_gpu_runs_are_valid_and_state_why(runs: ModuleType) -> None:
    listed = runs.entries()
    assert listed[0].name == "gate"
    assert all(entry.why for entry in listed)
    assert sum(entry.dry for entry in listed) >= 2
    found = runs._valid()
    assert "wrong" not in found, found
    assert found["valid"] > len(listed) // 2, (
        "those that name a folder of a run before are not validated"
    )


def test_gpu_runs_unread_entries_are_refused(runs: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "runs.yaml"

    def refused(*said: str) -> str:
        path.write_text(
            "common: [model=llama_tiny]\nruns:\n" + "".join(f"- {{{each}}}\n" for each in said)
        )
        with pytest.raises(ValueError) as told:
            runs.entries(path)
        return str(told.value)

    assert "unknown keys of a run: holds" in refused("name: a, why: b, holds: {}")
    assert "two runs are called a" in refused("name: a, why: b", "name: a, why: b")
    assert "which does not come before it" in refused(
        "name: a, why: b, hold: {near: {run: c}}", "name: c, why: d"
    )


def test_gpu_runs_later_word_replaces_same_key(runs: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "runs.yaml"
    path.write_text(
        "common: [model=llama_tiny, precision=bf16]\nruns:\n- {name: a, why: b, argv:"
        " [model=gemma_tiny], then: [{argv: [prove, model=t5_tiny]}]}\n"
    )
    first, second = runs.entries(path)[0].commands
    assert first.argv == ("model=gemma_tiny", "precision=bf16")
    assert second.argv == ("prove", "model=t5_tiny")
    assert first.trains
    assert not second.trains


def test_gpu_runs_conditions_are_evaluated(runs: ModuleType, program: str, tmp_path: Path) -> None:
    good = tried(
        runs,
        tmp_path,
        command(program, [3.0, 2.5, 2.0], falls=True, metric="mfu", says="trained", last_step=3),
    )
    assert good["losses"] == [3.0, 2.5, 2.0]
    assert good["step_s"] == 0.1
    for hold, found in (
        ({"falls": True}, "the loss does not fall"),
        ({"last_step": 4}, "the last step is 3, not 4"),
        ({"metric": "z_loss"}, "the metrics have no z_loss"),
        ({"file": "*/memory.json"}, "no file"),
        ({"says": "stalled"}, "does not say"),
        ({"silent": "train.d"}, "it says 'trained'"),
        ({"says": "trains.py"}, "does not say"),  # a word of the command is not part of its output
        ({"exit": 5}, "ended with 0, not 5"),
    ):
        with pytest.raises(RuntimeError, match=found):
            tried(runs, tmp_path, command(program, [2.0, 2.0, 2.0], **hold))


def test_gpu_runs_exit_code_comes_with_last_line(
    runs: ModuleType, program: str, tmp_path: Path
) -> None:
    ends = {**command(program, [2.0], exit=3), "environment": {"ENDS_WITH": "3"}}
    assert tried(runs, tmp_path, ends)["last_step"] == 1
    with pytest.raises(RuntimeError, match="ended with 3, not 0: trained run without RANK"):
        tried(runs, tmp_path, {**ends, "hold": {}})


def test_gpu_runs_losses_compare_with_earlier_run(
    runs: ModuleType, program: str, tmp_path: Path
) -> None:
    near = {"run": "first", "within": 1e-3}
    tried(runs, tmp_path, command(program, [3.0, 2.5, 2.0]), name="first")
    said = tried(runs, tmp_path, command(program, [3.0, 2.501, 2.0], near=near), name="second")
    assert said["differs"] == pytest.approx(4e-4)
    resumed = tried(
        runs, tmp_path, command(program, [2.5, 2.0], "2", same_as={"run": "first"}), name="third"
    )
    assert resumed["differs"] == 0.0
    for losses, first in (([3.0, 2.51, 2.0], "1"), ([3.0, 2.5], "1"), ([2.5, 2.0], "3")):
        with pytest.raises(RuntimeError, match="losses differ from first's by"):
            tried(runs, tmp_path, command(program, losses, first, near=near))
    with pytest.raises(RuntimeError, match="losses differ"):
        tried(runs, tmp_path, command(program, [3.0, 2.5, 2.0000001], same_as={"run": "first"}))


def test_gpu_runs_kill_after_a_step_then_resume(
    runs: ModuleType, program: str, tmp_path: Path
) -> None:
    killed = {**command(program, [3.0, 2.0], "1", "--stay"), "kill_after_step": 2}
    goes_on = {
        "program": program,
        "argv": ["{run}", "again", "[1.0, 0.5]", "3"],
        "hold": {"says": "trained again"},
    }
    said = tried(runs, tmp_path, killed, goes_on)
    assert said["seconds"] < 30
    assert (tmp_path / "runs" / "one" / "run" / "again").is_dir()
    with pytest.raises(RuntimeError, match="before step 9, where it is killed"):
        tried(runs, tmp_path, {**killed, "argv": ["{home}", "run", "[3.0]"], "kill_after_step": 9})


def test_gpu_runs_stopped_run_ends_by_itself(
    runs: ModuleType, program: str, tmp_path: Path
) -> None:
    stopped = {
        **command(program, [3.0, 2.0], "1", "--stay", exit=-15),
        "kill_after_step": 2,
        "signal": "SIGTERM",
    }
    assert tried(runs, tmp_path, stopped)["last_step"] == 2
    with pytest.raises(RuntimeError, match="ended with -15, not 75"):
        tried(runs, tmp_path, {**stopped, "hold": {"exit": 75}})


def test_gpu_runs_earlier_leftovers_are_ignored(
    runs: ModuleType, program: str, tmp_path: Path
) -> None:
    """Ignore the complete run of an earlier call that was cut off, or repeated with `--again`."""
    tried(runs, tmp_path, command(program, [3.0, 2.0], last_step=2))
    ends_at_once = {"program": program, "argv": ["{home}"], "hold": {"exit": 1, "last_step": 2}}
    with pytest.raises(RuntimeError, match="the last step is None, not 2"):
        tried(runs, tmp_path, ends_at_once)
    tried(runs, tmp_path, command(program, [3.0, 2.0]))
    killed = {"program": program, "argv": ["{home}", "another", "[3.0]"], "kill_after_step": 2}
    with pytest.raises(RuntimeError, match="before step 2, where it is killed"):
        tried(runs, tmp_path, killed)


def test_gpu_runs_late_run_of_earlier_call_is_awaited(
    runs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from first_touch_results import Results

    results = Results(tmp_path)
    results.add("runs", "first", skipped="did not fit", late=True)
    monkeypatch.setattr(runs, "WAIT_S", 0.1)
    with pytest.raises(RuntimeError, match="first did not end in"):
        runs._result_of("first", results)
    results.add("runs", "first", result={"losses": [1.0]})
    assert runs._result_of("first", results) == {"losses": [1.0]}


def test_gpu_runs_command_uses_tree_without_launcher(
    runs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from first_touch_results import tree_environment

    monkeypatch.setenv("PYTHONPATH", "site")
    given = tree_environment({"PYTHONPATH": "front", "OTHER": "1"})
    wanted = ["front", str(ROOT / "src"), str(ROOT / "kernels"), "site"]
    assert given["PYTHONPATH"].split(os.pathsep) == wanted
    assert {key for key in given if given[key] != os.environ.get(key)} == {"PYTHONPATH", "OTHER"}


def test_gpu_runs_missing_requirement_skips_with_reason(runs: ModuleType, tmp_path: Path) -> None:
    from first_touch_device import Skipped
    from first_touch_results import Results, Walk

    for needs, reason in (
        ({"key": "trainer.nothing"}, "no key trainer.nothing"),
        ({"module": "a.b"}, "no module a.b"),
    ):
        with pytest.raises(Skipped, match=reason):
            runs._tried(
                Walk(True), tmp_path, runs.Entry("one", "a test", (), needs), Results(tmp_path)
            )
    assert (
        runs._missing(runs.Entry("one", "a test", (), {"key": "trainer.seed", "module": "mtrain"}))
        is None
    )


def test_gpu_runs_host_time_is_by_layer_and_direction(runs: ModuleType) -> None:
    import first_touch_host as host
    import torch
    from torch import nn

    class Adds(nn.Module):
        """Adds some ones, each its own operation."""

        def __init__(self, count: int) -> None:
            super().__init__()
            self.count = count

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(self.count):
                x = x * 2.0
            return x

    layers = [Adds(5), Adds(5), Adds(5)]
    start = torch.zeros(3, requires_grad=True)

    def step() -> None:
        x = start * 1.0
        for layer in layers:
            x = layer(x)
        x.sum().backward()

    marks, total = host._operations(step, layers)
    found = host.by_layer(marks)
    assert {way: said["launches"] for way, said in found.items()} == {"forward": 5, "backward": 5}
    assert [said["of"] for said in found.values()] == [3, 3]
    assert total > 30
    traced, launched = host._launches(step, layers)
    assert [(what, layer) for what, layer, *_ in traced] == [
        (what, layer) for what, layer, *_ in marks
    ]
    assert launched == 0
    timed = host._timed(step, layers, lambda: None)
    assert 0 < timed["us_of_a_layer"]["forward"] < 1e6 * timed["step_s"]


def test_gpu_runs_stall_follows_join(runs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("stalls", BENCH / "stall" / "sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    stalls = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stalls)
    told: list[Any] = []
    asked = iter([False, True])
    torch = SimpleNamespace(
        distributed=SimpleNamespace(is_initialized=lambda: told.append("asked") or next(asked)),
        cuda=SimpleNamespace(set_device=told.append, _sleep=told.append),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(stalls.time, "sleep", lambda seconds: told.append(f"{seconds} s"))
    stalls._stall(4.0)
    assert told == ["0.1 s", "asked", "0.1 s", "asked", "4.0 s", 3, stalls.CYCLES]


def test_gpu_runs_trace_launches_fall_between_marks(runs: ModuleType) -> None:
    import first_touch_host as host

    def event(name: str, at: float, cat: str) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": at, "dur": 1}

    trace = [
        event("cudaLaunchKernel", 5, "cuda_runtime"),
        event("first_touch forward end 0", 40, "user_annotation"),
        event("first_touch forward begin 0", 10, "user_annotation"),
        event("cudaLaunchKernelExC", 20, "cuda_runtime"),
        event("cuLaunchKernel", 30, "cuda_driver"),
        event("cudaMemcpyAsync", 31, "cuda_runtime"),
        event("first_touch forward end 0", 50, "gpu_user_annotation"),
        event("cudaGraphLaunch", 60, "cuda_runtime"),
    ]
    assert host.by_layer(host.marks_of(trace)) == {"forward": {"us": 30.0, "launches": 2, "of": 1}}


def test_gpu_runs_functions_list_own_time_by_module(runs: ModuleType) -> None:
    import first_touch_host as host

    profile = cProfile.Profile()
    profile.enable()
    sorted(range(100000), key=str)
    json.loads("[1, 2]")
    profile.disable()
    found = host.functions_of(profile)
    assert found[0]["module"] == "builtins"
    assert "sorted" in found[0]["function"]
    assert found[0]["us"] > found[-1]["us"]
    assert any(
        row["module"] == "json.decoder" and row["function"].startswith("decode") for row in found
    )
    assert (
        host.module_of("/x/site-packages/torch/nn/modules/module.py") == "torch.nn.modules.module"
    )
    assert host.module_of("/tree/src/mtrain/train/__init__.py") == "mtrain.train"


def noted(folder: Path) -> Any:
    """Return the results of a call on a card, by hand."""
    from first_touch_results import Results

    results = Results(folder)
    versions = {"torch": "2.11.0", "liger_kernel": "not installed"}
    machine = {"device": "NVIDIA H200", "sm": 90, "commit": "0123456789ab", "versions": versions}
    results.add("environment", "machine", result=machine)
    results.add("gate", "launch.py", result={"losses": [2.0]})
    results.add("parity", "swiglu llama3_8b", result={"op": "activation", "triton": "as fp64"})
    wrong = {"op": "activation", "wrong": ["triton"], "triton": "differs from fp64: by 2"}
    results.add("parity", "geglu llama3_8b", result=wrong)
    results.add("parity", "rms_norm llama3_8b", error="died with -11")
    results.add("runs", "mixtral", error="the loss does not fall")
    memory = {
        "peak_bytes_by_rank": [98e9],
        "reserved_bytes_by_rank": [99e9, None],
        "driver_peak_bytes": 101e9,
    }
    run = folder / "runs" / "one"
    run.mkdir(parents=True)
    planned = {"peak_bytes": [90e9, 102e9], "reserved_bytes": [103e9], "driver_bytes": [104e9]}
    (run / "plan.json").write_text(
        json.dumps({"planned": {"step_s": 0.49, "memory_by_stage": planned}})
    )
    said = {
        "run": str(run),
        "tokens_per_s": 130.0,
        "step_s": 0.5,
        "command": "model=llama_tiny",
        **memory,
    }
    results.add("train", "1b bf16 triton", result=said)
    results.add("rivals", "1b transformers", result={"tokens_per_s": 100.0})
    results.add("profile", "1b bf16 triton", result={"busy_share": 0.65})
    slow = {"contender": "triton", "forward_share": 0.95, "backward_share": 0.8}
    product = {"contender": "triton", "forward_share": 0.5, "forward_tflop_per_s": 400.0}
    results.add("ops", "swiglu llama3_8b", result={"rows": [slow]})
    results.add("ops", "grouped_gemm llama3_8b", result={"rows": [product]})
    results.add("autotune", "stage", skipped="did not fit", late=True)
    return results


@pytest.fixture
def made(runs: ModuleType, tmp_path: Path) -> Path:
    """Make a folder with the summary and the page of such a call."""
    import first_touch_summary
    from first_touch_results import Walk

    assert (
        first_touch_summary.write(noted(tmp_path / "out"), Walk(False), "python first_touch.py")
        == 3
    )
    return tmp_path / "out"


def test_gpu_runs_summary_compares_plan_and_goal(made: Path) -> None:
    summary = json.loads((made / "summary.json").read_text())
    assert (summary["device"]["name"], summary["device"]["sm"]) == ("NVIDIA H200", 90)
    assert (summary["commit"], summary["command"]) == ("0123456789ab", "python first_touch.py")
    failures = [{"unit": "geglu llama3_8b", "why": "triton: differs from fp64: by 2"}]
    assert summary["parity"]["activation"] == {"passed": 1, "failed": 1, "failures": failures}
    assert summary["parity"]["norm"]["failed"] == 1
    runs = summary["runs"]
    assert (runs["passed"], runs["failed"], runs["failures"][0]["name"]) == (1, 1, "mixtral")
    figures = {figure["name"]: figure for figure in summary["figures"]}
    rival = figures["1B, bf16, next to eager transformers"]
    assert (rival["measured"], rival["goal"], rival["met"]) == (1.3, "at least 1.25", True)
    assert not figures["1B, bf16, share of the step in which the device works"]["met"]
    step = figures["1b bf16 triton: step_s"]
    peak = figures["1b bf16 triton: peak_bytes"]
    assert (step["measured"], step["planned"], step["met"]) == (0.5, 0.49, True)
    assert (peak["measured"], peak["planned"], peak["met"]) == (98e9, 102e9, False)
    page = (made / "page.txt").read_text()
    for text in (
        "parity: 1 of 3 units",
        "1b bf16 triton",
        "98.00 GB",
        "102.00 GB",
        "runs mixtral: the loss does not",
    ):
        assert text in page
    assert "autotune stage: did not fit" in page
    shares = {name: figure["met"] for name, figure in figures.items() if "copy rate" in name}
    assert shares == {
        "swiglu llama3_8b forward: share of the copy rate": True,
        "swiglu llama3_8b backward: share of the copy rate": False,
    }
    held = "allocated 98.00 GB (planned 102.00 GB), reserved 99.00 GB (planned 103.00 GB)"
    assert f"memory, 1b bf16 triton: {held}, driver, sampled 101.00 GB (planned 104.00 GB)" in page


def test_gpu_runs_memory_is_compared_with_its_plan_part(runs: ModuleType, tmp_path: Path) -> None:
    """Compare the driver's figure with the context of the device, and the allocator's with its
    reserve on top of tensors.
    """
    from first_touch_results import Walk
    from first_touch_summary import planned_of
    from first_touch_train import SHAPES, words_of

    from mtrain.api import load
    from mtrain.config.resolve.resolution import Machine
    from mtrain.plan import compare

    assert planned_of(tmp_path) is None
    words = [
        *words_of(Walk(False), SHAPES["1b"], "bf16", "triton"),
        "cluster=h200",
        "cluster.devices_per_node=1",
    ]
    machine = Machine(cpu_cores=16, memory_bytes=1 << 37, gpus=1, triton=True)
    run = load(words, machine, {}, to_run=False).run
    (tmp_path / compare.PLAN).write_text(json.dumps({"planned": compare.planned(run)}))
    planned = planned_of(tmp_path)
    assert planned is not None
    assert 0.1 < planned["step_s"] < 0.5
    assert 20e9 < planned["peak_bytes"] < planned["reserved_bytes"] < planned["driver_bytes"] < 50e9


@pytest.fixture
def readme(runs: ModuleType) -> ModuleType:
    """Return the module that writes what pages say of a GPU."""
    import gpu_readme

    return gpu_readme


def test_gpu_runs_pages_state_newest_results(readme: ModuleType) -> None:
    assert readme.main(["--check"]) == 0, "python kernels/bench/gpu_readme.py writes it"
    for (name, marker), content in readme.sections(*readme.newest()).items():
        text = (ROOT / name).read_text()
        assert content in text
        assert readme.filled(text.replace(content, "other"), marker, content) == text


def test_gpu_runs_kept_results_change_pages(readme: ModuleType, made: Path, tmp_path: Path) -> None:
    results = tmp_path / "gpu"
    shutil.copytree(readme.RESULTS, results)
    before = readme.newest(results)
    summary = json.loads((made / "summary.json").read_text())
    (made / "summary.json").write_text(json.dumps(summary | {"date": "2099-01-02"}))
    kept = readme.add(made, results)
    assert kept.name == "2099-01-02_nvidia_h200_01234567"
    assert (kept / "page.txt").exists()
    assert readme.newest(results)[0] == kept
    said = readme.sections(*readme.newest(results))
    assert said != readme.sections(*before)
    assert "| 1b bf16 triton | 130 |" in said["docs/reference/gpu.md", "gpu"]
    assert "| command | `python first_touch.py` |" in said["docs/reference/gpu.md", "gpu"]
    assert "triton: differs from fp64: by 2" in said["kernels/README.md", "gpu-parity"]
    with pytest.raises(ValueError, match="no markers"):
        readme.filled("a page", "gpu", "text")


def test_gpu_runs_headline_names_device_and_page(readme: ModuleType, made: Path) -> None:
    from first_touch_train import SHAPES

    assert set(readme.MODELS) == set(SHAPES)
    summary = json.loads((made / "summary.json").read_text())
    said = readme.sections(made, summary)["README.md", "gpu"].split("\n")
    begin = (
        "On one NVIDIA H200 (2099-01-02, commit 01234567), 1 of 2 small runs and 1 of 3 comparisons"
        " of kernels"
    )
    assert (
        said[0].replace(summary["date"], "2099-01-02") == f"{begin} with their definitions passed."
    )
    assert (
        said[1]
        == "In bf16, mtrain trains Llama 3.2 1B at 130 tokens/s; transformers trains it at 100."
    )
    assert said[2] == (
        "3 of 6 figures reach their goals."
        " [docs/reference/gpu.md](docs/reference/gpu.md) has every figure."
    )
    assert len(said) == 3
    for file in readme.RESULTS.glob("*/summary.json"):
        folder = file.parent
        kept = json.loads(file.read_text())
        assert len(readme.sections(folder, kept)["README.md", "gpu"].split("\n")) <= 5


def test_gpu_runs_dry_or_unknown_commit_is_refused(readme: ModuleType, made: Path) -> None:
    summary = json.loads((made / "summary.json").read_text())
    for changed, why in (
        ({"dry": True}, "of a dry run"),
        ({"commit": "unknown"}, "does not say the commit"),
    ):
        (made / "summary.json").write_text(json.dumps(summary | changed))
        with pytest.raises(ValueError, match=why):
            readme.add(made, made / "gpu")


def test_gpu_runs_results_name_device_and_commit(
    readme: ModuleType,
) -> None:
    for file in readme.RESULTS.glob("*/summary.json"):
        folder = file.parent
        summary = json.loads(file.read_text())
        assert folder.name == readme.folder_of(summary)
        assert summary["device"]["sm"] in (80, 90, 100, 103)
        assert {"torch", "triton", "megatron-core"} <= set(summary["versions"])
        assert summary["command"]
        assert all(op["failed"] == len(op["failures"]) for op in summary["parity"].values())


def test_gpu_runs_failure_names_places_of_a_rank(runs: ModuleType, tmp_path: Path) -> None:
    assert runs._places(tmp_path) == ""
    errors = tmp_path / "20990102-llama" / "errors"
    errors.mkdir(parents=True)
    frames = [f'  File "part{i}.py", line {i}, in step\n    wait()\n' for i in range(9)]
    (errors / "rank_00000.json").write_text(json.dumps({"traceback": "".join(frames)}))
    said = runs._places(tmp_path)
    assert said.startswith('; at File "part8.py", line 8, in step < File "part7.py"')
    assert "part2.py" not in said
