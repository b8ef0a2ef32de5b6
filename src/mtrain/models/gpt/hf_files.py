"""Names of the same weights in files: transformers fuses the experts of some families when it loads
them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

from mtrain.models.gpt.hf import TABLES
from mtrain.models.table import EXPERTS, GATE_UP, Copy, Entry, Table

Rename = Callable[[str], str]
COMPUTED = (
    r".*\.rotary_emb\.inv_freq",
    r".*\.attn\.(masked_)?bias",
    r".*\.attention\.(masked_)?bias",
)
"""Tensors of older files that are computed here: rotary frequencies and causal masks."""
UNREAD = (r"mtp\..*",)
"""Multi-token prediction layers in files of Qwen3-Next, which transformers does not build either.
"""
OF_IMAGES = (r"(model\.)?vision_tower\..*", r"(model\.)?multi_modal_projector\..*")
"""Vision tower and projector in files of models that also read images."""
TIED = (Copy("lm_head.weight", "model.embed_tokens.weight"),)
_MTP = "model.layers.{i}."
_JOINS = re.compile(r"model\.layers\.[0-9]+\.eh_proj\.weight")
"""Projection in each MTP layer that joins a token's embedding with the hidden states of the layers
before.
"""


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

    transformers writes how many there are, and not their weights. A model that is `wanted` says how
    many it has.
    """
    held = sum(_JOINS.fullmatch(name) is not None for name in names)
    return () if held == model.mtp_held else (f"model.mtp_num_layers={held or 'null'}",)


def files(kind: str, model: Any) -> tuple[Table, ...]:
    """Return the tables that a file of a `model_type` may follow; the first is the one that is
    written.
    """
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
