"""What a part of a model computes on one rank: its operations in order, with their shapes and what autograd keeps.

A family describes its layers with it. Memory is counted from the tensors that are kept, products from the shapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, NamedTuple

INDEX, FP32, MASK = 8, 4, 1
"""Bytes of a token id, of a number in fp32 and of a mark in a mask."""


@dataclass(eq=False, slots=True)
class Tensor:
    """Memory that has been allocated; two views of it are the same `Tensor`."""

    bytes: int
    shared: bool = False
    """All micro-batches have the same one."""
    constant: bool = False
    """It has no gradient."""
    quantized: bool = False
    """What makes it quantises it for the linear layer behind, and makes it again for the gradient of its weight."""


class Product(NamedTuple):
    """`batch` products of matrices [m, k] and [k, n]."""

    m: int
    n: int
    k: int
    batch: int = 1

    @property
    def flops(self) -> int:
        """Of its forward: an addition and a multiplication for each pair of elements."""
        return 2 * self.m * self.n * self.k * self.batch


class Exchange(NamedTuple):
    """What the ranks of a group send each other."""

    axis: Literal["tp", "cp", "ep", "etp"]
    kind: Literal["gather", "scatter", "reduce", "all_to_all", "ring"]
    """Gather and reduce-scatter of a tensor, the sum of it on all ranks, parts that each rank has for each other, or
    parts that go round."""
    bytes: int
    """Of the whole tensor; of what a rank has for others where all send to all; of what goes round."""
    messages: int = 1
    """Copies of a row for as many ranks at most: of a token that several experts take."""


Factors = Literal["weights", "frozen", "activations"]
"""What products multiply activations with: weights, weights that have no gradient, or other activations."""


class Op(NamedTuple):
    """One operation."""

    name: str
    """Of the module that does it, as `self_attention.linear_qkv`."""
    keeps: tuple[Tensor, ...] = ()
    """What autograd keeps of it for the backward, without weights."""
    products: tuple[Product, ...] = ()
    moved: int = 0
    """Bytes that its forward reads and writes beside products."""
    exchanges: tuple[Exchange, ...] = ()
    """Of its forward; its backward has as many the other way."""
    low: bool = False
    """Its products are in the low precision of the run, where that has one."""
    seen: float = 1.0
    """Share of the pairs of queries and keys that a kernel computes which passes over hidden ones."""
    factors: Factors = "weights"
    """Of its products."""
    works: int = 0
    """Bytes that its backward has beside what is kept and made again, where those are more than the gradients of the
    largest tensor and of one of half its size."""
    again: bool = False
    """It is done once more in the backward, and until then nothing is kept of it."""


@dataclass
class _Block:
    """Operations that are done once more in the backward."""

    begin: int
    end: int
    gives: tuple[Tensor, ...] = ()
    """What is made again for those who used it."""
    when: int = 0
    """Behind so many operations; a backward that has come there does those of the block once more."""


@dataclass
class Graph:
    """Operations of a forward, in order."""

    ops: list[Op] = field(default_factory=list)
    _blocks: list[_Block] = field(default_factory=list)
    _used: list[_Block] = field(default_factory=list)
    """Blocks whose results are still used."""
    _again: bool = False
    _own: list[_Block] = field(default_factory=list)
    """Blocks that operations do once more in their own backward, whether they stand in another block or not."""

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
        works: int = 0,
    ) -> None:
        """One operation more."""
        op = Op(name, tuple(keeps), tuple(products), moved, tuple(exchanges), low, seen, factors, works, self._again)
        self.ops.append(op)

    @contextmanager
    def recomputed(self, name: str, *inputs: Tensor, when: bool = True, discarded: bool = False) -> Iterator[None]:
        """What is added inside is done once more in the backward, from `inputs`, which are kept.

        With `discarded`, `discard` says what of it is not kept for those who use it either.
        """
        if not when or self._again:
            yield
            return
        self.add(name, inputs)
        begin, self._again = len(self.ops), True
        try:
            yield
        finally:
            self._again = False
        self._blocks.append(_Block(begin, len(self.ops), when=len(self.ops)))
        self._used += self._blocks[-1:] * discarded

    @contextmanager
    def made_again(self, name: str, *inputs: Tensor) -> Iterator[None]:
        """What is added inside is done once more in the backward of this one operation, which keeps its `inputs`."""
        self.add(name, inputs)
        begin, outer, self._again = len(self.ops), self._again, True
        try:
            yield
        finally:
            self._again = outer
        self._own.append(_Block(begin, len(self.ops), when=len(self.ops)))

    def discard(self, *tensors: Tensor, when: bool = True) -> None:
        """`tensors`, of the last block that is recomputed, have been used: a backward that comes here makes them
        again."""
        if when and not self._again:
            block = self._used.pop()
            block.gives, block.when = tensors, len(self.ops)

    def kept(self) -> set[Tensor]:
        """What autograd keeps from the forward to the backward."""
        discarded = {tensor for block in self._blocks for tensor in block.gives}
        return {tensor for op in self.ops if not op.again for tensor in op.keeps} - discarded

    def moves(self) -> Iterator[int]:
        """Of a backward, step by step: bytes more or less than it began with, without what a loss keeps."""
        kept, first, made = self.kept(), dict[Tensor, int](), dict[int, set[Tensor]]()
        for number, op in reversed(list(enumerate(self.ops))):
            first |= dict.fromkeys(op.keeps, number)
        own = {number for block in self._own for number in range(block.begin, block.end)}
        for block in (*self._blocks, *self._own):
            left_out = own if block in self._blocks else ()
            numbers = [number for number in range(block.begin, block.end) if number not in left_out]
            inside = {t for number in numbers for t in self.ops[number].keeps} | set(block.gives)
            made.setdefault(block.when, set()).update(inside & first.keys() - kept)
        for number, op in reversed(list(enumerate(self.ops))):
            yield size(made.get(number + 1, ()))
            if not op.name.endswith("loss"):
                yield -size(tensor for tensor in set(op.keeps) if first[tensor] == number)

    def rises(self) -> tuple[int, int]:
        """Of a backward: bytes more at its end than it began with, and the most on its way."""
        if not self._blocks and not self._own:  # nothing is made again: it only frees
            first: dict[Tensor, Op] = {}
            for op in self.ops:
                for tensor in op.keeps:
                    first.setdefault(tensor, op)
            return -size(tensor for tensor, op in first.items() if not op.name.endswith("loss")), 0
        ups = list(accumulate(self.moves(), initial=0))
        return ups[-1], max(ups)

    def flops(self) -> int:
        """Of the products of the forward."""
        return sum(product.flops for op in self.ops for product in op.products)

    def working(self) -> int:
        """Bytes that a backward has beside what is kept and made again.

        These are the gradients of the largest tensor and of one of half its size, as traces have them, or what an
        operation is known to work with.
        """
        largest = max((tensor.bytes for op in self.ops for tensor in op.keeps if not tensor.constant), default=0)
        return max(3 * largest // 2, max((op.works for op in self.ops), default=0))


def size(tensors: Iterable[Tensor]) -> int:
    """Bytes of all of them."""
    return sum(tensor.bytes for tensor in tensors)


def kept(graphs: Iterable[Graph]) -> int:
    """Bytes that autograd keeps of several graphs; one that is there several times stands for as many layers."""
    numbers = Counter(map(id, graphs := list(graphs)))
    every = {id(graph): graph for graph in graphs}
    return sum(number * size(every[key].kept()) for key, number in numbers.items())


def most_made_again(graphs: Sequence[Graph]) -> int:
    """The most bytes that a backward comes to have more than were kept, from the last graph to the first."""
    known: dict[int, tuple[int, int]] = {}
    now = most = 0
    for graph in reversed(graphs):
        if id(graph) not in known:
            known[id(graph)] = graph.rises()
        more, highest = known[id(graph)]
        most, now = max(most, now + highest), now + more
    return most


def shared(graphs: Iterable[Graph]) -> int:
    """Bytes of that which are the same for all micro-batches."""
    return size(tensor for graph in graphs for tensor in graph.kept() if tensor.shared)
