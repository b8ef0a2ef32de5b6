"""`model.rope_scaling`: rotary positions for longer sequences. Keys carry Hugging Face's names."""

import math
from typing import Annotated, Literal

from pydantic import Field

from mtrain.config.schema.base import Key, PositiveFloat, Section

_YARN = "model.rope_scaling.rope_type=yarn"
_LLAMA3 = "model.rope_scaling.rope_type=llama3"
_LONGROPE = "model.rope_scaling.rope_type=longrope"
# A factor on cosines and sines; attention scores grow with its square, and published ones are about
# 1.
Temperature = Annotated[float, Field(gt=0, le=100)]


class RopeScalingConfig(Section):
    """`model.rope_scaling`: rotary frequencies for longer sequences than the model was first
    trained on.
    """

    rope_type: Literal["dynamic", "llama3", "yarn", "longrope"]
    """dynamic: a base that grows with sequences beyond model.max_position_embeddings (NTK); llama3:
    slow frequencies are divided (Llama 3.1); yarn: those, and attention is sharpened (Peng et al.
    2023); longrope: each frequency has a factor, for short and long sequences (Phi-3). Linear
    scaling is model.rotary_seq_len_interpolation_factor.
    """
    factor: PositiveFloat
    """The factor by which sequences become longer."""
    original_max_position_embeddings: Annotated[
        Annotated[int, Field(ge=2, le=1 << 22)] | None,
        Key(when="model.rope_scaling.rope_type=llama3|yarn|longrope", unit="tokens"),
    ] = None
    """The length before scaling; null: model.max_position_embeddings."""
    low_freq_factor: Annotated[PositiveFloat | None, Key(when=_LLAMA3, null=1.0)] = None
    """llama3: turns within the original length below which a frequency is divided in
    full; null: 1.
    """
    high_freq_factor: Annotated[PositiveFloat | None, Key(when=_LLAMA3, null=4.0)] = None
    """llama3: turns above which it stays unchanged; null: 4."""
    beta_fast: Annotated[PositiveFloat | None, Key(when=_YARN, null=32.0)] = None
    """yarn: turns within the original length above which a frequency stays unchanged; null: 32."""
    beta_slow: Annotated[PositiveFloat | None, Key(when=_YARN, null=1.0)] = None
    """yarn: turns below which it is divided in full; null: 1."""
    truncate: Annotated[bool | None, Key(when=_YARN, null=True)] = None
    """yarn: round the bounds between which frequencies are partly divided to whole numbers; null:
    true.
    """
    mscale: Annotated[Temperature | None, Key(when=_YARN)] = None
    """yarn: the weight of log(factor) in attention_factor, divided by that of mscale_all_dim; null:
    1 and no divisor.
    """
    mscale_all_dim: Annotated[Temperature | None, Key(when=_YARN)] = None
    """yarn: the divisor of mscale, with which it must be set."""
    attention_factor: Annotated[
        Temperature | None, Key(when="model.rope_scaling.rope_type=yarn|longrope")
    ] = None
    """yarn, longrope: the factor on cosines and sines; null: 0.1 log(factor) + 1 in yarn, in
    longrope sqrt(1 + log(factor) / log(original_max_position_embeddings)).
    """
    short_factor: Annotated[tuple[PositiveFloat, ...] | None, Key(when=_LONGROPE)] = Field(
        default=None, strict=False
    )
    """longrope: the divisor of each frequency, in sequences up to the original length."""
    long_factor: Annotated[tuple[PositiveFloat, ...] | None, Key(when=_LONGROPE)] = Field(
        default=None, strict=False
    )
    """longrope: the same in longer sequences."""

    def attention(self, length: int) -> float:
        """Return the factor on cosines and sines; `length` is the one before scaling."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1 or self.rope_type not in ("yarn", "longrope"):
            return 1.0
        if self.rope_type == "longrope":
            return math.sqrt(1 + math.log(self.factor) / math.log(length))
        if self.mscale and self.mscale_all_dim:
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    def _temperature(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0
