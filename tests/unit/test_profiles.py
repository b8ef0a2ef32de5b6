"""Profiles read back: the time of a step by part, clocks of ranks, and the verb `profile`."""

from __future__ import annotations

import gzip
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mtrain.cli import profile
from mtrain.cli.main import main
from mtrain.views.profiles import (
    CLOCK,
    Profiled,
    Request,
    axis_of,
    deviations,
    facts_file,
    folder_of,
    measure,
    merge,
    trace_file,
    traces,
)
from mtrain.world import clocks


def span(name: str, begin: float, end: float, **more: Any) -> dict[str, Any]:
    """Return a range of the main thread, in microseconds."""
    return {"ph": "X", "name": name, "ts": begin, "dur": end - begin, "pid": 7, "tid": 1, **more}


def step(rank: int) -> list[dict[str, Any]]:
    """Return a step of 1,000 us, in which rank 1 comes 150 us later to a collective."""
    call = 300 if rank == 0 else 450
    return [
        span(f"{CLOCK} 0", -10, -9),
        span("mtrain:step", 0, 1000),
        span("mtrain:data", 0, 50),
        span("mtrain:forward_backward", 50, 800),
        span("mtrain:forward 1", 60, 290),
        span("aten::linear", 100, 200),
        span("aten::addmm", 110, 190),
        span("aten::scaled_dot_product_attention", 200, 250),
        span("aten::bmm", 210, 240),
        span("mtrain:tp g0 1 all_reduce", call, call + 10),
        span("mtrain:tp g0 1 wait", call + 10, 500),
        span("autograd::engine::evaluate_function: MmBackward0", 500, 600),
        span("MmBackward0", 510, 600),
        span("mtrain:pp g1 1 wait", 600, 700),
        span("autograd::engine::evaluate_function: MulBackward0", 700, 740),
        span("aten::mul", 710, 740),
        span("mtrain:optimizer", 800, 900),
        span("aten::mul", 800, 900),
        span("aten::mul", 0, 1000, tid=2),
    ]


def write(home: Path, number: int, ranks: int, skew_us: float = 0.0, request: str = "") -> Path:
    """Write a profile of a step; the clock of each rank is `skew_us` behind that of the one
    before.
    """
    folder = folder_of(home, number)
    folder.mkdir(parents=True)
    facts = {"id": request, "first": number, "last": number}
    facts |= {"ranks": list(range(ranks)), "content": ["torch"]}
    for rank in range(ranks):
        # Each trace counts from a moment of its own.
        base = 5000.0 * rank
        events = [event | {"ts": event["ts"] + base} for event in step(rank)]
        with gzip.open(trace_file(folder, rank), "wt") as file:
            json.dump({"traceEvents": [*events, {"ph": "s", "id": 3, "ts": base, "pid": 7}]}, file)
        own = {"rank": rank, "coords": {"tp": rank}, "step_s": 1e-3, "error_ns": 1000, "mark": 0}
        own |= {
            "clock_ns": int(1e3 * (1e9 - skew_us * rank)),
            "offset_ns": int(1e3 * skew_us * rank),
        }
        facts_file(folder, rank).write_text(json.dumps(own))
    (folder / "profile.json").write_text(json.dumps(facts))
    return folder


def test_profiles_parts_of_a_step_add_up(tmp_path: Path) -> None:
    ranks = traces(write(tmp_path, 3, 2, skew_us=7e6))
    measure(ranks)
    first, second = ranks
    assert sum(first.parts.values()) == pytest.approx(1000)
    expected = {"gemm": 190, "attention": 50, "tp": 60, "waiting": 140, "bubble": 100}
    expected |= {"update": 100, "data": 50, "memory": 30}
    expected |= {
        "host": 1000 - sum(expected.values()),
        "cp": 0,
        "pp": 0,
        "ep": 0,
        "dp": 0,
        "sync": 0,
    }
    assert first.parts == pytest.approx(expected)
    # The rank that comes last waits for nobody.
    assert second.parts["waiting"] == pytest.approx(0)
    assert second.operations["aten::addmm"] == pytest.approx(80)


def test_profiles_device_parts_and_gaps() -> None:
    """Read a step of a GPU: the collective begins 20 us later on rank 1, and 30 us of it are hidden
    behind a product.
    """

    def events(late: float) -> list[dict[str, Any]]:
        group = {"Process Group Name": "7", "Process Group Description": "TENSOR_MODEL_PARALLEL"}
        return [
            span("mtrain:step", 0, 400),
            span("nvjet_tst_128", 100, 200, cat="kernel"),
            span("flash_fwd_kernel", 200, 230, cat="kernel"),
            span("ncclDevKernel_AllReduce", 230 + late, 300, cat="kernel", args=group),
            span("vectorized_elementwise", 400, 500, cat="kernel"),
            span("nvjet_tst_64", 270, 300, cat="kernel"),
            span("cudaStreamSynchronize", 300, 350, cat="cuda_runtime"),
        ]

    ranks = [Profiled(rank, {}, events(20.0 * rank), 5e-4, 0.0) for rank in range(2)]
    measure(ranks)
    found = {part: spent for part, spent in ranks[0].parts.items() if spent}
    assert found == {
        **{"gemm": 130, "attention": 30, "memory": 100, "tp": 20},
        **{"waiting": 20, "sync": 50, "host": 150},
    }
    assert "waiting" not in {part for part, spent in ranks[1].parts.items() if spent}
    assert sum(found.values()) == 500


