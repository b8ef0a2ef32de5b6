"""The pattern of a hybrid model that equals a decoder-only transformer, for
`model.builder=hybrid`.
"""

from __future__ import annotations

from mtrain.config.schema.model import ModelConfig
from mtrain.models.hybrid.config import ATTENTION, DELTA, EXPERTS, LATENT, MLP, SPARSE

# The letters of one layer of such a transformer: attention, then MLP or experts.
OF_A_BLOCK = 2


def pattern(model: ModelConfig) -> str:
    """Return the letters of all layers."""
    dense = model.num_layers if model.moe is None else model.moe.first_dense_layers
    if model.mla is None:
        softmax = ATTENTION
    else:
        softmax = LATENT if model.dsa is None else SPARSE
    return "".join(
        (DELTA if model.is_linear(index) else softmax) + (MLP if index < dense else EXPERTS)
        for index in range(model.num_layers)
    )


def letters(layers: range) -> range:
    """Return the letters of some of the layers."""
    return range(OF_A_BLOCK * layers.start, OF_A_BLOCK * layers.stop)
