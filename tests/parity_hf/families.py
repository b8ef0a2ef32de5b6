"""Cases of the comparison: for each family a tiny model with the features that its published
configurations use.
"""

from __future__ import annotations

from typing import Any

from tests.parity_hf.compare import Case

VOCAB = 131
"""Odd, so that our embedding has rows of padding."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0, 1.0, 1.1, 1.2, 1.3, 1.5, 1.8, 2.0],
    "long_factor": [1.0, 1.1, 1.5, 2.0, 3.0, 6.0, 12.0, 30.0],
    "original_max_position_embeddings": 16,
}
LATENT: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "rms_norm_eps": 1e-6,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    # transformers has no balancing loss for this family; nor does it train MTP layers
    "aux_loss_alpha": 0.0,
}
GEMMA: dict[str, Any] = {
    **SIZES,
    "num_hidden_layers": 4,
    "head_dim": 24,
    "query_pre_attn_scalar": 20,
    "sliding_window": 7,
    "final_logit_softcapping": 1.5,
}
GEMMA3: dict[str, Any] = {
    **GEMMA,
    "final_logit_softcapping": None,
    "layer_types": [
        "sliding_attention",
        "sliding_attention",
        "full_attention",
        "sliding_attention",
    ],
    "rope_parameters": {
        "sliding_attention": {**ROPE, "rope_theta": 500.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    },
}
MOE: dict[str, Any] = {**SIZES, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.05}
QWEN_MOE: dict[str, Any] = {**MOE, "num_experts": 6, "moe_intermediate_size": 32, "head_dim": 24}
QWEN2_MOE: dict[str, Any] = {**MOE, "num_experts": 6, "moe_intermediate_size": 32}
QWEN2_MOE["shared_expert_intermediate_size"] = 40
QWEN3_NEXT: dict[str, Any] = {
    **QWEN2_MOE,
    "num_hidden_layers": 3,
    "full_attention_interval": 3,
    "head_dim": 24,
    "norm_topk_prob": True,
    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}
GPT_OSS: dict[str, Any] = {**MOE, "num_local_experts": 4, "head_dim": 24, "rope_parameters": ROPE}
V3: dict[str, Any] = {**LATENT, "n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 0}
V2: dict[str, Any] = {**LATENT, "norm_topk_prob": False}
V32: dict[str, Any] = {**LATENT, "n_group": 4, "topk_group": 2}
V32 |= {"index_n_heads": 6, "index_head_dim": 20, "index_topk": 5}
MINIMAX: dict[str, Any] = {
    **SIZES,
    "head_dim": 24,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
}
PHI3: dict[str, Any] = {**SIZES, "pad_token_id": None}
GLM4: dict[str, Any] = {
    **MOE,
    "num_hidden_layers": 3,
    "head_dim": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    # transformers has no balancing loss for this family; nor does it train MTP layers
    "aux_loss_alpha": 0.0,
    "num_nextn_predict_layers": 0,
    "attention_bias": True,
}
del GLM4["router_aux_loss_coef"]
GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_positions": 64,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
}
NEOX: dict[str, Any] = {
    **{k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "rms_norm_eps")},
    "use_parallel_residual": False,
}
NEMOTRON: dict[str, Any] = {
    **{k: v for k, v in SIZES.items() if k != "rms_norm_eps"},
    "norm_eps": 1e-5,
    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
}
BY_LAYER: dict[str, Any] = {
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"],
}

CASES: dict[str, Case] = {
    "llama 2": Case("llama", {**SIZES, "num_key_value_heads": 4, "rope_parameters": ROPE}),
    "llama 3": Case("llama", {**SIZES, "rope_parameters": {**ROPE, "rope_theta": 500000.0}}),
    "llama 3.1": Case("llama", {**SIZES, "rope_parameters": LLAMA3}),
    "llama 3.2, tied": Case(
        "llama",
        {
            **SIZES,
            "rope_parameters": {**LLAMA3, "factor": 32.0},
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
        },
    ),
    "llama with heads wider than the model, and biases": Case(
        "llama", {**SIZES, "head_dim": 24, "attention_bias": True, "mlp_bias": True}
    ),
    "llama with biases in attention only": Case("llama", {**SIZES, "attention_bias": True}),
    "llama with biases in the MLP only": Case("llama", {**SIZES, "mlp_bias": True}),
    "qwen3 with biases in attention": Case(
        "qwen3", {**SIZES, "head_dim": 16, "attention_bias": True}
    ),
    "gpt neox without biases in attention": Case("gpt_neox", {**NEOX, "attention_bias": False}),
    "llama with a gate of gelu": Case("llama", {**SIZES, "hidden_act": "gelu_pytorch_tanh"}),
    "llama with linear positions": Case(
        "llama", {**SIZES, "rope_parameters": {**ROPE, "rope_type": "linear", "factor": 4.0}}
    ),
    "llama with dynamic positions beyond its length": Case(
        "llama",
        {
            **SIZES,
            "max_position_embeddings": 32,
            "rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 2.0},
        },
    ),
    "llama 3.1 of another length and other frequencies": Case(
        "llama",
        {
            **SIZES,
            "rope_parameters": {
                **{**LLAMA3, "rope_theta": 100.0},
                "low_freq_factor": 2.0,
                "high_freq_factor": 3.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "llama with yarn": Case(
        "llama", {**SIZES, "rope_parameters": {k: v for k, v in YARN.items() if "ms" not in k}}
    ),
    "llama with yarn and two temperatures, not truncated": Case(
        "llama",
        {**SIZES, "rope_parameters": {**YARN, "mscale": 1.0, "beta_fast": 4.0, "truncate": False}},
    ),
    "llama with yarn and an attention factor": Case(
        "llama",
        {
            **SIZES,
            "rope_parameters": {
                **{k: v for k, v in YARN.items() if "ms" not in k},
                "attention_factor": 1.5,
            },
        },
    ),
    "llama with longrope, long": Case("llama", {**SIZES, "rope_parameters": LONGROPE}),
    "llama with longrope, short": Case(
        "llama",
        {
            **SIZES,
            "rope_parameters": {
                **LONGROPE,
                "original_max_position_embeddings": 48,
                "attention_factor": 1.2,
            },
        },
    ),
    "mistral": Case("mistral", {**SIZES, "sliding_window": None, "head_dim": 32}),
    # none of these classes reads layer_types: all layers have the window
    "mixtral with kinds of layers": Case("mixtral", {**MOE, **BY_LAYER}),
    "phi 3 with kinds of layers": Case("phi3", {**PHI3, **BY_LAYER}),
    "qwen3 moe with kinds of layers": Case(
        "qwen3_moe", {**QWEN_MOE, **BY_LAYER, "use_sliding_window": True}
    ),
    "mistral beyond its window": Case("mistral", {**SIZES, "sliding_window": 7}),
    "mixtral of one layer, with transformers' own sum of losses": Case(
        "mixtral", {**MOE, "num_local_experts": 4, "num_hidden_layers": 1}
    ),
    "mixtral": Case(
        "mixtral", {**MOE, "num_local_experts": 4, "sliding_window": 9, "num_hidden_layers": 3}
    ),
    "qwen2": Case("qwen2", {**SIZES, "rope_parameters": {**ROPE, "rope_theta": 1e6}}),
    "qwen2.5, tied": Case(
        "qwen2", {**SIZES, "tie_word_embeddings": True, "num_key_value_heads": 1}
    ),
    "qwen2 with a window in every layer but each second": Case(
        "qwen2",
        {
            **{**SIZES, "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 6},
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "qwen3": Case("qwen3", {**SIZES, "head_dim": 24}),
    "qwen3, tied": Case("qwen3", {**SIZES, "head_dim": 16, "tie_word_embeddings": True}),
    "gemma 2": Case("gemma2", {**GEMMA, "attn_logit_softcapping": 1.0}),
    "gemma 2 without caps and windows, untied": Case(
        "gemma2",
        {
            **{
                **GEMMA,
                "attn_logit_softcapping": None,
                "final_logit_softcapping": None,
                "tie_word_embeddings": False,
            },
            "layer_types": ["full_attention"] * 4,
        },
    ),
    "gemma 3": Case("gemma3_text", GEMMA3),
    "gemma 3 with a window in all of its layers, bounded": Case(
        "gemma3_text", {**GEMMA, "num_hidden_layers": 2, "query_pre_attn_scalar": 24}
    ),
    "olmo 2": Case("olmo2", {**SIZES, "num_key_value_heads": 4}),
    "olmo 2 with grouped queries, tied": Case(
        "olmo2",
        {**SIZES, "tie_word_embeddings": True, "rope_parameters": {**ROPE, "rope_theta": 500000.0}},
    ),
    "qwen2 moe": Case("qwen2_moe", {**QWEN2_MOE, "norm_topk_prob": False}),
    "qwen3 next": Case("qwen3_next", QWEN3_NEXT),
    "qwen3 next, dense, whose last layer is linear, over several chunks": Case(
        "qwen3_next",
        {
            **{
                **QWEN3_NEXT,
                "mlp_only_layers": [0, 1, 2],
                "full_attention_interval": 2,
                "attention_bias": True,
            },
            **{"linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 3},
            **{
                "max_position_embeddings": 160,
                "rope_parameters": ROPE,
                "tie_word_embeddings": True,
            },
        },
        length=150,
    ),
    "gpt oss beyond its window": Case(
        "gpt_oss", {**GPT_OSS, "sliding_window": 6, "swiglu_limit": 1.0}
    ),
    "gpt oss with its own yarn": Case("gpt_oss", {**GPT_OSS, "rope_parameters": None}),
    "qwen3 moe": Case("qwen3_moe", {**QWEN_MOE, "norm_topk_prob": True}),
    "qwen3 moe behind a dense layer": Case(
        "qwen3_moe", {**QWEN_MOE, "num_hidden_layers": 3, "mlp_only_layers": [0]}
    ),
    "qwen3 moe with unnormalised probabilities": Case(
        "qwen3_moe", {**QWEN_MOE, "norm_topk_prob": False}
    ),
    "deepseek v2": Case(
        "deepseek_v2",
        {
            **V2,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 16.0,
            "rope_parameters": YARN,
        },
    ),
    "deepseek v2 lite": Case(
        "deepseek_v2", {**V2, "topk_method": "greedy", "q_lora_rank": None, "rope_parameters": YARN}
    ),
    "deepseek v3": Case(
        "deepseek_v3", {**V3, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}
    ),
    "moonlight, whose latent norms have an epsilon of their own": Case(
        "deepseek_v3",
        {**V3, "rms_norm_eps": 1e-2, "q_lora_rank": None, "n_group": 1, "topk_group": 1},
    ),
    "deepseek v2 with another epsilon than its latent norms": Case(
        "deepseek_v2", {**V2, "rms_norm_eps": 1e-2}
    ),
    "deepseek v3 without yarn and query rank": Case(
        "deepseek_v3",
        {**V3, "q_lora_rank": None, "first_k_dense_replace": 0, "n_shared_experts": 1},
    ),
    "deepseek v3.2": Case(
        "deepseek_v32", {**V32, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}
    ),
    "deepseek v3.2 with more keys than tokens": Case("deepseek_v32", {**V32, "index_topk": 64}),
    "minimax m2": Case("minimax_m2", {**MINIMAX, "rotary_dim": 12}),
    "minimax m2 whose heads turn whole, without groups": Case(
        "minimax_m2", {**MINIMAX, "num_key_value_heads": 4, "tie_word_embeddings": True}
    ),
    "phi 3 beyond its window": Case(
        "phi3", {**PHI3, "sliding_window": 7, "num_key_value_heads": 4}
    ),
    "phi 3 with longrope": Case(
        "phi3", {**PHI3, "original_max_position_embeddings": 16, "rope_parameters": LONGROPE}
    ),
    "phi 4 mini, tied": Case(
        "phi3",
        {
            **PHI3,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                **{key: value for key, value in LONGROPE.items() if key != "factor"},
                "short_factor": [1.0, 1.0, 1.1, 1.2, 1.3, 1.5],
                "long_factor": [1.0, 1.1, 1.5, 2.0, 3.0, 30.0],
                "partial_rotary_factor": 0.75,
            },
        },
    ),
    "glm 4.5 air": Case("glm4_moe", GLM4),
    "glm 4.5 with norms and groups": Case(
        "glm4_moe",
        {**GLM4, "use_qk_norm": True, "n_group": 4, "topk_group": 2, "n_shared_experts": 2},
    ),
    "gpt2": Case("gpt2", GPT2),
    "gpt2 with scores as they are": Case("gpt2", {**GPT2, "scale_attn_weights": False}),
    "gpt2 with exact gelu, untied, narrow": Case(
        "gpt2", {**GPT2, "activation_function": "gelu", "tie_word_embeddings": False, "n_inner": 80}
    ),
    "gpt neox": Case(
        "gpt_neox", {**NEOX, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25}}
    ),
    "pythia": Case(
        "gpt_neox",
        {
            **NEOX,
            "use_parallel_residual": True,
            "num_hidden_layers": 3,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25},
        },
    ),
    "gpt neox with tanh": Case(
        "gpt_neox",
        {
            **NEOX,
            "hidden_act": "gelu_new",
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
        },
    ),
    "nemotron 4, with heads narrower than the model": Case(
        "nemotron", {**NEMOTRON, "head_dim": 12}
    ),
    "nemotron with biases and gelu, tied, a quarter of each head turning": Case(
        "nemotron",
        {
            **{**NEMOTRON, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
            "num_key_value_heads": 4,
            "hidden_act": "gelu_new",
            "norm_eps": 1e-2,
            "rope_parameters": {
                "rope_type": "linear",
                "factor": 4.0,
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.25,
            },
        },
    ),
}

REFUSED: dict[str, tuple[Case, str]] = {
    "llama with half of each head turning": (
        Case("llama", {**SIZES, "rope_parameters": {**YARN, "partial_rotary_factor": 0.5}}),
        "rope_parameters",
    ),
    "llama with a gate of relu": (Case("llama", {**SIZES, "hidden_act": "relu"}), "hidden_act"),
    "qwen2 with windows from its second layer": (
        Case(
            "qwen2",
            {**SIZES, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        ),
        "layer_types",
    ),
    "mixtral with noise": (
        Case("mixtral", {**MOE, "router_jitter_noise": 0.1}),
        "router_jitter_noise",
    ),
    "qwen3 moe with a dense layer": (
        Case("qwen3_moe", {**QWEN_MOE, "mlp_only_layers": [1]}),
        "mlp_only_layers",
    ),
    "qwen3 next with softmax attention where no pattern has it": (
        Case(
            "qwen3_next",
            {**QWEN3_NEXT, "layer_types": ["full_attention", "linear_attention", "full_attention"]},
        ),
        "layer_types",
    ),
    "qwen3 next with a gate of gelu": (
        Case("qwen3_next", {**QWEN3_NEXT, "hidden_act": "gelu"}),
        "hidden_act",
    ),
    "deepseek v3 with unnormalised scores": (
        Case("deepseek_v3", {**V3, "norm_topk_prob": False}),
        "norm_topk_prob",
    ),
    "deepseek v3 with one expert": (
        Case("deepseek_v3", {**V3, "num_experts_per_tok": 1}),
        "num_experts_per_tok",
    ),
    "deepseek v3 with rotary halves": (
        Case("deepseek_v3", {**V3, "rope_interleave": False}),
        "rope_interleave",
    ),
    "deepseek v3.2 whose dense layer is in the middle": (
        Case("deepseek_v32", {**V32, "mlp_layer_types": ["sparse", "dense", "sparse"]}),
        "mlp_layer_types",
    ),
    "deepseek v3 with biases": (
        Case("deepseek_v3", {**V3, "attention_bias": True}),
        "attention_bias",
    ),
    "deepseek v3 with an attention factor": (
        Case("deepseek_v3", {**V3, "rope_parameters": {**YARN, "attention_factor": 0.5}}),
        "rope_parameters",
    ),
    "gemma 2 with biases in attention": (
        Case("gemma2", {**GEMMA, "attention_bias": True}),
        "attention_bias",
    ),
    "gemma 2 that looks ahead": (
        Case("gemma2", {**GEMMA, "use_bidirectional_attention": True}),
        "use_bidirectional_attention",
    ),
    "gemma 3 with scaled positions in its windows": (
        Case(
            "gemma3_text",
            {
                **GEMMA3,
                "rope_parameters": {
                    "sliding_attention": {
                        "rope_type": "linear",
                        "rope_theta": 500.0,
                        "factor": 2.0,
                    },
                    "full_attention": ROPE,
                },
            },
        ),
        "rope_parameters",
    ),
    "gemma 3 whose first layer is the only sliding one": (
        Case(
            "gemma3_text", {**GEMMA3, "layer_types": ["sliding_attention", *["full_attention"] * 3]}
        ),
        "layer_types",
    ),
    "olmo 2 with biases": (Case("olmo2", {**SIZES, "attention_bias": True}), "attention_bias"),
    "minimax m2 with one expert": (
        Case("minimax_m2", {**MINIMAX, "num_experts_per_tok": 1}),
        "num_experts_per_tok",
    ),
    "minimax m2 with noise": (
        Case("minimax_m2", {**MINIMAX, "router_jitter_noise": 0.1}),
        "router_jitter_noise",
    ),
    "phi 3 with dropout of residuals": (Case("phi3", {**PHI3, "resid_pdrop": 0.1}), "resid_pdrop"),
    "glm 4.5 with unnormalised scores": (
        Case("glm4_moe", {**GLM4, "norm_topk_prob": False}),
        "norm_topk_prob",
    ),
    "gpt2 with scores by the layer": (
        Case("gpt2", {**GPT2, "scale_attn_by_inverse_layer_idx": True}),
        "scale_attn_by_inverse_layer_idx",
    ),
    "nemotron without a gate of silu": (
        Case("nemotron", {**NEMOTRON, "hidden_act": "silu"}),
        "hidden_act",
    ),
    "gpt2 with relu": (
        Case("gpt2", {**GPT2, "activation_function": "relu"}),
        "activation_function",
    ),
}
"""Models that ours cannot be, and the key that the import must name."""
