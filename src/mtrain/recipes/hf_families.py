"""What the keys of a Hugging Face `config.json` mean, family by family."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtrain.recipes.arguments import Draft, Unplaced, Why

Json = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """How the configurations of one `model_type` are read."""

    keys: Mapping[str, str]
    """Their key -> ours, copied."""
    fixed: Mapping[str, Any]
    """Our keys that hold for the whole family."""
    absent: Mapping[str, Any] = field(default_factory=dict)
    """What leaving out a key means: the family's default."""
    more: tuple[Callable[[ConfigFile], None], ...] = ()
    """Readers of what is more than a copy."""


class ConfigFile:
    """A configuration file while it is read."""

    def __init__(self, values: Json, family: Family) -> None:
        self.values = {**family.absent, **values}
        self.out: Draft = {}
        self.read = {"model_type"}
        self.unplaced: list[Unplaced] = []

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, which is thereby read."""
        self.read.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def refuse(self, key: str, why: Why, text: str) -> None:
        """Notes that a key could not be taken over."""
        self.read.add(key)
        shown = json.dumps(self.values.get(key))
        self.unplaced.append(Unplaced(key, shown if len(shown) <= 60 else shown[:57] + "...", why, text))

    def must(self, key: str, allowed: Sequence[Any], text: str) -> None:
        """Notes a value that means something that is not there here."""
        if key in self.values and self.values[key] not in allowed:
            self.refuse(key, "not supported", text)
        self.read.add(key)


COMMON = {
    "num_hidden_layers": "model.num_layers",
    "hidden_size": "model.hidden_size",
    "intermediate_size": "model.ffn_hidden_size",
    "num_attention_heads": "model.num_attention_heads",
    "vocab_size": "model.vocab_size",
    "max_position_embeddings": "model.max_position_embeddings",
    "tie_word_embeddings": "model.tie_word_embeddings",
    "initializer_range": "model.init_method_std",
    "attention_dropout": "model.attention_dropout",
}
LLAMA = {
    **COMMON,
    "num_key_value_heads": "model.num_query_groups",
    "head_dim": "model.kv_channels",
    "rms_norm_eps": "model.layernorm_epsilon",
}
GATED = {
    "model.normalization": "RMSNorm",
    "model.activation": "swiglu",
    "model.position_embedding_type": "rope",
    "model.add_bias_linear": False,
}


def _rotary(f: ConfigFile) -> None:
    """Base and scaling, in the old keys or inside `rope_parameters`."""
    nested = f.get("rope_parameters", {})
    scaling = nested if isinstance(nested, dict) and nested else f.get("rope_scaling", {})
    inner = scaling if isinstance(scaling, dict) else {}
    base = f.get("rope_theta", inner.get("rope_theta", 10000.0))
    f.out["model.rotary_base"] = float(base)
    kind = inner.get("rope_type", inner.get("type", "default"))
    if kind == "default":
        return
    usual = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    same = all(inner.get(key, value) == value for key, value in usual.items())
    if kind == "llama3" and same:
        f.out["model.rope_scaling_factor"] = float(inner.get("factor", 8.0))
    elif kind == "yarn" and "model.mla.kv_lora_rank" in f.out:
        _yarn(f, inner)
    else:
        key = "rope_parameters" if scaling is nested else "rope_scaling"
        f.refuse(key, "not supported", f"changes the numbers: rotary positions of kind {kind} with such numbers")


def _yarn(f: ConfigFile, inner: Json) -> None:
    f.out["model.mla.rope_type"] = "yarn"
    for theirs, ours, usual in (
        ("factor", "rotary_scaling_factor", 40.0),
        ("mscale", "mscale", 1.0),
        ("mscale_all_dim", "mscale_all_dim", 0.0),
    ):
        f.out[f"model.mla.{ours}"] = float(inner.get(theirs, usual))
    length = inner.get("original_max_position_embeddings", 4096)
    f.out["model.mla.original_max_position_embeddings"] = length
    if inner.get("beta_fast", 32) != 32 or inner.get("beta_slow", 1) != 1:
        f.refuse("rope_scaling", "not supported", "changes the numbers: beta_fast 32 and beta_slow 1 are built in")


GELU = {
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate", "gelu_python_tanh"), "gelu_tanh"),
}
"""Their activation functions that are a gelu -> ours: exact, or the tanh approximation."""


def _gelu(f: ConfigFile, key: str) -> None:
    kind = f.get(key)
    f.out["model.activation"] = GELU.get(kind, "gelu") if isinstance(kind, str) else "gelu"
    f.must(key, tuple(GELU), "changes the numbers: an ungated activation is gelu or gelu_tanh here")


def _silu(f: ConfigFile) -> None:
    f.must("hidden_act", ("silu", "swish"), "changes the numbers: the gate of this family is silu here")


def _biases(f: ConfigFile) -> None:
    if f.get("attention_bias", False) and f.get("mlp_bias", False):
        f.out["model.add_bias_linear"] = True
        return
    f.must("attention_bias", (False,), "changes the numbers: biases in all linear layers or in query, key, value")
    f.must("mlp_bias", (False,), "changes the numbers: biases in all linear layers or in none")


def _window(f: ConfigFile) -> None:
    width = f.get("sliding_window")
    if width is not None and f.get("use_sliding_window", True):
        f.out["model.window_size"] = width
    f.read |= {"use_sliding_window", "max_window_layers", "layer_types"}


def _no_window(f: ConfigFile) -> None:
    f.must("use_sliding_window", (False,), "changes the numbers: windows in some of the layers")
    f.read |= {"sliding_window", "max_window_layers", "layer_types"}


def _balancing(f: ConfigFile, topk: int) -> float:
    """Their coefficient of the balancing loss as ours, which `model.moe.aux_loss_coeff` defines, to six digits."""
    theirs = float(f.get("router_aux_loss_coef", 0.001))
    layers = f.get("num_hidden_layers", 1)
    ours = float(f"{theirs * topk / layers:.6g}")
    if theirs:
        text = f"is {ours!r} here: their loss averages {layers} layers and counts {topk} choices, ours adds layers up"
        f.refuse("router_aux_loss_coef", "derived here", text)
    return ours


def _mixtral(f: ConfigFile) -> None:
    f.out |= {
        "model.moe.num_experts": f.get("num_local_experts", 8),
        "model.moe.router_topk": f.get("num_experts_per_tok", 2),
        "model.moe.ffn_hidden_size": f.get("intermediate_size"),
        "model.moe.aux_loss_coeff": _balancing(f, f.get("num_experts_per_tok", 2)),
    }
    f.must("router_jitter_noise", (0, 0.0), "changes the numbers: routers have no noise")
    f.read |= {"output_router_logits"}


def _qwen_experts(f: ConfigFile) -> None:
    f.out |= {
        "model.moe.num_experts": f.get("num_experts", 128),
        "model.moe.router_topk": f.get("num_experts_per_tok", 8),
        "model.moe.ffn_hidden_size": f.get("moe_intermediate_size", 768),
        "model.moe.aux_loss_coeff": _balancing(f, f.get("num_experts_per_tok", 8)),
        "model.moe.router_pre_softmax": not f.get("norm_topk_prob", False),
    }
    f.must("decoder_sparse_step", (1,), "changes the numbers: every layer has experts")
    f.must("mlp_only_layers", ([],), "changes the numbers: every layer has experts")
    f.read |= {"output_router_logits"}


def _deepseek(f: ConfigFile) -> None:
    width = f.get("moe_intermediate_size", 2048)
    f.out |= {
        "model.num_query_groups": None,
        "model.mla.q_lora_rank": f.get("q_lora_rank"),
        "model.mla.kv_lora_rank": f.get("kv_lora_rank", 512),
        "model.mla.qk_head_dim": f.get("qk_nope_head_dim", 128),
        "model.mla.qk_pos_emb_head_dim": f.get("qk_rope_head_dim", 64),
        "model.mla.v_head_dim": f.get("v_head_dim", 128),
        "model.moe.num_experts": f.get("n_routed_experts", 256),
        "model.moe.router_topk": f.get("num_experts_per_tok", 8),
        "model.moe.ffn_hidden_size": width,
        "model.moe.shared_expert_intermediate_size": (f.get("n_shared_experts", 1) * width) or None,
        "model.moe.first_dense_layers": f.get("first_k_dense_replace", 3),
        "model.moe.router_score_function": f.get("scoring_func", "sigmoid"),
        "model.moe.router_enable_expert_bias": f.get("topk_method", "noaux_tc") == "noaux_tc",
        "model.moe.router_num_groups": f.get("n_group"),
        "model.moe.router_group_topk": f.get("topk_group"),
        "model.moe.router_topk_scaling_factor": float(f.get("routed_scaling_factor", 2.5)),
        "model.moe.router_load_balancing_type": "seq_aux_loss" if f.get("seq_aux", True) else "aux_loss",
        "model.moe.aux_loss_coeff": float(f.get("aux_loss_alpha", 0.0001)),
        "model.mtp_num_layers": f.get("num_nextn_predict_layers", 0) or None,
    }
    f.read |= {"num_key_value_heads", "head_dim", "qk_head_dim"}
    f.must("norm_topk_prob", (True,), "changes the numbers: chosen scores are normalised")
    f.must("moe_layer_freq", (1,), "changes the numbers: every layer behind the dense ones has experts")
    f.must("ep_size", (1,), "a layout is parallel.ep")
    f.must("attention_bias", (False,), "changes the numbers: latent attention has no biases here")


def _gpt2(f: ConfigFile) -> None:
    f.out["model.ffn_hidden_size"] = f.get("n_inner", 4 * f.get("n_embd", 768))
    _gelu(f, "activation_function")
    drops = {key: f.get(key, 0.1) for key in ("attn_pdrop", "resid_pdrop", "embd_pdrop")}
    f.out |= {
        "model.attention_dropout": float(drops["attn_pdrop"]),
        "model.hidden_dropout": float(drops["resid_pdrop"]),
    }
    if drops["embd_pdrop"] != drops["resid_pdrop"]:
        f.refuse("embd_pdrop", "not supported", "changes the numbers: one rate for embeddings and residuals")
    f.must("scale_attn_by_inverse_layer_idx", (False,), "changes the numbers: scores are not scaled by the layer")
    f.must("reorder_and_upcast_attn", (False,), "changes rounding only")
    f.read |= {"n_ctx", "scale_attn_weights", "summary_type", "summary_use_proj", "summary_activation"}
    f.read |= {"summary_first_dropout", "summary_proj_to_labels", "task_specific_params"}


def _neox(f: ConfigFile) -> None:
    _gelu(f, "hidden_act")
    f.must(
        "use_parallel_residual", (False,), "changes the numbers: attention and MLP stand one behind the other here"
    )
    f.out["model.rotary_percent"] = float(f.get("rotary_pct", f.get("partial_rotary_factor", 0.25)))
    f.out["model.rotary_base"] = float(f.get("rotary_emb_base", f.get("rope_theta", 10000.0)))
    f.out["model.hidden_dropout"] = float(f.get("hidden_dropout", 0.0))
    f.must("attention_bias", (True,), "changes the numbers: biases in all linear layers or in none")


FAMILIES: dict[str, Family] = {
    "llama": Family(
        LLAMA,
        GATED,
        {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
        (_silu, _biases, _rotary),
    ),
    "mistral": Family(
        LLAMA,
        GATED,
        {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "sliding_window": 4096, "num_key_value_heads": 8},
        (_silu, _window, _rotary),
    ),
    "qwen2": Family(
        LLAMA,
        {**GATED, "model.add_qkv_bias": True},
        {"tie_word_embeddings": False, "rms_norm_eps": 1e-6},
        (_silu, _no_window, _rotary),
    ),
    "qwen3": Family(
        LLAMA,
        {**GATED, "model.qk_layernorm": True},
        {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "head_dim": 128},
        (_silu, _biases, _no_window, _rotary),
    ),
    "qwen3_moe": Family(
        LLAMA,
        {**GATED, "model.qk_layernorm": True},
        {"tie_word_embeddings": False, "rms_norm_eps": 1e-6},
        (_silu, _biases, _no_window, _rotary, _qwen_experts),
    ),
    "mixtral": Family(
        LLAMA,
        GATED,
        {"tie_word_embeddings": False, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8},
        (_silu, _window, _rotary, _mixtral),
    ),
    "deepseek_v3": Family(
        {**COMMON, "rms_norm_eps": "model.layernorm_epsilon"},
        {**GATED, "model.qk_layernorm": True},
        {"tie_word_embeddings": False, "rms_norm_eps": 1e-6},
        (_silu, _deepseek, _rotary),
    ),
    "gpt2": Family(
        {
            "n_layer": "model.num_layers",
            "n_embd": "model.hidden_size",
            "n_head": "model.num_attention_heads",
            "vocab_size": "model.vocab_size",
            "n_positions": "model.max_position_embeddings",
            "layer_norm_epsilon": "model.layernorm_epsilon",
            "initializer_range": "model.init_method_std",
            "tie_word_embeddings": "model.tie_word_embeddings",
        },
        {
            "model.normalization": "LayerNorm",
            "model.position_embedding_type": "learned_absolute",
            "model.add_bias_linear": True,
        },
        {"tie_word_embeddings": True, "activation_function": "gelu_new", "vocab_size": 50257, "n_positions": 1024},
        (_gpt2,),
    ),
    "gpt_neox": Family(
        {**COMMON, "layer_norm_eps": "model.layernorm_epsilon"},
        {
            "model.normalization": "LayerNorm",
            "model.position_embedding_type": "rope",
            "model.add_bias_linear": True,
        },
        {"tie_word_embeddings": False, "use_parallel_residual": True, "hidden_act": "gelu"},
        (_neox,),
    ),
}

_SILENT = """
    architectures transformers_version use_cache bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id
    decoder_start_token_id _name_or_path name_or_path return_dict output_hidden_states output_attentions
    pretraining_tp is_encoder_decoder is_decoder add_cross_attention id2label label2id num_labels problem_type
    use_return_dict rope_interleave initializer_factor classifier_dropout
"""
IGNORED = frozenset(_SILENT.split())
"""Keys that say nothing of the network or of training it."""
