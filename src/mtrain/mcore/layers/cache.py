"""Keys and values of the tokens that a model has read, in megatron-core's own inference context."""

from __future__ import annotations

from typing import Any

from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.common.embeddings.rotary_pos_embedding import apply_rotary_pos_emb
from megatron.core.transformer import attention
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from mtrain_kernels.rope.packed import rotate_packed
from torch import Tensor

from mtrain.mcore.adapter.op_overrides import tables
from mtrain.mcore.layers import direct


class Cache(StaticInferenceContext):
    """The cache of `rows` sequences of at most `length` tokens, all of them read up to the same
    token.

    Each attention layer keeps its keys and values in it: [length, rows, key heads of this rank,
    head size], MLA those that it makes of the compressed ones. A layer of linear attention or of
    Mamba-2 keeps a state in `states`, by its number and the tokens that were read. `last_only`:
    what is read has no padding, and the logits are those of the last token only.
    """

    def __init__(self, rows: int, length: int, *, last_only: bool) -> None:
        super().__init__(max_batch_size=rows, max_sequence_length=length)
        self.materialize_only_last_token_logits = last_only
        self.states: dict[tuple[int, int], Any] = {}

    @property
    def read(self) -> int:
        """Return tokens of each sequence whose keys and values it holds."""
        return self.sequence_len_offset

    def advance(self, tokens: int) -> None:
        """Count tokens as read after all chunks of the model have seen them; what was padding is
        written over.
        """
        self.increment_sequence_len_offset(tokens)


class State:
    """The state that a layer carries between calls: the last inputs of its convolution, and its
    scan.
    """

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
    """Whether `direct` computes what this attention does; None before the first call."""

    def forward(self, *args: Any, rotary_pos_emb: Any = None, **given: Any) -> Any:
        """Return as megatron-core's."""
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
        """Return queries [s, b, n, d], keys and values [s, b, g, d] of `hidden_states`
        [s, b, h].
        """
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
