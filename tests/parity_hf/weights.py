"""Which parameter of Hugging Face's models is which of ours: one table for both directions.

Every layout is a rearrangement, so weights, gradients and moments go through it alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
Rearranged = Callable[[list[Tensor], Any], list[Tensor]]


@dataclass(frozen=True)
class Layout:
    """How the tensors of one entry lie on either side; both functions also take the `model` section."""

    to_ours: Rearranged
    to_theirs: Rearranged


def _same(tensors: list[Tensor], model: Any) -> list[Tensor]:
    return tensors


def _transposed(tensors: list[Tensor], model: Any) -> list[Tensor]:
    return [t.mT.contiguous() for t in tensors]


def _padded(tensors: list[Tensor], model: Any) -> list[Tensor]:
    rows = model.padded_vocab_size - model.vocab_size
    return [torch.cat([t, t.new_zeros(rows, *t.shape[1:])]) for t in tensors]


def _unpadded(tensors: list[Tensor], model: Any) -> list[Tensor]:
    return [t[: model.vocab_size] for t in tensors]


def _joined_qkv(tensors: list[Tensor], model: Any) -> list[Tensor]:
    groups, rest = model.query_groups, tensors[0].shape[1:]
    return [torch.cat([t.reshape(groups, -1, model.head_dim, *rest) for t in tensors], 1).reshape(-1, *rest)]


def _split_qkv(tensors: list[Tensor], model: Any) -> list[Tensor]:
    (fused,), rest = tensors, tensors[0].shape[1:]
    each = model.num_attention_heads // model.query_groups
    parts = fused.reshape(model.query_groups, each + 2, model.head_dim, *rest).split([each, 1, 1], 1)
    return [part.reshape(-1, *rest) for part in parts]


def _joined_thirds(tensors: list[Tensor], model: Any) -> list[Tensor]:
    return _joined_qkv(list(tensors[0].chunk(3)), model)


def _split_thirds(tensors: list[Tensor], model: Any) -> list[Tensor]:
    return [torch.cat(_split_qkv(tensors, model))]


def _concatenated(tensors: list[Tensor], model: Any) -> list[Tensor]:
    return [torch.cat(tensors)]


def _halves(tensors: list[Tensor], model: Any) -> list[Tensor]:
    return list(tensors[0].chunk(2))


def _stacked(tensors: list[Tensor], model: Any) -> list[Tensor]:
    return [torch.stack(tensors)]


def _unstacked(tensors: list[Tensor], model: Any) -> list[Tensor]:
    return list(tensors[0].unbind())


def _neighbours_as_halves(tensors: list[Tensor], model: Any) -> list[Tensor]:
    """Last axis: pairs of a gate and what it gates as all gates, then all of the others."""
    return [torch.cat([t[..., 0::2], t[..., 1::2]], -1) for t in tensors]


def _halves_as_neighbours(tensors: list[Tensor], model: Any) -> list[Tensor]:
    return [torch.stack(t.chunk(2, -1), -1).flatten(-2) for t in tensors]


def chain(*layouts: Layout) -> Layout:
    """Several layouts as one: inward in this order, outward in the other."""

    def inward(tensors: list[Tensor], model: Any) -> list[Tensor]:
        for layout in layouts:
            tensors = layout.to_ours(tensors, model)
        return tensors

    def outward(tensors: list[Tensor], model: Any) -> list[Tensor]:
        for layout in reversed(layouts):
            tensors = layout.to_theirs(tensors, model)
        return tensors

    return Layout(inward, outward)


SAME = Layout(_same, _same)
TRANSPOSED = Layout(_transposed, _transposed)
VOCABULARY = Layout(_padded, _unpadded)
"""Ours has rows up to a multiple of 128."""
QKV = Layout(_joined_qkv, _split_qkv)
"""Theirs are queries, keys and values; ours holds, of each query group, its queries, its key and its value."""
THIRDS = Layout(_joined_thirds, _split_thirds)
"""Theirs is all queries, then all keys, then all values, in one tensor."""
GATE_UP = Layout(_concatenated, _halves)
EXPERTS = Layout(_unstacked, _stacked)
"""Theirs is one tensor of all experts; ours one for each."""
PAIRS = Layout(_neighbours_as_halves, _halves_as_neighbours)
"""Theirs has gates and what they gate side by side in the last axis."""


@dataclass(frozen=True)
class Entry:
    """Tensors that hold the same; `{i}` counts layers, `{e}` experts, where there are several of ours."""

    ours: str
    theirs: tuple[str, ...]
    layout: Layout = SAME


@dataclass(frozen=True)
class Table:
    """The entries of a family: once, of each layer, and of each layer of one kind."""

    once: tuple[Entry, ...]
    layer: tuple[Entry, ...]
    dense: tuple[Entry, ...] = ()
    experts: tuple[Entry, ...] = ()

    def entries(self, model: Any) -> Iterator[tuple[list[str], list[str], Layout]]:
        """Names of ours, names of theirs and the layout, of a model's every layer."""
        for entry in self.once:
            yield [entry.ours], list(entry.theirs), entry.layout
        sparse_from = model.num_layers if model.moe is None else model.moe.first_dense_layers
        count = model.moe.num_experts if model.moe else 0
        for i in range(model.num_layers):
            for entry in self.layer + (self.experts if i >= sparse_from else self.dense):
                ours = entry.ours.replace("{i}", str(i))
                each = [ours.replace("{e}", str(e)) for e in range(count)] if "{e}" in ours else [ours]
                yield each, [name.replace("{i}", str(i)) for name in entry.theirs], entry.layout


