"""Context parallelism of attention: rings, exchanges of sequence for heads, and both."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import all_to_all, gather_from_sequence_parallel_region
from torch import Tensor


class Context:
    """The context-parallel ranks of one attention layer, by the way in which they talk
    (`parallel.cp_comm_type`).

    `inner` ranks exchange the sequence for heads (all-to-all); `outer` ranks pass keys and values
    around a ring. With `all_gather` every rank gathers all keys and values instead. A rank holds
    chunks r and 2c-1-r of the 2c chunks of every sequence, the layout that megatron-core splits
    batches and rotary embeddings into.
    """

    def __init__(self, group: Any, kind: str | None) -> None:
        self.group = group
        self.kind = kind or "all_gather"
        self.inner = None
        self.outer = None
        if self.kind == "a2a":
            self.inner = group
        elif self.kind == "p2p":
            self.outer = group
        elif self.kind == "a2a+p2p":
            self.inner, self.outer = parallel_state.get_hierarchical_context_parallel_groups()
        elif self.kind != "all_gather":
            raise ValueError(f"cp_comm_type {self.kind!r} is not all_gather, p2p, a2a or a2a+p2p")

    @property
    def inner_size(self) -> int:
        """Return ranks that share the heads of one sequence."""
        return self.inner.size() if self.inner else 1

    def head_slice(self, heads: int) -> slice:
        """Return the slice of this tensor-parallel rank's heads that the exchange leaves here."""
        share = heads // self.inner_size
        first = (self.inner.rank() if self.inner else 0) * share
        return slice(first, first + share)

    def positions(self, tokens: int, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
        """Return places [outer ranks, tokens of a block] in the batch of the tokens that each ring
        rank holds after the exchange.

        `tokens` is the number that one rank holds before it.
        """
        every = context_positions(tokens * self.group.size(), self.group.size(), cu_seqlens, device)
        return every.view(-1, self.inner_size * tokens)

    @property
    def block(self) -> int:
        """Return the index of this rank's block of `positions`."""
        return self.group.rank() // self.inner_size

    def to_heads(self, x: Tensor) -> Tensor:
        """Exchange [s, b, n, d] of own tokens for [inner * s, b, n / inner, d] of some heads."""
        if self.inner is None:
            return x
        # all_to_all splits the first axis: the part for each rank goes there.
        s, b, n, d = x.shape
        parts = (
            x.view(s, b, self.inner_size, n // self.inner_size, d)
            .permute(2, 0, 1, 3, 4)
            .contiguous()
        )
        return all_to_all(self.inner, parts).flatten(0, 1)

    def to_tokens(self, x: Tensor) -> Tensor:
        """Exchange [inner * s, b, w] of some heads back for [s, b, inner * w] of own tokens."""
        if self.inner is None:
            return x
        _, b, w = x.shape
        parts = all_to_all(self.inner, x.reshape(self.inner_size, -1, b, w))
        return parts.permute(1, 2, 0, 3).reshape(-1, b, self.inner_size * w)

    def pass_on(self, x: Tensor) -> Passing:
        """Begin to send `x` to the next rank of the ring, and to receive the tensor that the rank
        before sends in this call.
        """
        return Passing(x, self.outer)

    def gathered(self, key: Tensor, value: Tensor, sequence: Tensor) -> tuple[Tensor, Tensor]:
        """Gather all ranks' keys and values in the order `sequence` [c * s]: [c * s, b, n, d]."""
        both = torch.cat([key, value], dim=-1)  # one collective instead of two
        both = gather_from_sequence_parallel_region(both, group=self.group)
        both = both.index_select(0, sequence)
        key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        return key, value


class Passing:
    """A block on its way to the next rank while this one computes.

    Its gradient travels back the same way.

    In the backward, `arrived` begins to send the gradient, and the call that gave the block waits
    for it. Meanwhile the backward of the work between the two runs.
    """

    def __init__(self, x: Tensor, group: Any) -> None:
        self._exchange = _Exchange(group)
        self._coming = _Give.apply(x, self._exchange)

    def arrived(self) -> Tensor:
        """Wait for the block of the rank before, and return it; to be called once."""
        coming = self._coming
        self._coming = None
        return _Take.apply(coming, self._exchange)


class _Give(torch.autograd.Function):
    """A transfer to the next rank of a ring and from the previous one; its backward waits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        # The message is still being written to this memory: only `_Take` may read it.
        return exchange.start(x, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.finish()
        return grad, None


class _Take(torch.autograd.Function):
    """Waits for the sent tensor; begins to send the gradient in the other direction."""

    @staticmethod
    def forward(ctx: Any, coming: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.finish()
        # A new view, so that autograd has a node here, from which the gradient starts its way back.
        return coming.view_as(coming)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.start(grad, -1), None


class _Exchange:
    """A message to one neighbour in a ring and one from the other, one pair at a time."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self._under_way: tuple[list[Any], Tensor] | None = None

    def start(self, x: Tensor, step: int) -> Tensor:
        """Send `x` to the rank `step` on; return the memory to receive into until `finish`."""
        size = self.group.size()
        rank = self.group.rank()
        sent = x.contiguous()
        got = torch.empty_like(sent)
        to, source = (
            dist.get_global_rank(self.group, (rank + way) % size) for way in (step, -step)
        )
        give = dist.P2POp(dist.isend, sent, to, self.group)
        take = dist.P2POp(dist.irecv, got, source, self.group)
        # One batch: if every rank sent first and received afterwards, all could wait for each
        # other. `sent` has to live until it has left, for it may be a copy.
        self._under_way = dist.batch_isend_irecv([give, take]), sent
        return got

    def finish(self) -> None:
        """Wait for both messages; afterwards both blocks may be read and written."""
        assert self._under_way is not None, "nothing was given"
        requests, _ = self._under_way
        for request in requests:
            request.wait()
        self._under_way = None


def context_positions(
    tokens: int, ranks: int, cu_seqlens: Tensor | None, device: torch.device | None = None
) -> Tensor:
    """Return positions [ranks, tokens / ranks] that each context-parallel rank holds, in its order.

    Every sequence (all `tokens`, or each between two entries of `cu_seqlens`) is split into 2 *
    ranks chunks of which rank r holds r and 2 * ranks - 1 - r, so that each has as much causal work
    as the others. Nothing waits for a device on which `cu_seqlens` lies. Raises `ValueError` where
    all `tokens` cannot be split so; for packed sequences, also where they do not make up `tokens`,
    `RuntimeError`, which a device raises later.
    """
    place = torch.arange(tokens // ranks, device=device)
    if cu_seqlens is None:
        if tokens % (2 * ranks):
            raise ValueError(
                f"a sequence of {tokens} tokens is not split into {2 * ranks} equal chunks"
            )
        ends = torch.arange(0, tokens + 1, tokens, device=device)
    else:
        ends = cu_seqlens.long()
        # The host does not know the boundaries, so the device asserts.
        fits = (ends[-1] == tokens) & (ends.diff() % (2 * ranks) == 0).all()
        torch._assert_async(
            fits,
            f"packed sequences do not make up {tokens} tokens in {2 * ranks} equal chunks each",
        )
        ends = ends.to(place.device, non_blocking=True)
    # A rank holds an equal share of every sequence, so in its own numbering each begins at start /
    # ranks.
    of = torch.searchsorted(ends // ranks, place, right=True) - 1
    start = ends[of]
    chunk = (ends.diff() // (2 * ranks))[of]
    within = place - start // ranks
    rank = torch.arange(ranks, device=device)[:, None]
    # A rank's share is chunk `rank` and then chunk 2 * ranks - 1 - rank. In the second one `within`
    # has counted a chunk already, hence the 2.
    return start + within + chunk * torch.where(within < chunk, rank, 2 * ranks - 2 - rank)
