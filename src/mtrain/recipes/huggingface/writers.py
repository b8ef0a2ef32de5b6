"""Writers of each `model_type`'s keys in a `config.json`, beyond the copied ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.moe import MoEConfig
from mtrain.recipes.huggingface.config_file import Json
from mtrain.recipes.huggingface.readers import (
    GATED_WORDS,
    LINEAR_KEYS,
    UNGATED_WORDS,
    linear_layers,
)
from mtrain.recipes.huggingface.rope import LLAMA3


def _word(model: ModelConfig, words: Mapping[str, str]) -> str:
    preferred = {"geglu_tanh": "gelu_pytorch_tanh", "gelu_tanh": "gelu_new"}
    matching = [theirs for theirs, ours in words.items() if ours == model.activation]
    if not matching:
        raise ValueError(f"the activation is {model.activation}")
    return preferred.get(model.activation, matching[0])


def _rope(model: ModelConfig) -> Json:
    """Return the base and the scaling of rotary positions."""
    scaling: Json | None = None
    if model.rope_scaling_factor is not None:
        scaling = {"rope_type": "llama3", "factor": model.rope_scaling_factor, **LLAMA3}
    elif model.rotary_seq_len_interpolation_factor is not None:
        scaling = {"rope_type": "linear", "factor": model.rotary_seq_len_interpolation_factor}
    elif model.rope_scaling is not None:
        scaling = model.rope_scaling.model_dump(mode="json", exclude_none=True)
        if model.rope_scaling.rope_type == "llama3":
            # the class of transformers has no defaults for these two
            scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, **scaling}
    return {"rope_theta": model.rotary_base, "rope_scaling": scaling}


def _gated(model: ModelConfig) -> Json:
    """Return the activation of a gate, and rotary positions."""
    return {"hidden_act": _word(model, GATED_WORDS), **_rope(model)}


def _partial(model: ModelConfig) -> Json:
    """Return a gate's activation, and rotary positions of a part of each head."""
    return {**_gated(model), "partial_rotary_factor": model.rotary_percent}


def _kinds(model: ModelConfig) -> list[str]:
    """Return transformers' kind of each layer, with or without a window."""
    if model.window_size is None:
        return ["full_attention"] * model.num_layers
    # beyond the last layer if none is without a window
    every = model.window_attn_skip_freq or model.num_layers + 1
    return [
        "sliding_attention" if (i + 1) % every else "full_attention"
        for i in range(model.num_layers)
    ]


def _switched_windows(model: ModelConfig) -> Json:
    """Return the windows of families that switch them on, layer by layer (Qwen)."""
    if model.window_size is None:
        return {"use_sliding_window": False}
    return {
        "sliding_window": model.window_size,
        "use_sliding_window": True,
        "layer_types": _kinds(model),
    }


def _everywhere(model: ModelConfig) -> Json:
    if model.window_attn_skip_freq is not None:
        raise ValueError("a window in some layers")
    return {"sliding_window": model.window_size}


def _llama(model: ModelConfig) -> Json:
    return {**_gated(model), **_biases(model)}


def _biases(model: ModelConfig) -> Json:
    return {
        "attention_bias": model.add_bias_linear or model.add_proj_bias,
        "mlp_bias": model.add_bias_linear or model.add_mlp_bias,
    }


def _mistral(model: ModelConfig) -> Json:
    return {**_gated(model), **_everywhere(model)}


def _ministral(model: ModelConfig) -> Json:
    """Return the keys of a Mistral, or for windows in some layers those of a Ministral."""
    if model.window_attn_skip_freq is None:
        return _mistral(model)
    windows: Json = {"sliding_window": model.window_size}
    if model.window_size is not None:
        windows["layer_types"] = _kinds(model)
    return {**_gated(model), **windows}


def _proj_biases(model: ModelConfig) -> Json:
    return {"attention_bias": True} if model.add_proj_bias else {}


def _qwen(model: ModelConfig) -> Json:
    return {**_gated(model), **_switched_windows(model), **_proj_biases(model)}