def to_ours(table: Table, model: Any, theirs: Tensors) -> dict[str, Tensor]:
    """Their tensors as ours; an entry of which they have nothing is left out.

    Raises:
        KeyError: they have some tensors of an entry only.
        ValueError: a tensor of theirs has no entry, or more than one.
    """
    return _mapped(table, model, theirs, True)


def to_theirs(table: Table, model: Any, ours: Tensors) -> dict[str, Tensor]:
    """Our tensors as theirs, with the errors of `to_ours`."""
    return _mapped(table, model, ours, False)


def _mapped(table: Table, model: Any, given: Tensors, inward: bool) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    used: list[str] = []
    for ours, theirs, layout in table.entries(model):
        source, target = (theirs, ours) if inward else (ours, theirs)
        if not any(name in given for name in source):
            continue
        used += source
        made = (layout.to_ours if inward else layout.to_theirs)([given[name] for name in source], model)
        if set(target) & out.keys():
            raise ValueError(f"{target} are made twice")
        out |= dict(zip(target, made, strict=True))
    if sorted(used) != sorted(given):
        raise ValueError(f"no entry, or more than one: {sorted(set(given) ^ set(used)) or used}")
    return out


_ATTENTION, _THEIR_ATTENTION = "decoder.layers.{i}.self_attention.", "model.layers.{i}.self_attn."
_MLP, _THEIR_MLP = "decoder.layers.{i}.mlp.", "model.layers.{i}.mlp."

