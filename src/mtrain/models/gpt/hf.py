"""Hugging Face's names of the weights of decoder-only transformers, by `model_type`: in its
classes, and in files, where transformers fuses the experts of some families when it loads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

from mtrain.config.schema.model import VALUE_HEAD
from mtrain.models.table import (
    DELTA,
    EXPERTS,
    GATE_UP,
    GATED_QKV,
    PAIRS,
    QKV,
    QKV_ROWS,
    SAME,
    TRANSPOSED,
    VOCABULARY,
    Copy,
    Entry,
    Operation,
    Table,
    chain,
)

SCORE = "score.weight"
"""Name of the head of a model with one label in files of transformers."""
_ATTENTION = "decoder.layers.{i}.self_attention."
_THEIR_ATTENTION = "model.layers.{i}.self_attn."
_MLP = "decoder.layers.{i}.mlp."
_THEIR_MLP = "model.layers.{i}.mlp."

_ENDS = (
    Entry("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), VOCABULARY),
    Entry("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Entry("output_layer.weight", ("lm_head.weight",), VOCABULARY),
)
_NORMS = (
    Entry(
        "decoder.layers.{i}.input_layernorm.weight", ("model.layers.{i}.input_layernorm.weight",)
    ),
    Entry(
        "decoder.layers.{i}.pre_mlp_layernorm.weight",
        ("model.layers.{i}.post_attention_layernorm.weight",),
    ),
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


_QK_NORMS = tuple(
    Entry(f"{_ATTENTION}{x}_layernorm.weight", (f"{_THEIR_ATTENTION}{x}_norm.weight",))
    for x in "qk"
)
_EXPERTS = (
    Entry(f"{_MLP}router.weight", (f"{_THEIR_MLP}gate.weight",)),
    Entry(f"{_MLP}router.expert_bias", (f"{_THEIR_MLP}gate.e_score_correction_bias",)),
    Entry(f"{_MLP}experts.linear_fc1.weight{{e}}", (f"{_THEIR_MLP}experts.gate_up_proj",), EXPERTS),
    Entry(f"{_MLP}experts.linear_fc2.weight{{e}}", (f"{_THEIR_MLP}experts.down_proj",), EXPERTS),
    *_gated(f"{_MLP}shared_experts.", f"{_THEIR_MLP}shared_experts.", "weight"),
)
# MiniMax M2 has the bias next to the gate, not inside of it.
_BIAS_BESIDE = (
    _EXPERTS[0],
    Entry(f"{_MLP}router.expert_bias", (f"{_THEIR_MLP}e_score_correction_bias",)),
    *_EXPERTS[2:4],
)
# Qwen2-MoE has one shared expert, and a sigmoid gates its output.
_GATED_SHARED = (
    *_EXPERTS[:-2],
    *_gated(f"{_MLP}shared_experts.", f"{_THEIR_MLP}shared_expert.", "weight"),
    Entry(f"{_MLP}shared_experts.gate_weight", (f"{_THEIR_MLP}shared_expert_gate.weight",)),
)
# GPT-OSS has biases on experts, [inputs, outputs] weights, and gates at even places.
_BIASED_EXPERTS = (
    Entry(f"{_MLP}router.weight", (f"{_THEIR_MLP}router.weight",)),
    Entry(f"{_MLP}router.bias", (f"{_THEIR_MLP}router.bias",)),
    *(
        Entry(f"{_MLP}experts.{ours}{{e}}", (f"{_THEIR_MLP}experts.{theirs}",), operation)
        for ours, theirs, operation in (
            ("linear_fc1.weight", "gate_up_proj", chain(PAIRS, TRANSPOSED, EXPERTS)),
            ("linear_fc1.bias", "gate_up_proj_bias", chain(PAIRS, EXPERTS)),
            ("linear_fc2.weight", "down_proj", chain(TRANSPOSED, EXPERTS)),
            ("linear_fc2.bias", "down_proj_bias", EXPERTS),
        )
    ),
)
# A model without a low rank for queries has q_proj, the others have q_a_proj and q_b_proj; entries
# of absent tensors are passed over.
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

# Biases and norms of queries and keys are Qwen's; entries of absent tensors are passed over.
LLAMA = Table(
    _ENDS,
    (*_NORMS, *_grouped_query("weight"), *_grouped_query("bias"), *_QK_NORMS),
    dense=(*_gated(_MLP, _THEIR_MLP, "weight"), *_gated(_MLP, _THEIR_MLP, "bias")),
    experts=_EXPERTS,
)
_NORMS_BEHIND = tuple(
    Entry(
        f"decoder.layers.{{i}}.{ours}_layernorm.weight",
        (f"model.layers.{{i}}.{theirs}_layernorm.weight",),
    )
    for ours, theirs in (("post_self_attn", "post_attention"), ("post_mlp", "post_feedforward"))
)
# OLMo 2 norms the outputs of a layer's parts, not their inputs.
OLMO2 = replace(LLAMA, layer=(*_NORMS_BEHIND, *_grouped_query("weight"), *_QK_NORMS))
# Gemma norms the inputs and outputs of a layer's parts.
GEMMA = replace(
    OLMO2,
    layer=(
        _NORMS[0],
        Entry(
            "decoder.layers.{i}.pre_mlp_layernorm.weight",
            ("model.layers.{i}.pre_feedforward_layernorm.weight",),
        ),
        *OLMO2.layer,
    ),
)
MINIMAX_M2 = replace(LLAMA, dense=(), experts=_BIAS_BESIDE)
# Phi-3's files have queries, keys and values in one tensor, and gate over up as mtrain does.
PHI3 = Table(
    _ENDS,
    (
        *_NORMS,
        Entry(f"{_ATTENTION}linear_qkv.weight", (f"{_THEIR_ATTENTION}qkv_proj.weight",), QKV_ROWS),
        Entry(f"{_ATTENTION}linear_proj.weight", (f"{_THEIR_ATTENTION}o_proj.weight",)),
        Entry(f"{_MLP}linear_fc1.weight", (f"{_THEIR_MLP}gate_up_proj.weight",)),
        Entry(f"{_MLP}linear_fc2.weight", (f"{_THEIR_MLP}down_proj.weight",)),
    ),
)
_DELTA = "model.layers.{i}.linear_attn."
_LINEAR_ATTENTION = (
    Entry(
        f"{_ATTENTION}in_proj.weight",
        (f"{_DELTA}in_proj_qkvz.weight", f"{_DELTA}in_proj_ba.weight"),
        DELTA,
    ),
    *(
        Entry(f"{_ATTENTION}{ours}", (f"{_DELTA}{theirs}",))
        for ours, theirs in (
            ("conv1d.weight", "conv1d.weight"),
            ("dt_bias", "dt_bias"),
            ("A_log", "A_log"),
            ("out_norm.weight", "norm.weight"),
            ("out_proj.weight", "out_proj.weight"),
        )
    ),
)
QWEN2_MOE = replace(LLAMA, experts=_GATED_SHARED)
# Queries of Qwen3-Next come with the gates of attention's output.
QWEN3_NEXT = replace(
    QWEN2_MOE,
    layer=(
        *_NORMS,
        *(
            replace(entry, operation=GATED_QKV) if entry.operation is QKV else entry
            for kind in ("weight", "bias")
            for entry in _grouped_query(kind)
        ),
        *_QK_NORMS,
        *_LINEAR_ATTENTION,
    ),
)
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
DEEPSEEK = Table(
    _ENDS, (*_NORMS, *_LATENT), dense=_gated(_MLP, _THEIR_MLP, "weight"), experts=_EXPERTS
)

_INDEXER = f"{_ATTENTION}core_attention.indexer."
_THEIR_INDEXER = f"{_THEIR_ATTENTION}indexer."
_INDEXERS = tuple(
    Entry(f"{_INDEXER}{ours}", (f"{_THEIR_INDEXER}{theirs}",))
    for ours, theirs in (
        ("linear_wq_b.weight", "wq_b.weight"),
        ("linear_wk.weight", "wk.weight"),
        ("k_norm.weight", "k_norm.weight"),
        ("k_norm.bias", "k_norm.bias"),
        ("linear_weights_proj.weight", "weights_proj.weight"),
    )
)
DEEPSEEK_V32 = replace(DEEPSEEK, layer=(*DEEPSEEK.layer, *_INDEXERS))


def _with_bias(
    ours: str, theirs: str, weight: Operation = SAME, bias: Operation = SAME
) -> tuple[Entry, Entry]:
    return Entry(f"{ours}.weight", (f"{theirs}.weight",), weight), Entry(
        f"{ours}.bias", (f"{theirs}.bias",), bias
    )


GPT2 = Table(
    (
        Entry("embedding.word_embeddings.weight", ("transformer.wte.weight",), VOCABULARY),
        Entry("embedding.position_embeddings.weight", ("transformer.wpe.weight",)),
        *_with_bias("decoder.final_layernorm", "transformer.ln_f"),
        Entry("output_layer.weight", ("lm_head.weight",), VOCABULARY),
    ),
    (
        *_with_bias("decoder.layers.{i}.input_layernorm", "transformer.h.{i}.ln_1"),
        *_with_bias(
            f"{_ATTENTION}linear_qkv",
            "transformer.h.{i}.attn.c_attn",
            chain(TRANSPOSED, QKV_ROWS),
            QKV_ROWS,
        ),
        *_with_bias(f"{_ATTENTION}linear_proj", "transformer.h.{i}.attn.c_proj", TRANSPOSED),
        *_with_bias("decoder.layers.{i}.pre_mlp_layernorm", "transformer.h.{i}.ln_2"),
        *_with_bias(f"{_MLP}linear_fc1", "transformer.h.{i}.mlp.c_fc", TRANSPOSED),
        *_with_bias(f"{_MLP}linear_fc2", "transformer.h.{i}.mlp.c_proj", TRANSPOSED),
    ),
)
# GPT-NeoX interleaves queries, keys and values by head, as megatron-core does.
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
        *_with_bias(
            "decoder.layers.{i}.pre_mlp_layernorm", "gpt_neox.layers.{i}.post_attention_layernorm"
        ),
        *_with_bias(f"{_MLP}linear_fc1", "gpt_neox.layers.{i}.mlp.dense_h_to_4h"),
        *_with_bias(f"{_MLP}linear_fc2", "gpt_neox.layers.{i}.mlp.dense_4h_to_h"),
    ),
)
# Nemotron has LayerNorms with biases, and MLPs without a gate.
NEMOTRON = Table(
    (*_ENDS, Entry("decoder.final_layernorm.bias", ("model.norm.bias",))),
    (
        *_with_bias("decoder.layers.{i}.input_layernorm", "model.layers.{i}.input_layernorm"),
        *_grouped_query("weight"),
        *_grouped_query("bias"),
        *_with_bias(
            "decoder.layers.{i}.pre_mlp_layernorm", "model.layers.{i}.post_attention_layernorm"
        ),
        *_with_bias(f"{_MLP}linear_fc1", f"{_THEIR_MLP}up_proj"),
        *_with_bias(f"{_MLP}linear_fc2", f"{_THEIR_MLP}down_proj"),
    ),
)

TABLES: dict[str, Table] = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "glm4_moe"), LLAMA
    ),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), DEEPSEEK),
    **dict.fromkeys(("gemma2", "gemma3_text"), GEMMA),
    "deepseek_v32": DEEPSEEK_V32,
    "olmo2": OLMO2,
    "minimax_m2": MINIMAX_M2,
    "phi3": PHI3,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_next": QWEN3_NEXT,
    "gpt_oss": GPT_OSS,
    "gpt2": GPT2,
    "gpt_neox": NEOX,
    "nemotron": NEMOTRON,
}
"""`model_type` -> table."""


Rename = Callable[[str], str]
COMPUTED = (
    r".*\.rotary_emb\.inv_freq",
    r".*\.attn\.(masked_)?bias",
    r".*\.attention\.(masked_)?bias",
)
"""Tensors of older files that are computed here: rotary frequencies and causal masks."""
UNREAD = (r"mtp\..*",)
"""Multi-token prediction layers in files of Qwen3-Next, which transformers omits too."""
OF_IMAGES = (r"(model\.)?vision_tower\..*", r"(model\.)?multi_modal_projector\..*")
"""Vision tower and projector in files of models that also read images."""
TIED = (Copy("lm_head.weight", "model.embed_tokens.weight"),)
_MTP = "model.layers.{i}."
_JOINS = re.compile(r"model\.layers\.[0-9]+\.eh_proj\.weight")
"""Projection of an MTP layer that joins a token's embedding and earlier hidden states."""


