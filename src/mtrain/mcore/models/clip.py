"""CLIP's vision transformer and LLaVA's projector, over megatron-core's layers.

megatron-core's own `CLIPViTModel` differs from the published model: it computes patches with a
bias, needs TransformerEngine for its norms, gives no features of an inner layer, and each
tensor-parallel rank of it draws its own class token. This module uses only its layers, which have
tensor parallelism, recomputation and checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from torch import Tensor, nn
from torch.nn import functional as F

from mtrain.mcore.layers.backend import Provider
from mtrain.mcore.layers.decoder_layer import DecoderLayer, DecoderLayerSubmodules
from mtrain.mcore.layers.portable import gelu_tanh
from mtrain.models.llava.config import LlavaConfig

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "quick_gelu": quick_gelu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
}
_WHOLE: dict[str, Any] = {
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "pipeline_model_parallel_layout": None,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "sequence_parallel": False,
}
"""The tower stands on one pipeline stage, whose tensor-parallel ranks see whole images."""
_PLAIN: dict[str, Any] = {
    "normalization": "LayerNorm",
    "layernorm_zero_centered_gamma": False,
    "gated_linear_unit": False,
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "bias_activation_fusion": False,
    "use_te_activation_func": False,
    "qk_layernorm": False,
    "qk_l2_norm": False,
    "softmax_scale": None,
    "softmax_type": "vanilla",
    "window_size": None,
    "window_attn_skip_freq": None,
    "no_rope_freq": None,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "parallel_residual": False,
}
"""Parts of a language model next to those of CLIP."""


def vision_config(language: Any, own: LlavaConfig) -> Any:
    """Return the vision tower's TransformerConfig: the language model's but for its shape."""
    shape = {
        "num_layers": own.vision_layers,
        "hidden_size": own.vision_hidden_size,
        "ffn_hidden_size": own.vision_ffn_hidden_size,
        "num_attention_heads": own.vision_heads,
        "num_query_groups": own.vision_heads,
        "kv_channels": own.head_dim,
        "layernorm_epsilon": own.vision_layernorm_epsilon,
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "activation_func": ACTIVATIONS[own.vision_activation],
    }
    return _changed(language, {**_WHOLE, **_PLAIN, **shape})


def projector_config(language: Any, own: LlavaConfig) -> Any:
    """Return the projector's TransformerConfig: both layers end in the language model's width."""
    shape = {
        "ffn_hidden_size": language.hidden_size,
        "add_bias_linear": own.projector_bias,
        "activation_func": ACTIVATIONS[own.projector_activation],
    }
    return _changed(language, {**_WHOLE, **_PLAIN, **shape})


def _changed(config: Any, values: dict[str, Any]) -> Any:
    # Attributes of a copy: a new config would derive and check fields that are resolved already.
    out = deepcopy(config)
    for name, value in values.items():
        setattr(out, name, value)
    return out


def _layer_spec(provider: Provider) -> Any:
    norm = provider.layer_norm()
    attention = SelfAttentionSubmodules(
        linear_qkv=provider.column_parallel_linear(),
        core_attention=provider.core_attention(),
        linear_proj=provider.row_parallel_linear(),
    )
    layer = DecoderLayerSubmodules(
        input_layernorm=norm,
        self_attention=ModuleSpec(
            module=SelfAttention,
            params={"attn_mask_type": AttnMaskType.no_mask},
            submodules=attention,
        ),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=norm,
        mlp=ModuleSpec(module=MLP, submodules=_mlp(provider)),
        mlp_bda=get_bias_dropout_add,
    )
    return ModuleSpec(module=DecoderLayer, submodules=layer)


def _mlp(provider: Provider) -> MLPSubmodules:
    return MLPSubmodules(
        linear_fc1=provider.column_parallel_linear(), linear_fc2=provider.row_parallel_linear()
    )


class VisionTower(MegatronModule):
    """CLIP's vision transformer up to its features: patches of images [n, 3, size, size] to
    [patches, n, h].

    Layers behind the features, and the last norm, are parameters that nothing reads and nobody
    trains.
    Source: Radford et al. 2021 (CLIP), and transformers' CLIPVisionModel.
    """

    def __init__(self, config: Any, provider: Provider, own: LlavaConfig) -> None:
        super().__init__(config=config)
        h = own.vision_hidden_size
        patch = own.patch_size
        kind = config.params_dtype
        self._own = own
        self._grid = own.image_size // patch
        self.class_embedding = nn.Parameter(torch.zeros(h, dtype=kind))
        self.patch_embedding = nn.Parameter(torch.zeros(h, 3, patch, patch, dtype=kind))
        self.position_embedding = nn.Parameter(torch.zeros(own.image_tokens + 1, h, dtype=kind))
        for parameter in self.parameters():
            config.init_method(parameter)
        norm = partial(
            provider.layer_norm(), config=config, hidden_size=h, eps=config.layernorm_epsilon
        )
        self.pre_layernorm = norm()
        self.encoder = _stack(config, provider, own.used_layers)
        if own.unused_layers:
            # Kept in a second stack: a checkpoint joins the layers of a stack into one tensor, and
            # these are not trained.
            self.behind = _stack(config, provider, own.unused_layers).requires_grad_(False)
        self.post_layernorm = norm().requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the features of every patch, row by row."""
        x = (
            self._patches(images.to(self.patch_embedding.dtype))
            @ self.patch_embedding.flatten(1).t()
        )
        x = (
            torch.cat([self.class_embedding.expand(len(x), 1, -1), x], dim=1)
            + self.position_embedding
        )
        x = self.pre_layernorm(x.transpose(0, 1).contiguous())
        again = (
            self.config.recompute_granularity == "full"
            and self.training
            and torch.is_grad_enabled()
        )
        for layer in self.encoder.layers:
            if again:
                x = tensor_parallel.checkpoint(partial(_run, layer), False, x)
            else:
                x = _run(layer, x)
        # The class token is no patch.
        return x[1:]

    def _patches(self, images: Tensor) -> Tensor:
        """Return images [n, 3, size, size] as patches [n, patches, 3 * patch * patch], without
        incomplete ones at the edges.
        """
        g = self._grid
        p = self._own.patch_size
        cut = images[..., : g * p, : g * p].unflatten(2, (g, p)).unflatten(4, (g, p))
        return cut.permute(0, 2, 4, 1, 3, 5).reshape(len(images), g * g, 3 * p * p)


def _stack(config: Any, provider: Provider, layers: int) -> TransformerBlock:
    specs = TransformerBlockSubmodules(layer_specs=[_layer_spec(provider)] * layers)
    return TransformerBlock(_changed(config, {"num_layers": layers}), specs, post_layer_norm=False)


def _run(layer: Any, x: Tensor) -> Tensor:
    return layer(x, attention_mask=None)[0]  # type: ignore[no-any-return]


class Projector(MLP):
    """Two linear layers around an activation: [patches, n, vision h] to [patches, n, h]."""

    def __init__(self, config: Any, provider: Provider, own: LlavaConfig) -> None:
        super().__init__(
            config,
            _mlp(provider),
            input_size=own.vision_hidden_size,
            ffn_hidden_size=config.ffn_hidden_size,
        )

    def forward(self, features: Tensor) -> Tensor:
        """Return embeddings for the language model."""
        out, bias = super().forward(features)
        return out if bias is None else out + bias
