"""The optimizer and its schedule, from megatron-core."""

from __future__ import annotations

from typing import Any

from mtrain.build.transformer import DTYPES
from mtrain.config.run import RunConfig
from mtrain.mcore import api as mcore

SCHEDULES = {
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "inverse_sqrt": "inverse-square-root",
    "wsd": "WSD",
}


def build_optimizer(run: RunConfig, chunks: list[Any]) -> Any:
    """megatron-core's optimizer over this rank's chunks: distributed or not, mixed precision or not."""
    o, precision, p = run.optim, run.precision, run.parallel
    config = mcore.OptimizerConfig(
        optimizer="adam" if o.name == "adamw" else "sgd",
        lr=o.lr,
        min_lr=o.min_lr or 0.0,
        weight_decay=o.weight_decay,
        adam_beta1=o.beta1,
        adam_beta2=o.beta2,
        adam_eps=o.eps,
        sgd_momentum=o.momentum,
        # Without clipping the norm is still wanted for the log: no norm exceeds infinity.
        clip_grad=o.clip_grad if o.clip_grad is not None else float("inf"),
        bf16=precision.dtype == "bf16",
        fp16=precision.dtype == "fp16",
        params_dtype=DTYPES[precision.dtype],
        initial_loss_scale=precision.initial_loss_scale,
        min_loss_scale=precision.min_loss_scale,
        loss_scale_window=precision.loss_scale_window,
        use_distributed_optimizer=p.distributed_optimizer or p.fsdp == "megatron",
        overlap_param_gather=p.overlap_param_gather,
        optimizer_cpu_offload=o.cpu_offload > 0,
        optimizer_offload_fraction=o.cpu_offload,
    )
    return mcore.get_megatron_optimizer(
        config,
        chunks,
        config_overrides=mcore.get_standard_config_overrides(config),
        use_gloo_process_groups=False,
    )


def build_schedule(run: RunConfig, optimizer: Any) -> Any:
    """The learning-rate schedule in steps; `step(1)` before an update sets the rate of that update."""
    o = run.optim
    decay = o.decay_iters or run.trainer.train_iters
    return mcore.OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=o.lr,
        min_lr=o.min_lr or 0.0,
        lr_warmup_steps=o.warmup_iters or 0,
        lr_decay_steps=decay,
        lr_decay_style=SCHEDULES[o.schedule],
        start_wd=o.weight_decay,
        end_wd=o.weight_decay,
        wd_incr_steps=decay,
        wd_incr_style="constant",
        wsd_decay_steps=o.wsd_decay_iters,
        lr_wsd_decay_style=o.wsd_decay_style,
    )
