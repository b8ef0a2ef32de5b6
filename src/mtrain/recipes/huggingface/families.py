"""The keys of a Hugging Face `config.json`, family by family, and their meaning here."""

from __future__ import annotations

from typing import Any

from mtrain.config.messages.keys import key_of
from mtrain.recipes.huggingface.config_file import Family
from mtrain.recipes.huggingface.readers import (
    attention_biases,
    deepseek_v2_experts,
    deepseek_v3_experts,
    gate,
    gemma_attention,
    glm4_experts,
    gpt2_block,
    gpt_oss_experts,
    llama_biases,
    minimax_experts,
    mixtral_experts,
    neox_block,
    no_attention_bias,
    phi3_block,
    qwen2_experts,
    qwen_experts,
    uncapped_scores,
)
from mtrain.recipes.huggingface.rope import (
    first_channels_rotary,
    neox_rotary,
    optional_window,
    partly_rotary,
    phi3_rotary,
    rotary,
    two_bases,
    window_everywhere,
    window_except_every_nth,
    window_in_every_other_layer,
    window_in_odd_layers,
    window_in_upper_layers,
)


def _named(*names: str) -> dict[str, str]:
    """Return keys of `model` under the names that the schema records for Llama's `config.json`."""
    return {key_of(f"model.{name}").hf.split()[0]: f"model.{name}" for name in names}


COMMON = _named(
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
    "init_method_std",
    "attention_dropout",
)
LLAMA = COMMON | _named("num_query_groups", "kv_channels", "layernorm_epsilon")
LATENT = COMMON | _named("layernorm_epsilon")
GATED = {
    "model.normalization": "RMSNorm",
    "model.position_embedding_type": "rope",
    "model.add_bias_linear": False,
}
GEMMA = LLAMA | _named("final_logit_softcapping")
GEMMA_LAYER = {
    **GATED,
    "model.layernorm_zero_centered_gamma": True,
    "model.norm_placement": "pre_and_post",
    "model.scale_embedding": True,
}
PLAIN_MLP = {"model.normalization": "LayerNorm", "model.add_bias_linear": True}

