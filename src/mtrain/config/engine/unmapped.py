"""Fields of megatron-core that no key feeds, and why: derived from others, fixed, or
not offered.
"""

from __future__ import annotations

from typing import Literal, cast

from mtrain.config.engine.unmapped_later import LATER

Why = Literal["derived", "fixed", "not offered"]
TRANSFORMER = "TransformerConfig"
LATENT = "MLATransformerConfig"
GPT = "GPTModel"
DDP = "DistributedDataParallelConfig"
FSDP2 = "TorchFullyShardedDataParallelConfig"
OPTIMIZER = "OptimizerConfig"
SCHEDULER = "OptimizerParamScheduler"
DATA = "GPTDatasetConfig"
OWNERS = (TRANSFORMER, LATENT, GPT, DDP, FSDP2, OPTIMIZER, SCHEDULER, DATA)
"""Configurations whose every field is accounted for; a subclass only for what it adds."""

_TRANSFORMER: tuple[tuple[Why, str, str], ...] = (
    (
        "derived",
        "set when the model and the optimizer are there, from both",
        """finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func""",
    ),
    (
        "derived",
        "every split of layers becomes one list of stages, pipeline_model_parallel_layout",
        """num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
        mtp_standalone""",
    ),
    ("derived", "model.mla chooses the class, which says so", "multi_latent_attention"),
    (
        "fixed",
        (
            "initial weights are a function of trainer.seed and of a weight's name and place, in"
            " every layout"
        ),
        "perform_initialization use_cpu_initialization init_model_with_meta_device",
    ),
    (
        "fixed",
        (
            "off: fusions of megatron-core that need CUDA extensions, Apex or TransformerEngine;"
            " kernels.* chooses"
        ),
        """masked_softmax_fusion persist_layer_norm memory_efficient_layer_norm apply_rope_fusion
        fused_single_qkv_rope cross_entropy_loss_fusion cross_entropy_fusion_impl moe_permute_fusion
        moe_router_fusion
        use_fused_weighted_squared_relu use_te_activation_func attention_backend
        moe_use_legacy_grouped_gemm""",
    ),
    (
        "fixed",
        "the reference attention and TransformerEngine's compute softmax in fp32",
        "attention_softmax_in_fp32",
    ),
    (
        "fixed",
        "mixers of Mamba-2 are ours, and their scan takes the library where it is",
        "use_mamba_mem_eff_path",
    ),
    (
        "fixed",
        "every micro-batch has the same number of tokens, packed or not",
        "variable_seq_lengths",
    ),
    (
        "fixed",
        (
            "at the default, which is the only value that nothing deprecated or unfinished stands"
            " behind"
        ),
        """moe_extended_tp async_tensor_model_parallel_allreduce enable_cuda_graph
        external_cuda_graph fp8_interval
        tp_comm_split_ag tp_comm_split_rs tp_comm_atomic_ag tp_comm_atomic_rs moe_layer_recompute
        moe_token_dropping
        moe_router_topk_limited_devices moe_router_padding_for_fp8 moe_enable_deepep test_mode
        disable_parameter_transpose_cache clone_scatter_output_in_embedding batch_p2p_sync
        _cpu_offloading_context""",
    ),
    (
        "fixed",
        "no timers of megatron-core run: the run folder has the time of every phase of every step",
        "timers barrier_with_L1_time moe_per_layer_logging config_logger_dir",
    ),
    (
        "not offered",
        "megatron-core declares it and no layer reads it, or only its embedding does",
        "apply_residual_connection_post_layernorm fp32_residual_connection",
    ),
    (
        "not offered",
        (
            "the residual stream and its products are in the format of the model; autocast would"
            " change both"
        ),
        (
            "enable_autocast autocast_dtype disable_bf16_reduced_precision_matmul"
            " apply_query_key_layer_scaling"
        ),
    ),
    (
        "not offered",
        "weights are drawn, sharded, compared and saved as plain tensors, not as quantized ones",
        "fp8_param fp4_param activation_func_fp8_input_store",
    ),
    (
        "not offered",
        "a dotted path or an object of Python: configurations run no code",
        (
            "fp8_quantizer_factory fp4_quantizer_factory quant_recipe use_kitchen"
            " use_kitchen_attention kitchen_attention_backend"
        ),
    ),
    (
        "not offered",
        "overlaps that need user buffers, extra streams or Apex on GPUs, which nothing sets up yet",
        """tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag
        tp_comm_overlap_rs
        tp_comm_overlap_rs_dgrad tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1
        tp_comm_bootstrap_backend
        overlap_moe_expert_parallel_comm delay_wgrad_compute ep_overlap_early_attn_memory_release
        defer_embedding_wgrad_compute wgrad_deferral_limit use_ring_exchange_p2p symmetric_ar_type
        pipeline_model_parallel_comm_backend moe_deepep_num_sms moe_hybridep_num_sms""",
    ),
    (
        "not offered",
        "pools of CUDA graphs are megatron-core's, and backwards are captured as they run",
        "cuda_graph_use_single_mempool cuda_graph_retain_backward_graph",
    ),
    (
        "derived",
        "TransformerEngine tracks random numbers where its layers or its graphs are captured",
        "use_te_rng_tracker",
    ),
    (
        "not offered",
        "whole layers in host memory; parallel.activation_offload names modules",
        """cpu_offloading cpu_offloading_num_layers cpu_offloading_activations
        cpu_offloading_weights
        cpu_offloading_double_buffering
        num_microbatches_with_partial_activation_checkpoints""",
    ),
    (
        "not offered",
        "largest attention logits are returned by TransformerEngine's attention alone",
        "qk_clip qk_clip_alpha qk_clip_threshold log_max_attention_logit",
    ),
    (
        "not offered",
        "families that are not there yet: images, latent experts",
        "mrope_section moe_latent_size heterogeneous_block_specs hetereogenous_dist_checkpoint",
    ),
    (
        "not offered",
        "for inference and reinforcement learning; text is generated by the training model itself",
        """flash_decode batch_invariant_mode inference_rng_tracker inference_sampling_seed
        use_inference_optimized_layers inference_fuse_tp_communication mlp_chunks_for_prefill
        moe_enable_routing_replay""",
    ),
)

