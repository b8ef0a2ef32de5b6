"""What megatron-core can since 0.19 and a key offers: `make engines` runs it there."""

from __future__ import annotations

import pytest
import torch

from mtrain.config import engine
from tests.support import tiny
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run, train_steps

pytestmark = pytest.mark.skipif(not engine.at_least(0, 19), reason="megatron-core can since 0.19")
STEPS = 3


def test_an_update_is_skipped_where_the_gradient_norm_is_too_large() -> None:
    """The losses are those of weights that stay where they are; below the threshold nothing changes."""
    still, all_skipped = ({"lr": 1e-30, "min_lr": 0.0}, {"skip_above_grad_norm": 1e-6})
    none_skipped: dict[str, float] = {"skip_above_grad_norm": 1e6}

    def losses(optim: dict[str, float]) -> list[float]:
        run = tiny_run(ranks=2, distributed_optimizer=True, model={"num_layers": 2}, optim=optim)
        found = run_ranks(2, lambda: train_steps(run, STEPS))
        assert found[0] == found[1]
        return [loss for loss, _ in found[0]]

    assert losses(all_skipped) == losses(still)
    assert losses(none_skipped) == losses({}) != losses(still)


def test_detached_predictions_leave_the_gradients_of_the_model_alone() -> None:
    def gradients(**mtp: object) -> dict[str, torch.Tensor]:
        tiny.start_world()
        cfg = tiny.config(**mtp)
        model = tiny.model(cfg)
        tiny.redraw_matrices(model)
        tiny.accumulate_gradients(model, cfg)
        return {name: grad for name, grad in tiny.gradients(model).items() if not name.startswith("mtp.")}

    plain = run_ranks(1, gradients)[0]
    detached = run_ranks(1, lambda: gradients(mtp_num_layers=1, mtp_detach_heads=True))[0]
    together = run_ranks(1, lambda: gradients(mtp_num_layers=1))[0]
    assert plain.keys() == detached.keys() == together.keys()
    assert all(torch.equal(plain[name], grad) for name, grad in detached.items())
    assert not all(torch.allclose(plain[name], grad) for name, grad in together.items())
