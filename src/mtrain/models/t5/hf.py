"""Hugging Face's names of the weights of T5."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from mtrain.models.t5.config import decoder_layers
from mtrain.models.table import (
    GATE_UP,
    QKV,
    SAME,
    VOCABULARY,
    Copy,
    Entry,
    Operation,
    Table,
    joined,
)

HEAD = "lm_head.weight"


def _joined(tensors: list[Any], model: Any) -> list[Any]:
    heads = model.num_attention_heads
    rest = tensors[0].shape[1:]
    return [joined([t.reshape(heads, -1, *rest) for t in tensors], 1).reshape(-1, *rest)]


def _split(tensors: list[Any], model: Any) -> list[Any]:
    (fused,) = tensors
    rest = fused.shape[1:]
    halves = fused.reshape(model.num_attention_heads, 2, -1, *rest)
    return [halves[:, number].reshape(-1, *rest) for number in range(2)]


KV = Operation("joined by head", _joined, _split)
"""transformers has keys and values; mtrain holds the keys and values of each head."""


def files(kind: str, model: Any) -> tuple[Table, ...]:
    """Return the only table that files of T5 have."""
    copies = [
        Copy(f"{stack}.embed_tokens.weight", "shared.weight", always=True)
        for stack in ("encoder", "decoder")
    ]
    # a file of the first T5 has biases of cross attention, which no version of it read
    unread = (r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",)
    return (
        Table(
            tuple(_entries(model)),
            (),
            copies=(*copies, Copy(HEAD, "shared.weight")),
            ignored=unread,
        ),
    )


def settled(model: Any, names: Collection[str], wanted: Any) -> tuple[str, ...]:
    """Return the overrides for what a `config.json` leaves open and the names of the weights
    decide: tied embeddings.

    An unscaled T5 of transformers 5 is declared tied in any case, and one declared untied without
    weights for the output layer is tied.
    """
    apart = HEAD in names
    if apart and model.tie_word_embeddings and not model.t5.scale_logits:
        return "model.tie_word_embeddings=false", "model.t5.scale_logits=true"
    if not apart and not model.tie_word_embeddings:
        return "model.tie_word_embeddings=true", "model.t5.scale_logits=false"
    return ()


def _entries(model: Any) -> Iterator[Entry]:
    yield Entry("embedding.word_embeddings.weight", ("shared.weight",), VOCABULARY)
    if not model.tie_word_embeddings:
        yield Entry("output_layer.weight", (HEAD,), VOCABULARY)
    for stack, layers in (("encoder", model.num_layers), ("decoder", decoder_layers(model))):
        table = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        yield Entry(
            f"{stack}_relative_pos_emb.relative_attention_bias.weight", (f"{stack}.{table}",)
        )
        yield Entry(f"{stack}.final_layernorm.weight", (f"{stack}.final_layer_norm.weight",))
        for number in range(layers):
            ours = f"{stack}.layers.{number}."
            theirs = f"{stack}.block.{number}.layer."
            yield from _attention(
                f"{ours}self_attention.", f"{theirs}0.SelfAttention.", ("qkv", QKV)
            )
            yield Entry(f"{ours}input_layernorm.weight", (f"{theirs}0.layer_norm.weight",))
            if stack == "decoder":
                yield from _attention(
                    f"{ours}cross_attention.",
                    f"{theirs}1.EncDecAttention.",
                    ("q", SAME),
                    ("kv", KV),
                )
                yield Entry(
                    f"{ours}pre_cross_attn_layernorm.weight", (f"{theirs}1.layer_norm.weight",)
                )
            yield from _mlp(model, ours, f"{theirs}{2 if stack == 'decoder' else 1}.")


def _attention(ours: str, theirs: str, *parts: tuple[str, Operation]) -> Iterator[Entry]:
    for letters, operation in parts:
        names = tuple(f"{theirs}{letter}.weight" for letter in letters)
        yield Entry(f"{ours}linear_{letters}.weight", names, operation)
    yield Entry(f"{ours}linear_proj.weight", (f"{theirs}o.weight",))


def _mlp(model: Any, ours: str, theirs: str) -> Iterator[Entry]:
    names = ("wi_0", "wi_1") if model.gated else ("wi",)
    up = GATE_UP if model.gated else SAME
    yield Entry(f"{ours}pre_mlp_layernorm.weight", (f"{theirs}layer_norm.weight",))
    yield Entry(
        f"{ours}mlp.linear_fc1.weight",
        tuple(f"{theirs}DenseReluDense.{n}.weight" for n in names),
        up,
    )
    yield Entry(f"{ours}mlp.linear_fc2.weight", (f"{theirs}DenseReluDense.wo.weight",))
