"""Attention of a decoder layer on one rank: a core with its projections, MLA, or a delta net."""

from __future__ import annotations

from typing import Any

from mtrain.config.engine.kernels import ON_CPU
from mtrain.config.schema.linear_attention import LinearAttentionConfig
from mtrain.config.schema.mla import MLAConfig
from mtrain.models.attention import Heads, core_attention
from mtrain.models.graph import FP32, INDEX, MASK, Exchange, Graph, Product, Tensor
from mtrain.models.parts import WRITTEN_OUT, column, norm, row, whole
from mtrain.models.rank import Rank


def attention(g: Graph, r: Rank, x: Tensor, layer: int, *, causal: bool = True) -> Tensor:
    """Add the attention of a layer; return its addition to the residual stream."""
    if r.model.is_linear(layer):
        return gated_delta_net(g, r, x)
    return (_latent if r.model.mla else _standard)(g, r, x, layer, causal)


def windowed(r: Rank, layer: int) -> bool:
    """Return whether layer `layer` (from 0) has the sliding window."""
    every = r.model.window_attn_skip_freq
    # megatron-core's frequency n: every n-th layer has no window, as in Gemma 3.
    return r.model.window_size is not None and (every is None or (layer + 1) % every != 0)


def rotates(r: Rank, layer: int) -> bool:
    """Return whether layer `layer` has rotary positions."""
    every = r.model.no_rope_freq
    # Every n-th layer has no positions, as in Llama 4 and SmolLM3.
    return r.model.position_embedding_type == "rope" and (every is None or (layer + 1) % every != 0)


