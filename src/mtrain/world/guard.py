"""Refusing a world that is not what the configuration says: process groups that differ from the
grid.
"""

from __future__ import annotations

import torch.distributed as dist

from mtrain.errors import BadEnvironment
from mtrain.layout.grid import RankGrid
from mtrain.mcore import api as mcore


def check_groups(rank: int, grid: RankGrid, embedding_stages: list[int]) -> None:
    """Compare every process group of megatron-core that holds `rank`, this one, with the grid's.

    `embedding_stages` are those of a pipeline that hold word embeddings.

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
    ps = mcore.parallel_state
    found = {
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
    groups = {name: (group, grid.group_of(rank, *axes)) for name, (group, axes) in found.items()}
    # a copy of what is sharded is on consecutive ranks of those that share weights
    shared = sorted(grid.group_of(rank, "dp", "cp"))
    part = ps.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
    between = ps.get_inter_distributed_optimizer_instance_group(check_initialized=False)
    size = part.size()
    place = shared.index(rank)
    groups["dp-cp of a copy"] = part, shared[place // size * size :][:size]
    if between is not None:
        groups["between copies"] = between, shared[place % size :: size]
    embedding = next((g for g in grid.embedding_groups(embedding_stages) if rank in g), None)
    if embedding is not None:
        groups["embedding"] = (ps.get_embedding_group(), embedding)
    return groups
