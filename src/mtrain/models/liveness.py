"""Liveness: the tensors that are alive at each moment of a micro-batch's forward and backward, from
the operations of its graphs.

At an operation these are the tensors that autograd keeps, those that were recomputed, the gradients
of tensors between the operation that made them and those that read them, and the operation's own
transient memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from mtrain.models.graph import Block, Graph, Op, Tensor, memory, size


class Moment(NamedTuple):
    """Bytes in a backward."""

    held: int
    """Saved and recomputed tensors, relative to the start of the backward."""
    transient: int
    """Gradients that are alive, and the transient memory of an operation."""


class Rises(NamedTuple):
    """The peaks of a whole backward."""

    end: int
    """Bytes at the end, relative to the start."""
    most: int
    """The highest `held` of its moments."""
    peak: Moment
    """The moment with the highest sum."""


class Gradients:
    """The gradients that are alive between two operations of a backward."""

    def __init__(self) -> None:
        self.bytes = 0
        self._of: dict[Tensor, Tensor] = {}
        """Tensor -> the tensor whose memory its gradient uses."""
        self._users: Counter[Tensor] = Counter()
        self._pinned: dict[Tensor, Tensor] = {}

    def around(self, op: Op) -> int:
        """Return the bytes after the backward of `op`, before it releases any."""
        for tensor in op.gives:
            if tensor not in self._of:
                self._hold(tensor, tensor)
        # A sum hands on the gradient that it got, without a copy for each operand.
        own = 0 if op.passes else size(t for t in op.reads if not t.constant)
        gone = (self._of[t] for t in op.gives) if op.spent else ()
        return self.bytes + own - size(t for t in gone if self._users[t] == 1)

    def advance(self, op: Op) -> None:
        """Advance past the backward of `op`."""
        handed = self._of[op.gives[0]] if op.passes else None
        for tensor in op.reads:
            if tensor not in self._of and not tensor.constant:  # else it is added to
                self._hold(tensor, handed or tensor)
        for tensor in op.gives:
            owner = self._of.pop(tensor)
            self._users[owner] -= 1
            self.bytes -= 0 if self._users[owner] else owner.bytes

    def pin(self, tensor: Tensor) -> None:
        """Keep the gradient of `tensor` until `release`."""
        if tensor not in self._of:
            self._hold(tensor, tensor)
        owner = self._of[tensor]
        self._pinned[tensor] = owner
        self._users[owner] += 1

    def release(self, tensor: Tensor) -> None:
        """Release the gradient of `tensor`."""
        owner = self._pinned.pop(tensor)
        self._users[owner] -= 1
        self.bytes -= 0 if self._users[owner] else owner.bytes

    def _hold(self, tensor: Tensor, owner: Tensor) -> None:
        self.bytes += 0 if self._users[owner] else owner.bytes
        self._of[tensor] = owner
        self._users[owner] += 1


def backward(g: Graph) -> Iterator[Moment]:
    """Yield the moments of a backward, without a loss, from the earlier saved tensors."""
    first, made = _last_uses(g)
    freed: dict[int, list[Tensor]] = {}
    for tensor, number in first.items():
        freed.setdefault(number, []).append(tensor)
    redone = {block.when: block for block in g.blocks}
    ends = {block.end: block for block in g.blocks}
    outputs = {block.begin: _outputs(g, block) for block in g.blocks}
    gradients = Gradients()
    held = 0
    given = 0
    for number, op in reversed(list(enumerate(g.ops))):
        held += size(made.get(number + 1, ()))
        if number + 1 in redone:
            yield Moment(held, gradients.bytes + _forward(g, redone[number + 1], first.keys()))
        if (
            number + 1 in ends
        ):  # a recomputed part keeps its outputs and their gradients until it is done
            block = ends[number + 1]
            given = size(tensor for tensor in block.gives if tensor in first)
            for tensor in outputs[block.begin]:
                gradients.pin(tensor)
        yield Moment(held, gradients.around(op) + op.works + given)
        gradients.advance(op)
        if not op.name.endswith("loss"):
            held -= size(freed.get(number, ()))
        if number in outputs:
            given = 0
            for tensor in outputs[number]:
                gradients.release(tensor)
    yield Moment(held, gradients.bytes)


def _last_uses(g: Graph) -> tuple[dict[Tensor, int], dict[int, set[Tensor]]]:
    """Return each tensor's last operation that needs it, and the recomputed ones by operation."""
    kept = g.kept()
    first = dict[Tensor, int]()
    made = dict[int, set[Tensor]]()
    for number, op in reversed(list(enumerate(g.ops))):
        # From the last operation to the first: a backward needs a tensor last in the first
        # operation that keeps it.
        first |= dict.fromkeys(op.keeps, number)
    own = {number for block in g.own for number in range(block.begin, block.end)}
    for block in (*g.blocks, *g.own):
        # An operation that makes tensors again by itself does so in its own backward, not with the
        # block around it.
        left_out = own if block in g.blocks else ()
        numbers = [number for number in range(block.begin, block.end) if number not in left_out]
        inside = {t for number in numbers for t in g.ops[number].keeps} | set(block.gives)
        made.setdefault(block.when, set()).update(inside & first.keys() - kept)
    return first, made


