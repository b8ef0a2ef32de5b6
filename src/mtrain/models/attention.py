"""Softmax attention of one rank's heads: the operations and memory of each implementation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mtrain.config.engine.kernels import ON_CPU
from mtrain.models.graph import FP32, INDEX, MASK, Exchange, Graph, Product, Tensor
from mtrain.models.rank import Rank

MOST_SCORES = 1 << 23
"""Most scores materialised at once in half precision on a CPU, as in the kernel."""


@dataclass(frozen=True)
class Heads:
    """Queries, keys and values of one rank."""

    q: Tensor
    k: Tensor
    v: Tensor
    n: int
    """Query heads."""
    groups: int
    """Key and value heads."""
    width: int
    """Width of a head of queries and keys."""
    v_width: int
    window: bool = False
    """A token sees only some of the keys before it."""
    causal: bool = True
    chosen: bool = False
    """A query sees keys that a mask of every pair of a sample names."""

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tensors that have gradients."""
        return self.q, self.k, self.v


def core_attention(g: Graph, r: Rank, h: Heads) -> Tensor:
    """Add attention; return the input of the output projection."""
    with g.recomputed("core_attention", h.q, h.k, h.v, when=r.recomputes("core_attn")):
        # Under all_gather and a2a a rank has all keys of its heads, so nothing goes round.
        ring = r.layout.cp > 1 and r.layout.cp_comm_type in ("p2p", "a2a+p2p")
        if ring and r.words["attention"] == "triton":
            return _fused_ring(g, r, h)
        if not r.plain("attention"):
            return _fused(g, r, h)
        if ring:
            return _ring(g, r, h)
        return _written_out(g, r, h)


def _products(
    r: Rank, h: Heads, queries: int, keys: int, n: int, documents: float = 1.0
) -> list[Product]:
    """Return the products of all queries and keys of a sequence, or of those of each document."""
    each = round(r.samples * n * documents)
    queries = max(1, round(queries / documents))
    keys = max(1, round(keys / documents))
    return [Product(queries, keys, h.width, each), Product(queries, h.v_width, keys, each)]


def _fused(g: Graph, r: Rank, h: Heads) -> Tensor:
    """Add kernels that hold no scores: operands, result and a number per query."""
    out = Tensor(r.tokens * h.n * h.v_width * r.element)
    numbers = Tensor(r.tokens * h.n * FP32)
    k = h.k
    v = h.v
    if r.layout.cp > 1 and r.layout.cp_comm_type == "all_gather":
        both = r.samples * r.whole * h.groups * (h.width + h.v_width)
        # Keys and values are gathered into one buffer, of which both are views.
        k = Tensor(both * r.element)
        v = k
    keeps = [h.q, k, v, out, numbers]
    products = _products(r, h, r.length, r.whole, h.n, r.documents)
    if h.chosen:
        # The mask of chosen pairs, which all heads share.
        keeps.append(Tensor(r.tokens * r.whole * r.element, constant=True))
    works = 0 if k is h.k else k.bytes  # gradients of the keys and values of all ranks
    more: dict[str, Any] = {"reads": h.operands, "gives": [out], "works": works}
    g.add(
        "core_attention", keeps, products, exchanges=_between_ranks(r, h), seen=seen(r, h), **more
    )
    return out


