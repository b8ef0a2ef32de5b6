"""Our Adam behind megatron-core's optimizers: it resumes, and trains with state in low precision as
with fp32.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mtrain.config.schema.model import MoEConfig
from tests.support import tiny
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run, trained

STEPS = 60
RATE = {"lr": 4e-3}
LOW_PRECISION = {
    "exp_avg_dtype": "bf16",
    "exp_avg_sq_dtype": "bf16",
    "store_param_remainders": True,
}
SMALLEST = {
    "model": {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "vocab_size": 128,
    },
    "trainer": {"train_iters": STEPS, "global_batch_size": 4, "micro_batch_size": 2},
    "dtype": "bf16",
    "distributed_optimizer": True,
}


def _losses(steps: int, **keys: Any) -> list[float]:
    run = tiny_run(**keys)
    return [loss for loss, _ in trained(run, steps)]


@pytest.fixture(scope="module")
def fp32_main_weights() -> list[float]:
    """Return the losses of all steps of torch's Adam on fp32 main weights, moments and
    gradients.
    """
    return _losses(STEPS, **SMALLEST, optim=RATE)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [pytest.param({"ranks": 2}, id="dp2"), pytest.param({"ranks": 2, "tp": 2}, id="tp2")]
)
def test_own_adam_low_precision_trains_as_fp32_master(
    layout: dict[str, int], fp32_main_weights: list[float]
) -> None:
    losses = _losses(STEPS, **SMALLEST, **layout, optim={**LOW_PRECISION, **RATE})
    errors = [abs(a - b) / b for a, b in zip(losses, fp32_main_weights, strict=True)]
    assert fp32_main_weights[-1] < 0.75 * fp32_main_weights[0], (
        "the model did not learn, so nothing is compared"
    )
    assert max(errors) < 1e-3, max(errors)
    assert losses != fp32_main_weights


LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"ranks": 2},
    "dp2 distributed optimizer": {"ranks": 2, "distributed_optimizer": True},
    "tp2": {"ranks": 2, "tp": 2},
    "pp2": {"ranks": 2, "pp": 2},
    "ep2": {"ranks": 2, "ep": 2, "model": {"moe": MoEConfig(num_experts=4, ffn_hidden_size=64)}},
}


@pytest.mark.sampled(9)
@pytest.mark.covering(1)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_own_adam_layout_equals_one_rank(name: str, dtype: str) -> None:
    keys = dict(LAYOUTS[name])
    if dtype == "bf16":
        few = {"dtype": "bf16", "distributed_optimizer": True, "optim": LOW_PRECISION}
    else:
        few = {}
    model = {"model": keys.pop("model")} if "model" in keys else {}
    one = tiny_run(kernel="reference", **model, **few)
    many = tiny_run(kernel="reference", **(keys | model | few))
    expected, found = (trained(run, 4) for run in (one, many))
    tolerance = {"fp32": 1e-5, "bf16": 2e-3}[dtype]
    for (loss, norm), (wanted, wanted_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(wanted, rel=tolerance)
        assert norm == pytest.approx(wanted_norm, rel=tolerance)


@pytest.mark.parametrize("optim", [{}, LOW_PRECISION], ids=["fp32", "low precision"])
def test_own_adam_megatron_state_resumes_bitwise(optim: dict[str, Any]) -> None:
    """Show that torch Adam's failure cannot occur: there is no step tensor to be shared."""
    run = tiny_run(dtype="bf16", distributed_optimizer=True, optim=optim, kernel="reference")
    assert run_ranks(1, _resumes_by_megatron_cores_state, run) == [True]


def _resumes_by_megatron_cores_state(run: Any) -> bool:
    from mtrain.assembly.optim import optimizer_config
    from mtrain.mcore import api

    tiny.start_world()
    config = optimizer_config(run)

    def trainee() -> tuple[Any, Any, Any]:
        cfg = tiny.config(bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16)
        torch.manual_seed(7)
        wrapped = api.Float16Module(cfg, tiny.model(cfg, wrap=False))
        ddp = api.DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True
        )
        model = api.DistributedDataParallel(cfg, ddp, wrapped)
        optimizer = api.get_megatron_optimizer(config, [model]).chained_optimizers[0]

        def step() -> None:
            optimizer.zero_grad()
            tiny.accumulate_gradients(model, cfg)
            optimizer.step()

        return model, optimizer, step

    return tiny.resumes_bitwise(trainee, 5)
