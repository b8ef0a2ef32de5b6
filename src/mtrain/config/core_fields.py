"""Which field of megatron-core each key feeds: the tables that `build` fills its configurations from.

Values are plain: a dtype, an activation and an initialiser are named here and made in `build`. So nothing of torch is
needed to say what a key reaches: `feeds` watches the tables read a configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mtrain.config.base import Section
from mtrain.config.optimizers import OPTIMIZERS
from mtrain.config.run import RunConfig
from mtrain.config.stages import stages, uneven

Table = Mapping[str, Callable[[RunConfig], Any]]


def _list(values: Sequence[Any] | None) -> list[Any] | None:
    return None if values is None else list(values)


def _unless_none(word: str) -> str | None:
    return None if word == "none" else word


def _fuses_activation(run: RunConfig) -> bool:
    """Whether megatron-core fuses the activation of the model: plain swiglu, and dense gelu_tanh with its bias."""
    m = run.model
    plain = m.glu_linear_offset == 0 and m.activation_func_clamp_value is None
    fused = m.activation == "swiglu" or (m.activation == "gelu_tanh" and m.add_bias_linear and m.moe is None)
    return run.kernels.linear == "te" and plain and fused and run.kernels.activation != "triton"


def _activation(run: RunConfig) -> str:
    """The function's name; megatron-core asks for its fused gelu, which is the tanh form, by the exact one."""
    fused_gelu = run.model.activation == "gelu_tanh" and _fuses_activation(run)
    return "gelu" if fused_gelu else run.model.activation


def _some_layers_in_bf16(run: RunConfig) -> bool:
    return run.precision.num_layers_at_start_in_bf16 + run.precision.num_layers_at_end_in_bf16 > 0


