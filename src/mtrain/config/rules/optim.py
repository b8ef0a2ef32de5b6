"""Optimizer rules: the learning rate's range, the schedule's steps, and the state's formats."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.engine.kernels import update_obstacle
from mtrain.config.optimizers import OPTIMIZERS, readers
from mtrain.config.resolve.defaults import tenth
from mtrain.config.rules.finding import Change, Finding
from mtrain.config.rules.rule import Code, rule
from mtrain.config.schema.optimizer import Feature
from mtrain.config.schema.run import RunConfig


@rule(Code("MT421", example="optim.min_lr=0.1"), reads="optim.lr optim.min_lr")
def rate_order(run: RunConfig) -> Iterator[Finding]:
    """The schedule falls from lr to min_lr."""
    o = run.optim
    if o.min_lr > o.rate:
        rule = f"min_lr {o.min_lr:g} is above lr {o.rate:g}"
        fixes: tuple[Change, ...] = ({"optim.min_lr": tenth(o.rate)}, {"optim.min_lr": 0.0})
        yield Finding("MT421", "optim.min_lr", rule, fixes)


@rule(
    Code("MT422", example="optim.warmup_iters=100"),
    reads="optim.decay_iters optim.warmup_iters trainer.train_iters",
)
def warmup_length(run: RunConfig) -> Iterator[Finding]:
    """The warmup ends before the decay."""
    o = run.optim
    decay = o.decay_iters or run.trainer.steps
    warmup = o.warmup_iters
    if warmup >= decay:
        key = "optim.decay_iters" if o.decay_iters else "trainer.train_iters"
        rule = f"{warmup} steps of warmup do not end before the decay does at step {decay} ({key})"
        fixes: list[Change] = [{"optim.warmup_iters": decay // 10}, {"optim.warmup_iters": 0}]
        yield Finding("MT422", "optim.warmup_iters", rule, tuple(fixes))


@rule(
    Code("MT423", "Only warmup-stable-decay has a final decay.", example="optim.wsd_decay_iters=5"),
    Code(
        "MT424",
        "Warmup-stable-decay needs to know how long its final decay is.",
        example="optim.schedule=wsd",
    ),
    Code(
        "MT425",
        "The final decay fits between the warmup and the end.",
        example="optim.schedule=wsd optim.wsd_decay_iters=200",
    ),
    reads=(
        "optim.decay_iters optim.schedule optim.warmup_iters optim.wsd_decay_iters"
        " trainer.train_iters"
    ),
)
def wsd_decay(run: RunConfig) -> Iterator[Finding]:
    """Only warmup-stable-decay reads the length of the decay, and it needs one."""
    o = run.optim
    decay = o.decay_iters or run.trainer.steps
    warmup = o.warmup_iters
    if o.schedule != "wsd":
        if o.wsd_decay_iters is not None:
            rule = f"has no effect: the schedule is {o.schedule}"
            yield Finding(
                "MT423", "optim.wsd_decay_iters", rule, ({"optim.wsd_decay_iters": None},)
            )
        return
    tenth: Change = {"optim.wsd_decay_iters": max(1, decay // 10)}
    if o.wsd_decay_iters is None:
        yield Finding(
            "MT424",
            "optim.wsd_decay_iters",
            "schedule wsd needs the steps of its final decay",
            (tenth,),
        )
    elif o.wsd_decay_iters > decay - warmup > 0:
        between = f"between the end of the warmup at {warmup} and step {decay}"
        rule = f"{o.wsd_decay_iters} steps of final decay do not fit {between}"
        rest: Change = {"optim.wsd_decay_iters": decay - warmup}
        yield Finding("MT425", "optim.wsd_decay_iters", rule, (rest, tenth))


@rule(
    Code("MT426", example="optim=sgd parallel.distributed_optimizer=true"),
    reads="parallel.distributed_optimizer optim.name",
)
def distributed_optimizer_support(run: RunConfig) -> Iterator[Finding]:
    """The distributed optimizer splits parameters anywhere, which some update rules do
    not allow.
    """
    why = _why_not(run, "distributed_optimizer")
    if run.parallel.distributed_optimizer and why is not None:
        off: Change = {"parallel.distributed_optimizer": False}
        both: Change = {**off, "parallel.overlap_param_gather": False}
        other = another_optimizer(run.optim.name, "distributed_optimizer")
        rule = f"the distributed optimizer does not take {run.optim.name}: {why}"
        yield Finding("MT426", "parallel.distributed_optimizer", rule, (off, both, other))


@rule(
    Code("MT165", example="parallel=dp2 parallel.fsdp=megatron optim=sgd"),
    reads="parallel.fsdp optim.name",
)
def megatron_fsdp_state(run: RunConfig) -> Iterator[Finding]:
    """megatron-core's FSDP shards the state of some optimizers only."""
    why = _why_not(run, "megatron_fsdp")
    if run.parallel.fsdp == "megatron" and why is not None:
        none: Change = {"parallel.fsdp_sharding": None}
        torch_fsdp: Change = {"parallel.fsdp": "fsdp2", **none}
        plain: Change = {"parallel.fsdp": "none", **none, "parallel.hsdp_replicas": 1}
        rule = f"megatron's FSDP does not shard the state of {run.optim.name}: {why}"
        yield Finding(
            "MT165",
            "parallel.fsdp",
            rule,
            (another_optimizer(run.optim.name, "megatron_fsdp"), torch_fsdp, plain),
        )


