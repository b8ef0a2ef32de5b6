"""Parts that families share: operations and memory of norms, linear layers, activations, embeddings
and losses.

What the plain torch kernels of a CPU keep is compared with what autograd saves
(`tests/distributed/test_plan_kept.py`). What TransformerEngine's, Triton's and torch's fused
kernels keep follows from their sources.
"""

from __future__ import annotations

from typing import Any, Literal

from mtrain.config.engine.kernels import ON_CPU, losses_add_gradients
from mtrain.config.schema.run import RunConfig
from mtrain.models.graph import FP32, INDEX, MASK, Exchange, Graph, Product, Tensor
from mtrain.models.rank import Rank

WRITTEN_OUT = 3
"""Times as many bytes as one kernel moves that separate kernels move."""
FP8_ELEMENT = 1
"""Bytes that a linear layer in eight bits or fewer keeps for an element of its input."""


def norm(g: Graph, r: Rank, name: str, x: Tensor, rows: int, width: int) -> Tensor:
    """Add a norm of `rows` rows; return its output."""
    y = Tensor(rows * width * r.element)
    statistics = Tensor(rows * FP32)
    moved = 2 * y.bytes
    rms = r.model.normalization == "RMSNorm"
    m = r.model
    if not r.plain("norm"):
        keeps = [x, statistics] if rms else [x, statistics, Tensor(rows * FP32)]
        g.add(name, keeps, moved=moved, reads=[x], gives=[y])
        return y
    # Weights are widened to fp32, and 1 + weight is another tensor.
    copied = not r.wide or m.layernorm_zero_centered_gamma
    keeps = [statistics, *([Tensor(width * FP32)] if copied else ())]
    if not rms:
        keeps += [Tensor(rows * FP32), *([Tensor(width * FP32)] if not r.wide else ())]
    # the gradient of RMSNorm on a CPU reads the rows as they are
    written_out = rms and r.words["norm"] == ON_CPU
    widened = not r.wide and not written_out
    keeps.append(Tensor(rows * width * FP32) if widened else x)
    wide = rows * width * FP32  # of rows, normed rows, their gradient and their product
    needs, works = (0, wide * written_out) if r.wide else (2 * wide, 3 * wide)
    times = WRITTEN_OUT if widened else 1
    g.add(name, keeps, moved=moved * times, reads=[x], gives=[y], needs=needs, works=works)
    return y


def column(g: Graph, r: Rank, name: str, x: Tensor, inputs: int, outputs: int) -> Tensor:
    """Add a column-parallel linear layer with `outputs` here; `x` may be a part of the tokens."""
    made = x.quantized and not r.cuts_blocks
    low = r.sends_quantized or made
    arrives = shared_by_tensor_ranks(r, r.tokens * inputs * r.element, "gather", low=low)
    keeps = [] if r.frozen or made else [_input(r, x, inputs)]
    product = Product(r.tokens, outputs, inputs)
    y = Tensor(r.tokens * outputs * r.element)
    # of all tokens, and its gradient
    whole = (r.tokens if r.layout.sequence_parallel else 0) * inputs * r.element
    gathered = 0 if r.gathers_inputs or r.gathers_into_buffer else whole
    works = whole + (0 if r.frozen else gathered) + weight_bytes(r, product)
    more: dict[str, Any] = {"reads": [x], "gives": [y], "needs": gathered, "works": works}
    g.add(
        name, keeps, [product], exchanges=arrives, low=r.multiplies_low, factors=r.factors, **more
    )
    add_adapter(g, r, name, x, (inputs, outputs), (r.split_tokens, r.tokens, r.tokens))
    return y


def row(g: Graph, r: Rank, name: str, x: Tensor, inputs: int, outputs: int) -> Tensor:
    """Add a row-parallel linear layer with `inputs` here, whose output may be split by tokens."""
    low = r.run.precision.quantized is not None
    # The quantised operand is kept in place of the input.
    kept = Tensor(r.tokens * inputs * FP8_ELEMENT) if low else x
    leaves = shared_by_tensor_ranks(
        r, r.tokens * outputs * r.element, "scatter", low=r.sends_quantized
    )
    keeps = [] if r.frozen else [kept]
    product = Product(r.tokens, outputs, inputs)
    y = Tensor(r.split_tokens * outputs * r.element)
    whole = (r.tokens if r.layout.sequence_parallel else 0) * outputs * r.element
    more: dict[str, Any] = {
        "reads": [x],
        "gives": [y],
        "needs": whole,
        "works": whole + weight_bytes(r, product),
    }
    g.add(name, keeps, [product], exchanges=leaves, low=r.multiplies_low, factors=r.factors, **more)
    add_adapter(g, r, name, x, (inputs, outputs), (r.tokens, r.split_tokens, r.split_tokens))
    return y


