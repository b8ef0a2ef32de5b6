"""The indexer of sparse attention on one rank: its operations next to MLA, and what its own
backward keeps.
"""

from __future__ import annotations

from mtrain.models.attention import Heads
from mtrain.models.graph import FP32, Exchange, Graph, Product, Tensor
from mtrain.models.rank import Rank

MOST_SCORES = 1 << 24
"""As in `mtrain.mcore.sparse_index`: so many scores are held at once."""
PASSES = 8
"""Times that scores, or attention to be like, are read or written where a part of the queries is
chosen for.
"""


def indexer(g: Graph, r: Rank, x: Tensor, latent: Tensor, h: Heads) -> None:
    """Add the indexer, which reads the input of MLA and its normed latent queries; every
    tensor-parallel rank computes all of it.
    """
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
        # what is read has no gradient, as what is multiplied with a frozen weight has a part of it
        # only
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
    """Choice, loss and its gradient, which is all that is kept."""
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
