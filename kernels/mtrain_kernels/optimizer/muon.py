"""Muon on matrices and AdamW on everything else, in one optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mtrain_kernels.optimizer.fused_adam import FusedAdam
from mtrain_kernels.optimizer.op import newton_schulz

MOMENTUM = "momentum_buffer"
SCALES = ("spectral", "shape_scaling", "unit_rms_norm")


class Muon(FusedAdam):
    """Momentum whose matrices are orthogonalised before they are added, for groups with `matrix`; AdamW for others.

    `matrix` is `whole`, or `qkv`: rows of queries, keys and values, `qkv_rows` of each in turn for every group of
    heads, which are three matrices; a group may say other `qkv_rows`. The momentum is an average, `m = momentum m +
    (1 - momentum) g`, and with `use_nesterov` the update is made of `(1 - momentum) g + momentum m`. An orthogonal
    matrix [r, c] is multiplied by `extra_scale_factor` and: spectral `sqrt(max(r, c))`, shape_scaling
    `sqrt(max(1, r / c))`, unit_rms_norm `sqrt(r / c)`. Orthogonalised in `ns_dtype`. Matrices have no masters here:
    give fp32 parameters. All else is as in `FusedAdam`. Source: Jordan et al. 2024,
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
                f"momentum {momentum}, {num_ns_steps} steps or scale {scale_mode!r} (of {SCALES}) out of range"
            )
        self.momentum, self.use_nesterov, self.num_ns_steps, self.ns_dtype = (
            momentum,
            use_nesterov,
            num_ns_steps,
            ns_dtype,
        )
        if adam.get("capturable"):
            raise ValueError("capturable: the step of a matrix has its learning rate from the host")
        self.scale_mode, self.extra_scale_factor, self.qkv_rows = scale_mode, extra_scale_factor, qkv_rows
        super().__init__(params, lr, **adam)

    def initialize_state(self, param: Tensor, store_param_remainders: bool | None = None) -> None:
        """Makes the state of a parameter: zero momentum of a matrix, else that of AdamW."""
        if any(param is p for group in self.param_groups if group.get("matrix") for p in group["params"]):
            self.state[param][MOMENTUM] = torch.zeros_like(param, memory_format=torch.contiguous_format)
        else:
            super().initialize_state(param, store_param_remainders)

    def assembled(self, param: Tensor, group: dict[str, Any], matrix: Tensor) -> Tensor:
        """The matrix that is to be orthogonalised, from this process's part of it; here the part is all."""
        return matrix

    def own_part(self, param: Tensor, group: dict[str, Any], matrix: Tensor) -> Tensor:
        """This process's part of what `assembled` made."""
        return matrix

    def _update(self, group: dict[str, Any], stream: int, grad_scale: Tensor | None) -> None:
        if not group.get("matrix"):
            super()._update(group, stream, grad_scale)
            return
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
            direction = grad.lerp(average, self.momentum) if self.use_nesterov else average
            rows = group.get("qkv_rows", self.qkv_rows) if self.qkv_rows and group["matrix"] == "qkv" else None
            update = self._orthogonal(self.assembled(param, group, direction), rows)
            param.detach().mul_(1 - group["lr"] * group["weight_decay"])
            param.detach().add_(self.own_part(param, group, update), alpha=-group["lr"])

    def _orthogonal(self, matrix: Tensor, qkv_rows: tuple[int, ...] | None) -> Tensor:
        if qkv_rows is not None:
            heads = matrix.unflatten(0, (-1, sum(qkv_rows)))
            parts = [self._scaled(part.flatten(0, 1)) for part in heads.split(qkv_rows, dim=1)]
            rows = [part.unflatten(0, (len(heads), -1)) for part in parts]
            return torch.cat(rows, dim=1).flatten(0, 1)
        return self._scaled(matrix)

    def _scaled(self, matrix: Tensor) -> Tensor:
        rows, columns = matrix.shape
        scale = {
            "spectral": max(rows, columns),
            "shape_scaling": max(1.0, rows / columns),
            "unit_rms_norm": rows / columns,
        }[self.scale_mode]
        orthogonal = newton_schulz(matrix, steps=self.num_ns_steps, dtype=self.ns_dtype)
        return orthogonal * (scale**0.5 * self.extra_scale_factor)
