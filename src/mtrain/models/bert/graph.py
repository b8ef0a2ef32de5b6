"""BERT on one rank: layers that see the whole sample, and the heads on the last stage."""

from __future__ import annotations

from mtrain.config.resolve.stages import Stage
from mtrain.models.gpt.graph import add_layer, stack, stream
from mtrain.models.graph import FP32, INDEX, Graph, Tensor
from mtrain.models.parts import dropout, loss, norm, whole
from mtrain.models.rank import Rank

BIAS_COLUMNS = 8
"""Columns of the product in `mtrain.mcore.models.language_model` that hold the output bias."""


def stage(r: Rank, held: Stage) -> list[Graph]:
    """Return the graphs of a stage on one micro-batch: before, in and after the layers."""
    first = Graph()
    last = Graph()
    if held.embedding:
        _embedding(first, r)
    layers = stack(r, held.layers, lambda g, r, x, index: add_layer(g, r, x, index, causal=False))
    if held.loss:
        x = stream(r)
        if r.model.norm_placement == "pre":
            x = norm(last, r, "final_layernorm", x, r.split_tokens, r.model.hidden_size)
        _heads(last, r, x)
    return [first, *layers, last]


def _embedding(g: Graph, r: Rank) -> None:
    h = r.model.hidden_size
    rows = r.split_tokens
    # Of tokens, positions and kinds.
    ids = [Tensor(r.tokens * INDEX) for _ in range(3)]
    outside = [Tensor(r.tokens)] if r.layout.tp > 1 else []
    pads = [Tensor(r.tokens)] if r.model.bert and r.model.bert.pad_token_id is not None else []
    g.add("embedding", [*ids, *outside, *pads])
    if r.model.norm_placement == "post_residual":
        norm(g, r, "embedding.norm", stream(r), rows, h)
    dropout(g, r, "embedding.dropout", rows * h, r.model.hidden_dropout)


def _heads(g: Graph, r: Rank, x: Tensor) -> None:
    m = r.model
    rows = r.split_tokens
    y = whole(g, r, "head.dense", x, m.hidden_size, m.hidden_size)
    given = stream(r)
    g.add("head.activation", [y], reads=[y], gives=[given])
    said = norm(g, r, "head.norm", given, rows, m.hidden_size)
    loss(g, r, said, columns=BIAS_COLUMNS)
    if m.bert and m.bert.next_sentence:
        # The pooler reads first tokens, which only one rank of a sequence has, so all are gathered.
        seen = Tensor(r.tokens * m.hidden_size * r.element) if r.layout.sequence_parallel else x
        g.add(
            "pooler",
            [seen, Tensor(r.samples * m.hidden_size * r.element), Tensor(r.samples * 5 * FP32)],
        )