@rule(
    Code("MT467", example="optim=muon optim.cpu_offload=0.5"),
    reads="optim.name optim.cpu_offload parallel.fsdp",
)
def optimizer_requirements(run: RunConfig) -> Iterator[Finding]:
    """Some optimizers need whole matrices, and some need a device."""
    o = run.optim
    p = run.parallel
    why = _why_not(run, "fsdp2")
    if p.fsdp == "fsdp2" and why is not None:
        plain: Change = {"parallel.fsdp": "none", "parallel.hsdp_replicas": 1}
        rule = f"fsdp2 does not go with {o.name}: {why}"
        yield Finding("MT467", "parallel.fsdp", rule, (plain, another_optimizer(o.name, "fsdp2")))
    why = _why_not(run, "cpu_offload")
    if o.cpu_offload and why is not None:
        on_device: Change = {"optim.cpu_offload": 0.0}
        rule = f"{o.name} is not updated in host memory: {why}"
        yield Finding(
            "MT467",
            "optim.cpu_offload",
            rule,
            (on_device, another_optimizer(o.name, "cpu_offload")),
        )


def _why_not(run: RunConfig, feature: Feature) -> str | None:
    """Return why the optimizer of a run excludes a feature, from its specification, or None."""
    return OPTIMIZERS[run.optim.name].cannot.get(feature)


def another_optimizer(name: str, feature: Feature) -> Change:
    """Return the change to an optimizer that allows a feature, without the keys of the
    present one.
    """
    instead = next(other for other, spec in OPTIMIZERS.items() if feature not in spec.cannot)
    section = OPTIMIZERS[name].section
    keys = section.model_fields if section is not None else ()
    return {"optim.name": instead, **{f"optim.{name}.{key}": None for key in keys}}


@rule(Code("MT427", severity="warning", example="optim.lr=3"), reads="optim.name optim.lr")
def rate_plausibility(run: RunConfig) -> Iterator[Finding]:
    """A rate of whole numbers is usually one whose exponent was lost."""
    o = run.optim
    usual = OPTIMIZERS[run.optim.name].usual_lr
    if usual is not None and o.rate > 10 * usual[1]:
        low, high = (f"{rate:.0e}".replace("e-0", "e-") for rate in usual)
        rule = f"a learning rate of {o.rate:g} is unusual for {o.name}: {low} to {high} is common"
        fixes: tuple[Change, ...] = ({"optim.lr": 1e-3}, {"optim.lr": 1e-3, "optim.min_lr": 0.0})
        yield Finding("MT427", "optim.lr", rule, fixes)


REMAINDERS: Change = {"optim.main_params_dtype": "fp32", "optim.store_param_remainders": True}
FULL: Change = {
    "optim.exp_avg_dtype": "fp32",
    "optim.exp_avg_sq_dtype": "fp32",
    "optim.main_params_dtype": "fp32",
    "optim.store_param_remainders": False,
}
"""State of Adam in 32 bits each."""
STATE = " ".join(FULL)


@rule(
    Code(
        "MT461",
        "An implementation of Adam is named that does not update what this run trains.",
        help="Leave kernels.optimizer to auto, which takes one that does.",
        example="optim=sgd kernels.optimizer=reference",
    ),
    Code(
        "MT462",
        "torch and TransformerEngine keep 32 bits of each moment, and know no muon.",
        example="optim=muon kernels.optimizer=torch",
    ),
    reads=f"kernels.optimizer optim.name {STATE} optim.cpu_offload parallel.fsdp",
)
def update_kernel(run: RunConfig) -> Iterator[Finding]:
    """The named implementation updates this optimizer with the requested state."""
    kernel = run.kernels.optimizer
    why = update_obstacle(kernel, run) if kernel not in (None, "auto") else None
    if why is None:
        return
    auto: Change = {"kernels.optimizer": "auto"}
    if kernel in ("reference", "triton"):
        yield Finding(
            "MT461",
            "kernels.optimizer",
            why,
            (auto, {"kernels.optimizer": "torch"}),
            also=("optim.name", "optim.cpu_offload"),
        )
    elif _low_precision(run):
        what = next(key for key, value in FULL.items() if _value(run, key) != value)
        rule = (
            f"{kernel} keeps 32 bits of each moment and main weight, and {what} is"
            f" {_value(run, what)}"
        )
        yield Finding("MT462", "kernels.optimizer", rule, (auto, {**auto, **FULL}))
    else:
        yield Finding("MT462", "kernels.optimizer", why, (auto,))


