"""`model.hybrid`: the keys of a decoder of Mamba-2 layers, attention and MLPs, and its limits."""

from typing import Annotated, ClassVar

from pydantic import Field

from mtrain.config.families import FamilyConfig, FamilySection, Limit, absent
from mtrain.config.schema.base import (
    SAME,
    Effect,
    Key,
    NonNegativeFloat,
    PositiveFloat,
    Section,
    Width,
)

MAMBA = "M"
ATTENTION = "*"
LATENT = "+"
SPARSE = "D"
DELTA = "G"
MLP = "-"
EXPERTS = "E"
KINDS = {
    MAMBA: "Mamba-2",
    ATTENTION: "attention",
    LATENT: "multi-latent attention",
    SPARSE: "sparse attention",
    DELTA: "a gated delta net",
    MLP: "an MLP",
    EXPERTS: "experts",
}
"""Letter of a pattern -> the layer that it stands for."""
DESCRIBED = {
    LATENT: ("mla",),
    SPARSE: ("mla", "dsa"),
    DELTA: ("linear_attention",),
    EXPERTS: ("moe",),
}
"""Letter -> the sections of `model` that describe its layers, where the keys of every model do not.
"""
SOFTMAX = (ATTENTION, LATENT, SPARSE)
"""Letters of layers with softmax attention, of which a model has one kind."""
ABSENT = {
    "|": "the layout says where pipeline stages end: parallel.pp, parallel.pipeline_layout",
    "/": "hybrids have no layers of multi-token prediction here",
}
"""Other letters that megatron-core reads -> why they are refused."""


class HybridConfig(FamilySection):
    """`model.hybrid`: which layer is of which kind, and the sizes of Mamba-2 mixers (Dao and Gu
    2024, arXiv:2405.21060).

    Each layer is one norm and one of: a Mamba-2 mixer, attention, MLA, sparse attention, a gated
    delta net, an MLP, experts.
    """

    core_prefix = "mamba_"

    FAMILY: ClassVar[str] = "hybrid"

    pattern: Annotated[str, Field(min_length=1, max_length=4096), Key(hf="hybrid_override_pattern")]
    """The kind of each layer, a letter for one: M Mamba-2, * attention, + MLA (of model.mla), D
    sparse attention (of model.mla and model.dsa), G a gated delta net (of model.linear_attention),
    - MLP, E experts (of model.moe), as M-M-M-M*-. Pipeline stages end where the layout says,
    anywhere in it.
    """
    num_heads: Annotated[Width, Key(feeds=SAME, hf="mamba_num_heads")]
    """Heads of a Mamba-2 mixer, each with a state of its own."""
    head_dim: Annotated[Width, Key(feeds=SAME, hf="mamba_head_dim", unit="channels")] = 64
    """Width of such a head."""
    state_dim: Annotated[Width, Key(feeds=SAME, hf="ssm_state_size", aka="state_size d_state")] = (
        128
    )
    """Numbers in the state of each of its channels."""
    num_groups: Annotated[Width, Key(feeds=SAME, hf="n_groups", aka="ngroups")] = 8
    """Groups of heads; those of a group share what is written into their states and read from them,
    and its channels are normed together.
    """
    conv_kernel: Annotated[Width, Key(hf="conv_kernel", aka="d_conv", unit="tokens")] = 4
    """Tokens that the convolution in front of the states sees, the present one included."""
    time_step_min: Annotated[NonNegativeFloat, Key(effect=Effect.NUMERICS, hf="time_step_min")] = (
        0.0
    )
    """Lower bound of a time step, by which a state fades and is written to; 0: none."""
    chunk_size: Annotated[Width, Key(effect=Effect.PARALLELISM, hf="chunk_size", unit="tokens")] = (
        128
    )
    """Tokens that are computed by one product of matrices; the states between them are carried on.
    """
    embedding_multiplier: Annotated[
        PositiveFloat, Key(effect=Effect.NUMERICS, hf="embedding_multiplier")
    ] = 1.0
    """Factor on the embeddings of tokens, rounded to the dtype of the weights (12 in Granite 4)."""
    residual_multiplier: Annotated[
        PositiveFloat, Key(effect=Effect.NUMERICS, hf="residual_multiplier")
    ] = 1.0
    """Factor on what each layer adds to the residual stream (0.22 in Granite 4)."""
    logits_scaling: Annotated[PositiveFloat, Key(effect=Effect.NUMERICS, hf="logits_scaling")] = 1.0
    """Divisor of logits: the output layer reads hidden states that are divided by it (8 in Granite
    4 H Micro).
    """

    @property
    def channels(self) -> int:
        """Return the channels of all heads of a Mamba-2 mixer."""
        return self.num_heads * self.head_dim

    @property
    def states(self) -> int:
        """Return the numbers that a token writes into the states of a Mamba-2 mixer; it reads as
        many.
        """
        return self.num_groups * self.state_dim

    def is_delta(self, index: int) -> bool:
        """Return whether layer `index` (from 0) is a gated delta net."""
        return self.kind(index) == DELTA

    def kind(self, index: int) -> str:
        """Return the letter of layer `index` (from 0); empty after the end of a pattern that is too
        short.
        """
        return self.pattern[index : index + 1]


def is_described(model: Section, kind: str) -> bool:
    """Return whether the model has the sections that describe a layer of this kind; a rule refuses
    others.
    """
    return kind in KINDS and all(
        getattr(model, section) is not None for section in DESCRIBED.get(kind, ())
    )


_NOT_HYBRID = "is no part of a hybrid here: its layers are those of Nemotron-H and Granite 4"
_STATES = (
    "mixers exchange their heads among the ranks of parallel.cp, not among those of each document"
)
LIMITS = (
    Limit("model.norm_placement", ("pre",), "each layer of a hybrid has its norm in front"),
    Limit(
        "model.position_embedding_type",
        ("none", "rope", "learned_absolute"),
        "a bias of attention by distance is of the family t5",
    ),
    Limit("model.softmax_type", ("vanilla",), _NOT_HYBRID),
    *absent(False, "parallel_residual add_bias_linear add_qkv_bias add_proj_bias", _NOT_HYBRID),
    *absent(False, "add_mlp_bias scale_embedding qk_l2_norm rotary_interleaved", _NOT_HYBRID),
    *absent(None, "mtp_num_layers rope_scaling rope_scaling_factor no_rope_freq", _NOT_HYBRID),
    *absent(None, "rotary_base_local window_size mup", _NOT_HYBRID),
    *absent(None, "attn_logit_softcapping final_logit_softcapping", _NOT_HYBRID),
    Limit("parallel.hybrid_context_parallel", (False,), _STATES),
    Limit(
        "precision.fp8_recipe",
        (None, "tensorwise", "blockwise"),
        "linear layers of hybrids are tried only with ours",
    ),
    Limit("precision.fp4", (None,), "hybrids have weights in 8, 16 or 32 bits"),
)

CONFIG = FamilyConfig(
    section=HybridConfig,
    about="The family hybrid: a pattern of layers, and Mamba-2 mixers; null: another family.",
    limits=LIMITS,
)
