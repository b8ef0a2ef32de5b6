"""Portable core attention: every mask and layout that megatron-core asks for, under context parallelism too."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from megatron.core.utils import divide
from mtrain_kernels.attention.reference import attention, visible
from torch import Tensor, nn

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)
_MASKED = (AttnMaskType.padding, AttnMaskType.padding_causal, AttnMaskType.arbitrary)


class CoreAttention(MegatronModule):
    """Softmax attention of this rank's heads: [s, b, n, d] queries to [s, b, n * e].

    Under context parallelism a rank holds chunks r and 2c-1-r of the 2c chunks of a sequence (of every sequence,
    if they are packed), the layout that megatron-core cuts batches and rotary embeddings to. Keys and values are
    gathered, which is the all-gather kind of context parallelism whatever `cp_comm_type` says.
    """

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
        self._cp_group = pg_collection.cp if config.context_parallel_size > 1 else None
        self._mask_type, self._scale = attn_mask_type, softmax_scale
        self._dropout_p = config.attention_dropout if attention_dropout is None else attention_dropout
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, max(1, layer_number))
        self._window = tuple(config.window_size) if windowed else None
        self._make_sink()

    def _make_sink(self) -> None:
        kind, heads = self.config.softmax_type, self.config.num_attention_heads
        if kind == "vanilla":
            self.softmax_offset = None
            return
        zeros = torch.zeros(divide(heads, self._tp_group.size()), dtype=self.config.params_dtype)
        if kind == "off-by-one":
            self.register_buffer("softmax_offset", zeros, persistent=False)
        elif kind == "learnable":
            self.softmax_offset = nn.Parameter(zeros)
            # unlike megatron-core's own: without this the gradient norm counts the heads of the first rank only
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
            if self.config.perform_initialization:
                self.config.init_method(self.softmax_offset)
        else:
            raise ValueError(f"softmax_type {kind!r} is none of vanilla, off-by-one, learnable")

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
        """Attention of [s, b, n, d] (packed: [t, n, d]) queries; `attention_mask` is True where a key is hidden."""
        if attention_bias is not None:
            raise NotImplementedError("the reference attention takes no attention bias")
        packed = query.dim() == 3
        if packed:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        mask_type = attn_mask_type or self._mask_type
        causal = mask_type in _CAUSAL
        hidden = attention_mask if mask_type in _MASKED else None
        cu_seqlens = _boundaries(packed_seq_params)
        if self._cp_group is not None and self._cp_group.size() > 1:
            key, value, q_at = self._gather_keys(key, value, cu_seqlens)
            mask = self._mask(q_at, key.shape[0], causal, cu_seqlens)
        elif causal and query.shape[0] == key.shape[0] and cu_seqlens is None and self._window is None:
            mask = None
        else:
            q_at = torch.arange(key.shape[0] - query.shape[0], key.shape[0], device=query.device)
            mask = self._mask(q_at, key.shape[0], causal, cu_seqlens)
        if hidden is not None:
            if mask is None:
                q_at = torch.arange(query.shape[0], device=query.device)
                mask = self._mask(q_at, key.shape[0], causal, None)
            mask = ~hidden if mask is None else mask & ~hidden
        out = self._attend(query, key, value, mask, causal and mask is None)
        return out.squeeze(1) if packed else out

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        dropout_p = self._dropout_p if self.training else 0.0
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        with self._random_state(dropout_p):
            out = attention(
                q, k, v, causal=causal, mask=mask, sink=self.softmax_offset, scale=self._scale, dropout_p=dropout_p
            )
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)

    def _random_state(self, dropout_p: float) -> AbstractContextManager[Any]:
        # under sequence parallelism the whole block runs in the tracker's state already
        if dropout_p == 0.0 or self.config.sequence_parallel:
            return nullcontext()
        return get_cuda_rng_tracker().fork()

    def _mask(self, q_at: Tensor, keys: int, causal: bool, cu_seqlens: Tensor | None) -> Tensor | None:
        if not causal and cu_seqlens is None and self._window is None:
            return None
        k_at = torch.arange(keys, device=q_at.device)
        segments: dict[str, Tensor] = {}
        if cu_seqlens is not None:
            ends = cu_seqlens[1:].to(q_at.dtype)
            segments = {
                "q_segments": torch.bucketize(q_at, ends, right=True),
                "k_segments": torch.bucketize(k_at, ends, right=True),
            }
        return visible(q_at, k_at, causal=causal, window=self._window, **segments)

    def _gather_keys(self, key: Tensor, value: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """All keys and values in the order of the sequence, and the positions of this rank's queries."""
        group = self._cp_group
        positions = context_positions(key.shape[0] * group.size(), group.size(), cu_seqlens, key.device)
        both = torch.cat([key, value], dim=-1)  # one collective instead of two
        both = gather_from_sequence_parallel_region(both, group=group)
        both = both.index_select(0, torch.argsort(positions.flatten()))
        key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        return key, value, positions[group.rank()]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The learnable sink, split by heads; else nothing."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self._tp_group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )


def context_positions(
    tokens: int, ranks: int, cu_seqlens: Tensor | None, device: torch.device | None = None
) -> Tensor:
    """Positions [ranks, tokens / ranks] that each context-parallel rank holds, in its order.

    Every sequence (all `tokens`, or each between two entries of `cu_seqlens`) is cut into 2 * ranks chunks of which
    rank r holds r and 2 * ranks - 1 - r, so that each has as much causal work as the others.
    Raises `ValueError` where a sequence cannot be cut so, or the sequences do not make up `tokens`.
    """
    bounds = [0, tokens] if cu_seqlens is None else cu_seqlens.tolist()
    if bounds[-1] != tokens:
        raise ValueError(f"packed sequences end at {bounds[-1]}, not at the {tokens} tokens of the batch")
    held: list[list[Tensor]] = [[] for _ in range(ranks)]
    for start, stop in pairwise(bounds):
        if (stop - start) % (2 * ranks):
            raise ValueError(f"a sequence of {stop - start} tokens is not cut into {2 * ranks} equal chunks")
        chunks = torch.arange(start, stop, device=device).view(2 * ranks, -1)
        for rank in range(ranks):
            held[rank] += [chunks[rank], chunks[2 * ranks - 1 - rank]]
    return torch.stack([torch.cat(parts) for parts in held])


def _boundaries(packed_seq_params: Any) -> Tensor | None:
    """Where packed sequences start and end in the batch, padding included; None if they are not packed."""
    if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
        return None
    if packed_seq_params.local_cp_size is not None:
        raise NotImplementedError("the reference attention knows one size of context parallelism per run")
    padded = packed_seq_params.cu_seqlens_q_padded
    return padded if padded is not None else packed_seq_params.cu_seqlens_q
