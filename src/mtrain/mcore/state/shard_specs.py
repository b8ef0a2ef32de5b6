"""The place of each parameter in the whole model, from megatron-core's sharded state dict of an
unwrapped model.

The answer is kept on the model: once its parameters are sharded over data-parallel ranks, nobody
can say it any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

from mtrain.mcore import api as mcore

_REMEMBERED = "mtrain_shard_specs"


@dataclass(frozen=True)
class ShardSpec:
    """The part of a whole tensor that a run of elements of one parameter or buffer is."""

    key: str
    """Name of the whole tensor, the same in every layout."""
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    """Size of the part; leading axes that count layers or experts have size 1."""
    lead: int
    """Number of axes that count layers or experts."""
    first: int
    """Element of the row-major parameter that the part starts at."""
    replica: tuple[int, ...]
    """Place among the ranks that hold the same part; the last number counts data-parallel ranks."""

    @property
    def numel(self) -> int:
        """Return elements of the part."""
        return prod(self.shape)

    def primary(self, *, sharded: bool = False) -> bool:
        """Return whether this rank saves the part; with `sharded`, each dp rank saves its own."""
        return not any(self.replica[:-1] if sharded else self.replica)


def shard_specs_of(model: Any) -> dict[str, list[ShardSpec]]:
    """Return the shard specs of every parameter and persistent buffer of an unwrapped model, by its
    name in the model.

    A gated MLP's fused weight has two. Asked first before the model is sharded, later answered from
    memory.

    Raises:
        RuntimeError: a part that is not contiguous in its parameter, or a sharded tensor that is
            none.
    """
    if not hasattr(model, _REMEMBERED):
        setattr(model, _REMEMBERED, _describe(model))
    found: dict[str, list[ShardSpec]] = getattr(model, _REMEMBERED)
    return found


def _describe(model: Any) -> dict[str, list[ShardSpec]]:
    # By identity: entries hold the parameters themselves, and their keys are names of whole
    # tensors.
    names = {id(t): name for name, t in chain(model.named_parameters(), model.named_buffers())}
    metadata = {
        "dp_cp_group": mcore.parallel_state.get_data_parallel_group(with_context_parallel=True)
    }
    out: dict[str, list[ShardSpec]] = {}
    for entry in _entries(model.sharded_state_dict(metadata=metadata)):
        name = names.get(id(entry.data))
        if name is None:
            raise RuntimeError(f"{entry.key} is neither a parameter nor a buffer of the model")
        # A tied weight has an entry for each of its uses.
        if name not in out:
            out[name] = [_spec(piece, entry.data.storage_offset()) for piece in _pieces(entry)]
    return out


def _entries(node: Any) -> Iterator[Any]:
    """Yield sharded tensors and factories of a model's state, without objects of no tensor."""
    if isinstance(node, dict):
        for value in node.values():
            yield from _entries(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _entries(value)
    elif (
        isinstance(node, mcore.ShardedTensor | mcore.ShardedTensorFactory) and node.data is not None
    ):
        yield node


def _pieces(entry: Any) -> list[Any]:
    """Return the sharded tensors of an entry (a gated MLP's fused weight is two halves)."""
    if not isinstance(entry, mcore.ShardedTensorFactory):
        return [entry]
    built = entry.build()
    if isinstance(built, dict):
        return list(built.values())
    return list(built) if isinstance(built, list | tuple) else [built]


def _spec(piece: Any, start: int) -> ShardSpec:
    data = piece.data
    if not data.is_contiguous():
        raise RuntimeError(f"{piece.key} is not contiguous in its parameter and cannot be split")
    lead = len(piece.global_shape) - data.ndim
    replica = piece.replica_id
    return ShardSpec(
        key=piece.key,
        global_shape=tuple(piece.global_shape),
        offset=tuple(piece.global_offset),
        shape=(1,) * lead + tuple(data.shape),
        lead=lead,
        # Factories cut views out of the parameter, which tell by their offset where they begin.
        first=data.storage_offset() - start,
        replica=tuple(replica) if isinstance(replica, tuple) else (replica,),
    )
