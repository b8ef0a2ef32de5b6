"""The time of a step: limits and ratios that physics has, what is published, and how fast it is
said.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from time import process_time

import pytest

from mtrain.api import load
from mtrain.cli import plan
from mtrain.config.resolve.resolution import Machine
from mtrain.config.schema.run import RunConfig
from mtrain.models.graph import Exchange, Product
from mtrain.plan.rank import stage_memories
from mtrain.plan.time import step_time
from mtrain.plan.time.device import device_of
from mtrain.plan.time.efficiencies import shipped
from mtrain.plan.time.kernels import Group, Kernels, Links
from mtrain.plan.time.report import time_report
from mtrain.plan.time.step import priced, step_work
from mtrain.plan.time.work import Linear, Pairs

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import plan_time_rows as published

BIG = Machine(cpu_cores=1 << 14, memory_bytes=1 << 60)
ON = "data=mock data.seq_length=4096 trainer.global_batch_size=256 trainer.micro_batch_size=1"
DENSE = f"model=llama3_70b parallel=tp4pp4 cluster=h100x64 {ON}"
EXPERTS = (
    f"model=qwen3_30b_a3b parallel=ep16 parallel.recompute.granularity=none cluster=h100x16 {ON}"
)


@cache
def run_of(words: str) -> RunConfig:
    return load(words.split(), BIG, {}, to_run=False).run


@pytest.mark.parametrize("words", [DENSE, EXPERTS])
def test_plan_time_parts_add_up_and_rate_follows(words: str) -> None:
    run = run_of(words)
    step = step_time(run)
    assert step.known
    assert min(step.parts.values()) >= 0
    assert math.isclose(sum(step.parts.values()), step.seconds)
    tokens = run.trainer.batch * run.data.length / (run.parallel.ranks or 1)
    assert math.isclose(step.tokens_per_second_per_device, tokens / step.seconds)
    assert 0 < step.mfu < step.mfu_all_keys < 1


@pytest.mark.parametrize(
    "key", ["memory_gbps", "fast_link_gbps", "network_gbitps", "fast_link_devices", "power_watts"]
)
@pytest.mark.parametrize("words", [DENSE, EXPERTS])
def test_plan_time_better_device_is_never_slower(words: str, key: str) -> None:
    run = run_of(words)
    more = run.cluster.model_copy(update={key: getattr(run.cluster, key) * 2})
    faster = step_time(run.model_copy(update={"cluster": more})).seconds
    # Sums of the same parts in another order differ in the last bit.
    assert faster <= step_time(run).seconds * (1 + 1e-12)


def test_plan_time_peak_doubles_large_products_only() -> None:
    device = device_of(run_of(DENSE).cluster)
    twice = replace(device, peaks={form: 2 * peak for form, peak in device.peaks.items()})

    def seconds(size: int, rows: int, of: object) -> float:
        kernels = Kernels(of, shipped(), "bf16", "bf16", "bf16", 2)  # type: ignore[arg-type]
        return kernels.linear(Linear(Product(rows, size, size), low=False, grouped=False))

    assert seconds(1 << 16, 1 << 16, device) / seconds(1 << 16, 1 << 16, twice) == pytest.approx(
        2, rel=0.01
    )
    assert seconds(4096, 1, device) / seconds(4096, 1, twice) == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize(("vpp", "stages"), [(1, 4), (5, 4)])
def test_plan_time_bubble_follows_schedule(vpp: int, stages: int) -> None:
    """Expect all stages but one to idle for a micro-batch, in as many parts as there are virtual
    stages.
    """
    layout = f"tp4pp{stages}" + (f"vpp{vpp}" if vpp > 1 else "")
    work = step_work(run_of(DENSE.replace("tp4pp4", layout)))
    alike = replace(work, stages=(work.stages[1],) * stages, weights=(work.weights[1],) * stages)
    run = work.run
    step = priced(alike, device_of(run.cluster), shipped())
    number = run.trainer.batch // run.parallel.dp
    once = step.parts["dp"] + step.parts["optimizer"]
    busy = step.seconds - step.parts["bubble"] - once
    assert step.parts["bubble"] / busy == pytest.approx((stages - 1) / (vpp * number))


def test_plan_time_slowest_stage_decides() -> None:
    even = run_of(f"{DENSE} parallel.layers_per_stage=[20,20,20,20]")
    uneven = run_of(f"{DENSE} parallel.layers_per_stage=[10,20,20,30]")
    assert step_time(uneven).seconds > 1.3 * step_time(even).seconds


def test_plan_time_experts_in_one_domain_are_faster() -> None:
    device = device_of(run_of(EXPERTS).cluster)
    links = Links(device, shipped())
    sent = Exchange("ep", "all_to_all", 1 << 30, 8)
    inside = Group(8, 1)
    across = Group(16, 1)
    assert links.seconds(across, sent) > 3 * links.seconds(inside, sent)
    assert links.seconds(across, sent, once=True) < links.seconds(across, sent)


def test_plan_time_recomputed_layers_take_a_third_longer() -> None:
    again = step_time(run_of(f"{DENSE} parallel.recompute.granularity=full"))
    assert again.parts["gemm"] / step_time(run_of(DENSE)).parts["gemm"] == pytest.approx(
        4 / 3, rel=0.05
    )


def test_plan_time_sharded_weights_travel_per_micro_batch() -> None:
    words = (
        "model=llama3_8b parallel=single parallel.fsdp=fsdp2 cluster=h100x64 data=mock"
        " data.seq_length=512"
    )
    words += " trainer.micro_batch_size=1"
    one, four = (
        step_time(run_of(f"{words} trainer.global_batch_size={64 * n}")).parts["dp"] for n in (1, 4)
    )
    assert one > 0
    assert four == pytest.approx(4 * one, rel=0.01)


def test_plan_time_sharding_slows_as_published() -> None:
    """Lose 37.22% from 128 to 2048 H100, Llama-2 7B with two samples on each (arXiv:2411.13055)."""
    words = (
        "model=llama2_7b parallel=dp parallel.fsdp=fsdp2 parallel.distributed_optimizer=false"
        " cluster=h100 data=mock"
    )
    words += " data.seq_length=4096 trainer.micro_batch_size=2 precision.grad_reduce_in_fp32=false"
    few, many = (
        step_time(run_of(f"{words} cluster.nodes={n} trainer.global_batch_size={16 * n}"))
        for n in (16, 256)
    )
    rate = many.tokens_per_second_per_device / few.tokens_per_second_per_device
    assert 0.5 < rate < 0.75


def test_plan_time_unknown_facts_are_named() -> None:
    run = run_of(DENSE)
    bare = run.cluster.model_copy(
        update={"memory_gbps": None, "network_gbitps": None, "peak_tflops": {}}
    )
    step = step_time(run.model_copy(update={"cluster": bare}))
    assert step.missing == (
        "cluster.peak_tflops.bf16",
        "cluster.memory_gbps",
        "cluster.network_gbitps",
    )
    assert not step.known
    assert math.isnan(step.seconds)
    assert not step_time(run_of("cluster=cpu")).known


ROWS = [
    row
    for row in published.rows()
    if row["model"] in ("llama3_70b", "llama31_405b", "gpt_16b", "gpt_177b")
    and "Megatron" in row["source"]
    and not published.obstacle(row)
]


@pytest.mark.parametrize(
    "row", ROWS[::2], ids=lambda row: f"{row['model']}-{row['gpu']}-{row['precision']}"
)
def test_plan_time_dense_rates_are_near_published(row: dict[str, str]) -> None:
    """Use the efficiencies that ship, without the overlap of tensor parallelism, which the software
    of these rows lacks.
    """
    found = published.measured(row)
    assert not isinstance(found, str)
    reached = replace(shipped(), overlapped={**shipped().overlapped, "tp": 0.6})
    rate = step_time(found.run, reached).tokens_per_second_per_device
    assert rate / found.tokens == pytest.approx(1, abs=0.2)


def test_plan_time_stored_results_are_held_out_models() -> None:
    stored = json.loads((published.ROOT / "benchmarks/results/plan_time.json").read_text())
    for word in ("model_left_out", "model_left_out_with_all"):
        assert stored[word]["median"] < 0.065
        assert stored[word]["p95"] < 0.18
    assert stored["device_left_out"]["p95"] < 0.21
    assert stored["software_left_out"]["median"] < 0.08
    assert stored["software_left_out"]["p95"] < 0.25
    assert stored["unfitted"]["median"] < 0.08
    assert stored["unfitted"]["p95"] < 0.25
    assert stored["rows_that_disagree"] == 2
    assert stored["pairs"]["right"] >= 0.9 * stored["pairs"]["of"]


def test_plan_time_contradicting_rows_are_both_listed() -> None:
    row = next(row for row in ROWS if row["tokens_s_per_gpu"])
    one = published.measured(row)
    assert not isinstance(one, str)
    near, far = (replace(one, tokens=one.tokens * factor) for factor in (1.4, 1.6))
    other = replace(far, row={**row, "precision": "bf16"})
    assert published.disagreeing([one, near, other]) == {}
    assert published.disagreeing([one, far, other]).keys() == {0, 1}


def test_plan_time_row_goes_to_each_rank_once() -> None:
    """Expect a token to meet 5.25 of eight ranks on average, with eight experts for each token."""
    links = Links(device_of(run_of(EXPERTS).cluster), shipped())
    sent = Exchange("ep", "all_to_all", 1 << 30, 8)
    near = Group(8, 1)
    waits = 3 * shipped().latency_us * 1e-6
    whole, once = (links.seconds(near, sent, once=once) - waits for once in (False, True))
    assert once / whole == pytest.approx(8 * (1 - (7 / 8) ** 8) / 8)


def test_plan_time_each_expert_costs_a_launch() -> None:
    low = EXPERTS + " precision=fp8_blockwise"
    few, many = (step_work(run_of(low.replace("ep16", f"ep{ep}"))).stages[0] for ep in (16, 8))
    assert many.calls.products - few.calls.products == 48 * 8 * 6
    assert many.calls.casts - few.calls.casts == 48 * 8 * 4
    fixed = " model.moe.expert_capacity_factor=1.0 model.moe.pad_expert_input_to_capacity=true"
    padded = step_work(run_of(low + fixed)).stages[0]
    assert (padded.calls.products, padded.padded.products) == (0, few.calls.products)


def test_plan_time_layout_takes_milliseconds() -> None:
    run = run_of(
        "model=gpt_462b parallel=tp8pp16 cluster=h100 cluster.nodes=768"
        f" {ON.replace('256', '3072')}"
    )
    step_time(run)
    start = process_time()
    for _ in range(5):
        step_time(run)
    assert process_time() - start < 5 * 0.02


def test_plan_time_plan_states_time_and_cost(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*DENSE.split(), "cluster.price_per_device_hour=2", "cluster.storage_gbps=10"]
    assert plan.run(words, as_json=True) == 0
    said = json.loads(capsys.readouterr().out)
    time = said["time"]
    whole = time["run"]
    assert whole["cost"] == pytest.approx(2 * whole["device_hours"])
    assert whole["device_hours"] == pytest.approx(64 * whole["seconds"] / 3600)
    assert time["save_s"] == pytest.approx(said["checkpoint"]["bytes"] / 10e9)
    assert plan.run(words) == 0
    text = capsys.readouterr().out
    assert "time of a step" in text
    assert "GPU hours, cost" in text
    assert plan.run(["cluster=cpu"]) == 0
    assert "time of a step: not known without" in capsys.readouterr().out


def test_plan_time_busiest_expert_rank_decides() -> None:
    even = run_of(EXPERTS)
    uneven = run_of(f"{EXPERTS} parallel.expert_imbalance=1.5")
    a = step_time(even)
    b = step_time(uneven)
    assert 1.1 * a.parts["ep"] < b.parts["ep"]
    assert a.parts["gemm"] < b.parts["gemm"] < 1.5 * a.parts["gemm"]
    assert a.parts["attention"] == b.parts["attention"]
    kept = [max(stage.peak for stage in stage_memories(run)) for run in (even, uneven)]
    assert kept[0] < kept[1]


def test_plan_time_exponentials_help_narrow_heads_most() -> None:
    b200, b300 = (
        device_of(run_of(f"model=llama3_8b cluster={name} data=mock").cluster)
        for name in ("b200", "b300")
    )
    alike = replace(b300, peaks=b200.peaks, power=b200.power)
    gains = []
    for width in (64, 128, 256):
        pairs = Pairs(flops=1e12, width=width, rows=4096)
        slow, fast = (
            Kernels(d, shipped(), "bf16", "bf16", "bf16", 2).attention(pairs) for d in (b200, alike)
        )
        gains.append(slow / fast)
    assert gains[0] > gains[1] > gains[2] > 1


def test_plan_time_run_includes_validation_and_saving() -> None:
    words = (
        f"{DENSE} cluster.storage_gbps=10 trainer.train_iters=100 trainer.eval_interval=50"
        " trainer.eval_iters=2"
    )
    run = run_of(f"{words} checkpoint.save_interval=30")
    whole = time_report(run, 10**12)["run"]
    assert whole["saving_s"] == pytest.approx(4 * 100)
    step = step_time(run).seconds
    assert 0.2 * 4 * step < whole["validation_s"] < 4 * step / 2
    assert whole["seconds"] == pytest.approx(
        whole["training_s"] + whole["validation_s"] + whole["saving_s"]
    )


def test_plan_time_omitted_values_come_from_release_recipe() -> None:
    row = next(
        r
        for r in published.rows()
        if r["model"] == "deepseek_v3" and r["gpu"] == "gb300" and "26.08" in r["source"]
    )
    new, old = (
        published.recipe_of(row | {"source": f"Megatron-Bridge {word}"})
        for word in ("26.08", "26.04.01")
    )
    assert new.graphs == {"whole"}
    assert new.attention_8_bit
    assert new.overlaps_experts
    assert (old.graphs, old.attention_8_bit) == (frozenset(), False)
    assert published.recipe_of(row | {"source": "torchtitan 2025"}) == published.Recipe()
    words = published.words(row | {"source": "Megatron-Bridge 26.04.01"})
    assert "parallel.recompute.modules=[mla_up_proj]" in words
    assert "precision.grad_reduce_in_fp32=false" in words


def test_plan_time_other_software_states_its_rows() -> None:
    """Require a source of every row; nearly all rows are configurations of mtrain."""
    rows = published.rows(published.OTHER)
    assert len(rows) >= 120
    assert all(row["source"] and published.described(published.software(row)) for row in rows)
    obstacles = [why for row in rows if (why := published.obstacle(row))]
    assert not obstacles
    # AutoModel empties its pipeline after each local batch, and others once a step
    kimi = next(row for row in rows if row["model"] == "kimi_k2")
    assert published.flushed(kimi, published.degrees(kimi)) == 8 * 256 // 8
    h100 = next(row for row in rows if "torchtitan" in row["source"] and row["gpu"] == "h100")
    assert "cluster.power_watts=500" in published.words(h100)


def test_plan_time_states_its_error_by_kind(capsys: pytest.CaptureFixture[str]) -> None:
    words = [DENSE.split(), EXPERTS.split(), ["model=llama3_8b", "cluster=h200", "data=mock"]]
    words[2] += ["cluster.devices_per_node=1", "parallel=single"]
    kinds = ("dense, 16 bits", "experts", "one device")
    for word, kind in zip(words, kinds, strict=True):
        assert plan.run(word, as_json=True) == 0
        bar = json.loads(capsys.readouterr().out)["time"]["error"]
        assert bar["kind"] == kind
        assert 0 < bar["median"] < bar["p95"] < 0.5
        assert f"{bar['rows']} " in bar["words"]
    assert plan.run([*words[0], "cluster.reached={speed:0.9}"], as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["time"]["error"] is None
