"""megatron-core's process groups: made with few NCCL communicators, and compared with the rank
grid.

A communicator takes GPU memory (389 MiB on an H200 with the NCCL of torch 2.11). megatron-core
requests about twenty groups, most of them of one rank in a small layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mtrain.config.schema.run import RunConfig
from mtrain.errors import BadEnvironment
from mtrain.layout.grid import RankGrid


def make_groups(
    grid: RankGrid, run: RunConfig, embedding_stages: list[int], timeout: timedelta
) -> None:
    """Make the process groups of `grid`, with word embeddings on `embedding_stages`."""
    from mtrain.mcore import api as mcore

    p = run.parallel
    hierarchical = list(p.hierarchical_cp_sizes) if p.hierarchical_cp_sizes else None
    with shared_communicators(mcore.parallel_state):
        mcore.parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=grid.tp,
            pipeline_model_parallel_size=grid.pp,
            # megatron-core takes any number, 1 too, as a request for the interleaved schedule.
            virtual_pipeline_model_parallel_size=p.vpp if p.vpp > 1 else None,
            context_parallel_size=grid.cp,
            hierarchical_context_parallel_sizes=hierarchical,
            hybrid_context_parallel=p.hybrid_context_parallel,
            expert_model_parallel_size=grid.ep,
            expert_tensor_parallel_size=grid.etp,
            num_distributed_optimizer_instances=p.hsdp_replicas,
            get_embedding_ranks=lambda ranks: sorted({ranks[stage] for stage in embedding_stages}),
            distributed_timeout_minutes=timeout.total_seconds() / 60,
            # They serve megatron-core's own checkpoints, which mtrain does not write.
            create_gloo_process_groups=False,
        )


@contextmanager
def shared_communicators(parallel_state: Any) -> Iterator[None]:
    """Let megatron-core's `parallel_state` make groups that share or postpone their communicators.

    All groups of one rank become one group: the world, if it has one rank. The other groups connect
    on first use. If the world were bound to a device, torch would connect each group at once, and
    every rank would have to take part in every group.
    """
    world = dist.distributed_c10d._get_default_group()
    device = world.bound_device_id
    make = parallel_state.create_group
    single: dict[tuple[int, str | None], Any] = {}
    if world.size() == 1:
        # The world of one rank has a communicator already.
        single[0, None] = world

    def create_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        # Every rank calls this with the same ranks in the same order, so all of them skip the
        # same groups.
        if ranks is None or len(ranks) != 1 or args:
            return make(ranks, *args, **kwargs)
        key = ranks[0], kwargs.get("backend")
        if key not in single:
            single[key] = make(ranks, **kwargs)
        return single[key]

    parallel_state.create_group = create_group
    world.bound_device_id = None
    try:
        yield
    finally:
        parallel_state.create_group = make
        world.bound_device_id = device


def check_groups(rank: int, grid: RankGrid, embedding_stages: list[int]) -> None:
    """Compare every megatron-core process group that holds `rank`, this rank, with the grid's.

    `embedding_stages` are the pipeline stages that hold word embeddings.

    Raises:
        BadEnvironment: names each group that differs, with both lists of ranks.
    """
    wrong = []
    for name, (group, expected) in _groups(rank, grid, embedding_stages).items():
        ranks = dist.get_process_group_ranks(group)
        if sorted(ranks) != sorted(expected):
            wrong.append(f"{name}: megatron-core has {ranks}, the grid has {expected}")
    if wrong:
        head = f"rank {rank}: process groups differ from the rank grid:"
        raise BadEnvironment(head, *(f"  {line}" for line in wrong))


def _groups(
    rank: int, grid: RankGrid, embedding_stages: list[int]
) -> dict[str, tuple[dist.ProcessGroup, list[int]]]:
    from mtrain.mcore import api as mcore

    ps = mcore.parallel_state
    groups_and_axes = {
        "tp": (ps.get_tensor_model_parallel_group(), ("tp",)),
        "cp": (ps.get_context_parallel_group(), ("cp",)),
        "dp": (ps.get_data_parallel_group(), ("dp",)),
        "dp-cp": (ps.get_data_parallel_group(with_context_parallel=True), ("dp", "cp")),
        "pp": (ps.get_pipeline_model_parallel_group(), ("pp",)),
        "tp-pp": (ps.get_model_parallel_group(), ("tp", "pp")),
        "tp-cp": (ps.get_tensor_and_context_parallel_group(), ("tp", "cp")),
        "tp-dp-cp": (
            ps.get_tensor_and_data_parallel_group(with_context_parallel=True),
            ("tp", "dp", "cp"),
        ),
        "ep": (ps.get_expert_model_parallel_group(), ("ep",)),
        "etp": (ps.get_expert_tensor_parallel_group(), ("etp",)),
        "etp-ep": (ps.get_expert_tensor_and_model_parallel_group(), ("etp", "ep")),
        "edp": (ps.get_expert_data_parallel_group(), ("edp",)),
    }
    groups = {
        name: (group, grid.group_of(rank, *axes)) for name, (group, axes) in groups_and_axes.items()
    }
    # With HSDP, each replica of the sharded states is on consecutive ranks of dp-cp.
    shared = sorted(grid.group_of(rank, "dp", "cp"))
    replica = ps.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
    between = ps.get_inter_distributed_optimizer_instance_group(check_initialized=False)
    size = replica.size()
    place = shared.index(rank)
    groups["dp-cp of a copy"] = replica, shared[place // size * size :][:size]
    if between is not None:
        groups["between copies"] = between, shared[place % size :: size]
    embedding = next((g for g in grid.embedding_groups(embedding_stages) if rank in g), None)
    if embedding is not None:
        groups["embedding"] = (ps.get_embedding_group(), embedding)
    return groups
