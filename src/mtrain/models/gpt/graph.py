"""A decoder-only transformer on one rank: its layers, embedding and heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mtrain.config.resolve.stages import Stage
from mtrain.models.gpt.attention import attention, rotates, windowed
from mtrain.models.gpt.feed_forward import feed_forward, mixes
from mtrain.models.gpt.weights import ends
from mtrain.models.graph import FP32, Graph, Tensor
from mtrain.models.parts import column, embedding, loss, norm, summed, value
from mtrain.models.rank import Rank

AddLayer = Callable[[Graph, Rank, Tensor, int], Tensor]
"""Adds a layer, by its number from 0, to a graph; what it gives."""


def add_layer(g: Graph, r: Rank, x: Tensor, index: int, *, causal: bool = True) -> Tensor:
    """Add layer `index` (from 0) to the residual stream; return the stream after it."""
    m = r.model
    place = r.model.norm_placement
    before = place in ("pre", "pre_and_post")
    behind = place in ("post", "pre_and_post")
    normed = _norm(g, r, "input_layernorm", x, again=r.recomputes("layernorm")) if before else x
    normed.quantized = before and r.quantizes and not r.recomputes("layernorm")
    added = attention(g, r, normed, index, causal=causal)
    g.discard(normed, when=before and r.recomputes("layernorm"))
    if behind:
        added = _norm(g, r, "post_self_attn_layernorm", added)
    middle = summed(g, r, "self_attn_bda", x, added)
    if place == "post_residual":
        middle = _norm(g, r, "post_self_attn_layernorm", middle)
    read = x if m.parallel_residual else middle
    normed = (
        _norm(g, r, "pre_mlp_layernorm", read, again=r.recomputes("layernorm")) if before else read
    )
    # where many read it
    apart = r.recomputes("layernorm") or r.recomputes("mlp") or mixes(r, index)
    normed.quantized = before and r.quantizes and not apart
    added = feed_forward(g, r, normed, index)
    g.discard(normed, when=before and r.recomputes("layernorm"))
    if behind:
        added = _norm(g, r, "post_mlp_layernorm", added)
    out = summed(g, r, "mlp_bda", middle, added)
    return _norm(g, r, "post_mlp_layernorm", out) if place == "post_residual" else out


def _norm(g: Graph, r: Rank, name: str, x: Tensor, *, again: bool = False) -> Tensor:
    with g.recomputed(name, x, when=again, discarded=True):
        return norm(g, r, name, x, r.split_tokens, r.model.hidden_size)


def stage(r: Rank, held: Stage) -> list[Graph]:
    """Return the graphs of a stage on one micro-batch: before, in and after the layers."""
    first = Graph()
    last = Graph()
    end = Graph() if held.mtp else last
    x = stream(r)
    if held.embedding:
        x = embedding(first, r, tables=int(r.model.position_embedding_type == "learned_absolute"))
    full = r.layout.recompute.granularity == "full"
    m = r.model
    if full and held.layers and m.mla is None and m.position_embedding_type == "rope":
        # Angles are an input of recomputed layers, so autograd keeps them.
        angles = r.positions * m.rotary_dim * (2 if m.rotary_base_local else 1)
        first.add("rotary_pos_emb", [Tensor(angles * FP32, shared=not r.run.data.packed)])
    graphs = stack(r, held.layers, add_layer, lambda index: kind(r, index))
    x = stream(r)
    if ends(r.model, held):
        x = _norm(end, r, "final_layernorm", x)
    predictions = [Graph() for _ in range(held.mtp)]
    for g in predictions:
        x = _prediction(g, r, x)
    # Each layer of multi-token prediction has its own loss.
    for number in range((1 + (r.model.mtp_num_layers or 0)) * held.loss):
        if m.head:
            value(last, r, x)
        else:
            loss(last, r, x, is_part=number > 0)
    return [first, *graphs, *([end] if held.mtp else []), *predictions, last]


def kind(r: Rank, index: int) -> tuple[bool, ...]:
    """Return an equal key for layers that compute the same."""
    return mixes(r, index), r.model.is_linear(index), windowed(r, index), rotates(r, index)


def stack(
    r: Rank, layers: Sequence[int], add: AddLayer, kind: Callable[[int], Any] = lambda index: None
) -> list[Graph]:
    """Return the graphs of layers, one each, or one for each recomputed group."""
    wide = partial(r.run.precision.leaves, layers=r.model.num_layers)
    again = r.layout.recompute
    made = dict[Any, Graph]()
    graphs = list[Graph]()
    full = again.granularity == "full"
    size = again.num_layers or 1
    groups = size if full and again.method != "block" else 1
    for start in range(0, len(layers), groups):
        group = layers[start : start + groups]
        redone = full and (again.method != "block" or start < size)
        key = redone, *((wide(index), kind(index)) for index in group)
        # Layers that compute the same share a graph, so that a plan of 126 layers takes the time of
        # one.
        if key not in made:
            made[key] = _group(r, group, add, redone)
        graphs.append(made[key])
    return graphs


def _group(r: Rank, layers: Sequence[int], add: AddLayer, redone: bool) -> Graph:
    g = Graph()
    x = stream(r)
    # megatron-core then saves a part of the stream on each tensor-parallel rank.
    spread = r.layout.recompute.distribute_saved_activations and not r.layout.sequence_parallel
    with g.recomputed("layers", Tensor(x.bytes // r.layout.tp) if spread else x, when=redone):
        for index in layers:
            x = add(g, r.at(index), x, index)
    return g


def stream(r: Rank) -> Tensor:
    """Return the residual stream on a rank."""
    return Tensor(r.split_tokens * r.model.hidden_size * r.element)


def _prediction(g: Graph, r: Rank, hidden: Tensor) -> Tensor:
    """Add a layer of multi-token prediction, without adapters, from earlier hidden states."""
    r = replace(r, adapted=False)
    h = r.model.hidden_size
    token = embedding(g, r)
    again = r.layout.recompute
    # megatron-core passes over it there
    redone = again.granularity == "full" and again.method != "block"
    with g.recomputed("mtp.layers", hidden, token, when=redone):
        parts = _norm(g, r, "mtp.enorm", token), _norm(g, r, "mtp.hnorm", hidden)
        both = Tensor(r.split_tokens * 2 * h * r.element)
        g.add("mtp.both", reads=parts, gives=[both])
        part = column(g, r, "mtp.eh_proj", both, 2 * h, h // r.layout.tp)
        x = Tensor(r.tokens * h * r.element)
        # gathered from all tensor-parallel ranks: a rank's part of the tokens is a view of it
        g.add("mtp.gathered", reads=[part], gives=[x])
        x = add_layer(g, r, x, r.model.num_layers - 1)
        return _norm(g, r, "mtp.final_layernorm", x)