def _renamed(table: Table, rename: Rename) -> Table:
    def entries(found: tuple[Entry, ...]) -> tuple[Entry, ...]:
        return tuple(replace(entry, theirs=tuple(map(rename, entry.theirs))) for entry in found)

    return replace(
        table,
        once=entries(table.once),
        layer=entries(table.layer),
        dense=entries(table.dense),
        experts=entries(table.experts),
    )


def _apart(table: Table) -> Table:
    """Return a table with experts one by one, gate and up projection too."""

    def entry(fused: Entry) -> Entry:
        name = fused.theirs[0]
        if fused.operation is not EXPERTS or not name.endswith(("gate_up_proj", "down_proj")):
            return fused
        one = name.replace("experts.", "experts.{e}.")
        if name.endswith("gate_up_proj"):
            pair = tuple(
                one.replace("gate_up_proj", f"{half}_proj.weight") for half in ("gate", "up")
            )
            return Entry(fused.ours, pair, GATE_UP)
        return Entry(fused.ours, (f"{one}.weight",))

    return replace(table, experts=tuple(map(entry, table.experts)))


def _of_mixtral(name: str) -> str:
    words = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3", ".mlp.": ".block_sparse_moe."}
    for theirs, file in words.items():
        name = name.replace(theirs, file)
    return name


