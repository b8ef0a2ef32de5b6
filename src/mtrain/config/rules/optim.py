"""Optimizer: the learning rate's range and the steps of its schedule."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.defaults import tenth
from mtrain.config.groups import MuonConfig
from mtrain.config.kernels import adam_obstacle
from mtrain.config.rules.finding import Change, Finding
from mtrain.config.run import RunConfig


def rates_are_ordered(run: RunConfig) -> Iterator[Finding]:
    """The schedule falls from lr to min_lr."""
    o = run.optim
    if (o.min_lr or 0.0) > o.rate:
        rule = f"min_lr {o.min_lr:g} is above lr {o.rate:g}"
        fixes: tuple[Change, ...] = ({"optim.min_lr": tenth(o.rate)}, {"optim.min_lr": 0.0})
        yield Finding("MT421", "optim.min_lr", rule, fixes)


def warmup_ends_before_decay(run: RunConfig) -> Iterator[Finding]:
    """The warmup is over before the decay is."""
    o = run.optim
    decay = o.decay_iters or run.trainer.train_iters
    warmup = o.warmup_iters or 0
    if warmup >= decay:
        key = "optim.decay_iters" if o.decay_iters else "trainer.train_iters"
        rule = f"{warmup} steps of warmup do not end before the decay does at step {decay} ({key})"
        fixes: list[Change] = [{"optim.warmup_iters": decay // 10}, {"optim.warmup_iters": 0}]
        yield Finding("MT422", "optim.warmup_iters", rule, tuple(fixes))


def wsd_has_its_decay(run: RunConfig) -> Iterator[Finding]:
    """Warmup-stable-decay needs to know how long the decay is; nothing else reads that."""
    o = run.optim
    decay = o.decay_iters or run.trainer.train_iters
    warmup = o.warmup_iters or 0
    if o.schedule != "wsd":
        if o.wsd_decay_iters is not None:
            rule = f"has no effect: the schedule is {o.schedule}"
            yield Finding("MT423", "optim.wsd_decay_iters", rule, ({"optim.wsd_decay_iters": None},))
        return
    tenth: Change = {"optim.wsd_decay_iters": max(1, decay // 10)}
    if o.wsd_decay_iters is None:
        yield Finding("MT424", "optim.wsd_decay_iters", "schedule wsd needs the steps of its final decay", (tenth,))
    elif o.wsd_decay_iters > decay - warmup > 0:
        room = f"between the end of the warmup at {warmup} and step {decay}"
        rule = f"{o.wsd_decay_iters} steps of final decay do not fit {room}"
        rest: Change = {"optim.wsd_decay_iters": decay - warmup}
        yield Finding("MT425", "optim.wsd_decay_iters", rule, (rest, tenth))


def optimizer_can_be_distributed(run: RunConfig) -> Iterator[Finding]:
    """megatron-core's distributed optimizer knows Adam only."""
    if run.parallel.distributed_optimizer and run.optim.name != "adamw":
        rule = f"the distributed optimizer takes adamw, not {run.optim.name}"
        off: Change = {"parallel.distributed_optimizer": False}
        both: Change = {**off, "parallel.overlap_param_gather": False}
        yield Finding("MT426", "parallel.distributed_optimizer", rule, (off, both, {"optim.name": "adamw"}))


def muon_has_whole_matrices(run: RunConfig) -> Iterator[Finding]:
    """Orthogonalising needs all rows and columns of a matrix, on the device."""
    o, p = run.optim, run.parallel
    adamw: Change = {"optim.name": "adamw", **{f"optim.muon.{key}": None for key in MuonConfig.model_fields}}
    if o.name == "muon" and p.fsdp == "fsdp2":
        rule = "muon orthogonalises whole matrices, and fsdp2 leaves some rows of each to a rank"
        plain: Change = {"parallel.fsdp": "none", "parallel.hsdp_replicas": 1}
        yield Finding("MT467", "parallel.fsdp", rule, (plain, adamw))
    if o.name == "muon" and o.cpu_offload:
        rule = "muon is not updated in host memory, whose processor would take long for its matrix products"
        yield Finding("MT467", "optim.cpu_offload", rule, ({"optim.cpu_offload": 0.0}, adamw))


