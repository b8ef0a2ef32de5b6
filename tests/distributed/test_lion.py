"""Lion through its specification: against its definition in plain torch, sharded, resumed, and
counted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.config.optimizers import OPTIMIZERS
from mtrain.plan.count import parameters, state_bytes
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run, train_steps, whole_tensors

STEPS = 4
BETA1 = 0.9
BETA2 = 0.99
DECAY = 0.1
FSDP = {"ranks": 2, "fsdp": "megatron", "fsdp_sharding": "optim_grads_params"}
LION = {"name": "lion", "lr": 1e-3, "beta1": BETA1, "beta2": BETA2, "weight_decay": DECAY}


def _run(**keys: Any) -> Any:
    return tiny_run(**keys, optim=LION)


def _against_the_definition() -> float:
    """Return the largest difference of a weight after some steps from weights updated here by the
    paper's formula.
    """
    from mtrain.mcore.state.optimizer_state import inner_optimizers
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.world.init import joined

    run = _run()
    with joined(run) as world:
        parts = assemble(run, world, splits_of(run))
        (inner,) = inner_optimizers(parts.state.optimizer)
        groups = [(p, group) for group in inner.param_groups for p in group["params"]]
        weights = {p: p.detach().clone() for p, _ in groups}
        momenta = {p: torch.zeros_like(p) for p, _ in groups}
        took = inner.step

        def step(*args: Any, **kwargs: Any) -> Any:
            for p, group in groups:
                w = weights[p]
                m = momenta[p]
                g = p.grad.float()
                c = BETA1 * m + (1 - BETA1) * g
                w -= group["lr"] * (torch.sign(c) + group["weight_decay"] * w)
                momenta[p] = BETA2 * m + (1 - BETA2) * g
            return took(*args, **kwargs)

        inner.step = step
        for _ in range(STEPS):
            train_step(parts, stop_requested=False)
        assert {float(group["weight_decay"]) for _, group in groups} == {0.0, DECAY}
        assert all(set(inner.state[p]) == {"exp_avg"} for p, _ in groups)
        return max(float((p - weights[p]).abs().max()) for p, _ in groups)


def test_lion_update_equals_paper() -> None:
    # a step is 2e-4 and more: one wrong sign would show
    assert run_ranks(1, _against_the_definition)[0] < 1e-6


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"ranks": 2}, id="dp2", marks=pytest.mark.full),
        pytest.param({"ranks": 2, "distributed_optimizer": True}, id="dp2 distributed optimizer"),
        pytest.param({"ranks": 2, "fsdp": "fsdp2"}, id="dp2 fsdp2", marks=pytest.mark.full),
        pytest.param(FSDP, id="dp2 megatron's fsdp"),
    ],
)
def test_lion_two_ranks_equal_one(layout: dict[str, Any]) -> None:
    expected = run_ranks(1, train_steps, _run(), 8)[0]
    found = run_ranks(2, train_steps, _run(**layout), 8)
    assert all(values == found[0] for values in found)
    for (loss, norm), (wanted, wanted_norm) in zip(found[0], expected, strict=True):
        assert loss == pytest.approx(wanted, rel=1e-5)
        assert norm == pytest.approx(wanted_norm, rel=1e-4)


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        pytest.param("fp32", FSDP, marks=pytest.mark.full),
        pytest.param("bf16", {"ranks": 2, "distributed_optimizer": True}, marks=pytest.mark.full),
    ],
    ids=["fsdp", "bf16"],
)
def test_lion_resume_is_bitwise_and_reshards(
    dtype: str, layout: dict[str, Any], tmp_path: Path
) -> None:
    run = _run(dtype=dtype, **layout)
    other = _run(ranks=2, tp=2, dtype=dtype)
    whole = run_ranks(2, lambda: train_steps(run, 4, save_to=tmp_path / "whole", save_after=2))[0]
    point = tmp_path / "whole/step_00000002"
    rest = run_ranks(2, lambda: train_steps(run, 2, save_to=tmp_path / "rest", load_from=point))[0]
    assert rest == whole[2:]
    last, again = (whole_tensors(tmp_path / name / "step_00000004") for name in ("whole", "rest"))
    assert last.keys() == again.keys()
    assert all(torch.equal(last[key], again[key]) for key in last)
    states = {key.split("/")[1] for key in last if key.startswith("optim/")}
    assert states == {"exp_avg"} | ({"main_weight"} if dtype == "bf16" else set())
    run_ranks(2, lambda: train_steps(other, 0, save_to=tmp_path / "other", load_from=point))
    left = whole_tensors(point)
    right = whole_tensors(tmp_path / "other/step_00000002")
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)


def test_lion_plan_counts_one_state() -> None:
    lion = _run()
    adamw = tiny_run()
    assert list(OPTIMIZERS["lion"].states(lion)) == ["exp_avg"]
    assert state_bytes(adamw) - state_bytes(lion) == 4 * parameters(lion.model)
