"""Parameters and floating-point operations of BERT, from its configuration only."""

from __future__ import annotations

from mtrain.config.schema.model import ModelConfig
from mtrain.models.bert.config import BertConfig
from mtrain.models.gpt.count import layer_parameters


def own(model: ModelConfig) -> BertConfig:
    """Return the section of the family's own keys, which is there."""
    assert model.bert is not None, "a model of the family bert has the section model.bert"
    return model.bert


def parameters(model: ModelConfig) -> int:
    """Return the trainable parameters of the model as built, with the padded vocabulary; the tied
    weight once.
    """
    hidden = model.hidden_size
    rows = model.padded_vocab_size + model.max_position_embeddings + own(model).type_vocab_size
    # One norm is outside of the layers: on the embeddings, or behind the last layer where layers
    # begin with norms.
    outside = rows * hidden + 2 * hidden
    head = _square(hidden) + 2 * hidden + model.padded_vocab_size
    pooled = _square(hidden) + 2 * hidden + 2 if own(model).next_sentence else 0
    return outside + model.num_layers * layer_parameters(model, 0) + head + pooled


def _square(width: int) -> int:
    """Return the parameters of a linear layer from a width to itself."""
    return width * width + width


def flops_per_token(model: ModelConfig, seq_length: int, *, causal: bool = True) -> float:
    """Return the model FLOPs of one token's forward and backward, without recomputation.

    6 per weight of the layers, of the masked-token head and of the output layer, which every
    position goes through, and 12 per layer, channel and key of attention. `causal` says nothing
    here: a token sees the whole sample. What is pooled from one token of a sample is left out.
    """
    hidden = model.hidden_size
    head = _square(hidden) + 2 * hidden + model.padded_vocab_size * (hidden + 1)
    weights = model.num_layers * layer_parameters(model, 0) + head
    return 6.0 * weights + 12.0 * model.num_layers * hidden * seq_length