_OTHERS: tuple[tuple[str, Why, str, str], ...] = (
    (LATENT, "not offered", "for inference", "cache_mla_latents"),
    (
        GPT,
        "derived",
        (
            "the configuration, the layers with the chosen kernels, and which stage of the pipeline"
            " this is"
        ),
        "config transformer_layer_spec mtp_block_spec pre_process post_process vp_stage",
    ),
    (
        GPT,
        "fixed",
        "megatron-core's groups are checked against the grid and used as they are",
        "pg_collection",
    ),
    (
        GPT,
        "fixed",
        "logits stay sharded over the tp ranks until the loss, which is in fp32",
        "parallel_output",
    ),
    (GPT, "not offered", "the loss is in fp32", "fp16_lm_cross_entropy"),
    (
        GPT,
        "fixed",
        "embeddings are sharded along the sequence where sequence parallelism is",
        "scatter_embedding_sequence_parallel",
    ),
    (
        DDP,
        "fixed",
        (
            "gradients are sums over tokens, divided once by the tokens of the global batch: a mean"
            " per rank is wrong"
        ),
        "average_in_collective",
    ),
    (
        DDP,
        "fixed",
        "a large gradient is found by the norm, on every rank and in every format",
        "check_for_large_grads",
    ),
    (
        DDP,
        "derived",
        "the elements of the model's largest layer",
        "suggested_communication_unit_size",
    ),
    (
        DDP,
        "fixed",
        "the stages of a pipeline gather their weights as each needs them",
        "align_param_gather",
    ),
    (
        DDP,
        "not offered",
        "weights are gathered in the format of the model; see TransformerConfig.fp8_param",
        "fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag keep_fp8_transpose_cache",
    ),
    (
        DDP,
        "not offered",
        "registered buffers of NCCL on GPUs, which nothing sets up yet",
        (
            "nccl_ub fsdp_double_buffer disable_symmetric_registration fsdp_manual_registration"
            " delay_wgrad_compute"
        ),
    ),
    (DDP, "fixed", "deprecated, or another spelling of use_megatron_fsdp", "use_custom_fsdp"),
    (
        DDP,
        "fixed",
        "replicas of parallel.hsdp_replicas hold whole copies",
        "outer_dp_sharding_strategy",
    ),
    (FSDP2, "fixed", "weights are freed after the forward, as in ZeRO-3", "reshard_after_forward"),
    (
        OPTIMIZER,
        "not offered",
        "input and output layers learn at the rate of all others",
        "decoupled_lr decoupled_min_lr",
    ),
    (
        OPTIMIZER,
        "fixed",
        "weight decay leaves out norms and biases, as everywhere",
        "apply_wd_to_qk_layernorm",
    ),
    (
        OPTIMIZER,
        "not offered",
        "weights are not kept in 8 bits, so the optimizer has nothing to know of it",
        "fp8_recipe reuse_grad_buf_for_mxfp8_param_ag",
    ),
    (OPTIMIZER, "fixed", "the loss scale of fp16 is dynamic", "loss_scale"),
    (OPTIMIZER, "fixed", "AdamW: the decay is apart from the gradient", "decoupled_weight_decay"),
    (OPTIMIZER, "fixed", "the default precision of the orthogonalisation", "muon_fp32_matmul_prec"),
    (
        OPTIMIZER,
        "not offered",
        "changes speed alone, and only on GPUs",
        """overlap_param_gather_with_optimizer_step use_torch_optimizer_for_cpu_offload
        overlap_cpu_optimizer_d2h_h2d
        pin_cpu_grads pin_cpu_params""",
    ),
    (
        OPTIMIZER,
        "fixed",
        "no timers and dumps of megatron-core: the run folder has them",
        "log_num_zeros_in_grad barrier_with_L1_time timers config_logger_dir",
    ),
    (SCHEDULER, "derived", "the optimizer of this rank", "optimizer"),
    (
        SCHEDULER,
        "fixed",
        (
            "a resumed run takes its schedule from its own configuration, which is validated"
            " against the checkpoint's"
        ),
        "use_checkpoint_opt_param_scheduler override_opt_param_scheduler",
    ),
    (
        DATA,
        "derived",
        (
            "mtrain reads .bin and .idx itself, without an index: trainer.seed, data.seq_length,"
            " data.split, data.path, data.blend, data.eod_mask_loss, data.packed and parallel.* say"
            " the same"
        ),
        """random_seed sequence_length split split_matrix blend mock tokenizer eod_mask_loss
        reset_position_ids
        reset_attention_mask create_attention_mask data_parallel_size sequence_parallel_size
        hybrid_context_parallel
        context_parallel_size token_dtype_code""",
    ),
    (
        DATA,
        "fixed",
        (
            "samples are computed from their number: no cache, no builder, no surplus, no partial"
            " sample"
        ),
        """num_dataset_builder_threads path_to_cache mmap_bin_files mid_level_dataset_surplus
        fast_cache_load
        defer_npy_index_mmap drop_last_partial_validation_sequence add_extra_token_to_sequence
        sequences_per_dataset""",
    ),
    (
        DATA,
        "not offered",
        "one corpus for all splits, on a file system",
        """blend_per_split multiple_validation_sets full_validation object_storage_cache_path
        allow_ambiguous_pad_tokens""",
    ),
)

