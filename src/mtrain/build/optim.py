"""The optimizer and its schedule, from megatron-core."""

from __future__ import annotations

from typing import Any

import torch

from mtrain.build.transformer import DTYPES
from mtrain.config.core_fields import OPTIMIZER_FIELDS, SCHEDULE_FIELDS, values
from mtrain.config.run import RunConfig
from mtrain.mcore import api as mcore


def build_optimizer(run: RunConfig, chunks: list[Any]) -> Any:
    """megatron-core's optimizer over this rank's chunks: distributed or not, mixed precision or not."""
    fields = values(OPTIMIZER_FIELDS, run)
    config = mcore.OptimizerConfig(**fields | {"params_dtype": DTYPES[fields["params_dtype"]]})
    optimizer = mcore.get_megatron_optimizer(
        config,
        chunks,
        config_overrides=mcore.get_standard_config_overrides(config),
        use_gloo_process_groups=False,
    )
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        _update_in_one_pass(part.optimizer)
    return optimizer


def _update_in_one_pass(optimizer: Any) -> None:
    """Let torch's Adam update each weight in one pass over memory; megatron-core leaves it at a dozen on a CPU."""
    if isinstance(optimizer, torch.optim.Adam):
        for group in optimizer.param_groups:
            if all(weight.device.type in ("cpu", "cuda") for weight in group["params"]):
                group["fused"] = True


def build_schedule(run: RunConfig, optimizer: Any) -> Any:
    """The learning-rate schedule in steps; `step(1)` before an update sets the rate of that update."""
    return mcore.OptimizerParamScheduler(optimizer, **values(SCHEDULE_FIELDS, run))
