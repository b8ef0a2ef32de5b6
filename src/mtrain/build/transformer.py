"""RunConfig -> megatron-core's TransformerConfig, by one table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from mtrain.build.weights import Normal
from mtrain.config.run import RunConfig
from mtrain.config.stages import stages, uneven
from mtrain.devices.base import Device
from mtrain.mcore import api as mcore

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)^2, elementwise (So et al. 2021, Primer)."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "gelu": F.gelu,
    "squared_relu": squared_relu,
}


def _list(values: Sequence[Any] | None) -> list[Any] | None:
    return None if values is None else list(values)


def _unless_none(word: str) -> str | None:
    return None if word == "none" else word


# megatron-core's field -> where its value comes from
FIELDS: dict[str, Callable[[RunConfig], Any]] = {
    "num_layers": lambda r: r.model.num_layers,
    "hidden_size": lambda r: r.model.hidden_size,
    "ffn_hidden_size": lambda r: r.model.ffn_hidden_size,
    "num_attention_heads": lambda r: r.model.num_attention_heads,
    "num_query_groups": lambda r: r.model.query_groups,
    "kv_channels": lambda r: r.model.head_dim,
    "normalization": lambda r: r.model.normalization,
    "layernorm_epsilon": lambda r: r.model.layernorm_epsilon,
    "gated_linear_unit": lambda r: r.model.gated,
    "activation_func": lambda r: ACTIVATIONS[r.model.activation],
    "add_bias_linear": lambda r: r.model.add_bias_linear,
    "add_qkv_bias": lambda r: r.model.add_qkv_bias,
    "qk_layernorm": lambda r: r.model.qk_layernorm,
    "attention_dropout": lambda r: r.model.attention_dropout,
    "hidden_dropout": lambda r: r.model.hidden_dropout,
    "init_method_std": lambda r: r.model.init_method_std,
    "init_method": lambda r: Normal(r.model.init_method_std),
    "output_layer_init_method": lambda r: Normal(r.model.init_method_std / math.sqrt(2 * r.model.num_layers)),
    "tensor_model_parallel_size": lambda r: r.parallel.tp,
    "pipeline_model_parallel_size": lambda r: r.parallel.pp,
    "virtual_pipeline_model_parallel_size": lambda r: r.parallel.vpp if r.parallel.vpp > 1 else None,
    "context_parallel_size": lambda r: r.parallel.cp,
    "expert_model_parallel_size": lambda r: r.parallel.ep,
    "expert_tensor_parallel_size": lambda r: r.parallel.etp or r.parallel.tp,
    "sequence_parallel": lambda r: r.parallel.sequence_parallel,
    "cp_comm_type": lambda r: r.parallel.cp_comm_type,
    "hierarchical_context_parallel_sizes": lambda r: _list(r.parallel.hierarchical_cp_sizes),
    "hybrid_context_parallel": lambda r: r.parallel.hybrid_context_parallel,
    "max_seqlen_per_dp_cp_rank": lambda r: r.parallel.max_seqlen_per_dp_cp_rank,
    "pipeline_model_parallel_layout": lambda r: [s.words() for s in stages(r)] if uneven(r) else None,
    "recompute_granularity": lambda r: _unless_none(r.parallel.recompute.granularity),
    "recompute_modules": lambda r: _list(r.parallel.recompute.modules),
    "recompute_method": lambda r: r.parallel.recompute.method,
    "recompute_num_layers": lambda r: r.parallel.recompute.num_layers,
    "rotary_interleaved": lambda r: r.model.rotary_interleaved,
    # A window of n keys, the token's own included, reaches n - 1 to the left.
    "window_size": lambda r: (r.model.window_size - 1, 0) if r.model.window_size else None,
    "window_attn_skip_freq": lambda r: r.model.window_attn_skip_freq,
    "softmax_type": lambda r: r.model.softmax_type,
    "mtp_num_layers": lambda r: r.model.mtp_num_layers,
    "mtp_loss_scaling_factor": lambda r: r.model.mtp_loss_scaling_factor,
    "gradient_accumulation_fusion": lambda r: r.kernels.gradient_accumulation_fusion,
    "params_dtype": lambda r: DTYPES[r.precision.dtype],
    "pipeline_dtype": lambda r: DTYPES[r.precision.dtype],
    "bf16": lambda r: r.precision.dtype == "bf16",
    "fp16": lambda r: r.precision.dtype == "fp16",
    # Interleaving between two stages is silently wrong with batched p2p: both neighbours are the same rank.
    "overlap_p2p_comm": lambda r: r.parallel.vpp > 1,
    "batch_p2p_comm": lambda r: r.parallel.vpp == 1,
    # The loss is a mean over the tokens of the global batch, so that no layout weighs a sample differently.
    "calculate_per_token_loss": lambda r: True,
    "cuda_graph_scope": lambda r: [],
    "transformer_impl": lambda r: "transformer_engine" if r.kernels.linear == "te" else "local",
}

MOE_FIELDS: dict[str, Callable[[RunConfig, Any], Any]] = {
    "num_moe_experts": lambda r, m: m.num_experts,
    "moe_router_topk": lambda r, m: m.router_topk,
    "moe_ffn_hidden_size": lambda r, m: m.ffn_hidden_size,
    "moe_shared_expert_intermediate_size": lambda r, m: m.shared_expert_intermediate_size,
    "moe_layer_freq": lambda r, m: [int(i >= m.first_dense_layers) for i in range(r.model.num_layers)],
    "moe_router_score_function": lambda r, m: m.router_score_function,
    "moe_router_pre_softmax": lambda r, m: m.router_pre_softmax,
    "moe_router_load_balancing_type": lambda r, m: m.router_load_balancing_type,
    "moe_aux_loss_coeff": lambda r, m: 0.0 if m.router_load_balancing_type == "none" else m.aux_loss_coeff,
    "moe_z_loss_coeff": lambda r, m: m.z_loss_coeff,
    "moe_router_enable_expert_bias": lambda r, m: m.router_enable_expert_bias,
    "moe_router_num_groups": lambda r, m: m.router_num_groups,
    "moe_router_group_topk": lambda r, m: m.router_group_topk,
    "moe_router_topk_scaling_factor": lambda r, m: m.router_topk_scaling_factor,
    "moe_router_bias_update_rate": lambda r, m: m.router_bias_update_rate or 0.0,
    "moe_token_dispatcher_type": lambda r, m: m.token_dispatcher_type,
    "moe_expert_capacity_factor": lambda r, m: m.expert_capacity_factor,
    "moe_pad_expert_input_to_capacity": lambda r, m: m.pad_expert_input_to_capacity,
    "moe_token_drop_policy": lambda r, m: m.token_drop_policy or "probs",
    "moe_shared_expert_overlap": lambda r, m: m.shared_expert_overlap,
    "moe_router_dtype": lambda r, m: "fp32",
    "moe_grouped_gemm": lambda r, m: True,
}

MLA_FIELDS: dict[str, Callable[[Any], Any]] = {
    "multi_latent_attention": lambda m: True,
    "q_lora_rank": lambda m: m.q_lora_rank,
    "kv_lora_rank": lambda m: m.kv_lora_rank,
    "qk_head_dim": lambda m: m.qk_head_dim,
    "qk_pos_emb_head_dim": lambda m: m.qk_pos_emb_head_dim,
    "v_head_dim": lambda m: m.v_head_dim,
    "rope_type": lambda m: m.rope_type,
}

YARN_FIELDS: dict[str, Callable[[Any], Any]] = {
    "rotary_scaling_factor": lambda m: m.rotary_scaling_factor,
    "original_max_position_embeddings": lambda m: m.original_max_position_embeddings,
    "mscale": lambda m: m.mscale,
    "mscale_all_dim": lambda m: m.mscale_all_dim,
}

# Fusions that are CUDA kernels, or that torch.compile would have to make first.
FUSIONS = (
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "masked_softmax_fusion",
    "apply_rope_fusion",
    "persist_layer_norm",
    "moe_permute_fusion",
    "cross_entropy_loss_fusion",
)


def _activation_can_fuse(run: RunConfig) -> bool:
    """What megatron-core's fused activations cover: swiglu, and gelu with its bias."""
    return run.model.activation == "swiglu" or (run.model.activation == "gelu" and run.model.add_bias_linear)


def transformer_config(run: RunConfig, device: Device) -> Any:
    """The TransformerConfig (MLATransformerConfig for MLA) of a resolved configuration.

    Fusions of megatron-core need TransformerEngine; without it every one is off.
    """
    values = {name: get(run) for name, get in FIELDS.items()}
    if run.model.moe is not None:
        values |= {name: get(run, run.model.moe) for name, get in MOE_FIELDS.items()}
    fused = run.kernels.linear == "te"
    values |= dict.fromkeys(FUSIONS, False)
    values["bias_dropout_fusion"] = fused
    values["bias_activation_fusion"] = fused and _activation_can_fuse(run)
    values["use_cpu_initialization"] = False
    values["perform_initialization"] = True
    if run.model.mla is None:
        return mcore.TransformerConfig(**values)
    values |= {name: get(run.model.mla) for name, get in MLA_FIELDS.items()}
    if run.model.mla.rope_type == "yarn":
        values |= {name: get(run.model.mla) for name, get in YARN_FIELDS.items()}
    values |= {
        "rotary_base": run.model.rotary_base,
        "rotary_percent": run.model.rotary_percent,
    }
    del values["num_query_groups"]
    return mcore.MLATransformerConfig(**values)
