"""Optimizer: the learning rate's range and the steps of its schedule."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.resolve import tenth
from mtrain.config.rules.finding import Change, Finding
from mtrain.config.run import RunConfig


def rates_are_ordered(run: RunConfig) -> Iterator[Finding]:
    """The schedule falls from lr to min_lr."""
    o = run.optim
    if (o.min_lr or 0.0) > o.lr:
        rule = f"min_lr {o.min_lr:g} is above lr {o.lr:g}"
        fixes: tuple[Change, ...] = ({"optim.min_lr": tenth(o.lr)}, {"optim.min_lr": 0.0})
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
            rule = f"reaches nothing: the schedule is {o.schedule}"
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


def rate_is_plausible(run: RunConfig) -> Iterator[Finding]:
    """A rate of whole numbers is usually one whose exponent was lost."""
    o = run.optim
    if o.name == "adamw" and o.lr > 0.1:
        rule = f"a learning rate of {o.lr:g} is unusual for adamw: 1e-5 to 1e-2 is common"
        fixes: tuple[Change, ...] = ({"optim.lr": 1e-3}, {"optim.lr": 1e-3, "optim.min_lr": 0.0})
        yield Finding("MT427", "optim.lr", rule, fixes, "warning")


RULES = (
    rates_are_ordered,
    warmup_ends_before_decay,
    wsd_has_its_decay,
    optimizer_can_be_distributed,
    rate_is_plausible,
)