_OLD: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
}
_QWEN = {**_OLD, "max_position_embeddings": 32768, "num_key_value_heads": 32}
QWEN_MOE = {
    **_QWEN,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "num_local_experts": 128,
    "router_aux_loss_coef": 0.001,
    "decoder_sparse_step": 1,
}
_GEMMA = {
    **{key: value for key, value in _OLD.items() if key != "hidden_act"},
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_OTHER_ACTIVATION = {"hidden_act": "is not read for this family, which has hidden_activation"}
_DEEPSEEK = {
    **_OLD,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "seq_aux": True,
}
_COMPUTED = dict.fromkeys(
    ("head_dim", "qk_head_dim"), "is computed from qk_nope_head_dim and qk_rope_head_dim"
)
_LAYOUT = {"ep_size": "sets how experts are sharded, which is parallel.ep"}
_ALIASES = {"num_experts": "num_local_experts"}
_UNREAD_BY_PHI3 = (
    "embd_pdrop",
    "attention_bias",
    "mlp_bias",
    "lm_head_bias",
    "full_attn_mod",
    "interpolate_factor",
)
_SUMMARY = (
    "summary_type",
    "summary_use_proj",
    "summary_activation",
    "summary_proj_to_labels",
    "summary_first_dropout",
)
_GPT2 = {
    "n_layer": "model.num_layers",
    "n_embd": "model.hidden_size",
    "n_head": "model.num_attention_heads",
    "vocab_size": "model.vocab_size",
    "n_positions": "model.max_position_embeddings",
    "layer_norm_epsilon": "model.layernorm_epsilon",
    "initializer_range": "model.init_method_std",
    "tie_word_embeddings": "model.tie_word_embeddings",
}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        LLAMA, GATED, {**_OLD, "max_position_embeddings": 2048}, (gate, llama_biases, rotary)
    ),
    "mistral": Family(
        LLAMA,
        GATED,
        {
            **_OLD,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
            "num_key_value_heads": 8,
        },
        (gate, window_everywhere, rotary),
    ),
    "mixtral": Family(
        LLAMA,
        GATED,
        {
            **_OLD,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.001,
        },
        (gate, window_everywhere, rotary, mixtral_experts),
        _ALIASES,
    ),
    "qwen2": Family(
        LLAMA, {**GATED, "model.add_qkv_bias": True}, _QWEN, (gate, window_in_upper_layers, rotary)
    ),
    "qwen2_moe": Family(
        LLAMA,
        GATED,
        {
            **QWEN_MOE,
            "num_key_value_heads": 16,
            "num_experts_per_tok": 4,
            "num_local_experts": 60,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "qkv_bias": True,
        },
        (gate, window_in_odd_layers, rotary, qwen2_experts),
        _ALIASES,
    ),
    "qwen3": Family(
        LLAMA,
        {**GATED, "model.qk_layernorm": True},
        {**_QWEN, "head_dim": 128},
        (gate, attention_biases, window_in_upper_layers, rotary),
    ),
    "qwen3_moe": Family(
        LLAMA,
        {**GATED, "model.qk_layernorm": True},
        {**QWEN_MOE, "num_key_value_heads": 4},
        (gate, attention_biases, optional_window, rotary, qwen_experts),
        _ALIASES,
        {"max_window_layers": "is not read for this family"},
    ),
    "gemma2": Family(
        GEMMA | _named("attn_logit_softcapping"),
        GEMMA_LAYER,
        {
            **_GEMMA,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        (gemma_attention, window_in_every_other_layer, rotary),
        irrelevant=_OTHER_ACTIVATION,
    ),
    "gemma3_text": Family(
        GEMMA,
        {**GEMMA_LAYER, "model.qk_layernorm": True},
        {
            **_GEMMA,
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        (gemma_attention, uncapped_scores, window_except_every_nth, two_bases),
        irrelevant={
            **_OTHER_ACTIVATION,
            "_sliding_window_pattern": "is sliding_window_pattern, which made layer_types",
        },
    ),
    "olmo2": Family(
        LLAMA,
        {
            **GATED,
            "model.norm_placement": "post",
            "model.qk_layernorm": True,
            "model.qk_layernorm_across_heads": True,
        },
        {**_OLD, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        (gate, no_attention_bias, rotary),
    ),
    "minimax_m2": Family(
        LLAMA,
        {**GATED, "model.qk_layernorm": True, "model.qk_layernorm_across_heads": True},
        {
            **_OLD,
            "max_position_embeddings": 196608,
            "head_dim": 128,
            "num_key_value_heads": 8,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "rope_theta": 5e6,
        },
        (gate, first_channels_rotary, minimax_experts),
        _ALIASES,
        {"mlp_intermediate_size": "is the width of a dense MLP, which no layer of this family has"},
    ),
    "gpt_oss": Family(
        LLAMA,
        {
            **GATED,
            "model.add_bias_linear": True,
            "model.activation": "quick_geglu",
            "model.glu_linear_offset": 1.0,
            "model.softmax_type": "learnable",
        },
        {
            **_OLD,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "head_dim": 64,
            "num_key_value_heads": 8,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "router_aux_loss_coef": 0.001,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
        (window_in_every_other_layer, rotary, gpt_oss_experts),
        _ALIASES,
        {"initial_context_length": "is original_max_position_embeddings of the rotary positions"},
    ),
    "deepseek_v2": Family(
        LATENT,
        {**GATED, "model.qk_layernorm": True},
        {
            **_DEEPSEEK,
            "max_position_embeddings": 2048,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
            "aux_loss_alpha": 0.003,
        },
        (gate, deepseek_v2_experts, rotary),
        {"num_experts": "n_routed_experts"},
        {**_COMPUTED, **_LAYOUT},
    ),
    "deepseek_v3": Family(
        LATENT,
        {**GATED, "model.qk_layernorm": True},
        {
            **_DEEPSEEK,
            "max_position_embeddings": 4096,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "moe_intermediate_size": 2048,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "routed_scaling_factor": 2.5,
            "n_group": 8,
            "topk_group": 4,
            "num_nextn_predict_layers": 1,
            "aux_loss_alpha": 0.0001,
        },
        (gate, deepseek_v3_experts, rotary),
        {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
        {**_COMPUTED, **_LAYOUT},
    ),
    "glm4_moe": Family(
        LLAMA,
        GATED,
        {
            **_OLD,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "attention_bias": False,
            "use_qk_norm": False,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.0,
            "num_nextn_predict_layers": 1,
            "seq_aux": True,
            "aux_loss_alpha": 0.0001,
        },
        (gate, partly_rotary, glm4_experts),
        {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    ),
    "phi3": Family(
        LLAMA,
        GATED,
        {
            **_OLD,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "resid_pdrop": 0.0,
        },
        (gate, window_everywhere, phi3_rotary, phi3_block),
        {},
        dict.fromkeys(_UNREAD_BY_PHI3, "is read by no layer of this family"),
    ),
    "gpt2": Family(
        _GPT2,
        {**PLAIN_MLP, "model.position_embedding_type": "learned_absolute"},
        {
            "tie_word_embeddings": True,
            "activation_function": "gelu_new",
            "vocab_size": 50257,
            "n_positions": 1024,
            "layer_norm_epsilon": 1e-5,
            "initializer_range": 0.02,
            **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.1),
        },
        (gpt2_block,),
        {
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        {
            **dict.fromkeys(_SUMMARY, "is read by a head for classification"),
            "n_ctx": "is n_positions under its old name",
        },
    ),
    "gpt_neox": Family(
        {**COMMON, "layer_norm_eps": "model.layernorm_epsilon"},
        {**PLAIN_MLP, "model.position_embedding_type": "rope"},
        {
            "tie_word_embeddings": False,
            "use_parallel_residual": True,
            "hidden_act": "gelu",
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "initializer_range": 0.02,
            "layer_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "rotary_pct": 0.25,
        },
        (neox_rotary, neox_block),
    ),
}
ALIASES = {"kimi_k2": "deepseek_v3", "ministral": "mistral"}
"""Another `model_type` of models that a family computes -> that of the family."""
