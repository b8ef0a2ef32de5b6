"""The report of a rank that runs out of memory: its tensors by module, next to the plan's parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from mtrain import strict_json
from mtrain.config.schema.run import RunConfig
from mtrain.errors import NO_MEMORY, say
from mtrain.mcore.state.local_params import local_params
from mtrain.mcore.state.optimizer_state import state_shards
from mtrain.plan.fits import cheapest
from mtrain.plan.report import report
from mtrain.train.hooks.base import Hook, reason
from mtrain.train.hooks.memory import sample_of
from mtrain.train.loop.context import TrainContext
from mtrain.units import bytes_
from mtrain.world.stacks import ERRORS

LARGEST = 20
"""Modules that a report has."""
LESS = 0.9
"""The share of the planned peak that a suggested change must not exceed."""
OTHERWISE = "a smaller trainer.micro_batch_size, or more ranks"


class OutOfMemory(Hook):
    """A report in `errors/` of each rank that runs out of memory, and on a GPU the allocator's
    snapshot; the first of these ranks prints the main lines.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / ERRORS

    def on_error(self, context: TrainContext, error: BaseException, *, saveable: bool) -> None:
        """Write the report."""
        if not is_out_of_memory(error):
            return
        world = context.world
        self.folder.mkdir(exist_ok=True)
        name = f"out_of_memory_rank_{world.rank:05d}"
        if world.device.dump_memory is not None:
            with suppress(Exception):  # an interface without promises
                world.device.dump_memory(str(self.folder / f"{name}.pickle"))
        found = described(context, error)
        (self.folder / f"{name}.json").write_text(strict_json.dumps(found, indent=1))
        # All ranks of a stage may lack memory at once, and say the same.
        if world.store.add("out_of_memory", 1) == 1:
            say(*_lines(found, world.rank), f"  all of it: {self.folder / name}.json", error=True)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one that it follows from, is a refusal of memory."""
    # Libraries wrap the allocator's error in their own.
    while error is not None:
        kinds = (MemoryError, torch.OutOfMemoryError)
        if isinstance(error, kinds) or NO_MEMORY.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def described(context: TrainContext, error: BaseException) -> dict[str, Any]:
    """Return the report of this rank: `memory`, the `modules` with the most bytes, the bytes of
    all modules, the rest of what is allocated (activations, and on a CPU libraries), the plan of
    this rank's stage, and the `fix`.
    """
    modules = bytes_by_module(context)
    most = sorted(modules, key=lambda name: -sum(modules[name].values()))[:LARGEST]
    total = sum(sum(parts.values()) for parts in modules.values())
    memory = sample_of(context.world)
    return {
        "step": context.state.step + 1,
        "error": reason(error),
        "memory": memory,
        "modules": {name: modules[name] for name in most},
        "modules_bytes": total,
        "rest_bytes": max(0, int(memory["allocated_bytes"]) - total),
        **_planned(context.run, context.world.coords["pp"]),
    }


def bytes_by_module(context: TrainContext) -> dict[str, dict[str, int]]:
    """Return the bytes of weights, gradients and optimizer state of this rank by module."""
    found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    state = context.state
    for chunk in state.chunks:
        for own in local_params(chunk):
            parts = found[own.name.rpartition(".")[0]]
            parts["weights"] += own.weight.nbytes
            gradient = getattr(own.param, "main_grad", None)
            gradient = own.param.grad if gradient is None else gradient
            parts["gradients"] += 0 if gradient is None else gradient.nbytes
    with suppress(Exception):  # an optimizer may not have its state yet, or only half of it
        for shard in state_shards(state.chunks, state.optimizer):
            parts = found[shard.local_param.name.rpartition(".")[0]]
            held = shard.inner.state.get(shard.updated, {}).values()
            moments = [each for each in held if isinstance(each, torch.Tensor)]
            # Main weights of fp32 models are the weights themselves, which were counted.
            own_weights = shard.local_param.weight.untyped_storage().data_ptr()
            if shard.main.untyped_storage().data_ptr() != own_weights:
                moments.append(shard.main)
            parts["optimizer"] += sum(each.nbytes for each in moments)
    return {name: dict(parts) for name, parts in found.items()}


def _planned(run: RunConfig, stage: int) -> dict[str, Any]:
    """Return the planned parts of a stage, its peak, and the cheapest change that lowers it."""
    try:
        plan = report(run)["memory"]["stages"][stage]
        fix = cheapest(run, int(LESS * plan["peak"]))
    # The process is out of memory, and some families have no plan.
    except (MemoryError, ValueError, IndexError):
        return {"planned": {}, "planned_peak_bytes": None, "fix": OTHERWISE}
    return {
        "planned": plan["parts"],
        "planned_peak_bytes": plan["peak"],
        "fix": fix or OTHERWISE,
    }


def _lines(found: Mapping[str, Any], rank: int) -> list[str]:
    """Return the main lines of a report."""
    modules = {name: sum(parts.values()) for name, parts in found["modules"].items()}
    lines = [
        f"rank {rank} is out of memory in step {found['step']}:"
        f" {bytes_(found['memory']['allocated_bytes'])} allocated,"
        f" {bytes_(found['modules_bytes'])} of them weights, gradients and optimizer state",
        f"  largest modules: {_most(modules)}",
    ]
    if found["planned"]:
        peak = bytes_(found["planned_peak_bytes"])
        lines.append(f"  planned for its stage: {peak}; {_most(found['planned'])}")
    return [*lines, f"  fix: {found['fix']}"]


def _most(sizes: Mapping[str, int], count: int = 4) -> str:
    most = sorted(sizes.items(), key=lambda item: -item[1])[:count]
    return ", ".join(f"{name} {bytes_(size)}" for name, size in most)
