"""Attention of a decoder layer on one rank: projections, norms and rotary positions around its core, or MLA."""

from __future__ import annotations

from mtrain.config.mla import MLAConfig
from mtrain.models.attention import Heads, core_attention
from mtrain.models.gpt.indexer import indexer
from mtrain.models.gpt.linear_attention import gated_delta_net
from mtrain.models.graph import FP32, Graph, Tensor
from mtrain.models.parts import WRITTEN_OUT, column, norm, row, whole
from mtrain.models.rank import Rank


def attention(g: Graph, r: Rank, x: Tensor, layer: int, *, causal: bool = True) -> Tensor:
    """What a layer's attention adds to the residual stream, from its normed input."""
    if r.model.is_linear(layer):
        return gated_delta_net(g, r, x)
    return (_latent if r.model.mla else _standard)(g, r, x, layer, causal)


def windowed(r: Rank, layer: int) -> bool:
    """Whether layer `layer` (from 0) has the sliding window."""
    every = r.model.window_attn_skip_freq
    return r.model.window_size is not None and (every is None or (layer + 1) % every != 0)


def rotates(r: Rank, layer: int) -> bool:
    """Whether layer `layer` has rotary positions."""
    every = r.model.no_rope_freq
    return r.model.position_embedding_type == "rope" and (every is None or (layer + 1) % every != 0)


