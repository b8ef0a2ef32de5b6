"""Objectives: what a run minimises, and the numbers that it reports of it.

Every module of this package is one, with its class as `OBJECTIVE`; other packages add theirs under
the entry point group `mtrain.objectives`. `objective.name` names one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from torch import Tensor

from mtrain.config.machine import installed
from mtrain.config.schema.run import RunConfig
from mtrain.errors import ConfigError, Problem
from mtrain.models.registry import family_of

SUM = "sum"
MAX = "max"
Batch = Mapping[str, Any]
"""A micro-batch on this rank's device; see `mtrain.data.batch.MicroBatch`."""


@dataclass(frozen=True)
class Metric:
    """A number of a micro-batch, before it is added over micro-batches and ranks."""

    name: str
    value: Tensor | float = 0.0
    """The sum over this micro-batch, never a mean: only the trainer divides. For `max`, the
    largest number, at least 0.
    """
    reduce: str = SUM
    """`sum`: the total is reported; `max`: the largest of all micro-batches and ranks. Otherwise
    the name of a metric, by whose total this one's is divided.
    """

    def of(self, value: Tensor) -> Metric:
        """Return this metric with a value."""
        return replace(self, value=value)


class Objective:
    """A loss of micro-batches.

    The loss of a step is the sum of `loss` over all micro-batches and ranks over the sum of the
    counts, so no layout weighs a sample differently.
    """

    reads_logits = False
    """True if `loss` computes its losses from logits, instead of taking those of the model.

    This rank's columns of all logits then exist at once, as with `kernels.loss=megatron`.
    """
    reads_log_probabilities = False
    """True if `loss` reads the log-probability of each label, which no logits of the whole
    vocabulary need.
    """

    def __init__(self, run: RunConfig) -> None:
        self.run = run

    def metrics(self) -> tuple[Metric, ...]:
        """Return every metric that `loss` reports, with a value of 0: ranks without a loss (other
        pipeline stages) add this.

        `loss` and `tokens`, the predictions that count, are among them.
        """
        raise NotImplementedError

    def loss(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Sequence[Metric]]:
        """Return the sum of losses of a micro-batch, the count that divides it, and its metrics.

        Args:
            output: the sum of losses that the last stage of the model returned; with
                `reads_logits`, its logits [b, s, v / tp]; with `reads_log_probabilities`, those of
                the labels [b, s] in fp32.
            batch: the micro-batch that it was computed from.
        """
        raise NotImplementedError


def objective_of(run: RunConfig) -> Objective:
    """Return the objective that `objective.name` names.

    Raises:
        BadEnvironment: a plug-in does not load, or is no `Objective`.
        ConfigError: the objective reads logits that this run does not have.
    """
    name = run.objective.name
    # A name that ships wins: a plug-in cannot replace the loss of existing runs.
    if name in installed.shipped(__name__):
        kind = import_module(f"{__name__}.{name}").OBJECTIVE
    else:
        entry = installed.found(installed.OBJECTIVES)[name]
        kind = installed.load_class(entry, f"objective {name!r}", Objective)
    if kind.reads_logits:
        _require_logits(run)
    objective: Objective = kind(run)
    return objective


def _require_logits(run: RunConfig) -> None:
    """Raise ConfigError for a run whose model does not return logits, or whose other terms of the
    loss would silently be left out. It names every reason.
    """
    family = family_of(run.model)
    next_token = family.writes and family.tokens_alone(run.model)
    reasons = (
        (
            run.kernels.loss != "megatron",
            f"the plan counts logits only with kernels.loss=megatron (it is {run.kernels.loss})",
            "kernels.loss=megatron",
        ),
        (
            not next_token,
            f"models of the family {run.model.family} have other losses too",
            "objective=next_token",
        ),
        (
            bool(run.model.mtp_num_layers),
            f"multi-token prediction needs the model's loss (layers: {run.model.mtp_num_layers})",
            "model.mtp_num_layers=null",
        ),
        (
            bool(run.trainer.z_loss_coeff),
            f"the model computes the z-loss (trainer.z_loss_coeff={run.trainer.z_loss_coeff})",
            "trainer.z_loss_coeff=null",
        ),
        (
            run.log.token_accuracy,
            "the model counts accurate tokens (log.token_accuracy=true)",
            "log.token_accuracy=false",
        ),
    )
    name = run.objective.name
    problems = [
        Problem("MT127", "objective.name", name, f"cannot read logits because {reason}", fix)
        for applies, reason, fix in reasons
        if applies
    ]
    if problems:
        raise ConfigError(problems)