def test_profiles_deviations_are_shares_of_their_parts() -> None:
    parts = {"gemm": 300.0, "memory": 100.0, "host": 50.0}
    operations = {"fast": 100.0, "slow": 200.0, "copy": 100.0, "python": 50.0}
    part_of = {"fast": "gemm", "slow": "gemm", "copy": "memory", "python": "host"}
    one = Profiled(0, {}, [], 0.0, None, parts, operations, part_of)
    found = deviations(one, {"gemm": 150e-6, "memory": 200e-6})
    assert found == pytest.approx({"fast": 50e-6, "slow": 100e-6, "copy": -100e-6})


def test_profiles_merge_puts_ranks_on_one_clock(tmp_path: Path) -> None:
    folder = write(tmp_path, 3, 2, skew_us=7e6)
    merged = json.loads(gzip.decompress(merge(folder, traces(folder)).read_bytes()))["traceEvents"]
    steps = [event for event in merged if event.get("name") == "mtrain:step"]
    assert steps[0]["ts"] == pytest.approx(steps[1]["ts"])
    assert steps[0]["pid"] != steps[1]["pid"]
    names = [event["args"]["name"] for event in merged if event.get("name") == "process_name"]
    assert names == ["rank 0 (tp 0), 7", "rank 1 (tp 1), 7"]
    assert {event["id"] for event in merged if "id" in event} == {"0.3", "1.3"}
    # A transfer between stages ends the backward of a micro-batch.
    for number, lasts in ((1, 100), (2, 40)):
        backwards = [event for event in merged if event.get("name") == f"mtrain:backward {number}"]
        assert [event["dur"] for event in backwards] == pytest.approx([lasts, lasts])


def test_profiles_clocks_offsets_of_four_skewed_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with the injected skew: within 1 ms."""
    skew = {rank: rank * 1_700_000_000 for rank in range(4)}
    here = threading.local()
    monkeypatch.setattr(clocks, "now_ns", lambda: time.time_ns() + skew[here.rank])
    store = dist.HashStore()
    found: dict[int, Any] = {}

    def rank(number: int) -> None:
        here.rank = number
        found[number] = clocks.offset_ns(store, number, range(4), "clock/1")

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        offset, error = found[number]
        assert abs(offset + skew[number]) <= min(1_000_000, error + 1000 if number else 0)


def test_profiles_clocks_without_an_answer_stay_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "WITHIN", clocks.timedelta(milliseconds=20))
    assert clocks.offset_ns(dist.HashStore(), 1, [0, 1], "clock/1") is None


def test_profiles_axis_of_groups() -> None:
    named = {"TENSOR_MODEL_PARALLEL_GROUP": "tp", "DATA_PARALLEL_GROUP_WITH_CP": "dp"}
    named |= {"EXPERT_MODEL_PARALLEL_GROUP": "ep", "EXPERT_DATA_PARALLEL_GROUP": "dp"}
    named |= {"PIPELINE_MODEL_PARALLEL_GROUP": "pp", "CONTEXT_PARALLEL_GROUP": "cp"}
    named |= {"EXPERT_TENSOR_PARALLEL_GROUP": "tp", "default_pg": "world"}
    assert {name: axis_of(name) for name in named} == named


@pytest.mark.parametrize(
    "change", [{"steps": 0}, {"steps": 101}, {"ranks": [4]}, {"ranks": []}, {"content": ["x"]}]
)
def test_profiles_damaged_request_is_refused(change: dict[str, Any]) -> None:
    body = {"id": "a", "steps": 2, "ranks": None, "content": ["torch"]}
    request = Request.read(json.dumps(body), 10, 4)
    assert request == Request("a", 11, 12, (0, 1, 2, 3), ("torch",))
    with pytest.raises(ValueError):
        Request.read(json.dumps(body | change), 10, 4)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a run that a process owns."""
    (tmp_path / "run.yaml").write_text("trainer: {train_iters: 9}")
    monkeypatch.setattr(profile, "is_owned", lambda home: True)
    monkeypatch.setattr(profile, "LOOK_S", 0.01)
    return tmp_path


def test_profiles_verb_asks_a_run_and_leaves_no_request(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def serve() -> None:
        file = home / "profile.request"
        while not file.is_file():
            time.sleep(0.01)
        request = json.loads(file.read_text())
        file.unlink()
        assert (request["steps"], request["ranks"]) == (1, [0, 1])
        write(home, 7, 2, request=request["id"])

    served = threading.Thread(target=serve)
    served.start()
    assert main(["profile", str(home), "ranks=0,1"]) == 0
    served.join()
    out = capsys.readouterr().out
    assert "gemm" in out
    assert "communication that nothing hides: 22.5% of the step" in out
    assert not list(home.glob("*request*"))
    assert main(["profile", "show", str(home), "--json"]) == 0
    (first, _) = json.loads(capsys.readouterr().out)["ranks"]
    assert sum(first["parts_s"].values()) == pytest.approx(first["step_s"])


def test_profiles_verb_refuses_what_cannot_be(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*words: str) -> str:
        assert main(["profile", *words]) == 2
        return capsys.readouterr().err

    assert "MT002" in refused()
    assert "MT381" in refused(str(home), "steps=0")
    assert "MT381" in refused(str(home), "ranks=a")
    assert "MT381" in refused(str(home), "content=x")
    assert "MT382" in refused("show", str(home))
    (home / "profile.request").write_text("{}")
    assert "MT380" in refused(str(home))
    assert (home / "profile.request").is_file()
    monkeypatch.setattr(profile, "is_owned", lambda home: False)
    assert "has ended" in refused(str(home))
    # A run that ends before it has served the request.
    (home / "profile.request").unlink()
    owned = iter([True, True, False])
    monkeypatch.setattr(profile, "is_owned", lambda home: next(owned, False))
    monkeypatch.setattr("mtrain.views.watched.QUIET_S", 0.0)
    assert "ended before" in refused(str(home))
    assert not (home / "profile.request").exists()