def _with_mtp(table: Table) -> Table:
    """Return a table with MTP layers after the others, as in DeepSeek-V3's files: each has copies
    of the embedding and the head.
    """

    def entry(found: Entry) -> Entry:
        return replace(
            found,
            ours=found.ours.replace("decoder.layers.{i}.", "mtp.layers.{m}.transformer_layer."),
        )

    joins = (
        Entry("mtp.layers.{m}.enorm.weight", (f"{_MTP}enorm.weight",)),
        Entry("mtp.layers.{m}.hnorm.weight", (f"{_MTP}hnorm.weight",)),
        Entry("mtp.layers.{m}.eh_proj.weight", (f"{_MTP}eh_proj.weight",)),
        Entry("mtp.layers.{m}.final_layernorm.weight", (f"{_MTP}shared_head.norm.weight",)),
    )
    ends = (
        Copy(f"{_MTP}embed_tokens.weight", "model.embed_tokens.weight", of_mtp=True),
        Copy(f"{_MTP}shared_head.head.weight", "lm_head.weight", of_mtp=True),
    )
    layers = (*map(entry, table.layer), *map(entry, table.experts))
    return replace(table, mtp=(*joins, *layers), copies=(*table.copies, *ends))


def _within(table: Table, prefix: str) -> Table:
    """Return the table of a text model inside of one that reads images too, as transformers 4 and 5
    write it; the rest is ignored.
    """

    def rename(name: str) -> str:
        if not prefix.startswith("model."):
            return prefix + name
        return name if name == "lm_head.weight" else prefix + name.removeprefix("model.")

    copies = tuple(
        replace(copy, name=rename(copy.name), of=rename(copy.of)) for copy in table.copies
    )
    return replace(_renamed(table, rename), copies=copies, ignored=(*table.ignored, *OF_IMAGES))


