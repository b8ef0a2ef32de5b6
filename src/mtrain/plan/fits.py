"""A check that the plan of a step fits a device, the cheapest change that makes it fit, and the
micro-batch and the recomputation of a run that leaves them open.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from mtrain.config.compose.dump import override
from mtrain.config.machine.devices import AUTO, CPU, facts_of
from mtrain.config.optimizers import OPTIMIZERS
from mtrain.config.resolve.defaults import LONGEST, filling
from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.rules import all_rules, apply, findings
from mtrain.config.schema.run import RunConfig, UnresolvedRun
from mtrain.models.registry import family_of
from mtrain.plan import recompute
from mtrain.plan.rank import worst_stage
from mtrain.plan.tune.space import MOST_TOKENS, changed
from mtrain.units import GIB, bytes_

# A rule plans the memory in passing, so not for more weights of a rank or turns of a schedule.
MOST_TENSORS = 20_000
# Share of a device that stays free, for errors of the planned memory and for the driver.
SPARE = 0.04

MODULES = "parallel.recompute.modules"
# Dotted key -> value.
Change = dict[str, Any]


@dataclass(frozen=True)
class Over:
    """The memory that a device lacks."""

    stage: int
    needed: int
    """Bytes."""
    parts: dict[str, int]

    def largest(self) -> str:
        """Return the three largest parts of the stage's memory."""
        most = sorted(self.parts.items(), key=lambda part: -part[1])[:3]
        return ", ".join(f"{name} {bytes_(size)}" for name, size in most)


def over(run: RunConfig, holds: int) -> Over | None:
    """Return the stage with the highest peak above `holds`; None: all fit, or are unknown."""
    worst = _worst(run)
    return worst if worst is not None and worst.needed > holds else None


def _worst(run: RunConfig) -> Over | None:
    """Return the stage with the highest peak; None: unknown."""
    if not is_small(run):
        return None
    try:
        worst = worst_stage(run)
    except ValueError:
        # The stages do not fit the model, which a rule reports.
        return None
    return Over(worst.stage, worst.peak, worst.parts)


def is_small(run: RunConfig) -> bool:
    """Return whether the memory of a run is planned in a moment."""
    m = run.model
    p = run.parallel
    experts = 0 if m.moe is None else 2 * m.moe.num_experts // p.ep
    known = family_of(m).weights is not None
    return (
        known
        and m.num_layers * (20 + experts) <= MOST_TENSORS * p.pp
        and (p.pp * p.vpp) ** 2 <= MOST_TENSORS
    )


def cheapest(run: RunConfig, holds: int) -> str:
    """Return the first change, the cheapest first, with which the plan fits and no other rule is
    broken; empty if there is no such change.
    """
    for step in _changes(run):
        changed = apply(run, step)
        worst = _worst(changed)
        if worst is not None and worst.needed <= holds and _codes(changed) <= _codes(run):
            return " ".join(override(key, value) for key, value in step.items())
    return ""


def _codes(run: RunConfig) -> set[str]:
    return {finding.code for finding in findings(run)}


def _changes(run: RunConfig) -> Iterator[Change]:
    """Yield the possible changes, the cheapest first: each one separately, then together."""
    steps = list(_steps(run))
    yield from steps
    # the last one computes whole layers again
    steps = [step for step in steps if not step.get(MODULES)]
    for number in range(2, len(steps) + 1):
        yield {key: value for step in steps[:number] for key, value in step.items()}


