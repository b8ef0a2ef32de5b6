"""The optimizer and its schedule, from megatron-core."""

from __future__ import annotations

from typing import Any

import torch

from mtrain.config.engine.core_fields import OPTIMIZER_FIELDS, OWN_FIELDS, SCHEDULE_FIELDS, values
from mtrain.config.machine.devices import facts_of
from mtrain.config.optimizers import OPTIMIZERS, mup_groups
from mtrain.config.resolve.rates import rate_at
from mtrain.config.schedules import SCHEDULES
from mtrain.config.schema.optimizer import ParamGroup
from mtrain.config.schema.run import RunConfig
from mtrain.devices.dtypes import with_dtypes
from mtrain.mcore import api as mcore
from mtrain.mcore.state.optimizer_state import distribute, name_states


def build_optimizer(run: RunConfig, chunks: list[Any]) -> Any:
    """Build megatron-core's optimizer over this rank's chunks, in the run's precision."""
    spec = OPTIMIZERS[run.optim.name]
    config = optimizer_config(run)
    overrides = mcore.get_standard_config_overrides(config)
    overrides |= {
        _matching(group): dict(group.settings) for group in (*spec.groups(run), *mup_groups(run))
    }
    optimizer = mcore.get_megatron_optimizer(
        config, chunks, config_overrides=overrides, use_gloo_process_groups=False
    )
    name_states(optimizer, tuple(spec.states(run)))
    distribute(chunks, optimizer)
    if facts_of(run.cluster.device).fused_adam:
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            _update_in_one_pass(part.optimizer)
    return optimizer


def optimizer_config(run: RunConfig) -> Any:
    """Return megatron-core's configuration of the optimizer; decide which class of this process it
    builds.

    Raises:
        ImportError: kernels.optimizer=te without TransformerEngine.
        ValueError: kernels.optimizer is not resolved.
    """
    spec = OPTIMIZERS[run.optim.name]
    word = run.kernels.optimizer
    fields = {
        **with_dtypes(values(OPTIMIZER_FIELDS, run)),
        **values(OWN_FIELDS.get(spec.name, {}), run),
    }
    if word in ("reference", "triton") and spec.build is not None:
        kind, arguments = spec.build(run)
        mcore.use_own(kind, **arguments)
        return mcore.OwnOptimizerConfig(**fields)
    use = {"te": mcore.use_te, "torch": mcore.use_torch}.get(word or "")
    if use is None:
        raise ValueError(
            f"kernels.optimizer = {word!r} is not resolved, or does not update {spec.name}"
        )
    use()
    return mcore.OptimizerConfig(**fields)


def _matching(group: ParamGroup) -> Any:
    """Return megatron-core's name of a group of parameters."""
    return mcore.ParamKey(
        with_name_predicate=mcore.ParamWithNamePredicate(name=group.name, fn=group.contains)
    )


def _update_in_one_pass(optimizer: Any) -> None:
    """Let torch's Adam update a weight in one pass; megatron-core makes a dozen on a CPU."""
    if isinstance(optimizer, torch.optim.Adam):
        for group in optimizer.param_groups:
            group["fused"] = True


def build_schedule(run: RunConfig, optimizer: Any) -> Any:
    """Return the schedule of learning rates in steps; `step(1)` precedes the update it is for."""
    fields = values(SCHEDULE_FIELDS, run)
    # megatron-core's own formulas round otherwise in the last bit (inverse_sqrt), and a resumed run
    # has to go on with the rates that it had
    if SCHEDULES[run.optim.schedule].megatron_name is not None:
        return mcore.OptimizerParamScheduler(optimizer, **fields)
    return _CurveScheduler(run, optimizer, fields)


class _CurveScheduler(mcore.OptimizerParamScheduler):
    """megatron-core's scheduler with the rates of a curve that megatron-core does not have."""

    def __init__(self, run: RunConfig, optimizer: Any, fields: dict[str, Any]) -> None:
        # before the base class, whose constructor sets the first rate
        self.run = run
        super().__init__(optimizer, **fields)

    def get_lr(self, param_group: Any) -> float:
        """Return the rate of a parameter group, which may have rates of its own (muP, Muon)."""
        highest = float(param_group.get("max_lr", self.max_lr))
        lowest = float(param_group.get("min_lr", self.min_lr))
        return rate_at(self.run, self.num_steps, highest, lowest)
