"""Patches for tensors without memory, whose values megatron-core reads in a few places."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.moe import router, token_dispatcher
from megatron.core.transformer.moe.moe_utils import get_capacity, get_moe_layer_wise_logging_tracker
from megatron.core.transformer.moe.router import TopKRouter
from mtrain_kernels.attention import backends, op
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes

from mtrain.config.engine import release


@contextmanager
def fake_patches() -> Iterator[None]:
    """Make routers choose experts round-robin, so that all have the same load, and ranks report the
    same numbers to each other.

    The choice is made of real numbers among tensors that have none, so that sizes of messages are
    known.
    """
    real_routing = TopKRouter.routing
    real_gather = token_dispatcher.gather_from_sequence_parallel_region
    real_free = schedules.deallocate_output_tensor
    real_shapes = ShardingPropagator._propagate_tensor_meta_non_cached
    real_init = token_dispatcher.MoEAlltoAllTokenDispatcher.__init__

    def init(self: Any, *args: Any, **more: Any) -> None:
        # The constructor computes the order of chunks from tensors and reads it on the host.
        with _disable_current_modes():
            real_init(self, *args, **more)

    def routing(self: Any, logits: Tensor, *args: Any, **more: Any) -> tuple[Tensor, Tensor]:
        probs, chosen = real_routing(self, logits, *args, **more)
        return probs, _in_turn(chosen.shape[0], chosen.shape[1], self.topk, self.config)

    def gather(x: Tensor, *args: Any, group: Any = None, **more: Any) -> Tensor:
        if isinstance(x, FakeTensor):
            return real_gather(x, *args, group=group, **more)
        return x.repeat(group.size(), *[1] * (x.ndim - 1))

    def shapes(self: Any, schema: Any) -> Any:
        # torch describes the whole sharded tensor here, and makes no memory for it.
        with _disable_current_modes():
            return real_shapes(self, schema)

    def free(out: Any, *args: Any) -> None:
        # A loss has no memory worth freeing, and freeing would turn it into another type of tensor.
        # A list of outputs is left to megatron-core.
        if not isinstance(out, Tensor) or out.numel() > 1:
            real_free(out, *args)

    with (
        # The tracker of losses is global: records of fake models must not reach real ones.
        mock.patch.dict(_tracked(), clear=True),
        _routed_by_shapes(),
        mock.patch.object(TopKRouter, "routing", routing),
        mock.patch.object(token_dispatcher.MoEAlltoAllTokenDispatcher, "__init__", init),
        mock.patch.object(token_dispatcher, "gather_from_sequence_parallel_region", gather),
        mock.patch.object(schedules, "deallocate_output_tensor", free),
        # No kernel of attention is launched, so nothing stands in the way of choosing one.
        mock.patch.object(backends, "triton_obstacle", _unasked),
        mock.patch.object(param_and_grad_buffer, "validate_uneven_dtensor", _unasked),
        mock.patch.object(param_and_grad_buffer, "update_uneven_dtensor_chunk_metadata", _unasked),
        mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", shapes),
    ):
        op._decide.cache_clear()
        yield
    op._decide.cache_clear()


@contextmanager
def _routed_by_shapes() -> Iterator[None]:
    """Let Sinkhorn's balancing end, and count rows that are padded to a capacity."""
    real_sinkhorn = router.sinkhorn
    real_preprocess = token_dispatcher.MoEAlltoAllTokenDispatcher.preprocess

    def sinkhorn(cost: Tensor, *args: Any) -> Tensor:
        # The real function iterates until its values converge, which fake tensors never do.
        return torch.exp(cost) if isinstance(cost, FakeTensor) else real_sinkhorn(cost, *args)

    def preprocess(self: Any, routing_map: Tensor) -> Tensor:
        # With a padded capacity the counts follow from shapes, and the host reads them.
        with _disable_current_modes() if self.drop_and_pad else nullcontext():
            return real_preprocess(self, routing_map)

    with (
        mock.patch.object(router, "sinkhorn", sinkhorn),
        mock.patch.object(token_dispatcher.MoEAlltoAllTokenDispatcher, "preprocess", preprocess),
    ):
        yield


def _tracked() -> dict[str, Any]:
    """Return the dictionary in which routers record losses; 0.19's function returns a copy."""
    if release.at_least(0, 19):
        return (
            importlib.import_module("megatron.core.transformer.moe.moe_logging")
            .get_moe_metrics_tracker()
            ._metrics
        )
    return get_moe_layer_wise_logging_tracker()  # type: ignore[no-any-return]


def _unasked(tensor: Any) -> None:
    """Answer no question about values: chunk offsets of other ranks, or obstacles to Triton."""


def _in_turn(tokens: int, experts: int, k: int, config: Any) -> Tensor:
    """Choose experts for each token in turn: bool [tokens, experts]."""
    with unset_fake_temporarily():
        choice = torch.arange(tokens * k).remainder_(experts).view(tokens, k)
        chosen = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, choice, True)
        if config.moe_expert_capacity_factor is not None:
            most = get_capacity(tokens * k, experts, config.moe_expert_capacity_factor)
            chosen &= chosen.cumsum(0) <= most
        return chosen
