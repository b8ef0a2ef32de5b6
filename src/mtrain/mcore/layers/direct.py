"""The usual forward of a decoder layer without the questions that its configuration has answered.

megatron-core asks in every layer and micro-batch for inference, recomputation, offloading, cross
attention, shared kernels and profiling, which costs the host as much as its products. A layer asks
once here whether it has any of that. If not, its training forward calls the same modules in the
same order, and computes the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

_LAYER = ("_forward_attention", "_forward_mlp", "_forward_post_mlp")
"""Methods of megatron-core's layer that `forward_layer` stands for."""
_CONFIG = (
    "fp32_residual_connection",
    "fine_grained_activation_offloading",
    "inference_fuse_tp_communication",
)
_RECOMPUTED = (
    "recompute_input_layernorm",
    "recompute_pre_mlp_layernorm",
    "recompute_mlp",
    "moe_layer_recompute",
)
_ATTENTION_CONFIG = (
    "attention_output_gate",
    "fused_single_qkv_rope",
    "flash_decode",
    "fine_grained_activation_offloading",
)
_ELSEWHERE = (
    "context",
    "context_mask",
    "rotary_pos_cos",
    "rotary_pos_sin",
    "rotary_pos_cos_sin",
    "attention_bias",
    "inference_context",
    "inference_params",
    "packed_seq_params",
    "sequence_len_offset",
)
"""Arguments of a layer that only other ways to run it have."""


def layer_is_plain(layer: Any) -> bool:
    """Return whether `forward_layer` computes what this layer's forward does."""
    config = layer.config
    own = all(
        getattr(type(layer), name, None) is getattr(TransformerLayer, name, None) for name in _LAYER
    )
    return (
        own
        and not any(getattr(config, name, False) for name in _CONFIG)
        and not any(getattr(layer, name, False) for name in _RECOMPUTED)
        and config.cuda_graph_impl == "none"
        and getattr(config, "mlp_chunks_for_training", 1) <= 1
        and isinstance(layer.pre_cross_attn_layernorm, IdentityOp)
        and isinstance(layer.cross_attention, IdentityOp)
        and isinstance(layer.cross_attn_bda, IdentityFuncOp)
    )


def attention_is_plain(attention: Any) -> bool:
    """Return whether `forward_attention` computes what this attention's forward does."""
    return (
        isinstance(attention, SelfAttention)
        and getattr(SelfAttention, "forward", None) is Attention.forward
        and not any(getattr(attention.config, name, False) for name in _ATTENTION_CONFIG)
        and not attention.checkpoint_core_attention
    )


def trains(given: Mapping[str, Any]) -> bool:
    """Return whether a call is one of training: with gradients, and without arguments that only
    inference, packed documents and other attentions need.
    """
    return torch.is_grad_enabled() and all(given.get(name) is None for name in _ELSEWHERE)


def forward_layer(
    layer: Any, hidden_states: Tensor, attention_mask: Any, rotary: Any, padding_mask: Any
) -> tuple[Tensor, None]:
    """Return the hidden states [s, b, h] behind a plain layer, and no context."""
    fused = layer.config.bias_dropout_fusion
    dropout = layer.hidden_dropout
    attended = layer.self_attention(
        layer.input_layernorm(hidden_states),
        attention_mask=attention_mask,
        rotary_pos_emb=rotary,
    )
    hidden_states = layer.self_attn_bda(layer.training, fused)(attended, hidden_states, dropout)
    mixed = layer.mlp(layer.pre_mlp_layernorm(hidden_states), padding_mask=padding_mask)
    out = layer.mlp_bda(layer.training, fused)(mixed, hidden_states, dropout)
    # A view would keep its base alive, and some of megatron-core's functions refuse views.
    if out._base is not None:
        out = make_viewless_tensor(inp=out, requires_grad=out.requires_grad, keep_graph=True)
    return out, None


def forward_attention(attention: Any, hidden_states: Tensor, attention_mask: Any) -> Any:
    """Return a plain attention's output [s, b, h] and bias; unpacking turns queries and keys."""
    query, key, value = attention.get_query_key_value_tensors(hidden_states)
    attended = attention.core_attention(
        query,
        key,
        value,
        attention_mask,
        attn_mask_type=attention.attn_mask_type,
        attention_bias=None,
        packed_seq_params=None,
    )
    return attention.linear_proj(attended)
