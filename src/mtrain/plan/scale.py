"""Scaling of a run: the fastest layout on numbers of devices, with a fixed or growing batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtrain.config.resolve.resolution import Machine
from mtrain.config.rules import findings
from mtrain.config.schema.run import UnresolvedRun
from mtrain.errors import ConfigError
from mtrain.plan.count import flops_of_token
from mtrain.plan.tune.choose import refuse, search
from mtrain.plan.tune.search import Found, Layout
from mtrain.plan.tune.space import changed

BATCH = "trainer.global_batch_size"


@dataclass(frozen=True)
class Point:
    """A number of devices."""

    devices: int
    differs: str
    """Swept values that distinguish its configuration from the others."""
    batch: int
    layout: Layout | None
    """None: nothing fits."""
    why: str = ""
    """Reason why nothing fits, in words."""

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens per second of all devices."""
        if self.layout is None:
            return 0.0
        return self.layout.time.tokens_per_second_per_device * self.devices

    @property
    def flops_per_device(self) -> float:
        """Return the model FLOP/s of a device, with causal attention."""
        if self.layout is None:
            return 0.0
        return self.tokens_per_s / self.devices * flops_of_token(self.layout.run)


@dataclass(frozen=True)
class Scale:
    """All of them, the fewest devices first."""

    points: tuple[Point, ...]
    weak: bool

    @property
    def first(self) -> Point | None:
        """Return the point that efficiency is relative to."""
        return next((point for point in self.points if point.layout is not None), None)

    def efficiency(self, point: Point) -> float:
        """Return the model FLOP/s of a device, as a share of those of the first point."""
        first = self.first
        return 0.0 if first is None else point.flops_per_device / first.flops_per_device


def on(raw: UnresolvedRun, devices: int) -> UnresolvedRun:
    """Return an unresolved run on so many devices: whole machines, or a part of one."""
    per_node = raw.cluster.devices_per_node
    if per_node is None:
        return changed(raw, {"parallel.ranks": devices})
    if devices < per_node:
        return changed(
            raw, {"cluster.nodes": 1, "cluster.devices_per_node": devices, "parallel.ranks": None}
        )
    return changed(raw, {"cluster.nodes": devices // per_node, "parallel.ranks": None})


def misfit(raw: UnresolvedRun, devices: int) -> str:
    """Return why so many devices are no whole machines of the cluster, with the nearest numbers
    that are; empty if they are.
    """
    per_node = raw.cluster.devices_per_node
    # A part of one machine is possible where all of its parts are equal.
    if per_node is None or devices % per_node == 0 or per_node % devices == 0:
        return ""
    below = devices // per_node * per_node
    near = " and ".join(str(number) for number in (below, below + per_node) if number)
    return (
        f"{devices} devices are no whole machines of {raw.cluster.name}, which have {per_node};"
        f" nearest: {near}"
    )


def point(
    raw: UnresolvedRun,
    said: Mapping[str, Any],
    machine: Machine,
    devices: int,
    batch: int,
    differs: str,
) -> Point:
    """Return the fastest layout of a run on so many devices.

    Raises:
        ConfigError: too little is known of the devices or the model, whatever their number.
    """
    found, task = search(changed(on(raw, devices), {BATCH: batch}), said, machine, None, 1)
    if found.best:
        return Point(devices, differs, batch, found.best[0])
    try:
        # It must not try more machines: their number is given.
        refuse(found, task, lambda more: Found((), 0, 0))
        rules = [one.rule for one in findings(task.resolve(task.raw)) if one.severity == "error"]
    except ConfigError as error:
        rules = [problem.rule for problem in error.problems]
    return Point(devices, differs, batch, None, rules[0] if rules else "no layout keeps all rules")


def batches(first: int, devices: Sequence[int], *, weak: bool) -> list[int | None]:
    """Return the batch for each number of devices, `first` on the fewest; None: a fraction."""
    if not weak:
        return [first] * len(devices)
    return [None if first * each % devices[0] else first * each // devices[0] for each in devices]
