"""Distillation on answers that the student samples: the same samples and steps in any split, and a
student that comes closer to its teacher on them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.schema.objective import ObjectiveConfig
from mtrain.config.schema.run import RunConfig
from mtrain.plan.teacher import teacher_of
from tests.distributed.test_answers import prompts_run
from tests.support.covering import some
from tests.support.forked import import_engine, run_ranks
from tests.support.objective_steps import LAYOUTS, OF_THE_LOOP
from tests.support.runs import whole_tensors

SPLITS = ["tp2sp", "pp2", "dp2", "tp2pp2", "micro8"]


def student_run(home: Path, **given: Any) -> RunConfig:
    keys = {"divergence": "jsd", "on_policy": True, "teacher": "drawn"} | given.pop("keys", {})
    run = prompts_run(home, **given)
    objective = ObjectiveConfig(name="distil", **keys)
    rollout = run.rollout.model_copy(update={"rewards": None, "reward_workers": 2})
    changed = run.model_copy(update={"objective": objective, "rollout": rollout})
    return resolve(changed, Machine(cpu_cores=1, memory_bytes=0))


def steps_of(run: RunConfig, folder: Path) -> tuple[list[dict[str, float]], list[Any]]:
    """Return the records of a run's steps without times, and the ids of all answers."""
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.train.verify.prove import record_gradients
    from mtrain.world.init import joined

    records = []
    ids = []
    with joined(run) as world:
        context = assemble(run, world, splits_of(run))
        with torch.no_grad():
            for chunk in (*context.state.chunks, *context.state.teacher):
                for weight in (each for each in chunk.parameters() if each.ndim > 1):
                    weight.mul_(5.0)
        context.state.optimizer.reload_model_params()
        for step in range(run.trainer.steps):
            record_gradients(context, folder / str(step))
            result = train_step(context, stop_requested=False)
            (measure,) = context.measures
            records.append({**result.metrics, **measure(context, result)})
            feed: Any = context.prefetcher
            ids += [one.ids for held in feed._steps.values() for one in held.rollouts]
        context.close()
    left_out = (*OF_THE_LOOP, "rollout_s", "reward_s")
    return [{k: v for k, v in one.items() if k not in left_out} for one in records], ids


@pytest.mark.parametrize("layout", some(SPLITS, ["dp2"]))
def test_distil_on_policy_is_the_same_step(layout: str, tmp_path: Path) -> None:
    import_engine()
    alone = student_run(tmp_path)
    assert teacher_of(alone) is not None
    ((wanted, samples),) = run_ranks(1, steps_of, alone, tmp_path / "one")
    assert wanted[0]["divergence"] > 0.05
    assert len(set(samples)) > 4
    run = student_run(tmp_path, **LAYOUTS[layout])
    for found, same_samples in run_ranks(run.parallel.ranks, steps_of, run, tmp_path / "two"):
        assert same_samples == samples
        for step, same in zip(found, wanted, strict=True):
            assert step == {k: pytest.approx(v, rel=2e-5, abs=2e-6) for k, v in same.items()}
    inside = Path("0/step_00000000")
    here = whole_tensors(tmp_path / "two" / inside)
    for name, value in whole_tensors(tmp_path / "one" / inside).items():
        assert torch.allclose(here[name], value, rtol=1e-4, atol=1e-6), name


@pytest.mark.full
def test_distil_on_policy_student_learns(tmp_path: Path) -> None:
    """Lower the divergence on the student's own answers by at least half."""
    import_engine()
    run = student_run(tmp_path, steps=60, optim={"lr": 1e-2}, keys={"divergence": "reverse_kl"})
    ((records, _),) = run_ranks(1, steps_of, run, tmp_path, timeout_s=280)
    first, last = (
        sum(one["divergence"] for one in part) / 10 for part in (records[:10], records[-10:])
    )
    assert last < 0.5 * first, (first, last)
