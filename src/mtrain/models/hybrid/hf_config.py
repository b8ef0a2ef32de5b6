"""The `config.json` of Mamba-2 and of Nemotron-H: what it means, and what it says of
one of ours.
"""

from __future__ import annotations

import math
from typing import Any

from mtrain.config.schema.model import ModelConfig
from mtrain.models.hybrid.config import ATTENTION, EXPERTS, MAMBA, MLP, HybridConfig
from mtrain.recipes.huggingface.config_file import ConfigFile, Family, Json, Kind
from mtrain.recipes.huggingface.families import COMMON

POSITIONS = 2048
"""Tokens of a sample that Mamba-2 was trained with; its file names none, and it has no positions.
"""
NO_BOUND = (math.inf, {"__float__": "Infinity"})
"""Spellings of infinity in a file: JSON has no word for it, and transformers 5 writes the latter.
"""
WORDS = {
    "linear_attention": MAMBA,
    "mamba": MAMBA,
    "full_attention": ATTENTION,
    "attention": ATTENTION,
    "mlp": MLP,
    "moe": EXPERTS,
}
"""Kind of a layer in files of transformers 5, and before -> its letter."""
BASE = {
    "model.family": "hybrid",
    "model.normalization": "RMSNorm",
    "model.position_embedding_type": "none",
    "model.add_bias_linear": False,
}
_SIZES = {
    "hidden_size": "model.hidden_size",
    "vocab_size": "model.vocab_size",
    "tie_word_embeddings": "model.tie_word_embeddings",
    "initializer_range": "model.init_method_std",
    "layer_norm_epsilon": "model.layernorm_epsilon",
    "n_groups": "model.hybrid.num_groups",
    "conv_kernel": "model.hybrid.conv_kernel",
    "chunk_size": "model.hybrid.chunk_size",
}
_INITIAL = "says how weights begin"
OF_BOTH = {
    "time_step_max": _INITIAL,
    "time_step_floor": _INITIAL,
    "rescale_prenorm_residual": _INITIAL,
    "residual_in_fp32": "says the format of the residual stream, which is the run's",
    "use_mamba_kernels": "chooses among implementations of the same mathematics",
    "mamba_ssm_cache_dtype": "is read when text is generated",
    "num_logits_to_keep": "is read when text is generated",
}


def _no_biases(f: ConfigFile, *keys: str) -> None:
    for key in keys:
        f.must(key, (False,), "changes the numbers: linear layers of hybrids have no biases here")
    f.must("use_conv_bias", (True,), "changes the numbers: the convolution of a mixer has a bias")


def _mamba2(f: ConfigFile) -> None:
    layers = f.layers
    heads = f.number("num_heads")
    width = int(f.number("expand") * f.number("hidden_size"))
    limits = f.get("time_step_limit")
    f.out |= {
        "model.num_layers": layers,
        "model.hybrid.pattern": MAMBA * layers,
        "model.hybrid.num_heads": heads,
        # No layer has attention, but every model has a number of heads.
        "model.num_attention_heads": f.get("num_attention_heads", heads),
        "model.ffn_hidden_size": f.get("intermediate_size", width),
        "model.max_position_embeddings": f.get("max_position_embeddings", POSITIONS),
        "model.hybrid.time_step_min": float(limits[0]),
    }
    if len(limits) != 2 or limits[1] not in NO_BOUND:
        f.refuse(
            "time_step_limit",
            "not supported",
            "changes the numbers: time steps have only a lower bound",
        )
    if width != heads * f.number("head_dim"):
        f.refuse(
            "expand", "not supported", "changes the numbers: the heads have another width in all"
        )
    f.must(
        "hidden_act",
        ("silu", "swish"),
        "changes the numbers: the convolution of a mixer ends with a SiLU",
    )
    _no_biases(f, "use_bias")


