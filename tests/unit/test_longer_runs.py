"""Longer runs: they continue one whose learning rates so far are theirs; otherwise the new curve is
reported.
"""

from __future__ import annotations

from typing import Any

import pytest

from mtrain.config.resolve.rates import goes_on_alike, new_curve, rate
from mtrain.config.resolve.resolution import resolve
from mtrain.config.schema.run import RunConfig
from tests.support.configs import LAPTOP, tiny


def _run(steps: int, **optim: Any) -> RunConfig:
    changes = {
        f"optim__{key}": value
        for key, value in {"lr": 1e-2, "min_lr": 1e-3, "warmup_iters": 2, **optim}.items()
    }
    return resolve(tiny(trainer__train_iters=steps, **changes), LAPTOP)


def test_longer_runs_rates_equal_logged() -> None:
    """Compare four steps of a cosine from 6e-3 with megatron-core's scheduler."""
    run = _run(4, lr=6e-3, min_lr=6e-4, warmup_iters=0)
    logged = [0.005209188309203678, 0.0033, 0.0013908116907963219, 0.0006]
    assert [rate(run, step) for step in range(1, 5)] == pytest.approx(logged, abs=1e-12)


@pytest.mark.parametrize(
    ("optim", "step", "alike"),
    [
        ({"schedule": "constant"}, 10, True),
        ({"schedule": "wsd", "wsd_decay_iters": 3}, 7, True),
        ({"schedule": "wsd", "wsd_decay_iters": 3}, 8, False),
        ({"schedule": "cosine"}, 2, True),
        ({"schedule": "cosine"}, 3, False),
        ({"schedule": "linear"}, 10, False),
        ({"schedule": "cosine", "decay_iters": 8}, 10, True),
        ({"schedule": "inverse_sqrt"}, 10, True),
    ],
)
def test_longer_runs_made_steps_belong_to_longer_run(
    optim: dict[str, Any], step: int, alike: bool
) -> None:
    short = _run(10, **optim)
    long = _run(20, **optim)
    assert goes_on_alike(long, short, step) is alike
    same = all(rate(short, n) == pytest.approx(rate(long, n)) for n in range(1, step + 1))
    assert same is alike


def test_longer_runs_new_curve_is_reported_in_numbers() -> None:
    text = new_curve(_run(20, schedule="linear"), _run(10, schedule="linear"), 10)
    assert "from 0.001 at step 10 to 0.0055 at step 11 and 0.001 at step 20" in text