def _fused_ring(g: Graph, r: Rank, h: Heads) -> Tensor:
    """Add ring attention by a kernel without scores, block by block, with fp32 results."""
    inner, steps = _around(r)
    n = h.n // inner
    groups = max(1, h.groups // inner)
    s = r.length * inner
    rows = r.samples * n * s
    out = r.samples * n * s * h.v_width * FP32
    a = r.element
    q = h.q if inner == 1 else Tensor(rows * h.width * a)
    results = [Tensor(out) for _ in range(steps)]
    numbers = [Tensor(rows * FP32) for _ in range(steps)]
    products = _products(r, h, s, s, n, r.documents)
    exchanges = _between_ranks(r, h)
    part = seen(r, h)
    for i in range(steps):
        both = Tensor(r.samples * s * groups * (h.width + h.v_width) * a)
        table = Tensor(4 * s * FP32, constant=True)
        keeps = [q, both, results[i], numbers[i], table]
        # the gradient of the result in fp32, of what goes round, and of what it came as
        more: dict[str, Any] = {
            "reads": h.operands if i == 0 else [],
            "works": out + 2 * both.bytes,
        }
        g.add(
            "core_attention",
            keeps,
            products,
            exchanges=exchanges if i == 0 else [],
            seen=part,
            **more,
        )
    merged = results[0]
    sums = numbers[0]
    for i in range(1, steps):
        # Partial results are weighed by their sums of exponentials.
        shares = [Tensor(rows * FP32) for _ in range(2)]
        total = Tensor(rows * FP32)
        g.add("core_attention.merge", [merged, results[i], sums, numbers[i], total, *shares])
        merged = Tensor(out)
        sums = total
    if r.model.softmax_type != "vanilla":  # each head's sink joins when all parts are there
        g.add("core_attention.sink", [merged, Tensor(rows * FP32)])
    y = Tensor(r.tokens * h.n * h.v_width * a)
    g.add("core_attention.rounded", gives=[y], works=out)
    return y


def _around(r: Rank) -> tuple[int, int]:
    """Return the counts of ranks that exchange a sequence for heads, and that pass keys on."""
    if r.layout.cp_comm_type == "a2a+p2p":
        inner, outer = r.layout.hierarchical_cp_sizes or (1, r.layout.cp)
        return inner, outer
    return 1, r.layout.cp


def seen(r: Rank, h: Heads) -> float:
    """Return the share of the pairs of queries and keys of a document that are not hidden."""
    if not h.causal or h.chosen:  # kernels that take any mask pass over none
        return 1.0
    window = r.model.window_size
    whole = r.whole / r.documents
    if h.window and window is not None and window < whole:
        return window * (1 - window / (2 * whole)) / whole
    # A causal mask leaves a triangle.
    return 0.5


def _between_ranks(r: Rank, h: Heads) -> list[Exchange]:
    """Return the exchanges between the ranks of one sequence."""
    cp = r.layout.cp
    a = r.element
    tokens = r.tokens
    if cp == 1:
        return []
    keys = tokens * h.groups * (h.width + h.v_width) * a
    if r.layout.cp_comm_type == "all_gather":
        return [Exchange("cp", "gather", keys * cp)]
    if r.layout.cp_comm_type == "a2a":
        sides = keys + tokens * h.n * h.width * a, tokens * h.n * h.v_width * a
        return [Exchange("cp", "all_to_all", size) for size in sides]
    # The keys and values of every rank pass each rank once.
    return [Exchange("cp", "ring", keys * cp)]


def _written_out(g: Graph, r: Rank, h: Heads) -> Tensor:
    """Add torch's attention on a CPU: its fused kernel, or else materialised scores."""
    m = r.model
    b = r.samples
    cp = r.layout.cp
    a = r.element
    s = r.length
    t = r.whole
    n = h.n
    groups = h.groups
    q = h.q
    k = h.k
    v = h.v
    more: list[Tensor] = []
    if cp > 1 and r.layout.cp_comm_type == "a2a":
        s = t
        n = n // cp
        groups = max(1, groups // cp)
        q, k, v = (
            Tensor(b * t * x * a) for x in (n * h.width, groups * h.width, groups * h.v_width)
        )
    elif cp > 1:
        k = Tensor(b * t * groups * (h.width + h.v_width) * a)
        v = k
        more = [Tensor(t * INDEX)]
    sink = m.softmax_type != "vanilla"
    given = h.operands
    # torch's kernel knows the causal mask; any other is a tensor that it is given and keeps.
    masked = h.window or cp > 1 or r.run.data.packed or sink or h.chosen
    scores = b * n * s * t
    h = Heads(q, k, v, n, groups, h.width, h.v_width, h.window, h.causal, h.chosen)
    products = _products(r, h, s, t, n)
    works = 0
    needs = 0
    short = r.words["attention"] == ON_CPU and not r.wide and scores <= MOST_SCORES
    if m.attn_logit_softcapping:
        keeps, out = _capped(r, h, s, t)
        needs = scores * FP32
        works = 3 * scores * FP32
    elif m.attention_dropout or (m.softmax_type == "learnable" and not r.frozen):
        keeps, out = scores_in_fp32(r, h, s, t)
        needs = scores * FP32
        works = 2 * scores * FP32
    elif short and h.causal and not masked:
        out = Tensor(b * s * n * h.v_width * a)
        keeps = [q, k, v, Tensor(scores * a)]
        # shares, their gradients and those of the scores
        needs = scores * FP32
        works = 3 * scores * FP32
    elif h.v_width > h.width:  # which torch's kernel does not take
        keeps, out = scores_in_fp32(r, h, s, t)
        needs = scores * FP32
        works = 3 * scores * FP32
    else:
        keeps, out = _flash(r, h, s, masked)
    if cp > 1:  # other ranks' part of the sequence, and its gradients
        moved = sum(tensor.bytes for tensor in {h.q, h.k, h.v} - set(given))
        needs = needs + moved
        works = works + moved
    if cp > 1 and r.layout.cp_comm_type == "a2a":
        y = Tensor(r.tokens * h.n * cp * h.v_width * a)
    else:
        y = out
    g.add(
        "core_attention",
        [*keeps, *more],
        products,
        reads=given,
        gives=[y],
        needs=needs,
        works=works,
    )
    return y


def _flash(r: Rank, h: Heads, s: int, masked: bool) -> tuple[list[Tensor], Tensor]:
    """Return the tensors of torch's CPU kernel, which takes one head width and masks as numbers."""
    b = r.samples
    a = r.element
    padded = h.v_width < h.width
    sink = r.model.softmax_type != "vanilla"
    out = Tensor(b * s * h.n * h.width * a)
    keys = r.whole + sink
    k = h.k
    v = Tensor(b * r.whole * h.groups * h.width * a) if padded else h.v
    if sink:  # a key more
        k, v = (Tensor(b * keys * h.groups * h.width * a) for _ in range(2))
    if masked:
        mask = [Tensor(h.n * s * keys * FP32) if sink else Tensor(s * keys * a, constant=True)]
    else:
        mask = []
    if h.chosen:
        mask = [Tensor(b * s * keys * a, constant=True)]
    keeps = [h.q, k, v, out, Tensor(b * h.n * s * FP32), *mask]
    # the part of each head that values fill is cut out; of one head that is a view
    return keeps, Tensor(b * s * h.n * h.v_width * a) if padded and h.n > 1 else out


def scores_in_fp32(r: Rank, h: Heads, s: int, t: int) -> tuple[list[Tensor], Tensor]:
    """Add attention with unfused scores, as torch computes it with dropout on a CPU, with a sink,
    whose logit is learned, and for values that are wider than keys; return its saved tensors and
    its output.
    """
    b = r.samples
    m = r.model
    keys = t + (m.softmax_type != "vanilla")
    scores = b * h.n * s * keys * FP32
    # Values in fp32 of one head for each query head are multiplied as they are.
    viewed = r.wide and h.n == h.groups and keys == t
    v = h.v if viewed else Tensor(b * h.n * keys * h.v_width * FP32)
    keeps = [
        Tensor(b * h.n * s * h.width * FP32),
        Tensor(b * h.n * keys * h.width * FP32),
        v,
        Tensor(scores),
    ]
    if m.attention_dropout:
        keeps += [Tensor(scores), Tensor(scores)]
    return keeps, Tensor(b * s * h.n * h.v_width * r.element)


def _capped(r: Rank, h: Heads, s: int, t: int) -> tuple[list[Tensor], Tensor]:
    """Return the fp32 tensors of soft-capped scores: capped scores, exponentials, shares."""
    b = r.samples
    operands = [b * h.n * s * h.width, b * h.n * t * h.width, b * h.n * t * h.v_width, b * h.n * s]
    keeps = [Tensor(size * FP32) for size in (*operands, *[b * h.n * s * t] * 3)]
    return [*keeps, Tensor(s * t * MASK, constant=True), Tensor(b * h.n * s * MASK)], Tensor(
        b * s * h.n * h.v_width * r.element
    )


def _ring(g: Graph, r: Rank, h: Heads) -> Tensor:
    """Add unfused ring attention in fp32, one block of keys after another."""
    b = r.samples
    inner, steps = _around(r)
    n = h.n // inner
    s = r.length * inner
    rows = b * n * s
    out = b * n * s * h.v_width
    # a tensor in fp32 is not copied at every step
    q = h.q if inner == 1 else Tensor(rows * h.width * FP32)
    for step in range(steps):
        operands = [rows * h.width, b * n * s * h.width, out]
        # bent ones, exponentials and shares
        scores = [rows * s] * (3 if r.model.attn_logit_softcapping else 2)
        sizes = [size * FP32 for size in (*operands[r.wide :], *scores, rows, rows)]
        sizes += [rows * s * (FP32 if r.host else MASK)] * bool(r.model.attention_dropout)
        keeps = [*[q] * r.wide, *map(Tensor, sizes), Tensor(s * s * MASK, constant=True)]
        more: dict[str, Any] = {
            "reads": [] if step else h.operands,
            "works": (2 * rows * s + sum(operands)) * FP32,
        }
        g.add("core_attention", keeps, _products(r, h, s, s, n), needs=rows * s * FP32, **more)
    for _ in range(steps - 1):
        g.add(
            "core_attention.merge",
            [Tensor(size * FP32) for size in (out, out, *[rows] * 4)],
            works=2 * out * FP32,
        )
    if r.model.softmax_type != "vanilla":  # each head's sink joins when all parts are there
        g.add(
            "core_attention.sink",
            [Tensor(size * FP32) for size in (out, rows, rows)],
            works=2 * out * FP32,
        )
    y = Tensor(r.tokens * h.n * h.v_width * r.element)
    g.add("core_attention.rounded", gives=[y], works=out * FP32)
    return y