def _standard(g: Graph, r: Rank, x: Tensor, layer: int, causal: bool) -> Tensor:
    m, t, a, n, groups, d = r.model, r.tokens, r.element, r.heads, r.groups, r.model.head_dim
    every = ((1 + m.attention_output_gate) * m.num_attention_heads + 2 * m.query_groups) * d
    qkv = column(g, r, "self_attention.linear_qkv", x, m.hidden_size, every // r.layout.tp)
    if m.query_groups < r.layout.tp:  # of heads that several ranks have, all are gathered
        qkv = Tensor(t * every * a)
    q = qkv if n == groups or groups == 1 else Tensor(t * n * d * a)  # a copy puts heads of several groups in order
    k = qkv
    if m.qk_layernorm:
        q, k = _normed(g, r, "q_layernorm", q, n), _normed(g, r, "k_layernorm", k, groups)
    if m.qk_l2_norm and rotates(r, layer):
        q, k = _divided(g, r, q, n), _divided(g, r, k, groups)
    if rotates(r, layer):
        q, k = _turned(g, r, "query", n * d, m.rotary_dim), _turned(g, r, "key", groups * d, m.rotary_dim)
    out = core_attention(g, r, Heads(q, k, qkv, n, groups, d, d, windowed(r, layer), causal))
    partly = rotates(r, layer) and m.rotary_dim < d  # then queries lie sample by sample, and so does what comes out
    if r.adapted and r.host and partly and r.samples > 1 and any(out in op.keeps for op in g.ops):
        out = Tensor(out.bytes)  # and its rows in the order of tokens are a copy
    if m.attention_output_gate:
        g.add("output_gate", [out, Tensor(t * n * d * FP32)], moved=WRITTEN_OUT * 3 * out.bytes)
        out = Tensor(t * n * d * a)
    return row(g, r, "self_attention.linear_proj", out, n * d, m.hidden_size)


def _normed(g: Graph, r: Rank, name: str, x: Tensor, heads: int) -> Tensor:
    """Norms of each head, or one over all of them."""
    d, across = r.model.head_dim, r.model.qk_layernorm_across_heads
    if across and r.layout.tp > 1:  # written out: what is scaled, and what is weighed
        size = r.tokens * heads * d * FP32
        weighed = Tensor(heads * d * FP32 if r.frozen else size)
        g.add(name, [x if r.wide else Tensor(size), weighed, Tensor(r.tokens * FP32)])
        return Tensor(r.tokens * heads * d * r.element)
    rows, width = (r.tokens, heads * d) if across else (r.tokens * heads, d)
    if across and heads > 1 and r.groups > 1 and x.bytes != rows * width * r.element:
        x = Tensor(rows * width * r.element)  # of heads that lie apart
    return norm(g, r, name, x, rows, width)


def _divided(g: Graph, r: Rank, x: Tensor, heads: int) -> Tensor:
    """A norm without weight, written out in fp32."""
    size = r.tokens * heads * r.model.head_dim
    g.add("qk_l2_norm", [x if r.wide else Tensor(size * FP32), Tensor(r.tokens * heads * FP32)])
    return Tensor(size * r.element)


def _turned(g: Graph, r: Rank, name: str, width: int, rotary: int) -> Tensor:
    """Rotary positions: tables of sines and cosines are kept, not what they are multiplied with."""
    if r.words["rope"] == "reference" and not r.wide:
        tables = [Tensor(r.length * rotary * r.element) for _ in range(2)]
    else:
        halves = r.host and r.wide and rotary == r.model.head_dim and not r.model.rotary_interleaved
        cosines = rotary if halves else rotary // 2
        tables = [Tensor(r.length * cosines * FP32), Tensor(r.length * (rotary // 2) * FP32)]
    times = WRITTEN_OUT if r.words["rope"] == "reference" else 1
    g.add(f"rotary.{name}", tables, moved=times * 2 * r.tokens * width * r.element)
    return Tensor(r.tokens * width * r.element)


def _turned_of_latents(r: Rank, mla: MLAConfig) -> int:
    """Elements that are read and written for a token and a head. In one kernel a query is turned where it lies, and
    keys and values are taken from what both were made in; else all are put together once more."""
    width = mla.qk_head_dim + mla.qk_pos_emb_head_dim
    if r.words["rope"] == "reference":
        return 2 * (2 * width + mla.v_head_dim)
    return 2 * mla.qk_pos_emb_head_dim + (mla.qk_head_dim + mla.v_head_dim) + (width + mla.v_head_dim)


def _latent(g: Graph, r: Rank, x: Tensor, layer: int, causal: bool) -> Tensor:
    m, mla, t, a, n = r.model, r.model.mla, r.tokens, r.element, r.heads
    assert mla is not None
    width, rotary, h = mla.qk_head_dim + mla.qk_pos_emb_head_dim, mla.qk_pos_emb_head_dim, m.hidden_size
    place = "self_attention"
    q_low = whole(g, r, f"{place}.linear_q_down_proj", x, h, mla.q_lora_rank) if mla.q_lora_rank else None
    kv_low = whole(g, r, f"{place}.linear_kv_down_proj", x, h, mla.kv_lora_rank + rotary)
    rows, latents, again = r.split_tokens, [kv_low], r.recomputes("mla_up_proj")
    if m.qk_layernorm:
        q_low = q_low and norm(g, r, "q_layernorm", q_low, rows, mla.q_lora_rank or 0)
        kv_low = norm(g, r, "kv_layernorm", kv_low, rows, mla.kv_lora_rank)
        for low in filter(None, (q_low, kv_low)):
            low.quantized = r.quantizes and not again
    x.quantized &= not again  # what is made again from `x` quantises it
    latents += [kv_low, *([q_low] if q_low else [x])]
    with g.recomputed("mla_up_proj", *latents, when=again, discarded=True):
        if q_low:
            column(g, r, f"{place}.linear_q_up_proj", q_low, mla.q_lora_rank or 0, n * width)
        else:
            column(g, r, f"{place}.linear_q_proj", x, h, n * width)
        column(g, r, f"{place}.linear_kv_up_proj", kv_low, mla.kv_lora_rank, n * (mla.qk_head_dim + mla.v_head_dim))
        tables = [Tensor(r.length * rotary * a) for _ in range(4)]
        g.add("rotary", tables, moved=t * n * _turned_of_latents(r, mla) * a)
    q, k, v = (Tensor(t * n * size * a) for size in (width, width, mla.v_head_dim))
    heads = Heads(q, k, v, n, n, width, mla.v_head_dim, windowed(r, layer), causal, chosen=m.dsa is not None)
    if q_low and heads.chosen:
        indexer(g, r, x, q_low, heads)
    out = core_attention(g, r, heads)
    g.discard(q, k, v, when=again)
    return row(g, r, f"{place}.linear_proj", out, n * mla.v_head_dim, h)