def _experts(model: ModelConfig) -> MoEConfig:
    if model.moe is None:
        raise ValueError("there are no experts")
    return model.moe


def mixture(model: ModelConfig, count: str, width: str, dense: int = 0) -> Json:
    """Return the keys of a mixture of experts; `count` and `width` are two key names."""
    moe = _experts(model)
    # Hugging Face averages the loss over layers and counts every choice of a token
    balance = moe.aux_loss_coeff * max(1, model.num_layers - dense) / moe.router_topk
    return {
        count: moe.num_experts,
        "num_experts_per_tok": moe.router_topk,
        width: moe.ffn_hidden_size,
        "router_aux_loss_coef": float(f"{balance:.6g}"),
    }


def _mixtral(model: ModelConfig) -> Json:
    return {**_mistral(model), **mixture(model, "num_local_experts", "intermediate_size")}


def _qwen_experts(model: ModelConfig) -> Json:
    moe = _experts(model)
    dense = moe.first_dense_layers
    return {
        **_gated(model),
        **mixture(model, "num_experts", "moe_intermediate_size", dense),
        "mlp_only_layers": list(range(dense)),
        "decoder_sparse_step": 1,
        "norm_topk_prob": not moe.router_pre_softmax,
    }


def _qwen3_moe(model: ModelConfig) -> Json:
    windows: Json = {"use_sliding_window": False}
    if model.window_size is not None:
        windows = {**_everywhere(model), "use_sliding_window": True}
    return {**_qwen_experts(model), **windows, **_proj_biases(model)}


def _qwen2_moe(model: ModelConfig) -> Json:
    return {
        **_qwen_experts(model),
        **_switched_windows(model),
        "shared_expert_intermediate_size": _experts(model).shared_expert_intermediate_size or 0,
        "qkv_bias": model.add_qkv_bias,
    }


def _qwen3_next(model: ModelConfig) -> Json:
    own = model.linear_attention
    if own is None:
        raise ValueError("there is no linear attention")
    mlps: Json = {"mlp_only_layers": list(range(model.num_layers))}
    if model.moe is not None:
        shared = model.moe.shared_expert_intermediate_size or 0
        mlps = {**_qwen3_moe(model), "shared_expert_intermediate_size": shared}
    return {
        **mlps,
        **_partial(model),
        "attention_bias": model.add_qkv_bias and model.add_proj_bias,
        "layer_types": linear_layers(model.num_layers, own.freq),
        **{f"linear_{key}": getattr(own, key) for key in LINEAR_KEYS},
    }


def _gpt_oss(model: ModelConfig) -> Json:
    rotary = _rope(model)["rope_scaling"] or {"rope_type": "default"}
    return {
        "rope_parameters": {**rotary, "rope_theta": model.rotary_base},
        **({} if model.window_size is None else {"sliding_window": model.window_size}),
        "layer_types": _kinds(model),
        **mixture(model, "num_local_experts", "intermediate_size"),
        "swiglu_limit": model.activation_func_clamp_value,
        "hidden_act": "silu",
        "attention_bias": True,
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
        "n_group": moe.router_num_groups or 1,
        "topk_group": moe.router_group_topk or 1,
    }


def _latent(model: ModelConfig) -> Json:
    mla = model.mla
    if mla is None:
        raise ValueError("there is no MLA")
    out = {
        **_gated(model),
        **_experts_after_dense_layers(model),
        "rope_scaling": None,
        "num_key_value_heads": model.num_attention_heads,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_head_dim,
        "qk_rope_head_dim": mla.qk_pos_emb_head_dim,
        "v_head_dim": mla.v_head_dim,
        "attention_bias": False,
    }
    if mla.rope_type == "yarn":
        names = "mscale mscale_all_dim beta_fast beta_slow original_max_position_embeddings"
        scaling = {name: getattr(mla, name) for name in names.split()}
        out["rope_scaling"] = {
            "type": "yarn",
            "factor": mla.rotary_scaling_factor,
            **{name: value for name, value in scaling.items() if value is not None},
        }
    return out


