"""Training with products in 8 bits without TransformerEngine: near bf16, and the same in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mtrain_kernels.fp8_linear import op

from mtrain.cli.setup import load
from mtrain.config.hybrid import HybridConfig
from mtrain.config.rules import apply
from mtrain.config.run import RunConfig
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run, train_steps, whole_tensors

WIDE = {"hidden_size": 256, "ffn_hidden_size": 256, "num_layers": 2, "num_query_groups": 8, "vocab_size": 128}
SP = {"ranks": 2, "tp": 2, "sequence_parallel": True}
BOUND = 2.5e-3
"""Relative error of the loss that DeepSeek-V3 stayed below against bf16 (arXiv:2412.19437, section 3.3)."""


def fp8(run: RunConfig, recipe: str, kind: str = "hybrid") -> RunConfig:
    """The run with linear layers in 8 bits."""
    return apply(run, {"precision.fp8": kind, "precision.fp8_recipe": recipe})


def _trained(run: RunConfig, folder: Path, steps: int) -> tuple[list[tuple[float, float]], dict[str, Any]]:
    values = run_ranks(run.parallel.ranks, lambda: train_steps(run, steps, gradients_to=folder))[0]
    return values, whole_tensors(folder / "step_00000000")


def _worst(found: Any, right: Any) -> float:
    assert found[1].keys() == right[1].keys()
    return max(float((found[1][key] - g).norm() / g.norm()) for key, g in right[1].items())


MIXERS = {
    **WIDE,
    "family": "hybrid",
    "num_layers": 3,
    "position_embedding_type": "none",
    "hybrid": HybridConfig(pattern="M-*", num_heads=32, head_dim=8, state_dim=16, num_groups=2, chunk_size=8),
}


@pytest.mark.parametrize(
    ("recipe", "model"),
    [
        ("tensorwise", WIDE),
        pytest.param("blockwise", WIDE, marks=pytest.mark.full),
        pytest.param("tensorwise", MIXERS, marks=pytest.mark.full),
    ],
)
def test_ranks_that_share_scales_train_as_one_does(
    recipe: str, model: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32 beside the products, so that nothing but scales can differ; rules ask for bf16."""
    runs = [fp8(tiny_run(model=model, **layout), recipe) for layout in ({}, SP)]
    alone, two = (_trained(run, tmp_path / str(i), 2) for i, run in enumerate(runs))
    plain = _trained(tiny_run(model=model), tmp_path / "plain", 2)
    assert _worst(alone, plain) > 1e-2, "nothing was in 8 bits"
    assert _worst(two, alone) < 2e-3, "scales differ"
    assert two[0][1][0] == pytest.approx(alone[0][1][0], rel=1e-4)
    if recipe == "tensorwise":
        monkeypatch.setattr("mtrain.mcore.linear.greatest", lambda groups: None)
        apart = _trained(runs[1], tmp_path / "apart", 2)
        assert _worst(apart, alone) > 5e-3, "scales of parts would pass, too"


def test_first_and_last_layers_may_stay_and_the_others_are_in_8_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = apply(fp8(tiny_run(), "tensorwise"), {"precision.num_layers_at_start_in_bf16": 1})
    made: list[int] = []
    whole = op.fp8_linear

    def counted(x: torch.Tensor, *args: Any, **given: Any) -> torch.Tensor:
        made.append(1)
        return whole(x, *args, **given)

    def job() -> int:
        from mtrain.mcore import linear

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(linear, "fp8_linear", counted)
            train_steps(run, 1)
        return len(made)

    micro = run.trainer.batch // run.trainer.micro
    assert run_ranks(1, job)[0] == micro * 4 * (run.model.num_layers - 1)


LATENT = "model.moe=null model.mtp_num_layers=null model.mtp_loss_scaling_factor=null"


@pytest.mark.parametrize("words", [
    "model=llama_tiny model.mtp_num_layers=1",
    f"model=deepseek_tiny {LATENT}",
    "model=bert_tiny",
    "model=llava_tiny",
    pytest.param("model=nemotron_h_tiny", marks=pytest.mark.full),
])  # fmt: skip
def test_no_linear_layer_is_left_out_but_the_one_that_makes_logits(words: str) -> None:
    ends = ["precision.num_layers_at_start_in_bf16=0", "precision.num_layers_at_end_in_bf16=0"]
    run = load([*words.split(), "parallel=single", "precision=fp8_tensorwise", *ends]).run

    def job() -> set[str]:
        from mtrain.build.model import build_model
        from mtrain.mcore.layers import DuplicatedLinear
        from mtrain.mcore.linear import ColumnLinear, RowLinear
        from mtrain.world.init import joined

        with joined(run) as world:
            (chunk,) = build_model(run, world, wrap=False)
            kinds = ColumnLinear, RowLinear, DuplicatedLinear
            ours = [(name, module) for name, module in chunk.named_modules() if isinstance(module, kinds)]
            assert len(ours) > 8
            return {name.removeprefix("module.") for name, layer in ours if layer.fp8 is None}

    assert run_ranks(1, job)[0] == {"output_layer"}


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_two_hundred_steps_stay_as_near_to_bf16_as_is_published(recipe: str, tmp_path: Path) -> None:
    steps = {"train_iters": 200, "global_batch_size": 4, "micro_batch_size": 4, "eval_iters": 0}
    model = {**WIDE, "hidden_size": 128, "ffn_hidden_size": 128}
    run = tiny_run(dtype="bf16", model=model, trainer=steps)
    kind = "hybrid" if recipe == "tensorwise" else "e4m3"
    runs = {"bf16": run, "fp8": fp8(run, recipe, kind)}
    losses = {
        name: [loss for loss, _ in run_ranks(1, lambda one=one: train_steps(one, 200))[0]]
        for name, one in runs.items()
    }
    mean = {name: torch.tensor(values).unfold(0, 20, 20).mean(1) for name, values in losses.items()}
    apart = ((mean["fp8"] - mean["bf16"]) / mean["bf16"]).abs()
    assert losses["fp8"] != losses["bf16"]
    assert mean["bf16"][-1] < mean["bf16"][0] - 0.02, "nothing was learnt"
    assert float(apart.max()) < BOUND, apart.tolist()
