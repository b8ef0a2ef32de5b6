"""The optimizer and its schedule, from megatron-core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mtrain.build.transformer import DTYPES
from mtrain.config.core_fields import ADAM_FIELDS, MUON_FIELDS, OPTIMIZER_FIELDS, SCHEDULE_FIELDS, Table, values
from mtrain.config.run import RunConfig
from mtrain.mcore import api as mcore

KEPT_AS = {**DTYPES, "fp8": torch.uint8}
"""Word -> the dtype of the tensor; what has eight bits has its scales beside."""


def build_optimizer(run: RunConfig, chunks: list[Any]) -> Any:
    """megatron-core's optimizer over this rank's chunks: distributed or not, mixed precision or not."""
    config = optimizer_config(run)
    overrides = mcore.get_standard_config_overrides(config)
    if run.optim.name == "muon":
        overrides |= _groups_of_muon(run)
    optimizer = mcore.get_megatron_optimizer(
        config, chunks, config_overrides=overrides, use_gloo_process_groups=False
    )
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        _update_in_one_pass(part.optimizer)
    return optimizer


def optimizer_config(run: RunConfig) -> Any:
    """megatron-core's configuration of the optimizer; decides which Adam of this process it builds.

    Raises:
        ImportError: kernels.optimizer=te without TransformerEngine.
        ValueError: kernels.optimizer is not resolved.
    """
    fields = _made(OPTIMIZER_FIELDS, run)
    if run.optim.name == "muon":
        muon = values(MUON_FIELDS, run)
        mcore.use_own_adam(mcore.ParallelMuon, **_made(ADAM_FIELDS, run), **_muon(run, muon))
        return mcore.OwnAdamConfig(**fields, **muon)
    if run.kernels.optimizer in ("reference", "triton"):
        mcore.use_own_adam(**_made(ADAM_FIELDS, run))
        return mcore.OwnAdamConfig(**fields)
    use = {"te": mcore.use_te_adam, "torch": mcore.use_torch_adam}.get(run.kernels.optimizer)
    if use is None:
        raise ValueError(f"kernels.optimizer = {run.kernels.optimizer!r} is not resolved")
    use()
    return mcore.OptimizerConfig(**fields)


def is_matrix(param: torch.Tensor, name: str) -> bool:
    """Whether Muon takes a parameter: a matrix, but for embeddings and the output layer."""
    return param.ndim == 2 and "embedding" not in name and "output_layer" not in name


def _made(table: Table, run: RunConfig) -> dict[str, Any]:
    """A table's values, dtypes made of their words."""
    return {k: KEPT_AS[v] if k.endswith("_dtype") else v for k, v in values(table, run).items()}


def _muon(run: RunConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """What our Muon takes beside Adam's arguments."""
    m, muon = run.model, run.optim.muon
    rows = (m.num_attention_heads // m.query_groups * m.head_dim, m.head_dim, m.head_dim)
    assert muon.ns_dtype is not None
    kept = {key.removeprefix("muon_"): value for key, value in fields.items() if key != "muon_split_qkv"}
    return {**kept, "ns_dtype": DTYPES[muon.ns_dtype], "qkv_rows": rows if muon.split_qkv else None}


def _groups_of_muon(run: RunConfig) -> dict[Any, dict[str, Any]]:
    """Groups of parameters: matrices, those of them that are three, and the rest with its own rate."""
    o = run.optim

    def where(name: str, chosen: Callable[[Any, str], bool]) -> Any:
        return mcore.ParamKey(with_name_predicate=mcore.ParamWithNamePredicate(name=name, fn=chosen))

    def is_qkv(name: str) -> bool:
        return "linear_qkv." in name

    groups: dict[Any, dict[str, Any]] = {
        where("matrix", lambda p, name: is_matrix(p, name) and not is_qkv(name)): {"matrix": "whole"},
        where("qkv", lambda p, name: is_matrix(p, name) and is_qkv(name)): {"matrix": "qkv"},
    }
    if o.muon.adamw_lr not in (None, o.rate):
        share = (o.min_lr or 0.0) / o.rate
        rates = {"max_lr": o.muon.adamw_lr, "min_lr": share * o.muon.adamw_lr}
        groups[where("no matrix", lambda p, name: not is_matrix(p, name))] = rates
    return groups


def _update_in_one_pass(optimizer: Any) -> None:
    """Let torch's Adam update each weight in one pass over memory; megatron-core leaves it at a dozen on a CPU."""
    if isinstance(optimizer, torch.optim.Adam):
        for group in optimizer.param_groups:
            if all(weight.device.type in ("cpu", "cuda") for weight in group["params"]):
                group["fused"] = True


def build_schedule(run: RunConfig, optimizer: Any) -> Any:
    """The learning-rate schedule in steps; `step(1)` before an update sets the rate of that update."""
    return mcore.OptimizerParamScheduler(optimizer, **values(SCHEDULE_FIELDS, run))
