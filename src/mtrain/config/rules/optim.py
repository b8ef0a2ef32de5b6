"""Optimizer rules: the learning rate's range, the schedule's steps, and the state's formats."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.engine.kernels import update_obstacle
from mtrain.config.optimizers import OPTIMIZERS, readers
from mtrain.config.resolve.defaults import tenth
from mtrain.config.rules.finding import Change, Finding, each
from mtrain.config.rules.rule import Code, rule
from mtrain.config.rules.sharding import NO_FSDP, TORCH_FSDP, ZERO
from mtrain.config.schema.optimizer import Feature
from mtrain.config.schema.run import RunConfig

WSD_DECAY = "optim.wsd_decay_iters"
OFFLOAD = "optim.cpu_offload"
MAIN = "optim.main_params_dtype"
REMAINDER = "optim.store_param_remainders"
REMAINDERS: Change = {MAIN: "fp32", REMAINDER: True}
FULL: Change = {
    "optim.exp_avg_dtype": "fp32",
    "optim.exp_avg_sq_dtype": "fp32",
    MAIN: "fp32",
    REMAINDER: False,
}
"""State of Adam in 32 bits each."""
STATE = " ".join(FULL)


@rule(
    Code(
        "MT461",
        help="Leave kernels.optimizer to auto, which chooses one that does.",
        example="optim=sgd kernels.optimizer=reference",
    ),
    Code(
        "MT462",
        "Cannot update with this implementation because it only keeps Adam or SGD moments of 32"
        " bits.",
        example="optim=muon kernels.optimizer=torch",
    ),
    reads=f"kernels.optimizer optim.name {STATE} {OFFLOAD} parallel.fsdp",
)
def update_kernel(run: RunConfig) -> Iterator[Finding]:
    """Cannot update with this implementation because it does not support the optimizer or its
    state.
    """
    key = "kernels.optimizer"
    kernel = run.kernels.optimizer
    why = update_obstacle(kernel, run) if kernel not in (None, "auto") else None
    if why is None:
        return
    auto: Change = {key: "auto"}
    # mtrain's own kernels update some optimizers; those of others only Adam and SGD.
    if kernel in ("reference", "triton"):
        fixes = each(key, ["auto", "torch"])
        yield Finding("MT461", key, why, fixes, also=("optim.name", OFFLOAD))
    elif _low_precision(run):
        what = next(key for key, value in FULL.items() if _value(run, key) != value)
        detail = f"{kernel}, and {what} is {_value(run, what)}"
        yield Finding("MT462", key, detail, [auto, {**auto, **FULL}])
    else:
        yield Finding("MT462", key, why, [auto])


def _low_precision(run: RunConfig) -> bool:
    """Return whether the run requests low-precision state of an optimizer that can keep it."""
    return run.optim.in_low_precision and run.optim.name in readers("exp_avg_dtype")


def _value(run: RunConfig, path: str) -> object:
    group, key = path.split(".")
    return getattr(getattr(run, group), key)


@rule(
    Code("MT463", example=f"optim.exp_avg_dtype=fp8 {OFFLOAD}=0.5"),
    Code(
        "MT464",
        "Cannot set the format of main weights because only the distributed optimizer keeps them,"
        " for weights in bf16.",
        example=f"{REMAINDER}=true",
    ),
    Code(
        "MT465",
        "Cannot keep remainders because there are no fp32 main weights.",
        example=(
            "precision=bf16 parallel.distributed_optimizer=true optim.main_params_dtype=bf16 "
            f"{REMAINDER}=true"
        ),
    ),
    Code(
        "MT466",
        "Cannot keep one tied embedding because its first and its last stage would round their"
        " copies differently.",
        example=(
            "precision=bf16 parallel=pp2 parallel.distributed_optimizer=true"
            " optim.main_params_dtype=bf16 model.tie_word_embeddings=true"
        ),
    ),
    reads=(
        f"{STATE} optim.name parallel.distributed_optimizer parallel.fsdp precision.dtype"
        f" {OFFLOAD} parallel.pp model.tie_word_embeddings model.head"
    ),
)
def low_precision_state(run: RunConfig) -> Iterator[Finding]:
    """Cannot keep low-precision state of these weights because it needs plain tensors on the
    device.
    """
    o = run.optim
    p = run.parallel
    if not _low_precision(run):
        return
    back: Change = {key: off for key, off in FULL.items() if _value(run, key) != off}
    if p.fsdp != "none" or o.cpu_offload:
        zero = {**NO_FSDP, **ZERO, OFFLOAD: 0.0}
        sharded = p.fsdp != "none"
        detail = f"parallel.fsdp is {p.fsdp}" if sharded else f"{OFFLOAD} is {o.cpu_offload:g}"
        yield Finding("MT463", next(iter(back)), detail, [zero, back])
    key = REMAINDER if o.store_param_remainders else MAIN
    needed: Change = {"precision.dtype": "bf16", **ZERO}
    missing = {name: value for name, value in needed.items() if _value(run, name) != value}
    if o.holds_main_weights and missing:
        detail = " and ".join(f"{name} is {str(_value(run, name)).lower()}" for name in missing)
        yield Finding("MT464", key, detail, [missing, {key: FULL[key]}, back])
    if o.store_param_remainders and o.main_params_dtype != "fp32":
        detail = f"{MAIN} is {o.main_params_dtype}"
        yield Finding("MT465", REMAINDER, detail, [{REMAINDER: False}, {MAIN: "fp32"}])
    # Each stage rounds its own copy of the tied embedding, and the copies drift apart.
    elif o.main_params_dtype != "fp32" and p.pp > 1 and run.model.ties_output:
        fixes = [REMAINDERS, {MAIN: "fp32"}]
        yield Finding("MT466", MAIN, f"pp {p.pp}", fixes, also=("model.tie_word_embeddings",))


@rule(Code("MT421", example="optim.min_lr=0.1"), reads="optim.lr optim.min_lr")
def rate_order(run: RunConfig) -> Iterator[Finding]:
    """Cannot decay from lr to min_lr because min_lr is larger."""
    o = run.optim
    if o.min_lr > o.rate:
        fixes = each("optim.min_lr", [tenth(o.rate), 0.0])
        yield Finding("MT421", "optim.min_lr", f"min_lr {o.min_lr:g}, lr {o.rate:g}", fixes)


@rule(
    Code("MT422", example="optim.warmup_iters=100"),
    reads="optim.decay_iters optim.warmup_iters trainer.train_iters",
)
def warmup_length(run: RunConfig) -> Iterator[Finding]:
    """Cannot decay after the warmup because the decay ends before it."""
    o = run.optim
    # Without decay_iters the decay lasts until the end of the run.
    decay = o.decay_iters or run.trainer.steps
    warmup = o.warmup_iters
    if warmup >= decay:
        key = "optim.decay_iters" if o.decay_iters else "trainer.train_iters"
        detail = f"{warmup} steps of warmup, the decay ends at step {decay} of {key}"
        yield Finding(
            "MT422", "optim.warmup_iters", detail, each("optim.warmup_iters", [decay // 10, 0])
        )


@rule(
    Code("MT423", example=f"{WSD_DECAY}=5"),
    Code(
        "MT424",
        "Cannot end schedule wsd because the steps of its final decay are not set.",
        example="optim.schedule=wsd",
    ),
    Code(
        "MT425",
        "Cannot fit the final decay because too few steps follow the warmup.",
        example=f"optim.schedule=wsd {WSD_DECAY}=200",
    ),
    reads=f"optim.decay_iters optim.schedule optim.warmup_iters {WSD_DECAY} trainer.train_iters",
)
def wsd_decay(run: RunConfig) -> Iterator[Finding]:
    """Cannot add a final decay because only schedule wsd has one."""
    o = run.optim
    decay = o.decay_iters or run.trainer.steps
    warmup = o.warmup_iters
    if o.schedule != "wsd":
        if o.wsd_decay_iters is not None:
            detail = f"optim.schedule is {o.schedule}"
            yield Finding("MT423", WSD_DECAY, detail, [{WSD_DECAY: None}])
        return
    # MiniCPM, which introduced this schedule, decays over a tenth of the run.
    usual: Change = {WSD_DECAY: max(1, decay // 10)}
    if o.wsd_decay_iters is None:
        yield Finding("MT424", WSD_DECAY, f"{decay} steps", [usual])
    elif o.wsd_decay_iters > decay - warmup > 0:
        detail = f"{o.wsd_decay_iters} steps between {warmup} and {decay}"
        yield Finding("MT425", WSD_DECAY, detail, [{WSD_DECAY: decay - warmup}, usual])


@rule(
    Code("MT426", example="optim=sgd parallel.distributed_optimizer=true"),
    reads="parallel.distributed_optimizer optim.name",
)
def distributed_optimizer_support(run: RunConfig) -> Iterator[Finding]:
    """Cannot distribute this optimizer."""
    key = "parallel.distributed_optimizer"
    why = _why_not(run, "distributed_optimizer")
    if run.parallel.distributed_optimizer and why is not None:
        off: Change = {key: False}
        other = another_optimizer(run.optim.name, "distributed_optimizer")
        # The overlapped gather needs the distributed optimizer (MT118), so offer to turn both off.
        fixes = [off, {**off, "parallel.overlap_param_gather": False}, other]
        yield Finding("MT426", key, why, fixes, also=("optim.name",))


@rule(
    Code("MT165", example="parallel=dp2 parallel.fsdp=megatron optim=sgd"),
    reads="parallel.fsdp optim.name",
)
def megatron_fsdp_state(run: RunConfig) -> Iterator[Finding]:
    """Cannot shard the state of this optimizer."""
    why = _why_not(run, "megatron_fsdp")
    if run.parallel.fsdp == "megatron" and why is not None:
        other = another_optimizer(run.optim.name, "megatron_fsdp")
        fixes = [other, TORCH_FSDP, NO_FSDP]
        yield Finding("MT165", "parallel.fsdp", why, fixes, also=("optim.name",))


@rule(
    Code("MT467", example="optim=muon optim.cpu_offload=0.5"),
    reads=f"optim.name {OFFLOAD} parallel.fsdp",
)
def optimizer_requirements(run: RunConfig) -> Iterator[Finding]:
    """Cannot update the weights with this optimizer."""
    o = run.optim
    why = _why_not(run, "fsdp2")
    if run.parallel.fsdp == "fsdp2" and why is not None:
        plain = {"parallel.fsdp": "none", "parallel.hsdp_replicas": 1}
        fixes = [plain, another_optimizer(o.name, "fsdp2")]
        yield Finding("MT467", "parallel.fsdp", why, fixes, also=("optim.name",))
    why = _why_not(run, "cpu_offload")
    if o.cpu_offload and why is not None:
        fixes = [{OFFLOAD: 0.0}, another_optimizer(o.name, "cpu_offload")]
        yield Finding("MT467", OFFLOAD, why, fixes, also=("optim.name",))


def _why_not(run: RunConfig, feature: Feature) -> str | None:
    """Return why the optimizer of a run excludes a feature, from its specification, or None."""
    return OPTIMIZERS[run.optim.name].cannot.get(feature)


def another_optimizer(name: str, feature: Feature) -> Change:
    """Return the change to an optimizer that allows a feature, without the keys of the
    present one.
    """
    instead = next(other for other, spec in OPTIMIZERS.items() if feature not in spec.cannot)
    section = OPTIMIZERS[name].section
    # The keys of the old optimizer would be without effect (MT150).
    keys = section.model_fields if section is not None else ()
    return {"optim.name": instead, **{f"optim.{name}.{key}": None for key in keys}}


@rule(Code("MT427", severity="warning", example="optim.lr=3"), reads="optim.name optim.lr")
def rate_plausibility(run: RunConfig) -> Iterator[Finding]:
    """Cannot be a usual learning rate because it is far too large; an exponent may be missing."""
    o = run.optim
    usual = OPTIMIZERS[o.name].usual_lr
    if usual is not None and o.rate > 10 * usual[1]:
        # Short numbers, such as 1e-4 for 1e-04.
        low, high = (f"{rate:.0e}".replace("e-0", "e-") for rate in usual)
        rate: Change = {"optim.lr": 1e-3}
        # A min_lr that was set for the large rate may exceed the suggested one.
        detail = f"a rate of {o.rate:g}; {low} to {high} is common for {o.name}"
        yield Finding("MT427", "optim.lr", detail, [rate, {**rate, "optim.min_lr": 0.0}])
