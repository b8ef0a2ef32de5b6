"""Every rule fires where it must, is quiet where it must be, and shows a fix that works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.rules import apply
from mtrain.data.store.indexed import IndexedWriter, token_dtype
from tests.support.configs import LAPTOP, MOE, errors, first_fix, tiny, validate

MLA: dict[str, Any] = {
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0}
DEEPSEEK = {**MOE, "num_experts": 8, "router_topk": 4, "router_score_function": "sigmoid"}
INTERLEAVED: dict[str, Any] = {"parallel.pp": 2, "parallel.vpp": 2}
ZERO_BF16: dict[str, Any] = {"precision.dtype": "bf16", "parallel.distributed_optimizer": True}
BROKEN: list[tuple[str, dict[str, Any]]] = [
    ("MT101", {"parallel.tp": 3}),
    (
        "MT102",
        {
            "model.num_attention_heads": 12,
            "model.num_query_groups": 4,
            "model.kv_channels": 16,
            "parallel.tp": 3,
        },
    ),
    ("MT103", {"model.ffn_hidden_size": 703, "parallel.tp": 2}),
    ("MT104", {"model.moe": {**MOE, "shared_expert_intermediate_size": 33}, "parallel.tp": 2}),
    (
        "MT105",
        {
            "model.num_attention_heads": 6,
            "model.num_query_groups": 6,
            "model.kv_channels": 16,
            "parallel.tp": 3,
        },
    ),
    ("MT106", {"parallel.pp": 8}),
    ("MT107", {"parallel.pp": 3}),
    ("MT108", {"parallel.pp": 2, "parallel.vpp": 3}),
    ("MT109", {"parallel.vpp": 2}),
    ("MT112", {"parallel.tp": 2, "parallel.ranks": 3}),
    ("MT113", {"cluster.device": "cuda"}),
    ("MT113", {"cluster.device": "musa"}),
    ("MT119", {"cluster.device": "cdua"}),
    ("MT114", {"cluster.device": "cuda", "cluster.devices_per_node": 8, "parallel.ranks": 4}),
    ("MT114", {"cluster.nodes": 2, "parallel.ranks": 3, "trainer.global_batch_size": 12}),
    ("MT115", {"parallel.sequence_parallel": True}),
    ("MT116", {"parallel.sequence_parallel": True, "parallel.tp": 2, "data.seq_length": 255}),
    (
        "MT116",
        {
            "parallel.sequence_parallel": True,
            "parallel.tp": 4,
            "parallel.cp": 2,
            "data.seq_length": 252,
        },
    ),
    ("MT117", {"parallel.cp": 2, "data.seq_length": 254}),
    ("MT118", {"parallel.overlap_param_gather": True}),
    ("MT118", {"parallel.overlap_param_gather": True, "parallel.distributed_optimizer": True}),
    ("MT135", {"trainer.soft_timeout_s": 700.0}),
    (
        "MT136",
        {"trainer.rampup_batch_size": [8, 8, 100], "trainer.batch_size_schedule": [[8, 1000]]},
    ),
    ("MT137", {"trainer.rampup_batch_size": [16, 4, 100]}),
    ("MT137", {"trainer.rampup_batch_size": [8, 3, 100]}),
    ("MT137", {"trainer.rampup_batch_size": [8, 4, 10000], "trainer.global_batch_size": 8008}),
    ("MT137", {"trainer.batch_size_schedule": []}),
    ("MT137", {"trainer.batch_size_schedule": [[4, 2000], [8, 1000]]}),
    ("MT138", {"trainer.rampup_batch_size": [6, 5, 100]}),
    ("MT138", {"trainer.rampup_batch_size": [2, 2, 100], "parallel.ranks": 4}),
    ("MT138", {"trainer.batch_size_schedule": [[3, 1000], [7, 2000]], "parallel.ranks": 2}),
    ("MT138", {**INTERLEAVED, "trainer.batch_size_schedule": [[4, 9000]]}),
    (
        "MT141",
        {
            "parallel.pp": 2,
            "parallel.layers_per_stage": [2, 2],
            "parallel.pipeline_layout": "Ett|ttL",
        },
    ),
    ("MT142", {"parallel.pp": 2, "parallel.layers_per_stage": [2, 3]}),
    ("MT142", {"parallel.pp": 2, "parallel.layers_per_stage": [4]}),
    ("MT142", {"parallel.pp": 2, "parallel.pipeline_layout": "Ettt|ttL"}),
    ("MT142", {"parallel.pp": 2, "parallel.pipeline_layout": "Ett|tt"}),
    ("MT142", {"parallel.pp": 2, "parallel.pipeline_layout": "Ett|txtL"}),
    ("MT142", {"parallel.pp": 2, "parallel.pipeline_layout": "Ett|(t)*99999tL"}),
    ("MT142", {"parallel.pp": 2, "parallel.pipeline_layout": "Ett|ttL", "model.mtp_num_layers": 1}),
    ("MT142", {"parallel.pp": 2, "parallel.account_for_loss_in_pipeline_split": True}),
    (
        "MT143",
        {
            "parallel.pp": 4,
            "parallel.pipeline_layout": "Ett|tt||L",
            "trainer.global_batch_size": 32,
        },
    ),
    (
        "MT144",
        {
            "parallel.pp": 2,
            "model.mtp_num_layers": 1,
            "model.position_embedding_type": "learned_absolute",
        },
    ),
    ("MT150", {"parallel.recompute.modules": ["mlp"]}),
    ("MT150", {"parallel.recompute.granularity": "selective", "parallel.recompute.num_layers": 2}),
    ("MT150", {"parallel.cp_comm_type": "p2p"}),
    ("MT150", {"parallel.fsdp_sharding": "optim"}),
    ("MT150", {"parallel.hsdp_replicas": 2}),
    ("MT150", {"data.packed_multiple": 4}),
    ("MT150", {"model.window_attn_skip_freq": 2}),
    ("MT150", {"model.mtp_loss_scaling_factor": 0.3}),
    ("MT150", {"model.moe": {**MOE, "router_bias_update_rate": 0.01}}),
    ("MT150", {"model.moe": {**MOE, "pad_expert_input_to_capacity": True}}),
    ("MT150", {"model.moe": {**MOE, "shared_expert_overlap": True}}),
    ("MT150", {"model.mla": {**MLA, "mscale": 0.7}, "model.num_query_groups": None}),
    (
        "MT145",
        {"parallel.pp": 2, "parallel.vpp": 2, "parallel.microbatch_group_size_per_vp_stage": 8},
    ),
    (
        "MT145",
        {
            "parallel.pp": 2,
            "parallel.vpp": 2,
            "parallel.microbatch_group_size_per_vp_stage": 3,
            "trainer.micro_batch_size": 4,
        },
    ),
    ("MT150", {"parallel.microbatch_group_size_per_vp_stage": 4}),
    ("MT150", {"parallel.overlap_p2p_comm_warmup_flush": True}),
    ("MT150", {"parallel.ddp_bucket_size": 1000}),
    ("MT150", {"parallel.ddp_pad_buckets_for_high_nccl_busbw": True}),
    (
        "MT150",
        {
            "parallel.recompute.granularity": "full",
            "parallel.recompute.distribute_saved_activations": True,
        },
    ),
    ("MT150", {"model.activation": "gelu", "model.glu_linear_offset": 1.0}),
    ("MT150", {"model.activation": "gelu", "model.activation_func_clamp_value": 7.0}),
    ("MT150", {"model.position_embedding_type": "none", "model.no_rope_freq": 2}),
    (
        "MT150",
        {"model.position_embedding_type": "none", "model.rotary_seq_len_interpolation_factor": 2.0},
    ),
    ("MT150", {"model.mla": MLA, "model.num_query_groups": None, "model.softmax_scale": 1.0}),
    ("MT150", {"model.moe": {**MOE, "router_padding_for_quantization": True}}),
    ("MT150", {"model.moe": {**MOE, "shared_expert_gate": True}}),
    ("MT150", {"model.moe": {**MOE, "flex_dispatcher_backend": "deepep"}}),
    ("MT160", {"parallel.cp": 4, "parallel.cp_comm_type": "a2a+p2p"}),
    (
        "MT160",
        {
            "parallel.cp": 4,
            "parallel.cp_comm_type": "a2a+p2p",
            "parallel.hierarchical_cp_sizes": [2, 4],
        },
    ),
    ("MT161", {"parallel.cp": 4, "parallel.cp_comm_type": "a2a", "model.num_query_groups": 2}),
    (
        "MT162",
        {"parallel.fsdp": "fsdp2", "parallel.ranks": 2, "parallel.distributed_optimizer": True},
    ),
    (
        "MT164",
        {
            "parallel.fsdp": "megatron",
            "parallel.hsdp_replicas": 2,
            "model.moe": MOE,
            "parallel.ep": 2,
        },
    ),
    (
        "MT163",
        {
            "parallel.fsdp": "megatron",
            "parallel.pp": 2,
            "model.moe": {**MOE, "shared_expert_intermediate_size": 64},
        },
    ),
    ("MT165", {"parallel.fsdp": "megatron", "parallel.ranks": 2, "optim.name": "sgd"}),
    ("MT167", {"parallel.fsdp": "fsdp2", "parallel.ranks": 4, "parallel.hsdp_replicas": 3}),
    ("MT167", {"parallel.fsdp": "fsdp2", "parallel.ranks": 2, "parallel.hsdp_replicas": 2}),
    (
        "MT167",
        {
            "parallel.fsdp": "fsdp2",
            "parallel.hsdp_replicas": 2,
            "parallel.ranks": 4,
            "model.moe": MOE,
            "parallel.ep": 4,
        },
    ),
    (
        "MT168",
        {"parallel.recompute.granularity": "selective", "parallel.recompute.modules": ["moe"]},
    ),
    ("MT169", {"parallel.hybrid_context_parallel": True, "parallel.ranks": 2}),
    ("MT169", {"parallel.hybrid_context_parallel": True, "data.packed": True}),
    (
        "MT169",
        {
            "parallel.hybrid_context_parallel": True,
            "data.packed": True,
            "parallel.ranks": 4,
            "parallel.pp": 2,
        },
    ),
    (
        "MT169",
        {
            "parallel.hybrid_context_parallel": True,
            "data.packed": True,
            "parallel.ranks": 2,
            "parallel.cp_comm_type": "a2a",
        },
    ),
    (
        "MT169",
        {
            "parallel.hybrid_context_parallel": True,
            "data.packed": True,
            "model.moe": MOE,
            "parallel.ranks": 2,
        },
    ),
    (
        "MT170",
        {
            "parallel.hybrid_context_parallel": True,
            "data.packed": True,
            "parallel.ranks": 2,
            "parallel.max_seqlen_per_dp_cp_rank": 100,
        },
    ),
    ("MT168", {"parallel.recompute.granularity": "selective", "parallel.recompute.modules": []}),
    (
        "MT168",
        {
            "parallel.recompute.granularity": "selective",
            "parallel.recompute.modules": ["mlp", "mlp"],
        },
    ),
    ("MT120", {"parallel.ep": 2}),
    ("MT121", {"parallel.etp": 2}),
    ("MT122", {"model.moe": MOE, "parallel.ep": 3, "trainer.global_batch_size": 12}),
    (
        "MT123",
        {
            "model.moe": {**MOE, "ffn_hidden_size": 351},
            "parallel.tp": 2,
            "parallel.sequence_parallel": True,
        },
    ),
    (
        "MT124",
        {"model.moe": MOE, "parallel.ep": 2, "parallel.ranks": 3, "trainer.global_batch_size": 12},
    ),
    ("MT125", {"model.moe": MOE, "parallel.tp": 2, "parallel.sequence_parallel": False}),
    ("MT130", {"trainer.global_batch_size": 15}),
    ("MT130", {"trainer.global_batch_size": 2}),
    ("MT131", {"parallel.pp": 2, "parallel.vpp": 2, "trainer.global_batch_size": 12}),
    ("MT134", {"trainer.profile_step": 1000}),
    (
        "MT230",
        {
            "model.moe": {
                **MOE,
                "expert_capacity_factor": 1.0,
                "router_load_balancing_type": "sinkhorn",
                "aux_loss_coeff": 0.0,
            }
        },
    ),
    (
        "MT230",
        {"model.moe": {**MOE, "expert_capacity_factor": 1.0, "token_dispatcher_type": "allgather"}},
    ),
    (
        "MT232",
        {
            "model.moe": {
                **MOE,
                "router_load_balancing_type": "sinkhorn",
                "aux_loss_coeff": 0.0,
                "router_score_function": "sigmoid",
                "router_enable_expert_bias": True,
            }
        },
    ),
    (
        "MT234",
        {
            "model.moe": {
                **MOE,
                "shared_expert_intermediate_size": 64,
                "shared_expert_overlap": True,
                "token_dispatcher_type": "allgather",
            }
        },
    ),
    ("MT314", {"data.packed": True, "data.packed_multiple": 3, "parallel.cp": 2}),
    (
        "MT315",
        {"data.packed": True, "model.moe": {**MOE, "router_load_balancing_type": "seq_aux_loss"}},
    ),
    ("MT241", {"model.no_rope_freq": 2, "model.mtp_num_layers": 1}),
    ("MT217", {"precision.dtype": "fp16", "model.init_method_std": 5.0}),
    (
        "MT404",
        {
            "kernels.gradient_accumulation_fusion": True,
            "parallel.fsdp": "fsdp2",
            "parallel.ranks": 2,
        },
    ),
    ("MT428", {"optim.cpu_offload": 1.0, "parallel.fsdp": "fsdp2", "parallel.ranks": 2}),
    ("MT201", {"model.hidden_size": 250}),
    ("MT202", {"model.num_query_groups": 3}),
    ("MT203", {"model.kv_channels": 15}),
    ("MT203", {"model.rotary_percent": 0.1}),
    ("MT203", {"model.mla": {**MLA, "qk_pos_emb_head_dim": 7}, "model.num_query_groups": None}),
    (
        "MT203",
        {
            "model.mla": {**MLA, "qk_pos_emb_head_dim": 6},
            "model.rotary_percent": 0.5,
            "model.num_query_groups": None,
        },
    ),
    ("MT204", {"data.seq_length": 2048}),
    ("MT204", {"data.seq_length": 2048, "model.position_embedding_type": "learned_absolute"}),
    ("MT205", {"model.rope_scaling_factor": 8.0, "model.position_embedding_type": "none"}),
    ("MT206", {"model.rope_scaling_factor": 8.0, "model.mla": MLA, "model.num_query_groups": None}),
    ("MT205", {"model.rope_scaling": YARN, "model.position_embedding_type": "none"}),
    ("MT206", {"model.rope_scaling": YARN, "model.mla": MLA, "model.num_query_groups": None}),
    ("MT260", {"model.rope_scaling": YARN, "model.rotary_seq_len_interpolation_factor": 2.0}),
    (
        "MT261",
        {"model.rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 1.0}},
    ),
    (
        "MT262",
        {"model.rope_scaling": {"rope_type": "longrope", "factor": 8.0, "short_factor": [1.0]}},
    ),
    (
        "MT263",
        {"model.rope_scaling": {"rope_type": "dynamic", "factor": 8.0}, "model.kv_channels": 2},
    ),
    ("MT264", {"model.rope_scaling": {**YARN, "mscale_all_dim": 1.0}}),
    (
        "MT264",
        {
            "model.rope_scaling": {
                **YARN,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "attention_factor": 1.0,
            }
        },
    ),
    (
        "MT265",
        {
            "model.rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
            "data.packed": True,
            "data.seq_length": 2048,
        },
    ),
    ("MT267", {"model.mla": {**MLA, "layernorm_epsilon": 1e-2}, "model.num_query_groups": None}),
    (
        "MT267",
        {
            "model.mla": {**MLA, "layernorm_epsilon": 1e-2},
            "model.num_query_groups": None,
            "model.qk_layernorm": True,
            "kernels.norm": "te",
        },
    ),
    (
        "MT207",
        {"model.mla": MLA, "model.position_embedding_type": "none", "model.num_query_groups": None},
    ),
    ("MT208", {"model.mla": MLA}),
    ("MT209", {"model.mla": MLA, "model.kv_channels": 16, "model.num_query_groups": None}),
    ("MT210", {"model.mla": MLA, "model.add_qkv_bias": True, "model.num_query_groups": None}),
    ("MT220", {"model.moe": {**MOE, "router_topk": 5}}),
    ("MT220", {"model.moe": {**MOE, "num_experts": 1}}),
    ("MT221", {"model.moe": {**MOE, "first_dense_layers": 4}}),
    ("MT222", {"model.moe": {**MOE, "router_topk": 1}}),
    ("MT223", {"model.moe": {**MOE, "router_enable_expert_bias": True}}),
    ("MT224", {"model.moe": {**MOE, "router_load_balancing_type": "sinkhorn"}}),
    ("MT225", {"model.moe": {**DEEPSEEK, "router_num_groups": 2}}),
    ("MT226", {"model.moe": {**DEEPSEEK, "router_num_groups": 3, "router_group_topk": 2}}),
    ("MT227", {"model.moe": {**DEEPSEEK, "router_num_groups": 2, "router_group_topk": 3}}),
    ("MT228", {"model.moe": {**DEEPSEEK, "router_num_groups": 8, "router_group_topk": 2}}),
    (
        "MT242",
        {
            "model.moe": {
                **DEEPSEEK,
                "router_num_groups": 4,
                "router_group_topk": 2,
                "router_group_score_topk": 3,
            }
        },
    ),
    (
        "MT244",
        {
            "model.activation_func_clamp_value": 7.0,
            "model.moe": {
                **MOE,
                "shared_expert_intermediate_size": 64,
                "shared_expert_overlap": True,
            },
        },
    ),
    (
        "MT243",
        {
            "model.name": "deepseek_v2",
            "model.moe": {**DEEPSEEK, "router_num_groups": 4, "router_group_topk": 2},
        },
    ),
    (
        "MT229",
        {
            "model.moe": MOE,
            "model.add_bias_linear": True,
            "parallel.tp": 2,
            "parallel.sequence_parallel": True,
        },
    ),
    ("MT212", {"model.qk_l2_norm": True, "model.qk_layernorm": True}),
    ("MT212", {"model.qk_l2_norm": True, "model.mla": MLA, "model.num_query_groups": None}),
    ("MT213", {"model.no_rope_freq": 3}),
    ("MT235", {"model.moe": {**MOE, "token_dispatcher_type": "flex"}, "parallel.ep": 2}),
    ("MT236", {"model.moe": {**MOE, "token_dispatcher_type": "flex"}}),
    (
        "MT237",
        {
            "model.moe": {
                **MOE,
                "token_dispatcher_type": "flex",
                "expert_capacity_factor": 1.0,
                "pad_expert_input_to_capacity": True,
            },
            "parallel.ep": 2,
        },
    ),
    (
        "MT238",
        {
            "model.moe": {
                **MOE,
                "token_dispatcher_type": "allgather",
                "router_padding_for_quantization": True,
            },
            "precision.dtype": "bf16",
            "precision.fp8": "hybrid",
            "cluster.device": "cuda",
            "cluster.devices_per_node": 1,
        },
    ),
    *(
        ("MT215", {"parallel.ep": 2, "model.moe": {**MOE, "pad_alltoall": True, **more}})
        for more in (
            {"expert_capacity_factor": 1.0, "pad_expert_input_to_capacity": True},
            {"router_load_balancing_type": "sinkhorn", "aux_loss_coeff": 0.0},
        )
    ),
    ("MT405", {"parallel.ddp_reduce_scatter_with_fp32_accumulation": True}),
    (
        "MT406",
        {
            "parallel.ddp_reduce_scatter_with_fp32_accumulation": True,
            "precision.dtype": "bf16",
            "precision.grad_reduce_in_fp32": False,
        },
    ),
    ("MT302", {"data.kind": "mock", "data.path": "x"}),
    ("MT303", {"data.kind": "mock", "data.limit_mib": 1.0}),
    ("MT304", {"data.kind": "mock", "data.tokenizer": "x"}),
    ("MT305", {"data.path": "/nowhere/at/all"}),
    (
        "MT307",
        {"data.kind": "indexed", "data.path": "/nowhere", "data.tokenizer": "/nowhere/t.json"},
    ),
    ("MT308", {"data.split": [0.0, 1.0, 0.0]}),
    ("MT308", {"data.split": [0.0, 0.0, 0.0]}),
    ("MT309", {"data.split": [1.0, 0.0, 0.0]}),
    ("MT310", {"data.tokenizer_vocab_size": 5000}),
    ("MT312", {"data.kind": "mock", "trainer.sample_tokens": 8}),
    ("MT313", {"parallel.cp": 2, "trainer.sample_tokens": 8}),
    ("MT150", {"precision.initial_loss_scale": 1024.0}),
    ("MT150", {"optim.momentum": 0.5}),
    ("MT150", {"optim.name": "sgd", "optim.beta2": 0.99}),
    ("MT150", {"optim.wsd_decay_style": "cosine"}),
    ("MT150", {"model.rotary_base": 5e5, "model.position_embedding_type": "none"}),
    ("MT171", {"parallel.recompute.granularity": "full", "parallel.recompute.num_layers": 5}),
    (
        "MT171",
        {
            "parallel.recompute.granularity": "full",
            "parallel.recompute.num_layers": 3,
            "parallel.pp": 2,
        },
    ),
    (
        "MT171",
        {
            "parallel.recompute.granularity": "full",
            "parallel.recompute.num_layers": 2,
            "model.mtp_num_layers": 1,
        },
    ),
    (
        "MT218",
        {"model.mla": MLA, "model.num_query_groups": None, "model.rotary_interleaved": True},
    ),
    (
        "MT214",
        {
            "model.mla": {**MLA, "rope_type": "yarn"},
            "model.num_query_groups": None,
            "parallel.cp": 3,
        }
        | {"data.seq_length": 240},
    ),
    (
        "MT240",
        {
            "model.moe": {**MOE, "shared_expert_intermediate_size": 64},
            "model.add_bias_linear": True,
        },
    ),
    ("MT403", {"kernels.attention": "te"}),
    ("MT403", {"kernels.default": "te"}),
    ("MT408", {"kernels.experts": "torch", "model.moe": MOE}),
    ("MT150", {"kernels.experts": "reference"}),
    ("MT150", {"kernels.rope": "reference", "model.position_embedding_type": "none"}),
    ("MT150", {"kernels.activation": "reference", "model.activation": "gelu"}),
    ("MT150", {"kernels.activation": "triton", "model.glu_linear_offset": 1.0}),
    ("MT150", {"kernels.activation": "triton", "model.activation_func_clamp_value": 7.0}),
    ("MT421", {"optim.min_lr": 0.1}),
    ("MT422", {"optim.warmup_iters": 100}),
    ("MT422", {"optim.warmup_iters": 50, "optim.decay_iters": 50}),
    ("MT423", {"optim.wsd_decay_iters": 5}),
    ("MT424", {"optim.schedule": "wsd"}),
    ("MT425", {"optim.schedule": "wsd", "optim.wsd_decay_iters": 200}),
    ("MT426", {"optim.name": "sgd", "parallel.distributed_optimizer": True}),
    ("MT461", {"kernels.optimizer": "reference", "optim.name": "sgd"}),
    ("MT461", {"kernels.optimizer": "reference", "parallel.fsdp": "fsdp2", "parallel.ranks": 2}),
    ("MT461", {"kernels.optimizer": "reference", "optim.cpu_offload": 0.5}),
    ("MT462", {"kernels.optimizer": "torch", "optim.exp_avg_dtype": "bf16"}),
    ("MT462", {"kernels.optimizer": "te", **ZERO_BF16, "optim.store_param_remainders": True}),
    ("MT463", {"optim.exp_avg_sq_dtype": "fp8", "parallel.fsdp": "fsdp2", "parallel.ranks": 2}),
    ("MT463", {"optim.exp_avg_dtype": "fp8", "optim.cpu_offload": 0.5}),
    ("MT464", {"optim.store_param_remainders": True}),
    ("MT464", {"optim.store_param_remainders": True, "precision.dtype": "bf16"}),
    ("MT464", {"optim.main_params_dtype": "bf16", "parallel.distributed_optimizer": True}),
    (
        "MT465",
        {**ZERO_BF16, "optim.main_params_dtype": "bf16", "optim.store_param_remainders": True},
    ),
    (
        "MT466",
        {
            **ZERO_BF16,
            "optim.main_params_dtype": "bf16",
            "parallel.pp": 2,
            "model.tie_word_embeddings": True,
        },
    ),
    ("MT165", {"optim.name": "muon", "parallel.fsdp": "megatron", "parallel.ranks": 2}),
    ("MT462", {"optim.name": "muon", "kernels.optimizer": "torch"}),
    (
        "MT467",
        {
            "optim.name": "muon",
            "optim.muon.momentum": 0.9,
            "parallel.fsdp": "fsdp2",
            "parallel.ranks": 2,
        },
    ),
    ("MT467", {"optim.name": "muon", "optim.cpu_offload": 0.5}),
    ("MT150", {"optim.muon.tp_mode": "blockwise"}),
    ("MT150", {"optim.name": "sgd", "optim.beta1": 0.8}),
    ("MT150", {"optim.name": "sgd", "optim.eps": 1e-6}),
    ("MT150", {"optim.momentum": 0.8}),
    ("MT150", {"optim.wsd_decay_style": "cosine"}),
    ("MT150", {"optim.name": "muon", "optim.exp_avg_sq_dtype": "bf16"}),
    ("MT150", {"optim.exp_avg_dtype": "bf16", "optim.name": "sgd"}),
    ("MT150", {"optim.store_param_remainders": True, "optim.name": "sgd"}),
    ("MT431", {"log.runs_dir": "/dev/null"}),
    ("MT432", {"data.cache_dir": "/dev/null/x"}),
    ("MT433", {"checkpoint.resume": "/nowhere/at/all"}),
]
H100: dict[str, Any] = {"cluster.device": "cuda", "cluster.devices_per_node": 1}
FINE: list[dict[str, Any]] = [
    {},
    {"parallel.fsdp": "fsdp2", "parallel.pp": 2, "parallel.vpp": 2, "trainer.micro_batch_size": 2},
    {"parallel.fsdp": "fsdp2", "parallel.hsdp_replicas": 2},
    {"parallel.fsdp": "fsdp2", "model.moe": MOE, "parallel.ep": 2, "optim.name": "sgd"},
    {"parallel.fsdp": "megatron", "model.moe": MOE, "parallel.ep": 4, "parallel.pp": 2},
    {"parallel.fsdp": "megatron", "parallel.hsdp_replicas": 2, "parallel.cp": 4},
    {"parallel.fsdp": "fsdp2", "precision.dtype": "fp16", **H100},
    {"optim.cpu_offload": 0.5, "optim.name": "sgd"},
    {
        "model.moe": {**MOE, "token_dispatcher_type": "flex"},
        "parallel.ep": 2,
        **H100,
        "cluster.devices_per_node": 2,
    },
    {"model.moe": {**MOE, "pad_alltoall": True, "alltoall_capacity_factor": 1.5}, "parallel.ep": 2},
    {
        "model.moe": {**MOE, "pad_alltoall": True},
        **H100,
        "trainer.cuda_graph_impl": "full_iteration",
    },
    {"parallel.pp": 2, "parallel.vpp": 2, "parallel.microbatch_group_size_per_vp_stage": 4},
    {"model.no_rope_freq": 2, "model.qk_l2_norm": True, "model.softmax_scale": 0.1},
    {
        "parallel.distributed_optimizer": True,
        "parallel.overlap_grad_reduce": True,
        "parallel.ddp_reduce_scatter_with_fp32_accumulation": True,
        "precision.dtype": "bf16",
        "precision.grad_reduce_in_fp32": False,
    },
    {"parallel.tp": 8},
    {"parallel.tp": 2, "parallel.pp": 2, "parallel.vpp": 2},
    {"parallel.tp": 2, "parallel.sequence_parallel": True, "model.moe": MOE, "parallel.ep": 2},
    {
        "parallel.tp": 2,
        "parallel.sequence_parallel": True,
        "model.moe": MOE,
        "parallel.etp": 1,
        "parallel.ep": 2,
    },
    {"model.num_query_groups": 1, "parallel.tp": 4},
    {"model.kv_channels": 48, "model.hidden_size": 250},
    {"model.position_embedding_type": "none", "data.seq_length": 4096},
    {"model.rotary_percent": 0.5},
    {"model.mla": MLA, "model.num_query_groups": None, "parallel.tp": 2},
    {"model.moe": {**MOE, "router_topk": 1, "router_pre_softmax": True}},
    {"model.moe": {**MOE, "router_topk": 1, "router_score_function": "sigmoid"}},
    {
        "model.moe": {
            **DEEPSEEK,
            "router_num_groups": 4,
            "router_group_topk": 2,
            "router_enable_expert_bias": True,
        }
    },
    {
        "model.ffn_hidden_size": 703,
        "model.moe": MOE,
        "parallel.tp": 2,
        "parallel.sequence_parallel": True,
    },
    {"model.tie_word_embeddings": True, "parallel.pp": 4},
    {"data.kind": "mock", "data.split": [1.0, 0.0, 0.0], "trainer.eval_iters": 0},
    {"optim.schedule": "wsd", "optim.wsd_decay_iters": 10},
    {"optim.decay_iters": 5000, "optim.warmup_iters": 4000},
    {"optim.schedule": "constant", "optim.name": "sgd"},
    {"precision.dtype": "fp16"},
    {"precision.dtype": "fp16", **H100},
    {"kernels.attention": "te", **H100},
    {"kernels.optimizer": "triton", **H100},
    {"optim.name": "muon", "optim.muon.momentum": 0.9, "parallel.tp": 2, "precision.dtype": "bf16"},
    {"trainer.rampup_batch_size": [4, 4, 100]},
    {"trainer.batch_size_schedule": [[8, 1000], [24, 5000], [12, 9000]]},
    {
        "trainer.rampup_batch_size": [2, 2, 100],
        "trainer.micro_batch_size": None,
        "parallel.ranks": 2,
    },
    {**INTERLEAVED, "trainer.batch_size_schedule": [[8, 9000]], "trainer.micro_batch_size": None},
    {**ZERO_BF16, "optim.store_param_remainders": True, "optim.exp_avg_dtype": "bf16"},
    {
        **ZERO_BF16,
        "optim.main_params_dtype": "bf16",
        "optim.exp_avg_sq_dtype": "fp8",
        "parallel.tp": 2,
    },
    {"optim.exp_avg_dtype": "bf16", "kernels.optimizer": "reference"},
    {"checkpoint.resume": "latest"},
    {
        "parallel.distributed_optimizer": True,
        "parallel.overlap_grad_reduce": True,
        "parallel.overlap_param_gather": True,
    },
    {
        "parallel.cp": 2,
        "parallel.tp": 2,
        "parallel.sequence_parallel": True,
        "data.seq_length": 4 * 15,
    },
]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("code", "change"), BROKEN, ids=lambda v: v if isinstance(v, str) else str(v)[:60]
)
def test_rules_broken_names_value_and_working_fix(code: str, change: dict[str, Any]) -> None:
    raw = apply(tiny(), change)
    found = [p for p in errors(raw) if p.code == code]
    assert found, errors(raw)
    problem = found[0]
    assert problem.rule
    assert problem.fix, problem
    after = errors(apply(raw, first_fix(problem)))
    assert code not in {p.code for p in after}
    assert {(p.code, p.path) for p in after} < {(p.code, p.path) for p in errors(raw)}


def test_rules_missing_corpus_has_no_substitute() -> None:
    (problem,) = errors(apply(tiny(), {"data.kind": "indexed", "data.path": "/nowhere/at/all"}))
    assert (problem.code, problem.value, problem.fix) == ("MT306", "/nowhere/at/all", "")


@pytest.mark.parametrize("change", FINE, ids=lambda v: str(v)[:60])
def test_rules_legal_configuration_has_no_error(change: dict[str, Any]) -> None:
    assert errors(apply(tiny(), change)) == []


def test_rules_fp16_loss_scales_are_ordered() -> None:
    raw = apply(tiny(), {"precision.dtype": "fp16", "precision.min_loss_scale": 1e6, **H100})
    (problem,) = errors(raw)
    assert problem.code == "MT402"
    assert errors(apply(raw, first_fix(problem))) == []


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("MT132", {"parallel.pp": 4, "trainer.global_batch_size": 8}),
        ("MT133", {"trainer.global_batch_size": 1 << 20}),
        ("MT139", {"trainer.batch_size_schedule": [[8, 10**6]]}),
        ("MT139", {"trainer.rampup_batch_size": [4, 4, 10**6]}),
        ("MT211", {"model.init_method_std": 0.5}),
        ("MT239", {"model.moe": {**MOE, "router_force_load_balancing": True}}),
        ("MT219", {"model.layernorm_epsilon": 0.0}),
        ("MT219", {"model.layernorm_epsilon": 1.0}),
        ("MT311", {"data.tokenizer_vocab_size": 400}),
        ("MT427", {"optim.lr": 3.0}),
        ("MT435", {"checkpoint.save_interval": 1000, "checkpoint.save_final": False}),
    ],
)
def test_rules_unusual_is_a_warning_only(code: str, change: dict[str, Any]) -> None:
    found = validate(apply(tiny(), change))
    assert [(p.code, p.severity) for p in found] == [(code, "warning")]
    assert found[0].fix


def test_rules_state_numbers() -> None:
    (problem,) = errors(
        tiny(
            model__num_attention_heads=6,
            model__num_query_groups=2,
            model__kv_channels=16,
            parallel__tp=4,
        )
    )[:1]
    assert "6 attention heads, tp 4" in problem.rule
    assert "1, 2, 3, 6" in problem.rule
    assert problem.fix.startswith("parallel.tp=2")


def test_rules_nearest_batches_are_named() -> None:
    problem = next(p for p in errors(tiny(trainer__global_batch_size=15)) if p.code == "MT130")
    assert "nearest: 16, 12" in problem.rule


def test_rules_all_are_run_at_once() -> None:
    raw = tiny(
        parallel__tp=3,
        parallel__pp=3,
        optim__min_lr=1.0,
        kernels__attention="te",
        trainer__global_batch_size=15,
    )
    assert {"MT101", "MT107", "MT421", "MT403", "MT130"} <= {p.code for p in errors(raw)}


def test_rules_partial_cluster_states_both_numbers() -> None:
    raw = tiny(
        cluster__device="cuda", cluster__nodes=8, cluster__devices_per_node=8, parallel__ranks=32
    )
    problem = next(p for p in errors(raw) if p.code == "MT114")
    assert "32 ranks on 8 * 8 = 64 devices" in problem.rule
    assert problem.fix.startswith("parallel.ranks=null")


def test_rules_local_gpu_needs_no_cluster() -> None:
    one_gpu = Machine(cpu_cores=8, memory_bytes=1 << 36, gpus=1)
    assert errors(tiny(), one_gpu) == []
    assert resolve(tiny(parallel__tp=2), one_gpu).cluster.device == "cpu"
    problem = errors(tiny(parallel__tp=2, cluster__device="cuda"), one_gpu)[0]
    assert problem.code == "MT112"
    assert errors(apply(tiny(parallel__tp=2), first_fix(problem)), one_gpu) == []


def test_rules_missing_file_suggests_neighbour(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.txt").write_text("text\n" * 200)
    (problem,) = errors(tiny(data__path=str(tmp_path / "corpsu")))
    assert problem.fix.startswith(f"data.path={tmp_path / 'corpus'}")


def test_rules_empty_folder_file_and_foreign_differ(
    tmp_path: Path,
) -> None:
    (tmp_path / "e.txt").write_text("")
    assert "file is empty" in errors(tiny(data__path=str(tmp_path / "e.txt")))[0].rule
    (tmp_path / "empty").mkdir()
    assert "folder is empty" in errors(tiny(data__path=str(tmp_path / "empty")))[0].rule
    (tmp_path / "empty/x.bin").write_bytes(b"x")
    assert "no file ending in" in errors(tiny(data__path=str(tmp_path / "empty")))[0].rule


def test_rules_indexed_data_needs_both_files(tmp_path: Path) -> None:
    (tmp_path / "tokens.idx").write_bytes(b"x")
    change = {"data.kind": "indexed", "data.path": str(tmp_path / "tokens")}
    assert "tokens.bin: there is no such file" in errors(apply(tiny(), change))[0].rule
    with IndexedWriter(tmp_path / "tokens", token_dtype(4096)) as writer:
        for _ in range(10):
            writer.add(np.zeros(1000, np.uint16))
    assert errors(apply(tiny(), {**change, "data.split": [0.8, 0.2, 0.0]})) == []
    (problem,) = errors(apply(tiny(), {**change, "data.path": str(tmp_path / "tokens.bin")}))
    assert problem.fix.startswith(f"data.path={tmp_path / 'tokens'}")
    (problem,) = errors(apply(tiny(), {**change, "data.path": str(tmp_path / "tokeens")}))
    assert problem.fix.startswith(f"data.path={tmp_path / 'tokens'}")


def test_rules_taken_run_folder_suggests_free_name(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    raw = tiny(log__runs_dir=str(tmp_path), log__name="first")
    (problem,) = validate(raw)
    assert (problem.code, problem.severity) == ("MT434", "warning")
    assert problem.fix.startswith("log.name=first-2")


def test_rules_change_nothing() -> None:
    raw = tiny(parallel__tp=3)
    before = raw.to_dict()
    validate(raw, LAPTOP)
    assert raw.to_dict() == before


def test_rules_batch_in_tokens_suggests_samples() -> None:
    (problem,) = validate(tiny(trainer__global_batch_size=1 << 20))
    assert problem.fix == "trainer.global_batch_size=4096"
    assert validate(tiny(trainer__global_batch_size=1 << 19)) == []
