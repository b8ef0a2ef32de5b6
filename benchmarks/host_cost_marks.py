"""Marks in a step: where layers begin, forward and backward."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from host_cost_driver import LAUNCHES

FORWARD = "forward"
BACKWARD = "backward"


class Observer(Protocol):
    """An observer of the layers of a step; `way` is forward or backward."""

    def begin(self, way: str) -> None:
        """Note that the first of the layers begins."""

    def end(self, way: str) -> None:
        """Note that the last of the layers has ended."""


@dataclass(frozen=True)
class Span:
    """The work of one layer in one micro-batch."""

    us: float
    launches: float


class Timer:
    """Microseconds of this thread and launches of a layer, by way and micro-batch."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.spans: dict[str, list[Span]] = {FORWARD: [], BACKWARD: []}
        self._begun: dict[str, tuple[float, int]] = {}

    def begin(self, way: str) -> None:
        """Start the clock."""
        self._begun[way] = (time.thread_time(), LAUNCHES.total)

    def end(self, way: str) -> None:
        """Stop the clock."""
        seconds = time.thread_time()
        before, launched = self._begun.pop(way)
        self.spans[way].append(
            Span(1e6 * (seconds - before) / self.layers, (LAUNCHES.total - launched) / self.layers)
        )


def between(layers: list[Any], period: int) -> list[Any]:
    """Return the layers that lie between the marks: all but the first and the last period."""
    return layers[period:-period]


@contextmanager
def observed(layers: list[Any], period: int, observer: Observer) -> Iterator[None]:
    """Call the observer where the second period of layers begins and where the last begins, while
    this is open.

    A backward begins where the gradient of what the last layers read has arrived. So all that lies
    between is whole periods, however a layer shares its work with the next one.
    """

    def at_first(stream: Any) -> None:
        if stream.requires_grad:
            stream.register_hook(lambda _: observer.end(BACKWARD))
        observer.begin(FORWARD)

    def at_last(stream: Any) -> None:
        observer.end(FORWARD)
        if stream.requires_grad:
            stream.register_hook(lambda _: observer.begin(BACKWARD))

    hooks = [on_input(layers[period], at_first), on_input(layers[-period], at_last)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def on_input(layer: Any, act: Callable[[Any], None]) -> Any:
    """Call `act` with the hidden states that a layer reads, before it reads them; return the hook's
    handle.
    """

    def before(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        act(given[0] if given else named["hidden_states"])

    return layer.register_forward_pre_hook(before, with_kwargs=True)
