"""The order in which the threads of a program take the rows of a tile that is written transposed.

A thread reads 16 bytes or more of a row, and has rows that are far apart: written transposed, each
byte would pass shared memory by itself. With rows dealt so that a thread has neighbours, two or
four bytes go together.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dealt(SIDE: tl.constexpr, RUN: tl.constexpr):
    """Return rows of a tile in the order in which threads take them, so that each has `RUN` that
    are neighbours.
    """
    at = tl.arange(0, SIDE)
    if RUN > 1:
        at = at % (SIDE // RUN) * RUN + at // (SIDE // RUN)
    return at


@triton.jit
def in_order(x, SIDE: tl.constexpr, RUN: tl.constexpr):
    """Return a tile whose rows are `dealt` in their order; nothing moves between threads."""
    if RUN > 1:
        x = tl.reshape(tl.permute(tl.reshape(x, (RUN, SIDE // RUN, SIDE)), (1, 0, 2)), (SIDE, SIDE))
    return x
