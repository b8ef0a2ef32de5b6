"""The optimizer and its schedule, from megatron-core."""

from __future__ import annotations

from typing import Any

import torch

from mtrain.build.transformer import DTYPES
from mtrain.config.core_fields import ADAM_FIELDS, OPTIMIZER_FIELDS, SCHEDULE_FIELDS, values
from mtrain.config.run import RunConfig
from mtrain.mcore import api as mcore

KEPT_AS = {**DTYPES, "fp8": torch.uint8}
"""Word -> the dtype of the tensor; what has eight bits has its scales beside."""


def build_optimizer(run: RunConfig, chunks: list[Any]) -> Any:
    """megatron-core's optimizer over this rank's chunks: distributed or not, mixed precision or not."""
    config = optimizer_config(run)
    return mcore.get_megatron_optimizer(
        config,
        chunks,
        config_overrides=mcore.get_standard_config_overrides(config),
        use_gloo_process_groups=False,
    )


def optimizer_config(run: RunConfig) -> Any:
    """megatron-core's configuration of the optimizer; decides which Adam of this process it builds.

    Raises:
        ImportError: kernels.optimizer=te without TransformerEngine.
    """
    fields = {k: KEPT_AS[v] if k.endswith("_dtype") else v for k, v in values(OPTIMIZER_FIELDS, run).items()}
    kernel = run.kernels.optimizer
    if kernel in ("reference", "triton"):
        mcore.use_own_adam(
            **{k: KEPT_AS[v] if k.endswith("_dtype") else v for k, v in values(ADAM_FIELDS, run).items()}
        )
        return mcore.OwnAdamConfig(**fields)
    if kernel == "te":
        mcore.use_te_adam()
    else:
        mcore.use_torch_adam()
    return mcore.OptimizerConfig(**fields)


def build_schedule(run: RunConfig, optimizer: Any) -> Any:
    """The learning-rate schedule in steps; `step(1)` before an update sets the rate of that update."""
    return mcore.OptimizerParamScheduler(optimizer, **values(SCHEDULE_FIELDS, run))
