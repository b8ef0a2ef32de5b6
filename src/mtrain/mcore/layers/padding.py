"""Padding and recorded experts of the current micro-batch, for the parts of a model that count or
route tokens.

megatron-core hands a mask to its layers, but not to those of multi-token prediction (0.16.1), nor
this rank's part of it to pipeline stages in between. Here the mask is known while a micro-batch
runs forward, and again where a part of its forward is computed once more in the backward, which may
be that of another micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


class _Known:
    padding: Tensor | None = None
    routes: Tensor | None = None


@contextmanager
def padding_is(padding: Tensor | None, routes: Tensor | None = None) -> Iterator[None]:
    """Set what is known of the positions of this rank's part of the context, inside.

    Args:
        padding: bool [b, s], True at those without a token; None: each holds one.
        routes: integers [b, s, layers, k]: the experts that tokens go to in each layer of experts
            of this rank, or -1; None: routers choose all of them.
    """
    padding_before = _Known.padding
    routes_before = _Known.routes
    _Known.padding = padding
    _Known.routes = routes
    try:
        yield
    finally:
        # Restored rather than cleared: a recomputation sets its own inside.
        _Known.padding = padding_before
        _Known.routes = routes_before


def padding_of(positions: int, tp_group: Any) -> Tensor | None:
    """Return a mask of the positions [positions, b] that are padding; None if there is no padding.

    A layer reads all positions of the context's part, or under sequence parallelism those of its
    tensor-parallel rank, which are a run of them.
    """
    if _Known.padding is None:
        return None
    rows = _Known.padding.t()
    return rows[own_positions(rows.shape[0], positions, tp_group)]


def routes_of(positions: int, tp_group: Any, layer: int) -> Tensor | None:
    """Return the experts [positions, b, k] recorded for a layer, the `layer`-th of this rank's with
    experts, at the positions that `padding_of` describes; None if none were.
    """
    if _Known.routes is None:
        return None
    rows = _Known.routes[:, :, layer].transpose(0, 1)
    return rows[own_positions(rows.shape[0], positions, tp_group)]


def routes_known() -> bool:
    """Return whether experts were recorded for this micro-batch."""
    return _Known.routes is not None


def own_positions(whole: int, positions: int, tp_group: Any) -> slice:
    """Return which of `whole` positions a layer reads that sees so many: all, or its
    tensor-parallel rank's part.
    """
    first = 0 if whole == positions else tp_group.rank() * positions
    return slice(first, first + positions)


def remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs with the padding and the experts that are known now, whenever it
    runs.
    """
    # Read when the checkpoint is made: in the backward another micro-batch's may be set.
    padding = _Known.padding
    routes = _Known.routes

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with padding_is(padding, routes):
            return function(*args, **kwargs)

    return function if padding is None and routes is None else run
