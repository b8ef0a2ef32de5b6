"""AdamW (Loshchilov and Hutter 2019): two moments, and weight decay decoupled from the gradient."""

from __future__ import annotations

from typing import Any

from mtrain.config.schema.optimizer import Optimizer, Run


def arguments(run: Run) -> dict[str, Any]:
    """Return the arguments of `mtrain_kernels`' FusedAdam in addition to those that megatron-core
    passes to any Adam.
    """
    from mtrain.devices.dtypes import torch_dtype

    o = run.optim
    return {
        "exp_avg_dtype": torch_dtype(o.exp_avg_dtype),
        "exp_avg_sq_dtype": torch_dtype(o.exp_avg_sq_dtype),
        "master_weights": o.store_param_remainders,
        "store_param_remainders": o.store_param_remainders,
        "stochastic_rounding": o.main_params_dtype != "fp32",
        "use_decoupled_grad": o.holds_main_weights,
        "seed": run.trainer.seed,
        "impl": run.kernels.optimizer,
    }


def _build(run: Run) -> tuple[type, dict[str, Any]]:
    from mtrain_kernels.optimizer.fused_adam import FusedAdam

    return FusedAdam, arguments(run)


def _obstacle(word: str, run: Run) -> str | None:
    """Return why an implementation cannot run AdamW here: ours needs plain tensors of the device,
    the others keep everything in 32 bits.
    """
    o = run.optim
    p = run.parallel
    if word in ("torch", "te"):
        few = "keeps 32 bits of each moment and main weight, and optim requests fewer"
        return f"{word} {few}" if o.in_low_precision else None
    # FSDP leaves DTensors, and offloading leaves tensors on the host: a kernel takes neither.
    if o.in_low_precision or (p.fsdp == "none" and not o.cpu_offload):
        return None
    what = "copies in host memory" if o.cpu_offload else f"what parallel.fsdp={p.fsdp} shards"
    return f"{word} updates plain tensors of the device, not {what}"


OPTIMIZER = Optimizer(
    name="adamw",
    states=lambda r: {"exp_avg": r.optim.exp_avg_dtype, "exp_avg_sq": r.optim.exp_avg_sq_dtype},
    build=_build,
    obstacle=_obstacle,
    keys=frozenset(
        {
            "beta1",
            "beta2",
            "eps",
            "exp_avg_dtype",
            "exp_avg_sq_dtype",
            "main_params_dtype",
            "store_param_remainders",
        }
    ),
    usual_lr=(1e-5, 1e-2),
    megatron_name="adam",
)
