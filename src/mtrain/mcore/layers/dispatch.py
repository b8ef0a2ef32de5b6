"""Tokens to the ranks of their experts and back, by lists of experts: nothing waits for the device
but one exchange.

Where tokens are gathered, every size follows from shapes: with expert parallelism 1, and with
`allgather` in any case, which then has room for the most rows that a rank's experts can get. An
exchange between expert-parallel ranks (`alltoall`) has to know on the host how many rows go where:
one copy of 2 ep + etp integers in each layer, begun before the tokens are sorted. One that is
padded sends as many rows to each rank, and which of them are tokens' follows on the device from how
many each expert gets. Where nothing is learned it is not padded, for a text of few tokens may go
where it likes; but in one CUDA graph with its schedule it is, with room for all rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    all_to_all,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from mtrain_kernels.moe_permute.op import Plan, permute, plan, row_weights, unpermute
from torch import Tensor

from mtrain.config.schema.moe import room_of
from mtrain.mcore.layers.router import LEARNS

TOO_MANY = (
    "more rows than model.moe.alltoall_capacity_factor allows go from one expert-parallel rank to"
    " another"
)


def begin_copy(values: Tensor) -> tuple[Tensor, Any]:
    """Begin to copy `values` to the host; return the copy, and its event (None on a CPU)."""
    if values.is_cpu or values.is_meta:
        return values, None
    # A copy to pageable memory would make the host wait.
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(
        values, non_blocking=True
    )
    event = torch.get_device_module(values.device).Event()
    event.record()
    return host, event


class SparseDispatcher(MoETokenDispatcher):  # type: ignore[misc]
    """megatron-core's dispatcher, called by its layer with weights and experts [t, k] of tokens
    instead of maps.

    Rows [r, h] go to the experts sorted by expert, with how many each gets, which stays on the
    device.
    """

    def __init__(self, local: int, indices: list[int], config: Any, pg_collection: Any) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.local = local
        self.first = indices[0]
        self.exchanges = self.ep_size > 1 and config.moe_token_dispatcher_type == "alltoall"
        sparse = config.sparse_experts
        self.impl = sparse.permute
        self.padded = sparse.padded
        self.room_factor = sparse.capacity_factor
        self.one_graph = sparse.one_graph
        # None: every rank sends and receives the same number of rows.
        self._inputs: list[int] | None = None
        self._outputs: list[int] | None = None
        self._outputs_tp: list[int] | None = None
        self.gathers = not self.exchanges and self.tp_size * self.ep_size > 1

    def dispatch_preprocess(
        self, tokens: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Prepare this rank's `tokens` [s, b, h], and their experts and weights [t, k]."""
        self._shape = tokens.shape
        self._experts = routing_map
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(tokens)
        tokens = tokens.reshape(-1, tokens.shape[-1])
        if not self.exchanges:
            return tokens, probs
        learns = getattr(routing_map, LEARNS, True)
        self._pads = self.padded and (learns or self.one_graph)
        if self._pads:
            self._inputs = None
            self._outputs = None
            self._outputs_tp = None
            self._sent = self._at_fixed_places(routing_map, self.room_factor if learns else None)
        else:
            self._sent = plan(routing_map, self.config.num_moe_experts)
        # Begun before the permutation is launched, which hides the collective and the copy.
        self._begin_splits(self._sent.counts)
        return permute(tokens, self._sent, impl=self.impl), row_weights(probs, self._sent)

    def _at_fixed_places(self, experts: Tensor, factor: float | None) -> Plan:
        """Return the plan in which each rank's rows have the same room, filled or not."""
        tokens, topk = experts.shape
        local = self.local
        ep = self.ep_size
        room = room_of(tokens, topk, local, ep, factor)
        made = plan(experts, self.config.num_moe_experts, rows=ep * room, blocks=ep)
        if factor is not None:
            fits = (made.counts.view(ep, -1).sum(1) <= room).all()
            torch._assert_async(fits, f"{TOO_MANY}, and there is room for {room}")
        return made

    def _begin_splits(self, counts: Tensor) -> None:
        """Exchange counts of rows by expert, and begin to copy those that the host needs."""
        ep = self.ep_size
        tp = self.tp_size
        with torch.no_grad():
            everybodys = gather_from_sequence_parallel_region(counts, group=self.tp_ep_group)
            # The group counts tensor-parallel ranks fastest. Rows arrive by tensor-parallel rank
            # first: the exchange over ep precedes the gather over tp.
            everybodys = everybodys.view(ep, tp, -1).transpose(0, 1)[
                ..., self.first : self.first + self.local
            ]
            # Rows received, by sender and expert.
            self._chunks = everybodys.reshape(tp * ep, self.local)
            if self._pads:
                return
            received = everybodys.sum(-1)
            numbers = torch.cat(
                [counts.view(ep, -1).sum(1), received[self.tp_rank], received.sum(1)]
            )
        self._splits = begin_copy(numbers)

    def token_dispatch(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Send rows to their experts' ranks, or gather all tokens for shared experts."""
        if self.exchanges:
            self._rows = len(tokens)
            if not self._pads:
                self._end_splits()
                sent = sum(self._inputs or ())
                # Padding of the micro-batch goes to no expert, and has the last rows.
                if sent < self._rows:
                    tokens = tokens[:sent]
                    probs = probs[:sent]
            sizes = (self._outputs, self._inputs)
            return all_to_all(self.ep_group, tokens, *sizes), all_to_all(
                self.ep_group, probs, *sizes
            )
        if self.gathers:
            with torch.no_grad():
                self._experts = gather_from_sequence_parallel_region(
                    self._experts, group=self.tp_ep_group
                )
            tokens, probs = (
                gather_from_sequence_parallel_region(part, group=self.tp_ep_group)
                for part in (tokens, probs)
            )
        return tokens, probs

    def _end_splits(self) -> None:
        """Wait for the copies to the host."""
        host, event = self._splits
        if event is not None:
            event.synchronize()
        numbers = host.tolist()
        self._inputs = numbers[: self.ep_size]
        self._outputs = numbers[self.ep_size : 2 * self.ep_size]
        self._outputs_tp = numbers[2 * self.ep_size :]

    def dispatch_postprocess(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows [r, h] sorted by this rank's experts, how many each has [e], on the device,
        and their weights [r].
        """
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(tokens)
        self._wide = probs.dtype
        if not self.exchanges:
            # Experts of other ranks become negative or too large, and get no rows in the plan.
            own = self._experts - self.first
            # A bound that follows from shapes: a token has at most one row for each expert here,
            # and at most k.
            rows = own.shape[0] * min(own.shape[1], self.local)
            self._sorted = plan(own, self.local, rows=rows)
        else:
            if self.tp_size > 1:
                tokens, probs = (
                    gather_from_sequence_parallel_region(
                        part, group=self.tp_group, output_split_sizes=self._outputs_tp
                    )
                    for part in (tokens, probs)
                )
            if self._sorted_by_sender:
                return tokens, self._chunks.sum(0), probs
            self._sorted = plan(self._owners(tokens.shape[0])[:, None], self.local)
            probs = probs[:, None]
        return (
            permute(tokens, self._sorted, impl=self.impl),
            self._sorted.counts,
            row_weights(probs, self._sorted),
        )

    @property
    def _sorted_by_sender(self) -> bool:
        """Return whether received rows lie as the experts want them."""
        return self.exchanges and self.local == 1 and not self._pads

    def _owners(self, rows: int) -> Tensor:
        """Return the local expert of each received row; padding gets one past the last expert."""
        if self._pads:
            # Every sender's rows take the same room; places past its last count are padding.
            place = torch.arange(rows // self._chunks.shape[0], device=self._chunks.device)
            place = place.expand(self._chunks.shape[0], -1).contiguous()
            return torch.searchsorted(self._chunks.cumsum(1), place, right=True).view(-1)
        expert = torch.arange(self.local, device=self._chunks.device).repeat(self._chunks.shape[0])
        return expert.repeat_interleave(self._chunks.reshape(-1), output_size=rows)

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Return outputs of the experts [r, h] in the order of arrival; for gathered tokens their
        sums [t, h].
        """
        if not self._sorted_by_sender:
            hidden_states = unpermute(hidden_states, self._sorted, impl=self.impl)
        if self.exchanges and self.tp_size > 1:
            hidden_states = self._summed(hidden_states, self.tp_group, self._outputs_tp)
        return hidden_states

    def token_combine(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Send outputs back; of gathered tokens, this rank's part of the sum over all ranks."""
        if self.exchanges:
            back: Tensor = all_to_all(self.ep_group, hidden_states, self._inputs, self._outputs)
            return back
        return self._summed(hidden_states, self.tp_ep_group) if self.gathers else hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Return tokens [s, b, h] from returned rows, plus the output of shared experts."""
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(hidden_states)
            self.shared_experts.post_forward_comm()
        if self.exchanges:
            left_out = self._rows - len(hidden_states)
            if left_out:
                hidden_states = torch.nn.functional.pad(hidden_states, (0, 0, 0, left_out))
            hidden_states = unpermute(hidden_states, self._sent, impl=self.impl)
        out = hidden_states.view(self._shape)
        return out if self.shared_experts is None else out + self.shared_experts.get_output()

    def _summed(self, x: Tensor, group: Any, sizes: list[int] | None = None) -> Tensor:
        """Reduce-scatter in the dtype of the weights, and return this rank's part."""
        wide = reduce_scatter_to_sequence_parallel_region(
            x.to(self._wide), group=group, input_split_sizes=sizes
        )
        return wide.to(x.dtype)  # type: ignore[no-any-return]


def _dispatcher(*args: Any, original: Callable[..., Any], config: Any, **more: Any) -> Any:
    """Return megatron-core's dispatcher, or mtrain's for a router with lists of experts."""
    kind: Callable[..., Any] = (
        original if getattr(config, "sparse_experts", None) is None else SparseDispatcher
    )
    return kind(*args, config=config, **more)


@functools.cache
def use_in_layers() -> None:
    """Let megatron-core's expert layers make mtrain's dispatcher if their config asks for it."""
    for name in ("MoEAlltoAllTokenDispatcher", "MoEAllGatherTokenDispatcher"):
        setattr(moe_layer, name, functools.partial(_dispatcher, original=getattr(moe_layer, name)))
