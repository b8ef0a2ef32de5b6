"""z-loss and token accuracy next to the loss: equal to plain torch on all logits, in every layout
and implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from mtrain.config.rules import apply
from mtrain.config.schema.run import RunConfig
from tests.support.forked import import_engine, run_alone, run_ranks
from tests.support.runs import tiny_run

STEPS = 1
KEYS = ("loss", "z_loss", "token_accuracy", "grad_norm")
SP = {"ranks": 2, "tp": 2, "sequence_parallel": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"ranks": 2, "tp": 2},
    "tp2 sequence parallel, a prediction more": SP | {"model": {"mtp_num_layers": 1}},
    "cp2": {"ranks": 2, "cp": 2},
    "dp2 sharded": {"ranks": 2, "distributed_optimizer": True},
    "pp2": {"ranks": 2, "pp": 2},
    "fsdp2": {"ranks": 2, "fsdp": "fsdp2"},
    "megatron's fsdp": {"ranks": 2, "fsdp": "megatron", "fsdp_sharding": "optim_grads_params"},
}
FEW = {"vocab_size": 140}
"""Ids, of which the second of two ranks has some and padding: one in 140 is guessed."""


def _run(model: dict[str, Any] | None = None, **parallel: Any) -> RunConfig:
    run = tiny_run(model=FEW | (model or {}), **parallel)
    return apply(run, {"trainer.z_loss_coeff": 0.05, "log.token_accuracy": True})


def _recorded(
    run: RunConfig, before: Callable[[], None] = lambda: None
) -> Callable[[], list[dict[str, float]]]:
    """Return a job that runs some steps and returns the log of the trainer."""

    def job() -> list[dict[str, float]]:
        from mtrain.train.assemble import assemble, splits_of
        from mtrain.train.loop.result import step_record
        from mtrain.train.loop.step import train_step
        from mtrain.world.init import joined

        before()
        with joined(run) as world:
            parts = assemble(run, world, splits_of(run))
            lines = [
                step_record(run, world.size, train_step(parts, stop_requested=False))
                for _ in range(STEPS)
            ]
            return [{key: line[key] for key in KEYS if key in line} for line in lines]

    return job


def _by_definition() -> None:
    """Compute the losses of one rank from all logits, by autograd."""
    from mtrain.mcore.models.language_model import SummedLosses

    def sum_of_losses(
        self: Any,
        hidden: Any,
        labels: Any,
        mask: Any,
        *,
        detached: bool = False,
        auxiliary: Any = None,
        is_part: bool = False,
    ) -> torch.Tensor:
        logits, _ = self.output_layer(hidden)
        x = logits.float()[..., : self.loss_vocab_size].transpose(0, 1)
        losses = F.cross_entropy(x.flatten(0, 1), labels.flatten(), reduction="none").view(
            labels.shape
        )
        if auxiliary is not None:  # a further prediction
            return (losses * mask).sum()
        z = self.auxiliary.z_loss * x.logsumexp(-1).square()
        hits = ((x.argmax(-1) == labels) & (mask > 0)).sum()
        return torch.stack([((losses + z) * mask).sum(), (z * mask).sum().detach(), hits.float()])

    SummedLosses.sum_of_losses = sum_of_losses  # type: ignore[method-assign]


def _near(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one == {
            key: pytest.approx(value, rel=1e-5 if key == "grad_norm" else 1e-6)
            for key, value in other.items()
        }


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_auxiliary_outputs_layout_equals_all_logits(name: str) -> None:
    parallel = LAYOUTS[name]
    model = parallel.get("model")
    wanted = run_ranks(1, _recorded(_run(model=model), _by_definition))[0]
    assert all(line["z_loss"] > 0.5 and 0 < line["token_accuracy"] < 0.5 for line in wanted), wanted
    for loss in ("reference", "megatron"):
        run = apply(_run(**parallel), {"kernels.loss": loss})
        for lines in run_ranks(2, _recorded(run)):
            _near(lines, wanted)


def test_auxiliary_outputs_are_off_by_default() -> None:
    quiet = tiny_run(model=FEW)
    first = _alone(quiet)[0]
    told = _alone(apply(quiet, {"log.token_accuracy": True}))
    assert set(first) == {"loss", "grad_norm"}
    assert {key: told[0][key] for key in first} == first
    assert set(told[0]) - set(first) == {"token_accuracy"}
    weighed = _alone(apply(quiet, {"trainer.z_loss_coeff": 0.05}))
    assert weighed[0]["loss"] == pytest.approx(first["loss"], rel=1e-6), "it is no part of the loss"
    assert weighed[0]["grad_norm"] != pytest.approx(first["grad_norm"], rel=1e-3)


def test_auxiliary_outputs_rank_before_soft_cap() -> None:
    run = _run(model=FEW | {"final_logit_softcapping": 0.01})
    capped = run_ranks(1, _recorded(run, _by_definition))[0][0]["token_accuracy"]
    parts, whole = (
        _alone(apply(run, {"kernels.loss": loss}))[0] for loss in ("reference", "megatron")
    )
    assert parts["token_accuracy"] == whole["token_accuracy"] != capped


def _alone(run: RunConfig) -> list[dict[str, float]]:
    """Return the log of one rank."""
    return run_ranks(1, _recorded(run))[0]  # type: ignore[no-any-return]


def test_auxiliary_outputs_logits_memory_reaches_loss() -> None:
    run = apply(tiny_run(dtype="bf16"), {"kernels.loss_logits_mib": 3})

    def job() -> int | None:
        import_engine()
        from mtrain.assembly.model import auxiliary_outputs_of

        return auxiliary_outputs_of(run).logits

    assert run_alone(job) == 3 * 2**19