FIELDS: dict[str, Callable[[RunConfig], Any]] = {
    "num_layers": lambda r: r.model.num_layers,
    "hidden_size": lambda r: r.model.hidden_size,
    "ffn_hidden_size": lambda r: r.model.ffn_hidden_size,
    "num_attention_heads": lambda r: r.model.num_attention_heads,
    "num_query_groups": lambda r: r.model.query_groups,
    "kv_channels": lambda r: r.model.head_dim,
    "normalization": lambda r: r.model.normalization,
    "layernorm_epsilon": lambda r: r.model.layernorm_epsilon,
    "layernorm_zero_centered_gamma": lambda r: r.model.layernorm_zero_centered_gamma,
    "gated_linear_unit": lambda r: r.model.gated,
    "glu_linear_offset": lambda r: r.model.glu_linear_offset,
    "activation_func_clamp_value": lambda r: r.model.activation_func_clamp_value,
    "activation_func": _activation,
    "add_bias_linear": lambda r: r.model.add_bias_linear,
    "add_qkv_bias": lambda r: r.model.add_qkv_bias,
    "qk_layernorm": lambda r: r.model.qk_layernorm,
    "qk_l2_norm": lambda r: r.model.qk_l2_norm,
    "softmax_scale": lambda r: r.model.softmax_scale,
    "no_rope_freq": lambda r: r.model.no_rope_freq,
    "attention_dropout": lambda r: r.model.attention_dropout,
    "hidden_dropout": lambda r: r.model.hidden_dropout,
    "init_method_std": lambda r: r.model.init_method_std,
    "init_method": lambda r: r.model.init_method_std,
    "embedding_init_method_std": lambda r: r.model.embedding_init_method_std or r.model.init_method_std,
    "embedding_init_method": lambda r: r.model.embedding_init_method_std or r.model.init_method_std,
    "output_layer_init_method": lambda r: r.model.init_method_std / math.sqrt(2 * r.model.num_layers),
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
    "distribute_saved_activations": lambda r: r.parallel.recompute.distribute_saved_activations,
    "microbatch_group_size_per_vp_stage": lambda r: r.parallel.microbatch_group_size_per_vp_stage,
    "overlap_p2p_comm_warmup_flush": lambda r: r.parallel.overlap_p2p_comm_warmup_flush,
    "rotary_interleaved": lambda r: r.model.rotary_interleaved,
    # A window of n keys, the token's own included, reaches n - 1 to the left.
    "window_size": lambda r: (r.model.window_size - 1, 0) if r.model.window_size else None,
    "window_attn_skip_freq": lambda r: r.model.window_attn_skip_freq,
    "softmax_type": lambda r: r.model.softmax_type,
    "mtp_num_layers": lambda r: r.model.mtp_num_layers,
    "mtp_loss_scaling_factor": lambda r: r.model.mtp_loss_scaling_factor,
    "gradient_accumulation_fusion": lambda r: r.kernels.gradient_accumulation_fusion,
    "params_dtype": lambda r: r.precision.format,
    "pipeline_dtype": lambda r: r.precision.format,
    "bf16": lambda r: r.precision.format == "bf16",
    "fp16": lambda r: r.precision.format == "fp16",
    "fp8": lambda r: r.precision.fp8,
    "fp8_recipe": lambda r: r.precision.fp8_recipe or "delayed",
    "fp8_margin": lambda r: r.precision.fp8_margin or 0,
    "fp8_amax_history_len": lambda r: r.precision.fp8_amax_history_len or 1,
    "fp8_amax_compute_algo": lambda r: r.precision.fp8_amax_compute_algo or "most_recent",
    "fp8_wgrad": lambda r: r.precision.fp8_wgrad,
    "fp8_dot_product_attention": lambda r: r.precision.fp8_dot_product_attention,
    "fp8_multi_head_attention": lambda r: r.precision.fp8_multi_head_attention,
    "tp_only_amax_red": lambda r: r.precision.tp_only_amax_red,
    "fp4": lambda r: r.precision.fp4,
    "fp4_recipe": lambda r: r.precision.fp4_recipe or "nvfp4",
    "first_last_layers_bf16": _some_layers_in_bf16,
    "num_layers_at_start_in_bf16": lambda r: r.precision.num_layers_at_start_in_bf16,
    "num_layers_at_end_in_bf16": lambda r: r.precision.num_layers_at_end_in_bf16,
    # Interleaving between two stages is silently wrong with batched p2p: both neighbours are the same rank.
    "overlap_p2p_comm": lambda r: r.parallel.vpp > 1,
    "batch_p2p_comm": lambda r: r.parallel.vpp == 1,
    # What was sent on is needed no more but for its shape; where sends overlap, gloo may still be reading it.
    # what megatron-core's FSDP hands on is a view, whose memory is not its own to free
    "deallocate_pipeline_outputs": lambda r: (
        r.parallel.pp > 1 and r.parallel.vpp == 1 and r.parallel.fsdp != "megatron"
    ),
    "deterministic_mode": lambda r: r.trainer.deterministic,
    # The loss is a mean over the tokens of the global batch, so that no layout weighs a sample differently.
    "calculate_per_token_loss": lambda r: True,
    "cuda_graph_scope": lambda r: [],
    "transformer_impl": lambda r: "transformer_engine" if r.kernels.linear == "te" else "local",
    # Fusions of megatron-core need TransformerEngine; without it every one is off.
    # Its grouped experts refuse this one where layers have biases.
    "bias_dropout_fusion": lambda r: (
        r.kernels.linear == "te" and not (r.model.add_bias_linear and r.model.moe is not None)
    ),
    "bias_activation_fusion": _fuses_activation,
}
"""Of every TransformerConfig."""

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
    "moe_router_padding_for_quantization": lambda r, m: m.router_padding_for_quantization,
    "moe_router_force_load_balancing": lambda r, m: m.router_force_load_balancing,
    "moe_input_jitter_eps": lambda r, m: m.input_jitter_eps,
    "moe_apply_probs_on_input": lambda r, m: m.apply_probs_on_input,
    "moe_shared_expert_gate": lambda r, m: m.shared_expert_gate,
    "moe_token_dispatcher_type": lambda r, m: m.token_dispatcher_type,
    "moe_flex_dispatcher_backend": lambda r, m: m.flex_dispatcher_backend or "deepep",
    "moe_expert_capacity_factor": lambda r, m: m.expert_capacity_factor,
    "moe_pad_expert_input_to_capacity": lambda r, m: m.pad_expert_input_to_capacity,
    "moe_token_drop_policy": lambda r, m: m.token_drop_policy or "probs",
    "moe_shared_expert_overlap": lambda r, m: m.shared_expert_overlap,
    "moe_router_dtype": lambda r, m: "fp32",
    "moe_grouped_gemm": lambda r, m: True,
}
"""And where there are experts: of the run and its `model.moe`."""

MLA_FIELDS: dict[str, Callable[[RunConfig, Any], Any]] = {
    "multi_latent_attention": lambda r, m: True,
    "q_lora_rank": lambda r, m: m.q_lora_rank,
    "kv_lora_rank": lambda r, m: m.kv_lora_rank,
    "qk_head_dim": lambda r, m: m.qk_head_dim,
    "qk_pos_emb_head_dim": lambda r, m: m.qk_pos_emb_head_dim,
    "v_head_dim": lambda r, m: m.v_head_dim,
    "rope_type": lambda r, m: m.rope_type,
    "rotary_base": lambda r, m: r.model.rotary_base,
    "rotary_percent": lambda r, m: r.model.rotary_percent,
}
"""And with MLA, whose class is MLATransformerConfig: of the run and its `model.mla`."""

