"""Optimizers whose update of an element needs only what belongs to that element."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

Update = Callable[[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], dict[str, Any]], None]
"""Changes a parameter and its state in place, of its gradient and its group: rate, decay, betas and
the number of the step, from 1.
"""


class Elementwise(torch.optim.Optimizer):
    """An optimizer of an update rule; right on any part of a parameter, as the distributed
    optimizer's shards are.

    `states` names the state tensors of a parameter, of its shape and dtype and zero at first. The
    step count is an int of each parameter group.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        update: Update,
        states: tuple[str, ...],
        adam_w_mode: bool = True,
    ) -> None:
        if not adam_w_mode:
            raise ValueError("the decay is apart from the gradient: adam_w_mode is true")
        self.update = update
        self.states = states
        defaults = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps, "step": 0}
        super().__init__(params, defaults)

    def initialize_state(self, param: torch.Tensor) -> None:
        """Make the state of a parameter: zeros."""
        self.state[param] = {name: torch.zeros_like(param) for name in self.states}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step on every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            # One count for the group: no parameter can get ahead of the others after a resume.
            group["step"] = int(group["step"]) + 1
            for param in group["params"]:
                # A shard of the distributed optimizer may have no element on this rank.
                if param.grad is None or not param.numel():
                    continue
                if not self.state[param]:
                    self.initialize_state(param)
                self.update(param, param.grad.to(param.dtype), self.state[param], group)
        return loss
