"""Names of the weights of a decoder-only transformer in megatron-core's checkpoints (`torch_dist`).

megatron-core counts layers in a name (`decoder.layers.3.mlp.linear_fc1.weight`) or along the first
axis of one tensor of all layers (`decoder.layers.mlp.linear_fc1.weight`), and experts likewise. A
norm is called by its own name, or by that of the linear layer into which TransformerEngine fuses
it. Here each weight of a layer or an expert has one name: with all numbers, and the norm's own.

Source: `sharded_state_dict` of megatron-core 0.16.1 (transformer_block, mlp, experts,
    gpt_layer_specs).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mtrain.config.schema.model import ModelConfig

PREFIXES = re.compile(r"(?:model\.|module\.)+")
"""Prefixes that the wrappers of a model put before all names."""
NO_WEIGHT = re.compile(
    r"(?:optimizer|chained_\d+|optim|opt_param_scheduler|rng_state|rerun_state_machine_state"
    r"|dataloader)\b.*"
    r"|.*\b_extra_state\b.*"
)
"""Names of optimizer, generator and TransformerEngine state in checkpoints."""
_UNCOUNTED = re.compile(r"(\.layers|\.experts\.experts)\.(?!\d)")
_ONE_BY_ONE = (
    (re.compile(r"\.experts\.local_experts\.(\d+)\."), r".experts.experts.\1."),
    (re.compile(r"\.experts\.(linear_fc[12]\.(?:weight|bias))(\d+)"), r".experts.experts.\2.\1"),
)
"""Names of an expert as its module has them: one by one, or grouped."""
_OWN = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "self_attention.in_proj.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
}
"""Begin of a norm's name in the linear layer behind it -> of its own."""
_FUSED = {own: fused for fused, own in _OWN.items() if ".in_proj." not in fused}
_IN_PROJ = "self_attention.in_proj.layer_norm_"
"""Prefix of a norm that is fused into linear attention's input projection."""
GATE = "_w"
UP = "_v"
"""Suffixes of the two halves of a gated MLP's weight."""
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Tables of token ids, which have rows that only pad."""


def is_weight(name: str) -> bool:
    """Return whether a tensor of a checkpoint is part of the model."""
    return not NO_WEIGHT.fullmatch(
        PREFIXES.sub("", name, count=1) if PREFIXES.match(name) else name
    )


def counted_axes(name: str) -> int:
    """Return how many axes of a tensor count layers and experts, from its name."""
    return len(_UNCOUNTED.findall(name))


def one_name(name: str, numbers: Sequence[int] = ()) -> str:
    """Return a weight's canonical name, with the missing numbers and the norm's own name."""
    match = PREFIXES.match(name)
    name = name[match.end() :] if match else name
    for number in numbers:
        # Layers come before experts in a name, so the numbers fill it from the left.
        name = _UNCOUNTED.sub(rf"\g<1>.{number}.", name, count=1)
    for pattern, ours in _ONE_BY_ONE:
        name = pattern.sub(ours, name)
    for fused, own in _OWN.items():
        name = name.replace(f".{fused}", f".{own}")
    return name


def names_written(name: str, model: ModelConfig) -> tuple[str, ...]:
    """Return the names of a weight in megatron-core's layers: TransformerEngine's first, then its
    own.

    They differ in norms of layers with experts and of MLA, which are written twice.
    """
    experts = model.moe is not None and (
        name.startswith("mtp.") or layer_of(name) >= model.moe.first_dense_layers
    )
    latent = model.mla is not None
    fused = {  # by TransformerEngine's layers, by megatron-core's own
        "input_layernorm.": (not latent, not latent),
        "pre_mlp_layernorm.": (not experts, not latent),
        "self_attention.q_layernorm.": (latent, False),
        "self_attention.kv_layernorm.": (latent, False),
    }
    linear = not name.startswith("mtp.") and model.is_linear(layer_of(name))
    for own, by in fused.items():
        if f".{own}" in name:
            behind = _IN_PROJ if linear and own == "input_layernorm." else _FUSED[own]
            return tuple(
                dict.fromkeys(name.replace(own, behind) if fuses else name for fuses in by)
            )
    return (name,)


def saved_as(model: ModelConfig, name: str) -> str:
    """Return a module weight's name in our checkpoints, as megatron-core's layers name it."""
    return (
        names_written(one_name(name), model)[-1] if name.startswith(("decoder.", "mtp.")) else name
    )


def modules_with_state(name: str) -> tuple[str, ...]:
    """Return the modules of a weight's name that have a state of TransformerEngine."""
    module = name.rpartition(".")[0]
    if not module.startswith(("decoder.", "mtp.")) or module.endswith(".router"):
        return ()
    # TransformerEngine's core attention has a state, and no weight that would name it.
    attention, linear, _ = module.rpartition("linear_proj")
    return (module, f"{attention}core_attention") if linear else (module,)


def layer_of(name: str) -> int:
    """Return the number of the layer that a name with numbers belongs to; -1: to none."""
    match = re.search(r"\.layers\.(\d+)\.", name)
    return int(match[1]) if match else -1


def gathered(name: str, *, layers: bool) -> tuple[str, tuple[int, ...]]:
    """Return a name without the numbers of experts and `layers`, and those numbers."""
    numbers = list[int]()
    patterns = [r"(^decoder\.layers)\.(\d+)\."] * layers + [r"(\.experts\.experts)\.(\d+)\."]
    for pattern in patterns:
        if match := re.search(pattern, name):
            numbers.append(int(match[2]))
            name = f"{name[: match.start()]}{match[1]}.{name[match.end() :]}"
    return name, tuple(numbers)


def layers_are_alike(model: ModelConfig) -> bool:
    """Return whether all decoder layers have the same weights, which one tensor can hold."""
    # Dense and sparse layers have other weights, and so do softmax and linear attention.
    dense = model.moe is None or model.moe.first_dense_layers in (0, model.num_layers)
    return dense and model.linear_attention is None