YARN_FIELDS: dict[str, Callable[[RunConfig, Any], Any]] = {
    "rotary_scaling_factor": lambda r, m: m.rotary_scaling_factor,
    "original_max_position_embeddings": lambda r, m: m.original_max_position_embeddings,
    "mscale": lambda r, m: m.mscale,
    "mscale_all_dim": lambda r, m: m.mscale_all_dim,
    "beta_fast": lambda r, m: m.beta_fast,
    "beta_slow": lambda r, m: m.beta_slow,
}
"""And where its rotary positions are stretched."""

GPT_FIELDS: dict[str, Callable[[RunConfig], Any]] = {
    "vocab_size": lambda r: r.model.padded_vocab_size,
    "max_sequence_length": lambda r: r.model.max_position_embeddings,
    "share_embeddings_and_output_weights": lambda r: r.model.tie_word_embeddings,
    "position_embedding_type": lambda r: r.model.position_embedding_type,
    "rotary_base": lambda r: r.model.rotary_base,
    "rotary_percent": lambda r: r.model.rotary_percent,
    "rope_scaling": lambda r: r.model.rope_scaling_factor is not None,
    "rope_scaling_factor": lambda r: r.model.rope_scaling_factor or 8.0,
    "seq_len_interpolation_factor": lambda r: r.model.rotary_seq_len_interpolation_factor,
}
"""Of GPTModel."""

WRAP_FIELDS: dict[str, Callable[[RunConfig], Any]] = {
    "grad_reduce_in_fp32": lambda r: r.precision.grad_reduce_in_fp32,
    "num_distributed_optimizer_instances": lambda r: r.parallel.hsdp_replicas,
    # A NaN is found by the trainer, which can say which step; this check would only kill one rank.
    "check_for_nan_in_grad": lambda r: False,
}
"""Of whatever wraps the model for data parallelism; alone of TorchFullyShardedDataParallelConfig."""

DDP_FIELDS: dict[str, Callable[[RunConfig], Any]] = {
    **WRAP_FIELDS,
    "overlap_grad_reduce": lambda r: r.parallel.overlap_grad_reduce,
    "overlap_param_gather": lambda r: r.parallel.overlap_param_gather,
    "use_distributed_optimizer": lambda r: r.parallel.distributed_optimizer,
    "bucket_size": lambda r: r.parallel.ddp_bucket_size,
    "pad_buckets_for_high_nccl_busbw": lambda r: r.parallel.ddp_pad_buckets_for_high_nccl_busbw,
    "reduce_scatter_with_fp32_accumulation": lambda r: r.parallel.ddp_reduce_scatter_with_fp32_accumulation,
}
"""Of DistributedDataParallelConfig."""

FSDP_FIELDS: dict[str, Callable[[RunConfig], Any]] = {
    **WRAP_FIELDS,
    "use_megatron_fsdp": lambda r: r.parallel.fsdp == "megatron",
    "use_distributed_optimizer": lambda r: True,
    "data_parallel_sharding_strategy": lambda r: r.parallel.fsdp_sharding,
    # fp32 weights need no second copy as main weights
    "preserve_fp32_weights": lambda r: r.precision.format != "fp32",
    # a division fused into the sum is NCCL's alone
    "gradient_reduce_div_fusion": lambda r: False,
}
"""Of DistributedDataParallelConfig where megatron-core's FSDP spreads the weights."""

OPTIMIZER_FIELDS: dict[str, Callable[[RunConfig], Any]] = {
    "optimizer": lambda r: OPTIMIZERS[r.optim.name].core_name,
    "lr": lambda r: r.optim.lr,
    "min_lr": lambda r: r.optim.min_lr or 0.0,
    "weight_decay": lambda r: r.optim.weight_decay,
    "adam_beta1": lambda r: r.optim.beta1,
    "adam_beta2": lambda r: r.optim.beta2,
    "adam_eps": lambda r: r.optim.eps,
    "sgd_momentum": lambda r: r.optim.momentum,
    # Without clipping the norm is still wanted for the log: no norm exceeds infinity.
    "clip_grad": lambda r: r.optim.clip_grad if r.optim.clip_grad is not None else float("inf"),
    "bf16": lambda r: r.precision.format == "bf16",
    "fp16": lambda r: r.precision.format == "fp16",
    "params_dtype": lambda r: r.precision.format,
    "initial_loss_scale": lambda r: r.precision.initial_loss_scale,
    "min_loss_scale": lambda r: r.precision.min_loss_scale,
    "loss_scale_window": lambda r: r.precision.loss_scale_window,
    "use_distributed_optimizer": lambda r: r.parallel.distributed_optimizer or r.parallel.fsdp == "megatron",
    "overlap_param_gather": lambda r: r.parallel.overlap_param_gather,
    "optimizer_cpu_offload": lambda r: r.optim.cpu_offload > 0,
    "optimizer_offload_fraction": lambda r: r.optim.cpu_offload,
    "use_precision_aware_optimizer": lambda r: r.optim.holds_main_weights,
    "store_param_remainders": lambda r: r.optim.store_param_remainders,
    "main_params_dtype": lambda r: r.optim.main_params_dtype,
    "exp_avg_dtype": lambda r: r.optim.exp_avg_dtype,
    "exp_avg_sq_dtype": lambda r: r.optim.exp_avg_sq_dtype,
    # An optimizer that holds the main weights reads gradients as they were reduced, any other an fp32 copy of them.
    "main_grads_dtype": lambda r: (
        "fp32" if r.precision.grad_reduce_in_fp32 or not r.optim.holds_main_weights else r.precision.format
    ),
}
"""Of OptimizerConfig; dtypes are words."""

