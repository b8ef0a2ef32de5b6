"""The keys that a query sees, as an interval: fused attention visits no others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Seen:
    """Query i sees the keys [i + shift - left, i + shift + right]; a negative limit is no limit.

    `table` [2 s + 2 t] int32 says it instead: the first key of each of s queries, the one behind
    its last, then the first query that sees each of t keys and the one behind the last.
    """

    left: int = -1
    right: int = -1
    shift: int = 0
    table: Tensor | None = None

    @property
    def masks_left(self) -> bool:
        """Return whether keys before those that a query sees may be hidden."""
        return self.table is not None or self.left >= 0

    @property
    def masks_right(self) -> bool:
        """Return whether keys behind those that a query sees may be hidden."""
        return self.table is not None or self.right >= 0

    @classmethod
    def of(cls, tokens: int, window: tuple[int, int], cu_seqlens: Tensor | None) -> Seen:
        """Describe the keys that queries see, of which there are as many: `window` is (left,
        right), `cu_seqlens` as in `table`.
        """
        if cu_seqlens is None:
            return cls(*window)
        at = torch.arange(tokens, device=cu_seqlens.device)
        return cls(*window, table=table(at, at, window, cu_seqlens))

    def limits(self, queries: int, keys: int) -> tuple[int, int, int]:
        """Return left, right and shift with numbers in the place of no limit."""
        # Beyond every distance between a query and a key, so that kernels need no branch for it.
        none = queries + keys + abs(self.shift)
        return (
            self.left if self.left >= 0 else none,
            self.right if self.right >= 0 else none,
            self.shift,
        )


def table(
    q_at: Tensor, k_at: Tensor, window: tuple[int, int] = (-1, -1), cu_seqlens: Tensor | None = None
) -> Tensor:
    """Return the table of `Seen` for queries and keys at ascending positions [s] and [t] of a
    batch; int32 [2 s + 2 t].

    `window` (left, right) hides keys more than so many positions before or behind a query, negative
    numbers nothing. `cu_seqlens` are the edges of sequences that do not see each other; positions
    after the last edge are one more sequence. Nothing waits for the device.
    """
    q_at = q_at.long()
    k_at = k_at.long()
    edges = None
    if cu_seqlens is not None:
        # An edge beyond all positions makes the rest one more sequence.
        ends = torch.full((1,), torch.iinfo(torch.int32).max, dtype=torch.int64, device=q_at.device)
        edges = torch.cat([cu_seqlens.long(), ends])
    left, right = window
    both = (*_interval(q_at, k_at, left, right, edges), *_interval(k_at, q_at, right, left, edges))
    return torch.cat(both).to(torch.int32)


def _interval(
    at: Tensor, others: Tensor, before: int, after: int, edges: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the first of the others within reach of each position, and the one after the last."""
    first = at - before if before >= 0 else torch.full_like(at, torch.iinfo(torch.int32).min)
    last = at + after if after >= 0 else torch.full_like(at, torch.iinfo(torch.int32).max)
    if edges is not None:
        own = torch.searchsorted(edges, at, right=True)
        # `own` counts the edges at or before a position, so that it indexes the next one.
        last = torch.minimum(last, edges[own.clamp(max=len(edges) - 1)] - 1)
        first = torch.maximum(first, edges[(own - 1).clamp(min=0)])
    return torch.searchsorted(others, first), torch.searchsorted(others, last, right=True)
