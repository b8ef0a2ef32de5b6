"""megatron-core's process groups, with no more communicators of NCCL than ranks talk over.

A communicator takes memory of a GPU (389 MiB on an H200 with NCCL of torch 2.11), and megatron-core
asks for some twenty groups, most of them of one rank in a small layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mtrain.config.schema.run import RunConfig
from mtrain.layout.grid import RankGrid


def make_groups(
    grid: RankGrid, run: RunConfig, embedding_stages: list[int], timeout: timedelta
) -> None:
    """megatron-core's process groups for `grid`, with word embeddings on `embedding_stages` of each
    pipeline.
    """
    from mtrain.mcore import api as mcore

    p = run.parallel
    with few_communicators(mcore.parallel_state):
        mcore.parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=grid.tp,
            pipeline_model_parallel_size=grid.pp,
            virtual_pipeline_model_parallel_size=p.vpp if p.vpp > 1 else None,
            context_parallel_size=grid.cp,
            hierarchical_context_parallel_sizes=list(p.hierarchical_cp_sizes)
            if p.hierarchical_cp_sizes
            else None,
            hybrid_context_parallel=p.hybrid_context_parallel,
            expert_model_parallel_size=grid.ep,
            expert_tensor_parallel_size=grid.etp,
            num_distributed_optimizer_instances=p.hsdp_replicas,
            get_embedding_ranks=lambda ranks: sorted({ranks[stage] for stage in embedding_stages}),
            distributed_timeout_minutes=timeout.total_seconds() / 60,
            create_gloo_process_groups=False,
        )


@contextmanager
def few_communicators(parallel_state: Any) -> Iterator[None]:
    """Let `parallel_state` of megatron-core make groups whose communicators cost what they are used
    for.

    All groups of one rank are one group, which is the world where that has one rank. The others
    connect when they are used first: with the device that the world is bound to, torch would
    connect each of them at once, and every rank of the world would have to take part in every
    group.
    """
    world = dist.distributed_c10d._get_default_group()
    device = world.bound_device_id
    make = parallel_state.create_group
    alone: dict[tuple[int, str | None], Any] = {}
    if world.size() == 1:
        alone[0, None] = world

    def create_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        # Every rank comes by here with the same ranks in the same order, so all of them leave out
        # the same groups.
        if ranks is None or len(ranks) != 1 or args:
            return make(ranks, *args, **kwargs)
        key = ranks[0], kwargs.get("backend")
        if key not in alone:
            alone[key] = make(ranks, **kwargs)
        return alone[key]

    parallel_state.create_group = create_group
    world.bound_device_id = None
    try:
        yield
    finally:
        parallel_state.create_group = make
        world.bound_device_id = device
