"""Adapter rules: which layers have low-rank adapters, and what a frozen model excludes."""

from __future__ import annotations

import os
from collections.abc import Iterator

from mtrain.config.compose.paths import names_near, user_path
from mtrain.config.optimizers import OPTIMIZERS
from mtrain.config.rules.finding import Change, Finding
from mtrain.config.rules.optim import another_optimizer
from mtrain.config.rules.quantized import FORMATS, without_low_precision
from mtrain.config.rules.rule import Code, rule
from mtrain.config.schema.peft import MIXERS, PeftConfig
from mtrain.config.schema.run import RunConfig
from mtrain.models.hybrid.config import ATTENTION, MAMBA, MLP, SOFTMAX

ADAPTER_CONFIG = "adapter_config.json"
OFF: tuple[Change, ...] = (
    {"peft.kind": None},
    {f"peft.{name}": field.default for name, field in PeftConfig.model_fields.items()},
)
"""Changes back to training every weight: the kind of adapter, and its other keys."""


def _without(run: RunConfig, *names: str) -> Change:
    return {"peft.target": [name for name in run.peft.target or () if name not in names]}


@rule(
    Code("MT481", example="model=mixtral_tiny peft=lora peft.target=[]"),
    reads="peft.kind peft.target model.moe model.hybrid.pattern",
)
def adapter_targets(run: RunConfig) -> Iterator[Finding]:
    """At least one layer of the model has an adapter to train."""
    target = run.peft.target
    moe = run.model.moe
    if run.peft.kind is None or target is None:
        return
    kinds = run.model.hybrid.pattern if run.model.hybrid is not None else f"{ATTENTION}{MLP}"
    has = {"qkv", "proj"} if set(SOFTMAX) & set(kinds) else set()
    has |= {"experts"} if moe is not None else set()
    has |= set(MIXERS) if MAMBA in kinds else set()
    dense = MLP in kinds if moe is None or run.model.hybrid is not None else moe.first_dense_layers
    if dense or (moe is not None and moe.shared_expert_intermediate_size):
        has |= {"fc1", "fc2"}
    if not has & set(target):
        rule = f"the model has no layer of {list(target)}: its layers are {', '.join(sorted(has))}"
        yield Finding("MT481", "peft.target", rule, ({"peft.target": None}, *OFF))


@rule(
    Code(
        "MT482",
        "Adapters of experts have neither magnitudes nor dropout, here as in `peft`.",
        example="model=mixtral_tiny peft=dora peft.target=[qkv,experts]",
    ),
    reads="peft.target peft.kind peft.dropout model.moe",
)
def expert_adapter_kind(run: RunConfig) -> Iterator[Finding]:
    """Experts take LoRA without dropout."""
    peft = run.peft
    if peft.kind is None or run.model.moe is None or "experts" not in (peft.target or ()):
        return
    rest = _without(run, "experts")
    if peft.kind != "lora":
        rule = (
            "only lora adapts experts; dora has a norm of each row, which `peft` lacks for experts"
        )
        yield Finding("MT482", "peft.target", rule, (rest, {"peft.kind": "lora"}))
    elif peft.dropout:
        rule = f"the adapters of experts have no dropout, and peft.dropout is {peft.dropout:g}"
        yield Finding("MT482", "peft.target", rule, (rest, {"peft.dropout": 0.0}))


@rule(
    Code(
        "MT483",
        example="model=mixtral_tiny peft=lora parallel=etp4 parallel.tp=1 model.hidden_size=250",
    ),
    reads="peft.kind peft.target model.moe model.hidden_size parallel.etp parallel.tp",
)
def expert_adapter_divisibility(run: RunConfig) -> Iterator[Finding]:
    """Each etp rank holds an equal part of each expert's adapter, along the hidden size."""
    etp = run.parallel.etp or run.parallel.tp
    hidden = run.model.hidden_size
    if run.peft.kind is None or run.model.moe is None or "experts" not in (run.peft.target or ()):
        return
    if hidden % etp:
        rule = (
            f"adapters of experts are split along the hidden size, and {hidden} does not divide by"
            f" etp {etp}"
        )
        yield Finding(
            "MT483", "parallel.etp", rule, ({"parallel.etp": 1}, _without(run, "experts"))
        )


