"""Adapter rules: which layers have low-rank adapters, and what a frozen model excludes."""

from __future__ import annotations

import os
from collections.abc import Iterator

from mtrain.config.compose.paths import names_near, user_path
from mtrain.config.optimizers import OPTIMIZERS
from mtrain.config.rules.finding import Change, Finding, each
from mtrain.config.rules.optim import another_optimizer
from mtrain.config.rules.precision import FORMATS, without_low_precision
from mtrain.config.rules.rule import Code, rule
from mtrain.config.rules.sharding import NO_FSDP
from mtrain.config.schema.peft import MIXERS, PeftConfig
from mtrain.config.schema.run import RunConfig
from mtrain.models.hybrid.config import ATTENTION, MAMBA, MLP, SOFTMAX

ADAPTER_CONFIG = "adapter_config.json"
TARGET = "peft.target"
OFF: tuple[Change, ...] = (
    {"peft.kind": None},
    {f"peft.{name}": field.default for name, field in PeftConfig.model_fields.items()},
)
"""Changes back to training every weight: the kind of adapter, and its other keys."""


def _without(run: RunConfig, *names: str) -> Change:
    return {TARGET: [name for name in run.peft.target or () if name not in names]}


def _adapts_experts(run: RunConfig) -> bool:
    peft = run.peft
    # A null target means the usual layers of attention and MLPs, without experts.
    return peft.kind is not None and run.model.moe is not None and "experts" in (peft.target or ())


@rule(
    Code("MT481", example="model=mixtral_tiny peft=lora peft.target=[]"),
    reads="peft.kind peft.target model.moe model.hybrid.pattern",
)
def adapter_targets(run: RunConfig) -> Iterator[Finding]:
    """Cannot train adapters because the model has none of these layers."""
    target = run.peft.target
    moe = run.model.moe
    if run.peft.kind is None or target is None:
        return
    # A model without a pattern is attention with an MLP in every layer.
    kinds = run.model.hybrid.pattern if run.model.hybrid is not None else f"{ATTENTION}{MLP}"
    has = {"qkv", "proj"} if set(SOFTMAX) & set(kinds) else set()
    has |= {"experts"} if moe is not None else set()
    has |= set(MIXERS) if MAMBA in kinds else set()
    dense = MLP in kinds if moe is None or run.model.hybrid is not None else moe.first_dense_layers
    if dense or (moe is not None and moe.shared_expert_intermediate_size):
        has |= {"fc1", "fc2"}
    if not has & set(target):
        yield Finding("MT481", TARGET, f"it has {', '.join(sorted(has))}", [{TARGET: None}, *OFF])


@rule(
    Code("MT482", example="model=mixtral_tiny peft=dora peft.target=[qkv,experts]"),
    reads="peft.target peft.kind peft.dropout model.moe",
)
def expert_adapter_kind(run: RunConfig) -> Iterator[Finding]:
    """Cannot adapt experts like this because their adapters have neither magnitudes nor dropout, as
    in `peft`.
    """
    if not _adapts_experts(run):
        return
    rest = _without(run, "experts")
    # A magnitude is the norm of each row of the sum, for which `peft` has no form with experts.
    if run.peft.kind != "lora":
        fixes = [rest, {"peft.kind": "lora"}]
        yield Finding("MT482", TARGET, f"peft.kind is {run.peft.kind}", fixes)
    elif run.peft.dropout:
        fixes = [rest, {"peft.dropout": 0.0}]
        yield Finding("MT482", TARGET, f"peft.dropout is {run.peft.dropout:g}", fixes)


@rule(
    Code(
        "MT483",
        example="model=mixtral_tiny peft=lora parallel=etp4 parallel.tp=1 model.hidden_size=250",
    ),
    reads="peft.kind peft.target model.moe model.hidden_size parallel.etp parallel.tp",
)
def expert_adapter_divisibility(run: RunConfig) -> Iterator[Finding]:
    """Cannot split the adapters of experts because etp does not divide the hidden size."""
    etp = run.parallel.etp or run.parallel.tp
    hidden = run.model.hidden_size
    if _adapts_experts(run) and hidden % etp:
        fixes = [{"parallel.etp": 1}, _without(run, "experts")]
        yield Finding("MT483", "parallel.etp", f"hidden_size {hidden}, etp {etp}", fixes)


