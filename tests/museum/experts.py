"""Bugs of routers and experts, and of what ranks add up for them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.museum.exhibit import Exhibit, owner, unwrap, without, wrap
from tests.museum.sums import CORE, FINALIZE, MIXTRAL, ROUTER, ranks, scaled

BIASED = (
    f"{MIXTRAL} model.moe.router_score_function=sigmoid model.moe.router_enable_expert_bias=true "
    "model.moe.router_load_balancing_type=none model.moe.aux_loss_coeff=0"
)


def router_not_summed() -> None:
    """Leave the router's weight unmarked as one that receives a part of the sequence."""

    def made(real: Any, self: Any, *args: Any, **more: Any) -> None:
        real(self, *args, **more)
        self.weight.sequence_parallel = False

    wrap(ROUTER, "__init__", made)


def experts_divided_by_ep() -> None:
    """Divide gradients of experts by the expert-parallel ranks."""
    scaled(
        "expert_parallel_bucket_groups", lambda: 1 / ranks().get_expert_model_parallel_world_size()
    )


def norm_without_experts() -> None:
    """Leave experts out of the norm on all but the first tensor-parallel rank."""

    def keeps(real: Any, param: Any, tp_group: Any = None) -> bool:
        expert = not getattr(param, "allreduce", True)
        return bool(real(param, tp_group)) and (
            not expert or ranks().get_tensor_model_parallel_rank() == 0
        )

    wrap(f"{CORE}tensor_parallel", "param_is_not_tensor_parallel_duplicate", keeps)


def bias_of_one_rank() -> None:
    """Update the router's bias on each rank by that rank's own tokens."""

    def updated(real: Any, tokens: torch.Tensor, bias: torch.Tensor, rate: float) -> torch.Tensor:
        offset = tokens.sum(dim=-1, keepdim=True) / tokens.shape[-1] - tokens
        return bias + torch.sign(offset) * rate

    wrap(FINALIZE, "get_updated_expert_bias", updated)


def balancing_loss_not_scaled() -> None:
    """Count a rank's part of the tokens for all in the balancing loss."""
    scaler = owner(f"{CORE}transformer.moe.moe_utils").MoEAuxLossAutoScaler
    real = scaler.apply
    scaler.apply = lambda output, loss: real(output, loss / dist.get_world_size())


def experts_as_dense() -> None:
    """Count experts as dense weights although they are sharded differently."""

    def made(real: Any, self: Any, *args: Any, **more: Any) -> None:
        real(self, *args, **more)
        for parameter in self.experts.parameters():
            parameter.allreduce = True

    wrap(f"{CORE}transformer.moe.moe_layer:MoELayer", "__init__", made)


def router_losses_of_rank() -> None:
    """Weigh a rank's own tokens in the balancing losses, as megatron-core does without our
    patches.
    """
    patching = owner("mtrain.mcore.patches.experts")
    if hasattr(owner(ROUTER).attach_and_log_load_balancing_loss, "__wrapped__"):
        unwrap(ROUTER, "attach_and_log_load_balancing_loss")  # of sequences
        unwrap(ROUTER, "attach_and_log_load_balancing_loss")
        unwrap(ROUTER, "apply_z_loss")
        patching.sequence_loss_batch.apply()


EXHIBITS = (
    Exhibit(
        "router gradient of sequence parallel not summed",
        "Megatron-LM 7452",
        f"{MIXTRAL} parallel=tp2ep2sp",
        "half of a gradient",
        router_not_summed,
        r"decoder\.layers\.\d\.mlp\.router",
    ),
    Exhibit(
        "expert gradients divided by ep",
        "Megatron-LM 5956",
        f"{MIXTRAL} parallel=ep2",
        "gradient divided by ep",
        experts_divided_by_ep,
        r".*mlp\.experts.*",
    ),
    Exhibit(
        "norm without experts of other tp ranks",
        "Megatron-LM 5916",
        f"{MIXTRAL} parallel=tp2ep2etp1sp",
        "norm too small",
        norm_without_experts,
        r"gradient norm|.*experts.*",
    ),
    Exhibit(
        "router bias not synchronised",
        "DeepSeek-V3's bias, Megatron-LM 6114",
        f"{BIASED} parallel=dp2",
        "ranks route differently",
        bias_of_one_rank,
        r".*mlp\.router",
    ),
    Exhibit(
        "balancing loss not scaled",
        "Megatron-LM 5047",
        f"{MIXTRAL} parallel=tp2ep2sp model.moe.aux_loss_coeff=0.1",
        "balancing too weak",
        balancing_loss_not_scaled,
        r".*mlp\.router",
    ),
    Exhibit(
        "balancing loss of a rank's tokens",
        "patch moe-loss-tokens, Megatron-LM 5047",
        f"{MIXTRAL} parallel=tp2ep2sp",
        "balancing tp times too weak",
        router_losses_of_rank,
        r".*mlp\.router",
    ),
    Exhibit(
        "sequence balancing loss of one sample",
        "patch sequence-loss-batch, Megatron-LM 5798",
        f"{MIXTRAL} parallel=ep2 model.moe.router_load_balancing_type=seq_aux_loss",
        "balancing too weak by the micro-batch",
        without(ROUTER, "attach_and_log_load_balancing_loss"),
        r".*mlp\.router",
    ),
    Exhibit(
        "experts as dense weights",
        "patch expert-gradients",
        f"{MIXTRAL} parallel=tp2etp1sp",
        "half of a gradient",
        experts_as_dense,
        r".*mlp\.experts.*",
    ),
)
