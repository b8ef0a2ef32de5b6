"""`model.mup`: maximal update parametrization. Keys carry megatron-core's names, without `mup_`.

The implementation is ours, as megatron-core 0.19 defines it, and the same for every release.
"""

import math
from typing import Annotated

from pydantic import Field

from mtrain.config.schema.base import SAME, Effect, Flag, Key, PositiveFloat, Section, Width


class MupConfig(Section):
    """`model.mup`: hyperparameters tuned at one width hold at others (muP, Yang et al. 2022, arXiv
    2203.03466). With m = hidden_size / base_hidden_size, matrices between embedding and output
    layer start with 1 / sqrt(m) of their deviation, adamw and lion use 1 / m of the learning rate
    (and adamw of eps) for them, sgd m times the rate for all others, and logits are divided by m.
    All widths of a layer must grow with hidden_size.
    """

    core_prefix = "mup_"

    base_hidden_size: Annotated[
        Width | None, Key(flag=Flag(SAME, absent=None), effect=Effect.NUMERICS, unit="channels")
    ] = None
    """The width at which learning rate and deviations were tuned; null: model.hidden_size."""
    embedding_mult: Annotated[
        PositiveFloat, Key(flag=Flag(SAME, absent=1.0), effect=Effect.NUMERICS)
    ] = 1.0
    """Factor on the embeddings of tokens."""
    output_mult: Annotated[
        PositiveFloat | None, Key(flag=Flag(SAME, none=(1,)), effect=Effect.NUMERICS)
    ] = None
    """Factor on logits, before model.final_logit_softcapping; null: base_hidden_size / hidden_size.
    """
    base_head_dim: Annotated[
        PositiveFloat | None, Key(flag=Flag(SAME), effect=Effect.NUMERICS, unit="channels")
    ] = None
    """The square root of this also multiplies attention logits, so that heads of this width have
    the usual factor; null: 1.
    """
    attn_scale_power: Annotated[
        float, Field(ge=0, le=4), Key(flag=Flag(SAME, absent=1.0), effect=Effect.NUMERICS)
    ] = 1.0
    """Attention logits are divided by the width of a head to this power: 1 in muP, 0.5 as usual."""

    def width_mult(self, hidden_size: int) -> float:
        """Return the width relative to the base."""
        return hidden_size / (self.base_hidden_size or hidden_size)

    def logit_mult(self, hidden_size: int) -> float:
        """Return the factor on logits."""
        return self.output_mult or 1 / self.width_mult(hidden_size)

    def softmax_scale(self, head_dim: int) -> float:
        """Return the factor on attention logits."""
        return math.sqrt(self.base_head_dim or 1.0) / math.pow(head_dim, self.attn_scale_power)
