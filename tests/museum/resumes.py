"""Bugs of updates and of what a resume reads back; FSDP and offloading."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.museum.exhibit import Exhibit, replace, unwrap, wrap
from tests.museum.sums import CORE, EVERY, MIXTRAL, OVERLAPPED

STATE = "mtrain.mcore.state.optimizer_state"
SHARDED = f"{CORE}distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer"


def step_lost() -> None:
    """Restart Adam's step count at a resume."""
    wrap(STATE, "set_step", lambda real, optimizer, step: real(optimizer, 0))


def moments_lost() -> None:
    """Zero the first moments after a resume."""

    def load(real: Any, checkpoint: Any, world: Any, state: Any, **more: Any) -> Any:
        done = real(checkpoint, world, state, **more)
        from mtrain.mcore.state.optimizer_state import inner_optimizers

        for inner in inner_optimizers(state.optimizer):
            for kept in inner.state.values():
                kept["exp_avg"].zero_()
        return done

    wrap("mtrain.ckpt.state", "load", load)


def moments_of_other_rank() -> None:
    """Read the second moments of the neighbour's range on each rank."""

    def load(real: Any, checkpoint: Any, world: Any, state: Any, **more: Any) -> Any:
        done = real(checkpoint, world, state, **more)
        from mtrain.mcore.state.optimizer_state import inner_optimizers

        for inner in inner_optimizers(state.optimizer):
            for kept in inner.state.values():
                kept["exp_avg_sq"].copy_(
                    kept["exp_avg_sq"].flatten().roll(1).view_as(kept["exp_avg_sq"])
                )
        return done

    wrap("mtrain.ckpt.state", "load", load)


def _forgotten(change: Callable[[Any], None]) -> None:
    def load(real: Any, checkpoint: Any, world: Any, state: Any, **more: Any) -> Any:
        done = real(checkpoint, world, state, **more)
        change(state)
        return done

    wrap("mtrain.ckpt.state", "load", load)


def data_from_the_start() -> None:
    """Begin the samples anew."""
    _forgotten(lambda state: setattr(state, "consumed_samples", 0))


def rates_from_the_start() -> None:
    """Warm the learning rate up again."""
    _forgotten(lambda state: setattr(state.schedule, "num_steps", 0))


def weights_of_start() -> None:
    """Load weights that are not the optimized ones: the first update overwrites them."""

    def load(state: Any) -> None:
        for chunk in state.chunks:
            for parameter in chunk.parameters():
                if parameter.dim() == 1:
                    parameter.data.fill_(1.0)

    _forgotten(load)


def stale_gather() -> None:
    """Leave the weights of other ranks' ranges as they were before the update."""

    def sync(real: Any, self: Any, *args: Any, **more: Any) -> Any:
        kept = [bucket.param_data.clone() for bucket in self.buckets]
        rank = dist.get_rank()
        size = dist.get_world_size()
        done = real(self, *args, **(more | {"force_sync": True}))
        for bucket, before in zip(self.buckets, kept, strict=True):
            share = before.numel() // size
            own = bucket.param_data[rank * share : (rank + 1) * share].clone()
            if size > 1:
                bucket.param_data.copy_(before)
                bucket.param_data[rank * share : (rank + 1) * share] = own
        return done

    wrap(
        f"{CORE}distributed.param_and_grad_buffer:_ParamAndGradBucketGroup",
        "start_param_sync",
        sync,
    )


def unreduced() -> None:
    """Leave every fifth gradient that should be summed over ranks unsummed."""
    calls = [0]

    def reduce(
        real: Any,
        output: torch.Tensor,
        input: torch.Tensor,
        *args: Any,
        group: Any = None,
        **more: Any,
    ) -> Any:
        calls[0] += 1
        if calls[0] % 5 == 0:
            return output.copy_(input.view(group.size(), -1)[group.rank()])
        return real(output, input, *args, group=group, **more)

    for name in (
        "reduce_scatter_tensor",
        "reduce_scatter_single",
    ):  # megatron-core's name, and that of newer torch
        if hasattr(dist, name):
            wrap("torch.distributed", name, reduce)


def main_weights_not_made() -> None:
    """Load weights without FSDP's separate main weights: the first update discards them."""
    replace("mtrain.mcore.state.sharding", "make_main_weights", lambda chunks: None)


REDUCED = r"every weight|decoder\..*|embedding\..*|output_layer"
RESUMED = r"resume.*"
EXHIBITS = (
    Exhibit(
        "optimizer step lost at resume",
        "SkyRL 1403",
        "parallel=dp2",
        "bias correction begins anew",
        step_lost,
        RESUMED,
    ),
    Exhibit(
        "moments lost at resume",
        "Megatron-LM 3537",
        "parallel=tp2",
        "updates jump",
        moments_lost,
        RESUMED,
    ),
    Exhibit(
        "moments of another range after resharding",
        "Megatron-LM 5077",
        "parallel=dp2 parallel.distributed_optimizer=true",
        "updates of other weights",
        moments_of_other_rank,
        RESUMED,
    ),
    Exhibit(
        "data from the start after a resume",
        "data position not saved",
        "parallel=pp2",
        "samples are seen twice",
        data_from_the_start,
        RESUMED,
    ),
    Exhibit(
        "learning rate from the start after a resume",
        "Megatron-LM 4705",
        "parallel=dp2",
        "warms up again",
        rates_from_the_start,
        RESUMED,
    ),
    Exhibit(
        "norms keep their first weights at resume",
        "Megatron-LM 3569",
        "parallel=tp2sp",
        "part of the weights is not loaded",
        weights_of_start,
        RESUMED,
    ),
    Exhibit(
        "weights of other ranges are stale",
        "Megatron-LM 4609",
        f"parallel=dp2 {OVERLAPPED} parallel.overlap_param_gather=true",
        "a rank trains on old weights",
        stale_gather,
        REDUCED,
    ),
    Exhibit(
        "a shard that is not reduced",
        "Megatron-FSDP, made for its tests",
        "parallel=dp2 parallel.fsdp=megatron",
        "a rank's own gradient",
        unreduced,
        REDUCED,
    ),
    Exhibit(
        "replicas never add up their gradients",
        "patch fsdp-optim-replicas, Megatron-LM 3754",
        "parallel=dp4 parallel.fsdp=megatron parallel.fsdp_sharding=optim parallel.hsdp_replicas=2",
        "replicas drift apart",
        lambda: unwrap(f"{SHARDED}:ParamAndGradBuffer", "reduce_scatter_gradients"),
        REDUCED,
    ),
    Exhibit(
        "gradient of a lone rank doubled",
        "patch fsdp-lone-rank",
        f"{MIXTRAL} parallel=ep2 parallel.fsdp=megatron",
        "expert gradients doubled",
        lambda: unwrap(f"{SHARDED}:GradReducePipeline", "_bucket_group_gradient_reduce"),
        r".*mlp\.experts.*",
    ),
    Exhibit(
        "offloaded weights never updated",
        "patch offloaded-copies",
        "optim.cpu_offload=1.0 parallel=dp2",
        "nothing is learnt",
        lambda: unwrap(
            f"{CORE}optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer",
            "_get_sub_optimizer_param_groups",
        ),
        EVERY,
    ),
)
