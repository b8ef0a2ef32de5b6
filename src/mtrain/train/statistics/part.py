"""A part of the statistics of a step that hooks add up in its forwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch


class Part:
    """Sums and largest values over the forwards of a described step, on the device.

    All ranks have them in the same order, and every rank calls `watch` and `leave`.
    """

    sums: torch.Tensor
    """Numbers that add up over forwards and ranks, fp64."""
    maxima: torch.Tensor
    """Numbers of which the largest counts, fp64."""

    def watch(self) -> None:
        """Begin a step at zero, and add up its forwards until `leave`."""
        raise NotImplementedError

    def leave(self) -> None:
        """Add up no more."""
        raise NotImplementedError

    def events(self, sums: Sequence[float], maxima: Sequence[float]) -> Iterator[dict[str, Any]]:
        """Yield the facts of events, from the numbers of all ranks: `of`, `columns`, `rows`."""
        raise NotImplementedError


class Handles:
    """Hooks of modules, while a step is described."""

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def add(self, handle: Any) -> None:
        """Keep a hook that a module has got."""
        self._handles.append(handle)

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def recomputes() -> bool:
    """Return whether a forward runs within the backward: recomputation makes it once more."""
    return torch._C._current_graph_task_id() != -1