def _outputs(g: Graph, block: Block) -> list[Tensor]:
    """Return the outputs of recomputed operations that others read."""
    inside = g.ops[block.begin : block.end]
    read = {tensor for op in inside for tensor in op.reads}
    behind = {tensor for op in g.ops[block.end :] for tensor in op.reads}
    return [
        tensor for op in inside for tensor in op.gives if tensor in behind or tensor not in read
    ]


def forward(g: Graph) -> int:
    """Return the peak transient bytes of a forward, on top of all its saved tensors; at least 0."""
    return _forward(g, Block(0, len(g.ops)), g.kept())


def _forward(g: Graph, block: Block, kept: Collection[Tensor]) -> int:
    """Return the transient peak of a block's forward, less what later operations save."""
    ops = g.ops[block.begin : block.end]
    last = {memory(t): number for number, op in enumerate(ops) for t in (*op.reads, *op.gives)}
    rest = {t: None for op in ops for t in op.keeps if t in kept}
    behind = size(rest)
    now = 0
    most = 0
    alive = dict[int, int]()
    for number, op in enumerate(ops):
        for tensor in op.gives:
            if tensor.of is None and tensor not in kept:
                now += tensor.bytes
                alive[last[tensor]] = alive.get(last[tensor], 0) + tensor.bytes
        for tensor in op.keeps:
            if tensor in rest:
                del rest[tensor]
                behind -= tensor.bytes
        # Tensors that later operations save do not exist yet, and the caller counts them from the
        # start.
        most = max(most, now + op.needs - behind)
        now -= alive.pop(number, 0)
    return most


def rises(g: Graph) -> Rises:
    """Return the peaks of a backward, on top of its start."""
    end = 0
    most = 0
    peak = Moment(0, 0)
    for moment in backward(g):
        end = moment.held
        most = max(most, moment.held)
        peak = max(peak, moment, key=sum)
    return Rises(end, most, peak)


def backwards(graphs: Sequence[Graph]) -> Rises:
    """Return the peaks of several backwards, from the last graph to the first."""
    known: dict[int, Rises] = {}
    now = 0
    most = 0
    peak = Moment(0, 0)
    for graph in reversed(graphs):
        if id(graph) not in known:
            known[id(graph)] = rises(graph)
        found = known[id(graph)]
        most = max(most, now + found.most)
        peak = max(peak, Moment(now + found.peak.held, found.peak.transient), key=sum)
        now += found.end
    return Rises(now, most, peak)


def forwards(graphs: Sequence[Graph]) -> int:
    """Return the peak of several forwards, in order, on top of all saved tensors."""
    known: dict[int, tuple[int, int]] = {}
    behind = 0
    most = 0
    for graph in reversed(graphs):
        if id(graph) not in known:
            known[id(graph)] = forward(graph), size(graph.kept())
        highest, kept = known[id(graph)]
        most = max(most, highest - behind)
        behind = behind + kept
    return most
