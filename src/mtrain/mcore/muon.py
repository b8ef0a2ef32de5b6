"""Muon on weights that are sharded over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from mtrain_kernels.optimizer.muon import Muon

from mtrain.mcore.installed import require_installed

require_installed()  # nothing of megatron may be imported before this line

from megatron.core import parallel_state  # noqa: E402


class ParallelMuon(Muon):
    """Muon that gathers a matrix from the ranks that it is sharded over, so that it is orthogonalised whole on each.

    With `tp_mode` blockwise every rank orthogonalises its own block and talks to nobody: another update than that
    of the whole matrix, and another one for each degree of tensor parallelism.
    """

    def __init__(self, params: Any, *args: Any, tp_mode: str = "duplicated", **kwargs: Any) -> None:
        self.tp_mode = tp_mode
        super().__init__(params, *args, **kwargs)

    def assembled(self, param: torch.Tensor, group: dict[str, Any], matrix: torch.Tensor) -> torch.Tensor:
        """The whole matrix from all ranks."""
        ranks, dim = self._pieces(param, group)
        if ranks is None:
            return matrix
        parts = [torch.empty_like(matrix) for _ in range(ranks.size())]
        dist.all_gather(parts, matrix.contiguous(), group=ranks)
        return torch.cat(parts, dim)

    def own_part(self, param: torch.Tensor, group: dict[str, Any], matrix: torch.Tensor) -> torch.Tensor:
        """This rank's rows or columns."""
        ranks, dim = self._pieces(param, group)
        return matrix if ranks is None else matrix.chunk(ranks.size(), dim)[ranks.rank()]

    def _pieces(self, param: torch.Tensor, group: dict[str, Any]) -> tuple[Any, int]:
        """Between which ranks a weight is sharded, and along which dimension; None where it is whole, or taken so."""
        expert = group["is_expert_parallel"]
        ps = parallel_state
        ranks = ps.get_expert_tensor_parallel_group() if expert else ps.get_tensor_model_parallel_group()
        whole = self.tp_mode == "blockwise" or not getattr(param, "tensor_model_parallel", False) or ranks.size() == 1
        return (None, 0) if whole else (ranks, int(param.partition_dim))  # type: ignore[attr-defined]
