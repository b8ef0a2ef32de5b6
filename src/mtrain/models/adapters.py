"""Low-rank adapters on the linear layers of one rank: their operations and saved tensors."""

from __future__ import annotations

from mtrain.config.schema.run import RunConfig
from mtrain.models.graph import FP32, MASK, Graph, Product, Tensor
from mtrain.models.rank import Rank

LATENT = ("q_proj", "q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj")
"""What MLA makes queries, keys and values with."""


OF_MIXERS = ("mixer.in_proj", "mixer.out_proj")
"""Ends of the names of linear layers of Mamba-2 mixers."""


def parts_of(layer: str, run: RunConfig) -> int:
    """Return the number of layers that a linear layer is made of, each with an A of its own; 0: it
    has no adapter.
    """
    own = layer.rpartition(".")[2]
    peft = run.peft
    kind = own.removeprefix("linear_")
    if peft.kind is None or (kind == own and not layer.endswith(OF_MIXERS)):
        return 0
    if ("qkv" if kind in LATENT else kind) not in (peft.target or ()):
        return 0
    return {"qkv": 3, "fc1": 2 if run.model.gated else 1}.get(kind, 1)


def beside(
    g: Graph, r: Rank, layer: str, x: Tensor, sizes: tuple[int, int], rows: tuple[int, int, int]
) -> None:
    """Add the adapter of a linear layer from `sizes[0]` to `sizes[1]` features of this rank, if it
    has one.

    `rows` are the tokens that A x is made of, those that it is multiplied with B on, and those of
    the result.
    """
    parts = parts_of(layer, r.run) if r.adapted else 0
    if not parts:
        return
    peft, a, (inputs, outputs) = r.run.peft, r.element, sizes
    width = parts * (peft.r or 0)
    keeps = [x]
    if peft.dropout:  # each part has zeros of its own
        noise = rows[0] * inputs * (a if r.host else MASK)
        keeps = [Tensor(size) for _ in range(parts) for size in (noise, rows[0] * inputs * a)]
    keeps.append(Tensor(rows[1] * width * a))
    if parts > 1:  # B as it multiplies all A at once
        keeps.append(Tensor(outputs * width * a))
    if (
        peft.kind == "dora"
    ):  # what is multiplied with the magnitudes, the magnitudes over the norms, and the norms
        keeps += [Tensor(rows[2] * outputs * a), Tensor(outputs * a), Tensor(outputs * FP32)]
    products = [Product(rows[0], width, inputs), Product(rows[1], outputs, width)]
    g.add(f"{layer}.adapter", keeps, products, reads=[x], works=2 * rows[1] * width * a)


def beside_experts(
    g: Graph, r: Rank, layer: str, x: Tensor, rows: tuple[int, int], sizes: tuple[int, int]
) -> None:
    """Add the adapters of the experts of this rank, `rows[1]` of them with `rows[0]` rows each, if
    they have any.
    """
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
