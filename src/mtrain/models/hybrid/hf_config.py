"""Reader and writer of the `config.json` of Mamba-2 and Nemotron-H."""

from __future__ import annotations

import math
from typing import Any

from mtrain.config.schema.model import ModelConfig
from mtrain.models.hybrid.config import ATTENTION, EXPERTS, MAMBA, MLP, HybridConfig
from mtrain.recipes.huggingface.config_file import ConfigFile, Family, Json, Kind, tables_of
from mtrain.recipes.huggingface.families import COMMON

POSITIONS = 2048
"""Tokens of Mamba-2's samples in training; its file names none, and it has no positions."""
NO_BOUND = (math.inf, {"__float__": "Infinity"})
"""Spellings of infinity in a file: JSON has no word, and transformers 5 writes the latter."""
WORDS = {
    "linear_attention": MAMBA,
    "mamba": MAMBA,
    "full_attention": ATTENTION,
    "attention": ATTENTION,
    "mlp": MLP,
    "moe": EXPERTS,
}
"""Kind of a layer in files of transformers 5, and before -> its letter."""
TABLES = tables_of(__file__)


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
        f.differs("time_step_limit", "time steps have only a lower bound")
    if width != heads * f.number("head_dim"):
        f.differs("expand", "the heads have another width in all")


MAMBA2_READS = Family.of(TABLES["every"], TABLES["sizes"], TABLES["mamba2"], more=(_mamba2,))


def _pattern(f: ConfigFile) -> str:
    """Return the letters of all layers, from either spelling."""
    said = f.get("hybrid_override_pattern")
    listed = f.get("layers_block_type")
    f.read.add("num_hidden_layers")
    if isinstance(listed, list):
        unknown = [word for word in listed if word not in WORDS]
        if unknown:
            f.differs("layers_block_type", f"there is no layer {unknown[0]}")
        return "".join(WORDS.get(word, MLP) for word in listed)
    # A file that names no layers has transformers' own default.
    return said if isinstance(said, str) else f"{MAMBA}{EXPERTS}{ATTENTION}{MLP}"


def _nemotron(f: ConfigFile) -> None:
    pattern = _pattern(f)
    f.out |= {"model.hybrid.pattern": pattern, "model.num_layers": len(pattern)}
    f.out["model.hybrid.time_step_min"] = float(f.get("time_step_min"))
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
    for key, (allowed, text) in TABLES["nemotron_experts"]["must"].items():
        f.must(key, allowed, text)
    if not many:
        f.must("topk_group", (1,), "has no effect where experts are one group")
    if f.get("num_experts_per_tok") == 1:
        text = (
            "changes the numbers: the score of one chosen expert is 1 there, and what the router"
            " says here"
        )
        f.refuse("num_experts_per_tok", "not supported", text)


_COPIED = {theirs: ours for theirs, ours in COMMON.items() if theirs != "num_hidden_layers"}
NEMOTRON_READS = Family.of(
    {"keys": _COPIED}, TABLES["every"], TABLES["sizes"], TABLES["nemotron"], more=(_nemotron,)
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
