"""Keys and values of the tokens that a model has read, in megatron-core's own inference context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.common.embeddings.rotary_pos_embedding import (
    RotaryEmbedding,
    apply_rotary_pos_emb,
)
from megatron.core.transformer import attention
from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from mtrain_kernels.rope.packed import rotate_packed
from torch import Tensor

from mtrain.mcore.adapter.op_overrides import tables
from mtrain.mcore.layers import direct
from mtrain.mcore.layers.attention import CoreAttention


class Cache(StaticInferenceContext):
    """The cache of `rows` sequences of at most `length` tokens, all of them read up to the same
    token.

    Each attention layer keeps its keys and values in it: [length, rows, key heads of this rank,
    head size], MLA those that it makes of the compressed ones. A layer of linear attention or of
    Mamba-2 keeps a state in `states`, by its number and the tokens that were read. `last_only`:
    the input has no padding, and the logits are those of the last token only.

    Inside `decoding`, the device holds the place of the token that is read, so that a step issues
    the same work for each token; each row may have a place of its own.
    """

    def __init__(self, rows: int, length: int, *, last_only: bool) -> None:
        super().__init__(max_batch_size=rows, max_sequence_length=length)
        self.materialize_only_last_token_logits = last_only
        self.states: dict[tuple[int, int], Any] = {}
        self.place: Tensor | None = None
        self._span = 0
        self._hidden: dict[Any, Tensor] = {}

    @property
    def read(self) -> int:
        """Return tokens of each sequence whose keys and values it holds."""
        return self.sequence_len_offset

    def advance(self, tokens: int) -> None:
        """Count tokens as read after all chunks have seen them; later tokens overwrite padding."""
        self.increment_sequence_len_offset(tokens)

    def forget(self) -> None:
        """Begin again at the first token, in the same memory."""
        self.reset()
        self.states.clear()

    @contextmanager
    def filling(self, row: int) -> Iterator[None]:
        """Read the first tokens of one sequence, into a row that held another or none."""
        self.batch_size_offset = row
        try:
            yield
        finally:
            self.batch_size_offset = 0

    def copy(self, row: int, to: int, tokens: int) -> None:
        """Copy the first `tokens` of a row to another one."""
        for values in self.key_value_memory_dict.values():
            for memory in values:
                memory[:tokens, to] = memory[:tokens, row]

    @contextmanager
    def decoding(self, place: Tensor, span: int) -> Iterator[None]:
        """Read one token of each sequence at a time, at `place` of the device, which the caller
        moves on; `span` tokens of the cache are attended to, those behind the place hidden.

        `place` is [1] for all sequences, or [rows]. Tokens that are read together with the one at
        the place lie behind it.
        """
        self.place = place
        self._span = span
        try:
            yield
        finally:
            self.place = None

    def begin_step(self) -> None:
        """Make the masks of the next token anew."""
        self._hidden.clear()

    def hidden(self, window: tuple[int, int] | None, tokens: int = 1) -> Tensor:
        """Return the keys hidden from `tokens` from `place` on, [1 or rows, 1, tokens, span]."""
        assert self.place is not None
        if window not in self._hidden:
            keys = torch.arange(self._span, device=self.place.device)
            ahead = keys - self.places(tokens).t()[:, None, :, None]
            hidden = ahead > 0
            if window is not None and window[0] >= 0:
                hidden |= ahead < -window[0]
            self._hidden[window] = hidden
        return self._hidden[window]

    def places(self, tokens: int) -> Tensor:
        """Return the places [tokens, 1 or rows] of `tokens` from `place` on."""
        assert self.place is not None
        if tokens == 1:
            return self.place[None]
        return torch.arange(tokens, device=self.place.device)[:, None] + self.place

    def decoded(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write a layer's key and value [tokens, b, g, d] at `place`; return those of the span."""
        assert self.place is not None
        keys, values = self.key_value_memory_dict[layer]
        if len(self.place) == 1:
            keys.index_copy_(0, self.places(len(key))[:, 0], key)
            values.index_copy_(0, self.places(len(key))[:, 0], value)
        else:
            at = self.places(len(key)), torch.arange(len(self.place), device=self.place.device)
            keys.index_put_(at, key)
            values.index_put_(at, value)
        return keys[: self._span], values[: self._span]


