"""Padding of the current micro-batch, for the parts of a model that count tokens.

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


@contextmanager
def padding_is(padding: Tensor | None) -> Iterator[None]:
    """Set `padding` [b, s], bool, inside: the positions of this rank's part of the context without
    a token.

    None: each of them holds one.
    """
    before = _Known.padding
    _Known.padding = padding
    try:
        yield
    finally:
        # Restored rather than cleared: a recomputation sets its own inside.
        _Known.padding = before


def padding_of(positions: int, tp_group: Any) -> Tensor | None:
    """Return a mask of the positions [positions, b] that are padding; None if there is no padding.

    A layer reads all positions of the context's part, or under sequence parallelism those of its
    tensor-parallel rank, which are a run of them.
    """
    if _Known.padding is None:
        return None
    rows = _Known.padding.t()
    if rows.shape[0] == positions:
        return rows
    first = tp_group.rank() * positions
    return rows[first : first + positions]


def remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs with the padding that is known now, whenever it runs."""
    # Read when the checkpoint is made: in the backward another micro-batch's may be set.
    padding = _Known.padding

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with padding_is(padding):
            return function(*args, **kwargs)

    return run if padding is not None else function
