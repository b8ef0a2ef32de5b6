"""The MLP of a decoder layer on one rank, dense or a mixture of experts.

Experts are counted with the load that all of them have alike: a rank whose experts are chosen more
often keeps more.
"""

from __future__ import annotations

from typing import Any

from mtrain.config.schema.moe import MoEConfig, room_of
from mtrain.models.graph import FP32, INDEX, MASK, Exchange, Graph, Product, Tensor
from mtrain.models.parts import activation, add_expert_adapters, column, row, weight_bytes
from mtrain.models.rank import BLOCK, Rank

PLACE = 4
"""Bytes of the place of a row."""


def feed_forward(g: Graph, r: Rank, x: Tensor, layer: int) -> Tensor:
    """Add the MLP of a layer to a normed input; return its addend of the residual stream."""
    moe = r.model.moe
    if moe is None or not mixes(r, layer):
        with g.recomputed("mlp", x, when=r.recomputes("mlp")):
            return mlp(g, r, x, "mlp", r.model.ffn_hidden_size)
    with g.recomputed("moe", x, when=r.recomputes("moe")):
        return _mixture(g, r, x, moe)


def mixes(r: Rank, layer: int) -> bool:
    """Return whether the MLP of a layer, by its number from 0, is a mixture of experts."""
    moe = r.model.moe
    return moe is not None and layer >= moe.first_dense_layers


def mlp(g: Graph, r: Rank, x: Tensor, name: str, width: int, *, offset: bool = True) -> Tensor:
    """Add the two linear layers of `width` channels and the activation; return the output."""
    h = r.model.hidden_size
    share = width // r.layout.tp
    first = column(g, r, f"{name}.linear_fc1", x, h, (2 if r.model.gated else 1) * share)
    y = activation(g, r, f"{name}.activation", first, r.tokens * share, offset=offset)
    return row(g, r, f"{name}.linear_fc2", y, share, h)


def _mixture(g: Graph, r: Rank, x: Tensor, moe: MoEConfig) -> Tensor:
    shared = []
    if moe.shared_expert_intermediate_size:
        with g.recomputed("shared_experts", x, when=r.recomputes("shared_experts")):
            shared = [_shared(g, r, x, moe, moe.shared_expert_intermediate_size)]
    _route(g, r, x, moe)
    rows = _rows(r, moe)
    held = _held(r, moe, rows)
    # rows are sorted by expert and put back; those that are sent by sender before, and once more
    # where they meet
    row = r.model.hidden_size * r.element
    sorts = 4 if r.layout.ep > 1 and moe.token_dispatcher_type != "flex" else 2
    fixed = moe.pad_expert_input_to_capacity or moe.padded
    name = "mlp.dispatch.fixed" if fixed else "mlp.dispatch"
    sent = _sent_rows(r, moe, held)
    # callers of the experts hold them until the last expert is done
    waits = row * sum(sent[:-1])
    moved = sorts * 2 * held * row
    exchanges = _sent(r, moe, held * row)
    rows_in = Tensor(sent[-1] * row)
    needs, works = _on_the_way(r, moe, held, sorts=len(sent) > 1)
    more: dict[str, Any] = {
        "reads": [x],
        "gives": [rows_in],
        "needs": waits + needs[0],
        "works": works[0],
    }
    g.add(name, _places(r, moe, held), moved=moved, exchanges=exchanges, **more)
    came = _experts(g, r, moe, rows_in, rows, held)
    y = Tensor(r.split_tokens * row)
    g.add("mlp.combine", reads=[came, *shared], gives=[y], needs=waits + needs[1], works=works[1])
    return y


def _shared(g: Graph, r: Rank, x: Tensor, moe: MoEConfig, width: int) -> Tensor:
    read = x
    apart = moe.shared_expert_overlap
    if apart and r.layout.sequence_parallel:  # gathered before the layer, which keeps it so
        read = Tensor(r.tokens * r.model.hidden_size * r.element)
    y = mlp(g, r, read, "mlp.shared_experts", width, offset=not apart)
    if not moe.shared_expert_gate:
        return y
    gated = Tensor(y.bytes)
    g.add(
        "mlp.shared_experts.gate",
        [x, y, Tensor(r.split_tokens * r.element)],
        reads=[x, y],
        gives=[gated],
    )
    return gated


