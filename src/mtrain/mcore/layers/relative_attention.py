"""Attention with a learned bias by distance, and the layers of an encoder-decoder around it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.embeddings.relative_pos_embedding import RelativePositionEmbedding
from megatron.core.tensor_parallel import (
    get_cuda_rng_tracker,
    scatter_to_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import (
    CrossAttention,
    CrossAttentionSubmodules,
    SelfAttention,
    SelfAttentionSubmodules,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from mtrain_kernels.attention.reference import visible
from torch import Tensor
from torch.nn import functional as F

from mtrain.mcore import api
from mtrain.mcore.layers.attention import CoreAttention
from mtrain.mcore.layers.backend import Provider, layers_of


class RelativePositions(RelativePositionEmbedding):
    """megatron-core's biases of each head by distance; each tensor-parallel rank makes those of its
    own heads.

    Every rank keeps the whole table [buckets, heads], and has the whole gradient of it.
    """

    def biases(self, length: int, group: Any, hidden: Tensor | None = None) -> Tensor:
        """Return fp32 [b or 1, heads / tp, length, length], -inf where a query does not see a key.

        No query of the decoder sees later keys, and no query sees keys that `hidden` [b, 1, 1,
        length] marks. The bias of a distance is added up in fp32 over all pairs that have it.
        """
        table = self.relative_attention_bias.weight.float()
        if group.size() > 1:
            table = scatter_to_tensor_model_parallel_region(table, group)
        at = torch.arange(length, device=table.device)
        buckets = self._relative_position_bucket(
            at[None, :] - at[:, None],
            bidirectional=self.bidirectional,
            num_buckets=self.relative_attention_num_buckets,
            max_distance=self.relative_attention_max_distance,
        )
        biases = F.embedding(buckets, table).permute(2, 0, 1).unsqueeze(0)
        if not self.bidirectional:
            biases = biases.masked_fill(~visible(at, at, causal=True), float("-inf"))
        return biases if hidden is None else biases.masked_fill(hidden, float("-inf"))


class _WithBiases(torch.autograd.Function):
    """The input of a stack, whose backward adds the biases' gradient when all layers are done."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, biases: Tensor, leaf: Tensor) -> Tensor:
        ctx.leaf = leaf
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        # Complete by now: every layer's backward precedes that of the stack's input.
        gradient = ctx.leaf.grad
        ctx.leaf.grad = None
        return dy, gradient, None


def computed_again(hidden: Tensor, biases: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input of a stack and its biases, for layers that all recompute their attention.

    Each of them goes backward by itself, and would go on through what made the biases, which is
    there once. So they get a leaf without a history, which has its whole gradient when what they
    read gets its own. Layers that are not computed again add to a leaf later: they get the biases
    themselves.
    """
    leaf = biases.detach().requires_grad_()
    return _WithBiases.apply(hidden, biases, leaf), leaf


class BiasedAttention(CoreAttention):
    """Softmax attention in which visibility and its strength are a bias on the scores."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attend with queries [s, b, n, d] to keys and values [t, b, n, d]; return [s, b, n * d].

        `attention_bias` [b or 1, n, s, t] is added to the scores. `attention_mask`, which
        broadcasts to that, is True where a key is hidden; there is one of both at most.
        """
        seen = None
        if attention_bias is not None:
            # A CPU adds an fp32 bias in fp32; GPU kernels require the dtype of the query.
            seen = attention_bias if query.is_cpu else attention_bias.to(query.dtype)
        elif attention_mask is not None:
            seen = ~attention_mask
        dropout_p = self._dropout_p if self.training else 0.0
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        with self._random_state(dropout_p):
            out = F.scaled_dot_product_attention(q, k, v, seen, dropout_p, scale=self._scale)
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)


def with_dropout(linear: type) -> type:
    """Return the row-parallel layer with `config.hidden_dropout` first, as a class for specs."""

    class Dropped(linear):  # type: ignore[misc]
        def forward(self, input_: Tensor, *args: Any, **more: Any) -> Any:
            p = self.config.hidden_dropout if self.training else 0.0
            if p:
                # Under sequence parallelism megatron-core runs the whole block in the tracker's
                # state.
                if self.config.sequence_parallel:
                    state = nullcontext()
                else:
                    state = get_cuda_rng_tracker().fork()
                with state:
                    input_ = F.dropout(input_, p)
            return super().forward(input_, *args, **more)

    Dropped.__name__ = linear.__name__
    Dropped.__doc__ = linear.__doc__
    return Dropped


def encoder_layer(config: Any, provider: Provider) -> Any:
    """Return a layer that sees the whole sequence: attention and MLP, each behind its norm."""
    return _layer(config, provider, AttnMaskType.padding, None)


def decoder_layer(config: Any, provider: Provider) -> Any:
    """Return a layer that sees earlier tokens and all outputs of the encoder."""
    norm = provider.layer_norm(config.normalization == "RMSNorm")
    cross = api.ModuleSpec(
        module=CrossAttention,
        params={"attn_mask_type": AttnMaskType.padding},
        submodules=CrossAttentionSubmodules(
            linear_q=provider.column_parallel_linear(),
            linear_kv=provider.column_parallel_linear(),
            core_attention=BiasedAttention,
            linear_proj=provider.row_parallel_linear(),
        ),
    )
    return _layer(config, provider, AttnMaskType.causal, (norm, cross))


def _layer(
    config: Any, provider: Provider, mask: AttnMaskType, cross: tuple[Any, Any] | None
) -> Any:
    norm = provider.layer_norm(config.normalization == "RMSNorm")
    add: Callable[..., Any] = get_bias_dropout_add
    attention = api.ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": mask},
        submodules=SelfAttentionSubmodules(
            linear_qkv=provider.column_parallel_linear(),
            core_attention=BiasedAttention,
            linear_proj=provider.row_parallel_linear(),
            q_layernorm=IdentityOp,
            k_layernorm=IdentityOp,
        ),
    )
    mlp = api.get_mlp_module_spec_for_backend(
        backend=provider, num_experts=None, use_te_activation_func=config.use_te_activation_func
    )
    layers = layers_of(mlp)
    layers.linear_fc1 = provider.column_parallel_linear()
    # T5 drops out between the two layers, where megatron-core's MLP has no dropout.
    layers.linear_fc2 = with_dropout(provider.row_parallel_linear())
    layer = TransformerLayerSubmodules(
        input_layernorm=norm,
        self_attention=attention,
        self_attn_bda=add,
        pre_mlp_layernorm=norm,
        mlp=mlp,
        mlp_bda=add,
    )
    if cross is not None:
        layer.pre_cross_attn_layernorm, layer.cross_attention = cross
        layer.cross_attn_bda = add
    return api.ModuleSpec(module=TransformerLayer, submodules=layer)
