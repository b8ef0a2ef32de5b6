"""Seconds of collectives: on the fast links of a domain, or on the network, by where the ranks of a
group are.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import Literal

from mtrain.models.graph import Exchange
from mtrain.plan.time.device import MICRO, Device
from mtrain.plan.time.efficiencies import Efficiencies

# How often a tensor goes around a group: a reduction scatters, then gathers.
ROUNDS = {"gather": 1, "scatter": 1, "reduce": 2, "ring": 1, "all_to_all": 1}


@dataclass(frozen=True)
class Group:
    """Ranks that are `stride` apart."""

    size: int
    stride: int

    def inside(self, device: Device) -> int:
        """Return how many of the ranks are in one fast domain."""
        return max(1, min(self.size, device.domain // self.stride))


@dataclass(frozen=True)
class Share:
    """Weights of a rank that are trained, and the ranks that have the same."""

    elements: float
    group: Group
    """Ranks of one copy, over which the weights may be sharded."""
    copies: Group
    """One of each copy (HSDP): they have the same shard."""


@dataclass(frozen=True)
class Links:
    """The cost of the messages of a run's groups on a device."""

    device: Device
    reached: Efficiencies

    def seconds(self, group: Group, exchange: Exchange, *, once: bool = False) -> float:
        """Return the seconds of one exchange; `once`: a row goes to a domain once, and there once
        to each rank that takes it.
        """
        if group.size == 1:
            return 0.0
        waits = self.waits(group)
        if exchange.kind == "all_to_all":
            return waits + self._all_to_all(group, exchange, once)
        share = (group.size - 1) / group.size
        return waits + ROUNDS[exchange.kind] * exchange.bytes * share / self.rate(group)

    def collective(
        self, group: Group, kind: Literal["gather", "scatter", "reduce"], size: float
    ) -> float:
        """Return the seconds of a collective on a tensor of so many bytes in all."""
        return self.seconds(group, Exchange("tp", kind, int(size)))

    def waits(self, group: Group) -> float:
        """Return the latency of a collective in seconds."""
        # The latency is fitted for each doubling of a group.
        return self.reached.latency_us * MICRO * log2(group.size)

    def rate(self, group: Group) -> float:
        """Return the bytes per second of a ring of a group."""
        inside = group.inside(self.device)
        d = self.device
        e = self.reached
        fast = d.fast * e.fast_link
        # Each rank of a domain has its own card: a ring between domains uses all of them.
        return fast if inside == group.size else min(fast, inside * d.network * e.network)

    def _all_to_all(self, group: Group, exchange: Exchange, once: bool) -> float:
        inside = group.inside(self.device)
        d = self.device
        e = self.reached
        domains = group.size / inside
        near = exchange.bytes * (inside - 1) / group.size
        far = exchange.bytes * (1 - 1 / domains)
        if once and exchange.messages > 1:
            row = exchange.bytes / exchange.messages
            far = row * _met(domains, exchange.messages) * (1 - 1 / domains)
            near = row * _met(group.size, exchange.messages) * (1 - 1 / inside)
        # Both kinds of messages travel at the same time.
        return max(near / (d.fast * e.fast_link), far / (d.network * e.network))

    def sent(self, size: float, stride: int) -> float:
        """Return the seconds of a tensor to the rank `stride` further on."""
        near = stride < self.device.domain
        if near:
            rate = self.device.fast * self.reached.fast_link
        else:
            rate = self.device.network * self.reached.network
        return self.reached.latency_us * MICRO + size / rate


def _met(places: float, messages: int) -> float:
    """Return the expected number of distinct places that messages reach, each choosing one at
    random.
    """
    return places * (1 - (1 - 1 / places) ** messages)
