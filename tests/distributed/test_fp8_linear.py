"""Training with products in 8 bits without TransformerEngine: near bf16, and the same in every
layout.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from mtrain_kernels.fp8_linear import op

from mtrain.api import load
from mtrain.config.rules import apply
from mtrain.config.schema.run import RunConfig
from mtrain.launching import prove
from tests.support.cases import cases_of
from tests.support.covering import some
from tests.support.forked import import_engine, run_ranks
from tests.support.runs import tiny_run, train_steps, whole_tensors

WIDE = {
    "hidden_size": 256,
    "ffn_hidden_size": 256,
    "num_layers": 2,
    "num_query_groups": 8,
    "vocab_size": 128,
}
LATENT = "model.moe=null model.mtp_num_layers=null model.mtp_loss_scaling_factor=null"
BOUND = 2.5e-3
"""Relative error of the loss that DeepSeek-V3 stayed below against bf16 (arXiv:2412.19437, section
3.3).
"""


def fp8(run: RunConfig, recipe: str, kind: str = "hybrid") -> RunConfig:
    """Return the run with linear layers in 8 bits."""
    return apply(run, {"precision.fp8": kind, "precision.fp8_recipe": recipe})


def counted(
    run: RunConfig, module: ModuleType, name: str, gone: str | None
) -> tuple[list[tuple[float, float]], int]:
    """Train two steps, as a job for `run_ranks`; return them, and how often a function of `module`
    quantised a weight in them.

    `gone` is a context of `mtrain.train.loop.step` without which they are made.
    """
    made: list[bool] = []
    whole = getattr(module, name)

    def seen(*args: Any, **given: Any) -> Any:
        made.append(given.get("weight", name == "quantize_weights"))
        return whole(*args, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, seen)
        if gone:
            patch.setattr(f"mtrain.train.loop.step.{gone}", nullcontext)
        return train_steps(run, 2), sum(made)


def assert_stays_near_bf16(model: dict[str, Any], recipe: str) -> None:
    """Train two hundred steps in 8 bits: the mean loss of every twenty must be within `BOUND` of
    that in bf16.
    """
    steps = {"train_iters": 200, "global_batch_size": 4, "micro_batch_size": 4, "eval_iters": 0}
    run = tiny_run(dtype="bf16", model=model, trainer=steps)
    runs = run, fp8(run, recipe, "hybrid" if recipe == "tensorwise" else "e4m3")
    trained = (run_ranks(1, partial(train_steps, one, 200))[0] for one in runs)
    losses = torch.tensor([[loss for loss, _ in values] for values in trained])
    right, mean = losses.unfold(1, 20, 20).mean(2)
    assert not torch.equal(*losses)
    assert right[-1] < right[0] - 0.02, "nothing was learnt"
    apart = ((mean - right) / right).abs()
    assert float(apart.max()) < BOUND, apart.tolist()


def _trained(
    run: RunConfig, folder: Path, steps: int
) -> tuple[list[tuple[float, float]], dict[str, Any]]:
    values = run_ranks(run.parallel.ranks, lambda: train_steps(run, steps, gradients_to=folder))[0]
    return values, whole_tensors(folder / "step_00000000")


def _worst(found: Any, right: Any) -> float:
    assert found[1].keys() == right[1].keys()
    return max(float((found[1][key] - g).norm() / g.norm()) for key, g in right[1].items())


PROVEN = cases_of("fp8_linear")


def _proven(words: str) -> list[prove.Row]:
    argv = [*words.split(), "kernels=reference"]
    full = load(argv).run
    assert prove.formats(full) == ["fp32", "bf16", "fp8"]
    return prove.compared(prove.comparable(full, argv, 2, "fp8"))


@pytest.mark.full
@pytest.mark.parametrize("name", some(PROVEN, ["tensorwise, tp2 sequence parallel"]))
def test_fp8_linear_layout_is_proven(name: str) -> None:
    rows = _proven(PROVEN[name])
    assert all(row.equal for row in rows), prove.table(rows)


@pytest.mark.full
def test_fp8_linear_partial_scale_is_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    import_engine()
    monkeypatch.setattr("mtrain.mcore.layers.linear.greatest", lambda groups: None)
    rows = {row.what: row for row in _proven("precision=fp8_tensorwise parallel=tp2")}
    assert rows["gradient"].error > 3 * rows["gradient"].tolerance


def test_fp8_linear_end_layers_may_stay_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = apply(fp8(tiny_run(), "tensorwise"), {"precision.num_layers_at_start_in_bf16": 1})
    made: list[int] = []
    whole = op.fp8_linear

    def counted(x: torch.Tensor, *args: Any, **given: Any) -> torch.Tensor:
        made.append(1)
        return whole(x, *args, **given)

    def job() -> int:
        from mtrain.mcore.layers import linear

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(linear, "fp8_linear", counted)
            train_steps(run, 1)
        return len(made)

    micro = run.trainer.batch // run.trainer.micro
    assert run_ranks(1, job)[0] == micro * 4 * (run.model.num_layers - 1)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("recompute", [False, True])
def test_fp8_linear_weight_is_quantised_once_a_step(recompute: bool) -> None:
    run = fp8(tiny_run(), "tensorwise")
    full = {"granularity": "full", "method": "uniform", "num_layers": 1}
    run = apply(
        run, {f"parallel.recompute.{key}": value for key, value in full.items() if recompute}
    )
    micro = run.trainer.batch // run.trainer.micro
    assert micro > 1

    once, again = (
        run_ranks(1, partial(counted, run, op, "quantized", gone))[0]
        for gone in (None, "weights_stay")
    )
    assert once[0] == again[0]
    weights = 4 * run.model.num_layers
    assert once[1] == 2 * weights
    assert again[1] == 2 * micro * weights * (2 if recompute else 1)


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_fp8_linear_fsdp_quantised_cache_keeps_bits(recipe: str) -> None:
    sharded = {"parallel.fsdp": "fsdp2", "parallel.distributed_optimizer": False}
    run = apply(fp8(tiny_run(ranks=4, tp=2), recipe), sharded)

    jobs = (partial(counted, run, op, "quantized", gone) for gone in (None, "weights_leave"))
    (steps, made), (right, once) = (run_ranks(4, job)[0] for job in jobs)
    assert steps == right
    assert made == 2 * once > 0


@pytest.mark.parametrize("words", [
    "model=llama_tiny model.mtp_num_layers=1",
    f"model=deepseek_tiny {LATENT}",
    "model=bert_tiny",
    "model=llava_tiny",
    pytest.param("model=nemotron_h_tiny", marks=pytest.mark.full),
])  # fmt: skip
def test_fp8_linear_every_layer_but_logits_is_included(words: str) -> None:
    ends = ["precision.num_layers_at_start_in_bf16=0", "precision.num_layers_at_end_in_bf16=0"]
    run = load([*words.split(), "parallel=single", "precision=fp8_tensorwise", *ends]).run

    def job() -> set[str]:
        from mtrain.assembly.model import build_model
        from mtrain.mcore.layers.linear import ColumnLinear, RowLinear
        from mtrain.mcore.layers.portable import DuplicatedLinear
        from mtrain.world.init import joined

        with joined(run) as world:
            (chunk,) = build_model(run, world, wrap=False)
            kinds = ColumnLinear, RowLinear, DuplicatedLinear
            ours = [
                (name, module)
                for name, module in chunk.named_modules()
                if isinstance(module, kinds)
            ]
            assert len(ours) > 8
            return {name.removeprefix("module.") for name, layer in ours if layer.fp8 is None}

    assert run_ranks(1, job)[0] == {"output_layer"}


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_fp8_linear_200_steps_stay_near_bf16(recipe: str) -> None:
    assert_stays_near_bf16({**WIDE, "hidden_size": 128, "ffn_hidden_size": 128}, recipe)