@rule(
    Code(
        "MT484",
        example=(
            "peft=lora precision.dtype=bf16 precision.fp8=hybrid cluster=h100x8 parallel=single"
        ),
    ),
    reads=f"peft.kind {FORMATS}",
)
def adapter_precision(run: RunConfig) -> Iterator[Finding]:
    """Cannot adapt layers in 8 or 4 bits because TransformerEngine builds those."""
    if run.peft.kind is not None and run.precision.quantized is not None:
        key = "precision.fp8" if run.precision.fp8 is not None else "precision.fp4"
        fixes = [without_low_precision(run), *OFF]
        yield Finding("MT484", key, f"peft.kind is {run.peft.kind}", fixes)


@rule(
    Code("MT485", example="peft=lora parallel=dp2 parallel.fsdp=fsdp2"),
    reads="peft.kind parallel.fsdp parallel.fsdp_sharding parallel.hsdp_replicas",
)
def frozen_weight_sharding(run: RunConfig) -> Iterator[Finding]:
    """Cannot shard frozen weights because FSDP shards weights with their gradients;
    parallel.distributed_optimizer shards the state of adapters, tp and pp the weights.
    """
    if run.peft.kind is not None and run.parallel.fsdp != "none":
        fixes = [{"parallel.fsdp": "none"}, NO_FSDP, *OFF]
        yield Finding("MT485", "parallel.fsdp", f"peft.kind is {run.peft.kind}", fixes)


@rule(Code("MT486", example="peft=lora optim=muon"), reads="peft.kind optim.name")
def adapter_optimizer(run: RunConfig) -> Iterator[Finding]:
    """Cannot train adapters with this optimizer."""
    why = OPTIMIZERS[run.optim.name].cannot.get("adapters")
    if run.peft.kind is not None and why is not None:
        # An update that needs a whole matrix would see several stacked ones.
        fixes = [another_optimizer(run.optim.name, "adapters"), *OFF]
        yield Finding("MT486", "optim.name", why, fixes)


@rule(
    Code("MT487", example="model=glm45_tiny peft=lora model.moe.shared_expert_overlap=true"),
    reads="peft.kind peft.target model.moe.shared_expert_overlap",
)
def adapter_overlap(run: RunConfig) -> Iterator[Finding]:
    """Cannot adapt shared experts that overlap because they communicate outside of their layers."""
    moe = run.model.moe
    key = "model.moe.shared_expert_overlap"
    if run.peft.kind is None or moe is None or not moe.shared_expert_overlap:
        return
    if adapted := {"fc1", "fc2"} & set(run.peft.target or ()):
        fixes = [{key: False}, _without(run, "fc1", "fc2")]
        yield Finding("MT487", key, f"{' and '.join(sorted(adapted))} in {TARGET}", fixes)


@rule(
    Code(
        "MT488",
        help=f"Name a folder with {ADAPTER_CONFIG} and adapter_model.safetensors.",
        example="peft=lora peft.init_from=/nowhere/adapters",
    ),
    reads="peft.kind peft.init_from checkpoint.resume",
    disk=True,
)
def starting_adapters(run: RunConfig) -> Iterator[Finding]:
    """Cannot begin with these adapters because the folder does not hold them."""
    start = run.peft.init_from
    # A resumed run has its adapters already.
    if start is None or run.peft.kind is None or run.checkpoint.resume is not None:
        return
    path = user_path(start)
    if not start or not os.path.isfile(path / ADAPTER_CONFIG):
        fixes = each("peft.init_from", [*names_near(path), None])
        yield Finding("MT488", "peft.init_from", f"no {ADAPTER_CONFIG} in it", fixes)
