"""Low-rank adapters: which layers have them, and what does not go together with a frozen model."""

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
"""Ways back to training every weight: what was chosen, and what else was said of it."""


def _without(run: RunConfig, *names: str) -> Change:
    return {"peft.target": [name for name in run.peft.target or () if name not in names]}


@rule(
    Code("MT481", example="model=mixtral_tiny peft=lora peft.target=[]"),
    reads="peft.kind peft.target model.moe model.hybrid.pattern",
)
def something_has_an_adapter(run: RunConfig) -> Iterator[Finding]:
    """Some layer of the model has an adapter, or there is nothing to train."""
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
def experts_take_the_adapter(run: RunConfig) -> Iterator[Finding]:
    """What adapts experts is LoRA without dropout."""
    peft = run.peft
    if peft.kind is None or run.model.moe is None or "experts" not in (peft.target or ()):
        return
    rest = _without(run, "experts")
    if peft.kind != "lora":
        rule = (
            "experts are adapted by lora alone; dora has a norm of each row, which `peft` has not"
            " for experts"
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
def adapters_of_experts_are_split(run: RunConfig) -> Iterator[Finding]:
    """Each etp rank holds as much of each expert's adapter, along the hidden size."""
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
def adapters_are_beside_whole_products(run: RunConfig) -> Iterator[Finding]:
    """The layers with adapters are portable ones; those that multiply in low precision are
    TransformerEngine's.
    """
    if run.peft.kind is not None and run.precision.quantized is not None:
        rule = "layers with adapters multiply in precision.dtype, and TransformerEngine's have none"
        key = "precision.fp8" if run.precision.fp8 is not None else "precision.fp4"
        yield Finding("MT484", key, rule, (without_low_precision(run), *OFF))


@rule(
    Code("MT485", example="peft=lora parallel=dp2 parallel.fsdp=fsdp2"),
    reads="peft.kind parallel.fsdp parallel.fsdp_sharding parallel.hsdp_replicas",
)
def frozen_weights_are_not_sharded(run: RunConfig) -> Iterator[Finding]:
    """FSDP shards weights together with their gradients, and frozen ones have none."""
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
def optimizer_takes_adapters(run: RunConfig) -> Iterator[Finding]:
    """Some optimizers look at a whole matrix, and adapters of a fused layer are several in one."""
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
def shared_experts_do_not_overlap(run: RunConfig) -> Iterator[Finding]:
    """Shared experts that overlap take communication out of their layers, where
    adapters need it.
    """
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
def adapters_to_begin_with_exist(run: RunConfig) -> Iterator[Finding]:
    """A run begins with the adapters of a folder that `peft` wrote; one that goes on has them
    already.
    """
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
    something_has_an_adapter,
    experts_take_the_adapter,
    adapters_of_experts_are_split,
    adapters_are_beside_whole_products,
    frozen_weights_are_not_sharded,
    optimizer_takes_adapters,
    shared_experts_do_not_overlap,
    adapters_to_begin_with_exist,
)
