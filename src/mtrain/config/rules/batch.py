"""Batch: samples per step against micro-batches, data-parallel ranks and pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.resolve.batches import MOST_STAGES, counted, stages
from mtrain.config.rules.finding import DP, Change, Finding, divisors, listed, multiples, nearest
from mtrain.config.rules.rule import Code, rule
from mtrain.config.schema.run import RunConfig

MOST_TOKENS = 1 << 27
"""Tokens of a step beyond which its batch was probably counted in tokens: DeepSeek-V3's largest has
63 million.
"""
LINEAR = "trainer.rampup_batch_size"
LISTED = "trainer.batch_size_schedule"


@rule(
    Code(
        "MT130", example="parallel=single trainer.global_batch_size=15 trainer.micro_batch_size=2"
    ),
    reads=(
        "trainer.global_batch_size trainer.micro_batch_size parallel.vpp trainer.rampup_batch_size "
        f"trainer.batch_size_schedule {DP}"
    ),
)
def batch_divisibility(run: RunConfig) -> Iterator[Finding]:
    """The global batch divides into whole micro-batches on every data-parallel rank."""
    t = run.trainer
    dp = run.parallel.dp
    step = t.micro * dp
    if t.batch % step == 0:
        return
    group = step * (run.parallel.pp if run.parallel.vpp > 1 else 1)
    near = multiples(t.batch, group)
    if t.batch < step:
        problem = (
            f"is less than micro_batch_size {t.micro} * dp {dp} = {step}, one micro-batch per rank"
        )
    else:
        problem = f"is no multiple of micro_batch_size {t.micro} * dp {dp} = {step}"
    rule = f"a global batch of {t.batch} {problem}; nearest: {listed(near)}"
    fixes: list[Change] = [{"trainer.global_batch_size": n} for n in near]
    if t.batch % dp == 0:
        per_rank = t.batch // dp
        sizes = nearest(t.micro, divisors(per_rank, t.micro))
        fixes = [*({"trainer.micro_batch_size": n} for n in sizes[:2]), *fixes]
    if t.rampup_batch_size is not None or t.batch_size_schedule is not None:
        fixes += [{**fix, LINEAR: None, LISTED: None} for fix in fixes[-2:]]
    yield Finding("MT130", "trainer.global_batch_size", rule, tuple(fixes))


@rule(
    Code(
        "MT133",
        help="Divide the batch by data.seq_length, if it is one in tokens.",
        severity="warning",
        example="trainer.global_batch_size=4194304",
    ),
    reads=f"trainer.global_batch_size data.seq_length trainer.micro_batch_size parallel.vpp {DP}",
)
def batch_unit(run: RunConfig) -> Iterator[Finding]:
    """The global batch counts samples; a number of tokens is thousands of times too large."""
    t = run.trainer
    seq = run.data.length
    if t.batch * seq > MOST_TOKENS:
        group = t.micro * run.parallel.dp * (run.parallel.pp if run.parallel.vpp > 1 else 1)
        rule = (
            f"{t.batch} samples of {seq} tokens are {t.batch * seq:.3g} tokens a step; DeepSeek-V3"
            " takes 6.3e+07"
        )
        fixes: tuple[Change, ...] = tuple(
            {"trainer.global_batch_size": n} for n in multiples(t.batch // seq, group)
        )
        yield Finding("MT133", "trainer.global_batch_size", rule, fixes[:1])


@rule(
    Code(
        "MT131",
        "The interleaved schedule takes micro-batches in groups of pp.",
        example="model.num_layers=8 parallel=pp4vpp2 trainer.global_batch_size=6",
    ),
    Code(
        "MT132",
        "With fewer micro-batches than stages, stages idle for most of a step.",
        severity="warning",
        example="parallel=pp4 trainer.global_batch_size=2",
    ),
    reads=f"trainer.global_batch_size trainer.micro_batch_size parallel.pp parallel.vpp {DP}",
)
def pipeline_fill(run: RunConfig) -> Iterator[Finding]:
    """The interleaved schedule takes micro-batches in groups of pp; the plain one idles with fewer
    than pp.
    """
    t = run.trainer
    p = run.parallel
    step = t.micro * p.dp
    if p.pp == 1 or t.batch % step:
        return
    count = t.batch // step
    near = multiples(t.batch, step * p.pp)
    fixes: tuple[Change, ...] = tuple({"trainer.global_batch_size": n} for n in near)
    if p.vpp > 1 and count % p.pp:
        rule = f"interleaving takes micro-batches in groups of pp {p.pp}, and a step has {count}"
        yield Finding("MT131", "trainer.global_batch_size", rule, (*fixes, {"parallel.vpp": 1}))
    elif count < p.pp:
        rule = (
            f"{count} micro-batch{'es' if count > 1 else ''} on {p.pp} stages: stages idle for most"
            " of a step"
        )
        yield Finding("MT132", "trainer.global_batch_size", rule, fixes)


@rule(
    Code("MT145", example="parallel=pp2vpp2 parallel.microbatch_group_size_per_vp_stage=8"),
    reads=(
        "parallel.microbatch_group_size_per_vp_stage parallel.vpp trainer.micro_batch_size "
        f"trainer.global_batch_size {DP}"
    ),
)
def micro_batch_groups(run: RunConfig) -> Iterator[Finding]:
    """A virtual stage processes at least pp micro-batches per turn; a remainder has as many, or is
    empty.
    """
    t = run.trainer
    p = run.parallel
    group = p.microbatch_group_size_per_vp_stage
    step = t.micro * p.dp
    if p.vpp == 1 or group is None or t.batch % step:
        return
    count = t.batch // step
    usual: Change = {"parallel.microbatch_group_size_per_vp_stage": None}
    if not p.pp <= group <= count and group != p.pp:
        rule = (
            f"groups of {group} micro-batches; a step has {count}, and a group at least pp {p.pp}"
        )
        yield Finding("MT145", "parallel.microbatch_group_size_per_vp_stage", rule, (usual,))
    elif group != p.pp and 0 < count % group < p.pp:
        rule = (
            f"{count} micro-batches in groups of {group} leave {count % group}: none, or at least"
            f" pp {p.pp}"
        )
        more: tuple[Change, ...] = tuple(
            {"trainer.global_batch_size": n} for n in multiples(t.batch, step * group)
        )
        yield Finding("MT145", "parallel.microbatch_group_size_per_vp_stage", rule, (usual, *more))


@rule(
    Code("MT134", example="trainer.profile_step=1000"),
    reads="trainer.profile_step trainer.train_iters trainer.profile_ranks parallel.ranks",
)
def profile_range(run: RunConfig) -> Iterator[Finding]:
    """The profiled step and ranks belong to the run."""
    t = run.trainer
    if t.profile_step is not None and t.profile_step > t.steps:
        rule = f"step {t.profile_step} never comes: the run has {t.steps} steps"
        yield Finding("MT134", "trainer.profile_step", rule, ({"trainer.profile_step": t.steps},))
    ranks = run.parallel.ranks
    last = max(t.profile_ranks, default=0)
    if t.profile_step is not None and last >= ranks:
        rule = f"there is no rank {last}: the run has {ranks}, from 0 on"
        there = tuple(rank for rank in t.profile_ranks if rank < ranks) or (ranks - 1,)
        yield Finding("MT134", "trainer.profile_ranks", rule, ({"trainer.profile_ranks": there},))


@rule(
    Code("MT135", example="trainer.soft_timeout_s=700"),
    reads="trainer.soft_timeout_s trainer.timeout_s",
)
def timeout_order(run: RunConfig) -> Iterator[Finding]:
    """A hang is reported before the run is ended."""
    t = run.trainer
    if t.soft_timeout_s >= t.timeout_s:
        rule = (
            f"stacks after {t.soft_timeout_s:g} s come too late: the run is ended after"
            f" {t.timeout_s:g} s"
        )
        fixes: tuple[Change, ...] = ({"trainer.soft_timeout_s": t.timeout_s / 5},)
        yield Finding("MT135", "trainer.soft_timeout_s", rule, fixes)


@rule(
    Code(
        "MT136",
        "Steps grow by whole increments or as a list says, not by both.",
        example="trainer.rampup_batch_size=[8,8,100] trainer.batch_size_schedule=[[8,1000]]",
    ),
    Code(
        "MT137",
        "The batches that a run begins with lead to its global batch in whole increments, or in"
        " pairs that rise.",
        example="trainer.rampup_batch_size=[3,2,100]",
    ),
    reads="trainer.rampup_batch_size trainer.batch_size_schedule trainer.global_batch_size",
)
def ramp_definition(run: RunConfig) -> Iterator[Finding]:
    """Batch sizes grow by whole increments or by a list, never both."""
    t = run.trainer
    if t.rampup_batch_size is not None and t.batch_size_schedule is not None:
        rule = f"steps grow by {LINEAR} or by {LISTED}, and both are set"
        yield Finding(
            "MT136", "trainer.rampup_batch_size", rule, ({LINEAR: None}, {LISTED: None}), unset=True
        )
    elif t.rampup_batch_size is not None:
        first, increment, samples = t.rampup_batch_size
        gap = t.batch - first
        if gap < 1:
            rule = f"begins with {first} samples, which is not below global_batch_size {t.batch}"
            yield Finding("MT137", "trainer.rampup_batch_size", rule, ({LINEAR: None},))
        elif gap % increment or gap // increment > MOST_STAGES:
            near = nearest(increment, [d for d in divisors(gap) if gap // d <= MOST_STAGES])
            rule = (
                f"from {first} to global_batch_size {t.batch} it is {gap}, no multiple of"
                f" {increment}"
            )
            if gap % increment == 0:
                rule = (
                    f"{gap // increment} increments of {increment}, and {MOST_STAGES} are the most"
                )
            rule = f"{rule}; nearest increments: {listed(near)}"
            fixes: list[Change] = [{LINEAR: [first, n, samples]} for n in near[:2]]
            yield Finding("MT137", "trainer.rampup_batch_size", rule, (*fixes, {LINEAR: None}))
    elif t.batch_size_schedule is not None:
        tokens = [end for _, end in t.batch_size_schedule]
        if not tokens or tokens != sorted(set(tokens)) or len(tokens) > MOST_STAGES:
            rule = (
                f"takes 1 to {MOST_STAGES} pairs [size, tokens] whose tokens rise; here"
                f" {tokens[:8]}"
            )
            last = dict(sorted((end, size) for size, end in t.batch_size_schedule))
            rising: Change = {LISTED: [[size, end] for end, size in last.items()][:MOST_STAGES]}
            yield Finding("MT137", "trainer.batch_size_schedule", rule, (rising, {LISTED: None}))


@rule(
    Code("MT138", example="parallel=single trainer.rampup_batch_size=[2,2,100] parallel.ranks=4"),
    reads=(
        "trainer.rampup_batch_size trainer.batch_size_schedule trainer.global_batch_size "
        f"trainer.micro_batch_size parallel.vpp data.seq_length {DP}"
    ),
)
def ramp_divisibility(run: RunConfig) -> Iterator[Finding]:
    """Every batch size divides into whole micro-batches per rank, in groups of pp if the schedule
    interleaves.
    """
    t = run.trainer
    p = run.parallel
    dp = run.parallel.dp
    key = LINEAR if t.rampup_batch_size is not None else LISTED
    plan = stages(run)
    grouped = p.pp if p.vpp > 1 else 1
    step = t.micro * dp * grouped
    wrong = [stage.size for stage in plan[:-1] if stage.size % step]
    if not wrong or t.batch % (t.micro * dp):
        return
    groups = (
        f" * pp {p.pp}, in whose groups interleaving takes micro-batches," if grouped > 1 else ""
    )
    near = multiples(wrong[0], step)
    rule = (
        f"a step of {wrong[0]} samples is no multiple of micro_batch_size {t.micro} * dp"
        f" {dp}{groups} = {step}"
    )
    whole = [
        [max(step, multiples(size, step)[0]), end] for size, end in t.batch_size_schedule or ()
    ]
    fixes: list[Change] = []
    if t.micro > 1:
        small = [
            m
            for m in divisors(t.micro)
            if all(stage.size % (m * dp * grouped) == 0 for stage in plan)
        ]
        fixes += [{"trainer.micro_batch_size": m} for m in reversed(small)]
    if t.rampup_batch_size is None:
        fixes.append({LISTED: whole})
    else:
        first, increment, samples = t.rampup_batch_size
        gaps = [(n, t.batch - n) for n in multiples(first, step) if n < t.batch]
        fixes += [
            {LINEAR: [n, step * nearest(increment // step, divisors(gap // step))[0], samples]}
            for n, gap in gaps
            if gap % step == 0
        ]
    yield Finding("MT138", key, f"{rule}; nearest: {listed(near)}", (*fixes, {key: None}))


@rule(
    Code("MT139", severity="warning", example="trainer.rampup_batch_size=[4,4,1000000]"),
    reads=(
        "trainer.rampup_batch_size trainer.batch_size_schedule trainer.train_iters"
        " trainer.global_batch_size data.seq_length"
    ),
)
def ramp_end(run: RunConfig) -> Iterator[Finding]:
    """The ramp reaches its final batch size before the run ends."""
    t = run.trainer
    plan = stages(run)
    made = counted(plan, t.steps)
    if len(plan) > 1 and made[-1][1] != plan[-1].size:
        key = LINEAR if t.rampup_batch_size is not None else LISTED
        last = made[-1][1]
        needed = sum(number for number, _ in counted(plan, plan[-1].first)[:-1]) + 1
        rule = (
            f"the last of {t.steps} steps takes {last} samples; those of {plan[-1].size} begin with"
            f" {needed}"
        )
        fixes: tuple[Change, ...] = ({"trainer.train_iters": needed}, {key: None})
        yield Finding("MT139", key, rule, fixes)


RULES = (
    timeout_order,
    batch_divisibility,
    batch_unit,
    pipeline_fill,
    micro_batch_groups,
    profile_range,
    ramp_definition,
    ramp_divisibility,
    ramp_end,
)
