"""Muon on matrices and AdamW on everything else, in one optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mtrain_kernels.newton_schulz.op import newton_schulz
from mtrain_kernels.optimizer.fused_adam import FusedAdam

MOMENTUM = "momentum_buffer"
BATCH = 1 << 24
"""Elements of matrices of one shape that are orthogonalised together."""
SCALES = ("spectral", "shape_scaling", "unit_rms_norm")


class Muon(FusedAdam):
    """Momentum whose matrices are orthogonalised before they are added, for groups with `matrix`;
    AdamW for others.

    `matrix` is `whole`, or `qkv`: rows of queries, keys and values, `qkv_rows` of each in turn for
    every group of heads, which are three matrices; a group may say other `qkv_rows`. The momentum
    is an average, `m = momentum m + (1 - momentum) g`, and with `use_nesterov` the update is made
    of `(1 - momentum) g + momentum m`. An orthogonal matrix [r, c] is multiplied by
    `extra_scale_factor` and: spectral `sqrt(max(r, c))`, shape_scaling `sqrt(max(1, r / c))`,
    unit_rms_norm `sqrt(r / c)`. Orthogonalised in `ns_dtype`. Matrices have no masters here: give
    fp32 parameters. All else is as in `FusedAdam`. Source: Jordan et al. 2024,
    kellerjordan.github.io/posts/muon; scales: arXiv:2502.16982.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        momentum: float = 0.95,
        use_nesterov: bool = True,
        num_ns_steps: int = 5,
        ns_dtype: torch.dtype = torch.bfloat16,
        scale_mode: str = "spectral",
        extra_scale_factor: float = 1.0,
        qkv_rows: tuple[int, ...] | None = None,
        **adam: Any,
    ) -> None:
        if scale_mode not in SCALES or num_ns_steps < 1 or not 0 <= momentum < 1:
            raise ValueError(
                f"momentum {momentum}, {num_ns_steps} steps or scale {scale_mode!r} (of {SCALES})"
                " out of range"
            )
        self.momentum = momentum
        self.use_nesterov = use_nesterov
        self.num_ns_steps = num_ns_steps
        self.ns_dtype = ns_dtype
        if adam.get("capturable"):
            raise ValueError("capturable: the step of a matrix has its learning rate from the host")
        self.scale_mode = scale_mode
        self.extra_scale_factor = extra_scale_factor
        self.qkv_rows = qkv_rows
        super().__init__(params, lr, **adam)

    def initialize_state(self, param: Tensor, store_param_remainders: bool | None = None) -> None:
        """Make the state of a parameter: zero momentum of a matrix, else that of AdamW."""
        if any(
            param is p
            for group in self.param_groups
            if group.get("matrix")
            for p in group["params"]
        ):
            self.state[param][MOMENTUM] = torch.zeros_like(
                param, memory_format=torch.contiguous_format
            )
        else:
            super().initialize_state(param, store_param_remainders)

    def orthogonalised(
        self, group: dict[str, Any], params: Sequence[Tensor], made: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return the updates of the matrices `params` of a group, made of `made`; here each process
        has them whole.
        """
        return self._orthogonal(made, self._rows(group))

    def _update(self, group: dict[str, Any], stream: int, grad_scale: Tensor | None) -> None:
        if not group.get("matrix"):
            super()._update(group, stream, grad_scale)
            return
        params = list[Tensor]()
        made = list[Tensor]()
        for param in group["params"]:
            if not self.state[param]:
                self.initialize_state(param)
            grad = self._gradient(param)
            if grad is None or not param.numel():
                continue
            grad = grad.detach().to(param.dtype)
            grad = grad if grad_scale is None else grad * grad_scale
            average = self.state[param][MOMENTUM]
            average.lerp_(grad, 1 - self.momentum)
            params.append(param)
            made.append(grad.lerp(average, self.momentum) if self.use_nesterov else average)
        for param, update in zip(params, self.orthogonalised(group, params, made), strict=True):
            param.detach().mul_(1 - group["lr"] * group["weight_decay"])
            param.detach().add_(update, alpha=-group["lr"])

    def _rows(self, group: dict[str, Any]) -> tuple[int, ...] | None:
        """Return rows of queries, keys and values of a group of heads; None where a
        matrix is one.
        """
        if self.qkv_rows and group["matrix"] == "qkv":
            return group.get("qkv_rows", self.qkv_rows)
        return None

    def _orthogonal(
        self, matrices: Sequence[Tensor], qkv_rows: tuple[int, ...] | None
    ) -> list[Tensor]:
        """Return each of them; those of one shape together."""
        alike: dict[tuple[object, ...], list[int]] = {}
        for place, matrix in enumerate(matrices):
            alike.setdefault((matrix.shape, matrix.dtype), []).append(place)
        out: dict[int, Tensor] = {}
        for places in alike.values():
            most = max(1, BATCH // matrices[places[0]].numel())
            for first in range(0, len(places), most):
                some = places[first : first + most]
                out |= zip(
                    some,
                    self._stacked(torch.stack([matrices[i] for i in some]), qkv_rows),
                    strict=True,
                )
        return [out[place] for place in range(len(matrices))]

    def _stacked(self, matrices: Tensor, qkv_rows: tuple[int, ...] | None) -> Tensor:
        """Stack matrices as [number, rows, columns]."""
        if qkv_rows is None:
            return self._scaled(matrices)
        heads = matrices.unflatten(1, (-1, sum(qkv_rows)))
        parts = [self._scaled(part.flatten(1, 2)) for part in heads.split(qkv_rows, dim=2)]
        return torch.cat(
            [part.unflatten(1, (heads.shape[1], -1)) for part in parts], dim=2
        ).flatten(1, 2)

    def _scaled(self, matrices: Tensor) -> Tensor:
        rows, columns = matrices.shape[-2:]
        scale = {
            "spectral": max(rows, columns),
            "shape_scaling": max(1.0, rows / columns),
            "unit_rms_norm": rows / columns,
        }[self.scale_mode]
        orthogonal = newton_schulz(
            matrices, steps=self.num_ns_steps, dtype=self.ns_dtype, impl=self.impl
        )
        return orthogonal * (scale**0.5 * self.extra_scale_factor)
