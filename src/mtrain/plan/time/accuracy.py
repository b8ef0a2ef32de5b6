"""The error of the time model: measured by its benchmark on published runs, and read here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from mtrain.config.machine.devices import facts_of
from mtrain.config.schema.cluster import ClusterConfig
from mtrain.config.schema.run import RunConfig

FILE = Path(__file__).with_name("accuracy.yaml")


@dataclass(frozen=True)
class ErrorBar:
    """Errors of planned seconds for one kind of configuration, as shares."""

    kind: str
    of: str
    """The runs that were compared, and what the fit had not seen of them."""
    rows: int
    median: float
    p95: float

    @property
    def words(self) -> str:
        """Return the errors in a sentence."""
        return (
            f"off by {self.median:.1%} in the median, {self.p95:.0%} at the 95th percentile:"
            f" {self.kind}, {self.rows} {self.of}"
        )


@dataclass(frozen=True)
class Accuracy:
    """Errors of predicted throughput on published runs whose model was left out of the fit, as
    shares.
    """

    rows: int
    """Published runs."""
    median: float
    p95: float
    """Error at the 95th percentile."""
    pairs: int
    """Pairs of runs of one model on as many devices whose throughput differs by at least `apart`.
    """
    pairs_right: int
    """Pairs that the prediction ranks as published."""
    apart: float
    kinds: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Kind of configuration -> its error bar."""

    @property
    def words(self) -> str:
        """Return the errors in a sentence."""
        return (
            f"predicted rates are off by {self.median:.1%} in the median, {self.p95:.0%} at the"
            f" 95th percentile ({self.rows} published runs, each model left out of its fit;"
            f" {self.pairs_right} of {self.pairs} pairs of runs that are more than {self.apart:.0%}"
            " apart are ranked right)"
        )


@cache
def shipped() -> Accuracy:
    """Return the error of the efficiencies that ship."""
    return Accuracy(**yaml.safe_load(FILE.read_text()))


def accuracy_of(cluster: ClusterConfig) -> Accuracy | None:
    """Return the error of a plan on a cluster; None where its rates are measured and no plans were
    compared.
    """
    # The published runs say nothing about rates that are not fitted to them.
    own = (
        facts_of(cluster.device).on_host
        or cluster.reached
        or cluster.operation_us
        or cluster.software
    )
    return None if own else shipped()


def kind_of(run: RunConfig) -> str:
    """Return the kind of a resolved run whose error bar is known."""
    if run.parallel.ranks == 1:
        return "one device"
    if run.model.moe is not None:
        return "experts"
    return "dense, 16 bits" if run.precision.quantized is None else "dense, 8 bits or fewer"


def error_bar(run: RunConfig) -> ErrorBar | None:
    """Return the error bar of the planned time of a resolved run; None where its rates are measured
    and no plans were compared.
    """
    found = accuracy_of(run.cluster)
    kind = kind_of(run)
    bar = None if found is None else found.kinds.get(kind)
    return None if bar is None else ErrorBar(kind=kind, **bar)
