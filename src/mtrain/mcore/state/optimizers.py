"""The class that megatron-core builds its optimizers of: torch's, TransformerEngine's, or one of
ours whose update of an element needs only the state of that element.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import optimizer as core
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer

from mtrain.mcore.adapter.installed import require_installed

require_installed()  # nothing of megatron may be imported before this line


@dataclass
class OwnOptimizerConfig(OptimizerConfig):
    """megatron-core's configuration where the class is ours.

    Its own check asks for TransformerEngine wherever the optimizer holds the main weights, and
    wants fp32 moments elsewhere; ours needs neither.
    """

    def __post_init__(self) -> None:
        self.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = self.use_precision_aware_optimizer


def use_torch() -> None:
    """Let megatron-core build torch's AdamW and SGD, also where TransformerEngine is installed."""
    _use(torch.optim.AdamW, torch.optim.SGD, own_names=False)


def use_te() -> None:
    """Let megatron-core build TransformerEngine's fused optimizers.

    Raises:
        ImportError: it is not installed.
    """
    te = importlib.import_module("transformer_engine.pytorch.optimizers")
    _use(te.FusedAdam, te.FusedSGD, own_names=True)


def use_own(base: type, **kept: Any) -> None:
    """Let megatron-core build `base` where it says Adam; `kept` are its arguments but those that
    any Adam has.

    Ours have the interface of TransformerEngine's Adam, so megatron-core takes the same way with
    them: main weights may be the optimizer's, and its state is made by `initialize_state`. Their
    step count is a number of each parameter group, so no two parameters can share one, and a resume
    cannot count twice.
    """

    class Own(base):  # type: ignore[misc, valid-type]
        def __init__(self, params: Any, **passed: Any) -> None:
            # megatron-core also passes dtypes and main weights; `kept` has those of the run.
            known = {
                k: passed[k]
                for k in ("lr", "weight_decay", "betas", "eps", "adam_w_mode")
                if k in passed
            }
            super().__init__(params, **known, **kept)

    _use(Own, torch.optim.SGD, own_names=True)


def _use(adam: type, sgd: type, *, own_names: bool) -> None:
    """Set the names that megatron-core's modules found when they were imported."""
    core.Adam = adam
    core.SGD = sgd
    core.USING_PYTORCH_OPTIMIZER = not own_names
    distrib_optimizer.Adam = adam
    distrib_optimizer.USING_TE_OPTIMIZER = own_names
    distrib_optimizer.HAVE_APEX_OR_TE = own_names


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
