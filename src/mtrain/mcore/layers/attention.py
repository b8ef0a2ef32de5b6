"""Portable core attention: megatron-core's masks and layouts, also under context parallelism."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from megatron.core.utils import divide
from mtrain_kernels.attention import cpu, flash, op, reference
from mtrain_kernels.attention.partial import merge, partial_attention, with_sink
from mtrain_kernels.attention.seen import Seen
from torch import Tensor, nn

from mtrain.config.engine.kernels import ON_CPU
from mtrain.mcore.layers.context import Context, context_positions
from mtrain.mcore.layers.places import Places, mask_of, places_of

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)
_MASKED = (AttnMaskType.padding, AttnMaskType.padding_causal, AttnMaskType.arbitrary)


class _View(NamedTuple):
    """The keys visible to this rank's queries under context parallelism, in one layer."""

    places: Places
    here: int
    causal: bool
    window: Any
    cu_seqlens: Tensor | None
    fused: bool
    """True where a kernel of ours takes a part of the keys at a time."""
    ordered: bool
    """True where positions are made to ascend within a block."""

    def seen(self, there: int | None) -> Seen:
        """Describe to kernels the keys seen of a block, or of all blocks (None)."""
        limits = self.causal, self.window, self.cu_seqlens
        return self.places.seen(self.here, there, *limits, ordered=self.ordered)

    def mask(self, there: int | None) -> Tensor | None:
        """Return the same as a mask."""
        return self.places.mask(self.here, there, self.causal, self.window, self.cu_seqlens)


