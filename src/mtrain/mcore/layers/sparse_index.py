"""The indexer of sparse attention: its scores choose the keys of a query, and a loss trains it
(DeepSeek-V3.2, section 2.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_SCORES = 1 << 24
"""Scores of all heads held at once: queries are processed in parts, and no scores stay."""


@dataclass(frozen=True)
class Index:
    """The operands of an indexer's scores."""

    q: Tensor
    """Queries [s, b, h, d]."""
    k: Tensor
    """Keys [t, b, d], the same for all heads."""
    w: Tensor
    """Weights of heads [s, b, h]."""

    def part(self, rows: slice) -> Index:
        """Return the operands of some of the queries."""
        return Index(self.q[rows], self.k, self.w[rows])

    def scores(self) -> Tensor:
        """Return the sum over heads of w ReLU(q k), [b, s, t], in fp32 (fp64 stays)."""
        wide = torch.promote_types(self.q.dtype, torch.float32)
        products = torch.einsum("sbhd,tbd->bsht", self.q.to(wide), self.k.to(wide)).relu()
        return torch.einsum("bsht,sbh->bst", products, self.w.to(wide))


@dataclass(frozen=True)
class Teacher:
    """The attention that an indexer's softmax is to be like."""

    query: Tensor
    """Queries of this rank's heads, [s, b, n, d]."""
    key: Tensor
    """[t, b, n, d]."""
    scale: float
    sparse: bool
    """Keys that were not chosen have no part in it."""
    mean: Callable[[Tensor], Tensor]
    """Function from a sum over this rank's heads to the mean over all heads."""

    def target(self, rows: slice, seen: Tensor) -> Tensor:
        """Return all heads' attention to the `seen` keys [b, s, t], which sums to 1."""
        wide = torch.promote_types(self.query.dtype, torch.float32)
        logits = (
            torch.einsum("sbnd,tbnd->bnst", self.query[rows].to(wide), self.key.to(wide))
            * self.scale
        )
        return self.mean(logits.masked_fill(~seen[:, None], -torch.inf).softmax(-1).sum(1))


def chosen(scores: Tensor, visible: Tensor, topk: int) -> Tensor:
    """Return marks [b, s, t] of the `topk` best scored keys [b, s, t] among `visible` [s, t]."""
    best = (
        scores.masked_fill(~visible, -torch.inf).topk(min(topk, scores.shape[-1]), dim=-1).indices
    )
    # Queries that see fewer than `topk` keys were given hidden ones to make up the number.
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, value=True) & visible


def divergence(
    target: Tensor, scores: Tensor, seen: Tensor, learned: Tensor | None = None
) -> Tensor:
    """Return the sum over queries of KL(target || softmax of the scores) among the keys that are
    `seen`, all [b, s, t].

    Over those queries that are true in `learned` [b, s]; None: all.
    """
    # Hidden keys have a target of 0, and 0 times -inf would be NaN.
    predicted = scores.masked_fill(~seen, -torch.inf).log_softmax(-1).masked_fill(~seen, 0.0)
    each = torch.xlogy(target, target).sum(-1) - (target * predicted).sum(-1)
    return each.sum() if learned is None else (each * learned).sum()


def marks(index: Index, topk: int, heads: int = 1) -> Tensor:
    """Return the keys [b, s, t] that each query attends to, those before it and its own among them.

    In the parts that `taught` takes for so many heads of attention, so that both choose alike.
    """
    parts = [
        chosen(index.part(rows).scores(), visible, topk) for rows, visible in _parts(index, heads)
    ]
    return torch.cat(parts, dim=1)


def taught(
    index: Index,
    topk: int,
    teacher: Teacher,
    *,
    factor: float | Tensor = 1.0,
    learned: Tensor | None = None,
) -> tuple[Tensor, Tensor, Index]:
    """Return `marks`, the loss of the index, and `factor` times its gradient with respect to
    queries, keys and weights.

    The loss is that of the queries that are true in `learned` [b, s]; None: all.

    They are made a part of the queries at a time, so that scores of pairs are never kept.
    """
    found = []
    loss = index.k.new_zeros((), dtype=torch.promote_types(index.k.dtype, torch.float32))
    queries = []
    weights = []
    keys = torch.zeros_like(index.k, dtype=loss.dtype)
    for rows, visible in _parts(index, teacher.query.shape[2]):
        with torch.enable_grad():
            part = index.part(rows)
            # New leaves for each part, so that its graph is freed before the next one is made.
            leaves = [x.detach().requires_grad_() for x in (part.q, part.k, part.w)]
            scores = Index(*leaves).scores()
            own = chosen(scores.detach(), visible, topk)
            seen = own if teacher.sparse else visible.expand_as(own)
            with torch.no_grad():
                target = teacher.target(rows, seen)
            here = divergence(target, scores, seen, None if learned is None else learned[:, rows])
            q, k, w = torch.autograd.grad(here * factor, leaves)
        found.append(own)
        queries.append(q)
        weights.append(w)
        # Every part scores against the same keys, so their gradient is summed, in fp32.
        keys += k
        loss = loss + here.detach()
    gradient = Index(torch.cat(queries), keys.to(index.k.dtype), torch.cat(weights))
    return torch.cat(found, dim=1), loss, gradient


def _parts(index: Index, heads: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield queries whose scores, of indexer or `heads`, fit, and visible keys [s, t]."""
    s, b, h, _ = index.q.shape
    t = index.k.shape[0]
    size = max(1, MOST_SCORES // (b * max(h, heads) * t))
    at = torch.arange(t, device=index.k.device)
    for first in range(0, s, size):
        yield slice(first, first + size), at[first : first + size, None] >= at
