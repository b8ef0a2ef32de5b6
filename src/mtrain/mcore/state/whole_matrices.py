"""Optimizers that update whole matrices (Muon, SOAP), gathered from their shards' ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from mtrain_kernels.optimizer.muon import Muon
from mtrain_kernels.optimizer.soap import Factors, Soap, new_factors

from mtrain.layout.grid import owners
from mtrain.mcore.adapter.installed import require_installed

require_installed()  # nothing of megatron may be imported before this line


Work = Callable[[tuple[int, ...]], int]
ROUND = 1 << 26
"""Elements of matrices that a data-parallel rank has whole at a time."""


@dataclass(frozen=True)
class Matrix:
    """A matrix whose elements lie on several data-parallel ranks."""

    param: torch.nn.Parameter
    """Parameter of the model: this tensor-parallel rank's part of a weight [rows, columns]."""
    pieces: tuple[tuple[int, int, int], ...]
    """Rank, first element and end of each rank's part, in the order of the elements."""
    owner: int
    """The rank that computes its update."""

    def piece(self, rank: int) -> int:
        """Return elements on a rank."""
        return sum(end - start for other, start, end in self.pieces if other == rank)


class WholeMatrices:
    """A gatherer for optimizers of sharded matrices; it is made before the optimizer itself.

    Each tensor-parallel rank computes the updates of the matrices that it has a part of. Under the
    distributed optimizer a data-parallel rank has consecutive elements of a buffer, so it has
    pieces of few matrices, and state of those: each matrix goes to one rank that computes its
    update, and the update comes back, so that every rank does as many.

    With `tp_mode` blockwise every tensor-parallel rank takes its own block for a matrix and talks
    to no other: another update than that of the whole, and another one for each degree of tensor
    parallelism. `work` estimates the relative time for a part of a weight from its shape.
    """

    given = 1
    returned = 1
    """Numbers that a matrix is computed of and that are made of it, for each of its elements."""
    param_groups: list[dict[str, Any]]

    def __init__(self, tp_mode: str, work: Work) -> None:
        self.tp_mode = tp_mode
        self._work = work
        self._ranks: dist.ProcessGroup | None = None
        self._spread: list[list[Matrix]] = []
        self._part_of: dict[int, int] = {}
        self._whole: list[list[torch.Tensor]] = []

    def computed(
        self, group: dict[str, Any], params: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Compute [returned, rows, columns] of each whole matrix from [given, rows, columns]."""
        raise NotImplementedError

    def parts_of(self, param: torch.Tensor) -> Sequence[int] | None:
        """Return rows of the weights that a fused one holds one after another on every
        tensor-parallel rank, where the order of rows has a meaning; None: it has none.
        """
        return None

    def distribute(self, distributed: Any) -> None:
        """Take the ranges that the `DistributedOptimizer` around this one gave its ranks."""
        self._ranks = distributed.data_parallel_group
        self._spread = []
        for param, (group, order) in distributed.model_param_group_index_map.items():
            self._part_of[id(param)] = id(self.param_groups[group]["params"][order])
        for group, params in zip(self.param_groups, self._whole, strict=True):
            here = {id(param) for param in params} if group.get("matrix") else set[int]()
            found = list(_pieces(distributed.buffers, here, self._ranks.size()))
            of = owners([self._work(tuple(param.shape)) for param, _ in found], self._ranks.size())
            self._spread.append([Matrix(*one, owner) for one, owner in zip(found, of, strict=True)])

    def rounds(self, group: dict[str, Any]) -> Iterator[tuple[list[Matrix], list[int]]]:
        """Yield matrices exchanged together, with the ids of this rank's pieces, in their order."""
        assert self._ranks is not None
        place = next(i for i, other in enumerate(self.param_groups) if other is group)
        for some in _rounds(self._spread[place], self._ranks.size()):
            yield some, [self._part_of[id(m.param)] for m in some if m.piece(self._ranks.rank())]

    def exchanged(
        self, group: dict[str, Any], matrices: Sequence[Matrix], made: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return pieces [given, elements] to the owners of their matrices, and [returned, elements]
        of the updates back.
        """
        assert self._ranks is not None
        ranks = range(self._ranks.size())
        rank = self._ranks.rank()
        many = self.given
        few = self.returned
        here = [m for m in matrices if m.piece(rank)]
        owned = [m for m in matrices if m.owner == rank]
        # all_to_all sends each rank one run of elements.
        by_owner = sorted(range(len(here)), key=lambda i: here[i].owner)
        sent = [sum(m.piece(rank) for m in here if m.owner == other) for other in ranks]
        taken = [sum(m.piece(other) for m in owned) for other in ranks]
        blank = partial(torch.empty, dtype=torch.float32, device=matrices[0].param.device)
        arrived = blank(many * sum(taken))
        # `blank(0)`: torch refuses to concatenate nothing, as on a rank without pieces.
        out = torch.cat([blank(0), *(made[i].reshape(-1) for i in by_owner)])
        dist.all_to_all_single(
            arrived, out, _times(many, taken), _times(many, sent), group=self._ranks
        )
        places = [(other, m) for other in ranks for m in owned if m.piece(other)]
        parts = _named(places, arrived, many)
        whole = [
            torch.cat([parts[r, id(m)] for r, *_ in m.pieces], 1).view(many, *m.param.shape)
            for m in owned
        ]
        updates = self.over_tensor_ranks(group, [m.param for m in owned], whole)
        # Updates overwrite the received pieces, which have been copied into whole matrices.
        answer = arrived if many == few else blank(few * sum(taken))
        parts = _named(places, answer, few)
        for m, update in zip(owned, updates, strict=True):
            for r, start, end in m.pieces:
                parts[r, id(m)].copy_(update.reshape(few, -1)[:, start:end])
        back = blank(few * sum(sent))
        dist.all_to_all_single(
            back, answer, _times(few, sent), _times(few, taken), group=self._ranks
        )
        pieces = back.split([few * here[i].piece(rank) for i in by_owner])
        found = {i: piece.view(few, -1) for i, piece in zip(by_owner, pieces, strict=True)}
        return [found[i] for i in range(len(here))]

    def over_tensor_ranks(
        self, group: dict[str, Any], params: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return each gathered matrix, its result, and this rank's rows or columns."""
        if self.alone:
            return self.computed(group, params, made)
        sharded = [self.tensor_ranks(param, group) for param in params]
        whole = [
            matrix if ranks is None else _gathered(matrix, ranks, dim, self.parts_of(param))
            for param, matrix, (ranks, dim) in zip(params, made, sharded, strict=True)
        ]
        return [
            update if ranks is None else _own(update, ranks, dim, self.parts_of(param))
            for param, update, (ranks, dim) in zip(
                params, self.computed(group, params, whole), sharded, strict=True
            )
        ]

    @property
    def alone(self) -> bool:
        """Return whether each tensor-parallel rank takes its own block for a matrix."""
        return self.tp_mode == "blockwise"

    def tensor_ranks(self, param: torch.Tensor, group: dict[str, Any]) -> tuple[Any, int]:
        """Return the ranks that shard a weight, and the dimension; None if each has all of it."""
        expert = group["is_expert_parallel"]
        ps = parallel_state
        if expert:
            ranks = ps.get_expert_tensor_parallel_group()
        else:
            ranks = ps.get_tensor_model_parallel_group()
        whole = not getattr(param, "tensor_model_parallel", False) or ranks.size() == 1
        if whole:
            return None, 0
        return ranks, int(param.partition_dim)  # type: ignore[attr-defined]


def _gathered(
    matrix: torch.Tensor, ranks: dist.ProcessGroup, dim: int, rows: Sequence[int] | None
) -> torch.Tensor:
    """Return all ranks' parts [n, rows, columns] along rows or columns, fused weights in turn."""
    parts = [
        torch.empty_like(matrix, memory_format=torch.contiguous_format) for _ in range(ranks.size())
    ]
    dist.all_gather(parts, matrix.contiguous(), group=ranks)
    if rows is None or dim:
        return torch.cat(parts, dim + 1)
    # Every rank has rows of each of the fused weights.
    split = [part.split(list(rows), 1) for part in parts]
    return torch.cat([own[i] for i in range(len(rows)) for own in split], 1)


def _own(
    whole: torch.Tensor, ranks: dist.ProcessGroup, dim: int, rows: Sequence[int] | None
) -> torch.Tensor:
    """Return this rank's part of the matrix that `_gathered` put together."""
    if rows is None or dim:
        return whole.chunk(ranks.size(), dim + 1)[ranks.rank()]
    weights = whole.split([n * ranks.size() for n in rows], 1)
    return torch.cat([weight.chunk(ranks.size(), 1)[ranks.rank()] for weight in weights], 1)


def _times(factor: int, numbers: Sequence[int]) -> list[int]:
    return [factor * n for n in numbers]


def _named(
    places: Sequence[tuple[int, Matrix]], memory: torch.Tensor, each: int
) -> dict[Any, torch.Tensor]:
    """Return views of the ranks' pieces in memory, each [numbers of an element, elements]."""
    pieces = memory.split([each * m.piece(r) for r, m in places])
    return {(r, id(m)): piece.view(each, -1) for (r, m), piece in zip(places, pieces, strict=True)}


def _pieces(
    buffers: Sequence[Any], params: set[int], ranks: int
) -> Iterator[tuple[torch.nn.Parameter, tuple[tuple[int, int, int], ...]]]:
    """Return each rank's range of elements of each parameter, by id, in the buffers' order."""
    for buffer in buffers:
        for bucket in buffer.buckets:
            share = bucket.grad_data.numel() // ranks
            for param in bucket.params_list:
                if id(param) in params:
                    start, end, _ = buffer.param_index_map[param]
                    # The distributed optimizer cuts a bucket into equal shares, wherever its
                    # parameters begin.
                    cuts = (
                        (r, bucket.offset + r * share, bucket.offset + (r + 1) * share)
                        for r in range(ranks)
                    )
                    held = (
                        (r, max(start, low) - start, min(end, high) - start)
                        for r, low, high in cuts
                    )
                    yield param, tuple(piece for piece in held if piece[1] < piece[2])


def _rounds(matrices: Sequence[Matrix], ranks: int) -> Iterator[list[Matrix]]:
    """Group matrices: a rank has at most `ROUND` whole elements at a time, or one matrix."""
    some = list[Matrix]()
    held = [0] * ranks
    for matrix in matrices:
        size = matrix.param.numel()
        if held[matrix.owner] and held[matrix.owner] + size > ROUND:
            yield some
            some = []
            held = [0] * ranks
        some.append(matrix)
        held[matrix.owner] += size
    if some:
        yield some


class ParallelMuon(WholeMatrices, Muon):
    """Muon that orthogonalises a matrix whole, wherever its parts are, or blocks by `tp_mode`."""

    def __init__(self, params: Any, *args: Any, tp_mode: str, work: Work, **kwargs: Any) -> None:
        WholeMatrices.__init__(self, tp_mode, work)
        Muon.__init__(self, params, *args, **kwargs)
        # The distributed optimizer replaces the parameters in the groups with its own shards later.
        self._whole = [list(group["params"]) for group in self.param_groups]

    def orthogonalised(
        self, group: dict[str, Any], params: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the updates of this rank's parts; every rank of a group asks at the same time."""
        if self._ranks is None:
            return [
                update[0]
                for update in self.over_tensor_ranks(group, params, [m.unsqueeze(0) for m in made])
            ]
        mine = dict(zip(map(id, params), made, strict=True))
        updates = dict[int, torch.Tensor]()
        for some, here in self.rounds(group):
            updates |= zip(
                here, self.exchanged(group, some, [mine[part] for part in here]), strict=True
            )
        return [updates[id(param)].view_as(param) for param in params]

    def computed(
        self, group: dict[str, Any], params: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Momenta as orthogonal matrices."""
        return [
            update.unsqueeze(0)
            for update in self._orthogonal([one[0] for one in given], self._rows(group))
        ]


class Owned(NamedTuple):
    """Factors that are on this rank."""

    param: torch.Tensor
    """Parameter: the model's under the distributed optimizer, otherwise this optimizer's."""
    factors: Factors
    copy: int
    """Place among the tensor-parallel ranks that have the same."""
    block: tuple[int, int] | None
    """Index of the block and number of blocks, if the weight's blocks are matrices of their own."""


class ParallelSoap(WholeMatrices, Soap):
    """SOAP that rotates a matrix whole, wherever its parts lie, or blocks of it where `tp_mode`
    says so.

    Both moments are sharded as the weight is. Factors are whole: under the distributed optimizer
    with the data-parallel rank that a matrix belongs to, else with each, and with every
    tensor-parallel rank. Rows of a fused weight stand in the order of the whole, so that moments
    and factors are those of every layout.
    """

    given = 3
    returned = 2

    def __init__(self, params: Any, *args: Any, tp_mode: str, work: Work, **kwargs: Any) -> None:
        WholeMatrices.__init__(self, tp_mode, work)
        Soap.__init__(self, params, *args, **kwargs)
        # The distributed optimizer replaces the parameters in the groups with its own shards later.
        self._whole = [list(group["params"]) for group in self.param_groups]
        self._rows: Mapping[int, Sequence[int]] = {}

    def know(self, rows: Mapping[int, Sequence[int]]) -> None:
        """Take the rows of each weight that fused ones hold on a rank, by the parameter's id."""
        self._rows = rows

    def parts_of(self, param: torch.Tensor) -> Sequence[int] | None:
        """Return rows of the weights that a fused one holds."""
        return self._rows.get(id(param))

    def owned(self) -> Iterator[Owned]:
        """Yield the matrices whose factors are here; new factors are zero."""
        for place, group in enumerate(self.param_groups):
            if not group.get("matrix"):
                continue
            if self._ranks is None:
                params = list(group["params"])
            else:
                # Under the distributed optimizer a matrix has its factors on the rank that computes
                # its update.
                params = [m.param for m in self._spread[place] if m.owner == self._ranks.rank()]
            for param in params:
                ranks, dim = self.tensor_ranks(param, group)
                shape = list(param.shape)
                shape[dim] *= 1 if ranks is None or self.alone else ranks.size()
                if id(param) not in self.factors:
                    self.factors[id(param)] = new_factors(shape, self.max_precond_dim, param.device)
                rank = 0 if ranks is None else ranks.rank()
                block = (rank, ranks.size()) if ranks is not None and self.alone else None
                yield Owned(param, self.factors[id(param)], 0 if block else rank, block)

    def through(
        self,
        group: dict[str, Any],
        params: Sequence[torch.Tensor],
        given: Callable[[torch.Tensor], torch.Tensor],
        taken: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> None:
        """Exchange the factors; every rank of a group calls this at the same time."""
        if self._ranks is None:
            for param in params:
                taken(param, self.over_tensor_ranks(group, [param], [given(param)])[0])
            return
        mine = {id(param): param for param in params}
        for some, here in self.rounds(group):
            made = self.exchanged(group, some, [given(mine[part]) for part in here])
            for part, update in zip(here, made, strict=True):
                taken(mine[part], update)

    def computed(
        self, group: dict[str, Any], params: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Update and second moments."""
        return [self.rotated(group, param, one) for param, one in zip(params, given, strict=True)]
