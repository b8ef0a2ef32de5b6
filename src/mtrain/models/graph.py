"""The operations of a part of a model on one rank, in order, with their shapes and the tensors that
autograd keeps.

A family describes its layers with it. Memory is counted from the tensors that are kept, products
from the shapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

INDEX = 8
FP32 = 4
MASK = 1
"""Bytes of a token id, of a number in fp32 and of a mark in a mask."""


@dataclass(eq=False, slots=True)
class Tensor:
    """Memory that has been allocated; two views of it are the same `Tensor`."""

    bytes: int
    shared: bool = False
    """True if all micro-batches share it."""
    constant: bool = False
    """True if it has no gradient."""
    of: Tensor | None = None
    """Tensor whose memory it is a part of; it has its own gradient."""
    quantized: bool = False
    """True if its producer quantises it for the next linear layer and its gradient."""


class Product(NamedTuple):
    """`batch` products of matrices [m, k] and [k, n]."""

    m: int
    n: int
    k: int
    batch: int = 1

    @property
    def flops(self) -> int:
        """Return the FLOPs of its forward: two for each pair of elements."""
        return 2 * self.m * self.n * self.k * self.batch


class Exchange(NamedTuple):
    """A message between the ranks of a group."""

    axis: Literal["tp", "cp", "ep", "etp"]
    kind: Literal["gather", "scatter", "reduce", "all_to_all", "ring"]
    """Gather and reduce-scatter of a tensor, the sum of it on all ranks, parts that each rank has
    for each other, or parts that go round.
    """
    bytes: int
    """Bytes of the whole tensor, of a rank's data in an all-to-all, or of a ring's part."""
    messages: int = 1
    """Copies of a row for as many ranks at most: of a token that several experts take."""


Factors = Literal["weights", "frozen", "activations"]
"""Second factors of products with activations: weights, frozen weights, activations."""


class Op(NamedTuple):
    """One operation."""

    name: str
    """Path of the module that performs it, as `self_attention.linear_qkv`."""
    keeps: tuple[Tensor, ...] = ()
    """Tensors that autograd saves for the backward, without weights."""
    products: tuple[Product, ...] = ()
    moved: int = 0
    """Bytes that its forward reads and writes, without those of products."""
    exchanges: tuple[Exchange, ...] = ()
    """Messages of its forward; its backward sends as many the other way."""
    low: bool = False
    """True if its products are in the low precision of the run, if the run has one."""
    seen: float = 1.0
    """Share of computed pairs of queries and keys in a kernel that passes over hidden ones."""
    factors: Factors = "weights"
    """Second factors of its products."""
    again: bool = False
    """True if the backward recomputes it; nothing is saved of it until then."""
    reads: tuple[Tensor, ...] = ()
    """Inputs whose gradients its backward computes."""
    gives: tuple[Tensor, ...] = ()
    """Outputs of its forward, whose gradients its backward needs."""
    needs: int = 0
    """Transient bytes of its forward, on top of its inputs, outputs and saved tensors."""
    works: int = 0
    """Transient bytes of its backward, on top of saved tensors and gradients."""
    passes: bool = False
    """True if its backward passes on the gradient of its output unchanged, as for a sum."""
    spent: bool = False
    """True if the gradients of its outputs are no longer needed at the peak of its backward."""


@dataclass
class Block:
    """Operations that are done once more in the backward."""

    begin: int
    end: int
    gives: tuple[Tensor, ...] = ()
    """Outputs that are recomputed for their readers."""
    when: int = 0
    """Number of operations before the point at which the backward recomputes the block."""


@dataclass
class Graph:
    """Operations of a forward, in order."""

    ops: list[Op] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    _used: list[Block] = field(default_factory=list)
    """Blocks whose results are still used."""
    _again: bool = False
    own: list[Block] = field(default_factory=list)
    """Blocks that operations repeat in their own backward, in another block or not."""

    def add(
        self,
        name: str,
        keeps: Iterable[Tensor] = (),
        products: Iterable[Product] = (),
        *,
        moved: int = 0,
        exchanges: Iterable[Exchange] = (),
        low: bool = False,
        seen: float = 1.0,
        factors: Factors = "weights",
        reads: Iterable[Tensor] = (),
        gives: Iterable[Tensor] = (),
        needs: int = 0,
        works: int = 0,
        passes: bool = False,
        spent: bool = False,
    ) -> None:
        """Append an operation."""
        keeps = tuple(map(memory, keeps))
        products = tuple(products)
        exchanges = tuple(exchanges)
        op = Op(name, keeps, products, moved, exchanges, low, seen, factors, self._again)
        self.ops.append(
            op._replace(
                reads=tuple(reads),
                gives=tuple(gives),
                needs=needs,
                works=works,
                passes=passes,
                spent=spent,
            )
        )

    @contextmanager
    def recomputed(
        self, name: str, *inputs: Tensor, when: bool = True, discarded: bool = False
    ) -> Iterator[None]:
        """Recompute the operations that are added inside in the backward, from `inputs`, which are
        kept.

        With `discarded`, `discard` names the outputs that are not kept for their readers either.
        """
        # Inside of a block that is recomputed anyway, nothing more is kept or redone.
        if not when or self._again:
            yield
            return
        self.add(name, inputs)
        begin = len(self.ops)
        self._again = True
        try:
            yield
        finally:
            self._again = False
        self.blocks.append(Block(begin, len(self.ops), when=len(self.ops)))
        self._used += self.blocks[-1:] * discarded

    @contextmanager
    def made_again(self, name: str, *inputs: Tensor) -> Iterator[None]:
        """Recompute the operations inside in the backward of one that keeps its `inputs`."""
        self.add(name, inputs)
        begin = len(self.ops)
        outer = self._again
        self._again = True
        try:
            yield
        finally:
            self._again = outer
        self.own.append(Block(begin, len(self.ops), when=len(self.ops)))

    def discard(self, *tensors: Tensor, when: bool = True) -> None:
        """Discard `tensors` of the last recomputed block after use; a backward recomputes them."""
        if when and not self._again:
            block = self._used.pop()
            block.gives = tuple(map(memory, tensors))
            block.when = len(self.ops)

    def kept(self) -> set[Tensor]:
        """Return the tensors that autograd keeps from the forward to the backward."""
        # Discarded outputs are made again before their readers need them.
        discarded = {tensor for block in self.blocks for tensor in block.gives}
        return {tensor for op in self.ops if not op.again for tensor in op.keeps} - discarded

    def flops(self) -> int:
        """Return the FLOPs of the products of the forward."""
        return sum(product.flops for op in self.ops for product in op.products)


def memory(tensor: Tensor) -> Tensor:
    """Return the tensor whose memory a view uses."""
    return tensor.of or tensor


def size(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all of them."""
    return sum(tensor.bytes for tensor in tensors)


def kept(graphs: Iterable[Graph]) -> int:
    """Return the bytes that autograd keeps of several graphs, repeated ones included."""
    # Layers that compute the same share one graph (`gpt.graph.stack`), so graphs are distinguished
    # by identity.
    numbers = Counter(map(id, graphs := list(graphs)))
    every = {id(graph): graph for graph in graphs}
    return sum(number * size(every[key].kept()) for key, number in numbers.items())


def shared(graphs: Iterable[Graph]) -> int:
    """Return the bytes of saved tensors that all micro-batches share."""
    return size(tensor for graph in graphs for tensor in graph.kept() if tensor.shared)
