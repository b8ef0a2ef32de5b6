"""The launch queue: the host starts kernels in order and the device computes them in order. The
device waits for launches, and the host waits only where it reads a result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from mtrain.plan.time.device import MICRO
from mtrain.plan.time.work import Kind, Work

LOW = ("low", "experts_low")
FORWARD, BACKWARD = range(2)


@dataclass(frozen=True)
class HostCost:
    """The cost of a step on the host, per kernel and per module."""

    source: str
    """The runs that it was fitted on."""
    launch_us: float
    """Time of a kernel: the Python, Triton and driver work behind one launch."""
    module_us: float
    """Time of an operation of a layer, forward and backward together: its module and autograd."""
    step_us: float
    """Time of a step in which the device idles: data, hooks, logging."""
    launches: Mapping[str, tuple[float, float]]
    """Kind of operation, or recipe of low precision -> kernels of its forward and of its backward.
    An operation of experts in low precision launches those of its recipe.
    """
    waits: tuple[str, ...] = ()
    """Recipes of low precision in which the host waits for the device at every product."""
    gradient_bytes: float = 0.0
    """Bytes that a separate pass moves to add the gradient of a linear weight's element."""
    step_bytes: float = 0.0
    """Bytes that the device moves for each trained element once a step on top of the update's."""
    speed: float = field(default=1.0, kw_only=True)
    """Speed of this host, relative to that of the source."""

    def seconds(self, work: Work, recipe: str) -> tuple[float, float]:
        """Return the seconds of the host for the forward and the backward of some work."""
        forward = 0.0
        backward = 0.0
        for kind, number in work.forwards.items():
            first, second = self._launches(kind, recipe)
            again = work.again[kind]
            forward += number * (first * self.launch_us + self.module_us / 2)
            backward += number * (second * self.launch_us + self.module_us / 2)
            backward += again * (first * self.launch_us + self.module_us / 2)
        return forward * MICRO / self.speed, backward * MICRO / self.speed

    def kernels(self, work: Work, recipe: str) -> tuple[float, float]:
        """Return the launches of the forward and the backward of some work."""
        pairs = [
            (self._launches(kind, recipe), n, work.again[kind]) for kind, n in work.forwards.items()
        ]
        return (
            sum(each[FORWARD] * n for each, n, _ in pairs),
            sum(each[BACKWARD] * n + each[FORWARD] * again for each, n, again in pairs),
        )

    def _launches(self, kind: Kind, recipe: str) -> tuple[float, float]:
        if kind in LOW and recipe in self.launches:
            return self.launches[recipe]
        return self.launches.get(kind, self.launches["other"])


class Span(NamedTuple):
    """Consecutive kernels."""

    host: float
    """Seconds in which the host starts them."""
    device: float
    """Seconds in which the device computes them."""


def queued(spans: Sequence[Span]) -> float:
    """Return the seconds until the device has computed everything, from an empty queue.

    Up to some kernel the device waits for the host; from that one on, it never does: the longest of
    all such splits.
    """
    host = 0.0
    device = sum(span.device for span in spans)
    longest = device
    for span in spans:
        host += span.host
        device -= span.device
        # Only the last of its kernels has to be computed after the last launch.
        longest = max(longest, host + device)
    return longest


def waiting(spans: Iterable[Span]) -> float:
    """Return the seconds of spans at whose ends the host waits for the device."""
    return sum(max(span) for span in spans)


def there_and_back(forward: Sequence[Span], backward: Sequence[Span]) -> list[Span]:
    """Return the spans of a micro-batch: parts forward, and in reverse order backward."""
    return list(chain(forward, reversed(backward)))