MAMBA2_READS = Family(
    {
        **_SIZES,
        "head_dim": "model.hybrid.head_dim",
        "state_size": "model.hybrid.state_dim",
    },
    {**BASE, "model.activation": "squared_relu"},
    {
        "num_heads": 128,
        "head_dim": 64,
        "vocab_size": 32768,
        "hidden_size": 4096,
        "state_size": 128,
        "num_hidden_layers": 64,
        "layer_norm_epsilon": 1e-5,
        "expand": 2,
        "conv_kernel": 4,
        "n_groups": 8,
        "use_bias": False,
        "use_conv_bias": True,
        "hidden_act": "silu",
        "initializer_range": 0.1,
        "time_step_limit": [0.0, math.inf],
        "chunk_size": 256,
        "tie_word_embeddings": False,
    },
    (_mamba2,),
    irrelevant={
        **OF_BOTH,
        "time_step_rank": "is read by no layer of this family",
        "time_step_min": _INITIAL,
    },
)


def _pattern(f: ConfigFile) -> str:
    """Return the letters of all layers, from either spelling."""
    said = f.get("hybrid_override_pattern")
    listed = f.get("layers_block_type")
    f.read.add("num_hidden_layers")
    if isinstance(listed, list):
        unknown = [word for word in listed if word not in WORDS]
        if unknown:
            f.refuse(
                "layers_block_type",
                "not supported",
                f"changes the numbers: there is no layer {unknown[0]}",
            )
        return "".join(WORDS.get(word, MLP) for word in listed)
    # A file that names no layers has transformers' own default.
    return said if isinstance(said, str) else f"{MAMBA}{EXPERTS}{ATTENTION}{MLP}"


def _nemotron(f: ConfigFile) -> None:
    pattern = _pattern(f)
    f.out |= {"model.hybrid.pattern": pattern, "model.num_layers": len(pattern)}
    f.out["model.hybrid.time_step_min"] = float(f.get("time_step_min"))
    f.must(
        "mlp_hidden_act",
        ("relu2",),
        "changes the numbers: MLPs of Nemotron-H have the square of a ReLU",
    )
    f.must(
        "mamba_hidden_act",
        ("silu", "swish"),
        "changes the numbers: the convolution of a mixer ends with a SiLU",
    )
    f.must(
        "tie_word_embeddings",
        (False,),
        "has no effect on this family, whose output layer is its own",
    )
    _no_biases(f, "use_bias", "mlp_bias")
    text = "is read by no layer of this family"
    f.idle(
        (
            "attention_bias",
            "sliding_window",
            "hidden_dropout",
            "mamba_proj_bias",
            "expand",
            "time_step_limit",
        ),
        text,
    )
    f.idle(
        ("mtp_layers_block_type", "mtp_hybrid_override_pattern", "num_nextn_predict_layers"),
        "is not built there",
    )
    _nemotron_experts(f, EXPERTS in pattern)


_EXPERTS = [
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "norm_topk_prob",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
    "moe_latent_size",
    "n_shared_experts",
]


def _nemotron_experts(f: ConfigFile, has: bool) -> None:
    f.read |= set(_EXPERTS)
    if not has:
        return
    many = f.get("n_group") > 1
    f.out |= {
        "model.moe.num_experts": f.get("n_routed_experts"),
        "model.moe.router_topk": f.get("num_experts_per_tok"),
        "model.moe.ffn_hidden_size": f.get("moe_intermediate_size"),
        "model.moe.shared_expert_intermediate_size": f.get("moe_shared_expert_intermediate_size"),
        "model.moe.router_topk_scaling_factor": float(f.get("routed_scaling_factor")),
        "model.moe.router_score_function": "sigmoid",
        "model.moe.router_enable_expert_bias": True,
        "model.moe.router_load_balancing_type": "none",
        "model.moe.aux_loss_coeff": 0.0,
        "model.moe.router_num_groups": f.get("n_group") if many else None,
        "model.moe.router_group_topk": f.get("topk_group") if many else None,
        "model.moe.router_group_score_topk": 2 if many else None,
    }
    f.must(
        "norm_topk_prob",
        (True,),
        "changes the numbers: chosen scores of this family are normalised",
    )
    f.must(
        "n_shared_experts",
        (1,),
        "has no effect: moe_shared_expert_intermediate_size is the width of all of them",
    )
    if not many:
        f.must("topk_group", (1,), "has no effect where experts are one group")
    f.must("moe_latent_size", (None,), "changes the numbers: experts read the residual stream")
    if f.get("num_experts_per_tok") == 1:
        text = (
            "changes the numbers: the score of one chosen expert is 1 there, and what the router"
            " says here"
        )
        f.refuse("num_experts_per_tok", "not supported", text)


