"""Hugging Face's names of the weights of BERT and Megatron's BERT, in current and old files."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from mtrain.models.table import QKV, SAME, VOCABULARY, Copy, Entry, Operation, Table

_LAYER = "encoder.layers.{i}."
_THEIRS = "bert.encoder.layer.{i}."
_HEAD = "cls.predictions."
_EMBEDDINGS = "bert.embeddings."


def _with_bias(ours: str, theirs: str, operation: Operation = SAME) -> tuple[Entry, Entry]:
    weight, bias = (
        Entry(f"{ours}.{kind}", (f"{theirs}.{kind}",), operation) for kind in ("weight", "bias")
    )
    return weight, bias


def _qkv(kind: str) -> Entry:
    theirs = tuple(f"{_THEIRS}attention.self.{name}.{kind}" for name in ("query", "key", "value"))
    return Entry(f"{_LAYER}self_attention.linear_qkv.{kind}", theirs, QKV)


POOLED = (
    *_with_bias("pooler", "bert.pooler.dense"),
    *_with_bias("next_sentence", "cls.seq_relationship"),
)
_IDS = (r"bert\.embeddings\.(position_ids|token_type_ids)",)
_ENDS = (
    Entry(
        "embedding.word_embeddings.weight", (f"{_EMBEDDINGS}word_embeddings.weight",), VOCABULARY
    ),
    Entry("embedding.position_embeddings.weight", (f"{_EMBEDDINGS}position_embeddings.weight",)),
    Entry("embedding.tokentype_embeddings.weight", (f"{_EMBEDDINGS}token_type_embeddings.weight",)),
    *_with_bias("head.dense", f"{_HEAD}transform.dense"),
    *_with_bias("head.norm", f"{_HEAD}transform.LayerNorm"),
    Entry("output_layer.bias", (f"{_HEAD}bias",), VOCABULARY),
    *POOLED,
)
_PRODUCTS = (
    _qkv("weight"),
    _qkv("bias"),
    *_with_bias(f"{_LAYER}self_attention.linear_proj", f"{_THEIRS}attention.output.dense"),
    *_with_bias(f"{_LAYER}mlp.linear_fc1", f"{_THEIRS}intermediate.dense"),
    *_with_bias(f"{_LAYER}mlp.linear_fc2", f"{_THEIRS}output.dense"),
)
_COPIES = (
    Copy(f"{_HEAD}decoder.weight", f"{_EMBEDDINGS}word_embeddings.weight"),
    Copy(f"{_HEAD}decoder.bias", f"{_HEAD}bias"),
)
BERT = Table(
    (*_ENDS, *_with_bias("embedding.norm", f"{_EMBEDDINGS}LayerNorm")),
    (
        *_PRODUCTS,
        *_with_bias(f"{_LAYER}post_self_attn_layernorm", f"{_THEIRS}attention.output.LayerNorm"),
        *_with_bias(f"{_LAYER}post_mlp_layernorm", f"{_THEIRS}output.LayerNorm"),
    ),
    copies=_COPIES,
    ignored=_IDS,
)
MEGATRON_BERT = Table(
    (*_ENDS, *_with_bias("encoder.final_layernorm", "bert.encoder.ln")),
    (
        *_PRODUCTS,
        *_with_bias(f"{_LAYER}input_layernorm", f"{_THEIRS}attention.ln"),
        *_with_bias(f"{_LAYER}pre_mlp_layernorm", f"{_THEIRS}ln"),
    ),
    copies=_COPIES,
    ignored=_IDS,
)
TABLES = {"bert": BERT, "megatron-bert": MEGATRON_BERT}
"""`model_type` -> as transformers saves it."""
UNUSED = (r"bert\.pooler\.dense\.(weight|bias)", r"cls\.seq_relationship\.(weight|bias)")
"""Weights of heads that the model lacks, in files that have them; transformers skips them, too."""


def _old(name: str) -> str:
    """Return the name of a norm's weight in TensorFlow, which converted files keep."""
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
        "LayerNorm.bias", "LayerNorm.beta"
    )


def settled(model: Any, names: Collection[str], wanted: Any) -> tuple[str, ...]:
    """Return the overrides that the names of the weights decide and a `config.json` leaves open:
    the next sentence's head.

    Published files have more heads than the class that they name (bert-base-uncased:
    `BertForMaskedLM`). A model that is `wanted` without this head is made of them, too.
    """
    held = all(name in names for entry in POOLED for name in entry.theirs)
    pooled = held and (wanted is None or wanted.bert is None or wanted.bert.next_sentence)
    if pooled == model.bert.next_sentence:
        return ()
    return (f"model.bert.next_sentence={str(pooled).lower()}",)


def files(kind: str, model: Any) -> tuple[Table, ...]:
    """Return the tables that a file of BERT may follow; exports write the first."""
    table = TABLES[kind]
    if not model.bert.next_sentence:
        once = tuple(entry for entry in table.once if entry not in POOLED)
        table = replace(table, once=once, ignored=(*table.ignored, *UNUSED))
    older = {
        part: tuple(
            replace(entry, theirs=tuple(map(_old, entry.theirs))) for entry in getattr(table, part)
        )
        for part in ("once", "layer")
    }
    return table, replace(table, once=older["once"], layer=older["layer"])
