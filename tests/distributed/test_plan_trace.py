"""A step that is traced on shapes keeps the tensors of a real step, and the plan agrees."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

from mtrain.api import load
from mtrain.cli import trace as verb
from mtrain.config.compose.paths import recipes_dir
from mtrain.config.resolve.resolution import Machine
from mtrain.config.schema.run import RunConfig
from mtrain.errors import ConfigError
from mtrain.layout.grid import RankGrid
from mtrain.models.liveness import Moment, Rises
from mtrain.plan import rank
from mtrain.plan.rank import stage_memories
from mtrain.plan.shrink import portable
from tests.distributed.test_plan_kept import KEPT, planned
from tests.support.cases import cases_of
from tests.support.covering import some
from tests.support.forked import run_alone, run_ranks
from tests.support.memory import alive, measured

BIG = Machine(cpu_cores=1 << 14, memory_bytes=1 << 60)
TRACED = [name for name in KEPT if "fsdp" not in name and " fp8" not in name]  # traces are in bf16
RECIPES = sorted(
    file.relative_to(recipes_dir()).with_suffix("").as_posix()
    for file in recipes_dir().rglob("*.yaml")
)
MANY = 128
"""Number of experts per layer above which tracing a stage takes half a minute."""
LARGE = (
    "model=llama31_405b parallel=tp8pp8sp parallel.layers_per_stage=[15,16,16,16,16,16,16,15]"
    " cluster=h100x1024 data=mock data.seq_length=8192"
)


def traced(run: RunConfig, rank: int) -> dict[str, Any]:
    """Return the report of a rank, from a process of its own."""

    def job() -> dict[str, Any]:
        from mtrain.train.trace.report import trace_report
        from mtrain.train.trace.trace import trace

        begin = time.process_time()
        found = trace_report(run, trace(run, rank))
        return found | {"seconds": time.process_time() - begin}

    found: dict[str, Any] = run_alone(job, timeout_s=600)
    return found


def measured_in_turn(run: RunConfig) -> dict[str, Any]:
    """Return `measured` with round-robin experts, as in a trace; a job for one rank."""
    from mtrain.mcore.adapter.fake_patches import fake_patches

    with fake_patches():
        return measured(run)


@pytest.mark.parametrize("case", some(TRACED, ["llama tp sp bf16"]))
def test_plan_trace_keeps_what_autograd_keeps(case: str) -> None:
    run = planned(KEPT[case])
    grid = RankGrid.of(run)
    found = run_ranks(run.parallel.ranks or 1, measured_in_turn, run)
    for stage in range(grid.pp):
        most = mean(r["most"] for r in found if grid.coords(r["rank"])["pp"] == stage)
        assert traced(run, grid.rank_of(pp=stage))["most_saved"] == pytest.approx(most, rel=0.01)


@pytest.mark.parametrize("name", some(RECIPES, ["llama/tiny_cpu"]))
def test_plan_trace_recipe_plan_is_within_3_percent(name: str) -> None:
    """Compare the peak, and the states to the byte, on the first stage and, unless there are many
    experts, on the last.
    """
    run = load([f"recipe={name}"], BIG, {}, to_run=False).run
    pp = RankGrid.of(run).pp
    few = run.model.moe is None or run.model.moe.num_experts <= MANY
    for stage in sorted({0, pp - 1 if few else 0}):
        off = traced(run, RankGrid.of(run).rank_of(pp=stage))["difference_percent"]
        assert abs(off["peak"]) < 3, off
        assert off["weights"] == off["gradients"] == 0
        assert abs(off["optimizer"]) < 0.01


AGAIN = "parallel.recompute.granularity=selective parallel.recompute.modules="
DRAWN = cases_of("plan_trace")
STATE = ("weights", "gradients", "optimizer")


@pytest.mark.parametrize("name", some(DRAWN, ["padded"]))
def test_plan_trace_moved_bytes_are_within_5_percent(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare everything at the peak but the state, which would hide errors in the rest."""
    run = load(DRAWN[name].split(), BIG, {}, to_run=False).run
    for stage in sorted({0, run.parallel.pp - 1}):
        found = traced(run, RankGrid.of(run).rank_of(pp=stage))
        seen = found["peak"]["bytes"] - sum(found["peak"]["parts"][part] for part in STATE)
        assert _moving(run, stage) == pytest.approx(seen, rel=0.05)
    if name == "padded":
        monkeypatch.setattr(rank, "backwards", lambda graphs: Rises(0, 0, Moment(0, 0)))
        monkeypatch.setattr(rank, "forwards", lambda graphs: 0)
        assert _moving(run, 0) < 0.95 * seen, "what experts work with is the most"


def _moving(run: RunConfig, stage: int) -> int:
    parts = stage_memories(portable(run))[stage].parts
    return sum(
        size
        for part, size in parts.items()
        if part not in (*STATE, "low_precision", "context", "reserve")
    )


@pytest.mark.full
def test_plan_trace_gpu_only_work_is_listed_as_omitted() -> None:
    words = (
        "model=llama_tiny cluster=h100 cluster.devices_per_node=1 parallel=single data=mock"
        " data.seq_length=64 "
    )
    words += "model.num_layers=2 trainer.global_batch_size=2 trainer.micro_batch_size=1 "
    words += "parallel.activation_offload.modules=[core_attn]"
    run = load(words.split(), BIG, {}, to_run=False).run
    run = run.model_copy(
        update={"trainer": run.trainer.model_copy(update={"cuda_graph_impl": "local"})}
    )
    assert any(note.startswith("CUDA graphs") for note in traced(run, 0)["notes"])


