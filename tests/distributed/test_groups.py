"""megatron-core's process groups: as few communicators as ranks talk over, and none before it is
used.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mtrain.config.schema.run import RunConfig
from tests.support.forked import run_alone, run_ranks
from tests.support.runs import tiny_run


def _groups(run: RunConfig) -> list[list[int]]:
    """Join, and return the ranks of each process group that this rank is in."""
    from mtrain.world.init import joined

    with joined(run):
        return [
            dist.get_process_group_ranks(group) for group in dist.distributed_c10d._world.pg_map
        ]


def test_groups_single_rank_has_only_world() -> None:
    assert run_ranks(1, _groups, tiny_run()) == [[[0]]]


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}])
def test_groups_of_one_rank_are_one(layout: dict[str, int]) -> None:
    for rank, found in enumerate(run_ranks(2, _groups, tiny_run(ranks=2, **layout))):
        assert found.count([rank]) == 1
        assert found.count([0, 1]) > 1, (
            "groups over which ranks talk stay apart: their exchanges may overlap"
        )


def test_groups_connect_on_first_use() -> None:
    """Connect groups late: with a bound world, torch connects every new group at once, and needs
    all ranks for it.
    """

    def job() -> tuple[set[object], object]:
        from mtrain.devices.cpu import CPU
        from mtrain.mcore import install
        from mtrain.world import groups

        install(CPU)
        from mtrain.mcore import api as mcore

        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=4)
        world = dist.distributed_c10d._get_default_group()
        device = torch.device("cpu", 0)
        world.bound_device_id = device
        bound = set()
        real = dist.new_group

        def new_group(*args: object, **kwargs: object) -> object:
            bound.add(world.bound_device_id)
            return real(*args, **kwargs)

        dist.new_group = new_group
        with groups.shared_communicators(mcore.parallel_state):
            mcore.parallel_state.create_group([0, 1])
            mcore.parallel_state.create_group([0])
        return bound, world.bound_device_id == device

    assert run_alone(job) == ({None}, True)
