"""Parameters and floating-point operations of an encoder-decoder, from its configuration only."""

from __future__ import annotations

from mtrain.config.schema.model import ModelConfig
from mtrain.models.t5.config import T5Config, lengths, padded


def parameters(model: ModelConfig) -> int:
    """Return the trainable parameters of the model as built, with the padded vocabulary; each
    shared weight once.
    """
    t = section(model)
    hidden = model.hidden_size
    tables = model.padded_vocab_size * hidden * (1 if model.tie_word_embeddings else 2)
    biases = 2 * t.relative_attention_buckets * model.num_attention_heads
    return (
        tables
        + biases
        + 2 * hidden
        + model.num_layers * _encoder_layer(model)
        + decoder_layers(model) * (_encoder_layer(model) + _attention(model) + hidden)
    )


def decoder_layers(model: ModelConfig) -> int:
    """Return the layers of the decoder."""
    return section(model).decoder_layers or model.num_layers


def section(model: ModelConfig) -> T5Config:
    """`model.t5`, which the family needs."""
    assert model.t5 is not None, "the family t5 has its section"
    return model.t5


def _attention(model: ModelConfig) -> int:
    return 4 * model.hidden_size * model.num_attention_heads * model.head_dim


def _mlp(model: ModelConfig) -> int:
    return (3 if model.gated else 2) * model.hidden_size * model.ffn_hidden_size


def _encoder_layer(model: ModelConfig) -> int:
    return _attention(model) + _mlp(model) + 2 * model.hidden_size


def flops_per_token(model: ModelConfig, seq_length: int, *, causal: bool = True) -> float:
    """Return the model FLOPs of the forward and backward of one sample of `seq_length` tokens, for
    each of these tokens.

    6 per weight that multiplies and token that it meets, padding included: those of the encoder,
    and keys and values of cross attention, meet the encoder's tokens, all others the decoder's. 12
    per layer, head width, query and key for attention; of the decoder's own, half of the keys if
    `causal`.
    """
    t = section(model)
    hidden = model.hidden_size
    needed = lengths(t, seq_length)
    read = t.encoder_length or padded(needed[0])
    written = t.decoder_length or padded(needed[1])
    layers = decoder_layers(model)
    inner = model.num_attention_heads * model.head_dim
    encoder = model.num_layers * (_attention(model) + _mlp(model)) * read
    crossed = layers * (_attention(model) // 2) * read
    decoder = layers * (_attention(model) + _attention(model) // 2 + _mlp(model)) * written
    output = model.padded_vocab_size * hidden * written
    pairs = model.num_layers * read**2 + layers * (
        written * read + written**2 / (2 if causal else 1)
    )
    return (6.0 * (encoder + crossed + decoder + output) + 12.0 * inner * pairs) / seq_length