def _standard(g: Graph, r: Rank, x: Tensor, layer: int, causal: bool) -> Tensor:
    m = r.model
    t = r.tokens
    a = r.element
    n = r.heads
    groups = r.groups
    d = r.model.head_dim
    every = ((1 + m.attention_output_gate) * m.num_attention_heads + 2 * m.query_groups) * d
    qkv = column(g, r, "self_attention.linear_qkv", x, m.hidden_size, every // r.layout.tp)
    if m.query_groups < r.layout.tp:  # of heads that several ranks have, all are gathered
        qkv = Tensor(t * every * a)
    copied = n != groups and groups != 1  # heads of several groups are put in order
    q = Tensor(t * n * d * a, of=None if copied else qkv)
    k, v, gate = (Tensor(t * heads * d * a, of=qkv) for heads in (groups, groups, n))
    parts = [q, k, v, *([gate] if m.attention_output_gate else [])]
    g.add("self_attention.split", reads=[qkv], gives=parts)
    if m.qk_layernorm:
        q = _normed(g, r, "q_layernorm", q, n)
        k = _normed(g, r, "k_layernorm", k, groups)
    if m.qk_l2_norm and rotates(r, layer):
        q = _divided(g, r, q, n)
        k = _divided(g, r, k, groups)
    if rotates(r, layer):
        q = _turned(g, r, "query", q, n * d, m.rotary_dim)
        k = _turned(g, r, "key", k, groups * d, m.rotary_dim)
    out = core_attention(g, r, Heads(q, k, v, n, groups, d, d, windowed(r, layer), causal))
    # then queries lie sample by sample, as do the results
    partly = rotates(r, layer) and m.rotary_dim < d
    if r.adapted and r.host and partly and r.samples > 1 and any(out in op.keeps for op in g.ops):
        out = Tensor(out.bytes)  # and its rows in the order of tokens are a copy
    if m.attention_output_gate:
        gated = Tensor(t * n * d * a)
        wide = t * n * d * FP32
        more: dict[str, Any] = {
            "reads": [out, gate],
            "gives": [gated],
            "needs": wide,
            "works": 2 * wide,
        }
        g.add("output_gate", [out, Tensor(wide)], moved=WRITTEN_OUT * 3 * out.bytes, **more)
        out = gated
    return row(g, r, "self_attention.linear_proj", out, n * d, m.hidden_size)


def _normed(g: Graph, r: Rank, name: str, x: Tensor, heads: int) -> Tensor:
    """Add norms of each head, or one over all of them."""
    d = r.model.head_dim
    across = r.model.qk_layernorm_across_heads
    if across and r.layout.tp > 1:  # written out: the scaled and the weighed values
        size = r.tokens * heads * d * FP32
        weighed = Tensor(heads * d * FP32 if r.frozen else size)
        y = Tensor(r.tokens * heads * d * r.element)
        keeps = [x if r.wide else Tensor(size), weighed, Tensor(r.tokens * FP32)]
        g.add(name, keeps, reads=[x], gives=[y], works=size)
        return y
    rows, width = (r.tokens, heads * d) if across else (r.tokens * heads, d)
    if across and heads > 1 and r.groups > 1 and x.bytes != rows * width * r.element:
        x = Tensor(rows * width * r.element)  # of heads that lie apart
    return norm(g, r, name, x, rows, width)


def _divided(g: Graph, r: Rank, x: Tensor, heads: int) -> Tensor:
    """Add a norm without weight, unfused in fp32."""
    size = r.tokens * heads * r.model.head_dim
    y = Tensor(size * r.element)
    keeps = [x if r.wide else Tensor(size * FP32), Tensor(r.tokens * heads * FP32)]
    g.add("qk_l2_norm", keeps, reads=[x], gives=[y], works=size * FP32)
    return y


def _turned(g: Graph, r: Rank, name: str, x: Tensor, width: int, rotary: int) -> Tensor:
    """Add rotary positions: tables of sines and cosines are saved, not the operands."""
    if r.words["rope"] == "reference" and not r.wide:
        tables = [Tensor(r.length * rotary * r.element) for _ in range(2)]
    else:
        by_halves = r.words["rope"] == ON_CPU and r.wide
        halves = by_halves and rotary == r.model.head_dim and not r.model.rotary_interleaved
        cosines = rotary if halves else rotary // 2
        tables = [Tensor(r.length * cosines * FP32), Tensor(r.length * (rotary // 2) * FP32)]
    y = Tensor(r.tokens * width * r.element)
    plain = r.plain("rope")
    # the factors of cosines, and of sines
    times, more = (WRITTEN_OUT, 2 * y.bytes) if plain else (1, 0)
    g.add(
        f"rotary.{name}",
        tables,
        moved=times * 2 * y.bytes,
        reads=[x],
        gives=[y],
        needs=more,
        works=more,
    )
    return y


def _turned_of_latents(r: Rank, mla: MLAConfig) -> int:
    """Return the elements that rotary positions of latents move for a token and head."""
    width = mla.qk_head_dim + mla.qk_pos_emb_head_dim
    if r.plain("rope"):
        return 2 * (2 * width + mla.v_head_dim)
    return (
        2 * mla.qk_pos_emb_head_dim + (mla.qk_head_dim + mla.v_head_dim) + (width + mla.v_head_dim)
    )


def _latent(g: Graph, r: Rank, x: Tensor, layer: int, causal: bool) -> Tensor:
    m = r.model
    mla = r.model.mla
    t = r.tokens
    a = r.element
    n = r.heads
    assert mla is not None
    width = mla.qk_head_dim + mla.qk_pos_emb_head_dim
    rotary = mla.qk_pos_emb_head_dim
    h = m.hidden_size
    place = "self_attention"
    if mla.q_lora_rank:
        q_low = whole(g, r, f"{place}.linear_q_down_proj", x, h, mla.q_lora_rank)
    else:
        q_low = None
    kv_low = whole(g, r, f"{place}.linear_kv_down_proj", x, h, mla.kv_lora_rank + rotary)
    rows = r.split_tokens
    latents = [kv_low]
    again = r.recomputes("mla_up_proj")
    if m.qk_layernorm:
        q_low = q_low and norm(g, r, "q_layernorm", q_low, rows, mla.q_lora_rank or 0)
        kv_low = norm(g, r, "kv_layernorm", kv_low, rows, mla.kv_lora_rank)
        for low in filter(None, (q_low, kv_low)):
            low.quantized = r.quantizes and not again
    x.quantized &= not again  # a recomputation from `x` quantises it
    latents += [kv_low, *([q_low] if q_low else [x])]
    with g.recomputed("mla_up_proj", *latents, when=again, discarded=True):
        if q_low:
            up = column(g, r, f"{place}.linear_q_up_proj", q_low, mla.q_lora_rank or 0, n * width)
        else:
            up = column(g, r, f"{place}.linear_q_proj", x, h, n * width)
        values = n * (mla.qk_head_dim + mla.v_head_dim)
        both = column(g, r, f"{place}.linear_kv_up_proj", kv_low, mla.kv_lora_rank, values)
        q, k, v = (Tensor(t * n * size * a) for size in (width, width, mla.v_head_dim))
        tables = [Tensor(r.length * m.rotary_dim * a) for _ in range(4)]
        moved = t * n * _turned_of_latents(r, mla) * a
        g.add("rotary", tables, moved=moved, reads=[up, both], gives=[q, k, v])
    heads = Heads(
        q, k, v, n, n, width, mla.v_head_dim, windowed(r, layer), causal, chosen=m.dsa is not None
    )
    if q_low and heads.chosen:
        indexer(g, r, x, q_low, heads)
    out = core_attention(g, r, heads)
    g.discard(q, k, v, when=again)
    return row(g, r, f"{place}.linear_proj", out, n * mla.v_head_dim, h)


MOST_SCORES = 1 << 24
"""Most scores at once: the limit of `mtrain.mcore.layers.sparse_index`."""
PASSES = 8
"""Times that scores are read or written to choose a part of the queries."""


def indexer(g: Graph, r: Rank, x: Tensor, latent: Tensor, h: Heads) -> None:
    """Add the indexer, which reads MLA's input and latent queries, whole on every rank."""
    dsa = r.model.dsa
    mla = r.model.mla
    t = r.tokens
    a = r.element
    assert dsa is not None
    assert mla is not None
    heads = dsa.indexer_n_heads
    width = dsa.indexer_head_dim
    rank = mla.q_lora_rank or 0
    hidden = r.model.hidden_size
    exchanges = []
    if r.layout.sequence_parallel:
        x = Tensor(t * hidden * a)
        latent = Tensor(t * rank * a)
        exchanges = [Exchange("tp", "gather", x.bytes + latent.bytes)]
    for name, source, inputs, outputs in (
        ("linear_wq_b", latent, rank, heads * width),
        ("linear_wk", x, hidden, width),
        ("linear_weights_proj", x, hidden, heads),
    ):
        # the input has no gradient, and a product with a frozen weight a part of it only
        g.add(
            f"indexer.{name}",
            [source],
            [Product(t, outputs, inputs)],
            exchanges=exchanges,
            factors="frozen",
        )
        exchanges = []
    wide = Tensor(t * width * FP32)
    sizes = [t * FP32, t * FP32, *([] if r.wide else [width * FP32] * 2)]
    g.add("indexer.k_norm", [wide, *map(Tensor, sizes)], moved=4 * wide.bytes)
    tables = [Tensor(r.length * r.model.rotary_dim * a) for _ in range(4)]
    g.add("indexer.rotary", tables, moved=2 * t * (heads + 1) * width * a)
    _scores(g, r, h)


def _scores(g: Graph, r: Rank, h: Heads) -> None:
    """Add the choice of keys, the loss and its gradient, which is all that is kept."""
    dsa = r.model.dsa
    t = r.tokens
    a = r.element
    b = r.samples
    s = r.length
    assert dsa is not None
    heads = dsa.indexer_n_heads
    width = dsa.indexer_head_dim
    gradient = [Tensor(t * size * a) for size in (heads * width, width, heads)]
    pairs = Product(s, s, width, b * heads)
    sums = [Exchange("tp", "reduce", b * s * s * FP32)] * (r.layout.tp > 1)
    needs = PASSES // 2 * min(MOST_SCORES, b * s * s * max(heads, h.n)) * FP32
    # a backward's products are made with the forward's: as many in all
    g.add(
        "indexer.scores",
        gradient,
        [pairs],
        moved=PASSES * b * s * s * heads * FP32,
        factors="activations",
    )
    target = Product(s, s, h.width, b * h.n)
    g.add(
        "indexer.loss",
        [],
        [target],
        moved=PASSES * b * s * s * h.n * FP32,
        exchanges=sums,
        needs=needs,
    )


CHUNK = 64
"""Times of a chunk, of `mtrain_kernels.gated_delta_rule` and of fla."""


def gated_delta_net(g: Graph, r: Rank, x: Tensor) -> Tensor:
    """Add linear attention of a normed input; return its addend of the residual stream."""
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
    # Zeros pad the times before a sample.
    padded = r.samples * (r.length + width - 1) * channels * FP32
    before = Tensor(r.tokens * channels * FP32)  # the activation
    # widened for each tap
    weights = [] if r.wide else [Tensor(channels * width * FP32) for _ in range(width)]
    keeps = [Tensor(padded), before]
    if r.run.data.packed:  # the visible values of each earlier time, and their places
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
    """Return the outputs of heads; plain torch keeps its inputs and recomputes."""
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
        # gradients of inputs by chunks, of squares one more and their sum; outputs
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
