"""Objectives: what a run minimises, and the numbers that it reports of it.

Every module of this package is one, with its class as `OBJECTIVE`; other packages add theirs under
the entry point group `mtrain.objectives`. `trainer.objective` names one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from torch import Tensor

from mtrain.config.machine import installed
from mtrain.config.schema.run import RunConfig

SUM = "sum"
Batch = Mapping[str, Any]
"""A micro-batch on this rank's device; see `mtrain.data.batch.MicroBatch`."""


@dataclass(frozen=True)
class Metric:
    """A number of a micro-batch, before it is added over micro-batches and ranks."""

    name: str
    value: Tensor | float = 0.0
    """The sum over this micro-batch, never a mean: only the trainer divides."""
    reduce: str = SUM
    """`sum`: the total is reported. Otherwise the name of a metric, by whose total this one's is
    divided.
    """

    def of(self, value: Tensor) -> Metric:
        """Return this metric with a value."""
        return replace(self, value=value)


class Objective:
    """A loss of micro-batches.

    The loss of a step is the sum of `loss` over all micro-batches and ranks over the sum of the
    counts, so no layout weighs a sample differently.
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
            output: what the last stage of the model returned.
            batch: the micro-batch that it was computed from.
        """
        raise NotImplementedError


def objective_of(run: RunConfig) -> Objective:
    """Return the objective that `trainer.objective` names.

    Raises:
        BadEnvironment: a plug-in does not load, or is no `Objective`.
    """
    name = run.trainer.objective
    # A name that ships wins: a plug-in cannot replace the loss of existing runs.
    if name in installed.shipped(__name__):
        kind = import_module(f"{__name__}.{name}").OBJECTIVE
    else:
        entry = installed.found(installed.OBJECTIVES)[name]
        kind = installed.load_class(entry, f"objective {name!r}", Objective)
    objective: Objective = kind(run)
    return objective
