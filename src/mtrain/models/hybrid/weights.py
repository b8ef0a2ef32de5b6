"""The weights of a hybrid on one rank of a stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

from mtrain.config.resolve.stages import Stage
from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.parallel import ParallelConfig
from mtrain.models.gpt.torch_dist import one_name
from mtrain.models.gpt.weights import attention, gated_delta_net, latent, mixture
from mtrain.models.hybrid.config import (
    ATTENTION,
    DELTA,
    EXPERTS,
    LATENT,
    MAMBA,
    MLP,
    SPARSE,
    HybridConfig,
    is_described,
)
from mtrain.models.weights import Weight, column, mlp, norm, row

FUSED = {
    ".mixer.in_proj.weight": ("z", "x", "B", "C", "dt"),
    ".mixer.conv1d.weight": ("x", "B", "C"),
    ".mixer.conv1d.bias": ("x", "B", "C"),
}
"""End of a fused weight's name -> its parts, each of which is a tensor of a checkpoint."""
_NORMS = {
    MAMBA: ("norm.", "mixer.in_proj.layer_norm_"),
    ATTENTION: ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    DELTA: ("input_layernorm.", "self_attention.in_proj.layer_norm_"),
    MLP: ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
}
"""Kind of layer -> begin of its norm's name here, and in checkpoints."""


_MIXERS = {ATTENTION: attention, LATENT: latent, SPARSE: latent, DELTA: gated_delta_net}


def stage_weights(m: ModelConfig, p: ParallelConfig, held: Stage) -> Iterator[Weight]:
    """Yield the weights of a (virtual) stage; the first and the last both hold a tied table."""
    rows = m.padded_vocab_size // p.tp
    h = m.hidden_size
    apart = m.tie_word_embeddings and not (held.embedding and held.loss)
    if held.embedding:
        yield Weight("embedding.word_embeddings.weight", (rows, h), "embedding", shared=apart)
        if m.position_embedding_type == "learned_absolute":
            yield Weight(
                "embedding.position_embeddings.weight",
                (m.max_position_embeddings, h),
                "embedding",
                whole=True,
            )
    for number, index in enumerate(held.layers):
        yield from _layer(m, p, f"decoder.layers.{number}", HybridConfig.of(m).kind(index))
    if held.loss:
        yield from norm(m, "decoder.final_norm", h)
        if not (m.tie_word_embeddings and held.embedding):
            yield Weight("output_layer.weight", (rows, h), "output", shared=m.tie_word_embeddings)


def alike(m: ModelConfig) -> dict[int, int]:
    """Return a layer of each kind, and how many there are; none after the end of the pattern."""
    pattern = HybridConfig.of(m).pattern[: m.num_layers]
    return {pattern.index(kind): number for kind, number in Counter(pattern).items()}


def buffers(m: ModelConfig) -> Iterator[Weight]:
    """Yield the biases that balance routers, which the optimizer does not move."""
    if m.moe is None or not m.moe.router_enable_expert_bias:
        return
    for index, kind in enumerate(HybridConfig.of(m).pattern):
        if kind == EXPERTS:
            yield Weight(
                f"decoder.layers.{index}.mlp.router.expert_bias",
                (m.moe.num_experts,),
                "router",
                whole=True,
            )


def saved_as(m: ModelConfig, name: str) -> str:
    """Return a weight's name in checkpoints, where norms are named after the next linear layer."""
    layer, _, part = name.partition(".layers.")
    number, _, inner = part.partition(".")
    if not number.isdigit():
        return name
    if ".experts." in inner:
        return one_name(name)
    mine, theirs = _NORMS.get(HybridConfig.of(m).kind(int(number)), ("", ""))
    if mine and inner.startswith(mine):
        return f"{layer}.layers.{number}.{theirs}{inner.removeprefix(mine)}"
    return name


def apart(m: ModelConfig, weight: Weight) -> Iterator[Weight]:
    """Yield a weight as checkpoints hold it, with the fused parts of a mixer separate."""
    names = next((parts for end, parts in FUSED.items() if weight.name.endswith(end)), None)
    if names is None:
        yield weight
        return
    for name, rows in zip(names, part_rows(m, names), strict=True):
        yield replace(weight, name=f"{weight.name}.{name}", shape=(rows, *weight.shape[1:]))


def part_rows(m: ModelConfig, names: tuple[str, ...]) -> list[int]:
    """Return the rows of each named part of a mixer's first linear layer or convolution."""
    h = HybridConfig.of(m)
    rows = {"z": h.channels, "x": h.channels, "B": h.states, "C": h.states, "dt": h.num_heads}
    return [rows[name] for name in names]


def part_ends(m: ModelConfig, names: tuple[str, ...]) -> list[int]:
    """Return the end row of each part."""
    return list(accumulate(part_rows(m, names)))


def _layer(m: ModelConfig, p: ParallelConfig, name: str, kind: str) -> Iterator[Weight]:
    # Models are counted before rules refuse such a layer.
    if not is_described(m, kind):
        return
    if kind == MAMBA:
        yield from _mixer(m, p, f"{name}.mixer")
        yield from norm(m, f"{name}.norm", m.hidden_size)
    elif kind in _MIXERS:
        yield from norm(m, f"{name}.input_layernorm", m.hidden_size)
        yield from _MIXERS[kind](m, p, f"{name}.self_attention")
    elif kind == MLP:
        yield from norm(m, f"{name}.pre_mlp_layernorm", m.hidden_size)
        yield from mlp(m, f"{name}.mlp", m.ffn_hidden_size, p.tp, bias=False)
    elif kind == EXPERTS and m.moe is not None:
        yield from norm(m, f"{name}.pre_mlp_layernorm", m.hidden_size)
        yield from mixture(m, p, m.moe, f"{name}.mlp")


def _mixer(m: ModelConfig, p: ParallelConfig, name: str) -> Iterator[Weight]:
    h = HybridConfig.of(m)
    heads = h.num_heads // p.tp
    width = h.channels // p.tp
    mixed = (h.channels + 2 * h.states) // p.tp
    for vector in ("dt_bias", "A_log", "D"):
        yield Weight(f"{name}.{vector}", (heads,), "mamba")
    yield from column(
        f"{name}.in_proj", "mamba", p.tp * (width + mixed + heads), m.hidden_size, p.tp
    )
    yield Weight(f"{name}.conv1d.weight", (mixed, 1, h.conv_kernel), "mamba")
    yield Weight(f"{name}.conv1d.bias", (mixed,), "mamba")
    yield Weight(f"{name}.norm.weight", (width,), "mamba")
    yield from row(f"{name}.out_proj", "mamba", m.hidden_size, p.tp * width, p.tp)
