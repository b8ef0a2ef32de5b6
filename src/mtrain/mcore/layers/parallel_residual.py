"""Layers whose attention and MLP read the same input: x + attention(norm(x)) + mlp(norm(x))."""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from mtrain.mcore.layers.decoder_layer import DecoderLayer


class ParallelResidualLayer(TransformerLayer):
    """megatron-core's layer with parallel attention and MLP, each with its own norm (GPT-NeoX)."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """Map `hidden_states` [s, b, h], or [s / tp, b, h] under sequence parallelism, to the same
        shape; there is no context.
        """
        # megatron-core's own forward drops it, too: attention does not take it.
        kwargs.pop("dynamic_inference_decode_only", None)
        attended, context = self._forward_attention(hidden_states, *args, **kwargs)
        given = kwargs.get("inference_context"), kwargs.get("padding_mask")
        # `_forward_mlp` ends with `_forward_post_mlp`, which returns a function of the residual
        # here.
        return self._forward_mlp(hidden_states, *given)(attended), context

    def _forward_post_mlp(self, mlp_output_with_bias: Any, residual: Tensor) -> Any:
        """Add the MLP's output to the residual from attention, not to the input of this MLP."""
        return functools.partial(super()._forward_post_mlp, mlp_output_with_bias)


class ParallelDecoderLayer(DecoderLayer, ParallelResidualLayer):
    """The same with the norms and positions that only some families have."""

    _mlp_reads_the_sum = False


SIDE_BY_SIDE: dict[type, type] = {
    TransformerLayer: ParallelResidualLayer,
    DecoderLayer: ParallelDecoderLayer,
}
"""A layer with one part behind the other -> the one with both side by side."""
