"""The specs that tell megatron-core which classes the attention of a layer is made of."""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.torch_norm import L2Norm

from mtrain.config.engine.kernels import ON_CPU
from mtrain.mcore import api
from mtrain.mcore.layers.cache import CachedSelfAttention
from mtrain.mcore.layers.gated_delta_net import GatedDeltaNet, OutputNorm
from mtrain.mcore.layers.portable import KeyNorm, QueryNorm, chosen, with_bias, with_epsilon


def attention_spec(config: Any, provider: Any, *, linear: bool = False) -> Any:
    """Return the attention of one layer: grouped-query, MLA (sparse if the configuration says so)
    or, with `linear`, a gated delta net.
    """
    if linear:
        return _gated_delta_net(config, provider)
    if config.multi_latent_attention:
        return _mla(config, provider)
    return _self_attention(config, provider)


def _self_attention(config: Any, provider: Any) -> Any:
    queries, keys = _qk_norms(config, provider)
    # megatron-core's `add_bias_linear` is no substitute for `add_proj_bias`: it gives a bias to
    # every linear layer of the model.
    projection = provider.row_parallel_linear()
    return api.ModuleSpec(
        module=_chosen(provider.packed),
        params={"attn_mask_type": api.AttnMaskType[provider.parts.attn_mask]},
        submodules=SelfAttentionSubmodules(
            linear_qkv=provider.column_parallel_linear(),
            core_attention=provider.core_attention(),
            linear_proj=with_bias(projection) if provider.parts.add_proj_bias else projection,
            q_layernorm=queries,
            k_layernorm=keys,
        ),
    )


def _gated_delta_net(config: Any, provider: Any) -> Any:
    attention = provider.kernels["attention"]
    norm = provider.kernels["norm"]
    return api.ModuleSpec(
        module=chosen(GatedDeltaNet, "reference" if attention in ("reference", ON_CPU) else "auto"),
        submodules=GatedDeltaNetSubmodules(
            in_proj=provider.column_parallel_linear(),
            # Always ours: this norm keeps a plain scale where all others are zero-centered.
            out_norm=chosen(OutputNorm, "auto" if norm == "te" else norm),
            out_proj=provider.row_parallel_linear(),
        ),
    )


@functools.cache
def _chosen(packed: str | None) -> type:
    """Return a class of self-attention for specs, with `packed` implementing packed products."""
    names = {"__doc__": CachedSelfAttention.__doc__, "__module__": CachedSelfAttention.__module__}
    return type(
        CachedSelfAttention.__name__, (CachedSelfAttention,), {"packed_impl": packed, **names}
    )


def _mla(config: Any, provider: Any) -> Any:
    norm = _qk_norm(config, provider)
    # Published models may norm their latents with another epsilon; megatron-core passes the same
    # one to every norm.
    epsilon = getattr(config, "latent_layernorm_epsilon", None)
    if epsilon is not None and config.qk_layernorm:
        norm = with_epsilon(norm, epsilon)
    return api.ModuleSpec(
        module=MLASelfAttention,
        params={"attn_mask_type": api.AttnMaskType[provider.parts.attn_mask]},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=provider.column_parallel_linear(),
            linear_q_down_proj=provider.linear(),
            linear_q_up_proj=provider.column_parallel_linear(),
            linear_kv_down_proj=provider.linear(),
            linear_kv_up_proj=provider.column_parallel_linear(),
            core_attention=provider.core_attention(
                sparse=config.experimental_attention_variant == "dsa"
            ),
            linear_proj=provider.row_parallel_linear(),
            # Without a latent query there is nothing to norm, as in DeepSeek-V2-Lite.
            q_layernorm=IdentityOp if config.q_lora_rank is None else norm,
            kv_layernorm=norm,
        ),
    )


def _qk_norms(config: Any, provider: Any) -> tuple[type, type]:
    """Return the norms of queries and of keys; norms over all heads are always ours."""
    if provider.parts.qk_layernorm_across_heads:
        # TransformerEngine's norms know no reduction over tensor-parallel ranks.
        impl = "reference" if provider.kernels["norm"] == "te" else provider.kernels["norm"]
        return chosen(QueryNorm, impl), chosen(KeyNorm, impl)
    return (_qk_norm(config, provider),) * 2


def _qk_norm(config: Any, provider: Any) -> type:
    if config.qk_l2_norm:
        if config.multi_latent_attention:
            raise ValueError("qk_l2_norm is not defined for MLA")
        return L2Norm
    return provider.layer_norm(is_rms(config), for_qk=True) if config.qk_layernorm else IdentityOp


def is_rms(config: Any) -> bool:
    """Return whether norms divide by the root mean square."""
    return config.normalization == "RMSNorm"
