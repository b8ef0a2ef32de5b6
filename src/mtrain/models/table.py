"""Tables of the tensors of Hugging Face's models and ours: one of a family for both directions.

Every operation is a rearrangement, so weights, gradients and moments go through it alike, as
torch's tensors or as numpy's arrays of words. Needs no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

Tensors = Mapping[str, Any]
Rearrange = Callable[[list[Any], Any], list[Any]]


@dataclass(frozen=True)
class Operation:
    """A rearrangement between an entry's tensors; its functions also take the model."""

    name: str
    to_ours: Rearrange
    to_theirs: Rearrange

    def apply(self, tensors: list[Any], model: Any, *, inward: bool) -> list[Any]:
        """Return transformers' tensors as mtrain's, or the reverse."""
        return (self.to_ours if inward else self.to_theirs)(tensors, model)


def library_of(tensors: list[Any]) -> Any:
    """Return torch or numpy, whose functions that are needed here have the same names: conversions
    move bits that numpy holds as whole numbers, tests and layouts move torch's tensors.
    """
    return sys.modules[type(tensors[0]).__module__.partition(".")[0]]


def joined(tensors: list[Any], axis: int = 0) -> Any:
    """Return tensors concatenated along an axis; a single one is returned as it is."""
    return library_of(tensors).concatenate(tensors, axis) if len(tensors) > 1 else tensors[0]


def with_rows(table: Any, rows: int) -> Any:
    """Return a tensor with so many rows, padded with zeros."""
    empty = library_of([table]).zeros_like(table[:1])
    return joined([table, *[empty] * (rows - len(table))])


def _same(tensors: list[Any], model: Any) -> list[Any]:
    return tensors


def _transposed(tensors: list[Any], model: Any) -> list[Any]:
    # GPT-2's layers and the experts of GPT-OSS hold [inputs, outputs].
    return [t.swapaxes(-1, -2) for t in tensors]


def _padded(tensors: list[Any], model: Any) -> list[Any]:
    return [with_rows(t, len(t) + model.padded_vocab_size - model.vocab_size) for t in tensors]


def _unpadded(tensors: list[Any], model: Any) -> list[Any]:
    return [t[: model.vocab_size] for t in tensors]


def _joined_qkv(tensors: list[Any], model: Any) -> list[Any]:
    groups = model.query_groups
    rest = tensors[0].shape[1:]
    return [
        joined([t.reshape(groups, -1, model.head_dim, *rest) for t in tensors], 1).reshape(
            -1, *rest
        )
    ]


def _split_qkv(tensors: list[Any], model: Any) -> list[Any]:
    (fused,) = tensors
    rest = fused.shape[1:]
    each = model.num_attention_heads // model.query_groups
    parts = fused.reshape(model.query_groups, each + 2, model.head_dim, *rest)
    # Within a group its queries come first, then its key and its value.
    cuts = (slice(each), slice(each, each + 1), slice(each + 1, None))
    return [parts[:, cut].reshape(-1, *rest) for cut in cuts]


def _joined_gated(tensors: list[Any], model: Any) -> list[Any]:
    queries, keys, values = tensors
    halves = queries.reshape(model.num_attention_heads, 2, model.head_dim, *queries.shape[1:])
    parts = [halves[:, 0], halves[:, 1], keys, values]
    return _joined_qkv([part.reshape(-1, *queries.shape[1:]) for part in parts], model)


def _split_gated(tensors: list[Any], model: Any) -> list[Any]:
    (fused,) = tensors
    rest = fused.shape[1:]
    each = model.num_attention_heads // model.query_groups
    groups = model.query_groups
    d = model.head_dim
    parts = fused.reshape(groups, 2 * each + 2, d, *rest)
    heads = library_of(tensors).stack([parts[:, :each], parts[:, each : 2 * each]], 2)
    return [part.reshape(-1, *rest) for part in (heads, parts[:, -2], parts[:, -1])]


