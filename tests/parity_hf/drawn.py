"""Random small configurations of a family, each key at values that its published models have and at
others.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from tests.parity_hf.compare import Case
from tests.parity_hf.families import ROPE

Values = dict[str, Any]


def draw(kind: str, seed: int) -> Case:
    """Return the configuration number `seed` of a `model_type`."""
    r = Random(f"{kind}/{seed}")
    values = FAMILIES[kind](r)
    return Case(kind, values, length=r.choice([33, 40, 47]), seed=seed)


def _sizes(r: Random) -> Values:
    heads = r.choice([2, 4, 6])
    return {
        "vocab_size": r.randint(65, 200),
        "hidden_size": heads * r.choice([8, 12, 16]),
        "num_hidden_layers": r.randint(1, 3),
        "num_attention_heads": heads,
        "intermediate_size": r.choice([40, 56, 97]),
        "max_position_embeddings": 64,
        "tie_word_embeddings": r.random() < 0.4,
    }


def _rarely(r: Random, usual: Any, *others: Any) -> Any:
    return usual if r.random() < 0.92 else r.choice(others)


def _rotary(r: Random, *, width: int, partial: bool = False) -> Values:
    """Return rotary positions of any kind, of heads of `width` channels."""
    base = {"rope_theta": r.choice([500.0, 10000.0, 1e6])}
    if partial:
        base["partial_rotary_factor"] = r.choice([0.25, 0.5, 1.0])
    kind = r.choice(["default"] * 4 + ["llama3", "yarn", "longrope"] * 2 + ["linear", "dynamic"])
    if kind == "default":
        return {**ROPE, **base}
    if kind in ("linear", "dynamic"):
        return {**base, "rope_type": kind, "factor": r.choice([2.0, 4.0])}
    if kind == "longrope":
        return _longrope(r, base, int(width * base.get("partial_rotary_factor", 1.0)) // 2)
    if kind == "llama3":
        shape = r.choice([(1.0, 4.0, 8192), (1.0, 8.0, 8192), (1.0, 4.0, 32), (2.0, 3.0, 16)])
        names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        return {
            **base,
            "rope_type": "llama3",
            "factor": r.choice([2.0, 8.0, 32.0]),
            **dict(zip(names, shape, strict=True)),
        }
    return _yarn(r, base)


def _longrope(r: Random, base: Values, pairs: int) -> Values:
    longrope = {
        **base,
        "rope_type": "longrope",
        "original_max_position_embeddings": r.choice([16, 40, 64]),
    }
    for key in ("short_factor", "long_factor"):
        longrope[key] = sorted(round(r.uniform(1.0, 20.0), 2) for _ in range(pairs))
    if r.random() < 0.5:
        longrope["factor"] = r.choice([1.0, 4.0])
    if r.random() < 0.3:
        longrope["attention_factor"] = r.choice([0.5, 1.2])
    return longrope


def _yarn(r: Random, base: Values) -> Values:
    yarn = {**base, "rope_type": "yarn", "factor": r.choice([2.0, 4.0, 40.0])}
    yarn["original_max_position_embeddings"] = r.choice([16, 32, 4096])
    for key, values in (
        ("mscale", [0.707, 1.0]),
        ("mscale_all_dim", [0.707, 1.0]),
        ("beta_fast", [16.0, 32.0]),
        ("beta_slow", [1.0, 2.0]),
    ):
        if r.random() < 0.7:
            yarn[key] = r.choice(values)
    if r.random() < 0.1:
        yarn["attention_factor"] = r.choice([0.5, 1.0])
    if r.random() < 0.1:
        yarn["truncate"] = False
    return yarn


def _llama(r: Random) -> Values:
    values = _sizes(r)
    heads = values["num_attention_heads"]
    values |= {
        "num_key_value_heads": r.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "rms_norm_eps": r.choice([1e-6, 1e-5, 1e-2]),
        "hidden_act": _rarely(r, "silu", "gelu", "gelu_pytorch_tanh", "relu", "swish"),
    }
    if r.random() < 0.4:
        values["head_dim"] = r.choice([8, 16, 20])
    return {**values, "rope_parameters": _rotary(r, width=_head(values))}


def _head(values: Values) -> int:
    width: int = values.get("head_dim", values["hidden_size"] // values["num_attention_heads"])
    return width


def _biased(r: Random) -> Values:
    biases = _rarely(r, r.choice([(False, False), (True, True)]), (True, False), (False, True))
    return {**_llama(r), "attention_bias": biases[0], "mlp_bias": biases[1]}


def _windowed(r: Random) -> Values:
    return {**_llama(r), "sliding_window": _rarely(r, r.choice([None, 2, 7, 64]), 1)}


def _some_windows(r: Random) -> Values:
    """Return windows in none, all or some of the layers, by number or by name."""
    values = _llama(r)
    layers = values["num_hidden_layers"]
    if r.random() < 0.3:
        values |= {
            "use_sliding_window": True,
            "sliding_window": r.choice([5, 9]),
            "max_window_layers": r.randint(0, layers),
        }
        if r.random() < 0.4:
            values["layer_types"] = [
                r.choice(["full_attention", "sliding_attention"]) for _ in range(layers)
            ]
    elif r.random() < 0.3:
        values["sliding_window"] = 5
    return values


def _qwen3(r: Random) -> Values:
    values = {**_some_windows(r), "attention_bias": _rarely(r, False, True)}
    if "head_dim" in values:
        return values
    return {**values, "head_dim": 16, "rope_parameters": _rotary(r, width=16)}


def _gemma(r: Random) -> Values:
    values = _llama(r)
    values["hidden_activation"] = values.pop("hidden_act")
    layers = values["num_hidden_layers"]
    if r.random() < 0.3:
        values["layer_types"] = [
            r.choice(["full_attention", "sliding_attention"]) for _ in range(layers)
        ]
    width = r.choice([8, 16, 20])
    return {
        **values,
        "head_dim": width,
        "rope_parameters": _rotary(r, width=width),
        "query_pre_attn_scalar": r.choice([8, 16, 100]),
        "sliding_window": r.choice([5, 9, 64]),
        "final_logit_softcapping": r.choice([None, 2.0, 30.0]),
        "attention_bias": _rarely(r, False, True),
    }


def _gemma2(r: Random) -> Values:
    return {**_gemma(r), "attn_logit_softcapping": r.choice([None, 1.0, 50.0])}


def _gemma3(r: Random) -> Values:
    values = _gemma(r)
    local = _rarely(
        r, {**ROPE, "rope_theta": r.choice([500.0, 10000.0])}, _rotary(r, width=values["head_dim"])
    )
    values["rope_parameters"] = {
        "sliding_attention": local,
        "full_attention": values["rope_parameters"],
    }
    if "layer_types" not in values:
        values["sliding_window_pattern"] = r.choice([2, 3, 6])
    return values


def _olmo2(r: Random) -> Values:
    return {**_llama(r), "attention_bias": _rarely(r, False, True)}


def _mixtral(r: Random) -> Values:
    experts = r.choice([4, 5])
    values = {**_windowed(r), "num_local_experts": experts, "num_experts_per_tok": r.randint(1, 3)}
    # transformers makes no yarn of this family without it
    values.setdefault("head_dim", _head(values))
    values["router_aux_loss_coef"] = r.choice([0.0, 0.02, 0.5])
    values["router_jitter_noise"] = _rarely(r, 0.0, 0.01)
    return values


def _qwen3_moe(r: Random) -> Values:
    values = {**_qwen3(r), "num_experts": r.choice([4, 6]), "num_experts_per_tok": r.randint(1, 4)}
    del values["hidden_act"]
    values.pop("layer_types", None)
    values.pop("max_window_layers", None)
    layers = values["num_hidden_layers"]
    values |= {
        "moe_intermediate_size": r.choice([24, 33]),
        "norm_topk_prob": r.random() < 0.5,
        "router_aux_loss_coef": r.choice([0.0, 0.001, 0.5]),
        "decoder_sparse_step": _rarely(r, 1, 2),
        "mlp_only_layers": _rarely(r, [], [0], [layers - 1]),
    }
    return values


def _qwen2_moe(r: Random) -> Values:
    values = {
        **_qwen3_moe(r),
        "shared_expert_intermediate_size": r.choice([24, 40]),
        "qkv_bias": _rarely(r, True, False),
    }
    for key in ("attention_bias", "head_dim"):
        del values[key]
    return {**values, "rope_parameters": _rotary(r, width=_head(values))}


def _qwen3_next(r: Random) -> Values:
    values = _qwen3_moe(r)
    keys = r.choice([1, 2, 3])
    every = r.choice([2, 3, 4])
    # transformers writes no text without a layer of attention
    values["num_hidden_layers"] = max(values["num_hidden_layers"], every)
    for key in ("sliding_window", "use_sliding_window"):
        values.pop(key, None)
    values |= {
        "shared_expert_intermediate_size": r.choice([24, 40]),
        "head_dim": 16,
        "rope_parameters": _rotary(r, width=16, partial=True),
        "full_attention_interval": every,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * r.choice([1, 2, 3]),
        "linear_key_head_dim": r.choice([8, 20]),
        "linear_value_head_dim": r.choice([8, 12]),
        "linear_conv_kernel_dim": r.choice([1, 2, 4]),
    }
    return values


def _gpt_oss(r: Random) -> Values:
    values = {
        **_llama(r),
        "num_local_experts": r.choice([4, 5]),
        "num_experts_per_tok": r.randint(2, 3),
    }
    del values["hidden_act"]
    layers = values["num_hidden_layers"]
    if r.random() < 0.3:
        values["layer_types"] = [
            r.choice(["full_attention", "sliding_attention"]) for _ in range(layers)
        ]
    return {
        **values,
        "head_dim": 16,
        "rope_parameters": r.choice([None, _rotary(r, width=16)]),
        "router_aux_loss_coef": r.choice([0.0, 0.001, 0.5]),
        "sliding_window": r.choice([5, 9]),
        "swiglu_limit": r.choice([3.0, 7.0]),
        "swiglu_alpha": _rarely(r, 1.702, 1.0),
        "attention_bias": _rarely(r, True, False),
    }


def _minimax(r: Random) -> Values:
    values = {**_llama(r), "head_dim": r.choice([8, 16, 24]), "num_local_experts": r.choice([4, 5])}
    values |= {
        "num_experts_per_tok": _rarely(r, r.randint(2, 3), 1),
        "router_jitter_noise": _rarely(r, 0.0, 0.01),
        "rope_parameters": _rotary(r, width=values["head_dim"], partial=True),
    }
    if r.random() < 0.4:
        values["rope_parameters"] = {**ROPE}
        values["rotary_dim"] = values["head_dim"] // 2
    return values


def _latent(r: Random) -> Values:
    values = _sizes(r)
    layers = values["num_hidden_layers"]
    heads = values["num_attention_heads"]
    groups = r.choice([1, 2, 4])
    members = r.choice([2, 3])
    chosen = r.randint(1, groups)
    base = {"rope_theta": r.choice([500.0, 10000.0])}
    return {
        **values,
        "num_key_value_heads": heads,
        "rms_norm_eps": _rarely(r, 1e-6, 1e-2),
        "q_lora_rank": r.choice([None, 20]),
        "kv_lora_rank": r.choice([16, 28]),
        "qk_nope_head_dim": r.choice([8, 12]),
        "qk_rope_head_dim": r.choice([4, 8]),
        "v_head_dim": r.choice([8, 12]),
        "first_k_dense_replace": r.randint(0, layers - 1),
        "n_routed_experts": groups * members,
        "n_shared_experts": r.randint(1, 2),
        "moe_intermediate_size": r.choice([24, 33]),
        "n_group": groups,
        "topk_group": chosen,
        "num_experts_per_tok": _rarely(r, r.randint(max(2, chosen), chosen * members), 1),
        "routed_scaling_factor": r.choice([1.0, 2.5, 16.0]),
        "attention_bias": _rarely(r, False, True),
        "rope_parameters": {**ROPE, **base} if r.random() < 0.4 else _yarn(r, base),
        "aux_loss_alpha": 0.0,
    }


def _deepseek_v3(r: Random) -> Values:
    values = {
        **_latent(r),
        "norm_topk_prob": _rarely(r, True, False),
        "num_nextn_predict_layers": 0,
    }
    values["rope_interleave"] = _rarely(r, True, False)
    return values


def _deepseek_v32(r: Random) -> Values:
    values = {**_latent(r), "index_n_heads": r.choice([3, 6]), "index_head_dim": r.choice([16, 24])}
    return {**values, "q_lora_rank": r.choice([16, 24]), "index_topk": r.choice([3, 7, 64])}


def _deepseek_v2(r: Random) -> Values:
    values = {
        **_latent(r),
        "topk_method": r.choice(["greedy", "group_limited_greedy"]),
        "norm_topk_prob": False,
    }
    values["mlp_bias"] = _rarely(r, False, True)
    if values["topk_method"] == "greedy":
        values["num_experts_per_tok"] = min(
            values["num_experts_per_tok"], values["n_routed_experts"]
        )
    return values


def _phi3(r: Random) -> Values:
    values = {**_windowed(r), "pad_token_id": None, "resid_pdrop": _rarely(r, 0.0, 0.1)}
    values.pop("head_dim", None)
    width = _head(values)
    rope = {"rope_theta": r.choice([500.0, 10000.0]), "partial_rotary_factor": r.choice([0.5, 1.0])}
    if r.random() < 0.5:
        return {**values, "rope_parameters": {**ROPE, **rope}}
    longrope = _longrope(r, rope, int(width * rope["partial_rotary_factor"]) // 2)
    values["original_max_position_embeddings"] = longrope["original_max_position_embeddings"]
    return {**values, "rope_parameters": longrope}


def _glm4_moe(r: Random) -> Values:
    values = {**_llama(r), "head_dim": r.choice([8, 16])}
    groups = r.choice([1, 2, 4])
    members = r.choice([2, 3])
    chosen = r.randint(1, groups)
    return {
        **values,
        "rope_parameters": _rotary(r, width=values["head_dim"], partial=True),
        "attention_bias": r.random() < 0.7,
        "use_qk_norm": r.random() < 0.5,
        "first_k_dense_replace": r.randint(0, values["num_hidden_layers"] - 1),
        "n_routed_experts": groups * members,
        "n_shared_experts": r.randint(1, 2),
        "moe_intermediate_size": r.choice([24, 33]),
        "n_group": groups,
        "topk_group": chosen,
        "num_experts_per_tok": _rarely(r, r.randint(max(2, chosen), chosen * members), 1),
        "routed_scaling_factor": r.choice([1.0, 2.5]),
        "norm_topk_prob": _rarely(r, True, False),
        "num_nextn_predict_layers": 0,
        "aux_loss_alpha": 0.0,
    }


def _gpt2(r: Random) -> Values:
    s = _sizes(r)
    names = {
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
    }
    values = {key: s[name] for key, name in names.items()} | {
        "vocab_size": s["vocab_size"],
        "n_positions": 64,
    }
    return {
        **values,
        **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
        "n_inner": r.choice([None, 40]),
        "tie_word_embeddings": s["tie_word_embeddings"],
        "activation_function": _rarely(
            r, r.choice(["gelu_new", "gelu", "gelu_pytorch_tanh"]), "relu", "silu", "gelu_fast"
        ),
        "layer_norm_epsilon": r.choice([1e-5, 1e-2]),
        "scale_attn_weights": _rarely(r, True, False),
        "scale_attn_by_inverse_layer_idx": _rarely(r, False, True),
        "reorder_and_upcast_attn": _rarely(r, False, True),
    }


def _gpt_neox(r: Random) -> Values:
    sizes = _sizes(r)
    return {
        **sizes,
        "rope_parameters": _rotary(r, width=_head(sizes), partial=True),
        "hidden_act": _rarely(r, r.choice(["gelu", "gelu_new"]), "relu", "gelu_fast"),
        "layer_norm_eps": r.choice([1e-5, 1e-2]),
        "use_parallel_residual": r.random() < 0.6,
        "attention_bias": _rarely(r, True, False),
    }


def _nemotron(r: Random) -> Values:
    values = _biased(r)
    del values["rms_norm_eps"]
    return {
        **values,
        "norm_eps": r.choice([1e-5, 1e-2]),
        "hidden_act": _rarely(r, r.choice(["relu2", "relu2", "gelu", "gelu_new"]), "silu", "relu"),
        "rope_parameters": _rotary(r, width=_head(values), partial=True),
    }


FAMILIES: dict[str, Callable[[Random], Values]] = {
    "llama": _biased,
    "mistral": _windowed,
    "mixtral": _mixtral,
    "qwen2": _some_windows,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "qwen2_moe": _qwen2_moe,
    "qwen3_next": _qwen3_next,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "olmo2": _olmo2,
    "minimax_m2": _minimax,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v32": _deepseek_v32,
    "phi3": _phi3,
    "glm4_moe": _glm4_moe,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "nemotron": _nemotron,
}