FUSED = {
    "sinks": "model=gpt_oss_20b model.moe.num_experts=4 parallel=single",
    "caps": "model=gemma2_9b parallel=tp2sp",
    # what a trace runs by megatron-core's maps keeps no rows of experts' biases, and the run does
    "ring": (
        "model=gpt_oss_20b model.moe.num_experts=4 model.add_bias_linear=false parallel=cp2 "
        "parallel.cp_comm_type=p2p"
    ),
    "gathered": "model=gpt_oss_20b model.moe.num_experts=4 parallel=cp2",
}


@pytest.mark.full
@pytest.mark.parametrize("name", FUSED)
def test_plan_trace_fused_attention_keeps_no_scores(name: str) -> None:
    words = [
        *FUSED[name].split(),
        "cluster=h100",
        "cluster.nodes=1",
        "cluster.devices_per_node=2",
        "data=mock",
    ]
    words += [
        "kernels=triton",
        "model.num_layers=2",
        "data.seq_length=3072",
        "trainer.micro_batch_size=1",
        "trainer.global_batch_size=2",
    ]
    run = load(words, BIG, {}, to_run=False).run
    found = traced(run, 0)
    assert abs(found["difference_percent"]["peak"]) < 3, found["difference_percent"]
    if name == "ring":  # what a sink keeps of it is some hundredths
        assert stage_memories(run)[0].saved == pytest.approx(found["most_saved"], rel=0.005)
    pairs = {3072, 3072 // run.parallel.cp}
    shapes = [shape for one in found["operations"] for shape in one["shapes"] if len(shape) > 1]
    assert not [shape for shape in shapes if set(shape[-2:]) <= pairs], (
        "there is a number for each query and key"
    )
    assert any(one["op"] == "mtrain.attention" for one in found["operations"])


@pytest.mark.full
def test_plan_trace_page_equals_its_data(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [
        "recipe=llama/tiny_cpu",
        "model.num_layers=2",
        "parallel=pp2",
        "data.seq_length=64",
        "rank=1",
    ]

    def job() -> tuple[str, str]:
        with (tmp_path / "out").open("w") as out, pytest.MonkeyPatch.context() as patch:
            patch.setattr("mtrain.cli.trace.say_page", lambda text: out.write(text + "\0"))
            verb.run(words)
            verb.run(words, as_json=True)
        page, data = (tmp_path / "out").read_text().split("\0")[:2]
        return page, data

    page, text = run_alone(job)
    data = json.loads(text)
    assert "a step of rank 1, traced" in page
    assert data["stage"] == 1
    assert data["peak"]["bytes"] == sum(data["peak"]["parts"].values())
    assert {"forward", "backward", "optimizer"} == {one["phase"] for one in data["timeline"]}
    assert max(one["peak"] for one in data["timeline"]) == data["peak"]["bytes"]
    layers = [
        o
        for o in data["operations"]
        if o["module"] == "decoder.layers.*.mlp.linear_fc2" and o["flops"]
    ]
    assert {o["phase"] for o in layers} == {"forward", "backward"}
    forward = sum(o["times"] * o["flops"] for o in layers if o["phase"] == "forward")
    assert sum(o["times"] * o["flops"] for o in layers if o["phase"] == "backward") == 2 * forward


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("recipe=llama/tiny_cpu rank=2", "MT010"),
        ("recipe=llama/tiny_cpu rank=x", "MT010"),
    ],
)
def test_plan_trace_untraceable_is_refused(words: str, code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        verb.run(words.split())
    assert [problem.code for problem in caught.value.problems] == [code]


def _own_defect() -> None:
    raise NotImplementedError(
        "a padding mask is not sharded over context-parallel ranks, nor is its metadata"
    )


@pytest.mark.parametrize(
    ("fails", "expected"),
    [
        (lambda: torch.empty(1, device="meta").tolist(), "MT255"),
        (lambda: torch.bincount(torch.empty(1, device="meta", dtype=torch.long)), "MT255"),
        (_own_defect, "NotImplementedError"),
    ],
)
def test_plan_trace_value_request_is_a_problem(fails: Callable[[], object], expected: str) -> None:
    def told() -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("mtrain.train.trace.trace.trace", lambda *_: fails())
            try:
                verb.run(["recipe=llama/tiny_cpu"])
            except ConfigError as error:
                return " ".join(problem.code for problem in error.problems)
            except NotImplementedError as error:
                return type(error).__name__
        return ""

    assert run_alone(told) == expected


@pytest.mark.full
def test_plan_trace_largest_llama_rank_takes_a_minute() -> None:
    run = load(LARGE.split(), BIG, {}, to_run=False).run
    found = traced(run, 0)
    assert found["seconds"] < 60
    assert abs(found["difference_percent"]["peak"]) < 3


WIDE = cases_of("plan_trace_sharded")


@pytest.mark.full
@pytest.mark.parametrize("case", WIDE)
def test_plan_trace_sharded_peak_equals_real_step(case: str) -> None:
    run = planned(WIDE[case])
    found = traced(run, 0)
    most = run_ranks(run.parallel.ranks or 1, alive, run)[0]
    assert found["peak"]["bytes"] + found["host"] == pytest.approx(most, rel=0.01)
