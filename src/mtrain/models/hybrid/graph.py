"""A hybrid on one rank: its layers, and the other parts of a stage."""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from typing import Any

from mtrain.config.resolve.stages import Stage
from mtrain.models.gpt.attention import attention
from mtrain.models.gpt.feed_forward import feed_forward, mlp
from mtrain.models.gpt.graph import stack, stream
from mtrain.models.graph import FP32, INDEX, MASK, Exchange, Graph, Product, Tensor
from mtrain.models.hybrid.config import (
    DELTA,
    EXPERTS,
    MAMBA,
    MLP,
    SOFTMAX,
    HybridConfig,
    is_described,
)
from mtrain.models.parts import column, embedding, loss, norm, row, summed
from mtrain.models.rank import Rank


def stage(r: Rank, held: Stage) -> list[Graph]:
    """Return the graphs of a stage on one micro-batch: before, in and after the layers."""
    first = Graph()
    last = Graph()
    if held.embedding:
        embedding(first, r, tables=int(r.model.position_embedding_type == "learned_absolute"))
    rotary = r.model.position_embedding_type == "rope" and r.model.mla is None
    if r.layout.recompute.granularity == "full" and held.layers and rotary:
        first.add(
            "rotary_pos_emb",
            [Tensor(r.positions * r.model.rotary_dim * FP32, shared=not r.run.data.packed)],
        )
    layers = stack(r, held.layers, add_layer, HybridConfig.of(r.model).kind)
    if held.loss:
        loss(last, r, norm(last, r, "final_norm", stream(r), r.split_tokens, r.model.hidden_size))
    return [first, *layers, last]


def add_layer(g: Graph, r: Rank, x: Tensor, index: int) -> Tensor:
    """Add layer `index` (from 0) to the residual stream; return the stream after it."""
    m = r.model
    kind = HybridConfig.of(r.model).kind(index)
    again = r.recomputes("layernorm") and kind != MAMBA
    with g.recomputed("norm", x, when=again, discarded=True):
        normed = norm(g, r, "norm", x, r.split_tokens, m.hidden_size)
    normed.quantized = r.quantizes and not (
        again or kind == EXPERTS or (kind == MLP and r.recomputes("mlp"))
    )
    if kind == MAMBA:
        added = _mixer(g, r, normed)
    elif kind in (*SOFTMAX, DELTA) and is_described(m, kind):
        added = attention(g, r, normed, index)
    elif kind == EXPERTS:
        added = feed_forward(g, r, normed, index)
    else:
        with g.recomputed("mlp", normed, when=r.recomputes("mlp")):
            added = mlp(g, r, normed, "mlp", m.ffn_hidden_size)
    g.discard(normed, when=again)
    return summed(g, r, "bda", x, added)


