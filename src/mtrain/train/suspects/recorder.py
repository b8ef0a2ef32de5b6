"""Checksums of all tensors that a rank sends while it computes the gradients of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from mtrain.train.hooks.replicas import checksum

INPUTS = {
    "allreduce": 0,
    "allreduce_coalesced": 0,
    "broadcast": 0,
    "reduce": 0,
    "send": 0,
    "recv": 0,
    "allgather": 1,
    "allgather_coalesced": 1,
    "_allgather_base": 1,
    "all_gather_single": 1,
    "allgather_into_tensor_coalesced": 1,
    "all_gather_single_coalesced": 1,
    "reduce_scatter": 1,
    "_reduce_scatter_base": 1,
    "reduce_scatter_single": 1,
    "reduce_scatter_tensor_coalesced": 1,
    "reduce_scatter_single_coalesced": 1,
    "alltoall": 1,
    "alltoall_base": 1,
    "all_to_all_single": 1,
    "gather": 1,
    "scatter": 1,
}
"""Methods of a process group -> the place of the argument with the tensors that this rank gives.
Every collective of `torch.distributed` calls one of them.
"""

OWN = "rank "
"""The first letters of the keys of results that no other rank receives."""


@dataclass
class Recorder:
    """The communications of a rank, in order."""

    rank: int
    measures: bool = False
    """True if the largest magnitude of each tensor is recorded, too."""
    keys: list[str] = field(default_factory=list)
    """A name of each communication that all ranks of it agree on."""
    sums: list[torch.Tensor] = field(default_factory=list)
    """A checksum of what this rank gave; int64 scalars."""
    sizes: list[torch.Tensor] = field(default_factory=list)
    """The largest magnitudes; fp32 scalars, the largest one where a number is not finite."""
    counts: Counter[str] = field(default_factory=Counter)

    def note(self, key: str, tensors: Sequence[torch.Tensor]) -> None:
        """Record tensors that this rank gives away, or that are its results."""
        with torch.no_grad():
            own = [tensor.detach() for tensor in tensors]
            self.keys.append(key)
            sums = [checksum(t) for t in own] or [torch.zeros((), dtype=torch.int64)]
            self.sums.append(torch.stack(sums).sum())
            if self.measures:
                sizes = [_size(t) for t in own if t.is_floating_point() and t.numel()]
                self.sizes.append(torch.stack(sizes or [torch.zeros(())]).max())

    def note_own(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Record results that no other rank receives."""
        self.note(f"{OWN}{self.rank}:{name}", tensors)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record every communication inside, of any group."""
        # From the class's own dictionary: what `getattr` returns would not bind to a group again.
        real = {name: each for name, each in vars(dist.ProcessGroup).items() if name in INPUTS}
        try:
            for name in real:
                method = getattr(dist.ProcessGroup, name)
                setattr(dist.ProcessGroup, name, self._heard(name, method))
            yield
        finally:
            for name, method in real.items():
                setattr(dist.ProcessGroup, name, method)

    def _heard(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: Any, *given: Any, **named: Any) -> Any:
            self._hear(name, group, given)
            return method(group, *given, **named)

        return call

    def _hear(self, name: str, group: Any, given: Sequence[Any]) -> None:
        here = group.rank()
        tensors = list(_tensors(given[INPUTS[name]]))
        place = name
        if name in ("send", "recv"):
            ends = (here, given[1]) if name == "send" else (given[1], here)
            place = f"{ends[0]}>{ends[1]}"
        # A buffer that is only received into holds whatever was in its memory.
        gives = name != "recv" and (name != "broadcast" or given[1].rootRank == here)
        heard = f"{group.group_name}:{place}"
        self.counts[heard] += 1
        self.note(f"{heard}:{self.counts[heard]}", tensors if gives else [])


def _size(tensor: torch.Tensor) -> torch.Tensor:
    size = tensor.abs().max().float()
    return torch.where(size.isfinite(), size, torch.finfo(torch.float32).max)


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
        return
    for each in given:
        yield from _tensors(each)