def _route(g: Graph, r: Rank, x: Tensor, moe: MoEConfig) -> None:
    """Add the router, in fp32: scores, the choice, and the scores of the balancing loss."""
    t = r.split_tokens
    e = moe.num_experts
    k = moe.router_topk
    sorted_ = moe.router_num_groups is not None or r.words["moe_router"] == "triton"
    scores = Tensor(t * e * FP32)
    chosen = Tensor(t * (e if sorted_ else k) * INDEX)
    keeps = [x, chosen]
    if moe.router_score_function == "sigmoid":
        keeps += [scores, Tensor(t * k * FP32), Tensor(t * FP32)]
        keeps += [Tensor(t * e * FP32)] if sorted_ else []
    else:
        keeps += [scores] if moe.router_pre_softmax else [Tensor(t * k * FP32)]
    if moe.router_load_balancing_type in ("aux_loss", "seq_aux_loss") and moe.aux_loss_coeff:
        keeps += [
            Tensor(t * e * FP32),
            *([Tensor(t * FP32)] if moe.router_score_function == "sigmoid" else []),
        ]
    if moe.input_jitter_eps:  # it reads a product with random numbers, which are kept too
        size = t * r.model.hidden_size * r.element
        keeps = [Tensor(size), Tensor(size), *keeps[1:]]
    if moe.z_loss_coeff:
        keeps.append(Tensor(t * e * FP32))
    product = Product(t, e, r.model.hidden_size)
    wide = 0 if r.wide else t * r.model.hidden_size * FP32
    more: dict[str, Any] = {"reads": [x], "needs": wide, "works": wide}
    g.add("mlp.router", keeps, [product], moved=6 * t * e * FP32, factors=r.factors, **more)


def _rows(r: Rank, moe: MoEConfig) -> int:
    """Return the token copies of a rank's experts at the plan's assumed imbalance."""
    etp = r.layout.etp or r.layout.tp
    rows = r.split_tokens * moe.router_topk * etp
    if moe.expert_capacity_factor is None:
        # A rank cannot get more than all copies, which is ep times its share.
        return round(rows * min(r.layout.expert_imbalance, r.layout.ep))
    factor = moe.expert_capacity_factor
    return round(rows * (factor if moe.pad_expert_input_to_capacity else min(1.0, factor)))