def _mixer(g: Graph, r: Rank, x: Tensor) -> Tensor:
    h = HybridConfig.of(r.model)
    tp = r.layout.tp
    cp = r.layout.cp
    m = r.model
    width = h.channels // tp
    heads = h.num_heads // tp
    mixed = width + 2 * h.states // tp
    fused = column(g, r, "mixer.in_proj", x, m.hidden_size, width + mixed + heads)
    if cp == 1:
        y = _scanned(g, r, fused, width, mixed, heads)
    else:  # some heads of all tokens
        # A scan goes through a whole sequence, so ranks exchange tokens for heads and back.
        inside = replace(r, length=r.whole)
        # With fewer groups than context-parallel ranks, each has one, and several have the same.
        shared = lcm(h.num_groups // tp, cp) // cp
        part = width // cp + 2 * shared * h.state_dim
        sent = Tensor(inside.tokens * (part + heads // cp) * r.element)
        order = [Tensor(r.whole * INDEX, constant=True)]
        exchange = Exchange("cp", "all_to_all", sent.bytes)
        g.add(
            "mixer.exchange",
            order,
            moved=3 * sent.bytes,
            exchanges=[exchange],
            reads=[fused],
            gives=[sent],
        )
        there = _scanned(g, inside, sent, width // cp, part, heads // cp)
        back = inside.tokens * width // cp * r.element
        y = Tensor(r.tokens * width * r.element)
        order = [Tensor(r.whole * INDEX, constant=True)]
        exchange = Exchange("cp", "all_to_all", back)
        g.add(
            "mixer.exchange.back",
            order,
            moved=2 * back,
            exchanges=[exchange],
            reads=[there],
            gives=[y],
        )
    return row(g, r, "mixer.out_proj", _gated_norm(g, r, fused, y, width), width, m.hidden_size)


def _scanned(g: Graph, r: Rank, fused: Tensor, width: int, mixed: int, heads: int) -> Tensor:
    turned = _convolution(g, r, fused, mixed)
    g.add("mixer.dt", [Tensor(r.tokens * heads * FP32) for _ in range(2)])
    return _scan(g, r, turned, width, mixed, heads)


def _convolution(g: Graph, r: Rank, fused: Tensor, mixed: int) -> Tensor:
    """Add the convolution of each channel over its last tokens, and its SiLU."""
    taps = HybridConfig.of(r.model).conv_kernel
    size = r.tokens * mixed * FP32
    y = Tensor(r.tokens * mixed * r.element)
    moved = 2 * r.tokens * mixed * r.element
    if not r.host:
        g.add("mixer.conv1d", [fused], moved=moved, reads=[fused], gives=[y])
        return y
    weights = [] if r.wide else [Tensor(mixed * taps * FP32) for _ in range(taps)]
    if r.wide and r.layout.cp > 1:  # its rows that are of this rank's heads
        weights = [Tensor(mixed * taps * FP32)]
    if r.run.data.packed:  # each tap's input, without other documents
        seen = [Tensor(size) for _ in range(taps)] + [Tensor(r.tokens * MASK) for _ in range(taps)]
    else:
        seen = [Tensor(r.samples * mixed * (r.length + taps - 1) * FP32)]
    if r.frozen:  # the inputs of taps belong to their gradient
        seen = seen[taps:]
    more: dict[str, Any] = {"reads": [fused], "gives": [y], "needs": 2 * size, "works": 3 * size}
    g.add("mixer.conv1d", [*seen, *weights, Tensor(size)], moved=taps * moved, **more)
    return y


def _scan(g: Graph, r: Rank, x: Tensor, width: int, mixed: int, heads: int) -> Tensor:
    """Add the scan of all heads, chunk by chunk: a kernel saves inputs, torch all operands."""
    h = HybridConfig.of(r.model)
    b = r.samples
    p = h.head_dim
    s = h.state_dim
    rows = b * heads
    read = Tensor(
        r.tokens * (mixed if r.wide or not r.host else width) * (r.element if not r.host else FP32)
    )
    moved = r.tokens * (2 * width + 2 * (mixed - width)) * r.element
    y = Tensor(r.tokens * width * r.element)
    if (
        not r.host
    ):  # the library keeps its decays and results, too; a kernel multiplies in all chunks
        decays = Tensor(r.tokens * heads * FP32)
        given = Tensor(r.tokens * width * r.element)
        n = min(h.chunk_size, r.length)
        # the states of chunks, by one kernel in fp32, summed up by the next, and read by the last
        moved += r.tokens // n * heads * p * s * 2 * (FP32 + r.element)
        products = _chunk(n, p, s, rows * -(-r.length // n))
        more: dict[str, Any] = {"reads": [x], "gives": [y]}
        g.add(
            "mixer.scan",
            [read, given, decays],
            products,
            moved=moved,
            factors="activations",
            **more,
        )
        return y
    # inputs and outputs, and the gradients of both
    wide = r.tokens * (mixed + width) * FP32
    more = {"reads": [x], "gives": [y], "needs": wide, "works": wide}
    g.add("mixer.scan", [read, Tensor(heads * FP32), Tensor(heads * FP32)], moved=3 * moved, **more)
    for begin in range(0, r.length, h.chunk_size):
        n = min(h.chunk_size, r.length - begin)
        first = begin == 0
        last = begin + n == r.length
        # of inputs and outputs, if samples are interleaved
        copies = 2 if b == 1 else 4 - first - last
        numbers = (
            [n * n] * 3 + [n * p] * (3 - last) + [n * s] * copies + [p * s, n, *[1] * (not last)]
        )
        marks = n * n * MASK * (b if r.run.data.packed else 1)
        kept = [Tensor(rows * size * FP32) for size in numbers] + [Tensor(marks)]
        works = 2 * rows * n * n * FP32
        g.add("mixer.scan.chunk", kept, _chunk(n, p, s, rows), factors="activations", works=works)
    return y


def _chunk(n: int, p: int, s: int, each: int) -> list[Product]:
    """Return the products of a chunk of `n` tokens: scores, values, and uses of the state."""
    return [
        Product(n, n, s, each),
        Product(n, p, n, each),
        Product(n, p, s, each),
        Product(p, s, n, each),
    ]


def _gated_norm(g: Graph, r: Rank, fused: Tensor, x: Tensor, width: int) -> Tensor:
    """Add the gated norm as separate fp32 operations: gate, SiLU, product, norm, scale."""
    y = Tensor(r.tokens * width * r.element)
    size = r.tokens * width * FP32
    groups = HybridConfig.of(r.model).num_groups // r.layout.tp
    gate = [fused] if r.wide else [Tensor(size), Tensor(width * FP32)]
    kept = [
        *gate,
        *[Tensor(size) for _ in range(3 if r.frozen else 4)],
        Tensor(r.tokens * groups * FP32),
    ]
    g.add(
        "mixer.norm", kept, moved=8 * size, reads=[x, fused], gives=[y], needs=size, works=3 * size
    )
    return y