@rule(
    Code(
        "MT484",
        "Products in 8 or 4 bits have no adapters.",
        example=(
            "peft=lora precision.dtype=bf16 precision.fp8=hybrid cluster=h100x8 parallel=single"
        ),
    ),
    reads=f"peft.kind {FORMATS}",
)
def adapter_precision(run: RunConfig) -> Iterator[Finding]:
    """Adapters need portable layers; the low-precision ones belong to TransformerEngine."""
    if run.peft.kind is not None and run.precision.quantized is not None:
        rule = "layers with adapters multiply in precision.dtype, and TransformerEngine's have none"
        key = "precision.fp8" if run.precision.fp8 is not None else "precision.fp4"
        yield Finding("MT484", key, rule, (without_low_precision(run), *OFF))


@rule(
    Code("MT485", example="peft=lora parallel=dp2 parallel.fsdp=fsdp2"),
    reads="peft.kind parallel.fsdp parallel.fsdp_sharding parallel.hsdp_replicas",
)
def frozen_weight_sharding(run: RunConfig) -> Iterator[Finding]:
    """FSDP shards weights with their gradients, and frozen weights have no gradient."""
    if run.peft.kind is not None and run.parallel.fsdp != "none":
        rule = (
            f"{run.parallel.fsdp} cannot shard weights that are not trained;"
            " parallel.distributed_optimizer=true shards the state of the adapters, and tp and pp"
            " the weights"
        )
        plain: Change = {
            "parallel.fsdp": "none",
            "parallel.fsdp_sharding": None,
            "parallel.hsdp_replicas": 1,
        }
        yield Finding("MT485", "parallel.fsdp", rule, ({"parallel.fsdp": "none"}, plain, *OFF))


@rule(
    Code("MT486", example="peft=lora optim=muon"),
    reads="peft.kind optim.name",
)
def adapter_optimizer(run: RunConfig) -> Iterator[Finding]:
    """Some optimizers need a whole matrix, and adapters of a fused layer are several matrices in
    one.
    """
    why = OPTIMIZERS[run.optim.name].cannot.get("adapters")
    if run.peft.kind is not None and why is not None:
        rule = f"{run.optim.name} does not train adapters: {why}"
        yield Finding(
            "MT486", "optim.name", rule, (another_optimizer(run.optim.name, "adapters"), *OFF)
        )


@rule(
    Code("MT487", example="model=glm45_tiny peft=lora model.moe.shared_expert_overlap=true"),
    reads="peft.kind peft.target model.moe.shared_expert_overlap",
)
def adapter_overlap(run: RunConfig) -> Iterator[Finding]:
    """Overlapped shared experts communicate outside their layers, where adapters cannot follow."""
    moe = run.model.moe
    if run.peft.kind is None or moe is None or not moe.shared_expert_overlap:
        return
    if {"fc1", "fc2"} & set(run.peft.target or ()):
        rule = (
            "layers of shared experts that overlap have no communication of their own, and their"
            " adapters need it"
        )
        wait: Change = {"model.moe.shared_expert_overlap": False}
        yield Finding(
            "MT487", "model.moe.shared_expert_overlap", rule, (wait, _without(run, "fc1", "fc2"))
        )


@rule(
    Code(
        "MT488",
        "The adapters to begin with are not there.",
        help=(
            "Name a folder with adapter_config.json and adapter_model.safetensors, as `peft`"
            " writes it."
        ),
        example="peft=lora peft.init_from=/nowhere/adapters",
    ),
    reads="peft.kind peft.init_from checkpoint.resume",
    disk=True,
)
def starting_adapters(run: RunConfig) -> Iterator[Finding]:
    """A run starts from adapters in a folder that `peft` wrote; a resumed run already has them."""
    start = run.peft.init_from
    if start is None or run.peft.kind is None or run.checkpoint.resume is not None:
        return
    path = user_path(start)
    if not start or not os.path.isfile(path / ADAPTER_CONFIG):
        near: tuple[Change, ...] = tuple({"peft.init_from": name} for name in names_near(path))
        yield Finding(
            "MT488",
            "peft.init_from",
            f"there is no {ADAPTER_CONFIG} in it",
            (*near, {"peft.init_from": None}),
        )


RULES = (
    adapter_targets,
    expert_adapter_kind,
    expert_adapter_divisibility,
    adapter_precision,
    frozen_weight_sharding,
    adapter_optimizer,
    adapter_overlap,
    starting_adapters,
)