SCHEDULES = {
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "inverse_sqrt": "inverse-square-root",
    "wsd": "WSD",
}
"""Schedule -> megatron-core's word for it."""


def _decay(run: RunConfig) -> int:
    return run.optim.decay_iters or run.trainer.train_iters


SCHEDULE_FIELDS: dict[str, Callable[[RunConfig], Any]] = {
    "init_lr": lambda r: 0.0,
    "max_lr": lambda r: r.optim.lr,
    "min_lr": lambda r: r.optim.min_lr or 0.0,
    "lr_warmup_steps": lambda r: r.optim.warmup_iters or 0,
    "lr_decay_steps": _decay,
    "lr_decay_style": lambda r: SCHEDULES[r.optim.schedule],
    "start_wd": lambda r: r.optim.weight_decay,
    "end_wd": lambda r: r.optim.weight_decay,
    "wd_incr_steps": _decay,
    "wd_incr_style": lambda r: "constant",
    "wsd_decay_steps": lambda r: r.optim.wsd_decay_iters,
    "lr_wsd_decay_style": lambda r: r.optim.wsd_decay_style,
}
"""Of OptimizerParamScheduler, in steps."""


def values(table: Table, run: RunConfig) -> dict[str, Any]:
    """What a table makes of a resolved configuration."""
    return {name: get(run) for name, get in table.items()}


def transformer_values(run: RunConfig) -> dict[str, Any]:
    """Every field of the TransformerConfig of a resolved configuration, or of its MLATransformerConfig."""
    out = values(FIELDS, run)
    moe, mla = run.model.moe, run.model.mla
    if moe is not None:
        out |= {name: get(run, moe) for name, get in MOE_FIELDS.items()}
    if mla is not None:
        tables = (MLA_FIELDS, YARN_FIELDS) if mla.rope_type == "yarn" else (MLA_FIELDS,)
        out |= {name: get(run, mla) for table in tables for name, get in table.items()}
        del out["num_query_groups"]
    return out


class _Watched:
    """A section of a configuration that notes which of its keys are read."""

    def __init__(self, section: Section, prefix: str, seen: set[str]) -> None:
        self._section, self._prefix, self._seen = section, prefix, seen

    def __getattr__(self, name: str) -> Any:
        kind = type(self._section)
        if name not in kind.model_fields:
            return getattr(kind, name).fget(self)
        value = getattr(self._section, name)
        if isinstance(value, Section):
            return _Watched(value, f"{self._prefix}{name}.", self._seen)
        self._seen.add(f"{self._prefix}{name}")
        return value


def feeds(run: RunConfig) -> dict[str, list[str]]:
    """Key -> the fields of megatron-core whose value it has a part in, as `TransformerConfig.hidden_size`.

    Fields of experts and of MLA are there only where the model has them.
    """
    out: dict[str, list[str]] = {}

    def watch(owner: str, name: str, get: Callable[[Any], Any]) -> None:
        seen: set[str] = set()
        get(_Watched(run, "", seen))
        for key in sorted(seen):
            fields = out.setdefault(key, [])
            fields += [f"{owner}.{name}"] if f"{owner}.{name}" not in fields else []

    config = "TransformerConfig" if run.model.mla is None else "MLATransformerConfig"
    for owner, table in (
        (config, FIELDS),
        ("GPTModel", GPT_FIELDS),
        ("DistributedDataParallelConfig", DDP_FIELDS),
        ("DistributedDataParallelConfig", FSDP_FIELDS),
        ("OptimizerConfig", OPTIMIZER_FIELDS),
        *(("OptimizerConfig", optimizer.fields) for optimizer in OPTIMIZERS.values()),
        ("OptimizerParamScheduler", SCHEDULE_FIELDS),
    ):
        for name, get in table.items():
            watch(owner, name, get)
    for part, tables in (("moe", (MOE_FIELDS,)), ("mla", (MLA_FIELDS, YARN_FIELDS))):
        for inner in tables if getattr(run.model, part) is not None else ():
            for name, pair in inner.items():
                watch(config, name, lambda r, pair=pair, part=part: pair(r, getattr(r.model, part)))  # type: ignore[misc]
    return out
