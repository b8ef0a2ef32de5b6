"""The way from a command line to a judged configuration, shared by every verb."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mtrain.config import kernels
from mtrain.config.compose import Composed, Rejected, compose
from mtrain.config.mend import mended
from mtrain.config.resolve import HERE, Machine, machine_problems, resolve, world_size_of
from mtrain.config.rules import check
from mtrain.config.run import RunConfig
from mtrain.errors import BadInput, Problem
from mtrain.units import GIB, bytes_


@dataclass(frozen=True)
class Loaded(Composed):
    """A configuration that is resolved and passed every rule."""

    raw: RunConfig | None = None
    """The configuration before it was resolved."""


def load(argv: Sequence[str], machine: Machine | None = None, environment: Mapping[str, str] = os.environ) -> Loaded:
    """Composes, resolves and judges; warnings are kept in `.warnings`.

    Raises:
        BadInput: with every problem of the schema or, where the schema is satisfied, of the rules.
    """
    machine = machine or Machine.here()
    world_size = world_size_of(environment)
    try:
        composed = compose(argv)
    except Rejected as error:
        found = list(error.problems)
        if error.partial is not None:
            found = mended(found, error.partial.run, lambda r: resolve(r, machine, world_size))
        raise BadInput([*found, *also_wrong(error, machine, world_size)]) from None
    raw = composed.run
    run = resolve(raw, machine, world_size)
    origins = resolved_origins(composed, run)
    problems = judge(composed, run, origins, machine, world_size)
    problems += memory_problems(run, machine, origins)
    if any(problem.severity == "error" for problem in problems):
        raise BadInput(sorted(problems, key=lambda p: p.severity))
    return Loaded(run, origins, composed.choices, tuple(problems), composed.history, composed.files, raw)


def judge(
    composed: Composed, run: RunConfig, origins: Mapping[str, str], machine: Machine, world_size: int | None
) -> list[Problem]:
    """What the rules say of a resolved configuration, and what this machine does."""
    problems = check(run, origins, raw=composed.run, resolve=lambda r: resolve(r, machine, world_size))
    problems += kernels.problems(run, machine, origins)
    return problems + machine_problems(composed.run, run, machine, world_size, origins["parallel.ranks"])


def also_wrong(error: Rejected, machine: Machine, world_size: int | None) -> list[Problem]:
    """Broken rules of a configuration that the schema refused, between keys that it did not refuse.

    A refused key has its default for the time being, so what speaks of it is left out.
    """
    if error.partial is None:
        return []
    run = resolve(error.partial.run, machine, world_size)
    found = judge(error.partial, run, resolved_origins(error.partial, run), machine, world_size)
    refused = [p.path for p in error.problems if p.path in run.flat()]

    def speaks_of_refused(problem: Problem) -> bool:
        text = f"{problem.path} {problem.rule} {problem.fix}"
        return any(path in text or path.rpartition(".")[2] in text for path in refused)

    return [p for p in found if p.severity == "error" and not speaks_of_refused(p)]


def memory_problems(run: RunConfig, machine: Machine, origins: Mapping[str, str]) -> list[Problem]:
    """A warning where the state of the model alone is more than the memory that it would run in."""
    from mtrain.plan.count import state_bytes

    if run.cluster.device != "cpu":
        return _device_memory(run, origins)
    if run.cluster.nodes > 1 or not machine.memory_bytes:
        return []
    need = state_bytes(run)
    if need <= machine.memory_bytes:
        return []
    rule = (
        f"weights, gradients and optimizer state need {bytes_(need)}, and this machine has "
        f"{bytes_(machine.memory_bytes)}; for the machines it is meant for, name them: cluster=h100x64"
    )
    return [
        Problem("MT140", "model.name", run.model.name, rule, "model=llama_tiny", origins["model.name"], "warning")
    ]


def _device_memory(run: RunConfig, origins: Mapping[str, str]) -> list[Problem]:
    """The same of one device; state in host memory is not counted, so nothing is said where there is some."""
    from mtrain.plan.count import state_bytes

    memory, ranks = run.cluster.device_memory_gib, run.parallel.ranks or 1
    if memory is None or run.optim.cpu_offload or state_bytes(run) <= memory * GIB * ranks:
        return []
    spread = run.model_copy(update={"parallel": run.parallel.model_copy(update={"distributed_optimizer": True})})
    helps = run.optim.name == "adamw" and run.parallel.fsdp == "none" and state_bytes(spread) <= memory * GIB * ranks
    need, here = bytes_(state_bytes(run) / ranks), bytes_(memory * GIB)
    rule = f"weights, gradients and optimizer state need at least {need} a device, and {run.cluster.name} has {here}"
    fix = "parallel.distributed_optimizer=true" if helps else "a cluster of more devices, or a larger tp, pp or ep"
    key = "cluster.device_memory_gib"
    return [Problem("MT146", key, memory, rule, fix, origins[key], "warning")]


def resolved_origins(composed: Composed, run: RunConfig) -> dict[str, str]:
    """Origins of `composed`, with the keys that resolving filled in marked as such."""
    before, after = composed.run.flat(), run.flat()
    return {
        key: composed.origins.get(key, HERE) if before.get(key) == value and key in before else HERE
        for key, value in after.items()
    }
