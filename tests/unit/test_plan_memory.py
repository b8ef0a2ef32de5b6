"""Huge sizes are refused at once and with numbers, and the reported memory is a lower bound."""

from __future__ import annotations

import pytest

from mtrain.api import load
from mtrain.config.resolve.resolution import Machine
from mtrain.config.schema.run import RunConfig
from mtrain.errors import ConfigError, Problem
from mtrain.plan.memory import activation_bytes
from mtrain.plan.rank import worst_stage
from tests.support.catalogue import validated
from tests.support.configs import LAPTOP
from tests.support.tables import tables

TABLES = tables("plan_memory")

LONG = "data=mock model.max_position_embeddings={0} data.seq_length={0}"


def errors(words: str) -> list[Problem]:
    return [p for p in validated(words.split()) if p.severity == "error"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("words", "code", "path"),
    TABLES["huge"],
)
def test_plan_memory_huge_size_is_refused_in_numbers(words: str, code: str, path: str) -> None:
    found = [p for p in errors(words) if p.code == code and p.path.startswith(path)]
    assert found, errors(words)
    assert any(letter.isdigit() for letter in found[0].rule)


@pytest.mark.parametrize(
    "words",
    [
        LONG.format(10**9),
        "trainer.global_batch_size=1000000000",
        f"{LONG.format(10**8)} cluster=h100x8 parallel=single",
        "trainer.global_batch_size=1000000000 cluster=h100x8 parallel=single",
    ],
)
def test_plan_memory_fix_makes_plan_fit(words: str) -> None:
    (problem,) = [p for p in errors(words) if p.code == "MT147"]
    assert problem.fix.startswith(f"{problem.path}=")
    assert not errors(f"{words} {problem.fix}".replace(f"{problem.path}={problem.value} ", "", 1))


def test_plan_memory_sample_is_judged_by_named_machine() -> None:
    """Accept the same run on a larger machine; on a cluster, only a device's memory counts."""
    words = LONG.format(4_000_000).split()
    with pytest.raises(ConfigError, match="MT147"):
        load(words, LAPTOP, {})
    load([*words, "parallel=single"], Machine(64, 1 << 42), {})
    load([*words, "cluster=h100x8", "parallel=cp8", "trainer.global_batch_size=8"], LAPTOP, {})


def test_plan_memory_model_for_elsewhere_warns_without_samples() -> None:
    found = validated(
        [
            "model=llama31_405b",
            "parallel=tp8pp8sp",
            "parallel.layers_per_stage=null",
            "model.num_layers=128",
        ]
    )
    assert {p.code for p in found if p.severity == "error"} == set()
    assert "MT140" in {p.code for p in found}


def test_plan_memory_sharding_and_recomputation_keep_less() -> None:
    def kept(*words: str) -> int:
        return activation_bytes(load(["model.num_layers=8", *words], LAPTOP, {}).run)

    whole = kept("parallel=single")
    assert kept("parallel=cp2") < whole
    assert kept("parallel=pp2", "trainer.micro_batch_size=8") < whole
    assert kept("parallel=tp2sp") < kept("parallel=tp2") < whole
    assert kept("parallel=single", "parallel.recompute.granularity=full") < whole / 4
    assert kept("parallel=single", "precision=bf16") < whole
    gradients = 4096 * 256 * 4 + 8 * 256 * 256 * 4 + 8 * 256 * 4
    logits = 8 * 256 * (4096 * 4 + 256 * 4 + 1 + 8 + 4)
    assert kept("parallel=single", "kernels.loss=megatron") - whole == logits - gradients


def test_plan_memory_concurrent_logits_follow_device_memory() -> None:
    def run(cluster: str, *words: str) -> RunConfig:
        return load(
            ["model=llama3_8b", "parallel=single", f"cluster={cluster}", *words], LAPTOP, {}
        ).run

    assert [run(name).kernels.loss_logits_mib for name in ("h100", "a100_40g", "h200", "cpu")] == [
        512,
        256,
        1024,
        None,
    ]
    assert run("h100", "kernels.loss=megatron").kernels.loss_logits_mib is None

    def work(mib: int, fuses: str) -> int:
        keys = f"kernels.loss_logits_mib={mib}", f"kernels.gradient_accumulation_fusion={fuses}"
        return worst_stage(run("h100", *keys)).parts["working"]

    def tokens(mib: int) -> int:
        return min(mib * 2**20 // 2 // 128256 // 64 * 64, 8192)

    # The gradient of the weight is added to its buffer; if it is not, more than three parts of it
    # are added up in fp32. (With fewer logits, layers need more memory than the loss.)
    for few, fuses, summed in ((1024, "true", 0), (256, "false", 128256 * 4096 * 4)):
        more = (tokens(2048) - tokens(few)) * (128256 * 2 + 4096 * 4)
        assert work(2048, fuses) - work(few, fuses) == more - summed


def test_plan_memory_deeper_decoder_is_planned() -> None:
    run = load(
        ["recipe=t5/tiny_cpu", "model.t5.decoder_layers=6", "parallel=single"],
        Machine(64, 1 << 42),
        {},
        to_run=False,
    ).run
    assert worst_stage(run).peak > 0


def test_plan_memory_experts_quantise_jointly_when_freed() -> None:
    words = (
        "model=mixtral_8x7b cluster=h100x8 data=mock data.seq_length=2048 precision=fp8_blockwise"
        " parallel=single "
    )
    words += "parallel.fsdp=fsdp2 parallel.distributed_optimizer=false kernels=triton"
    run = load(words.split(), Machine(64, 1 << 42), {}, to_run=False).run
    fc1 = 8 * 2 * run.model.moe.ffn_hidden_size * run.model.hidden_size  # type: ignore[union-attr]
    assert worst_stage(run).parts["low_precision"] == 2 * fc1


def _graphs(impl: str, *more: str) -> int:
    shape = "model=llama32_1b data=mock data.seq_length=4096 trainer.micro_batch_size=1"
    words = f"{shape} cluster=h200 cluster.devices_per_node=1 parallel=single"
    run = load([*words.split(), f"trainer.cuda_graph_impl={impl}", *more], LAPTOP, {}).run
    stage = worst_stage(run)
    assert stage.peak == sum(stage.parts.values())
    return stage.parts["graphs"]


def test_plan_memory_graphs_have_pools_of_their_own() -> None:
    assert _graphs("none") == 0
    whole = _graphs("full_iteration", "trainer.eval_iters=1")
    steps = _graphs("full_iteration", "trainer.eval_iters=0")
    # An evaluation has a graph, and so a pool, of its own; a step has copies of its samples.
    assert whole > 2 * steps > 0
    # Layers and the loss between them share no memory.
    assert _graphs("local") > 0
