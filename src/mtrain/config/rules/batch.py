"""Batch: samples per step against micro-batches, data-parallel ranks and pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.machine.devices import facts_of
from mtrain.config.resolve.batches import MOST_STAGES, counted, stages
from mtrain.config.rules.finding import (
    DP,
    Change,
    Finding,
    divisors,
    each,
    listed,
    multiples,
    nearest,
)
from mtrain.config.rules.rule import Code, rule
from mtrain.config.schema.run import RunConfig
from mtrain.units import number_of

# DeepSeek-V3's largest step has 63 million tokens; a larger one was probably counted in tokens.
MOST_TOKENS = 1 << 27
BATCH = "trainer.global_batch_size"
MICRO = "trainer.micro_batch_size"
LINEAR = "trainer.rampup_batch_size"
LISTED = "trainer.batch_size_schedule"
GROUP = "parallel.microbatch_group_size_per_vp_stage"


@rule(
    Code("MT135", example="trainer.soft_timeout_s=700"),
    reads="trainer.soft_timeout_s trainer.timeout_s",
)
def timeout_order(run: RunConfig) -> Iterator[Finding]:
    """Cannot report a hang because the run is ended before its stacks are printed."""
    t = run.trainer
    if t.soft_timeout_s >= t.timeout_s:
        detail = f"stacks after {t.soft_timeout_s:g} s, the end after {t.timeout_s:g} s"
        # A fifth leaves time to print the stacks of all ranks before the run ends.
        fixes = each("trainer.soft_timeout_s", [t.timeout_s / 5])
        yield Finding("MT135", "trainer.soft_timeout_s", detail, fixes)


@rule(
    Code("MT130", example=f"parallel=single {BATCH}=15 {MICRO}=2"),
    reads=f"{BATCH} {MICRO} parallel.vpp {LINEAR} {LISTED} {DP}",
)
def batch_divisibility(run: RunConfig) -> Iterator[Finding]:
    """Cannot split the global batch because each data-parallel rank needs whole micro-batches."""
    t = run.trainer
    dp = run.parallel.dp
    step = t.micro * dp
    if t.batch % step == 0:
        return
    # Interleaved stages take whole groups of pp micro-batches (MT131).
    near = multiples(t.batch, step * (run.parallel.pp if run.parallel.vpp > 1 else 1))
    fixes = each(BATCH, near)
    if t.batch % dp == 0:
        # Only smaller micro-batches: they need less memory than the planned one.
        sizes = nearest(t.micro, divisors(t.batch // dp, t.micro))
        fixes = [*each(MICRO, sizes[:2]), *fixes]
    if t.rampup_batch_size is not None or t.batch_size_schedule is not None:
        # A ramp leads to the old batch, so that a new one may need the ramp gone.
        fixes += [{**fix, LINEAR: None, LISTED: None} for fix in fixes[-2:]]
    relation = "is less than" if t.batch < step else "is no multiple of"
    detail = f"{t.batch} {relation} micro_batch_size {t.micro} * dp {dp} = {step}"
    yield Finding("MT130", BATCH, f"{detail}; nearest: {listed(near)}", fixes)


@rule(
    Code(
        "MT133",
        help="Divide the batch by data.seq_length, if it counts tokens.",
        severity="warning",
        example=f"{BATCH}=4194304",
    ),
    reads=f"{BATCH} data.seq_length {MICRO} parallel.vpp {DP}",
)
def batch_unit(run: RunConfig) -> Iterator[Finding]:
    """Cannot be a usual batch size because it counts samples, not tokens."""
    t = run.trainer
    seq = run.data.length
    if t.batch * seq > MOST_TOKENS:
        # The suggestion must also satisfy MT130 and MT131.
        group = t.micro * run.parallel.dp * (run.parallel.pp if run.parallel.vpp > 1 else 1)
        detail = (
            f"{t.batch} samples of {seq} tokens are {t.batch * seq:.3g} tokens a step; DeepSeek-V3"
            " takes 6.3e+07"
        )
        yield Finding("MT133", BATCH, detail, each(BATCH, multiples(t.batch // seq, group)[:1]))


@rule(
    Code("MT131", example=f"model.num_layers=8 parallel=pp4vpp2 {BATCH}=6"),
    Code(
        "MT132",
        "Cannot keep the stages busy because a step has fewer micro-batches than stages.",
        severity="warning",
        example=f"parallel=pp4 {BATCH}=2",
    ),
    reads=f"{BATCH} {MICRO} parallel.pp parallel.vpp {DP}",
)
def pipeline_fill(run: RunConfig) -> Iterator[Finding]:
    """Cannot interleave because the schedule takes micro-batches in groups of pp."""
    t = run.trainer
    p = run.parallel
    step = t.micro * p.dp
    # A batch that does not divide has no number of micro-batches yet (MT130).
    if p.pp == 1 or t.batch % step:
        return
    count = t.batch // step
    fixes = each(BATCH, multiples(t.batch, step * p.pp))
    detail = f"{number_of(count, 'micro-batch')} in a step, pp {p.pp}"
    if p.vpp > 1 and count % p.pp:
        yield Finding("MT131", BATCH, detail, [*fixes, {"parallel.vpp": 1}])
    elif count < p.pp:
        yield Finding("MT132", BATCH, detail, fixes)


@rule(
    Code("MT145", example=f"parallel=pp2vpp2 {GROUP}=8"),
    reads=f"{GROUP} parallel.vpp {MICRO} {BATCH} {DP}",
)
def micro_batch_groups(run: RunConfig) -> Iterator[Finding]:
    """Cannot interleave in groups of this size because each group of a step needs at least pp
    micro-batches.
    """
    t = run.trainer
    p = run.parallel
    group = p.microbatch_group_size_per_vp_stage
    step = t.micro * p.dp
    if p.vpp == 1 or group is None or group == p.pp or t.batch % step:
        return
    count = t.batch // step
    fixes = each(GROUP, [None])
    if not p.pp <= group <= count:
        detail = f"groups of {group}, {count} micro-batches a step, pp {p.pp}"
    # The last group of a step may be smaller than the others, but not than the pipeline.
    elif 0 < count % group < p.pp:
        detail = f"{count} micro-batches in groups of {group} leave {count % group}, pp {p.pp}"
        fixes += each(BATCH, multiples(t.batch, step * group))
    else:
        return
    yield Finding("MT145", GROUP, detail, fixes)


@rule(
    Code("MT134", example="trainer.profile_step=1000"),
    reads="trainer.profile_step trainer.train_iters trainer.profile_ranks parallel.ranks",
)
def profile_range(run: RunConfig) -> Iterator[Finding]:
    """Cannot profile this step or rank because the run does not have it."""
    t = run.trainer
    if t.profile_step is None:
        return
    if t.profile_step > t.steps:
        detail = f"step {t.profile_step} of {t.steps}"
        yield Finding(
            "MT134", "trainer.profile_step", detail, each("trainer.profile_step", [t.steps])
        )
    ranks = run.parallel.ranks
    last = max(t.profile_ranks, default=0)
    if last >= ranks:
        # Ranks of a profile count from 0.
        there = tuple(rank for rank in t.profile_ranks if rank < ranks) or (ranks - 1,)
        detail = f"rank {last} of {ranks}, from 0 on"
        yield Finding(
            "MT134", "trainer.profile_ranks", detail, each("trainer.profile_ranks", [there])
        )


@rule(
    Code("MT383", example="trainer.profile_step=2 trainer.profile_content=[nsys]"),
    reads="trainer.profile_step trainer.profile_content cluster.device",
)
def profile_ranges(run: RunConfig) -> Iterator[Finding]:
    """Cannot mark ranges for Nsight Systems because the device is a CPU, where it records none."""
    t = run.trainer
    if t.profile_step and "nsys" in t.profile_content and facts_of(run.cluster.device).on_host:
        rest = tuple(one for one in t.profile_content if one != "nsys") or ("torch",)
        detail = f"cluster.device={run.cluster.device}"
        fixes = each("trainer.profile_content", [rest])
        yield Finding("MT383", "trainer.profile_content", detail, fixes)


@rule(
    Code(
        "MT136",
        "Cannot grow the batch in two ways because each defines all sizes.",
        example=f"{LINEAR}=[8,8,100] {LISTED}=[[8,1000]]",
    ),
    Code("MT137", example=f"{LINEAR}=[3,2,100]"),
    reads=f"{LINEAR} {LISTED} {BATCH}",
)
def ramp_definition(run: RunConfig) -> Iterator[Finding]:
    """Cannot grow the batch like this because its sizes must reach the global batch in whole
    increments, or in pairs whose tokens rise.
    """
    t = run.trainer
    if t.rampup_batch_size is not None and t.batch_size_schedule is not None:
        fixes = [*each(LINEAR, [None]), *each(LISTED, [None])]
        yield Finding("MT136", LINEAR, f"{LINEAR} and {LISTED} are set", fixes, unset=True)
    elif t.rampup_batch_size is not None:
        first, increment, samples = t.rampup_batch_size
        gap = t.batch - first
        if gap < 1:
            detail = f"begins with {first} samples, which is not below global_batch_size {t.batch}"
            yield Finding("MT137", LINEAR, detail, each(LINEAR, [None]))
        # A ramp with more sizes than MOST_STAGES is surely a slip.
        elif gap % increment or gap // increment > MOST_STAGES:
            near = nearest(increment, [d for d in divisors(gap) if gap // d <= MOST_STAGES])
            if gap % increment:
                detail = f"from {first} to global_batch_size {t.batch} it is {gap}"
                detail += f", no multiple of {increment}"
            else:
                detail = f"{gap // increment} increments of {increment}, at most {MOST_STAGES}"
            sizes = [[first, n, samples] for n in near[:2]]
            detail += f"; nearest increments: {listed(near)}"
            yield Finding("MT137", LINEAR, detail, each(LINEAR, [*sizes, None]))
    elif t.batch_size_schedule is not None:
        tokens = [end for _, end in t.batch_size_schedule]
        if not tokens or tokens != sorted(set(tokens)) or len(tokens) > MOST_STAGES:
            last = dict(sorted((end, size) for size, end in t.batch_size_schedule))
            rising = [[size, end] for end, size in last.items()][:MOST_STAGES]
            detail = f"1 to {MOST_STAGES} pairs [size, tokens]; their tokens are {tokens[:8]}"
            yield Finding("MT137", LISTED, detail, each(LISTED, [rising, None]))


@rule(
    Code("MT138", example=f"parallel=single {LINEAR}=[2,2,100] parallel.ranks=4"),
    reads=f"{LINEAR} {LISTED} {BATCH} {MICRO} parallel.vpp data.seq_length {DP}",
)
def ramp_divisibility(run: RunConfig) -> Iterator[Finding]:
    """Cannot split a step of the ramp because each rank needs whole micro-batches, in groups of pp
    where stages interleave.
    """
    t = run.trainer
    p = run.parallel
    dp = run.parallel.dp
    key = LINEAR if t.rampup_batch_size is not None else LISTED
    plan = stages(run)
    grouped = p.pp if p.vpp > 1 else 1
    step = t.micro * dp * grouped
    # The last size is the global batch, which has its own rule (MT130).
    wrong = [stage.size for stage in plan[:-1] if stage.size % step]
    if not wrong or t.batch % (t.micro * dp):
        return
    fixes: list[Change] = []
    if t.micro > 1:
        # A smaller micro-batch must suit every size of the ramp, not only the first wrong one.
        small = [
            m
            for m in divisors(t.micro)
            if all(stage.size % (m * dp * grouped) == 0 for stage in plan)
        ]
        fixes += each(MICRO, reversed(small))
    if t.rampup_batch_size is None:
        sizes = t.batch_size_schedule or ()
        fixes += each(LISTED, [[[max(step, multiples(n, step)[0]), end] for n, end in sizes]])
    else:
        first, increment, samples = t.rampup_batch_size
        gaps = [(n, t.batch - n) for n in multiples(first, step) if n < t.batch]
        fixes += [
            {LINEAR: [n, step * nearest(increment // step, divisors(gap // step))[0], samples]}
            for n, gap in gaps
            if gap % step == 0
        ]
    groups = f" * pp {p.pp}" if grouped > 1 else ""
    near = listed(multiples(wrong[0], step))
    detail = f"{wrong[0]} samples, micro_batch_size {t.micro} * dp {dp}{groups} = {step}"
    yield Finding("MT138", key, f"{detail}; nearest: {near}", [*fixes, {key: None}])


@rule(
    Code("MT139", severity="warning", example=f"{LINEAR}=[4,4,1000000]"),
    reads=f"{LINEAR} {LISTED} trainer.train_iters {BATCH} data.seq_length",
)
def ramp_end(run: RunConfig) -> Iterator[Finding]:
    """Cannot reach the full batch because the run ends during the ramp."""
    t = run.trainer
    plan = stages(run)
    last = counted(plan, t.steps)[-1][1]
    if len(plan) > 1 and last != plan[-1].size:
        key = LINEAR if t.rampup_batch_size is not None else LISTED
        needed = sum(number for number, _ in counted(plan, plan[-1].first)[:-1]) + 1
        detail = (
            f"the last of {t.steps} steps takes {last} samples; those of {plan[-1].size} begin with"
            f" {needed}"
        )
        yield Finding("MT139", key, detail, [{"trainer.train_iters": needed}, {key: None}])