NEMOTRON_READS = Family(
    {
        **{theirs: ours for theirs, ours in COMMON.items() if theirs != "num_hidden_layers"},
        **_SIZES,
        "num_key_value_heads": "model.num_query_groups",
        "head_dim": "model.kv_channels",
        "mamba_num_heads": "model.hybrid.num_heads",
        "mamba_head_dim": "model.hybrid.head_dim",
        "ssm_state_size": "model.hybrid.state_dim",
    },
    {**BASE, "model.activation": "squared_relu"},
    {
        "vocab_size": 131072,
        "hidden_size": 4096,
        "tie_word_embeddings": False,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "attention_dropout": 0.0,
        "intermediate_size": 21504,
        "mlp_hidden_act": "relu2",
        "mlp_bias": False,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "mamba_hidden_act": "silu",
        "n_groups": 8,
        "conv_kernel": 4,
        "time_step_min": 0.001,
        "use_conv_bias": True,
        "chunk_size": 128,
        "n_routed_experts": 8,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "use_bias": False,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5,
    },
    (_nemotron,),
    {
        "layer_types": "layers_block_type",
        "attention_head_dim": "head_dim",
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_dt_min": "time_step_min",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_chunk_size": "chunk_size",
        "num_local_experts": "n_routed_experts",
    },
    irrelevant={**OF_BOTH, "moe_shared_expert_overlap": "says when shared experts are computed"},
)


def own(m: ModelConfig) -> HybridConfig:
    """Return the section of a hybrid without positions. Raises `ValueError` for another model."""
    if m.hybrid is None or m.position_embedding_type != "none":
        raise ValueError("it is no hybrid without positions")
    return m.hybrid


def _writes_mamba2(m: ModelConfig) -> Json:
    h = own(m)
    expand, rest = divmod(h.num_heads * h.head_dim, m.hidden_size)
    if set(h.pattern) != {MAMBA} or rest:
        raise ValueError(
            "it has other layers than Mamba-2, or heads that are no multiple of hidden_size"
        )
    # Mamba-2's files lack these keys, so they are written only where a reader would take others.
    more: dict[str, Any] = {
        "num_attention_heads": (m.num_attention_heads, h.num_heads),
        "intermediate_size": (m.ffn_hidden_size, expand * m.hidden_size),
        "max_position_embeddings": (m.max_position_embeddings, POSITIONS),
    }
    return {
        "num_hidden_layers": m.num_layers,
        "num_heads": h.num_heads,
        "head_dim": h.head_dim,
        "expand": expand,
        "time_step_limit": [h.time_step_min, NO_BOUND[1]],
        "use_bias": False,
        "use_conv_bias": True,
        "hidden_act": "silu",
        **{key: here for key, (here, usual) in more.items() if here != usual},
    }


def _writes_nemotron(m: ModelConfig) -> Json:
    h = own(m)
    moe = m.moe
    experts: Json = {}
    if moe is not None:
        experts = {
            "n_routed_experts": moe.num_experts,
            "num_experts_per_tok": moe.router_topk,
            "moe_intermediate_size": moe.ffn_hidden_size,
            "moe_shared_expert_intermediate_size": moe.shared_expert_intermediate_size,
            "routed_scaling_factor": moe.router_topk_scaling_factor or 1.0,
            "n_group": moe.router_num_groups or 1,
            "topk_group": moe.router_group_topk or 1,
            "norm_topk_prob": True,
        }
    return {
        "hybrid_override_pattern": h.pattern,
        "num_hidden_layers": m.num_layers,
        "time_step_min": h.time_step_min,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "use_bias": False,
        "mlp_bias": False,
        "use_conv_bias": True,
        **experts,
    }


KINDS = {
    "mamba2": Kind(MAMBA2_READS, _writes_mamba2, lambda model: "Mamba2ForCausalLM"),
    "nemotron_h": Kind(NEMOTRON_READS, _writes_nemotron, lambda model: "NemotronHForCausalLM"),
}
