"""Sums of the residual stream that the norm behind them makes: the same steps, one launch less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mtrain_kernels.norm import reference

from mtrain.config.schema.run import RunConfig
from mtrain.models.bert.config import BertConfig
from tests.support.covering import some
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run, train_steps, whole_tensors

SP = {"ranks": 2, "tp": 2, "sequence_parallel": True}
GEMMA = {"norm_placement": "pre_and_post", "layernorm_zero_centered_gamma": True}
LAYER_NORM = {"normalization": "LayerNorm", "add_bias_linear": True}
MEGATRON_BERT = {
    **{**LAYER_NORM, "family": "bert", "num_query_groups": None, "activation": "gelu_tanh"},
    **{"position_embedding_type": "learned_absolute", "tie_word_embeddings": True},
    "bert": BertConfig(mask_token_id=299),
}
SELECTIVE = {"recompute": {"granularity": "selective", "modules": ["layernorm"]}}
FULL = {"recompute": {"granularity": "full", "method": "uniform", "num_layers": 2}}
STEPS = 2
# Model, layout, and how many of the sums of a forward of its four layers norms make, on the first
# rank.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "one rank": ({}, {}, 8),
    "tp2 sequence parallel, post-norms as Gemma's": (GEMMA, SP, 8),
    "LayerNorm with biases behind the products, tp2": (LAYER_NORM, {"ranks": 2, "tp": 2}, 8),
    "pp2: the last sum of a stage has no norm behind it": ({}, {"ranks": 2, "pp": 2}, 3),
    "norms computed again": ({}, SELECTIVE, 1),
    "layers computed again": ({}, FULL, 4),
    "side by side": ({"parallel_residual": True}, {}, 4),
    "only post-norms, as OLMo 2: the last norm of all reads a sum": (
        {"norm_placement": "post"},
        {},
        1,
    ),
    "dp2 overlapped": (
        {},
        {
            "ranks": 2,
            "distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
        },
        8,
    ),
    "Megatron's BERT": (MEGATRON_BERT, {}, 8),
    "Megatron's BERT, pp2": (MEGATRON_BERT, {"ranks": 2, "pp": 2}, 3),
    "two predictions more": ({"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3}, {}, 10),
}


def _trained(
    run: RunConfig, folder: Path, steps: int
) -> tuple[list[tuple[float, float]], dict[str, Any], int]:
    def job() -> tuple[list[tuple[float, float]], int]:
        from mtrain.mcore.layers import residual

        made = [0]
        whole = residual.ResidualNorm.forward

        def counted(self: Any, x: Any, residual: Any = None) -> Any:
            made[0] += residual is not None
            return whole(self, x, residual)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(residual.ResidualNorm, "forward", counted)
            values = train_steps(run, steps, gradients_to=folder)
        return values, made[0]

    values, made = run_ranks(run.parallel.ranks, job)[0]
    return values, whole_tensors(folder / "step_00000000"), made


def _apart(found: Any, right: Any) -> float:
    """Return the largest relative difference of losses, gradient norms and gradients."""
    pairs = [
        (a, b) for x, y in zip(found[0], right[0], strict=True) for a, b in zip(x, y, strict=True)
    ]
    assert found[1].keys() == right[1].keys()
    worst = max(float((found[1][key] - g).norm() / g.norm()) for key, g in right[1].items())
    return max(worst, *(abs(a - b) / abs(b) for a, b in pairs))


@pytest.mark.sampled
@pytest.mark.parametrize("name", some(CASES, [[*CASES][1], "norms computed again", "side by side"]))
def test_residual_norm_fused_sum_trains_as_separate(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, parallel, sums = CASES[name]
    run = tiny_run(model=model, **parallel)
    right = _trained(run, tmp_path / "apart", STEPS)
    for family in ("gpt", "bert"):
        monkeypatch.setattr(f"mtrain.models.{family}.build.sums_apart", lambda run: None)
    found = _trained(run, tmp_path / "together", STEPS)
    assert right[2] == 0
    micro = STEPS * run.trainer.batch // (run.trainer.micro * run.parallel.dp)
    again = 2 if parallel is FULL else 1
    assert found[2] == micro * sums * again, "norms make another number of sums"
    assert _apart(found, right) < 1e-5


def test_residual_norm_lost_stream_gradient_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtrain.mcore.layers import residual

    right = _trained(tiny_run(), tmp_path / "apart", 1)
    monkeypatch.setattr("mtrain.models.gpt.build.sums_apart", lambda run: None)

    def lost(
        x: torch.Tensor, stream: torch.Tensor, weight: torch.Tensor, eps: float, **options: Any
    ) -> Any:
        normed, total = reference.rms_norm_residual(
            x, stream, weight, eps, zero_centered=options["zero_centered"]
        )
        return normed, total.detach() + 0 * x

    monkeypatch.setattr(residual, "rms_norm_residual", lost)
    assert _apart(_trained(tiny_run(), tmp_path / "lost", 1), right) > 0.1
