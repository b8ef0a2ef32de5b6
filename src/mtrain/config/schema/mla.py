"""`model.mla`: multi-head latent attention. Keys carry megatron-core's names."""

from typing import Annotated, Literal

from pydantic import Field

from mtrain.config.schema.base import (
    SAME,
    Flag,
    Key,
    PositiveFloat,
    Section,
    Width,
)


class MLAConfig(Section):
    """`model.mla`: multi-head latent attention (MLA) (DeepSeek-V2)."""

    q_lora_rank: Annotated[Width | None, Key(feeds=SAME, flag=SAME)] = None
    """The rank of the query's low-rank projection; null: a full projection."""
    kv_lora_rank: Annotated[Width, Key(feeds=SAME, flag=Flag(SAME, absent=32))] = 512
    """Rank of the joint key and value projection."""
    qk_head_dim: Annotated[
        Width, Key(feeds=SAME, flag=SAME, hf="qk_nope_head_dim", unit="channels")
    ] = 128
    """The width of a head's part without rotary positions."""
    qk_pos_emb_head_dim: Annotated[
        Width, Key(feeds=SAME, flag=SAME, hf="qk_rope_head_dim", unit="channels")
    ] = 64
    """Width of a head's part with rotary positions."""
    v_head_dim: Annotated[Width, Key(feeds=SAME, flag=SAME, unit="channels")] = 128
    """Width of a head's values."""
    layernorm_epsilon: PositiveFloat | None = None
    """Added to the variance in the norms of the low-rank projections; null:
    model.layernorm_epsilon.
    """
    rope_type: Annotated[Literal["rope", "yarn"], Key(feeds=SAME)] = "rope"
    """yarn: rotary positions stretched beyond the length that the model was trained for (Peng et
    al. 2023).
    """
    rotary_scaling_factor: Annotated[
        PositiveFloat | None,
        Key(feeds=SAME, when="model.mla.rope_type=yarn", null=40.0, flag=Flag(SAME, absent=1.0)),
    ] = None
    """yarn: the factor of the length; null: 40."""
    original_max_position_embeddings: Annotated[
        Annotated[int, Field(ge=1, le=1 << 22)] | None,
        Key(feeds=SAME, when="model.mla.rope_type=yarn", null=4096, unit="tokens"),
    ] = None
    """yarn: the length before stretching; null: 4096."""
    mscale: Annotated[
        Annotated[float, Field(gt=0, le=100)] | None,
        Key(feeds=SAME, when="model.mla.rope_type=yarn", null=1.0, flag=Flag(SAME, absent=1.0)),
    ] = None
    """yarn: weight of the attention temperature; null: 1."""
    mscale_all_dim: Annotated[
        Annotated[float, Field(ge=0, le=100)] | None,
        Key(feeds=SAME, when="model.mla.rope_type=yarn", null=0.0, flag=Flag(SAME, absent=0.0)),
    ] = None
    """yarn: the same for all dimensions; null: 0."""
    beta_fast: Annotated[
        PositiveFloat | None, Key(feeds=SAME, when="model.mla.rope_type=yarn", null=32.0)
    ] = None
    """yarn: turns within the original length above which a frequency stays unchanged; null: 32."""
    beta_slow: Annotated[
        PositiveFloat | None, Key(feeds=SAME, when="model.mla.rope_type=yarn", null=1.0)
    ] = None
    """yarn: turns below which it is stretched in full; null: 1."""
