"""The size of a model, and the row of a published table that is nearest to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from mtrain.config.schema.model import ModelConfig


class Sized(Protocol):
    """A row of a table."""

    @property
    def parameters(self) -> float:
        """Return parameters of its model."""
        ...


Row = TypeVar("Row", bound=Sized)


def nearest(rows: Sequence[Row], model: ModelConfig) -> Row:
    """Return the row whose size is the nearest by its ratio to the parameters that a
    token visits.
    """
    size = visited_parameters(model)
    return min(rows, key=lambda row: max(row.parameters / size, size / row.parameters))


def visited_parameters(model: ModelConfig) -> int:
    """Return the weights of the matrices that a token visits: near enough to find a row
    of a table.
    """
    m = model
    width = m.ffn_hidden_size
    if m.moe is not None:
        width = m.moe.router_topk * m.moe.ffn_hidden_size + (
            m.moe.shared_expert_intermediate_size or 0
        )
    attention = 2 * m.head_dim * (m.num_attention_heads + m.query_groups)
    layer = m.hidden_size * (attention + (3 if m.gated else 2) * width)
    return m.num_layers * layer + m.vocab_size * m.hidden_size * (1 if m.tie_word_embeddings else 2)
