"""Context parallelism of Mamba-2 mixers: each rank has some of the heads, of all tokens."""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
from torch import Tensor

from mtrain.mcore.layers.context import Context, context_positions


class HeadExchange:
    """The heads of a tensor-parallel rank's mixer, shared out over `group`, the ranks that have
    parts of a sequence.

    A rank has the whole groups of its heads, or one that it shares with ranks whose heads are of
    the same group. What it scans with are its rows of the weights, so that gradients of ranks add
    up to those of the whole.
    """

    def __init__(self, group: Any, *, heads: int, channels: int, groups: int, states: int) -> None:
        self._context = Context(group, "a2a")
        self.ranks = group.size()
        self._rank = group.rank()
        self._widths = channels, states, states
        # With more ranks than groups, several ranks need the inputs and outputs of one group.
        self._copies = self.ranks // gcd(groups, self.ranks)
        self._all_groups = groups
        self.heads = heads // self.ranks
        self.groups = groups * self._copies // self.ranks
        self.channels = channels // self.ranks
        self.states = self.groups * (states // groups)

    def to_heads(
        self, xbc: Tensor, dt: Tensor, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange this rank's tokens [s, b, all channels] and [s, b, all heads] for all tokens, in
        order, of some channels and heads; return their places too.
        """
        s, b, _ = dt.shape
        # Each rank's part stands where attention has a head, so one exchange carries all of it.
        parts = torch.cat([*self._parts(xbc), dt.view(s, b, self.ranks, -1)], -1)
        whole = self._context.to_heads(parts).squeeze(2)
        places = context_positions(whole.shape[0], self.ranks, cu_seqlens, dt.device).flatten()
        # Tokens arrive in the order in which ranks hold them; a scan needs that of the text.
        mixed, steps = whole.index_select(0, torch.argsort(places)).split(
            [whole.shape[-1] - self.heads, self.heads], -1
        )
        return mixed, steps, places

    def to_tokens(self, y: Tensor, places: Tensor) -> Tensor:
        """Return all tokens [c * s, b, channels of some heads] as [s, b, all channels]."""
        return self._context.to_tokens(y.index_select(0, places))

    def own_channels(self, weight: Tensor) -> Tensor:
        """Return this rank's rows of a weight [all channels, ...] of the convolution."""
        own = [part[..., self._rank, :] for part in self._parts(weight.movedim(0, -1))]
        return torch.cat(own, -1).movedim(-1, 0)

    def own_heads(self, weight: Tensor) -> Tensor:
        """Return this rank's entries of a weight [all heads]."""
        return weight.view(self.ranks, -1)[self._rank]

    def _parts(self, mixed: Tensor) -> list[Tensor]:
        """Return channels [..., all] as [..., ranks, of each]; groups of several ranks for each."""
        x, *both = mixed.split(self._widths, -1)
        groups = (
            part.unflatten(-1, (self._all_groups, -1)).repeat_interleave(self._copies, -2)
            for part in both
        )
        return [
            part.flatten(-2).unflatten(-1, (self.ranks, -1)) for part in (x.unsqueeze(-1), *groups)
        ]
