"""Lion (Chen et al. 2023, arXiv 2302.06675): the sign of an interpolated momentum, and decoupled
weight decay.
"""

from __future__ import annotations

from typing import Any

from mtrain.config.schema.optimizer import Optimizer, Run, only


def update(param: Any, grad: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Apply w <- (1 - lr decay) w - lr sign(beta1 m + (1 - beta1) g); m <- beta2 m + (1 -
    beta2) g.
    """
    beta1, beta2 = group["betas"]
    lr = group["lr"]
    average = state["exp_avg"]
    param.mul_(1 - lr * group["weight_decay"])
    param.add_(average.lerp(grad, 1 - beta1).sign_(), alpha=-lr)
    average.lerp_(grad, 1 - beta2)


def _build(run: Run) -> tuple[type, dict[str, Any]]:
    from mtrain.mcore.state.optimizers import Elementwise

    return Elementwise, {"update": update, "states": ("exp_avg",)}


OPTIMIZER = Optimizer(
    name="lion",
    states=lambda r: {"exp_avg": "fp32"},
    build=_build,
    obstacle=only(("reference",), "lion"),
    keys=frozenset({"beta1", "beta2"}),
    cannot={
        "cpu_offload": "megatron-core updates with adamw or sgd on the CPU",
    },
    # The paper recommends a rate 3 to 10 times smaller than AdamW's, as each step has the size of a
    # sign.
    of_adamw_lr=0.1,
    usual_lr=(1e-6, 1e-3),
)
