"""The way from a command line to a judged configuration, shared by every verb."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mtrain.config.compose import Composed, compose
from mtrain.config.resolve import HERE, Machine, machine_problems, resolve, world_size_of
from mtrain.config.rules import check
from mtrain.config.run import RunConfig
from mtrain.errors import BadInput, Problem
from mtrain.units import bytes_


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
    composed = compose(argv)
    raw = composed.run
    run = resolve(raw, machine, world_size)
    origins = resolved_origins(composed, run)
    problems = check(run, origins, raw=raw, resolve=lambda r: resolve(r, machine, world_size))
    problems += machine_problems(raw, run, machine, world_size, origins["parallel.ranks"])
    problems += memory_problems(run, machine)
    if any(problem.severity == "error" for problem in problems):
        raise BadInput(sorted(problems, key=lambda p: p.severity))
    return Loaded(run, origins, composed.choices, tuple(problems), raw)


def memory_problems(run: RunConfig, machine: Machine) -> list[Problem]:
    """A warning where the state of the model alone is more than the memory of the CPU it would run on."""
    from mtrain.plan.count import state_bytes

    if run.cluster.device != "cpu" or run.cluster.nodes > 1 or not machine.memory_bytes:
        return []
    need = state_bytes(run)
    if need <= machine.memory_bytes:
        return []
    rule = (
        f"weights, gradients and optimizer state need {bytes_(need)}, and this machine has "
        f"{bytes_(machine.memory_bytes)}; for the machines it is meant for, name them: cluster=h100x64"
    )
    return [Problem("MT140", "model.name", run.model.name, rule, "model=llama_tiny", "", "warning")]


def resolved_origins(composed: Composed, run: RunConfig) -> dict[str, str]:
    """Origins of `composed`, with the keys that resolving filled in marked as such."""
    before, after = composed.run.flat(), run.flat()
    return {
        key: composed.origins.get(key, HERE) if before.get(key) == value and key in before else HERE
        for key, value in after.items()
    }
