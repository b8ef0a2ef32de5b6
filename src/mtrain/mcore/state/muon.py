"""Muon on weights that are sharded over tensor-parallel ranks, and whose state is over
data-parallel ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mtrain_kernels.optimizer.muon import Muon

from mtrain.mcore.state.whole_matrices import WholeMatrices, Work


class ParallelMuon(WholeMatrices, Muon):
    """Muon that orthogonalises a matrix whole, wherever its parts lie, or blocks of it where
    `tp_mode` says so.
    """

    def __init__(self, params: Any, *args: Any, tp_mode: str, work: Work, **kwargs: Any) -> None:
        WholeMatrices.__init__(self, tp_mode, work)
        Muon.__init__(self, params, *args, **kwargs)
        # The distributed optimizer replaces the parameters in the groups with its own shards later.
        self._whole = [list(group["params"]) for group in self.param_groups]

    def orthogonalised(
        self, group: dict[str, Any], params: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the updates of this rank's parts, which every rank of a group asks for at the
        same time.
        """
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
