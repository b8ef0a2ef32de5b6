"""A loss that stays high ends a run on every rank; a single high one does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mtrain.errors import TrainingError
from tests.support.forked import import_engine, run_alone, run_ranks
from tests.support.runs import tiny_run


def _observed(losses: list[float], state: dict[str, Any] | None = None) -> tuple[int, str]:
    """Return the step after which a hook stops, 0 if it never does, and its error."""
    from mtrain.train.hooks.optional.loss_spikes import HOOK

    hook = HOOK()
    if state is not None:
        hook.load_state_dict(state)
    for step, loss in enumerate(losses, 1):
        try:
            hook.after_step(SimpleNamespace(), SimpleNamespace(step=step, loss=loss))  # type: ignore[arg-type]
        except TrainingError as error:
            return step, str(error)
    return 0, ""


def test_loss_spikes_only_lasting_ones_stop() -> None:
    def job() -> list[tuple[int, str]]:
        import_engine()
        return [
            _observed([3.0] * 100 + [6.1] * 10),
            _observed([3.0] * 100 + ([6.1] * 9 + [3.0]) * 5),
            _observed([3.0] * 50 + [6.1] * 50),
            _observed([6.1], {"losses": [3.0] * 100, "above": 9}),
        ]

    lasting, single, early, resumed = run_alone(job)
    assert lasting[0] == 110
    assert "6.1000 is above 2 times its median 3.0000 for 10 steps" in lasting[1]
    assert (single[0], early[0], resumed[0]) == (0, 0, 1)


def test_loss_spikes_stop_a_run_on_every_rank() -> None:
    run = tiny_run(trainer={"train_iters": 9}, optim={"warmup_iters": 1}, ranks=2, tp=2)

    def job() -> tuple[str, int]:
        from mtrain.train.assemble import assemble, splits_of
        from mtrain.train.hooks.optional import loss_spikes
        from mtrain.train.loop.trainer import Trainer
        from mtrain.world.init import joined

        loss_spikes.PATIENCE = 2
        hook = loss_spikes.HOOK()
        hook.load_state_dict({"losses": [0.1] * loss_spikes.WINDOW, "above": 0})
        with joined(run) as world:
            context = assemble(run, world, splits_of(run))
            with pytest.raises(TrainingError) as error:
                Trainer(context, [hook]).fit()
            return str(error.value), context.state.step

    for text, step in run_ranks(2, job):
        assert "log.hooks=[loss_spikes]: step 2" in text
        assert step == 2
