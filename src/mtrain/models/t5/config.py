"""`model.t5`: the keys of an encoder-decoder in the manner of T5, and its limits."""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from mtrain.config.families import NO_ADAPTERS, FamilyConfig, FamilySection, Limit, absent
from mtrain.config.schema.base import (
    Effect,
    Key,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Width,
)

LENGTH_MULTIPLE = 8
"""Encoder and decoder sequences are padded to a multiple of this, the same for every layout."""


class T5Config(FamilySection):
    """`model.t5`: an encoder-decoder that learns to fill in spans (T5, Raffel et al. 2020,
    arXiv:1910.10683).
    """

    FAMILY: ClassVar[str] = "t5"

    decoder_layers: Annotated[Width | None, Key(hf="num_decoder_layers")] = None
    """Layers of the decoder; null: as many as model.num_layers, which are those of the encoder."""
    relative_attention_buckets: Annotated[
        int, Field(ge=4, le=1 << 16), Key(hf="relative_attention_num_buckets", unit="buckets")
    ] = 32
    """Groups of distances between two tokens that have a learned bias of their own in each head."""
    relative_attention_distance: Annotated[
        PositiveInt,
        Key(effect=Effect.NUMERICS, hf="relative_attention_max_distance", unit="tokens"),
    ] = 128
    """Distance from which on all tokens are in the last group."""
    scale_logits: Annotated[
        bool, Key(when="model.tie_word_embeddings=true", effect=Effect.NUMERICS)
    ] = True
    """Tied embeddings: what the decoder gives is multiplied by 1 / sqrt(hidden_size) before the
    output layer.
    """
    initializer_factor: Annotated[
        PositiveFloat, Key(effect=Effect.NUMERICS, hf="initializer_factor")
    ] = 1.0
    """Factor on the standard deviations of initial weights: 1 for embeddings, 1 / sqrt(inputs) for
    a layer, and for queries 1 / sqrt(inputs * width of a head), since attention is not scaled.
    """
    noise_density: Annotated[float, Field(gt=0, lt=1), Key(effect=Effect.NUMERICS)] = 0.15
    """Share of the tokens of a sample that the decoder has to find."""
    mean_noise_span_length: Annotated[
        float, Field(ge=1, le=1 << 20), Key(effect=Effect.NUMERICS, unit="tokens")
    ] = 3.0
    """Mean length of the spans that are left out."""
    sentinels: Annotated[PositiveInt, Key(effect=Effect.NUMERICS, unit="token ids")] = 100
    """Token ids that each stand for a span that was left out; they go down from first_sentinel."""
    first_sentinel: Annotated[NonNegativeInt | None, Key(effect=Effect.NUMERICS)] = None
    """Token id that stands for the first span; null: the last of the vocabulary."""
    start_id: Annotated[
        NonNegativeInt, Key(effect=Effect.NUMERICS, hf="decoder_start_token_id")
    ] = 0
    """Token id that the decoder begins with, and that fills sequences up."""
    end_id: Annotated[NonNegativeInt, Key(effect=Effect.NUMERICS, hf="eos_token_id")] = 1
    """Token id that ends the sequences of encoder and decoder."""
    encoder_length: Annotated[PositiveInt | None, Key(effect=Effect.NUMERICS, unit="tokens")] = None
    """Tokens that the encoder reads of a sample, padding included; null: as many as the tokens that
    are left, a sentinel for each span and an end need, in multiples of 8.
    """
    decoder_length: Annotated[PositiveInt | None, Key(effect=Effect.NUMERICS, unit="tokens")] = None
    """Tokens that the decoder predicts of a sample, padding included; null: as many as the tokens
    that were left out, a sentinel for each span and an end need, in multiples of 8.
    """


def decoder_layers(model: Any) -> int:
    """Return the number of layers of the decoder of a `ModelConfig`."""
    layers: int = T5Config.of(model).decoder_layers or model.num_layers
    return layers


def spans(t: T5Config, tokens: int) -> tuple[int, int]:
    """Return how many of a sample's tokens, at least 2, are left out, and in how many spans."""
    # At least one token is left out, and at least one stays.
    noise = min(max(round(tokens * t.noise_density), 1), tokens - 1)
    return noise, min(max(round(noise / t.mean_noise_span_length), 1), tokens - noise)


def lengths(t: T5Config, tokens: int) -> tuple[int, int]:
    """Return the lengths of encoder and decoder for a sample of so many tokens, without padding."""
    noise, parts = spans(t, tokens)
    # Both have a sentinel for each span, and an end.
    return tokens - noise + parts + 1, noise + parts + 1


def padded(length: int) -> int:
    """Return the least multiple of 8 that holds `length`."""
    return -(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE


_NOT_T5 = "is no part of T5"
_STAGES = (
    "megatron-core hands one tensor on from stage to stage, and every layer of a decoder needs that"
    " of the encoder too"
)
_DRAWN = "model.t5.initializer_factor says how T5's weights are drawn"
_WHOLE_PAIRS = "biases by distance and cross attention are made for whole sequences"
_UNTRIED = "encoder-decoders have weights in 16 or 32 bits"
LIMITS = (
    Limit("model.normalization", ("RMSNorm",), "T5's norms have neither a mean nor a bias"),
    Limit("model.norm_placement", ("pre",), "T5 has its norms before attention and MLP"),
    Limit("model.position_embedding_type", ("relative",), "T5 has a bias of attention by distance"),
    Limit("model.softmax_type", ("vanilla",), _NOT_T5),
    Limit("model.init_method_std", (0.02,), _DRAWN),
    Limit("model.embedding_init_method_std", (None,), _DRAWN),
    *absent(False, "parallel_residual add_bias_linear add_qkv_bias add_proj_bias", _NOT_T5),
    *absent(False, "add_mlp_bias qk_layernorm qk_l2_norm scale_embedding", _NOT_T5),
    *absent(None, "num_query_groups moe mla mtp_num_layers rope_scaling", _NOT_T5),
    *absent(None, "rope_scaling_factor window_size linear_attention mup", _NOT_T5),
    *absent(False, "attention_output_gate", _NOT_T5),
    *absent(None, "attn_logit_softcapping final_logit_softcapping", _NOT_T5),
    NO_ADAPTERS,
    Limit("parallel.pp", (1,), _STAGES),
    Limit("parallel.vpp", (1,), _STAGES),
    Limit("parallel.cp", (1,), _WHOLE_PAIRS),
    Limit("parallel.hybrid_context_parallel", (False,), _WHOLE_PAIRS),
    Limit(
        "parallel.recompute.method",
        ("uniform", None),
        "biases by distance are of all layers: all are computed again",
    ),
    Limit("precision.fp8", (None,), _UNTRIED),
    Limit("precision.fp4", (None,), _UNTRIED),
    Limit("data.packed", (False,), "spans are left out of whole windows"),
    Limit("data.eod_mask_loss", (False,), "every token that is left out counts"),
    Limit("trainer.sample_tokens", (0,), "it continues no text"),
)

CONFIG = FamilyConfig(
    section=T5Config,
    about="The family t5: an encoder-decoder that fills in spans; null: another family.",
    limits=LIMITS,
)
