"""Norms and SwiGLU that quantise for linear layers in FP8: no bit of a step depends on it, and less
is kept.
"""

from __future__ import annotations

from typing import Any

import pytest

from mtrain.api import load
from mtrain.config.engine.kernels import operands_apart
from mtrain.config.resolve.resolution import Machine
from mtrain.models.rank import Rank
from mtrain.plan.rank import stage_memories
from tests.support import operands
from tests.support.commands import STEPS_ONLY
from tests.support.covering import some
from tests.support.forked import run_ranks

INTERPRETED = Machine(cpu_cores=64, memory_bytes=1 << 40, triton=True, triton_interpreted=True)
SMALL = (
    "data=mock",
    "data.seq_length=256",
    "trainer.train_iters=2",
    "trainer.global_batch_size=1",
    "trainer.micro_batch_size=1",
    *STEPS_ONLY,
    "kernels=triton",
    "model.num_layers=1",
    "model.hidden_size=128",
    "model.ffn_hidden_size=128",
    "model.vocab_size=128",
    "model.num_attention_heads=4",
    "model.num_query_groups=2",
    "precision.num_layers_at_start_in_bf16=0",
    "precision.num_layers_at_end_in_bf16=0",
)
RUNS = {
    "blocks, tp2 sequence parallel": ("precision=fp8_blockwise", "parallel=tp2sp"),
    "tensor, tp2 sequence parallel": ("precision=fp8_tensorwise", "parallel=tp2sp"),
    "tensor, tp2 of odd parts": (
        "precision=fp8_tensorwise",
        "parallel=tp2sp",
        "data.seq_length=96",
    ),
    "blocks, tp2 of parts of blocks": (
        "precision=fp8_blockwise",
        "parallel=tp2sp",
        "data.seq_length=64",
    ),
    "tensor, tp2": ("precision=fp8_tensorwise", "parallel=tp2"),
    "tensor, cp2": ("precision=fp8_tensorwise", "parallel=cp2", "data.seq_length=64"),
    "layer norm with biases": (
        "precision=fp8_blockwise",
        "parallel=single",
        "model.normalization=LayerNorm",
    ),
    "an MLP is computed again": (
        "precision=fp8_blockwise",
        "parallel=single",
        "parallel.recompute.granularity=selective",
        "parallel.recompute.modules=[mlp]",
    ),
    "all is computed again": (
        "precision=fp8_blockwise",
        "parallel=single",
        "parallel.recompute.granularity=full",
    ),
    "norms are computed again": (
        "precision=fp8_blockwise",
        "parallel=single",
        "parallel.recompute.granularity=selective",
        "parallel.recompute.modules=[layernorm]",
    ),
}
LATENT = (
    "model=deepseek_tiny",
    "model.moe=null",
    "model.mtp_num_layers=null",
    "model.mtp_loss_scaling_factor=null",
    "model.num_query_groups=null",
    "data.seq_length=128",
)
NO_QUERIES = (
    "model.mla={q_lora_rank:null,kv_lora_rank:32,qk_head_dim:32,qk_pos_emb_head_dim:16,"
    "v_head_dim:32}"
)
HYBRID = (
    "model=nemotron_h_tiny",
    "model.num_layers=4",
    "model.hybrid.num_heads=32",
    "model.hybrid.num_groups=2",
    "model.hybrid.head_dim=16",
    "model.hybrid.state_dim=16",
    "data.seq_length=64",
    "kernels.attention=reference",
)
PLAIN = "model.hybrid.pattern=MM-*"
DELTA = (
    "model.linear_attention={num_key_heads:4,num_value_heads:16,key_head_dim:16,value_head_dim:16}"
)
SHARDED = (
    "parallel=dp",
    "parallel.ranks=2",
    "trainer.global_batch_size=2",
    "parallel.distributed_optimizer=false",
)
RUNS |= {
    "MLA, tensor, tp2 sequence parallel": ("precision=fp8_tensorwise", "parallel=tp2sp", *LATENT),
    "MLA, blocks, tp2 of parts of blocks": ("precision=fp8_blockwise", "parallel=tp2sp", *LATENT),
    "MLA is computed again": (
        "precision=fp8_blockwise",
        "parallel=single",
        *LATENT,
        "parallel.recompute.granularity=selective",
        "parallel.recompute.modules=[mla_up_proj]",
    ),
    "MLA without latent queries, packed": (
        "precision=fp8_tensorwise",
        "parallel=single",
        *LATENT,
        NO_QUERIES,
        "data.packed=true",
    ),
    "hybrid, tensor, tp2 sequence parallel": (
        "precision=fp8_tensorwise",
        "parallel=tp2sp",
        *HYBRID,
        "model.hybrid.pattern=MG-*",
        DELTA,
    ),
    "hybrid, blocks, all is computed again": (
        "precision=fp8_blockwise",
        "parallel=single",
        "parallel.recompute.granularity=full",
        *HYBRID,
        PLAIN,
    ),
    "built as a hybrid": ("precision=fp8_blockwise", "parallel=single", "model.builder=hybrid"),
    "FSDP2": ("precision=fp8_tensorwise", *SHARDED, "parallel.fsdp=fsdp2"),
    "FSDP2, all is computed again": (
        "precision=fp8_blockwise",
        *SHARDED,
        "parallel.fsdp=fsdp2",
        "parallel.recompute.granularity=full",
    ),
    "FSDP of megatron-core, MLA": (
        "precision=fp8_tensorwise",
        *SHARDED,
        "parallel.fsdp=megatron",
        *LATENT,
    ),
    "FSDP of megatron-core, hybrid": (
        "precision=fp8_blockwise",
        *SHARDED,
        "parallel.fsdp=megatron",
        *HYBRID,
        PLAIN,
    ),
}
HANDED = dict.fromkeys(RUNS, 2)
HANDED |= {name: 4 for name in RUNS if name.startswith("hybrid")}
HANDED |= {name: 5 for name in RUNS if "MLA" in name}
HANDED |= {
    "norms are computed again": 0,
    "blocks, tp2 of parts of blocks": 0,
    "FSDP of megatron-core, hybrid": 4,
    "MLA, blocks, tp2 of parts of blocks": 2,
    "MLA without latent queries, packed": 4,
}
"""Inputs of linear layers that norms quantise.

Where a block of tokens would be of two ranks, an input that is gathered is quantised behind that,
as before.
"""
SCALES = 4 / 128
"""Bytes of scales for each of an operand, which the plan leaves out."""