def rate_is_plausible(run: RunConfig) -> Iterator[Finding]:
    """A rate of whole numbers is usually one whose exponent was lost."""
    o = run.optim
    if o.name == "adamw" and o.rate > 0.1:
        rule = f"a learning rate of {o.rate:g} is unusual for adamw: 1e-5 to 1e-2 is common"
        fixes: tuple[Change, ...] = ({"optim.lr": 1e-3}, {"optim.lr": 1e-3, "optim.min_lr": 0.0})
        yield Finding("MT427", "optim.lr", rule, fixes, "warning")


REMAINDERS: Change = {"optim.main_params_dtype": "fp32", "optim.store_param_remainders": True}
FULL: Change = {
    "optim.exp_avg_dtype": "fp32",
    "optim.exp_avg_sq_dtype": "fp32",
    "optim.main_params_dtype": "fp32",
    "optim.store_param_remainders": False,
}
"""State of Adam in 32 bits each."""


def kernel_can_update(run: RunConfig) -> Iterator[Finding]:
    """Ours is AdamW on plain tensors of the device; the others keep 32 bits of everything."""
    o, kernel = run.optim, run.kernels.optimizer
    auto: Change = {"kernels.optimizer": "auto"}
    why = adam_obstacle(kernel, run) if kernel in ("reference", "triton") else None
    if why is not None:
        yield Finding(
            "MT461",
            "kernels.optimizer",
            why,
            (auto, {"kernels.optimizer": "torch"}),
            also=("optim.name", "optim.cpu_offload"),
        )
    elif kernel in ("torch", "te") and o.in_low_precision:
        what = next(key for key, value in FULL.items() if _value(run, key) != value)
        rule = f"{kernel} keeps 32 bits of each moment and main weight, and {what} is {_value(run, what)}"
        yield Finding("MT462", "kernels.optimizer", rule, (auto, {**auto, **FULL}))
    elif kernel in ("torch", "te") and o.name == "muon":
        rule = f"{kernel} has no muon as it is meant here: matrices that are cut over ranks, the rest by adamw"
        yield Finding("MT462", "kernels.optimizer", rule, (auto,))


def low_precision_has_its_place(run: RunConfig) -> Iterator[Finding]:
    """Low-precision state is kept of plain tensors, and main weights where the distributed optimizer has them."""
    o, p = run.optim, run.parallel
    if not o.in_low_precision:
        return
    set_keys = [key for key, value in FULL.items() if _value(run, key) != value]
    back: Change = {key: FULL[key] for key in set_keys}
    if o.name != "adamw":
        for key in set_keys:
            yield Finding("MT150", key, "has no effect without optim.name=adamw", ({key: FULL[key]},))
        return
    if p.fsdp != "none" or o.cpu_offload:
        what = f"parallel.fsdp={p.fsdp} spreads" if p.fsdp != "none" else "optim.cpu_offload moves to host memory"
        zero: Change = {"parallel.fsdp": "none", "parallel.fsdp_sharding": None, "parallel.hsdp_replicas": 1}
        zero = {**zero, "parallel.distributed_optimizer": True, "optim.cpu_offload": 0.0}
        rule = f"low-precision state is of whole weights or of the distributed optimizer's shards, not of what {what}"
        yield Finding("MT463", set_keys[0], rule, (zero, back))
    key = "optim.store_param_remainders" if o.store_param_remainders else "optim.main_params_dtype"
    needed: Change = {"precision.dtype": "bf16", "parallel.distributed_optimizer": True}
    missing = {k: v for k, v in needed.items() if _value(run, k) != v}
    if o.holds_main_weights and missing:
        rule = f"is about the fp32 weights that the distributed optimizer keeps of bf16 ones; {_listed(run, missing)}"
        yield Finding("MT464", key, rule, (missing, {key: FULL[key]}, back))
    if o.store_param_remainders and o.main_params_dtype != "fp32":
        rule = "there are no main weights (optim.main_params_dtype=bf16), so there is nothing left over of them"
        off: Change = {"optim.store_param_remainders": False}
        yield Finding("MT465", "optim.store_param_remainders", rule, (off, {"optim.main_params_dtype": "fp32"}))
    elif o.main_params_dtype != "fp32" and p.pp > 1 and run.model.tie_word_embeddings:
        rule = f"the first and the last of {p.pp} stages would round their copies of the tied embedding differently"
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
    muon_has_whole_matrices,
    kernel_can_update,
    low_precision_has_its_place,
    rates_are_ordered,
    warmup_ends_before_decay,
    wsd_has_its_decay,
    optimizer_can_be_distributed,
    rate_is_plausible,
)
