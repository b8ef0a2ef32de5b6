"""Parts of a step's time: products with weights, and the weights that are sent and updated."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from mtrain.api import load
from mtrain.config.resolve.resolution import Machine
from mtrain.config.schema.run import RunConfig
from mtrain.models.graph import Graph, Product
from mtrain.plan.count import flops_of_token
from mtrain.plan.rank import worst_stage
from mtrain.plan.time.device import device_of
from mtrain.plan.time.efficiencies import reached_by, shipped
from mtrain.plan.time.kernels import Kernels
from mtrain.plan.time.step import priced, step_time, step_work
from mtrain.plan.time.work import Linear, work_of
from mtrain.plan.tune.costs import Costs

BIG = Machine(cpu_cores=1 << 14, memory_bytes=1 << 60)
SMALL = (
    "model=llama32_1b cluster=h100x8 parallel=dp data=mock data.seq_length=4096"
    " trainer.global_batch_size=16"
)


@cache
def run_of(words: str) -> RunConfig:
    return load(words.split(), BIG, {}, to_run=False).run


def test_plan_time_frozen_weight_needs_no_gradient_gemm() -> None:
    kernels = Kernels(device_of(run_of(SMALL).cluster), shipped(), "bf16", "bf16", "bf16", 2)

    def seconds(factors: str, rows: int) -> float:
        g = Graph()
        g.add("x", products=[Product(rows, 4096, 4096)], factors=factors)  # type: ignore[arg-type]
        (one,) = work_of(g).backward
        return kernels.linear_back(one)

    assert seconds("activations", 4096) == pytest.approx(2 * seconds("frozen", 4096))
    assert seconds("weights", 4096) == seconds("activations", 4096), (
        "sums in fp32 hide behind the product"
    )
    assert seconds("weights", 64) > 1.2 * seconds("activations", 64), "of few rows they do not"


def test_plan_time_gradient_sums_move_their_format() -> None:
    """Show that with few rows a product that accumulates a gradient is bound by memory."""
    few = SMALL.replace("4096", "64")
    wide, half = (
        step_time(run_of(f"{few} precision.grad_reduce_in_fp32={on}")).parts["gemm"]
        for on in ("true", "false")
    )
    assert 1.05 < wide / half < 2
    wide, half = (
        step_time(run_of(f"{SMALL} precision.grad_reduce_in_fp32={on}")).parts["gemm"]
        for on in ("true", "false")
    )
    assert wide / half == pytest.approx(1, abs=0.01), "of many rows it does not"


@pytest.mark.parametrize(
    "words",
    [
        "recipe=qwen3_next/80b_a3b_h100x64",
        "recipe=nemotron_h/8b_h100x64",
        "recipe=llama3/70b_h100x8_lora",
        "recipe=llava/15_7b_h100x8_projector",
        "model=gemma2_9b parallel=tp1 cluster=h100x8 data=mock",
        "recipe=bert/large_h100x8",
    ],
)
def test_plan_time_updated_weights_equal_memory_count(words: str) -> None:
    run = run_of(words)
    states = worst_stage(run).states
    trained = sum(weight.numel for weight in states.weights if not weight.frozen)
    assert trained in {sum(stage) for stage in step_work(run).weights}


def test_plan_time_unlike_linear_attention_stages_differ() -> None:
    words = (
        "model=qwen3_next_80b_a3b cluster=h100x64 data=mock data.seq_length=4096"
        " trainer.global_batch_size=256"
    )
    words += " trainer.micro_batch_size=1"
    whole, cut = (
        step_work(run_of(f"{words} parallel={layout}")) for layout in ("pp8ep8", "pp8vpp6ep8")
    )
    attended = [sum(sum(stage.attends.values()) for stage in work.stages) for work in (whole, cut)]
    assert attended == [12, 12], "each fourth of 48 layers"


def test_plan_time_search_uses_calibration_as_plan() -> None:
    run = run_of(f"{SMALL} cluster.reached={{speed:2.0}}")
    assert Costs(run).reached == reached_by(run.cluster)
    assert Costs(run).seconds(run) <= step_time(run).seconds


def parts_of(words: str) -> dict[str, float]:
    return dict(step_time(run_of(words)).parts)


def test_plan_time_all_reduce_sends_twice_reduce_scatter() -> None:
    words = f"{SMALL} parallel.overlap_grad_reduce=false parallel.distributed_optimizer="
    sharded, whole = (parts_of(f"{words}{on}")["dp"] for on in ("true", "false"))
    assert whole / sharded == pytest.approx((2 * 4) / (2 + 4), rel=0.01), (
        "twice fp32, or bf16 and fp32"
    )


FSDP = (
    "model=llama32_1b cluster=h100 cluster.nodes=2 data=mock data.seq_length=4096"
    " trainer.global_batch_size=64"
)
FSDP += " trainer.micro_batch_size=1 parallel=dp parallel.distributed_optimizer=false"


def test_plan_time_hsdp_gathers_on_fast_links() -> None:
    words = (
        f"{FSDP.replace('nodes=2', 'nodes=16').replace('size=64', 'size=128')} parallel.fsdp=fsdp2"
        # in fp32 the sum of gradients over replicas would take what the gathers save
        " precision.grad_reduce_in_fp32=false"
    )
    one, many = (parts_of(f"{words} parallel.hsdp_replicas={n}") for n in (1, 16))
    assert many["dp"] < one["dp"]
    assert many["optimizer"] == pytest.approx(16 * one["optimizer"], rel=0.01)


def test_plan_time_unsharded_fsdp_weights_gather_once() -> None:
    words = f"{FSDP} parallel.fsdp=megatron parallel.fsdp_sharding="
    every, grads, state = (
        parts_of(f"{words}{what}")["dp"] for what in ("optim_grads_params", "optim_grads", "optim")
    )
    assert every > grads > state > 0


def test_plan_time_search_counts_offload_as_plan() -> None:
    words = (
        "model=llama3_8b cluster=h100x8 parallel=tp2 data=mock data.seq_length=4096"
        " trainer.global_batch_size=64"
    )
    here = run_of(words)
    there = run_of(f"{words} optim.cpu_offload=1.0")
    step = step_time(there)
    assert step_time(here).parts["offload"] == 0
    assert step.parts["offload"] > 10 * step.parts["optimizer"]
    assert step.seconds == pytest.approx(step_time(here).seconds + step.parts["offload"])
    assert Costs(there).seconds(there) == pytest.approx(step.seconds, rel=0.01)
    bare = there.cluster.model_copy(update={"host_link_gbps": None})
    assert step_time(there.model_copy(update={"cluster": bare})).missing == (
        "cluster.host_link_gbps",
    )


def test_plan_time_reference_adds_its_forwards() -> None:
    """Expect a third of the step for a reference, as a run of llama_tiny takes on a CPU, and three
    for kto: answers to other prompts are read by the policy and by the reference.
    """
    words = "recipe=dpo/llama31_8b_h100x8 objective.reference="
    none, frozen, other = (
        step_time(run_of(words + more)) for more in ("none", "frozen", "frozen objective=kto")
    )
    assert none.parts["reference"] == 0
    reference = frozen.parts["reference"]
    assert frozen.seconds == pytest.approx(none.seconds + reference)
    assert 0.3 < reference / none.seconds < 0.34
    assert other.parts["reference"] == pytest.approx(3 * reference)
    run = run_of(f"{words}frozen parallel=tp2pp2")
    assert Costs(run).seconds(run) == pytest.approx(step_time(run).seconds, rel=0.01)


def test_plan_time_frozen_weights_skip_host_update() -> None:
    run = run_of("recipe=llama3/70b_h100x8_lora optim.cpu_offload=1.0")
    step = step_time(run)
    assert step.parts["offload"] < 0.1 * step.seconds
    assert Costs(run).seconds(run) <= step.seconds / 0.995


def test_plan_time_adapter_mfu_uses_operations_of_page() -> None:
    run = run_of("recipe=llama3/70b_h100x8_lora")
    step = step_time(run)
    rate = step.tokens_per_second_per_device * flops_of_token(run)
    assert step.mfu == pytest.approx(rate / device_of(run.cluster).peaks["bf16"])
    assert step.mfu < 0.65


def test_plan_time_scan_takes_a_few_launches() -> None:
    words = (
        "model=nemotron_nano_9b_v2 cluster=h100x8 parallel=tp4 data=mock"
        " trainer.global_batch_size=8"
    )
    words += " trainer.micro_batch_size=1 data.seq_length="
    short, long = (
        step_work(run_of(f"{words}{length}")).stages[0].operations for length in (4096, 16384)
    )
    assert short == long


def test_plan_time_short_inner_dimension_costs_more() -> None:
    """Begin and end a tile in the same time on each of them."""

    def lost(cluster: str) -> float:
        device = device_of(run_of(SMALL.replace("h100x8", cluster)).cluster)
        kernels = Kernels(device, shipped(), "bf16", "bf16", "bf16", 2)
        short, long = (
            Linear(Product(1 << 15, 1 << 13, k), low=False, grouped=False)
            for k in (1 << 9, 1 << 13)
        )
        return 16 * kernels.linear(short) / kernels.linear(long)

    assert 1.1 < lost("h100") < lost("b200") - 0.1


def test_plan_time_measured_gemm_rate_is_used() -> None:
    """Use it on a device of any generation and power."""
    large = Linear(Product(1 << 15, 1 << 15, 1 << 15), low=False, grouped=False)
    for name in ("h100", "gb200", "gb300"):
        run = run_of(SMALL.replace("h100x8", f"{name} cluster.nodes=2"))
        cluster = run.cluster.model_copy(update={"reached": {"products": 0.6}})
        device = device_of(cluster)
        seconds = Kernels(device, reached_by(cluster), "bf16", "bf16", "bf16", 2).linear(large)
        assert large.product.flops / seconds / device.peaks["bf16"] == pytest.approx(0.6, rel=0.02)


def test_plan_time_transfer_follows_its_own_product() -> None:
    run = run_of(
        "model=llama32_1b cluster=h100x8 parallel=tp8 data=mock data.seq_length=4096"
        " trainer.global_batch_size=16"
    )
    work = step_work(run)
    device = device_of(run.cluster)
    shown, hidden = (
        priced(
            work, device, replace(shipped(), overlapped={**shipped().overlapped, "tp": share})
        ).parts
        for share in (0.0, 1.0)
    )
    assert 0 < shown["tp"] - hidden["tp"] < hidden["gemm"]
    assert hidden["tp"] > 0.1 * shown["tp"], (
        "on eight ranks, products are shorter than what they send"
    )


@pytest.mark.parametrize("words", ["", " model.mtp_num_layers=1 model.mtp_loss_scaling_factor=0.3"])
def test_plan_time_search_has_each_layer_separately(words: str) -> None:
    base = (
        "model=deepseek_v2_lite model.num_layers=8 model.moe.first_dense_layers=2 parallel.ep=2"
        " cluster=h100x8"
    )
    run = run_of(f"{base} data=mock data.seq_length=4096 trainer.global_batch_size=64{words}")
    layers = np.diff(Costs(run).pieces(run).layers, axis=0)
    assert len(layers) == 8
    assert np.allclose(layers[0], layers[1])
    assert np.allclose(layers[2], layers[7])
    assert not np.allclose(layers[1], layers[2]), "dense ones are not experts"


def test_plan_time_bf16_layers_take_bf16_time() -> None:
    words = (
        "model=llama3_8b cluster=h100x8 data=mock data.seq_length=4096 trainer.global_batch_size=64"
        " parallel.tp=1 parallel.pp=2 parallel.recompute.granularity=none"
        " trainer.micro_batch_size=1"
    )
    some = (
        "precision=fp8_blockwise precision.num_layers_at_start_in_bf16=16"
        " precision.num_layers_at_end_in_bf16="
    )
    low, less, none, wide = (
        # mtrain's own blockwise products are slower than those in bf16
        step_time(run_of(f"{words} {said}"), shipped()).parts["gemm"]
        for said in ("precision=fp8_blockwise", f"{some}1", f"{some}15", "precision=bf16")
    )
    assert low < less < none <= wide


def test_plan_time_without_rows_there_are_no_full_tiles() -> None:
    cpu = (
        "cluster=cpu data=mock cluster.peak_tflops.fp32=0.05 cluster.memory_gbps=8"
        " cluster.operation_us=10"
    )
    run = run_of(f"{cpu} parallel=single")
    kernels = Kernels(device_of(run.cluster), reached_by(run.cluster), "fp32", "fp32", "fp32", 4)

    def seconds(n: int) -> float:
        g = Graph()
        g.add("x", products=[Product(1024, n, 384)])
        (one,) = work_of(g).forward
        return kernels.linear(one)

    assert seconds(129) == pytest.approx(seconds(127) * 129 / 127, rel=0.01)
    few = (
        "model=mixtral_tiny model.moe.num_experts=64 data.seq_length=8 trainer.global_batch_size=1"
        " data=mock"
    )
    assert (
        step_time(run_of(f"{few} parallel=single cluster=h100 cluster.devices_per_node=1")).seconds
        > 0
    )