def words(name: str) -> list[str]:
    said = {word.partition("=")[0] for word in RUNS[name]}
    return [*(word for word in SMALL if word.partition("=")[0] not in said), *RUNS[name]]


def _compared(name: str, *, fault: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    found = operands.both({name: words(name)}, fault=fault)[name]
    return found["together"], found["apart"]


@pytest.mark.parametrize("name", some(RUNS, []))
def test_fp8_operands_keep_bits_and_planned_memory(name: str) -> None:
    ours, apart = _compared(name)
    assert ours["steps"] == apart["steps"]
    handed = HANDED[name]
    quantised = "quantize_tensorwise" if "fp8_tensorwise" in RUNS[name][0] else "quantize_blocks"
    assert ours["calls"][quantised] == apart["calls"][quantised] - handed
    saved = apart["keeps"] - ours["keeps"]
    assert saved == pytest.approx(apart["planned"] - ours["planned"], rel=2 * SCALES, abs=64)
    assert (saved > 0) == (handed > 0 and "all is computed again" not in name)


@pytest.mark.full
def test_fp8_operands_norm_with_partial_scale_is_found() -> None:
    ours, apart = _compared("MLA, tensor, tp2 sequence parallel", fault=True)
    assert ours["steps"] != apart["steps"]
    assert ours["steps"] == [pytest.approx(right, rel=0.05) for right in apart["steps"]], (
        "but it is near"
    )


FED = {
    "MLA, tensor, tp2 sequence parallel": {
        **{
            "0.input_layernorm": 2,
            "0.self_attention.q_layernorm": 1,
            "0.self_attention.kv_layernorm": 1,
        },
        "0.pre_mlp_layernorm": 1,
    },
    "hybrid, tensor, tp2 sequence parallel": {
        **{"0.norm": 1, "1.input_layernorm": 1, "2.pre_mlp_layernorm": 1, "3.input_layernorm": 1},
    },
}
"""Number of linear layers whose input a norm of a layer makes."""


@pytest.mark.parametrize("name", FED)
def test_fp8_operands_norms_quantise_for_all_readers(name: str) -> None:
    run = load(
        ["parallel=single", *(w for w in words(name) if not w.startswith("parallel="))],
        INTERPRETED,
        {},
    ).run

    def job() -> dict[str, int]:
        from mtrain.assembly.model import build_model
        from mtrain.world.init import joined

        with joined(run) as world:
            (chunk,) = build_model(run, world, wrap=False)
            fed = {
                norm: module.feeds
                for norm, module in chunk.named_modules()
                if getattr(module, "feeds", None)
            }
            return {norm.partition("layers.")[2]: feeds.readers for norm, feeds in fed.items()}

    assert run_ranks(1, job)[0] == FED[name]


TRAINED = (
    "trainer.train_iters=10",
    "data.seq_length=32",
    "model.hidden_size=64",
    "model.ffn_hidden_size=64",
)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp8_tensorwise", "fp8_blockwise"])
def test_fp8_operands_triton_stays_near_emulation(precision: str) -> None:
    from tests.support import interpreted

    changed = {word.partition("=")[0] for word in TRAINED} | {"kernels"}
    base = [word for word in SMALL if word.partition("=")[0] not in changed]
    base += [*TRAINED, "parallel=tp2sp", f"precision={precision}"]
    values = interpreted.trained(
        {k: [*base, f"kernels={k}"] for k in ("reference", "triton")}, timeout_s=500
    )
    ours = values["triton"]
    right = values["reference"]
    assert len(ours) == len(right) == 20
    assert ours[:10] == pytest.approx(right[:10], rel=2e-3)
    assert ours != right, "not one bit differs, so Triton did nothing"


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ((), None),
        (("precision=bf16",), "kernels.linear"),
        (("kernels.norm=reference",), "kernels.norm"),
        ((*SHARDED, "parallel.fsdp=fsdp2"), None),
        ((*HYBRID, PLAIN), None),
    ],
)
def test_fp8_operands_chosen_quantiser_is_reported(more: tuple[str, ...], why: str | None) -> None:
    said = {word.partition("=")[0] for word in more}
    given = [
        "parallel=single",
        "precision=fp8_tensorwise",
        *(w for w in SMALL if w.partition("=")[0] not in said),
    ]
    given = [word for word in given if word.partition("=")[0] not in said]
    run = load([*given, *more], INTERPRETED, {}).run
    found = operands_apart(run)
    assert (found is None) if why is None else (why in (found or ""))
    assert Rank.of(run).quantizes == (why is None)


WIDE = 256 * 128
"""Tokens of a micro-batch times the hidden size."""


@pytest.mark.parametrize(("word", "kept"), [("triton", 0), ("reference", WIDE)])
def test_fp8_operands_plan_counts_gathered_operands(word: str, kept: int) -> None:
    given = ["parallel=tp2sp", "precision=fp8_tensorwise", *SMALL, f"kernels.norm={word}"]
    run = load(given, INTERPRETED, {}).run
    ops = [op for chunk in stage_memories(run)[0].chunks for graph in chunk for op in graph.ops]
    for name in ("self_attention.linear_qkv", "mlp.linear_fc1"):
        (layer,) = (op for op in ops if op.name == name)
        assert sum(tensor.bytes for tensor in layer.keeps) == kept
        (gather,) = layer.exchanges
        assert gather.bytes == 2 * WIDE * (1 if kept else 3 / 4)
