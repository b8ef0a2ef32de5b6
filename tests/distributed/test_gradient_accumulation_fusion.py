"""Weight gradients that products add to the buffers of data parallelism: the same steps, and no
rounding between.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.config.rules import apply
from mtrain.config.schema.moe import MoEConfig
from mtrain.config.schema.run import RunConfig
from tests.support.captured_steps import recorded
from tests.support.covering import some
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run, train_steps, whole_tensors

FUSED = {"kernels.gradient_accumulation_fusion": True}
SP = {"ranks": 2, "tp": 2, "sequence_parallel": True}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one rank": ({}, {}),
    "tp2 sequence parallel, tied": ({"tie_word_embeddings": True}, SP),
    "tp2, two predictions more": (
        {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3},
        {"ranks": 2, "tp": 2},
    ),
    "pp2, tied": ({"tie_word_embeddings": True}, {"ranks": 2, "pp": 2}),
    "experts": ({"moe": MoEConfig(num_experts=4, ffn_hidden_size=32)}, {}),
    "dp2 overlapped": (
        {},
        {"ranks": 2, "distributed_optimizer": True, "overlap_grad_reduce": True},
    ),
}


def _trained(
    run: RunConfig, folder: Path, steps: int = 2
) -> tuple[list[tuple[float, float]], dict[str, Any]]:
    values = run_ranks(run.parallel.ranks, lambda: train_steps(run, steps, gradients_to=folder))[0]
    return values, whole_tensors(folder / "step_00000000")


def _errors(found: Any, right: Any) -> dict[str, float]:
    assert found[1].keys() == right[1].keys()
    return {key: float((found[1][key] - g).norm() / g.norm()) for key, g in right[1].items()}


@pytest.mark.parametrize("name", some(CASES, ["tp2 sequence parallel, tied", "experts"]))
def test_gradient_accumulation_fused_equals_separate(name: str, tmp_path: Path) -> None:
    model, parallel = CASES[name]
    run = tiny_run(model={"num_layers": 2, **model}, **parallel)
    right = _trained(run, tmp_path / "apart")
    found = _trained(apply(run, FUSED), tmp_path / "fused")
    assert max(_errors(found, right).values()) < 1e-5
    for (loss, norm), (wanted, wanted_norm) in zip(found[0], right[0], strict=True):
        assert loss == pytest.approx(wanted, rel=1e-6)
        assert norm == pytest.approx(wanted_norm, rel=1e-5)


@pytest.mark.full
def test_gradient_accumulation_half_precision_is_not_rounded(tmp_path: Path) -> None:
    run = tiny_run(dtype="bf16", **SP)
    right = _trained(run, tmp_path / "apart", 1)
    found = _trained(apply(run, FUSED), tmp_path / "fused", 1)
    errors = _errors(found, right)
    weights = [
        key
        for key in errors
        if key.endswith(("linear_proj.weight", "linear_fc2.weight", "output_layer.weight"))
    ]
    assert len(weights) == 3
    assert all(0 < errors[key] < 2e-2 for key in weights), {key: errors[key] for key in weights}
    key = "model/output_layer.weight"

    def whole(gradient: torch.Tensor) -> float:
        return float((gradient - gradient.bfloat16().float()).norm() / gradient.norm())

    # of one micro-batch of 64 tokens: a sum that was rounded once is exactly a number of bf16, one
    # that was not has more digits
    alone = tiny_run(dtype="bf16", trainer={"global_batch_size": 2, "micro_batch_size": 2})
    apart, fused = (
        _trained(r, tmp_path / n, 1)[1][key] for n, r in (("a", alone), ("b", apply(alone, FUSED)))
    )
    assert whole(apart) == 0
    assert whole(fused) > 1e-4


@pytest.mark.parametrize("fp8", [False, True])
def test_gradient_accumulation_down_projection_adds_to_buffer(fp8: bool) -> None:
    def job() -> list[bool]:
        from mtrain_kernels.fp8_linear.op import Recipe

        from mtrain.config.engine.kernels import BY_TORCH
        from mtrain.mcore.layers.portable import DuplicatedLinear
        from tests.support import tiny

        config = tiny.config()
        config.qk_pos_emb_head_dim = 4
        config.kv_lora_rank = 12
        tiny.start_world()
        layer = DuplicatedLinear(
            32, 16, config=config, init_method=lambda weight: torch.nn.init.normal_(weight)
        )
        layer.impl = "reference" if fp8 else BY_TORCH
        layer.fp8 = Recipe("blockwise") if fp8 else None
        x = torch.randn(8, 32)
        layer(x)[0].sum().backward()
        weight: Any = layer.weight
        wanted = weight.grad
        weight.grad = None
        weight.main_grad = torch.ones(16, 32)
        weight.grad_added_to_main_grad = False
        config.gradient_accumulation_fusion = True
        layer(x)[0].sum().backward()
        return [
            torch.allclose(weight.main_grad - 1, wanted, atol=1e-5),
            weight.grad_added_to_main_grad,
        ]

    assert run_ranks(1, job) == [[True, True]]


PADDED = "model.moe.pad_alltoall=true"
PASSES: dict[str, set[str]] = {
    "model=llama_tiny": set(),
    "model=llama_tiny kernels=auto": set(),
    "model=llama_tiny model.tie_word_embeddings=true": set(),
    "model=llama_tiny precision=fp8_tensorwise": set(),
    "model=llama_tiny precision=fp8_blockwise parallel=auto cluster.devices_per_node=2"
    " parallel.tp=2": set(),
    f"model=mixtral_tiny {PADDED}": set(),
    f"model=mixtral_tiny {PADDED} precision=fp8_blockwise": set(),
    "model=nemotron_h_tiny": {"conv1d"},
    f"model=qwen3_next_tiny {PADDED}": {"conv1d", "gate_weight"},
    # The loss of a further prediction has a factor that is known only in the backward.
    f"model=deepseek_tiny {PADDED} precision=fp8_blockwise": {"output_layer"},
    # The seed: layers that leave their gradients to data parallelism.
    "model=llama_tiny kernels.gradient_accumulation_fusion=false": {
        "linear_qkv",
        "linear_proj",
        "linear_fc1",
        "linear_fc2",
        "output_layer",
        "word_embeddings",
    },
}
"""Words of a run on a GPU -> the kinds of matrices whose gradients have a pass of their own: small
ones, and what a comment explains.
"""


@pytest.mark.full
def test_gradient_accumulation_steps_have_no_separate_pass() -> None:
    for words, found in recorded({words: words.split() for words in PASSES}).items():
        assert found["refused"] == []
        kinds = {
            each.split(":")[0].removesuffix(".weight").split(".")[-1] for each in found["passes"]
        }
        assert kinds == PASSES[words], words
        assert found["products"] or "fusion=false" in words
