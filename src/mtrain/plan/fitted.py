"""The micro-batch and the recomputation of a run that leaves them open, so that a step fits."""

from __future__ import annotations

from typing import Any, NamedTuple

from mtrain.config.machine.devices import AUTO, CPU, facts_of
from mtrain.config.resolve.defaults import LONGEST, filling
from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.rules import all_rules
from mtrain.config.schema.run import RunConfig, UnresolvedRun
from mtrain.plan import recompute
from mtrain.plan.fits import SPARE, is_small
from mtrain.plan.rank import worst_stage
from mtrain.plan.tune.space import MOST_TOKENS, changed
from mtrain.units import GIB, bytes_

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
            found |= _recomputed(run, room)
    except ValueError:
        # The family does not say what it computes, or a rule reports stages that do not fit.
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
    sizes = [1 << n for n in reversed(range(MOST_SAMPLES.bit_length()))]
    # More samples at once leave fewer micro-batches, and a pipeline waits longer for its ends.
    most = LONGEST if deep else MOST_TOKENS
    sizes = [size for size in sizes if size == 1 or size * length <= most]
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


def _recomputed(run: RunConfig, room: Room) -> dict[str, tuple[Any, str]]:
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