def _deepseek_v2(model: ModelConfig) -> Json:
    out = {
        **_latent(model),
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "topk_method": "group_limited_greedy",
    }
    if not _experts(model).router_num_groups:
        # greedy routing reads no groups
        del out["n_group"], out["topk_group"]
        out["topk_method"] = "greedy"
    return out


def _deepseek_v3(model: ModelConfig) -> Json:
    return {
        **_latent(model),
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "topk_method": "noaux_tc",
        "rope_interleave": True,
        "num_nextn_predict_layers": model.mtp_num_layers or 0,
    }


def _deepseek_v32(model: ModelConfig) -> Json:
    if model.dsa is None:
        raise ValueError("there is no sparse attention")
    return _deepseek_v3(model)


def _glm4_moe(model: ModelConfig) -> Json:
    return {
        **_partial(model),
        **_experts_after_dense_layers(model),
        "attention_bias": model.add_qkv_bias,
        "use_qk_norm": model.qk_layernorm,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": model.mtp_num_layers or 0,
    }


def _minimax_m2(model: ModelConfig) -> Json:
    moe = _experts(model)
    return {
        **_partial(model),
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.router_topk,
        "intermediate_size": moe.ffn_hidden_size,
    }


def _phi3(model: ModelConfig) -> Json:
    before = model.rope_scaling.original_max_position_embeddings if model.rope_scaling else None
    return {
        **_partial(model),
        **_everywhere(model),
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "original_max_position_embeddings": before or model.max_position_embeddings,
    }


def _olmo2(model: ModelConfig) -> Json:
    return {**_gated(model), "attention_bias": False}


def _gemma(model: ModelConfig) -> Json:
    scale = model.softmax_scale
    # the file has the divisor under the root, in as many digits as survive the way back
    divisor = model.head_dim if scale is None else float(f"{scale**-2:.12g}")
    return {
        **_rope(model),
        "hidden_activation": _word(model, GATED_WORDS),
        "query_pre_attn_scalar": int(divisor) if divisor == int(divisor) else divisor,
        "sliding_window": model.window_size or 4096,
        "layer_types": _kinds(model),
        "attention_bias": False,
        "final_logit_softcapping": model.final_logit_softcapping,
    }


def _gemma2(model: ModelConfig) -> Json:
    return {**_gemma(model), "attn_logit_softcapping": model.attn_logit_softcapping}


def _gemma3(model: ModelConfig) -> Json:
    return {**_gemma(model), "rope_local_base_freq": model.rotary_base_local or 10000.0}


def _nemotron(model: ModelConfig) -> Json:
    return {
        **_rope(model),
        **_biases(model),
        "hidden_act": _word(model, UNGATED_WORDS),
        "partial_rotary_factor": model.rotary_percent,
    }


def _gpt2(model: ModelConfig) -> Json:
    return {
        "attn_pdrop": model.attention_dropout,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "activation_function": _word(model, UNGATED_WORDS),
        "scale_attn_weights": model.softmax_scale is None,
        "n_inner": model.ffn_hidden_size,
        "n_ctx": model.max_position_embeddings,
    }


def _gpt_neox(model: ModelConfig) -> Json:
    return {
        "rotary_emb_base": model.rotary_base,
        "rotary_pct": model.rotary_percent,
        "rope_scaling": _rope(model)["rope_scaling"],
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.hidden_dropout,
        "hidden_act": _word(model, UNGATED_WORDS),
        "use_parallel_residual": model.parallel_residual,
        "attention_bias": model.add_bias_linear,
    }


WRITERS: dict[str, Callable[[ModelConfig], Json]] = {
    "llama": _llama,
    "mistral": _ministral,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "qwen2_moe": _qwen2_moe,
    "qwen3_next": _qwen3_next,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v32": _deepseek_v32,
    "glm4_moe": _glm4_moe,
    "minimax_m2": _minimax_m2,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "nemotron": _nemotron,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
}
"""`model_type` -> the writer of its keys beyond the copied ones."""
