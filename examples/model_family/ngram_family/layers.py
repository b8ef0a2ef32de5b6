"""The tables of n-grams."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from mtrain.mcore.layers.embedding import PositionEmbedding
from ngram_family.config import NgramConfig

FACTOR = 1_000_003
"""A prime larger than most vocabularies, so that few n-grams of different tokens share a hash."""


class Ngrams(nn.Module):
    """The sum of the embeddings of the n-grams that end at each token."""

    def __init__(self, config: Any, own: NgramConfig) -> None:
        super().__init__()
        self.rows = own.rows
        # mtrain's embedding adds gradients up in fp32; the tables are as large as for positions.
        self.tables = nn.ModuleList(
            PositionEmbedding(own.rows, config.hidden_size) for _ in range(own.longest - 1)
        )
        for table in self.tables:
            # This only marks the weights: mtrain draws them, alike in every layout.
            config.init_method(table.weight)

    def forward(self, ids: Tensor) -> Tensor:
        """Return ids [b, s] to [s, b, h]."""
        earlier = hashed = ids
        found = []
        for table in self.tables:
            # Before the first token of a sample stands id 0.
            earlier = F.pad(earlier, (1, 0))[:, :-1]
            hashed = hashed * FACTOR + earlier
            found.append(table(hashed % self.rows))
        return sum(found[1:], found[0]).transpose(0, 1)
