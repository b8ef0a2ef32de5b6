"""An encoder-decoder on one rank: two stacks of layers of different lengths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mtrain.config.resolve.stages import Stage
from mtrain.models.attention import Heads, scores_in_fp32
from mtrain.models.gpt.feed_forward import mlp
from mtrain.models.gpt.graph import stack, stream
from mtrain.models.graph import FP32, INDEX, MASK, Graph, Product, Tensor
from mtrain.models.parts import column, dropout, embedding, loss, norm, row, summed
from mtrain.models.rank import Rank
from mtrain.models.t5.config import T5Config, decoder_layers, lengths


def stage(r: Rank, held: Stage) -> list[Graph]:
    """Return the graphs of the one stage on one micro-batch."""
    t = T5Config.of(r.model)
    needed = lengths(t, r.run.data.length)
    reads = replace(r, length=t.encoder_length or needed[0])
    writes = replace(r, length=t.decoder_length or needed[1])
    first = Graph()
    last = Graph()
    _read(first, reads, hidden=True)
    encoder = stack(reads, range(r.model.num_layers), _layer)
    context = _behind(last, reads)
    if not reads.gathers_inputs:  # one for all layers of the decoder
        last.add("context", [context])
        context = Tensor(0)
    _read(last, writes, hidden=False)
    decoder = stack(
        writes,
        range(decoder_layers(r.model)),
        lambda g, _, x, index: _decoder_layer(g, writes, reads, context, x),
    )
    loss(last, writes, _behind(last, writes))
    return [first, *encoder, *decoder, last]


def _read(g: Graph, r: Rank, *, hidden: bool) -> Tensor:
    """Add the look-up of tokens, and biases by distance with a mask; return the embeddings."""
    pairs = r.length**2
    g.add(
        "relative_pos_emb",
        [Tensor(pairs * INDEX), Tensor(r.tokens * MASK if hidden else pairs * MASK)],
    )
    return embedding(g, r)


def _behind(g: Graph, r: Rank) -> Tensor:
    y = norm(g, r, "final_layernorm", stream(r), r.split_tokens, r.model.hidden_size)
    dropout(g, r, "final_dropout", r.split_tokens * r.model.hidden_size, r.model.hidden_dropout)
    return y


def _layer(g: Graph, r: Rank, x: Tensor, index: int) -> Tensor:
    return _feed_forward(g, r, _attention(g, r, x))


def _decoder_layer(g: Graph, r: Rank, reads: Rank, context: Tensor, x: Tensor) -> Tensor:
    x = _attention(g, r, x)
    h = r.model.hidden_size
    d = r.model.head_dim
    n = r.heads
    y = norm(g, r, "pre_cross_attn_layernorm", x, r.split_tokens, h)
    q = column(g, r, "cross_attention.linear_q", y, h, r.heads * d)
    kv = column(g, reads, "cross_attention.linear_kv", context, h, 2 * r.heads * d)
    out = Tensor(r.tokens * r.heads * d * r.element)
    a = r.element
    products = [Product(r.length, reads.length, d, r.samples * r.heads) for _ in range(2)]
    if r.model.attention_dropout and r.host:
        kept, out = scores_in_fp32(r, Heads(q, kv, kv, n, n, d, d), r.length, reads.length)
    else:
        kept = [q, kv, out, Tensor(r.tokens * n * FP32), Tensor(reads.tokens * a)]
    g.add("cross_attention.core_attention", kept, products, reads=[q, kv], gives=[out])
    added = row(g, r, "cross_attention.linear_proj", out, n * d, h)
    return _feed_forward(g, r, summed(g, r, "bda", x, added))


def _attention(g: Graph, r: Rank, x: Tensor) -> Tensor:
    h = r.model.hidden_size
    d = r.model.head_dim
    n = r.heads
    y = norm(g, r, "input_layernorm", x, r.split_tokens, h)
    qkv = column(g, r, "self_attention.linear_qkv", y, h, 3 * n * d)
    heads = Heads(qkv, qkv, qkv, n, n, d, d)
    scores = r.samples * n * r.length**2 * FP32
    with g.recomputed("core_attention", qkv, when=r.recomputes("core_attn")):
        kept, out = scores_in_fp32(r, heads, r.length, r.length)
        products = [Product(r.length, r.length, d, r.samples * n) for _ in range(2)]
        # without biases, and with them; gradients of shares and of scores
        more: dict[str, Any] = {
            "reads": [qkv],
            "gives": [out],
            "needs": scores,
            "works": 2 * scores,
        }
        g.add("self_attention.core_attention", kept, products, **more)
    return summed(g, r, "bda", x, row(g, r, "self_attention.linear_proj", out, n * d, h))


def _feed_forward(g: Graph, r: Rank, x: Tensor) -> Tensor:
    y = norm(g, r, "pre_mlp_layernorm", x, r.split_tokens, r.model.hidden_size)
    width = r.model.ffn_hidden_size
    with g.recomputed("mlp", y, when=r.recomputes("mlp")):
        added = mlp(g, r, y, "mlp", width)
        inner = r.tokens * width // r.layout.tp
        dropout(g, r, "mlp.dropout", inner, r.model.hidden_dropout)
        if (
            r.model.hidden_dropout and r.model.activation == "relu"
        ):  # what it gave is kept, and what is left of it
            g.add("mlp.dropped", [Tensor(inner * r.element)])
    return summed(g, r, "bda", x, added)
