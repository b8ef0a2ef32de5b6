"""The causes of slow steps that no number of a single step shows, found in the profile, the plan,
the loads of experts and the own times of ranks.

Each cause is priced in seconds of the steps that were made. A part that the plan knows is slow by
what it took beyond its plan; a choice of the recipe is slow by what another choice is planned to
take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import fmean, median

from mtrain.config.resolve.defaults import LONGEST
from mtrain.config.schema.run import RunConfig
from mtrain.errors import MtrainError
from mtrain.layout.grid import RankGrid
from mtrain.plan import recompute
from mtrain.plan.fits import MICRO, MOST_SAMPLES, room_of
from mtrain.plan.rank import worst_stage
from mtrain.plan.time.device import device_of
from mtrain.plan.time.efficiencies import reached_by
from mtrain.plan.time.report import time_report
from mtrain.plan.time.step import priced, step_time, step_work, unknown
from mtrain.plan.time.work import Linear, Pairs, Work
from mtrain.plan.timeline import BACKWARD
from mtrain.plan.tune.space import MOST_TOKENS, changed
from mtrain.report.costs import Excess
from mtrain.report.folder import Record, curve
from mtrain.report.profiled import Profile
from mtrain.report.story import Story
from mtrain.units import bytes_
from mtrain.views.profiles import COMMUNICATION

BEYOND = 1.25
"""A part is slow that took more than so many times its plan: plans have errors, too."""
SHARE = 0.02
"""Causes of a smaller share of a step are left out."""
UNEVEN = 1.05
"""The least work of a stage, or of a rank with experts, over the mean one that counts as uneven."""
WORKING = ("gemm", "attention", "memory", "host", "tp", "cp", "ep")
"""Parts of the work of a stage on its micro-batches."""


@dataclass(frozen=True)
class Found:
    """Everything that causes are found in."""

    record: Record
    config: RunConfig
    story: Story
    profile: Profile | None
    peak: float | None
    """Bytes that the fullest device took; None: not known."""
    free: float | None
    """Bytes of the machine that were free in the last sample of memory; None: not known."""

    @property
    def step_s(self) -> float:
        """Return the usual time of a step."""
        return self._usual("step_s")

    @property
    def computing_s(self) -> float:
        """Return the usual time of the forwards and backwards of a step."""
        return self._usual("forward_backward_s")

    @property
    def micro_batches(self) -> int:
        """Return the micro-batches of a step."""
        trainer = self.config.trainer
        return max(1, trainer.batch // (trainer.micro * self.config.parallel.dp))

    def _usual(self, key: str) -> float:
        steps = {n: line for n, line in self.record.steps.items() if not line.get("profiled")}
        values = [value for _, value in curve(steps or self.record.steps, key)]
        return median(values) if values else 0.0


def causes(found: Found) -> Iterator[Excess]:
    """Yield the causes with the seconds that each took from all steps."""
    steps = len(found.record.steps)
    measured = "events:own_s:uneven" if found.story.own_s else "profiles:parts:uneven"
    sources = {
        _parts: "profiles:parts:beyond",
        _stages: measured,
        _router: "events:rank_loads:skewed",
        _recomputed: "run.yaml:parallel.recompute:planned",
        _small: "run.yaml:trainer.micro_batch_size:planned",
    }
    for cause, source in sources.items():
        # Each reads what another version may have written, and plans what may have no plan.
        with suppress(MtrainError, ValueError, ArithmeticError, KeyError, TypeError, IndexError):
            for words, excess in cause(found):
                if excess > SHARE * found.step_s:
                    yield Excess(words, excess * steps, source)


def _parts(found: Found) -> Iterator[tuple[str, float]]:
    """Yield links that are slower than planned, and a device that waits for its host."""
    profile = found.profile
    planned: Mapping[str, float] = time_report(found.config, 0).get("parts_s", {})
    if profile is None or not planned:
        return
    for axis in COMMUNICATION:
        # Of transfers between stages, a profile cannot tell what is waiting for the other stage.
        names = (axis, "bubble") if axis == "pp" else (axis,)
        took = profile.mean(*names)
        usual = sum(planned[name] for name in names)
        even = sum(excess for _, excess in _stages(found)) if axis == "pp" else 0.0
        if took - even > BEYOND * usual:
            times = f"{took / usual:.1f} x its plan" if usual else "none is planned to show"
            yield f"slow links of {axis}: its communication took {times}", took - even - usual
    if profile.on_device:
        # A profile makes the host slower and nothing else, so the time without one counts.
        everything = sum(one.parts[part] for one in profile.ranks for part in one.parts)
        busy = everything / len(profile.ranks) / 1e6 - profile.mean("host")
        took = found.step_s - busy
        if took > BEYOND * planned["host"]:
            yield "host-bound: the device waits for launches", took - planned["host"]


def _stages(found: Found) -> Iterator[tuple[str, float]]:
    """Yield the stage of the pipeline that works longer than the others."""
    pp = found.config.parallel.pp
    own = _own_of_stages(found)
    if pp < 2 or len(own) < pp:
        return
    mean = fmean(own)
    most = max(own)
    if most > UNEVEN * mean:
        # Each micro-batch waits for the slowest stage, the first one for all stages.
        units = found.micro_batches * found.config.parallel.vpp
        words = f"uneven stages: stage {own.index(most)} works {most / mean:.2f} x the mean"
        yield words, (most - mean) * (units - 1) / units


def _own_of_stages(found: Found) -> list[float]:
    """Return the seconds of a step in which the ranks of each stage work."""
    reports = found.story.own_s
    grid = RankGrid.of(found.config)
    if reports and len(reports[-1]) == found.config.parallel.ranks:
        same = [own for own in reports if len(own) == len(reports[-1])]
        by_rank = [median(values) for values in zip(*same, strict=True)]
        return _by_stage(by_rank, [grid.coords(rank)["pp"] for rank in range(len(by_rank))])
    profile = found.profile
    if profile is None:
        return []
    # What a profile costs lies on all ranks alike.
    whole = max(sum(one.parts.values()) for one in profile.ranks) / 1e6
    scale = found.step_s / whole if whole else 1.0
    by_rank = [scale * sum(one.parts[part] for part in WORKING) / 1e6 for one in profile.ranks]
    return _by_stage(by_rank, [one.coords["pp"] for one in profile.ranks])


def _by_stage(values: Sequence[float], stages: Sequence[int]) -> list[float]:
    of = {stage: [v for v, s in zip(values, stages, strict=True) if s == stage] for stage in stages}
    return [median(of[stage]) for stage in sorted(of)]


def _router(found: Found) -> Iterator[tuple[str, float]]:
    """Yield a router that gives one expert-parallel rank more rows than the others."""
    loads = found.story.loads
    if found.config.parallel.ep < 2 or not loads:
        return
    load = fmean(loads)
    if load > UNEVEN:
        slower = loaded(found.config, load)
        words = f"skewed router: the most loaded rank has {load:.2f} x the rows of an equal one"
        yield words, found.computing_s * (1 - 1 / slower)


def loaded(config: RunConfig, load: float) -> float:
    """Return the planned seconds of a step's computation with so many times the rows on a rank's
    experts, over those of an equal load; by FLOPs where rates are not known.

    Raises:
        ValueError: the family does not say what a stage computes.
    """
    work = step_work(config)
    more = replace(work, stages=tuple(_with_rows(stage, load) for stage in work.stages))
    if unknown(config):
        return _flops(more.stages) / _flops(work.stages)
    device = device_of(config.cluster)
    reached = reached_by(config.cluster)
    slow, usual = (priced(one, device, reached) for one in (more, work))
    once = sum(usual.parts[name] for name in ("dp", "optimizer", "offload"))
    return 1 + (slow.seconds - usual.seconds) / (usual.seconds - once)


def _with_rows(work: Work, load: float) -> Work:
    """Return work with so many times the rows of experts."""

    def rows(products: Counter[Linear]) -> Counter[Linear]:
        return Counter({_taller(one, load): number for one, number in products.items()})

    order = [(_with_rows(part, load), number) for part, number in work.order if part is not work]
    forward = rows(work.forward)
    return replace(work, forward=forward, backward=rows(work.backward), order=order)


def _taller(one: Linear, load: float) -> Linear:
    m = round(load * one.product.m) if one.grouped else one.product.m
    return replace(one, product=one.product._replace(m=m))


def _flops(stages: Sequence[Work]) -> float:
    """Return the FLOPs of forwards and backwards."""
    return sum(
        _products(stage.forward)
        + BACKWARD * _products(stage.backward)
        + _pairs(stage.attends)
        + BACKWARD * _pairs(stage.attends_back)
        for stage in stages
    )


def _products(work: Mapping[Linear, int]) -> float:
    return sum(one.product.flops * number for one, number in work.items())


def _pairs(work: Mapping[Pairs, int]) -> float:
    return sum(one.flops * number for one, number in work.items())


def _recomputed(found: Found) -> Iterator[tuple[str, float]]:
    """Yield recomputation without which the step would fit."""
    config = found.config
    now = recompute.Way(config)
    if config.parallel.recompute.granularity in (None, "none"):
        return
    without = recompute.way(config, "none")
    more = without.peak - now.peak
    if _fits(found, more, without.peak) and 0 < without.cost < now.cost:
        words = f"unnecessary recomputation of {now.words}: {bytes_(more)} more would fit"
        yield words, found.computing_s * (1 - without.cost / now.cost)


def _fits(found: Found, more: float, peak: float) -> bool:
    """Return whether a device has room for so many more bytes, or for a planned peak where none
    was measured.
    """
    room = room_of(found.config)
    if room is not None:
        return (peak if found.peak is None else found.peak + more) <= room.bytes
    return found.free is not None and more * found.config.parallel.ranks <= found.free


def _small(found: Found) -> Iterator[tuple[str, float]]:
    """Yield a micro-batch that is planned to be slower than a larger one that fits."""
    config = found.config
    if unknown(config) or config.trainer.cuda_graph_impl == "full_iteration":
        return
    now = step_time(config).seconds
    peak = worst_stage(config).peak
    best = (now, config.trainer.micro)
    size = 2 * config.trainer.micro
    share = config.trainer.batch // config.parallel.dp
    longest = LONGEST if config.parallel.pp > 1 else MOST_TOKENS
    while size <= min(MOST_SAMPLES, share) and size * config.data.length <= longest:
        larger = changed(config, {MICRO: size})
        needs = worst_stage(larger).peak
        if share % size == 0 and _fits(found, needs - peak, needs):
            best = min(best, (step_time(larger).seconds, size))
        size *= 2
    if best[0] < now:
        words = f"small micro-batch: {MICRO}={best[1]} is planned to be faster than"
        yield f"{words} {config.trainer.micro}", found.step_s * (1 - best[0] / now)
