"""The `config.json` of Granite 4's hybrids, read and written.

A layer of Granite is two of mtrain's: a mixer or attention, then an MLP, or experts with a shared
one.
"""

from __future__ import annotations

from mtrain.config.schema.model import ModelConfig
from mtrain.models.hybrid.config import ATTENTION, EXPERTS, MAMBA, MLP
from mtrain.models.hybrid.hf_config import NO_BOUND, TABLES, WORDS, own
from mtrain.recipes.huggingface.config_file import ConfigFile, Family, Json, Kind
from mtrain.recipes.huggingface.families import COMMON, FAMILIES
from mtrain.recipes.huggingface.readers import mixtral_experts
from mtrain.recipes.huggingface.writers import mixture


def _granite(file: ConfigFile) -> None:
    mixers = _mixers(file)
    experts = file.get("num_local_experts") > 0
    # a layer of Granite is two of mtrain's
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


_FACTORS = {
    "attention_multiplier": "model.softmax_scale",
    "embedding_multiplier": "model.hybrid.embedding_multiplier",
    "residual_multiplier": "model.hybrid.residual_multiplier",
    "logits_scaling": "model.hybrid.logits_scaling",
}

_COPIED = {
    theirs: ours
    for theirs, ours in COMMON.items()
    if theirs not in ("num_hidden_layers", "intermediate_size")
}
# noise before the router reaches the experts too, as in Mixtral
_NOISE = {"router_jitter_noise": FAMILIES["mixtral"].must["router_jitter_noise"]}
READS = Family.of(
    {"keys": _COPIED, "must": _NOISE}, TABLES["every"], TABLES["granite"], more=(_granite,)
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
        # Granite's loss averages its layers, of which each has experts: half of mtrain's
        **mixture(model, "num_local_experts", "intermediate_size", dense=model.num_layers // 2),
        "shared_intermediate_size": moe.shared_expert_intermediate_size,
    }


GRANITE = Kind(READS, _writes, lambda model: "GraniteMoeHybridForCausalLM")