class CoreAttention(MegatronModule):
    """Softmax attention of this rank's heads: [s, b, n, d] queries to [s, b, n * e].

    Under context parallelism the layer sees the whole sequence in the way that `cp_comm_type` says;
    see `Context`. `impl` is that of the attention op; `auto` is the fastest backend that takes a
    call. A positive `softcap` bounds the logits, as there.
    """

    impl = "reference"
    softcap = 0.0

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self._tp_group = pg_collection.tp
        sharded = config.context_parallel_size > 1
        self._kind = cp_comm_type or config.cp_comm_type
        self._context = Context(pg_collection.cp, self._kind) if sharded else None
        self._mask_type = attn_mask_type
        self._scale = softmax_scale
        self._dropout_p = (
            config.attention_dropout if attention_dropout is None else attention_dropout
        )
        windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, max(1, layer_number)
        )
        self._window = tuple(config.window_size) if windowed else None
        self._make_sink()

    @property
    def window(self) -> tuple[int, int] | None:
        """Return how many keys a query sees to the left and right; None: all."""
        return self._window

    def _make_sink(self) -> None:
        kind = self.config.softmax_type
        heads = self.config.num_attention_heads
        if kind == "vanilla":
            self.softmax_offset = None
            return
        zeros = torch.zeros(divide(heads, self._tp_group.size()), dtype=self.config.params_dtype)
        if kind == "off-by-one":
            # A constant, which moves with the module but has no place in a checkpoint.
            self.register_buffer("softmax_offset", zeros, persistent=False)
        elif kind == "learnable":
            self.softmax_offset = nn.Parameter(zeros)
            # megatron-core's own sink lacks these attributes. Without them the gradient norm counts
            # the heads of the first tensor-parallel rank only.
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
            if self.config.perform_initialization:
                self.config.init_method(self.softmax_offset)
        else:
            raise ValueError(f"softmax_type {kind!r} is not vanilla, off-by-one or learnable")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Return the attention of [s, b, n, d] (packed: [t, n, d]) queries; `attention_mask` is
        True where a key is hidden.
        """
        if attention_bias is not None:
            raise NotImplementedError("the reference attention takes no attention bias")
        packed = query.dim() == 3
        if packed:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        mask_type = attn_mask_type or self._mask_type
        causal = mask_type in _CAUSAL or (self._mask_type in _CAUSAL and _goes_on(query, key))
        hidden = attention_mask if mask_type in _MASKED else None
        cu_seqlens = _boundaries(packed_seq_params)
        context = self._context_of(packed_seq_params)
        if context is not None:
            out = self._over_context(context, query, key, value, causal, hidden, cu_seqlens)
            return out.squeeze(1) if packed else out
        # There are more keys than queries after a cache; then a mask gives the positions.
        square = query.shape[0] == key.shape[0]
        if hidden is not None and not square:
            # Such a mask is that of a cache, and says all that is hidden.
            return self._attend(query, key, value, ~hidden, False)
        if self.impl not in ("reference", ON_CPU) and square and hidden is None:
            longest = None if packed_seq_params is None else packed_seq_params.max_seqlen_q
            limits = {"window": self._window, "cu_seqlens": cu_seqlens}
            limits |= {"max_seqlen": longest} if cu_seqlens is not None else {}
            out = self._attend(query, key, value, None, causal, limits=limits)
            return out.squeeze(1) if packed else out
        if causal and square and cu_seqlens is None and self._window is None:
            mask = None
        else:
            q_at = torch.arange(key.shape[0] - query.shape[0], key.shape[0], device=query.device)
            k_at = torch.arange(key.shape[0], device=query.device)
            mask = mask_of(q_at, k_at, causal, self._window, cu_seqlens)
        if hidden is not None:
            if mask is None:
                at = torch.arange(query.shape[0], device=query.device)
                mask = mask_of(at, at, causal, self._window, None)
            mask = ~hidden if mask is None else mask & ~hidden
        out = self._attend(query, key, value, mask, causal and mask is None)
        return out.squeeze(1) if packed else out

    @torch.no_grad()
    def sampled_logits(
        self,
        most: int,
        query: Tensor,
        key: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        packed_seq_params: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the logits of at most `most` queries, evenly spaced over the whole sequence: fp32
        [b, n, rows, keys], -inf where a key is hidden; and which of these rows this rank has, bool
        [rows].

        The queries and keys are those of `forward`. Context-parallel ranks gather all keys, and
        the rows of other ranks are not theirs.
        """
        if query.dim() == 3:
            query, key = (x.unsqueeze(1) for x in (query, key))
        mask_type = attn_mask_type or self._mask_type
        cu_seqlens = _boundaries(packed_seq_params)
        context = self._context_of(packed_seq_params)
        ranks = 1 if context is None else context.group.size()
        tokens = query.shape[0] * ranks
        count = min(most, tokens)
        rows = (torch.arange(count, device=query.device) + 1) * tokens // count - 1
        k_at = torch.arange(key.shape[0], device=query.device)
        here = torch.ones_like(rows, dtype=torch.bool)
        if context is None:
            query = query.index_select(0, rows)
        else:
            blocks = context_positions(tokens, ranks, cu_seqlens, query.device)
            held = blocks[context.group.rank()] == rows[:, None]
            here = held.any(1)
            query = query.index_select(0, held.to(torch.uint8).argmax(1))
            key = gather_from_sequence_parallel_region(key, group=context.group)
            k_at = blocks.flatten()
        r, b, n, d = query.shape
        groups = key.shape[2]
        grouped = query.float().reshape(r, b, groups, n // groups, d)
        logits = torch.einsum("rbgmd,kbgd->bgmrk", grouped, key.float()).reshape(b, n, r, -1)
        logits = logits * (d**-0.5 if self._scale is None else self._scale)
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        seen = mask_of(rows, k_at, mask_type in _CAUSAL, self._window, cu_seqlens)
        if seen is not None:
            logits = logits.masked_fill(~seen, -torch.inf)
        if attention_mask is not None and mask_type in _MASKED:
            # A mask of keys has one row for all queries.
            whole = attention_mask.shape[-2] > 1
            hidden = attention_mask.index_select(-2, rows) if whole else attention_mask
            logits = logits.masked_fill(hidden, -torch.inf)
        return logits, here

    def _context_of(self, packed_seq_params: Any) -> Context | None:
        """Return the ranks that share this sequence: the run's, or its own if dynamic."""
        group = getattr(packed_seq_params, "cp_group", None)
        return self._context if group is None else Context(group, self._kind)

    def _over_context(
        self,
        context: Context,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        causal: bool,
        hidden: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> Tensor:
        """Return the attention of this rank's part of the sequence to all of it."""
        if hidden is not None:
            raise NotImplementedError("a padding mask is not sharded over context-parallel ranks")
        places = places_of(context, query.shape[0], cu_seqlens, query.device)
        here = context.block
        fused = op.fuses_parts(
            query, value, dropout_p=self._dropout_p if self.training else 0.0, impl=self.impl
        )
        view = _View(
            places,
            here,
            causal,
            self._window,
            cu_seqlens,
            fused,
            fused and context.inner is not None,
        )
        if context.kind == "all_gather":
            # Gathered keys lie in the order of the sequence. Queries stay in this rank's order,
            # which the table or the mask accounts for.
            key, value = context.gathered(key, value, places.sequence())
            if fused:
                return self._attend_fused(query, key, value, view.seen(None))
            return self._attend(query, key, value, view.mask(None), False)
        # The exchange leaves this rank a share of the heads, and a sink belongs to a head. The
        # slice is taken while the query still has all of them.
        sink: Tensor | None = self.softmax_offset
        if sink is not None:
            sink = sink[context.head_slice(query.shape[2])]
        query, key, value = (context.to_heads(x) for x in (query, key, value))
        # The fused kernel requires positions in ascending order.
        if view.ordered:
            query, key, value = (x.index_select(0, places.order(here)) for x in (query, key, value))
        if context.outer is not None:
            out = self._ring(context, query, key, value, view, sink)
        elif fused:
            out = self._attend_fused(query, key, value, view.seen(here), sink)
        else:
            out = self._attend(query, key, value, view.mask(here), False, sink)
        return context.to_tokens(out.index_select(0, places.back(here)) if view.ordered else out)

    def _ring(
        self,
        context: Context,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        view: _View,
        sink: Tensor | None,
    ) -> Tensor:
        """Attend to one block of keys after another; the next one arrives from the rank before
        meanwhile.

        Every block is used, even one of which no key is seen: else a rank would miss a hand-over of
        gradients in which its neighbours wait.
        """
        dropout_p = self._dropout_p if self.training else 0.0
        size = view.places.blocks.shape[0]
        here = context.block
        options: dict[str, Any] = {"scale": self._scale, "softcap": self.softcap}
        q = query.permute(1, 2, 0, 3)
        # One message a step instead of two.
        both = torch.cat([key, value], dim=-1)
        out = None
        lse = None
        for step in range(size):
            # Sent before the block is used, so that the transfer overlaps with its attention.
            coming = context.pass_on(both) if step < size - 1 else None
            k, v = (
                x.permute(1, 2, 0, 3) for x in both.split([key.shape[-1], value.shape[-1]], dim=-1)
            )
            # Blocks move on to the next rank: after `step` hand-overs this one comes from `step`
            # ranks back.
            there = (here - step) % size
            if view.fused:
                part = flash.partial_attention(q, k, v, seen=view.seen(there), **options)
            else:
                mask = view.mask(there)
                if mask is None:
                    mask = torch.ones((q.shape[2], k.shape[2]), dtype=torch.bool, device=q.device)
                with self._random_state(dropout_p):
                    part = partial_attention(q, k, v, mask=mask, dropout_p=dropout_p, **options)
            # Softmaxes over parts of the keys are merged by their log-sum-exp, and rounded once at
            # the end.
            out, lse = part if out is None or lse is None else merge(out, lse, *part)
            if coming is not None:
                both = coming.arrived()
        assert out is not None
        assert lse is not None
        if sink is not None:
            # A sink in every part would count once for each block.
            out = with_sink(out, lse, sink)
        return out.to(query.dtype).permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
        sink: Tensor | None = None,
        limits: dict[str, Any] | None = None,
    ) -> Tensor:
        """Attend through a mask, or to keys left visible by `limits` (arguments of the op)."""
        dropout_p = self._dropout_p if self.training else 0.0
        sink = self.softmax_offset if sink is None else sink
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        options: dict[str, Any] = {"causal": causal, "mask": mask, "sink": sink}
        options |= {"scale": self._scale, "softcap": self.softcap, "dropout_p": dropout_p}
        plain = sink is None and not dropout_p and not self.softcap
        with self._random_state(dropout_p):
            if self.impl == ON_CPU and causal and plain and cpu.fits(q, k, v):
                out = cpu.attention(q, k, v, self._scale)
            elif self.impl in ("reference", ON_CPU):
                out = reference.attention(q, k, v, **options)
            else:
                # None of the kernels that a user can name takes an arbitrary mask.
                impl = "auto" if mask is not None else self.impl
                out = op.attention(q, k, v, **options, **(limits or {}), impl=impl)
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)

    def _attend_fused(
        self, query: Tensor, key: Tensor, value: Tensor, seen: Seen, sink: Tensor | None = None
    ) -> Tensor:
        """Attend to the keys that a table of positions leaves visible, by our fused kernel."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        sink = self.softmax_offset if sink is None else sink
        out = flash.attention(
            q, k, v, seen=seen, sink=sink, scale=self._scale, softcap=self.softcap
        )
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)

    def _random_state(self, dropout_p: float) -> AbstractContextManager[Any]:
        # Under sequence parallelism megatron-core runs the whole block in the tracker's state.
        if dropout_p == 0.0 or self.config.sequence_parallel:
            return nullcontext()
        return get_cuda_rng_tracker().fork()

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the learnable sink, split by heads; else nothing."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self._tp_group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )


def _goes_on(query: Tensor, key: Tensor) -> bool:
    """Return whether several tokens follow those of a cache: megatron-core then says no mask, as is
    right for a single one.
    """
    return 1 < query.shape[0] < key.shape[0]


def _boundaries(packed_seq_params: Any) -> Tensor | None:
    """Return the padded offsets of packed sequences in the batch; None if they are not packed."""
    if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
        return None
    padded = packed_seq_params.cu_seqlens_q_padded
    return padded if padded is not None else packed_seq_params.cu_seqlens_q
