"""SOAP on weights that are sharded over tensor-parallel ranks, and whose state is over
data-parallel ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from mtrain_kernels.optimizer.soap import Factors, Soap, new_factors

from mtrain.mcore.state.whole_matrices import WholeMatrices, Work


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
