"""`model.linear_attention`: gated delta nets. Keys carry megatron-core's names, without
`linear_`.
"""

from typing import Annotated

from pydantic import Field

from mtrain.config.schema.base import MOST, SAME, Key, Section, Width


class LinearAttentionConfig(Section):
    """`model.linear_attention`: gated delta nets in place of attention, except in every n-th layer
    (Qwen3-Next), or at a G in the pattern of a hybrid. Such a layer has a state of fixed size
    instead of keys and values: it decays, and each token corrects what it reads of it (Yang et al.
    2024, arXiv:2412.06464). Its convolution and gate use SiLU and its norm of values is RMSNorm,
    whatever the rest of the model has.
    """

    core_prefix = "linear_"

    freq: Annotated[
        Annotated[int, Field(ge=2, le=MOST)],
        Key(when="model.family=gpt", flag="--linear-attention-freq", hf="full_attention_interval"),
    ] = 4
    """Every n-th layer has softmax attention, all others are gated delta nets. For a hybrid,
    model.hybrid.pattern chooses the layers.
    """
    num_key_heads: Annotated[Width, Key(feeds=SAME, flag=SAME, hf="linear_num_key_heads")] = 16
    """Heads of queries and keys."""
    num_value_heads: Annotated[Width, Key(feeds=SAME, flag=SAME, hf="linear_num_value_heads")] = 32
    """Heads of values, each with a state, a decay and a gate; several may share a head of queries
    and keys.
    """
    key_head_dim: Annotated[
        Width, Key(feeds=SAME, flag=SAME, hf="linear_key_head_dim", unit="channels")
    ] = 128
    """Width of a head of queries and keys."""
    value_head_dim: Annotated[
        Width, Key(feeds=SAME, flag=SAME, hf="linear_value_head_dim", unit="channels")
    ] = 128
    """Width of a head of values."""
    conv_kernel_dim: Annotated[
        Annotated[int, Field(ge=1, le=64)],
        Key(feeds=SAME, flag=SAME, hf="linear_conv_kernel_dim", unit="tokens"),
    ] = 4
    """The tokens that the causal convolution of queries, keys and values covers, including the
    current one.
    """

    @property
    def key_channels(self) -> int:
        """Return the channels of all queries, or of all keys."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_channels(self) -> int:
        """Return the channels of all values."""
        return self.num_value_heads * self.value_head_dim

    @property
    def sections(self) -> tuple[int, ...]:
        """Return the rows of the input projection: queries, keys, values, gates, then a beta and a
        decay of each value head.
        """
        k = self.key_channels
        v = self.value_channels
        return (k, k, v, v, self.num_value_heads, self.num_value_heads)

    @property
    def conv_channels(self) -> int:
        """Return the channels of the convolution."""
        return 2 * self.key_channels + self.value_channels
