"""Every model in every layout, number format and cluster: which can launch, and the first reason
why not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtrain.config.compose.choices import unknown_choice
from mtrain.config.compose.composer import compose
from mtrain.config.compose.origins import COMMAND_LINE
from mtrain.config.compose.paths import recipe_names
from mtrain.config.machine.devices import facts_of
from mtrain.config.resolve.batches import NO_RAMP
from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.rules import all_rules
from mtrain.config.schema.cluster import ClusterConfig
from mtrain.config.schema.precision import PrecisionConfig, UnresolvedPrecision
from mtrain.config.schema.run import RunConfig, UnresolvedRun
from mtrain.plan.count import state_bytes
from mtrain.recipes.delta import section
from mtrain.units import GIB, bytes_

AXES = ("model", "parallel", "precision", "cluster")
MEMORY = "memory"
"""The reason of a combination whose state exceeds the memory of its devices."""

Reason = tuple[str, str]
"""A code and a sentence; both empty where there is nothing to say."""
FINE: Reason = ("", "")


@dataclass(frozen=True)
class Report:
    """One combination."""

    model: str
    parallel: str
    precision: str
    cluster: str
    ok: bool
    code: str = ""
    rule: str = ""


def validated(
    axes: Mapping[str, Sequence[str]], base: UnresolvedRun, machine: Machine
) -> Iterator[Report]:
    """Yield the report of each combination, with the smallest batch that its layout can take.

    What a model and a layout make of a number of machines is the same for every device and format:
    that is done once.
    """
    parts: dict[tuple[str, str], Any] = {
        (axis, name): part_of(axis, name) for axis in AXES for name in axes[axis]
    }
    formats = {
        pair: _formats(base, parts["precision", pair[0]], parts["cluster", pair[1]], machine)
        for pair in itertools.product(axes["precision"], axes["cluster"])
    }
    ranks: dict[Any, int] = {}
    for model, layout in itertools.product(axes["model"], axes["parallel"]):
        shaped: dict[Any, _Shaped] = {}
        for precision, name in itertools.product(axes["precision"], axes["cluster"]):
            cluster = parts["cluster", name]
            shape = (cluster.device, cluster.nodes, cluster.devices_per_node)
            if shape not in shaped:
                sections = {
                    "model": parts["model", model],
                    "parallel": parts["parallel", layout],
                    "cluster": cluster,
                }
                raw = base.model_copy(update=sections)
                if (layout, shape) not in ranks:
                    ranks[layout, shape] = resolve(raw, machine).parallel.ranks
                shaped[shape] = _Shaped(_smallest_batch(raw, ranks[layout, shape], machine))
            code, rule = shaped[shape].reason(formats[precision, name], cluster, machine)
            yield Report(model, layout, precision, name, not code, code, rule)


def part_of(axis: str, name: str) -> Any:
    """Return the section of a choice; what is no layout but the name of a recipe is the layout of
    that recipe.
    """
    if (
        axis == "parallel"
        and name in recipe_names()
        and unknown_choice(axis, name, COMMAND_LINE) is not None
    ):
        return compose([f"recipe={name}"]).run.parallel
    return section(axis, name)


def _formats(
    base: UnresolvedRun, precision: UnresolvedPrecision, cluster: ClusterConfig, machine: Machine
) -> PrecisionConfig:
    return resolve(
        base.model_copy(update={"precision": precision, "cluster": cluster}), machine
    ).precision


def _smallest_batch(raw: UnresolvedRun, ranks: int, machine: Machine) -> RunConfig:
    """Return the run, resolved, with a micro-batch of one for every stage and
    data-parallel rank.
    """
    p = raw.parallel
    batch = max(1, ranks // p.model_ranks) * p.pp
    trainer = raw.trainer.model_copy(
        update={"global_batch_size": batch, "micro_batch_size": 1, **NO_RAMP}
    )
    said = raw.data.seq_length
    data = raw.data
    if said is not None:
        data = data.model_copy(update={"seq_length": min(said, raw.model.max_position_embeddings)})
    return resolve(raw.model_copy(update={"trainer": trainer, "data": data}), machine)


FORMAT = ("precision", "cluster.sm")
"""What a combination has of a number format and of a generation of devices."""
_OF_FORMATS = {
    of: [rule for rule in all_rules() if rule.reads_any(*FORMAT) is of] for of in (False, True)
}


def _first(run: RunConfig, *, of_formats: bool) -> Reason:
    """Return the first error that the rules of formats, or all others, have."""
    for rule in _OF_FORMATS[of_formats]:
        for finding in rule(run):
            if finding.severity == "error":
                return finding.code, f"{finding.path}: {finding.rule}"
    return FINE


@dataclass
class _Shaped:
    """A model in a layout on a number of machines, and what was found of it."""

    run: RunConfig
    plain: Reason | None = None
    by_format: dict[Any, Reason] = field(default_factory=dict)
    state: dict[Any, int] = field(default_factory=dict)

    def reason(
        self, precision: PrecisionConfig, cluster: ClusterConfig, machine: Machine
    ) -> Reason:
        """Return the first reason against one format on one cluster."""
        if self.plain is None:
            self.plain = _first(self.run, of_formats=False)
        if self.plain != FINE:
            return self.plain
        key = (precision.dtype, precision.quantized, cluster.sm)
        if key not in self.by_format:
            facts = self.run.cluster.model_copy(update={"sm": cluster.sm})
            run = self.run.model_copy(update={"precision": precision, "cluster": facts})
            self.by_format[key] = _first(run, of_formats=True)
            self.state[precision.dtype] = self.state.get(precision.dtype) or state_bytes(run)
        if self.by_format[key] != FINE:
            return self.by_format[key]
        return self._memory(self.state[precision.dtype], cluster, machine)

    def _memory(self, state: int, cluster: ClusterConfig, machine: Machine) -> Reason:
        need = state / self.run.parallel.ranks
        here = (cluster.device_memory_gib or 0) * GIB
        where = "a device"
        if facts_of(self.run.cluster.device).on_host:
            need = state
            here = machine.memory_bytes
            where = "the machine"
        if not here or need <= here:
            return FINE
        rule = (
            f"weights, gradients and optimizer state need at least {bytes_(need)}, and {where} has"
            f" {bytes_(here)}"
        )
        return MEMORY, rule