def settled(model: Any, names: Collection[str], wanted: Any) -> tuple[str, ...]:
    """Return the overrides that the names of the weights decide and a `config.json` leaves open:
    MTP layers.

    transformers writes how many there are, and not their weights. A `wanted` model determines their
    number.
    """
    held = sum(_JOINS.fullmatch(name) is not None for name in names)
    return () if held == model.mtp_held else (f"model.mtp_num_layers={held or 'null'}",)


def files(kind: str, model: Any) -> tuple[Table, ...]:
    """Return the possible tables of a `model_type`'s file; the first is written."""
    found = _files(kind)
    return tuple(map(_with_value_head, found)) if model.head else found


def _with_value_head(table: Table) -> Table:
    """Return a table with the head of `...ForSequenceClassification`; a file of a causal language
    model lacks it, and its output layer is left out.
    """
    heads = {name for one in table.once if one.ours == "output_layer.weight" for name in one.theirs}
    kept = tuple(one for one in table.once if one.ours != "output_layer.weight")
    return replace(
        table,
        once=(*kept, Entry(f"{VALUE_HEAD}.weight", (SCORE,))),
        copies=tuple(copy for copy in table.copies if copy.name not in heads),
        ignored=(*table.ignored, *map(re.escape, sorted(heads))),
    )


def _files(kind: str) -> tuple[Table, ...]:
    table = replace(TABLES[kind], copies=TIED, ignored=COMPUTED)
    # Files keep the names of the models' authors; transformers renames them as it loads.
    if kind in ("mixtral", "minimax_m2"):
        return _renamed(_apart(table), _of_mixtral), table
    if kind == "gpt_neox":
        table = replace(table, copies=(Copy("lm_head.weight", "gpt_neox.embed_in.weight"),))
        written = _renamed(table, lambda name: name.replace("lm_head", "embed_out"))
        return replace(
            written, copies=(Copy("embed_out.weight", "gpt_neox.embed_in.weight"),)
        ), table
    if kind == "gpt2":
        table = replace(table, copies=(Copy("lm_head.weight", "transformer.wte.weight"),))
        # Published files of GPT-2 lack the prefix that transformers writes.
        bare = _renamed(table, lambda name: name.removeprefix("transformer."))
        return table, replace(bare, copies=(Copy("lm_head.weight", "wte.weight"),))
    if kind in ("deepseek_v3", "deepseek_v32", "glm4_moe"):
        return (_with_mtp(_apart(table)),)
    # Its weights are also published inside of models that read images.
    if kind == "gemma3_text":
        return (table, *map(partial(_within, table), ("language_model.", "model.language_model.")))
    if kind == "qwen3_next":
        table = replace(table, ignored=(*table.ignored, *UNREAD))
    # Files have experts one by one; transformers 5 fuses them in memory. A file may follow either.
    apart = _apart(table)
    return (table,) if apart == table else (apart, table)
