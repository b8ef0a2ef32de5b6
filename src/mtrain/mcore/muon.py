"""Muon on weights that are sharded over tensor-parallel ranks, and whose state is over data-parallel ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from mtrain_kernels.optimizer.muon import Muon

from mtrain.mcore.installed import require_installed

require_installed()  # nothing of megatron may be imported before this line

from megatron.core import parallel_state  # noqa: E402

ROUND = 1 << 26
"""Elements of matrices that a data-parallel rank has whole at a time."""


@dataclass(frozen=True)
class Matrix:
    """A matrix whose elements lie on several data-parallel ranks."""

    param: torch.nn.Parameter
    """Of the model: this tensor-parallel rank's part of a weight [rows, columns]."""
    pieces: tuple[tuple[int, int, int], ...]
    """Rank, first element and end of what a rank has of it, in the order of the elements."""
    owner: int
    """The rank that orthogonalises it."""

    def piece(self, rank: int) -> int:
        """Elements on a rank."""
        return sum(end - start for other, start, end in self.pieces if other == rank)


class ParallelMuon(Muon):
    """Muon that gathers a matrix from the ranks that it is sharded over, so that it is orthogonalised whole.

    Each tensor-parallel rank does that for the matrices that it has a part of. Under the distributed optimizer a
    data-parallel rank has consecutive elements of a buffer, so it has pieces of few matrices, and momentum of those:
    each matrix goes to one rank that orthogonalises it, and the update comes back, so that every rank does as many.

    With `tp_mode` blockwise every tensor-parallel rank orthogonalises its own block and talks to no other: another
    update than that of the whole matrix, and another one for each degree of tensor parallelism.
    """

    def __init__(self, params: Any, *args: Any, tp_mode: str = "duplicated", **kwargs: Any) -> None:
        self.tp_mode = tp_mode
        self._ranks: dist.ProcessGroup | None = None
        self._spread: list[list[Matrix]] = []
        self._part_of: dict[int, int] = {}
        super().__init__(params, *args, **kwargs)
        self._whole = [list(group["params"]) for group in self.param_groups]

    def distribute(self, distributed: Any) -> None:
        """Takes the ranges that megatron-core's `DistributedOptimizer` around this one gave its ranks."""
        self._ranks, self._spread = distributed.data_parallel_group, []
        for param, (group, order) in distributed.model_param_group_index_map.items():
            self._part_of[id(param)] = id(self.param_groups[group]["params"][order])
        for group, params in zip(self.param_groups, self._whole, strict=True):
            here = {id(param) for param in params} if group.get("matrix") else set[int]()
            self._spread.append(
                list(_owned(_pieces(distributed.buffers, here, self._ranks.size()), self._ranks.size()))
            )

    def orthogonalised(
        self, group: dict[str, Any], params: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The updates of this rank's parts, which every rank of a group asks for at the same time."""
        if self._ranks is None:
            return self._over_tensor_ranks(group, params, made)
        place = next(i for i, other in enumerate(self.param_groups) if other is group)
        mine, updates = dict(zip(map(id, params), made, strict=True)), dict[int, torch.Tensor]()
        for some in _rounds(self._spread[place], self._ranks.size()):
            here = [self._part_of[id(m.param)] for m in some if m.piece(self._ranks.rank())]
            updates |= zip(here, self._exchanged(group, some, [mine[part] for part in here]), strict=True)
        return [updates[id(param)] for param in params]

    def _exchanged(
        self, group: dict[str, Any], matrices: Sequence[Matrix], made: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Pieces to the owners of their matrices, and the updates back."""
        assert self._ranks is not None
        ranks, rank = range(self._ranks.size()), self._ranks.rank()
        here = [m for m in matrices if m.piece(rank)]
        owned = [m for m in matrices if m.owner == rank]
        by_owner = sorted(range(len(here)), key=lambda i: here[i].owner)
        sent = [sum(m.piece(rank) for m in here if m.owner == other) for other in ranks]
        taken = [sum(m.piece(other) for m in owned) for other in ranks]
        blank = partial(torch.empty, dtype=torch.float32, device=matrices[0].param.device)
        arrived = blank(sum(taken))
        out = torch.cat([blank(0), *(made[i] for i in by_owner)])
        dist.all_to_all_single(arrived, out, taken, sent, group=self._ranks)
        places = [(other, m) for other in ranks for m in owned if m.piece(other)]
        parts = dict(
            zip(((r, id(m)) for r, m in places), arrived.split([m.piece(r) for r, m in places]), strict=True)
        )
        whole = [torch.cat([parts[r, id(m)] for r, *_ in m.pieces]).view(m.param.shape) for m in owned]
        updates = self._over_tensor_ranks(group, [m.param for m in owned], whole)
        for m, update in zip(owned, updates, strict=True):
            for r, start, end in m.pieces:
                parts[r, id(m)].copy_(update.reshape(-1)[start:end])
        back = blank(sum(sent))
        dist.all_to_all_single(back, arrived, sent, taken, group=self._ranks)
        found = dict(zip(by_owner, back.split([here[i].piece(rank) for i in by_owner]), strict=True))
        return [found[i] for i in range(len(here))]

    def _over_tensor_ranks(
        self, group: dict[str, Any], params: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Each matrix gathered whole, orthogonalised, and this rank's rows or columns of it."""
        sharded = [self._tensor_ranks(param, group) for param in params]
        whole = [
            matrix if ranks is None else _gathered(matrix, ranks, dim)
            for matrix, (ranks, dim) in zip(made, sharded, strict=True)
        ]
        return [
            update if ranks is None else update.chunk(ranks.size(), dim)[ranks.rank()]
            for update, (ranks, dim) in zip(self._orthogonal(whole, self._rows(group)), sharded, strict=True)
        ]

    def _tensor_ranks(self, param: torch.Tensor, group: dict[str, Any]) -> tuple[Any, int]:
        """Between which ranks a weight is sharded, and along which dimension; None where it is whole, or taken so."""
        expert = group["is_expert_parallel"]
        ps = parallel_state
        ranks = ps.get_expert_tensor_parallel_group() if expert else ps.get_tensor_model_parallel_group()
        whole = self.tp_mode == "blockwise" or not getattr(param, "tensor_model_parallel", False) or ranks.size() == 1
        return (None, 0) if whole else (ranks, int(param.partition_dim))  # type: ignore[attr-defined]


def _gathered(matrix: torch.Tensor, ranks: dist.ProcessGroup, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(matrix, memory_format=torch.contiguous_format) for _ in range(ranks.size())]
    dist.all_gather(parts, matrix.contiguous(), group=ranks)
    return torch.cat(parts, dim)


def _pieces(
    buffers: Sequence[Any], params: set[int], ranks: int
) -> Iterator[tuple[torch.nn.Parameter, tuple[tuple[int, int, int], ...]]]:
    """Of parameters by their ids, in the order of the buffers: which elements of each a rank has."""
    for buffer in buffers:
        for bucket in buffer.buckets:
            share = bucket.grad_data.numel() // ranks
            for param in bucket.params_list:
                if id(param) in params:
                    start, end, _ = buffer.param_index_map[param]
                    cuts = ((r, bucket.offset + r * share, bucket.offset + (r + 1) * share) for r in range(ranks))
                    held = ((r, max(start, low) - start, min(end, high) - start) for r, low, high in cuts)
                    yield param, tuple(piece for piece in held if piece[1] < piece[2])


def _owned(
    found: Iterator[tuple[torch.nn.Parameter, tuple[tuple[int, int, int], ...]]], ranks: int
) -> Iterator[Matrix]:
    """Each matrix with its owner: the one that takes the longest to the rank that has the least to do so far."""
    every = list(found)
    work, owners = [0] * ranks, dict[int, int]()
    for place in sorted(range(len(every)), key=lambda i: -_work(every[i][0])):  # a stable order: the same on all
        owners[place] = work.index(min(work))
        work[owners[place]] += _work(every[place][0])
    for place, (param, pieces) in enumerate(every):
        yield Matrix(param, pieces, owners[place])


def _work(param: torch.Tensor) -> int:
    """What a Newton-Schulz step grows with."""
    return int(param.numel() * min(param.shape))


def _rounds(matrices: Sequence[Matrix], ranks: int) -> Iterator[list[Matrix]]:
    """So many at a time that no rank has more than `ROUND` elements of them whole, or one matrix."""
    some, held = list[Matrix](), [0] * ranks
    for matrix in matrices:
        size = matrix.param.numel()
        if held[matrix.owner] and held[matrix.owner] + size > ROUND:
            yield some
            some, held = [], [0] * ranks
        some.append(matrix)
        held[matrix.owner] += size
    if some:
        yield some
