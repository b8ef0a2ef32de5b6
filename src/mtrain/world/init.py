"""Joining the other ranks: rendezvous, megatron-core's groups, and the proof that all agree."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from mtrain import mcore as door
from mtrain.config.run import RunConfig
from mtrain.devices import registry
from mtrain.devices.base import Device
from mtrain.errors import BadEnvironment
from mtrain.layout import stages
from mtrain.layout.grid import RankGrid

LISTEN_FD = "MTRAIN_LISTEN_FD"
"""Descriptor of a socket that already listens, from the local launcher: rank 0 serves the rendezvous on it."""


@dataclass(frozen=True)
class World:
    """This rank, its device, and its place in the grid."""

    rank: int
    local_rank: int
    grid: RankGrid
    device: Device
    torch_device: torch.device
    coords: dict[str, int]
    embedding_stages: list[int]
    """Pipeline ranks that share the gradient of the word embedding."""

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.grid.world

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def tell(self, text: str) -> str:
        """The text that rank 0 gave, on every rank."""
        encoded = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8).to(self.torch_device)
        size = torch.tensor([encoded.numel()], device=self.torch_device)
        dist.broadcast(size, src=0)
        row = encoded if self.is_first else torch.empty(int(size.item()), dtype=torch.uint8, device=self.torch_device)
        dist.broadcast(row, src=0)
        return bytes(row.tolist()).decode()


@contextmanager
def joined(run: RunConfig) -> Iterator[World]:
    """The world of a resolved configuration, from the environment that torchrun sets; left at the end.

    A torch.distributed that the caller has initialised is used and kept. On an error the groups are abandoned, not
    waited for: a barrier on the way out would hang on the rank that died.

    Raises:
        BadEnvironment: no such device, another number of ranks than the layout has, groups that differ from
            the grid, or a rank with another configuration.
    """
    found = dist.is_initialized()
    world = _join(run)
    from mtrain.world import guard

    guard.check_groups(world)
    guard.check_agreement(world, run)
    yield world
    dist.barrier()
    from mtrain.mcore import api as mcore

    mcore.parallel_state.destroy_model_parallel()
    if not found:
        dist.destroy_process_group()


def _join(run: RunConfig) -> World:
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    grid = RankGrid.of(run)
    if size != grid.world:
        raise BadEnvironment(f"the layout has {grid.world} ranks ({grid}), but {size} were started")
    if grid.tp > 1:
        # Kernels must run in the order they were launched for communication to overlap with GEMMs before Hopper.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    device = registry.get(run.cluster.device)
    door.open_door(device)
    device.set_index(local_rank)
    if device.torch_type == "cpu":
        on_this_machine = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
        threads = int(asked) if asked.isdigit() else (os.cpu_count() or 1) // on_this_machine
        torch.set_num_threads(max(1, threads))
    timeout = timedelta(seconds=run.trainer.timeout_s)
    if not dist.is_initialized():
        store = _store(rank, size, timeout)
        dist.init_process_group(device.backend, rank=rank, world_size=size, store=store, timeout=timeout)
    embedding_stages = stages.embedding_stages(run)
    make_groups(grid, run, embedding_stages, timeout)
    seed_generators(run.trainer.seed)
    torch_device = device.device(local_rank)
    return World(rank, local_rank, grid, device, torch_device, grid.coords(rank), embedding_stages)


def seed_generators(seed: int) -> None:
    """Start every generator of this rank from `seed`: Python's, NumPy's, torch's and megatron-core's."""
    from mtrain.mcore import api as mcore

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    mcore.model_parallel_cuda_manual_seed(seed % 2**31, force_reset_rng=True)


def _store(rank: int, size: int, timeout: timedelta) -> dist.Store:
    """The rendezvous of the local launcher, of torchrun, or, for a process on its own, one in memory."""
    if size == 1 and "MASTER_PORT" not in os.environ:
        return dist.HashStore()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    fd = os.environ.get(LISTEN_FD)
    if fd is not None and rank == 0:
        return dist.TCPStore(
            host,
            port,
            size,
            is_master=True,
            timeout=timeout,
            master_listen_fd=int(fd),
            wait_for_workers=False,
        )
    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return dist.TCPStore(
        host, port, size, is_master=rank == 0 and not agent_serves, timeout=timeout, wait_for_workers=False
    )


def make_groups(grid: RankGrid, run: RunConfig, embedding_stages: list[int], timeout: timedelta) -> None:
    """megatron-core's process groups for `grid`, with word embeddings on `embedding_stages` of each pipeline."""
    from mtrain.mcore import api as mcore

    p = run.parallel
    mcore.parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=grid.tp,
        pipeline_model_parallel_size=grid.pp,
        virtual_pipeline_model_parallel_size=p.vpp if p.vpp > 1 else None,
        context_parallel_size=grid.cp,
        hierarchical_context_parallel_sizes=list(p.hierarchical_cp_sizes) if p.hierarchical_cp_sizes else None,
        expert_model_parallel_size=grid.ep,
        expert_tensor_parallel_size=grid.etp,
        num_distributed_optimizer_instances=p.hsdp_replicas,
        get_embedding_ranks=lambda ranks: sorted({ranks[stage] for stage in embedding_stages}),
        distributed_timeout_minutes=timeout.total_seconds() / 60,
        create_gloo_process_groups=False,
    )