class State:
    """The state that a layer carries between calls: its convolution's last inputs, and its scan."""

    def __init__(self, tail: Tensor, state: Tensor) -> None:
        self.tail = tail
        self.state = state

    @classmethod
    def of(cls, context: Any, layer: int) -> State | None:
        """Return the state after the tokens that a context has read; None before the first."""
        if context is None or not context.sequence_len_offset:
            return None
        found: State = context.states[layer, context.sequence_len_offset]
        return found

    def keep(self, context: Any, layer: int, read: int) -> None:
        """Keep it behind `read` tokens more. What was before stays: a pass may be repeated."""
        begin = context.sequence_len_offset
        for known in [key for key in context.states if key[0] == layer and key[1] != begin]:
            del context.states[known]
        context.states[layer, begin + read] = self


class CachedSelfAttention(SelfAttention):
    """megatron-core's self-attention with rotated keys in its cache: it would rotate all of them
    for every token.

    With `packed_impl`, an implementation of the rotary op, training norms and turns queries and
    keys on their way out of the packed product, in one launch; where documents are packed or a
    cache is read, it is megatron-core's way.
    """

    packed_impl: str | None = None
    _turns: tuple[Tensor, Tensor] | None = None
    _plain: bool | None = None
    """True if `direct` computes what this attention does; None before the first call."""

    def forward(self, *args: Any, rotary_pos_emb: Any = None, **given: Any) -> Any:
        """Return as megatron-core's."""
        context = given.get("inference_context")
        if context is not None and getattr(context, "place", None) is not None:
            tokens = args[0].shape[0]
            if self.config.sequence_parallel:
                tokens *= self.pg_collection.tp.size()
            given["attention_mask"] = context.hidden(self.core_attention.window, tokens)
        skipped = self.config.no_rope_freq and self.config.no_rope_freq[self.layer_number - 1]
        elsewhere = (
            given.get("inference_context") is not None or given.get("packed_seq_params") is not None
        )
        plain = isinstance(rotary_pos_emb, Tensor) and rotary_pos_emb.shape[1:3] == (1, 1)
        if self.packed_impl is None or skipped or elsewhere or not plain:
            return super().forward(*args, rotary_pos_emb=rotary_pos_emb, **given)
        # Looked up at the call: `layers.rotary.multiply_turns` may have replaced the function.
        scale = attention._yarn_get_concentration_factor_from_config(self.config)
        # Given no angles, megatron-core turns nothing; `get_query_key_value_tensors` does it while
        # it unpacks.
        # Attributes of a module are set through a method of torch's that looks for weights.
        self.__dict__["_turns"] = _tables_of_all(rotary_pos_emb, self.config, scale)
        try:
            if self._plain is None:
                self._plain = direct.attention_is_plain(self)
            if self._plain and len(args) == 1 and direct.trains(given):
                return direct.forward_attention(self, args[0], given["attention_mask"])
            return super().forward(*args, rotary_pos_emb=None, **given)
        finally:
            self.__dict__["_turns"] = None

    def get_query_key_value_tensors(self, hidden_states: Tensor, *args: Any, **given: Any) -> Any:
        """Return queries [s, b, n, d], keys and values [s, b, g, d] of hidden states [s, b, h]."""
        if self._turns is None or self.packed_impl is None:
            return super().get_query_key_value_tensors(hidden_states, *args, **given)
        packed, _ = self.linear_qkv(hidden_states)
        norms: dict[str, Any] = {}
        if self.q_layernorm is not None and not isinstance(self.q_layernorm, IdentityOp):
            # The modules are called, not their weights read: a hook of FSDP gathers a weight at the
            # call.
            norms = {"q_weight": self.q_layernorm(None), "k_weight": self.k_layernorm(None)}
            norms |= {"eps": self.q_layernorm.eps, "zero_centered": self.q_layernorm.zero_centered}
        return rotate_packed(
            packed,
            *self._turns,
            heads=self.num_attention_heads_per_partition,
            groups=self.num_query_groups_per_partition,
            interleaved=self.config.rotary_interleaved,
            impl=self.packed_impl,
            **norms,
        )

    def _allocate_memory(self, *args: Any, **given: Any) -> Tensor:
        # A hidden value has the weight 0, and 0 times NaN in uninitialised memory is not 0.
        memory: Tensor = super()._allocate_memory(*args, **given)
        return memory.zero_()

    def _adjust_key_value_for_inference(
        self,
        context: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotary: Any,
        *others: Any,
        **named: Any,
    ) -> Any:
        if context is not None and getattr(context, "place", None) is not None:
            return self._decoded(context, query, key, value, rotary)
        if context is not None and rotary is not None:
            at = slice(context.sequence_len_offset, context.sequence_len_offset + key.shape[0])
            # Looked up at the call, as in `forward`.
            scale = attention._yarn_get_concentration_factor_from_config(self.config)
            query, key = (
                apply_rotary_pos_emb(
                    x, angles[at], self.config, mscale=scale, cp_group=self.pg_collection.cp
                )
                for x, angles in zip((query, key), rotary, strict=True)
            )
            # megatron-core would turn the keys in the cache again.
            rotary = None
        return super()._adjust_key_value_for_inference(
            context, query, key, value, rotary, *others, **named
        )

    def _decoded(
        self, context: Cache, query: Tensor, key: Tensor, value: Tensor, rotary: Any
    ) -> Any:
        """Return the same for the tokens at the context's places, without a number of the host."""
        if rotary is not None:
            scale = attention._yarn_get_concentration_factor_from_config(self.config)
            at = context.places(len(query))
            # Rows that differ in their angles become tokens of one sequence.
            query, key = (
                apply_rotary_pos_emb(
                    x if at.shape[1] == 1 else x.flatten(0, 1)[:, None],
                    angles.index_select(0, at.flatten()),
                    self.config,
                    mscale=scale,
                    cp_group=self.pg_collection.cp,
                ).view(x.shape)
                for x, angles in zip((query, key), rotary, strict=True)
            )
        key, value = context.decoded(self.layer_number, key, value)
        return query, key, value, None, AttnMaskType.arbitrary, None