def _steps(run: RunConfig) -> Iterator[Change]:
    """Yield keys that are set together, one change after the other."""
    p = run.parallel
    t = run.trainer
    plain = p.fsdp == "none" and not p.distributed_optimizer and p.dp * p.cp > 1
    if plain and "distributed_optimizer" not in OPTIMIZERS[run.optim.name].cannot:
        yield {"parallel.distributed_optimizer": True}
    if run.kernels.loss == "megatron":
        yield {"kernels.loss": "auto"}
    if p.tp > 1 and not p.sequence_parallel and run.data.length % (p.tp * p.cp) == 0:
        yield {"parallel.sequence_parallel": True}
    if t.micro % (2 * run.together) == 0:
        yield {"trainer.micro_batch_size": t.micro // 2}
    yield from _recomputed(run)
    if run.precision.grad_reduce_in_fp32 and run.precision.format == "bf16":
        yield {"precision.grad_reduce_in_fp32": False}


def _recomputed(run: RunConfig) -> Iterator[Change]:
    """Yield the cheap parts to recompute, then whole layers."""
    again = run.parallel.recompute
    m = run.model
    if again.granularity in (None, "none"):
        modules = [
            "layernorm",
            *["moe_act"] * (m.moe is not None),
            *["mla_up_proj"] * (m.mla is not None),
        ]
        yield {"parallel.recompute.granularity": "selective", MODULES: modules}
        more = [*(word for word in modules if word != "moe_act"), "mlp" if m.moe is None else "moe"]
        yield {"parallel.recompute.granularity": "selective", MODULES: more}
    if again.granularity != "full":
        yield {
            "parallel.recompute.granularity": "full",
            **({MODULES: None} if again.modules else {}),
        }
    elif again.method == "block":
        yield {"parallel.recompute.method": "uniform", "parallel.recompute.num_layers": 1}


MICRO = "trainer.micro_batch_size"
GRANULARITY = "parallel.recompute.granularity"
MOST_SAMPLES = 64


class Room(NamedTuple):
    """The memory that a step may take."""

    bytes: float
    words: str
    """Source of that number, in words."""


def fitted(
    raw: UnresolvedRun, machine: Machine, world_size: int | None
) -> tuple[UnresolvedRun, dict[str, str]]:
    """Return `raw` with the micro-batch and the recomputation that it leaves open, and the reason
    of each: the largest micro-batch of which a step fits by the plan and, where not even the
    smallest does, the cheapest recomputation with which it does.

    Where a rule is broken, no memory is known or nothing fits, they stay open.
    """
    micro = raw.trainer.micro_batch_size is None
    again = raw.parallel.recompute
    named = again.modules is not None or again.method is not None or again.num_layers is not None
    unsaid = again.granularity is None and not named
    if not (micro or unsaid or again.granularity == AUTO) or _on_this_cpu(raw, machine):
        return raw, {}
    run = resolve(raw, machine, world_size)
    room = room_of(run)
    if room is None or not is_small(run) or _broken(run):
        return raw, {}
    try:
        found = _micro_batch(run, room) if micro else {}
        run = changed(run, {key: value for key, (value, _) in found.items()})
        if unsaid or again.granularity == AUTO:
            found |= _recomputation(run, room)
    except ValueError:
        # The family counts no operations, or a rule reports stages that do not fit.
        return raw, {}
    change = {key: value for key, (value, _) in found.items()}
    return changed(raw, change), {key: why for key, (_, why) in found.items() if why}


def room_of(run: RunConfig) -> Room | None:
    """Return the memory that a step may take, by the budget or that of a device, of which `SPARE`
    stays free; None where neither is known.
    """
    budget = run.parallel.recompute.budget_gib
    if budget is not None:
        return Room(budget * GIB * (1 - SPARE), f"parallel.recompute.budget_gib {budget:g}")
    memory = run.cluster.device_memory_gib
    if memory is None or facts_of(run.cluster.device).on_host:
        return None
    return Room(memory * GIB * (1 - SPARE), f"cluster {run.cluster.name}, {memory:g} GiB")


def _on_this_cpu(raw: UnresolvedRun, machine: Machine) -> bool:
    """Return whether a run is surely on a CPU and has no budget: its memory decides nothing."""
    device = raw.cluster.device
    here = device == CPU.name or (device == AUTO and not machine.gpus)
    return here and raw.parallel.recompute.budget_gib is None


def _broken(run: RunConfig) -> bool:
    """Return whether a rule is broken that needs no file."""
    rules = (rule for rule in all_rules() if not rule.disk)
    return any(found.severity == "error" for rule in rules for found in rule(run))


def _micro_batch(run: RunConfig, room: Room) -> dict[str, tuple[Any, str]]:
    """Return the largest micro-batch that fits; without one, the smallest, for a recomputation."""
    deep = run.parallel.pp > 1
    length = run.data.length
    # A pair is two samples, which stay together.
    least = run.together - 1
    sizes = [1 << n for n in reversed(range(least, MOST_SAMPLES.bit_length()))]
    # More samples at once leave fewer micro-batches, and a pipeline waits longer for its ends.
    most = LONGEST if deep else MOST_TOKENS
    sizes = [size for size in sizes if size == 1 << least or size * length <= most]
    sizes = [size for size in sizes if not deep or size <= 8]
    tried = filling(run, sizes)
    fits = (size for size in tried if worst_stage(changed(run, {MICRO: size})).peak <= room.bytes)
    found = next(fits, None)
    if found is None:
        return {
            MICRO: (
                tried[-1],
                f"resolved from {room.words}: the smallest, as none fits without recomputation",
            )
        }
    return {MICRO: (found, f"resolved from {room.words}: the largest that fits")}


def _recomputation(run: RunConfig, room: Room) -> dict[str, tuple[Any, str]]:
    """Return the keys of the cheapest recomputation that fits."""
    need = bytes_(recompute.way(run, "none").peak)
    found = recompute.cheapest(run, room.bytes)
    if found is None:
        why = f"resolved from {room.words}: a step needs {need}, and no recomputation suffices"
        return {GRANULARITY: ("none", why)}
    needs = f"resolved from {room.words}: a step needs {need}"
    if found.run.parallel.recompute.granularity == "none":
        return {GRANULARITY: ("none", needs)}
    return {
        key: (value, "" if value is None else f"{needs} without")
        for key, value in found.change.items()
    }
