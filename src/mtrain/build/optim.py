"""The optimizer and its schedule, from megatron-core."""

from __future__ import annotations

from typing import Any

from mtrain.build.transformer import DTYPES
from mtrain.config.core_fields import OPTIMIZER_FIELDS, SCHEDULE_FIELDS, values
from mtrain.config.run import RunConfig
from mtrain.mcore import api as mcore


def build_optimizer(run: RunConfig, chunks: list[Any]) -> Any:
    """megatron-core's optimizer over this rank's chunks: distributed or not, mixed precision or not."""
    fields = values(OPTIMIZER_FIELDS, run)
    config = mcore.OptimizerConfig(**fields | {"params_dtype": DTYPES[fields["params_dtype"]]})
    return mcore.get_megatron_optimizer(
        config,
        chunks,
        config_overrides=mcore.get_standard_config_overrides(config),
        use_gloo_process_groups=False,
    )


def build_schedule(run: RunConfig, optimizer: Any) -> Any:
    """The learning-rate schedule in steps; `step(1)` before an update sets the rate of that update."""
    return mcore.OptimizerParamScheduler(optimizer, **values(SCHEDULE_FIELDS, run))
