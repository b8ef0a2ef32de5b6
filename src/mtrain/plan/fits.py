"""A check that the plan of a step fits a device, and the cheapest change that makes it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mtrain.config.compose.dump import override
from mtrain.config.optimizers import OPTIMIZERS
from mtrain.config.rules import apply, findings
from mtrain.config.schema.run import RunConfig
from mtrain.models.registry import family_of
from mtrain.plan.rank import worst_stage
from mtrain.units import bytes_

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
    """Return the stage with the highest peak, where that is more than a device `holds`; None: it
    fits, or is unknown.
    """
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
    if t.micro % 2 == 0:
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
