"""The layer that makes one number of each position of a decoder: a reward, or a value."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn
from torch.nn import functional as F


class ValueHead(nn.Module):
    """A linear layer from the hidden size to one number, without a bias, whole on every rank.

    Under sequence parallelism each tensor-parallel rank has part of the tokens, so the weight is
    marked for the all-reduce of its gradient in megatron-core's `finalize_model_grads`.
    """

    def __init__(self, config: Any, group: Any, std: float) -> None:
        super().__init__()
        self.sequence_parallel: bool = config.sequence_parallel
        self.group = group
        empty = torch.zeros(1, config.hidden_size, dtype=config.params_dtype)
        self.weight = nn.Parameter(empty)
        self.weight.mtrain_init_std = std  # type: ignore[attr-defined]
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the number of each position [b, s] in fp32, from hidden states [s, b, h] or, under
        sequence parallelism, this rank's [s / tp, b, h].
        """
        # In fp32: bf16 would round a reward to three digits before two are subtracted.
        found = F.linear(hidden.float(), self.weight.float())
        if self.sequence_parallel:
            # Every rank computes the same loss from all numbers: the gradient is split, not summed.
            found = gather_from_sequence_parallel_region(
                found, tensor_parallel_output_grad=False, group=self.group
            )
        return found.squeeze(-1).t()
