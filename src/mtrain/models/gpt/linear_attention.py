"""A gated delta net on one rank: projections, a convolution, the gated delta rule by chunks, and a
gated norm.
"""

from __future__ import annotations

from typing import Any

from mtrain.config.engine.kernels import ON_CPU
from mtrain.config.schema.linear_attention import LinearAttentionConfig
from mtrain.models.graph import FP32, INDEX, MASK, Graph, Product, Tensor
from mtrain.models.parts import WRITTEN_OUT, column, row
from mtrain.models.rank import Rank

CHUNK = 64
"""Times of a chunk, of `mtrain_kernels.gated_delta_rule` and of fla."""


def gated_delta_net(g: Graph, r: Rank, x: Tensor) -> Tensor:
    """Add linear attention; return what it adds to the residual stream, from its normed input."""
    own = r.model.linear_attention
    tp = r.layout.tp
    place = "self_attention"
    assert own is not None
    rows = sum(own.sections) // tp
    values = own.value_channels // tp
    h = r.model.hidden_size
    plain = r.plain("attention")
    projected = column(g, r, f"{place}.in_proj", x, h, rows)
    into, z = (
        Tensor(r.tokens * n // tp * r.element, of=projected)
        for n in (own.conv_channels, own.value_channels)
    )
    g.add(f"{place}.split", reads=[projected], gives=[into, z])
    mixed = _convolution(g, r, own, into, plain)
    _decays(g, r, own)
    y = _rule(g, r, own, mixed, plain)
    normed = _norm(g, r, own, y)
    wide = r.tokens * values * FP32
    out = Tensor(r.tokens * values * r.element)
    gate = projected if r.wide else Tensor(wide)
    moved = WRITTEN_OUT * 3 * normed.bytes
    more: dict[str, Any] = {"reads": [normed, z], "gives": [out], "needs": wide, "works": 3 * wide}
    g.add(f"{place}.gate", [gate, normed, Tensor(wide)], moved=moved, **more)
    return row(g, r, f"{place}.out_proj", out, values, h)


def _convolution(g: Graph, r: Rank, own: LinearAttentionConfig, x: Tensor, plain: bool) -> Tensor:
    channels = own.conv_channels // r.layout.tp
    width = own.conv_kernel_dim
    out = Tensor(r.tokens * channels * r.element)
    name = "self_attention.conv1d"
    if not plain:
        g.add(name, [x], moved=2 * out.bytes, reads=[x], gives=[out])
        return out
    # Zeros stand for the times before a sample.
    padded = r.samples * (r.length + width - 1) * channels * FP32
    before = Tensor(r.tokens * channels * FP32)  # the activation
    # widened for each tap
    weights = [] if r.wide else [Tensor(channels * width * FP32) for _ in range(width)]
    keeps = [Tensor(padded), before]
    if r.run.data.packed:  # what is seen of each earlier time, and where it is
        keeps = [before, *(Tensor(r.tokens * channels * FP32) for _ in range(width))]
        keeps += [Tensor(r.tokens * MASK) for _ in range(width)]
    more: dict[str, Any] = {
        "reads": [x],
        "gives": [out],
        "needs": before.bytes,
        "works": 2 * before.bytes + padded,
    }
    g.add(name, [*keeps, *weights], moved=WRITTEN_OUT * width * out.bytes, **more)
    return out


def _decays(g: Graph, r: Rank, own: LinearAttentionConfig) -> None:
    """Add the decay of the state and the share of a token that is written, of each head."""
    size = r.tokens * own.num_value_heads // r.layout.tp
    keeps = [Tensor(size * FP32), Tensor(size * FP32)]
    g.add("self_attention.decay", keeps, moved=8 * size * FP32)


def _rule(g: Graph, r: Rank, own: LinearAttentionConfig, mixed: Tensor, plain: bool) -> Tensor:
    """Return the outputs of heads; the definition in plain torch keeps only its inputs, and is
    recomputed in the backward.
    """
    heads = own.num_value_heads // r.layout.tp
    d = own.key_head_dim
    e = own.value_head_dim
    size = r.tokens * heads
    a = r.element
    name = "self_attention.rule"
    # The last chunk of a sample is filled up.
    each = r.samples * -(-r.length // CHUNK) * heads  # chunks
    inputs = [mixed, Tensor(size * FP32), Tensor(size * a)]
    if r.run.data.packed:
        inputs.append(Tensor(r.tokens * INDEX))
    products = [
        *[Product(CHUNK, CHUNK, d, each)] * 2,  # keys with keys, queries with keys
        Product(CHUNK, d + e, CHUNK, each),  # the system, solved for both sides
        *[Product(CHUNK, e, d, each)] * 2,  # reads of the state, and queries to it
        Product(CHUNK, e, CHUNK, each),
        Product(d, e, CHUNK, each),
    ]
    moved = 2 * a * size * (2 * d + 2 * e)
    if not plain:  # a query and a key for each head, and the solved systems
        inputs += [Tensor(2 * size * d * a), Tensor(size * CHUNK * a), Tensor(2 * size * FP32)]
        y = Tensor(size * e * a)
        g.add(name, inputs, products, moved=moved, factors="activations", reads=[mixed], gives=[y])
        return y
    with g.made_again(name, *inputs):
        of_chunks = [CHUNK * CHUNK] * 7 + [CHUNK * d] * 5 + [CHUNK * e] * 3 + [d * e]
        copied = [r.tokens * own.num_key_heads // r.layout.tp * d] * 2
        made = [Tensor(FP32 * n) for n in (*(each * part for part in of_chunks), *copied)]
        y = Tensor(each * CHUNK * e * FP32 if r.wide else size * e * a)
        # gradients of what is read by chunks, of squares one more and their sum; outputs
        works = FP32 * each * (3 * CHUNK * CHUNK + CHUNK * (3 * d + 2 * e)) + size * e * FP32
        more: dict[str, Any] = {"reads": [mixed], "gives": [y], "works": works}
        g.add(name, made, products, moved=WRITTEN_OUT * moved, factors="activations", **more)
    return y


def _norm(g: Graph, r: Rank, own: LinearAttentionConfig, y: Tensor) -> Tensor:
    """Add the norm of each head, whose weight is kept as it is."""
    rows = r.tokens * own.num_value_heads // r.layout.tp
    size = rows * own.value_head_dim
    keeps = [Tensor(rows * FP32), y]
    if r.plain("norm") and not r.wide:
        keeps = [
            Tensor(rows * FP32),
            Tensor(own.value_head_dim * FP32),
            y if r.words["norm"] == ON_CPU else Tensor(size * FP32),
        ]
    out = Tensor(size * r.element)
    if not r.plain("norm"):
        works = 0
    else:
        works = size * FP32 * (1 if r.wide else 3)
    g.add(
        "self_attention.out_norm",
        keeps,
        moved=2 * size * r.element,
        reads=[y],
        gives=[out],
        works=works,
    )
    return out
