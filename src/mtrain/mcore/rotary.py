"""Rotary positions of models whose layers with a window have a base of their own."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor, nn


class TwoBases(nn.Module):
    """Angles of layers with a window, by `base` and not scaled, and those of all other layers: [2, s, 1, 1, r]."""

    def __init__(self, others: RotaryEmbedding, base: float) -> None:
        super().__init__()
        self.others = others
        self.windows = RotaryEmbedding(
            2 * len(others.inv_freq),
            rotary_percent=1.0,
            rotary_interleaved=others.rotary_interleaved,
            rotary_base=base,
            use_cpu_initialization=others.inv_freq.is_cpu,
            cp_group=others.cp_group,
        )
        self.get_rotary_seq_len = others.get_rotary_seq_len

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Takes what megatron-core's takes."""
        return torch.stack([self.windows(*args, **kwargs), self.others(*args, **kwargs)])