FIXED_IN_TABLES = {
    "TransformerConfig.calculate_per_token_loss": (
        "the loss is a mean over the tokens of the global batch"
    ),
    "TransformerConfig.experimental_attention_variant": "gated delta nets, or MLA with an indexer",
    "TransformerConfig.is_hybrid_model": "it is so in the family hybrid",
    "TransformerConfig.moe_router_dtype": "routers compute in fp32",
    "TransformerConfig.moe_grouped_gemm": "experts in one grouped call",
    "DistributedDataParallelConfig.check_for_nan_in_grad": (
        "a NaN is found by the trainer, which can say which step"
    ),
    "DistributedDataParallelConfig.gradient_reduce_div_fusion": (
        "a division fused into the sum is NCCL's alone"
    ),
    "OptimizerParamScheduler.init_lr": "a warmup starts at 0",
    "OptimizerParamScheduler.wd_incr_style": "the weight decay is constant",
}
"""Fields that the tables set whatever the keys say, and why."""

_LATER = tuple((owner, cast(Why, why), text, names) for owner, why, text, names in LATER)
UNMAPPED: dict[str, tuple[Why, str]] = {
    f"{owner}.{name}": (why, text)
    for owner, why, text, names in (
        *((TRANSFORMER, *group) for group in _TRANSFORMER),
        *_OTHERS,
        *_LATER,
    )
    for name in names.split()
}
"""`Owner.field` -> why no key feeds it, and a sentence."""
