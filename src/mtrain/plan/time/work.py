"""The work of a stage's rank in one micro-batch, from its graphs; without efficiencies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from mtrain.models.graph import Exchange, Factors, Graph, Op, Product

# The backward of a memory-bound operation moves half as much more: it also reads a gradient.
BACKWARD_MOVES = 1.5
ATTENTION = "core_attention"
EXPERTS = "mlp.experts."
DISPATCH = "mlp.dispatch"
PADDED = "dispatch.fixed"
COUNTERS = (
    "forward",
    "backward",
    "attends",
    "attends_back",
    "exchanges",
    "forwards",
    "again",
)
# A causal mask leaves half of the pairs of queries and keys; a window leaves fewer.
CAUSAL = 0.5


@dataclass(frozen=True)
class Linear:
    """A product of a layer."""

    product: Product
    low: bool
    """True if the product is in the low precision of the run."""
    grouped: bool
    """True for a layer of experts, with one product for each."""
    factors: Factors = "weights"


@dataclass(frozen=True)
class Pairs:
    """The two products of attention, without pairs that are hidden."""

    flops: float
    width: int
    rows: int
    """Queries of a head, or fewer keys of its window; blocks at an edge waste a part."""


Kind = Literal["linear", "low", "experts", "experts_low", "attention", "dispatch", "other"]
"""Kinds of operations, by the host's work to launch them."""


@dataclass
class Calls:
    """The kernels that an operation launches on top of its first."""

    products: int = 0
    """Products of experts, one for each."""
    casts: int = 0
    """Operands that are brought to low precision, where a run has one."""


@dataclass
class Work:
    """The work of one micro-batch: kind of work -> its amount."""

    forward: Counter[Linear] = field(default_factory=Counter)
    backward: Counter[Linear] = field(default_factory=Counter)
    attends: Counter[Pairs] = field(default_factory=Counter)
    attends_back: Counter[Pairs] = field(default_factory=Counter)
    exchanges: Counter[tuple[Exchange, Linear | None]] = field(default_factory=Counter)
    """Messages, each with the product of the same operation, which it may overlap."""
    moved: float = 0.0
    """Bytes of memory-bound operations."""
    operations: int = 0
    """Operations that the host launches."""
    forwards: Counter[Kind] = field(default_factory=Counter)
    """Operations by kind, in the forward."""
    again: Counter[Kind] = field(default_factory=Counter)
    """Operations that the backward recomputes."""
    order: list[tuple[Work, int]] = field(default_factory=list)
    """Its parts in the order of the forward, with repetitions; empty: it is one part."""
    calls: Calls = field(default_factory=Calls)
    """Kernels that operations launch on top of the first."""
    padded: Calls = field(default_factory=Calls)
    """The same in layers whose experts take as many rows each."""
    mixtures: int = 0
    """Passes through a mixture of experts."""
    fixed: int = 0
    """Passes among them whose shapes are known in advance."""

    def add(self, other: Work, times: int) -> None:
        """Add the work of another, so many times."""
        for name in COUNTERS:
            own = getattr(self, name)
            for key, number in getattr(other, name).items():
                own[key] += times * number
        self.moved += times * other.moved
        self.operations += times * other.operations
        for name in ("calls", "padded"):
            own = getattr(self, name)
            more = getattr(other, name)
            own.products = own.products + times * more.products
            own.casts = own.casts + times * more.casts
        self.mixtures += times * other.mixtures
        self.fixed += times * other.fixed
        self.order += other.order * times or [(other, times)]


def work_of(graph: Graph) -> Work:
    """Return the work of a graph forward and backward, and of any recomputation."""
    done = Work()
    calls = done.padded if any(op.name.endswith(PADDED) for op in graph.ops) else done.calls
    for op in graph.ops:
        passes = 2 if op.again else 1
        _products(done, op, passes)
        for exchange in op.exchanges:
            done.exchanges[exchange, _beside(op)] += passes + 1
        done.moved += op.moved * (passes + BACKWARD_MOVES)
        if op.products or op.moved:
            done.operations += passes + 2
            done.forwards[_kind(op)] += 1
            done.again[_kind(op)] += op.again
        calls.products += (passes + 2) * max(0, _alike(op) - 1)
        calls.casts += (passes + 1) * op.low * _alike(op)
        done.mixtures += (passes + 1) * op.name.startswith(DISPATCH)
        done.fixed += (passes + 1) * op.name.endswith(PADDED)
    return done


def _kind(op: Op) -> Kind:
    if op.name.startswith(DISPATCH):
        return "dispatch"
    if not op.products:
        return "other"
    if ATTENTION in op.name:
        return "attention"
    if op.name.startswith(EXPERTS):
        return "experts_low" if op.low else "experts"
    return "low" if op.low else "linear"


def _beside(op: Op) -> Linear | None:
    if not op.products or ATTENTION in op.name:
        return None
    return Linear(op.products[0], op.low, op.name.startswith(EXPERTS), op.factors)


def _alike(op: Op) -> int:
    """Return the products of one pass, grouped; those of experts are one each."""
    return sum(product.batch if op.name.startswith(EXPERTS) else 1 for product in op.products)


def _products(done: Work, op: Op, passes: int) -> None:
    if ATTENTION in op.name:
        if op.products:
            flops = op.seen * sum(product.flops for product in op.products)
            first = op.products[0]
            rows = first.m if op.seen >= CAUSAL else min(first.m, round(op.seen * first.n))
            pairs = Pairs(flops, first.k, rows)
            done.attends[pairs] += passes
            done.attends_back[pairs] += 1
        return
    for product in op.products:
        linear = Linear(product, op.low, op.name.startswith(EXPERTS), op.factors)
        done.forward[linear] += passes
        done.backward[linear] += 1


def total(graphs: Sequence[Graph]) -> Work:
    """Return the work of a stage; a graph that occurs several times stands for as many layers."""
    every = {id(graph): graph for graph in graphs}
    numbers = Counter(map(id, graphs))
    done = Work()
    for key, number in numbers.items():
        done.add(work_of(every[key]), number)
    return done
