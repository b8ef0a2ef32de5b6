"""Hugging Face's names of the weights of LLaVA, in current and old files and in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from mtrain.config.schema.model import ModelConfig
from mtrain.models.gpt.hf import COMPUTED, LLAMA
from mtrain.models.llava.config import LlavaConfig
from mtrain.models.table import QKV, SAME, Copy, Entry, Operation, Table

Rename = Callable[[str], str]
_ENDS = {
    "patch_embedding": "patch_embedding.weight",
    "position_embedding": "position_embedding.weight",
}
_TOWER_QKV = Operation(
    QKV.name,
    lambda tensors, model: QKV.to_ours(tensors, model.llava),
    lambda tensors, model: QKV.to_theirs(tensors, model.llava),
)
"""The heads are those of the vision tower."""


def files(kind: str, model: ModelConfig) -> tuple[Table, ...]:
    """Return the tables that a file may follow; exports write the first.

    transformers 5 writes the language model as before and the tower without `vision_model.`; up to
    4 it wrote that, too, as published files have it; both have other names in memory.
    """
    older = _table(
        model,
        lambda name: f"language_model.{name}",
        "vision_tower.vision_model.",
        "multi_modal_projector.",
    )
    written = _table(
        model, lambda name: f"language_model.{name}", "vision_tower.", "multi_modal_projector."
    )
    return written, older, in_memory(model), in_memory(model, "vision_model.")


def in_memory(model: ModelConfig, inner: str = "") -> Table:
    """Return the table of the parameter names of `LlavaForConditionalGeneration`."""

    def rename(name: str) -> str:
        if name == "lm_head.weight":
            return name
        return f"model.language_model.{name.removeprefix('model.')}"

    return _table(model, rename, f"model.vision_tower.{inner}", "model.multi_modal_projector.")


def _table(model: ModelConfig, rename: Rename, vision: str, projector: str) -> Table:
    def named(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
        return tuple(replace(entry, theirs=tuple(map(rename, entry.theirs))) for entry in entries)

    more = (*_tower(vision, LlavaConfig.of(model)), *_projector(projector))
    return replace(
        LLAMA,
        once=(*named(LLAMA.once), *more),
        layer=named(LLAMA.layer),
        dense=named(LLAMA.dense),
        experts=(),
        copies=(Copy(rename("lm_head.weight"), rename("model.embed_tokens.weight")),),
        ignored=(*COMPUTED, r".*\.embeddings\.position_ids", r".*\.rotary_emb\.inv_freq"),
    )


def _tower(theirs: str, own: LlavaConfig) -> Iterator[Entry]:
    for name in ("class_embedding", "patch_embedding", "position_embedding"):
        yield Entry(f"vision.{name}", (f"{theirs}embeddings.{_ENDS.get(name, name)}",))
    for kind in ("weight", "bias"):
        # CLIP's own spelling
        yield Entry(f"vision.pre_layernorm.{kind}", (f"{theirs}pre_layrnorm.{kind}",))
        yield Entry(f"vision.post_layernorm.{kind}", (f"{theirs}post_layernorm.{kind}",))
        for i in range(own.vision_layers):
            # Layers after the features are kept for export, and computed by nothing.
            behind = i - own.used_layers
            ours = (
                f"vision.encoder.layers.{i}." if behind < 0 else f"vision.behind.layers.{behind}."
            )
            yield from _tower_layer(ours, f"{theirs}encoder.layers.{i}.", kind)


def _tower_layer(ours: str, theirs: str, kind: str) -> Iterator[Entry]:
    def entry(own: str, *names: str, operation: Any = SAME) -> Entry:
        return Entry(
            f"{ours}{own}.{kind}", tuple(f"{theirs}{name}.{kind}" for name in names), operation
        )

    qkv = (f"self_attn.{x}_proj" for x in "qkv")
    yield entry("self_attention.linear_qkv", *qkv, operation=_TOWER_QKV)
    yield entry("self_attention.linear_proj", "self_attn.out_proj")
    yield entry("input_layernorm", "layer_norm1")
    yield entry("pre_mlp_layernorm", "layer_norm2")
    yield entry("mlp.linear_fc1", "mlp.fc1")
    yield entry("mlp.linear_fc2", "mlp.fc2")


def _projector(theirs: str) -> Iterator[Entry]:
    for n in (1, 2):
        for kind in ("weight", "bias"):
            yield Entry(f"projector.linear_fc{n}.{kind}", (f"{theirs}linear_{n}.{kind}",))
