"""Writers of each `model_type`'s keys in a `config.json`, beyond the copied ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.moe import MoEConfig
from mtrain.recipes.huggingface.config_file import Json
from mtrain.recipes.huggingface.readers import GATED_WORDS, UNGATED_WORDS

Extra = Callable[[ModelConfig], Json]


def _word(model: ModelConfig, words: Mapping[str, str]) -> str:
    preferred = {"geglu_tanh": "gelu_pytorch_tanh", "gelu_tanh": "gelu_new"}
    matching = [theirs for theirs, ours in words.items() if ours == model.activation]
    if not matching:
        raise ValueError(f"the activation is {model.activation}")
    return preferred.get(model.activation, matching[0])


def gate_of(model: ModelConfig) -> Json:
    """Return the activation of a gate."""
    return {"hidden_act": _word(model, GATED_WORDS)}


def _rope(model: ModelConfig) -> Json:
    out: Json = {"rope_theta": model.rotary_base, "rope_scaling": None}
    if model.rope_scaling_factor is not None:
        low_high = {
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        out["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": model.rope_scaling_factor,
            **low_high,
        }
    elif model.rotary_seq_len_interpolation_factor is not None:
        out["rope_scaling"] = {
            "rope_type": "linear",
            "factor": model.rotary_seq_len_interpolation_factor,
        }
    elif model.rope_scaling is not None:
        parameters = {
            key: value
            for key, value in model.rope_scaling.model_dump(mode="json").items()
            if value is not None
        }
        if model.rope_scaling.rope_type == "llama3":
            parameters = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, **parameters}
        out["rope_scaling"] = parameters
    return out


def partly(model: ModelConfig) -> Json:
    """Return rotary positions of a part of each head."""
    return {**_rope(model), "partial_rotary_factor": model.rotary_percent}


def _layer_types(model: ModelConfig) -> Json:
    """Return the window of each layer, if there are windows."""
    if model.window_size is None:
        return {"layer_types": ["full_attention"] * model.num_layers}
    every = model.window_attn_skip_freq
    kinds = [
        "full_attention" if every and (i + 1) % every == 0 else "sliding_attention"
        for i in range(model.num_layers)
    ]
    return {"sliding_window": model.window_size, "use_sliding_window": True, "layer_types": kinds}


def _everywhere(model: ModelConfig) -> Json:
    if model.window_attn_skip_freq is not None:
        raise ValueError("a window in some layers")
    return {"sliding_window": model.window_size}


def _llama(model: ModelConfig) -> Json:
    return {**gate_of(model), **_rope(model), **_biases(model)}


def _biases(model: ModelConfig) -> Json:
    return {
        "attention_bias": model.add_bias_linear or model.add_proj_bias,
        "mlp_bias": model.add_bias_linear or model.add_mlp_bias,
    }


def _mistral(model: ModelConfig) -> Json:
    return {**gate_of(model), **_rope(model), **_everywhere(model)}


def _ministral(model: ModelConfig) -> Json:
    """Return the keys of a Mistral; windows in some layers are listed, which makes it a Ministral
    for AutoConfig.
    """
    windows = (
        {"sliding_window": model.window_size} if model.window_size is None else _layer_types(model)
    )
    windows.pop("use_sliding_window", None)
    some = model.window_attn_skip_freq is not None
    return {**gate_of(model), **_rope(model), **windows} if some else _mistral(model)


def _qwen(model: ModelConfig) -> Json:
    windows = (
        _layer_types(model) if model.window_size is not None else {"use_sliding_window": False}
    )
    biases = {"attention_bias": True} if model.add_proj_bias else {}
    return {**gate_of(model), **_rope(model), **windows, **biases}


def _experts(model: ModelConfig) -> MoEConfig:
    if model.moe is None:
        raise ValueError("there are no experts")
    return model.moe


def _balance(model: ModelConfig, dense: int = 0) -> float:
    moe = _experts(model)
    return float(f"{moe.aux_loss_coeff * max(1, model.num_layers - dense) / moe.router_topk:.6g}")


def mixture(model: ModelConfig, count: str, width: str, dense: int = 0) -> Json:
    """Return the keys of a mixture of experts; `count` and `width` are two key names."""
    moe = _experts(model)
    sizes = {
        count: moe.num_experts,
        "num_experts_per_tok": moe.router_topk,
        width: moe.ffn_hidden_size,
    }
    return {**sizes, "router_aux_loss_coef": _balance(model, dense)}


def _mixtral(model: ModelConfig) -> Json:
    return {**_mistral(model), **mixture(model, "num_local_experts", "intermediate_size")}


def _qwen_experts(model: ModelConfig) -> Json:
    dense = _experts(model).first_dense_layers
    first = {"mlp_only_layers": list(range(dense)), "decoder_sparse_step": 1}
    normed = {"norm_topk_prob": not _experts(model).router_pre_softmax}
    mixed = mixture(model, "num_experts", "moe_intermediate_size", dense)
    return {**gate_of(model), **_rope(model), **mixed, **first, **normed}


def qwen_moe(model: ModelConfig) -> Json:
    """Return the keys of Qwen3-MoE, which its successors share."""
    windows: Json = {"use_sliding_window": False}
    if model.window_size is not None:
        windows = {**_everywhere(model), "use_sliding_window": True}
    biases = {"attention_bias": True} if model.add_proj_bias else {}
    return {**_qwen_experts(model), **windows, **biases}


def _qwen2_moe(model: ModelConfig) -> Json:
    shared = {
        "shared_expert_intermediate_size": _experts(model).shared_expert_intermediate_size or 0
    }
    windows = (
        _layer_types(model) if model.window_size is not None else {"use_sliding_window": False}
    )
    return {**_qwen_experts(model), **windows, **shared, "qkv_bias": model.add_qkv_bias}


def _gpt_oss(model: ModelConfig) -> Json:
    limits = {
        "swiglu_limit": model.activation_func_clamp_value,
        "hidden_act": "silu",
        "attention_bias": True,
    }
    kinds = _layer_types(model)
    kinds.pop("use_sliding_window", None)
    rotary = _rope(model)["rope_scaling"] or {"rope_type": "default"}
    return {
        "rope_parameters": {**rotary, "rope_theta": model.rotary_base},
        **kinds,
        **mixture(model, "num_local_experts", "intermediate_size"),
        **limits,
    }


def _experts_after_dense_layers(model: ModelConfig) -> Json:
    """Return the experts of DeepSeek-V2, V3 and GLM-4.5."""
    moe = _experts(model)
    return {
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.router_topk,
        "moe_intermediate_size": moe.ffn_hidden_size,
        "n_shared_experts": (moe.shared_expert_intermediate_size or 0) // moe.ffn_hidden_size,
        "first_k_dense_replace": moe.first_dense_layers,
        "routed_scaling_factor": moe.router_topk_scaling_factor or 1.0,
        "aux_loss_alpha": moe.aux_loss_coeff,
        "seq_aux": moe.router_load_balancing_type == "seq_aux_loss",
    }


def _latent(model: ModelConfig) -> Json:
    mla = model.mla
    moe = _experts(model)
    if mla is None:
        raise ValueError("there is no MLA")
    out = {
        **gate_of(model),
        **_experts_after_dense_layers(model),
        "rope_theta": model.rotary_base,
        "rope_scaling": None,
        "num_key_value_heads": model.num_attention_heads,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_head_dim,
        "qk_rope_head_dim": mla.qk_pos_emb_head_dim,
        "v_head_dim": mla.v_head_dim,
        "n_group": moe.router_num_groups or 1,
        "topk_group": moe.router_group_topk or 1,
        "attention_bias": False,
    }
    if mla.rope_type == "yarn":
        names = (
            "mscale",
            "mscale_all_dim",
            "beta_fast",
            "beta_slow",
            "original_max_position_embeddings",
        )
        scaling = {name: getattr(mla, name) for name in names if getattr(mla, name) is not None}
        out["rope_scaling"] = {"type": "yarn", "factor": mla.rotary_scaling_factor, **scaling}
    return out


def _deepseek_v2(model: ModelConfig) -> Json:
    out = {**_latent(model), "scoring_func": "softmax", "norm_topk_prob": False}
    if model.moe is not None and model.moe.router_num_groups:
        return {**out, "topk_method": "group_limited_greedy"}
    return {
        **{k: v for k, v in out.items() if k not in ("n_group", "topk_group")},
        "topk_method": "greedy",
    }


def _deepseek_v3(model: ModelConfig) -> Json:
    words = {
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "topk_method": "noaux_tc",
        "rope_interleave": True,
    }
    return {**_latent(model), **words, "num_nextn_predict_layers": model.mtp_num_layers or 0}


def _glm4_moe(model: ModelConfig) -> Json:
    moe = _experts(model)
    return {
        **gate_of(model),
        **partly(model),
        **_experts_after_dense_layers(model),
        "attention_bias": model.add_qkv_bias,
        "use_qk_norm": model.qk_layernorm,
        "n_group": moe.router_num_groups or 1,
        "topk_group": moe.router_group_topk or 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": model.mtp_num_layers or 0,
    }


def _minimax_m2(model: ModelConfig) -> Json:
    moe = _experts(model)
    sizes = {"num_local_experts": moe.num_experts, "num_experts_per_tok": moe.router_topk}
    return {**gate_of(model), **partly(model), **sizes, "intermediate_size": moe.ffn_hidden_size}


def _phi3(model: ModelConfig) -> Json:
    before = model.rope_scaling.original_max_position_embeddings if model.rope_scaling else None
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0}
    length = before or model.max_position_embeddings
    return {
        **gate_of(model),
        **partly(model),
        **_everywhere(model),
        **drops,
        "original_max_position_embeddings": length,
    }


def _olmo2(model: ModelConfig) -> Json:
    return {**gate_of(model), **_rope(model), "attention_bias": False}


def _gemma(model: ModelConfig) -> Json:
    scale = model.softmax_scale
    divisor = model.head_dim if scale is None else float(f"{scale**-2:.12g}")
    return {
        "hidden_activation": _word(model, GATED_WORDS),
        "query_pre_attn_scalar": int(divisor) if divisor == int(divisor) else divisor,
        "sliding_window": model.window_size or 4096,
        "layer_types": _layer_types(model)["layer_types"],
        "attention_bias": False,
        "final_logit_softcapping": model.final_logit_softcapping,
    }


def _gemma2(model: ModelConfig) -> Json:
    return {**_gemma(model), **_rope(model), "attn_logit_softcapping": model.attn_logit_softcapping}


def _gemma3(model: ModelConfig) -> Json:
    return {
        **_gemma(model),
        **_rope(model),
        "rope_local_base_freq": model.rotary_base_local or 10000.0,
    }


def _gpt2(model: ModelConfig) -> Json:
    drops = {
        "attn_pdrop": model.attention_dropout,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
    }
    word = {
        "activation_function": _word(model, UNGATED_WORDS),
        "scale_attn_weights": model.softmax_scale is None,
    }
    return {
        **drops,
        **word,
        "n_inner": model.ffn_hidden_size,
        "n_ctx": model.max_position_embeddings,
    }


def _gpt_neox(model: ModelConfig) -> Json:
    rotary = {
        "rotary_emb_base": model.rotary_base,
        "rotary_pct": model.rotary_percent,
        "rope_scaling": _rope(model)["rope_scaling"],
    }
    drops = {"attention_dropout": model.attention_dropout, "hidden_dropout": model.hidden_dropout}
    return {
        **rotary,
        **drops,
        "hidden_act": _word(model, UNGATED_WORDS),
        "use_parallel_residual": model.parallel_residual,
        "attention_bias": model.add_bias_linear,
    }


WRITERS: dict[str, Extra] = {
    "llama": _llama,
    "mistral": _ministral,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "mixtral": _mixtral,
    "qwen3_moe": qwen_moe,
    "qwen2_moe": _qwen2_moe,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _glm4_moe,
    "minimax_m2": _minimax_m2,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
}
"""`model_type` -> the writer of its keys beyond the copied ones."""
