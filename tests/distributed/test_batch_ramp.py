"""Steps that grow: as Megatron-LM's, in every layout, and over a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtrain.config.engine import release
from mtrain.config.resolve.batches import linear, size_after
from tests.support.forked import run_alone, run_ranks
from tests.support.runs import tiny_run, train_steps, trained, whole_tensors

STEPS = 7
RAMP = {"rampup_batch_size": [4, 4, 40], "global_batch_size": 16, "micro_batch_size": 2}
LISTED = {
    "batch_size_schedule": [[4, 300], [8, 1200]],
    "global_batch_size": 16,
    "micro_batch_size": 1,
}
PLANS: dict[str, dict[str, Any]] = {"linear": RAMP, "listed": LISTED}
LAYOUTS = {"dp2": {"ranks": 2}, "pp2": {"ranks": 2, "pp": 2}, "tp2": {"ranks": 2, "tp": 2}}


@pytest.mark.parametrize(
    "ramp", [(4, 4, 40, 16), (1, 1, 7, 12), (3, 5, 1000, 48), (16, 16, 5859375, 1536)]
)
def test_batch_ramp_equals_megatron_calculator(ramp: tuple[int, int, int, int]) -> None:
    first, increment, samples, last = ramp

    def both() -> list[tuple[int, int]]:
        from megatron.core import num_microbatches_calculator as calculator

        plan = linear(ramp[:3], last)
        out = []
        listed = " ".join(f"{first}:{size}" for first, size in dict(plan).items())
        said: dict[str, Any] = {"rampup_batch_size": [first, increment, samples]}
        if release.at_least(0, 19):  # which has no ramps: the sizes of ours, as it reads a list
            said = {"step_batch_size_schedule": listed}
        calculator.init_num_microbatches_calculator(
            1, global_batch_size=last, micro_batch_size=1, data_parallel_size=1, **said
        )
        bounds = [stage.first + by for stage in plan for by in (-1, 0, 1)]
        for consumed in sorted(
            {*range(min(samples + 3, 200)), *bounds, samples, samples + 1} - {-1}
        ):
            calculator.update_num_microbatches(consumed, consistency_check=False)
            out.append((calculator.get_current_global_batch_size(), size_after(plan, consumed)))
        return out

    found = run_alone(both)
    assert found[-1][0] == last
    assert all(theirs == ours for theirs, ours in found)


@pytest.mark.sampled(9)
@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("plan", PLANS)
def test_batch_ramp_layout_equals_one_rank(layout: str, plan: str) -> None:
    runs = (tiny_run(trainer=PLANS[plan], **axes) for axes in ({}, LAYOUTS[layout]))
    expected, found = (trained(run, STEPS) for run in runs)
    for (loss, norm), (wanted, wanted_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(wanted, rel=1e-5)
        assert norm == pytest.approx(wanted_norm, rel=1e-5)


@pytest.mark.full
def test_batch_ramp_resume_continues_samples(tmp_path: Path) -> None:
    run = tiny_run(trainer=RAMP, ranks=2)
    whole = run_ranks(2, lambda: train_steps(run, STEPS, save_to=tmp_path / "whole"))[0]
    first = run_ranks(2, lambda: train_steps(run, 5, save_to=tmp_path / "first"))[0]
    point = tmp_path / "first" / f"step_{5:08d}"
    rest = run_ranks(
        2, lambda: train_steps(run, STEPS - 5, save_to=tmp_path / "rest", load_from=point)
    )[0]
    assert first + rest == whole
    left, right = (
        whole_tensors(tmp_path / name / f"step_{STEPS:08d}") for name in ("whole", "rest")
    )
    assert all((left[key] == right[key]).all() for key in left)
    other = tiny_run(trainer=RAMP, ranks=2, tp=2)
    elsewhere = run_ranks(2, lambda: train_steps(other, STEPS - 5, load_from=point))[0]
    assert [loss for loss, _ in elsewhere] == pytest.approx([loss for loss, _ in rest], rel=1e-5)