def _delta_rows(model: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return rows of each head of queries and keys: query, key, values, gates, betas, decays."""
    own = model.linear_attention
    share = own.num_value_heads // own.num_key_heads
    values = share * own.value_head_dim
    return (own.key_head_dim, own.key_head_dim, values, values), (share, share)


def _joined_delta(tensors: list[Any], model: Any) -> list[Any]:
    parts = []
    for tensor, rows in zip(tensors, _delta_rows(model), strict=True):
        heads = tensor.reshape(-1, sum(rows), *tensor.shape[1:])
        for begin, end in pairwise((0, *accumulate(rows))):
            parts.append(heads[:, begin:end].reshape(-1, *tensor.shape[1:]))
    return [joined(parts)]


def _split_delta(tensors: list[Any], model: Any) -> list[Any]:
    (fused,) = tensors
    heads = model.linear_attention.num_key_heads
    begin = 0
    out = []
    for rows in _delta_rows(model):
        parts = []
        for each in rows:
            end = begin + heads * each
            parts.append(fused[begin:end].reshape(heads, each, *fused.shape[1:]))
            begin = end
        out.append(joined(parts, 1).reshape(-1, *fused.shape[1:]))
    return out


def _joined_rows(tensors: list[Any], model: Any) -> list[Any]:
    ends = list(
        accumulate(
            n * model.head_dim for n in (model.num_attention_heads, *[model.query_groups] * 2)
        )
    )
    if ends[-1] != len(tensors[0]):
        raise ValueError(
            f"queries, keys and values have {ends[-1]} rows, and {len(tensors[0])} are there"
        )
    return _joined_qkv([tensors[0][a:b] for a, b in pairwise([0, *ends])], model)


def _split_rows(tensors: list[Any], model: Any) -> list[Any]:
    return [joined(_split_qkv(tensors, model))]


def _concatenated(tensors: list[Any], model: Any) -> list[Any]:
    return [joined(tensors)]


def _halves(tensors: list[Any], model: Any) -> list[Any]:
    half = (len(tensors[0]) + 1) // 2
    return [tensors[0][:half], tensors[0][half:]]


def _stacked(tensors: list[Any], model: Any) -> list[Any]:
    return [library_of(tensors).stack(tensors)]


def _unstacked(tensors: list[Any], model: Any) -> list[Any]:
    return list(tensors[0])


def _neighbours_as_halves(tensors: list[Any], model: Any) -> list[Any]:
    """Reorder the last axis: from pairs of gate and gated element to all gates first."""
    return [joined([t[..., 0::2], t[..., 1::2]], -1) for t in tensors]


def _halves_as_neighbours(tensors: list[Any], model: Any) -> list[Any]:
    out = []
    for t in tensors:
        half = t.shape[-1] // 2
        out.append(library_of([t]).stack([t[..., :half], t[..., half:]], -1).reshape(t.shape))
    return out


def chain(*operations: Operation) -> Operation:
    """Return several operations as one: inward in this order, outward in the other."""

    def inward(tensors: list[Any], model: Any) -> list[Any]:
        for operation in operations:
            tensors = operation.to_ours(tensors, model)
        return tensors

    def outward(tensors: list[Any], model: Any) -> list[Any]:
        for operation in reversed(operations):
            tensors = operation.to_theirs(tensors, model)
        return tensors

    return Operation(", ".join(operation.name for operation in operations), inward, outward)


SAME = Operation("same", _same, _same)
TRANSPOSED = Operation("transposed", _transposed, _transposed)
VOCABULARY = Operation("padded vocabulary", _padded, _unpadded)
"""mtrain pads the rows to a multiple of 128."""
QKV = Operation("joined by query group", _joined_qkv, _split_qkv)
"""transformers: queries, keys and values; mtrain: the queries, key and value of each group."""
GATED_QKV = Operation("joined by query group, with gates", _joined_gated, _split_gated)
"""transformers: queries, each head followed by its gate, keys and values; mtrain: each query
group's queries, their gates, its key and its value.
"""
DELTA = Operation("sections of heads", _joined_delta, _split_delta)
"""transformers: for each key head its query, key, values and gates, and its betas and decays;
mtrain: one kind of all heads after another.
"""
QKV_ROWS = Operation("rows joined by query group", _joined_rows, _split_rows)
"""transformers: all queries, then all keys, then all values, in one tensor."""
GATE_UP = Operation("gate over up", _concatenated, _halves)
EXPERTS = Operation("one of each expert", _unstacked, _stacked)
"""transformers: one tensor of all experts; mtrain: one for each."""
PAIRS = Operation("pairs as halves", _neighbours_as_halves, _halves_as_neighbours)
"""transformers: gates and up projections interleaved in the last axis."""


@dataclass(frozen=True)
class Step:
    """Tensors of a model that hold the same, by name."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    operation: Operation


@dataclass(frozen=True)
class Copy:
    """A tensor of transformers that duplicates the tensor `of`, if tied or in an MTP layer."""

    name: str
    of: str
    of_mtp: bool = False
    always: bool = False
    """True if the copy exists whether embeddings are tied or not."""


@dataclass(frozen=True)
class Entry:
    """Tensors with equal content; `{i}` counts layers, `{e}` experts, of mtrain only or of both."""

    ours: str
    theirs: tuple[str, ...]
    operation: Operation = SAME

    def steps(self, model: Any, **numbers: int) -> Iterator[Step]:
        """Yield one step, or one for each expert where both sides hold experts separately."""
        ours = _numbered((self.ours,), numbers)
        theirs = _numbered(self.theirs, numbers)
        experts = range(model.moe.num_experts) if "{e}" in self.ours else range(0)
        if any("{e}" in name for name in theirs):
            for e in experts:
                yield Step(_numbered(ours, {"e": e}), _numbered(theirs, {"e": e}), self.operation)
            return
        each = tuple(ours[0].replace("{e}", str(e)) for e in experts) if experts else ours
        yield Step(each, theirs, self.operation)


def _numbered(names: tuple[str, ...], numbers: Mapping[str, int]) -> tuple[str, ...]:
    for letter, number in numbers.items():
        names = tuple(name.replace(f"{{{letter}}}", str(number)) for name in names)
    return names


@dataclass(frozen=True)
class Table:
    """The entries of a family: once, of each layer, of each layer of one kind, and of each MTP
    layer.

    In an entry of an MTP layer `{m}` counts those layers, and `{i}` goes on from the last of the
    others.
    """

    once: tuple[Entry, ...]
    layer: tuple[Entry, ...]
    dense: tuple[Entry, ...] = ()
    experts: tuple[Entry, ...] = ()
    mtp: tuple[Entry, ...] = ()
    copies: tuple[Copy, ...] = ()
    ignored: tuple[str, ...] = ()
    """Patterns of names of tables that are computed from the configuration."""

    def entries(self, model: Any) -> Iterator[Step]:
        """Yield the entries of a model's every layer, with numbers for letters."""
        for entry in self.once:
            yield from entry.steps(model)
        # Layers before the first sparse one are dense, as in DeepSeek-V3.
        sparse_from = model.num_layers if model.moe is None else model.moe.first_dense_layers
        for i in range(model.num_layers):
            for entry in self.layer + (self.experts if i >= sparse_from else self.dense):
                yield from entry.steps(model, i=i)
        for m in range(model.mtp_held):
            for entry in self.mtp:
                yield from entry.steps(model, i=model.num_layers + m, m=m)

    def held_twice(self, model: Any) -> dict[str, str]:
        """Return the optional names on their side that are duplicates: copy -> original."""
        out = {}
        for copy in self.copies:
            if copy.of_mtp:
                for m in range(model.mtp_held):
                    out[copy.name.replace("{i}", str(model.num_layers + m))] = copy.of
            elif copy.always or model.tie_word_embeddings:
                out[copy.name] = copy.of
        return out


def to_ours(table: Table, model: Any, theirs: Tensors) -> dict[str, Any]:
    """Return transformers' tensors as mtrain's, without entries that have none of them.

    Raises:
        KeyError: only some tensors of an entry are there.
        ValueError: a tensor has no entry, or more than one.
    """
    return _mapped(table, model, theirs, True)


def to_theirs(table: Table, model: Any, ours: Tensors) -> dict[str, Any]:
    """Return mtrain's tensors as transformers', with the errors of `to_ours`."""
    return _mapped(table, model, ours, False)


def _mapped(table: Table, model: Any, given: Tensors, inward: bool) -> dict[str, Any]:
    out: dict[str, Any] = {}
    used: list[str] = []
    for step in table.entries(model):
        source, target = (step.theirs, step.ours) if inward else (step.ours, step.theirs)
        # An entry may be of a part that this model lacks, such as biases.
        if not any(name in given for name in source):
            continue
        used += source
        made = step.operation.apply([given[name] for name in source], model, inward=inward)
        if set(target) & out.keys():
            raise ValueError(f"{target} are made twice")
        out |= dict(zip(target, made, strict=True))
    # A tensor that no entry reads would be lost without a word, and one that two read be there
    # twice.
    if sorted(used) != sorted(given):
        raise ValueError(f"no entry, or more than one: {sorted(set(given) ^ set(used)) or used}")
    return out