def _held(r: Rank, moe: MoEConfig, rows: int) -> int:
    """Return the rows that the experts of a rank have memory for, where `rows` are tokens'."""
    ep = r.layout.ep
    etp = r.layout.etp or r.layout.tp
    gathered = moe.token_dispatcher_type == "allgather"
    if ep == 1 or not r.by_lists or not (moe.padded or gathered):
        return rows
    # An all-gather brings all tokens, so there is room for all of them.
    factor = None if gathered else moe.alltoall_capacity_factor
    return etp * ep * room_of(r.split_tokens, moe.router_topk, moe.num_experts // ep, ep, factor)


def _places(r: Rank, moe: MoEConfig, held: int) -> list[Tensor]:
    """Return the maps of rows, of all experts or for both ways of each permutation."""
    copies = r.split_tokens * moe.router_topk
    marks = r.split_tokens * moe.num_experts
    if not r.by_lists:
        return [Tensor(marks * MASK), Tensor(marks * FP32), Tensor(copies * INDEX)]
    ep = r.layout.ep
    etp = r.layout.etp or r.layout.tp
    sizes = [copies * etp * ep, held]
    if ep > 1 and moe.token_dispatcher_type == "alltoall":
        sizes = [copies, held // etp, held, held]
    return [
        Tensor(size * (PLACE if r.words["moe_permute"] == "triton" else INDEX)) for size in sizes
    ]


def _sent_rows(r: Rank, moe: MoEConfig, held: int) -> list[int]:
    """Return the copies of rows on their way to experts: sent, received and sorted."""
    ep = r.layout.ep
    etp = r.layout.etp or r.layout.tp
    if ep * etp == 1:
        return [held]
    if moe.token_dispatcher_type == "allgather":
        return [r.split_tokens * ep * etp, held]
    sorted_by_sender = moe.num_experts == ep and not moe.padded and etp == 1
    return [held // etp] * (1 + (ep > 1)) + [held] * (not sorted_by_sender)


def _on_the_way(
    r: Rank, moe: MoEConfig, held: int, *, sorts: bool
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the transient bytes of dispatch and combine, in the forward and in the backward.

    Plain torch widens the rows that our lists name, with one of zeros, and adds up in fp32, as are
    rows of expert-tensor ranks. Kernels do so in their inputs and outputs.
    """
    h = r.model.hidden_size
    row = held * r.model.hidden_size * r.element
    wide = 0 if r.wide else held * h * FP32
    plain = r.words["moe_permute"] != "triton" and r.by_lists
    tokens = r.split_tokens * moe.router_topk * h
    back = row * sorts
    if plain:
        back = max(2 * row, 2 * wide + row, 2 * tokens * FP32)
    if (r.layout.etp or r.layout.tp) > 1:
        back = max(back, row + (2 * wide or row))
    behind = (tokens * r.element) * plain
    return (wide * plain, back), ((2 * wide or row) * plain, behind)


def _sent(r: Rank, moe: MoEConfig, size: int) -> list[Exchange]:
    """Return the exchange of rows with the ranks of their experts, and back."""
    etp = r.layout.etp or r.layout.tp
    found = list[Exchange]()
    if r.layout.ep > 1:
        # To the experts and back.
        found += [Exchange("ep", "all_to_all", size // etp, moe.router_topk)] * 2
    if etp > 1:
        found += [Exchange("etp", "gather", size), Exchange("etp", "scatter", size)]
    return found


def _biased(r: Rank) -> tuple[int, int]:
    """Return the bytes that the biases of experts move for each element of the first and the second
    product.

    TransformerEngine's product adds the first, and its gradient is a separate sum. megatron-core
    multiplies the second with the weights of rows, which are in fp32: a product, a sum, parts put
    together and rounded.
    """
    if not r.model.add_bias_linear:
        return 0, 0
    a = r.element
    if r.words["experts"] == "te":
        return (a, FP32 + (a + 2 * FP32) + 2 * FP32 + (FP32 + a))
    return (2 * a, 2 * a)


def _ours(r: Rank) -> bool:
    """Return whether mtrain's kernels multiply for experts in eight bits."""
    return r.run.precision.quantized is not None and r.words["experts"] != "te"


def _quantises_again(r: Rank) -> bool:
    """Return whether SwiGLU is fused with the cast to eight bits, and recomputed with it."""
    whole = r.by_lists or r.words["experts"] == "triton"
    return (
        _ours(r) and whole and r.model.activation == "swiglu" and r.words["activation"] == "triton"
    )


def _in_eight_bits(r: Rank, rows: int, local: int) -> int:
    """Return the kept elements of `rows` rows of `local` experts, each in whole blocks."""
    return max(1, (rows + (BLOCK - 1) * local) // BLOCK) * BLOCK if _ours(r) else rows


def _experts(g: Graph, r: Rank, moe: MoEConfig, x: Tensor, rows: int, held: int) -> Tensor:
    """Add the products of experts on `rows` rows, in memory for `held`."""
    h = r.model.hidden_size
    a = r.element
    etp = r.layout.etp or r.layout.tp
    width = moe.ffn_hidden_size // etp
    local = moe.num_experts // r.layout.ep
    up = (2 if r.model.gated else 1) * width
    each = rows // local
    low = r.run.precision.quantized is not None
    eight = _in_eight_bits(r, held, local)
    sent = Tensor(eight * h) if low else x
    kept = [] if r.frozen else [sent]
    again = r.recomputes("moe_act")
    weighed = held
    hidden = Tensor(held * up * a)
    out = Tensor(held * h * a)
    if moe.apply_probs_on_input:  # inputs are weighed, and outputs weighed with ones
        weighed_x = Tensor(x.bytes)
        keeps = [Tensor(held * h * a), Tensor(held * FP32), Tensor(held * FP32)]
        wide = held * h * FP32
        g.add(
            "mlp.experts.weighed", keeps, reads=[x], gives=[weighed_x], needs=wide, works=2 * wide
        )
        weighed = 0
        x = weighed_x
    products = [Product(each, up, h, local)]
    moved = held * _biased(r)[0] * up
    more: dict[str, Any] = {"reads": [x], "gives": [hidden], **_apart(r, products[0], hidden, x)}
    g.add(
        "mlp.experts.linear_fc1",
        kept,
        products,
        low=r.multiplies_low,
        moved=moved,
        factors=r.factors,
        **more,
    )
    add_expert_adapters(g, r, "mlp.experts.linear_fc1", sent, (each, local), (h, up))
    with g.recomputed("moe_act", hidden, Tensor(held * FP32), when=again, discarded=True):
        y = activation(g, r, "mlp.experts.activation", hidden, held * width, weighed=weighed)
    nothing = r.frozen or (again and _quantises_again(r))
    if nothing:
        kept = []
    else:
        kept = [Tensor(eight * width) if low else y]
    products = [Product(each, h, width, local)]
    moved = held * _biased(r)[1] * h
    more = {"reads": [y], "gives": [out], **_apart(r, products[0], out, y)}
    g.add(
        "mlp.experts.linear_fc2",
        kept,
        products,
        low=r.multiplies_low,
        moved=moved,
        factors=r.factors,
        **more,
    )
    add_expert_adapters(g, r, "mlp.experts.linear_fc2", y, (each, local), (width, h))
    if r.model.add_bias_linear and r.by_lists and not moe.apply_probs_on_input:
        # of each row, for the gradient of its weight
        g.add("mlp.experts.bias", [Tensor(held * h * a)])
    g.discard(y, when=again)
    return out


def _apart(r: Rank, product: Product, y: Tensor, x: Tensor) -> dict[str, int]:
    """Return the transient bytes of a product of experts: one after the other, parts of the rows
    and a weight's gradient; all at once, gradients of all weights, and with torch's product a
    concatenated copy of them.
    """
    if r.plain("experts"):
        return {"needs": y.bytes, "works": x.bytes + weight_bytes(r, product)}
    stacked = (
        product.batch * product.n * product.k * r.element if r.words["experts"] == "torch" else 0
    )
    return {"needs": stacked, "works": stacked + product.batch * weight_bytes(r, product)}
