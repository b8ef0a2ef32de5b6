"""One rank of a world that does not exist, with tensors that take no memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from mtrain import mcore as adapter
from mtrain.config.machine.devices import CPU
from mtrain.config.schema.run import RunConfig
from mtrain.devices import cpu_namespace, registry
from mtrain.layout.grid import RankGrid, embedding_stages
from mtrain.world.generators import seed_generators, tracker_of
from mtrain.world.groups import make_groups
from mtrain.world.init import World


@contextmanager
def fake_world(run: RunConfig, rank: int) -> Iterator[World]:
    """Yield the world of a resolved configuration as its rank `rank` sees it, in this process only.

    Modules built inside have the shapes, the groups and the layers of that rank, and take no
    memory; collectives return at once and change nothing. The world may have thousands of ranks.
    megatron-core is adapted to the CPU, whatever device the run is meant for.

    Raises:
        ValueError: the layout has no such rank.
        RuntimeError: torch.distributed is in use in this process.
    """
    meta = torch.device("meta")
    with silent_world(run, rank, meta) as world, meta, cpu_namespace.shapes_only():
        yield world


@contextmanager
def silent_world(run: RunConfig, rank: int, torch_device: torch.device) -> Iterator[World]:
    """Yield the same world for tensors on any device; the caller keeps them from taking memory.

    Raises as `fake_world` does.
    """
    # An import at the top would register the fake backend in every real run.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    grid = RankGrid.of(run)
    coords = grid.coords(rank)
    if dist.is_initialized():
        raise RuntimeError("this process is a rank of a real world already")
    device = registry.get(CPU.name)
    adapter.install(device)
    from mtrain.mcore import api as mcore

    with_embeddings = embedding_stages(run)
    store = FakeStore()
    dist.init_process_group("fake", store=store, rank=rank, world_size=grid.world)
    try:
        # No collective of this world ever waits, so any timeout does.
        make_groups(grid, run, with_embeddings, timedelta(seconds=1))
        seed_generators(run.trainer.seed, coords, tracker=tracker_of(run))
        yield World(rank, 0, grid, device, torch_device, coords, with_embeddings, store)
    finally:
        mcore.parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