@contextmanager
def whole_sequences(chunks: list[Any]) -> Iterator[None]:
    """Let each context-parallel rank read the same whole sequences from a cache inside."""
    owners = {CoreAttention: "_context", RotaryEmbedding: "cp_group"}
    kept = [
        (module, name, getattr(module, name))
        for chunk in chunks
        for module in chunk.modules()
        for kind, name in owners.items()
        if isinstance(module, kind)
    ]
    for module, name, _ in kept:
        setattr(module, name, None)
    try:
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


def decoding_obstacle(chunk: Any) -> str:
    """Return why a chunk cannot read tokens at a place known to the device only, or ""."""
    if chunk.config.num_moe_experts:
        return "the host reads how many tokens each expert takes"
    return places_obstacle(chunk)


def places_obstacle(chunk: Any) -> str:
    """Return why a chunk cannot read tokens inside `Cache.decoding`; empty: it can."""
    for layer in chunk.modules():
        if isinstance(layer, Attention) and not isinstance(layer, CachedSelfAttention):
            return f"{type(layer).__name__} reads the place of a token from the host"
        if isinstance(layer, Attention) and not isinstance(layer.core_attention, CoreAttention):
            return f"{type(layer.core_attention).__name__} takes no mask of a cache"
    return ""


def _tables_of_all(angles: Tensor, config: Any, scale: float) -> tuple[Tensor, Tensor]:
    """Return the `tables` of angles, which all layers of a model share, and make them once.

    They are kept with the angles. A captured graph gets other angles in the same memory, so it has
    to make the tables itself.
    """
    how = config.rotary_interleaved, scale
    if config.cuda_graph_impl != "none":
        return tables(angles, *how)
    kept = getattr(angles, "tables_of_all_layers", None)
    if kept is None or kept[0] != (*how, angles._version):
        kept = (*how, angles._version), tables(angles, *how)
        angles.tables_of_all_layers = kept  # type: ignore[attr-defined]
    found: tuple[Tensor, Tensor] = kept[1]
    return found


def obstacle(config: Any, core: str | None) -> str:
    """Return why a model cannot go on from its cache; empty where it can.

    `config` is megatron-core's, `core` the implementation of core attention.
    """
    if core == "te":
        return (
            "TransformerEngine's attention has no causal mask behind a cache;"
            " kernels.attention=torch has one"
        )
    if config.apply_rope_fusion and config.multi_latent_attention:
        return "megatron-core's fused rotary embedding of MLA begins at the first position"
    if config.experimental_attention_variant == "dsa":
        return "keys of an indexer are not kept"
    if config.moe_expert_capacity_factor is not None:
        return (
            "which tokens an expert of limited capacity takes depends on all that are computed"
            " together"
        )
    return ""