def _low_precision(run: RunConfig) -> bool:
    """Return whether the run requests low-precision state of an optimizer that can keep it."""
    return run.optim.in_low_precision and run.optim.name in readers("exp_avg_dtype")


@rule(
    Code(
        "MT463",
        "Low-precision state is of plain tensors on the device.",
        example="optim.exp_avg_dtype=fp8 optim.cpu_offload=0.5",
    ),
    Code(
        "MT464",
        "Main weights are what the distributed optimizer keeps of bf16 ones.",
        example="optim.store_param_remainders=true",
    ),
    Code(
        "MT465",
        "Remainders are what is left of fp32 main weights.",
        example=(
            "precision=bf16 parallel.distributed_optimizer=true optim.main_params_dtype=bf16 "
            "optim.store_param_remainders=true"
        ),
    ),
    Code(
        "MT466",
        "Stages that share the embedding keep the same copy of it.",
        example=(
            "precision=bf16 parallel=pp2 parallel.distributed_optimizer=true"
            " optim.main_params_dtype=bf16 model.tie_word_embeddings=true"
        ),
    ),
    reads=(
        f"{STATE} optim.name parallel.distributed_optimizer parallel.fsdp precision.dtype"
        " optim.cpu_offload parallel.pp model.tie_word_embeddings"
    ),
)
def low_precision_state(run: RunConfig) -> Iterator[Finding]:
    """Plain tensors have low-precision state, and the distributed optimizer holds the
    main weights.
    """
    o = run.optim
    p = run.parallel
    if not _low_precision(run):
        return
    set_keys = [key for key, value in FULL.items() if _value(run, key) != value]
    back: Change = {key: FULL[key] for key in set_keys}
    if p.fsdp != "none" or o.cpu_offload:
        if p.fsdp != "none":
            what = f"parallel.fsdp={p.fsdp} shards"
        else:
            what = "optim.cpu_offload moves to host memory"
        zero: Change = {
            "parallel.fsdp": "none",
            "parallel.fsdp_sharding": None,
            "parallel.hsdp_replicas": 1,
        }
        zero = {**zero, "parallel.distributed_optimizer": True, "optim.cpu_offload": 0.0}
        rule = (
            "low-precision state is of whole weights or of the distributed optimizer's shards, not"
            f" of what {what}"
        )
        yield Finding("MT463", set_keys[0], rule, (zero, back))
    key = "optim.store_param_remainders" if o.store_param_remainders else "optim.main_params_dtype"
    needed: Change = {"precision.dtype": "bf16", "parallel.distributed_optimizer": True}
    missing = {k: v for k, v in needed.items() if _value(run, k) != v}
    if o.holds_main_weights and missing:
        rule = (
            "is about the fp32 weights that the distributed optimizer keeps of bf16 ones;"
            f" {_listed(run, missing)}"
        )
        yield Finding("MT464", key, rule, (missing, {key: FULL[key]}, back))
    if o.store_param_remainders and o.main_params_dtype != "fp32":
        rule = (
            "there are no main weights (optim.main_params_dtype=bf16), so there is nothing left"
            " over of them"
        )
        off: Change = {"optim.store_param_remainders": False}
        yield Finding(
            "MT465",
            "optim.store_param_remainders",
            rule,
            (off, {"optim.main_params_dtype": "fp32"}),
        )
    elif o.main_params_dtype != "fp32" and p.pp > 1 and run.model.tie_word_embeddings:
        rule = (
            f"the first and the last of {p.pp} stages would round their copies of the tied"
            " embedding differently"
        )
        yield Finding(
            "MT466",
            "optim.main_params_dtype",
            rule,
            (REMAINDERS, {"optim.main_params_dtype": "fp32"}),
            also=("model.tie_word_embeddings",),
        )


def _value(run: RunConfig, path: str) -> object:
    group, key = path.split(".")
    return getattr(getattr(run, group), key)


def _listed(run: RunConfig, keys: Change) -> str:
    return " and ".join(f"{key} is {str(_value(run, key)).lower()}" for key in keys)


RULES = (
    update_kernel,
    low_precision_state,
    rate_order,
    warmup_length,
    wsd_decay,
    distributed_optimizer_support,
    megatron_fsdp_state,
    optimizer_requirements,
    rate_plausibility,
)
