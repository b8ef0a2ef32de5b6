"""Keys and values of the tokens that a model has read, in megatron-core's own inference context."""

from __future__ import annotations

from typing import Any

from megatron.core.inference.contexts import StaticInferenceContext


class Cache(StaticInferenceContext):
    """The cache of `rows` sequences of at most `length` tokens, all of them read up to the same token.

    Each attention layer keeps its keys and values in it: [length, rows, key heads of this rank, head size], MLA those
    that it makes of the compressed ones. `last_only`: what is read has no padding, so that logits are made of the
    last token alone.
    """

    def __init__(self, rows: int, length: int, *, last_only: bool) -> None:
        super().__init__(max_batch_size=rows, max_sequence_length=length)
        self.materialize_only_last_token_logits = last_only

    @property
    def read(self) -> int:
        """Tokens of each sequence whose keys and values it holds."""
        return self.sequence_len_offset

    def advance(self, tokens: int) -> None:
        """Count tokens as read after all chunks of the model have seen them; what was padding is written over."""
        self.increment_sequence_len_offset(tokens)


def obstacle(config: Any, attention: str | None) -> str:
    """Why a model cannot go on from its cache; empty where it can.

    `config` is megatron-core's, `attention` the implementation of core attention.
    """
    if attention == "te":
        return "TransformerEngine's attention has no causal mask behind a cache; kernels.attention=torch has one"
    if config.apply_rope_fusion and config.multi_latent_attention:
        return "megatron-core's fused rotary embedding of MLA begins at the first position"
    if config.moe_expert_capacity_factor is not None:
        return "which tokens an expert of limited capacity takes depends on all that are computed together"
    return ""