_ENDS = (
    Entry("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), VOCABULARY),
    Entry("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Entry("output_layer.weight", ("lm_head.weight",), VOCABULARY),
)
_NORMS = (
    Entry("decoder.layers.{i}.input_layernorm.weight", ("model.layers.{i}.input_layernorm.weight",)),
    Entry("decoder.layers.{i}.pre_mlp_layernorm.weight", ("model.layers.{i}.post_attention_layernorm.weight",)),
)


def _gated(ours: str, theirs: str, kind: str) -> tuple[Entry, ...]:
    gate, up = (f"{theirs}{name}_proj.{kind}" for name in ("gate", "up"))
    return (
        Entry(f"{ours}linear_fc1.{kind}", (gate, up), GATE_UP),
        Entry(f"{ours}linear_fc2.{kind}", (f"{theirs}down_proj.{kind}",)),
    )


def _grouped_query(kind: str) -> tuple[Entry, ...]:
    qkv = tuple(f"{_THEIR_ATTENTION}{name}_proj.{kind}" for name in "qkv")
    return (
        Entry(f"{_ATTENTION}linear_qkv.{kind}", qkv, QKV),
        Entry(f"{_ATTENTION}linear_proj.{kind}", (f"{_THEIR_ATTENTION}o_proj.{kind}",)),
    )


_QK_NORMS = tuple(Entry(f"{_ATTENTION}{x}_layernorm.weight", (f"{_THEIR_ATTENTION}{x}_norm.weight",)) for x in "qk")
_EXPERTS = (
    Entry(f"{_MLP}router.weight", (f"{_THEIR_MLP}gate.weight",)),
    Entry(f"{_MLP}router.expert_bias", (f"{_THEIR_MLP}gate.e_score_correction_bias",)),
    Entry(f"{_MLP}experts.linear_fc1.weight{{e}}", (f"{_THEIR_MLP}experts.gate_up_proj",), EXPERTS),
    Entry(f"{_MLP}experts.linear_fc2.weight{{e}}", (f"{_THEIR_MLP}experts.down_proj",), EXPERTS),
    *_gated(f"{_MLP}shared_experts.", f"{_THEIR_MLP}shared_experts.", "weight"),
)
_GATED_SHARED = (
    *_EXPERTS[:-2],
    *_gated(f"{_MLP}shared_experts.", f"{_THEIR_MLP}shared_expert.", "weight"),
    Entry(f"{_MLP}shared_experts.gate_weight", (f"{_THEIR_MLP}shared_expert_gate.weight",)),
)
_BIASED_EXPERTS = (
    Entry(f"{_MLP}router.weight", (f"{_THEIR_MLP}router.weight",)),
    Entry(f"{_MLP}router.bias", (f"{_THEIR_MLP}router.bias",)),
    *(
        Entry(f"{_MLP}experts.{ours}{{e}}", (f"{_THEIR_MLP}experts.{theirs}",), layout)
        for ours, theirs, layout in (
            ("linear_fc1.weight", "gate_up_proj", chain(PAIRS, TRANSPOSED, EXPERTS)),
            ("linear_fc1.bias", "gate_up_proj_bias", chain(PAIRS, EXPERTS)),
            ("linear_fc2.weight", "down_proj", chain(TRANSPOSED, EXPERTS)),
            ("linear_fc2.bias", "down_proj_bias", EXPERTS),
        )
    ),
)
_LATENT = tuple(
    Entry(f"{_ATTENTION}{ours}.weight", (f"{_THEIR_ATTENTION}{theirs}.weight",))
    for ours, theirs in (
        ("linear_q_proj", "q_proj"),
        ("linear_q_down_proj", "q_a_proj"),
        ("q_layernorm", "q_a_layernorm"),
        ("linear_q_up_proj", "q_b_proj"),
        ("linear_kv_down_proj", "kv_a_proj_with_mqa"),
        ("kv_layernorm", "kv_a_layernorm"),
        ("linear_kv_up_proj", "kv_b_proj"),
        ("linear_proj", "o_proj"),
    )
)

LLAMA = Table(
    _ENDS,
    (*_NORMS, *_grouped_query("weight"), *_grouped_query("bias"), *_QK_NORMS),
    dense=(*_gated(_MLP, _THEIR_MLP, "weight"), *_gated(_MLP, _THEIR_MLP, "bias")),
    experts=_EXPERTS,
)
QWEN2_MOE = replace(LLAMA, experts=_GATED_SHARED)
GPT_OSS = Table(
    _ENDS,
    (
        *_NORMS,
        *_grouped_query("weight"),
        *_grouped_query("bias"),
        Entry(f"{_ATTENTION}core_attention.softmax_offset", (f"{_THEIR_ATTENTION}sinks",)),
    ),
    experts=_BIASED_EXPERTS,
)
DEEPSEEK = Table(_ENDS, (*_NORMS, *_LATENT), dense=_gated(_MLP, _THEIR_MLP, "weight"), experts=_EXPERTS)


def _with_bias(ours: str, theirs: str, weight: Layout = SAME, bias: Layout = SAME) -> tuple[Entry, Entry]:
    return Entry(f"{ours}.weight", (f"{theirs}.weight",), weight), Entry(f"{ours}.bias", (f"{theirs}.bias",), bias)


GPT2 = Table(
    (
        Entry("embedding.word_embeddings.weight", ("transformer.wte.weight",), VOCABULARY),
        Entry("embedding.position_embeddings.weight", ("transformer.wpe.weight",)),
        *_with_bias("decoder.final_layernorm", "transformer.ln_f"),
        Entry("output_layer.weight", ("lm_head.weight",), VOCABULARY),
    ),
    (
        *_with_bias("decoder.layers.{i}.input_layernorm", "transformer.h.{i}.ln_1"),
        *_with_bias(f"{_ATTENTION}linear_qkv", "transformer.h.{i}.attn.c_attn", chain(TRANSPOSED, THIRDS), THIRDS),
        *_with_bias(f"{_ATTENTION}linear_proj", "transformer.h.{i}.attn.c_proj", TRANSPOSED),
        *_with_bias("decoder.layers.{i}.pre_mlp_layernorm", "transformer.h.{i}.ln_2"),
        *_with_bias(f"{_MLP}linear_fc1", "transformer.h.{i}.mlp.c_fc", TRANSPOSED),
        *_with_bias(f"{_MLP}linear_fc2", "transformer.h.{i}.mlp.c_proj", TRANSPOSED),
    ),
)
NEOX = Table(
    (
        Entry("embedding.word_embeddings.weight", ("gpt_neox.embed_in.weight",), VOCABULARY),
        *_with_bias("decoder.final_layernorm", "gpt_neox.final_layer_norm"),
        Entry("output_layer.weight", ("lm_head.weight",), VOCABULARY),
    ),
    (
        *_with_bias("decoder.layers.{i}.input_layernorm", "gpt_neox.layers.{i}.input_layernorm"),
        *_with_bias(f"{_ATTENTION}linear_qkv", "gpt_neox.layers.{i}.attention.query_key_value"),
        *_with_bias(f"{_ATTENTION}linear_proj", "gpt_neox.layers.{i}.attention.dense"),
        *_with_bias("decoder.layers.{i}.pre_mlp_layernorm", "gpt_neox.layers.{i}.post_attention_layernorm"),
        *_with_bias(f"{_MLP}linear_fc1", "gpt_neox.layers.{i}.mlp.dense_h_to_4h"),
        *_with_bias(f"{_MLP}linear_fc2", "gpt_neox.layers.{i}.mlp.dense_4h_to_h"),
    ),
)

TABLES: dict[str, Table] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"), LLAMA),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), DEEPSEEK),
    "qwen2_moe": QWEN2_MOE,
    "gpt_oss": GPT_OSS,
    "gpt2": GPT2,
    "gpt_neox": NEOX,
}
"""`model_type` -> table."""
