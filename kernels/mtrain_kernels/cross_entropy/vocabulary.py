"""A vocabulary split over the ranks of a torch.distributed group: the part held here, and sums over
all parts.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group


class Vocabulary:
    """The ranks that hold equal, consecutive parts of the vocabulary; `group` is a group's name, ""
    for one rank.

    Ops carry the name because an operator's schema knows strings and no groups.
    """

    def __init__(self, group: str) -> None:
        self.group = _resolve_process_group(group) if group else None  # type: ignore[arg-type]
        self.rank = self.group.rank() if self.group is not None else 0
        self.ranks = self.group.size() if self.group is not None else 1

    def merge(self, statistics: Tensor) -> Tensor:
        """Merge `row_statistics` [3 or 5, t] of every part into those of the whole vocabulary, in
        place: two all-reduces.

        Where there are five, the last is then 1 where the label has the largest logit (the first of
        several), else it is not.
        """
        if self.ranks == 1:
            return statistics
        lse = statistics[0]
        highest = statistics[::3].clone()  # log-sum-exp, and the largest logit where there is one
        dist.all_reduce(highest, dist.ReduceOp.MAX, self.group)
        if len(statistics) > 3:
            statistics[4] *= statistics[3] == highest[1]
            statistics[3] = 0  # minus infinity of a part without columns is nothing that adds up
        # Shifted by the largest, no exponential exceeds 1; an infinite shift would give NaN.
        shift = highest[0].where(highest[0].isfinite(), 0)
        lse.sub_(shift).exp_()
        # Exponentials, label logits and sums all add up over ranks: one all-reduce for all of them.
        dist.all_reduce(statistics, group=self.group)
        lse.log_().add_(shift)
        return statistics

    def first_of_all(self, places: Tensor) -> Tensor:
        """Return whether the label has the largest logit [t], from `first_place` [2, t] of every
        part: two all-reduces.
        """
        if self.ranks == 1:
            return places[1] == 1
        highest = places[0].clone()
        dist.all_reduce(highest, dist.ReduceOp.MAX, self.group)
        found = places[1] * (places[0] == highest)
        dist.all_reduce(found, group=self.group)
        return found == 1

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over the ranks, in place."""
        if self.ranks > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def gather(self, part: Tensor) -> Tensor:
        """Gather [t / ranks, h] of every rank, in the order of ranks, as [t, h]."""
        if self.ranks == 1:
            return part
        whole = part.new_empty((self.ranks * part.shape[0], *part.shape[1:]))
        dist.all_gather_into_tensor(whole, part.contiguous(), self.group)
        return whole

    def scatter_sum(self, whole: Tensor) -> Tensor:
        """Sum [t, h] of all ranks, and return this rank's part [t / ranks, h]."""
        if self.ranks == 1:
            return whole
        part = torch.empty_like(whole[: whole.shape[0] // self.ranks])
        dist.reduce_scatter_tensor(part, whole, group=self.group)
        return part


def name_of(group: dist.ProcessGroup | None) -> str:
    """Return the name by which an op finds `group` again; "" for None."""
    return "" if group is None else group.group_name


def size_of(group: dist.ProcessGroup | None) -> int:
    """Return how many ranks `group` has; 1 for None."""
    return 1 if group is None else group.size()