def whole(g: Graph, r: Rank, name: str, x: Tensor, inputs: int, outputs: int) -> Tensor:
    """Add a linear layer with its whole weight on every rank, over this rank's tokens."""
    low = r.run.precision.quantized is not None and r.words["linear"] != "te"
    kept = Tensor(r.split_tokens * inputs * FP8_ELEMENT) if low else x
    keeps = [] if r.frozen or x.quantized else [kept]
    product = Product(r.split_tokens, outputs, inputs)
    y = Tensor(r.split_tokens * outputs * r.element)
    more: dict[str, Any] = {"reads": [x], "gives": [y], "works": weight_bytes(r, product)}
    g.add(name, keeps, [product], low=r.multiplies_low, factors=r.factors, **more)
    add_adapter(g, r, name, x, (inputs, outputs), (r.split_tokens,) * 3)
    return y


def weight_bytes(r: Rank, product: Product) -> int:
    """Return the bytes of a weight's or group's gradient before it is added to others."""
    return 0 if r.frozen else product.n * product.k * r.element


def summed(g: Graph, r: Rank, name: str, x: Tensor, added: Tensor) -> Tensor:
    """Add a sum to the residual stream `x`; return the new stream."""
    y = Tensor(r.split_tokens * r.model.hidden_size * r.element)
    g.add(f"{name}.sum", moved=3 * y.bytes, reads=[x, added], gives=[y], passes=True)
    dropout(g, r, name, y.bytes // r.element, r.model.hidden_dropout)
    return y


def shared_by_tensor_ranks(
    r: Rank, size: int, kind: Literal["gather", "scatter"], *, low: bool = False
) -> list[Exchange]:
    """Return the exchange before a column-parallel layer (gather), or after a row-parallel one
    (scatter).

    Without sequence parallelism both are one sum: after the row in the forward, after the column in
    the backward. `low`: of a gather and its sum in the backward, the gather is in low precision.
    """
    if r.layout.tp == 1:
        return []
    if r.layout.sequence_parallel:
        # One byte for each element on the way there and two on the way back, instead of two and
        # two.
        return [Exchange("tp", kind, size * 3 // 4 if low else size)]
    return [Exchange("tp", "reduce", size)] if kind == "scatter" else []


def _input(r: Rank, x: Tensor, width: int) -> Tensor:
    if r.run.precision.quantized is not None:  # mtrain quantises and transposes the gathered input
        tokens = r.split_tokens if r.words["linear"] == "te" else r.tokens
        return Tensor(tokens * width * FP8_ELEMENT)
    return Tensor(r.tokens * width * r.element) if r.gathers_inputs else x


def activation(
    g: Graph, r: Rank, name: str, x: Tensor, elements: int, *, weighed: int = 0, offset: bool = True
) -> Tensor:
    """Add the activation of an MLP, from `x`, with a gate of twice the `elements`, to `elements`.

    For experts, `weighed` rows are multiplied with their weights in the same kernel. Without
    `offset` an unfused activation adds none to the gated half.
    """
    size = elements * r.element
    y = Tensor(size)
    weights = [Tensor(weighed * FP32)] if weighed else []
    moved = x.bytes + size
    whole = (
        r.words["activation"] == "triton" and r.by_lists
    )  # our kernel, where it gets the weights
    if fused(r) or (weighed and whole):  # megatron-core's own: one pass, weights included
        g.add(name, [x, *weights], moved=moved, reads=[x], gives=[y])
        return y
    product = Tensor(size)
    more = dict[str, Any]()
    if r.words["activation"] == "triton":
        g.add(name, [x], moved=moved, reads=[x], gives=[product])
    else:  # gradients of gate and up, before they are concatenated
        more = {"works": 2 * size, "spent": True} if r.model.gated else {}
        keeps = _plain(r, x, size, product, offset)
        g.add(name, keeps, moved=WRITTEN_OUT * moved, reads=[x], gives=[product], **more)
    # in fp32, as the weights are: the gradient of the result, of the product, and of weights by
    # channel
    if weighed:
        wide = elements * FP32
        needs, works = (0, wide) if r.wide else (wide, 3 * wide)
        more = {
            "reads": [product],
            "gives": [y],
            "needs": needs,
            "works": works,
            "spent": not r.wide,
        }
        g.add(f"{name}.weighed", [product, *weights], moved=2 * size, **more)
        return y
    return product


def fused(r: Rank) -> bool:
    """Return whether megatron-core fuses the activation, as in `core_fields`."""
    m = r.model
    plain = m.glu_linear_offset == 0 and m.activation_func_clamp_value is None
    swiglu = m.activation == "swiglu" or (
        m.activation == "gelu_tanh" and m.add_bias_linear and m.moe is None
    )
    return r.words["linear"] == "te" and plain and swiglu and r.words["activation"] != "triton"


def _plain(r: Rank, x: Tensor, size: int, product: Tensor, offset: bool) -> list[Tensor]:
    """Return the tensors that activations written out in torch keep."""
    m = r.model
    if not m.gated:
        own = {"relu": [product], "squared_relu": [Tensor(size)], "quick_gelu": [x, Tensor(size)]}
        return own.get(m.activation, [x])
    keeps = [x, Tensor(size)]  # the gate, and the half that it multiplies with its offset added
    keeps += [Tensor(size)] * offset
    if m.activation == "quick_geglu":  # x sigmoid(1.702 x) of clamped x
        keeps += [
            Tensor(size),
            *([Tensor(size)] if m.activation_func_clamp_value is not None else ()),
        ]
    return keeps


def dropout(g: Graph, r: Rank, name: str, elements: int, p: float) -> None:
    """Add random zeros, for which a CPU keeps numbers and a GPU marks."""
    if p:
        g.add(name, [Tensor(elements * (r.element if r.host else MASK))])


def embedding(g: Graph, r: Rank, *, tables: int = 0) -> Tensor:
    """Add the look-up of tokens, and of positions or kinds in more `tables`."""
    ids = [Tensor(r.tokens * INDEX) for _ in range(1 + tables)]
    outside = [Tensor(r.tokens * MASK)] if r.layout.tp > 1 else []
    size = r.split_tokens * r.model.hidden_size
    y = Tensor(size * r.element)
    whole = r.tokens * r.model.hidden_size * r.element
    g.add("embedding", [] if r.frozen else [*ids, *outside])
    works = 0 if r.frozen else m_rows(r) * r.model.hidden_size * r.element
    g.add(
        "embedding.rows", moved=2 * whole, exchanges=_summed(r), gives=[y], needs=whole, works=works
    )
    if r.run.peft.kind is None:  # with adapters it has no gradient
        dropout(g, r, "embedding.dropout", size, r.model.hidden_dropout)
    return y


def _summed(r: Rank) -> list[Exchange]:
    """Add the sum of looked-up rows of a table whose parts are on several ranks."""
    size = r.tokens * r.model.hidden_size * r.element
    kind: Literal["scatter", "reduce"] = "scatter" if r.layout.sequence_parallel else "reduce"
    return [Exchange("tp", kind, size)] if r.layout.tp > 1 else []


def loss(g: Graph, r: Rank, hidden: Tensor, *, columns: int = 0, is_part: bool = False) -> None:
    """Add output layer and cross entropy; `columns` more of the hidden state stand for a bias.

    In parts, the gradients of hidden states and weight are made in the forward and kept, and no
    logits are. Where `losses_add_gradients`, the weight's is in its buffer; that of a loss that
    `is_part` of the whole waits in fp32 for the factor of that loss.
    """
    m = r.model
    rows = m_rows(r)
    width = m.hidden_size + columns
    products = [Product(r.tokens, rows, width)]
    arrives = shared_by_tensor_ranks(r, r.tokens * width * r.element, "gather")
    distils = r.run.objective.distils
    if r.words["loss"] != "megatron" or distils:
        gradients = [Tensor(r.split_tokens * width * r.element)]
        adds = losses_add_gradients(r.run) and not columns
        if not r.frozen and (is_part or not adds):
            gradients.append(Tensor(rows * width * (FP32 if adds or distils else r.element)))
        moved = 3 * r.tokens * rows * r.element
        keeps = [Tensor(r.tokens * FP32), *gradients]
        g.add(
            "output_layer.loss",
            keeps,
            products,
            moved=moved,
            exchanges=arrives,
            factors=r.factors,
            reads=[hidden],
        )
        return
    # megatron-core's cross entropy turns logits into fp32.
    logits = Tensor(r.tokens * rows * FP32)
    marks = [Tensor(r.tokens * MASK), Tensor(r.tokens * INDEX), Tensor(r.tokens * FP32)]
    capped = [Tensor(r.tokens * rows * FP32)] if m.final_logit_softcapping is not None else []
    keeps = [*([] if r.frozen else [hidden]), *capped]
    works = 0 if r.frozen else rows * width * r.element
    g.add(
        "output_layer",
        keeps,
        products,
        exchanges=arrives,
        factors=r.factors,
        reads=[hidden],
        works=works,
    )
    g.add("loss", [logits, *marks], moved=3 * logits.bytes, reads=[logits])


def value(g: Graph, r: Rank, hidden: Tensor) -> None:
    """Add a value head, which each tensor-parallel rank has whole, and the loss of its numbers."""
    products = [Product(r.split_tokens, 1, r.model.hidden_size)]
    numbers = Tensor(r.tokens * FP32)
    arrives = shared_by_tensor_ranks(r, numbers.bytes, "gather")
    wide = hidden if r.element == FP32 else Tensor(r.split_tokens * r.model.hidden_size * FP32)
    g.add("value_head", [wide, numbers], products, exchanges=arrives, reads=[hidden])


def m_rows(r: Rank) -> int:
    """Return the rows of the output layer on a rank."""
    return r.model.padded_vocab_size // r.layout.tp


LATENT = ("q_proj", "q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj")
"""Projections of MLA that make queries, keys and values."""


OF_MIXERS = ("mixer.in_proj", "mixer.out_proj")
"""Ends of the names of linear layers of Mamba-2 mixers."""


def parts_of(layer: str, run: RunConfig) -> int:
    """Return the linear layers fused into one, each with its own A; 0: no adapter."""
    own = layer.rpartition(".")[2]
    peft = run.peft
    kind = own.removeprefix("linear_")
    if peft.kind is None or (kind == own and not layer.endswith(OF_MIXERS)):
        return 0
    # In peft.target, `qkv` names all projections that make queries, keys and values.
    if ("qkv" if kind in LATENT else kind) not in (peft.target or ()):
        return 0
    # A fused layer has an A for each of Hugging Face's layers in it, so that adapters can be
    # exported.
    return {"qkv": 3, "fc1": 2 if run.model.gated else 1}.get(kind, 1)


def add_adapter(
    g: Graph, r: Rank, layer: str, x: Tensor, sizes: tuple[int, int], rows: tuple[int, int, int]
) -> None:
    """Add the adapter of a linear layer from `sizes[0]` to `sizes[1]` features of this rank, if it
    has one.

    `rows` counts tokens: of x in A x, of A x in its product with B, and of the result.
    """
    parts = parts_of(layer, r.run) if r.adapted else 0
    if not parts:
        return
    peft = r.run.peft
    a = r.element
    inputs, outputs = sizes
    width = parts * (peft.r or 0)
    keeps = [x]
    if peft.dropout:  # each part has its own zeros
        noise = rows[0] * inputs * (a if r.host else MASK)
        keeps = [Tensor(size) for _ in range(parts) for size in (noise, rows[0] * inputs * a)]
    keeps.append(Tensor(rows[1] * width * a))
    if parts > 1:  # B as it multiplies all A at once
        keeps.append(Tensor(outputs * width * a))
    if peft.kind == "dora":  # the factor of the magnitudes, magnitudes over norms, and norms
        keeps += [Tensor(rows[2] * outputs * a), Tensor(outputs * a), Tensor(outputs * FP32)]
    products = [Product(rows[0], width, inputs), Product(rows[1], outputs, width)]
    g.add(f"{layer}.adapter", keeps, products, reads=[x], works=2 * rows[1] * width * a)


def add_expert_adapters(
    g: Graph, r: Rank, layer: str, x: Tensor, rows: tuple[int, int], sizes: tuple[int, int]
) -> None:
    """Add the adapters of this rank's `rows[1]` experts with `rows[0]` rows each, if any."""
    if not r.adapted or "experts" not in (r.run.peft.target or ()):
        return
    each, local = rows
    rank = r.run.peft.r or 0
    a = r.element
    etp = r.layout.etp or r.layout.tp
    keeps = [x, Tensor(each * local * rank * a)]
    if etp > 1:  # what expert-tensor ranks have parts of is gathered
        keeps.append(Tensor(local * rank * r.model.hidden_size * a))
    products = [Product(each, rank, sizes[0], local), Product(each, sizes[1], rank, local)]
    g.add(f"{layer}.adapter", keeps, products, reads=[x], works=2 * each * local * rank * a)
