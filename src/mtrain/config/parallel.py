"""`parallel`: how the model and the batch are cut over ranks. The data-parallel size is derived, never written."""

from __future__ import annotations

from mtrain.config.base import PositiveInt, Section


class ParallelConfig(Section):
    """`parallel`: degrees of each axis. `dp` = ranks / (tp * pp * cp)."""

    tp: PositiveInt = 1
    """Tensor parallel: each layer's matrices are cut over this many ranks."""
    pp: PositiveInt = 1
    """Pipeline parallel: stages of consecutive layers."""
    vpp: PositiveInt = 1
    """Virtual stages per rank (interleaved schedule)."""
    cp: PositiveInt = 1
    """Context parallel: the sequence is cut over this many ranks."""
    ep: PositiveInt = 1
    """Expert parallel: the experts are spread over this many ranks."""
    etp: PositiveInt | None = None
    """Tensor parallel inside experts; null: as `tp`."""
    sequence_parallel: bool = False
    """Norms and residuals are cut over the tp ranks along the sequence."""
    ranks: PositiveInt | None = None
    """Processes in all; null: every device of the cluster, or the fewest that the degrees need on a CPU."""
    distributed_optimizer: bool = False
    """Optimizer state and main weights are spread over the data-parallel ranks (ZeRO-1)."""
    overlap_grad_reduce: bool = False
    """Gradients are reduced while the backward still runs."""
    overlap_param_gather: bool = False
    """Weights are gathered while the forward already runs; needs `distributed_optimizer`."""

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model: tp * pp * cp."""
        return self.tp * self.pp * self.cp
