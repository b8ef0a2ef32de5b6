"""Smoothed labels: torch's own loss of all logits, on one rank and in layouts."""

from __future__ import annotations

from typing import Any

import pytest
from torch.nn import functional as F

from mtrain.config.rules import apply
from mtrain.config.schema.run import RunConfig
from mtrain.errors import ConfigError
from tests.support.forked import import_engine, run_alone, run_ranks
from tests.support.runs import tiny_run

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2sp": {"ranks": 2, "tp": 2, "sequence_parallel": True},
    "cp2": {"ranks": 2, "cp": 2},
    "pp2": {"ranks": 2, "pp": 2},
}
FEW = {"vocab_size": 140}
"""Ids of which the second of two tensor-parallel ranks has some, and padding."""
SMOOTHED = {"objective.name": "label_smoothing", "kernels.loss": "megatron"}


def _steps(run: RunConfig, *, by_torch: bool = False) -> list[dict[str, float]]:
    """Return what two steps of a run log; `by_torch`: with torch's loss of all logits."""
    from mtrain_kernels import runtime

    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.train.objectives import label_smoothing
    from mtrain.world.init import joined

    def sum_by_torch(self: Any, logits: Any, batch: Any, smoothing: float) -> Any:
        real = logits.float()[..., : self.run.model.vocab_size].flatten(0, 1)
        labels = batch["labels"].flatten()
        losses = F.cross_entropy(real, labels, reduction="none", label_smoothing=smoothing)
        return (losses * batch["loss_mask"].flatten()).sum()

    # Tests of kernels set TRITON_INTERPRET here, and the interpreter takes half a minute.
    runtime.interpreted = lambda: False
    if by_torch:
        label_smoothing.LabelSmoothing._sum = sum_by_torch  # type: ignore[method-assign]
    with joined(run) as world:
        context = assemble(run, world, splits_of(run))
        results = [train_step(context, stop_requested=False) for _ in range(2)]
    return [
        {"loss": r.loss, "smoothing": r.metrics["smoothing"], "norm": r.grad_norm} for r in results
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_label_smoothing_layout_equals_torch(layout: str) -> None:
    import_engine()
    alone = apply(tiny_run(model=FEW), SMOOTHED)
    wanted = run_ranks(1, lambda: _steps(alone, by_torch=True))[0]
    assert all(abs(step["smoothing"]) > 1e-4 for step in wanted)
    run = apply(tiny_run(model=FEW, **LAYOUTS[layout]), SMOOTHED)
    for steps in (*run_ranks(1, lambda: _steps(alone)), *run_ranks(2, lambda: _steps(run))):
        for step, same in zip(steps, wanted, strict=True):
            assert step == {
                key: pytest.approx(value, rel=1e-5, abs=1e-6) for key, value in same.items()
            }


@pytest.mark.parametrize(
    "keys",
    [{"kernels.loss": "reference"}, {"trainer.z_loss_coeff": 0.1}, {"log.token_accuracy": True}],
)
def test_label_smoothing_refuses_terms_of_the_model(keys: dict[str, Any]) -> None:
    def job() -> str:
        from mtrain.train.objectives import objective_of

        with pytest.raises(ConfigError, match="label_smoothing: cannot read logits") as error:
            objective_of(apply(tiny_run(), SMOOTHED | keys))
        return str(error.value)

    assert "Use " in run_alone(job) or "Set that" in run_alone(job)
