"""Batch: samples per step against micro-batches, data-parallel ranks and pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.rules.finding import Change, Finding, divisors, dp_of, listed, multiples, nearest
from mtrain.config.run import RunConfig


def batch_divides(run: RunConfig) -> Iterator[Finding]:
    """The global batch is a whole number of micro-batches on every data-parallel rank."""
    t, dp = run.trainer, dp_of(run)
    step = t.micro * dp
    if t.global_batch_size % step == 0:
        return
    group = step * (run.parallel.pp if run.parallel.vpp > 1 else 1)
    near = multiples(t.global_batch_size, group)
    if t.global_batch_size < step:
        problem = f"is less than micro_batch_size {t.micro} * dp {dp} = {step}, one micro-batch per rank"
    else:
        problem = f"is no multiple of micro_batch_size {t.micro} * dp {dp} = {step}"
    rule = f"a global batch of {t.global_batch_size} {problem}; nearest: {listed(near)}"
    fixes: list[Change] = [{"trainer.global_batch_size": n} for n in near]
    if t.global_batch_size % dp == 0:
        per_rank = t.global_batch_size // dp
        sizes = nearest(t.micro, divisors(per_rank, t.micro))
        fixes = [*({"trainer.micro_batch_size": n} for n in sizes[:2]), *fixes]
    yield Finding("MT130", "trainer.global_batch_size", rule, tuple(fixes))


def micro_batches_fill_the_pipeline(run: RunConfig) -> Iterator[Finding]:
    """The interleaved schedule takes micro-batches in groups of pp; the plain one idles with fewer than pp."""
    t, p = run.trainer, run.parallel
    step = t.micro * dp_of(run)
    if p.pp == 1 or t.global_batch_size % step:
        return
    count = t.global_batch_size // step
    near = multiples(t.global_batch_size, step * p.pp)
    fixes: tuple[Change, ...] = tuple({"trainer.global_batch_size": n} for n in near)
    if p.vpp > 1 and count % p.pp:
        rule = f"interleaving takes micro-batches in groups of pp {p.pp}, and a step has {count}"
        yield Finding("MT131", "trainer.global_batch_size", rule, (*fixes, {"parallel.vpp": 1}))
    elif count < p.pp:
        rule = f"{count} micro-batch{'es' if count > 1 else ''} on {p.pp} stages: stages idle for most of a step"
        yield Finding("MT132", "trainer.global_batch_size", rule, fixes, "warning")


def groups_of_micro_batches(run: RunConfig) -> Iterator[Finding]:
    """A virtual stage takes at least pp micro-batches in turn, and what is left over is none or as many."""
    t, p = run.trainer, run.parallel
    group, step = p.microbatch_group_size_per_vp_stage, t.micro * dp_of(run)
    if p.vpp == 1 or group is None or t.global_batch_size % step:
        return
    count = t.global_batch_size // step
    usual: Change = {"parallel.microbatch_group_size_per_vp_stage": None}
    if not p.pp <= group <= count and group != p.pp:
        rule = f"groups of {group} micro-batches; a step has {count}, and a group at least pp {p.pp}"
        yield Finding("MT136", "parallel.microbatch_group_size_per_vp_stage", rule, (usual,))
    elif group != p.pp and 0 < count % group < p.pp:
        rule = f"{count} micro-batches in groups of {group} leave {count % group}: none, or at least pp {p.pp}"
        more: tuple[Change, ...] = tuple(
            {"trainer.global_batch_size": n} for n in multiples(t.global_batch_size, step * group)
        )
        yield Finding("MT136", "parallel.microbatch_group_size_per_vp_stage", rule, (usual, *more))


def profile_within_run(run: RunConfig) -> Iterator[Finding]:
    """The profiled step is one of the run."""
    t = run.trainer
    if t.profile_step is not None and t.profile_step > t.train_iters:
        rule = f"step {t.profile_step} never comes: the run has {t.train_iters} steps"
        yield Finding("MT134", "trainer.profile_step", rule, ({"trainer.profile_step": t.train_iters},))


def timeouts_are_ordered(run: RunConfig) -> Iterator[Finding]:
    """A run says where it hangs before it is ended."""
    t = run.trainer
    if t.soft_timeout_s >= t.timeout_s:
        rule = f"stacks after {t.soft_timeout_s:g} s come too late: the run is ended after {t.timeout_s:g} s"
        fixes: tuple[Change, ...] = ({"trainer.soft_timeout_s": t.timeout_s / 5},)
        yield Finding("MT135", "trainer.soft_timeout_s", rule, fixes)


RULES = (
    timeouts_are_ordered,
    batch_divides,
    micro_batches_fill_the_pipeline,
    groups_of_micro_batches,
    profile_within_run,
)
