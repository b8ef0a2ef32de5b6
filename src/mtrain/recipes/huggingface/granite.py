"""The `config.json` of Granite 4's hybrids, read and written.

A layer of theirs is two of ours: a mixer or attention, then an MLP, or experts with a shared one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mtrain.config.schema.model import ModelConfig
from mtrain.models.hybrid.config import ATTENTION, EXPERTS, MAMBA, MLP
from mtrain.models.hybrid.hf_config import BASE, NO_BOUND, OF_BOTH, WORDS, own
from mtrain.recipes.huggingface.config_file import ConfigFile, Family, Json, Kind
from mtrain.recipes.huggingface.families import COMMON, FAMILIES
from mtrain.recipes.huggingface.readers import mixtral_experts
from mtrain.recipes.huggingface.writers import mixture


def _granite(file: ConfigFile) -> None:
    mixers = _mixers(file)
    experts = file.get("num_local_experts") > 0
    # a layer of theirs is two of ours
    pattern = "".join(mixer + (EXPERTS if experts else MLP) for mixer in mixers)
    heads = file.number("mamba_n_heads")
    width = int(file.number("mamba_expand") * file.number("hidden_size"))
    shared = file.get("shared_intermediate_size")
    auto = file.get("mamba_d_head") == "auto"
    file.out |= {
        "model.num_layers": len(pattern),
        "model.hybrid.pattern": pattern,
        "model.hybrid.head_dim": max(1, width // heads) if auto else file.number("mamba_d_head"),
        "model.ffn_hidden_size": file.get("intermediate_size") if experts else shared,
    }
    if file.out["model.hybrid.head_dim"] * heads != width:
        file.differs("mamba_expand", "the total width of the heads differs")
    for theirs, ours in _FACTORS.items():
        file.out[ours] = float(file.get(theirs))
    if experts:
        # `mixtral_experts` reads the keys of routed experts, which have Mixtral's names
        file.out["model.moe.shared_expert_intermediate_size"] = shared
        mixtral_experts(file)
    else:
        text = "is read where there are experts"
        file.idle(("intermediate_size", "num_experts_per_tok", "router_aux_loss_coef"), text)
    _limits(file)


def _mixers(file: ConfigFile) -> str:
    """Return the letter of each layer's first half."""
    listed = file.get("layer_types", ["mamba"] * file.layers)
    letters = [WORDS.get(word, "") for word in listed]
    if any(letter not in (MAMBA, ATTENTION) for letter in letters):
        file.differs("layer_types", "a layer begins with a mixer or attention")
    if len(letters) != file.layers:
        file.refuse(
            "layer_types",
            "not supported",
            f"has {len(letters)} layers, and num_hidden_layers says {file.layers}",
        )
    return "".join(letters)


def _limits(file: ConfigFile) -> None:
    """Read the bounds of time steps: mtrain builds the lower one."""
    limits = file.get("time_step_limit")
    file.out["model.hybrid.time_step_min"] = float(limits[0])
    if len(limits) != 2 or limits[1] not in NO_BOUND:
        file.differs("time_step_limit", "time steps have only a lower bound")


_MUST: dict[str, tuple[Sequence[Any], str]] = {
    "position_embedding_type": (
        ("nope",),
        "changes the numbers: attention has no positions here",
    ),
    "hidden_act": (
        ("silu", "swish"),
        "changes the numbers: MLPs and mixers of this family have a SiLU",
    ),
    "normalization_function": (
        ("rmsnorm",),
        "is not read: norms of this family are RMSNorm",
    ),
    **dict.fromkeys(
        ("attention_bias", "mamba_proj_bias"),
        ((False,), "changes the numbers: linear layers of hybrids have no biases here"),
    ),
    "mamba_conv_bias": (
        (True,),
        "changes the numbers: the convolution of a mixer has a bias",
    ),
    # noise before the router reaches the experts too, as in Mixtral
    "router_jitter_noise": FAMILIES["mixtral"].must["router_jitter_noise"],
}
_FACTORS = {
    "attention_multiplier": "model.softmax_scale",
    "embedding_multiplier": "model.hybrid.embedding_multiplier",
    "residual_multiplier": "model.hybrid.residual_multiplier",
    "logits_scaling": "model.hybrid.logits_scaling",
}

READS = Family(
    {
        **{
            theirs: ours
            for theirs, ours in COMMON.items()
            if theirs not in ("num_hidden_layers", "intermediate_size")
        },
        "num_key_value_heads": "model.num_query_groups",
        "rms_norm_eps": "model.layernorm_epsilon",
        "mamba_n_heads": "model.hybrid.num_heads",
        "mamba_d_state": "model.hybrid.state_dim",
        "mamba_n_groups": "model.hybrid.num_groups",
        "mamba_d_conv": "model.hybrid.conv_kernel",
        "mamba_chunk_size": "model.hybrid.chunk_size",
    },
    {**BASE, "model.activation": "swiglu"},
    {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        **dict.fromkeys(_FACTORS, 1.0),
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_head": "auto",
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 256,
        "time_step_limit": [0.0, math.inf],
    },
    (_granite,),
    {"layers_block_type": "layer_types"},
    irrelevant=OF_BOTH,
    must=_MUST,
    idle=dict.fromkeys(
        ("rope_theta", "rope_scaling", "rope_parameters"), "is read where attention has positions"
    ),
)


def _writes(model: ModelConfig) -> Json:
    h = own(model)
    moe = model.moe
    mixers = h.pattern[::2]
    rests = set(h.pattern[1::2])
    expand, rest = divmod(h.num_heads * h.head_dim, model.hidden_size)
    if (
        rest
        or len(h.pattern) % 2
        or set(mixers) - {MAMBA, ATTENTION}
        or rests not in ({MLP}, {EXPERTS})
    ):
        raise ValueError("its layers are not pairs of a mixer or attention and an MLP or experts")
    if (
        model.softmax_scale is None
        or model.head_dim * model.num_attention_heads != model.hidden_size
    ):
        raise ValueError(
            "it has no factor on attention logits, or heads of another width than theirs"
        )
    body: Json = {
        "num_hidden_layers": len(mixers),
        "layer_types": ["mamba" if mixer == MAMBA else "attention" for mixer in mixers],
        "attention_multiplier": model.softmax_scale,
        "embedding_multiplier": h.embedding_multiplier,
        "residual_multiplier": h.residual_multiplier,
        "logits_scaling": h.logits_scaling,
        "mamba_d_head": h.head_dim,
        "mamba_expand": expand,
        "time_step_limit": [h.time_step_min, NO_BOUND[1]],
        "position_embedding_type": "nope",
        "hidden_act": "silu",
        "shared_intermediate_size": model.ffn_hidden_size,
        "num_local_experts": 0,
    }
    if moe is None:
        return body
    if moe.shared_expert_intermediate_size is None:
        raise ValueError("it has no shared experts, which layers of theirs always have")
    return body | {
        # their loss averages their layers, of which each has experts: half of ours
        **mixture(model, "num_local_experts", "intermediate_size", dense=model.num_layers // 2),
        "shared_intermediate_size": moe.shared_expert_intermediate_size,
    }


GRANITE = Kind(READS, _writes, lambda model: "GraniteMoeHybridForCausalLM")
