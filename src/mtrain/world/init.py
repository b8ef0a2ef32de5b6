"""Joining the other ranks: the rendezvous, megatron-core's groups, and the check that all agree."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from mtrain import mcore as adapter
from mtrain.config.machine.devices import facts_of
from mtrain.config.machine.hardware import cpu_cores
from mtrain.config.schema.run import RunConfig
from mtrain.devices import registry
from mtrain.devices.base import Device
from mtrain.errors import BadEnvironment
from mtrain.layout.grid import RankGrid, embedding_stages
from mtrain.world import abandon, join
from mtrain.world.generators import seed_generators, tracker_of
from mtrain.world.groups import check_groups, make_groups
from mtrain.world.heartbeat import waiting
from mtrain.world.rank_env import RankEnv

# How long after trainer.timeout_s, and thus after the watchdog, process groups time out
GROUP_SLACK_S = 60.0


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
    store: dist.Store
    """A store that only this world uses."""

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self.grid.world

    @property
    def is_rank0(self) -> bool:
        """Return whether this is rank 0."""
        return self.rank == 0

    def tell(self, text: str, src: int = 0) -> str:
        """Broadcast the text of rank `src`, and return it on every rank."""
        with waiting():
            return self._broadcast(text, src)

    def _broadcast(self, text: str, src: int) -> str:
        # frombuffer refuses an empty buffer, hence the blank.
        encoded = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8).to(
            self.torch_device
        )
        # Ranks receive into a buffer of the right size, so the length goes first.
        size = torch.tensor([encoded.numel()], device=self.torch_device)
        dist.broadcast(size, src=src)
        row = encoded
        if self.rank != src:
            row = torch.empty(int(size.item()), dtype=torch.uint8, device=self.torch_device)
        dist.broadcast(row, src=src)
        return bytes(row.tolist()).decode()

    def first_problem(self, text: str) -> str:
        """Return, on every rank, the text of the lowest rank that gave one, or ""."""
        lowest = torch.tensor([self.rank if text else self.size], device=self.torch_device)
        with waiting():
            dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
            src = int(lowest.item())
        return self.tell(text, src) if src < self.size else ""

    def all_reach(self, place: str, within_s: float) -> bool:
        """Return whether every rank calls this with this `place` in time; ranks may have ended."""
        deadline = time.monotonic() + within_s
        try:
            self.store.add(place, 1)
            # Adding 0 reads the counter; a `get` would wait for its key and raise at the store's
            # timeout.
            while self.store.add(place, 0) < self.size:
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.05)
        except RuntimeError:  # torch's error for a store whose server has ended
            return False
        return True


@contextmanager
def joined(run: RunConfig) -> Iterator[World]:
    """Yield the world of a resolved configuration, from the environment that torchrun sets; leave
    it at the end.

    A torch.distributed that the caller has initialised is used and kept. On an error the groups are
    abandoned: a barrier on the way out would hang on the rank that died.

    Raises:
        BadEnvironment: no such device, another number of ranks than the layout has, groups that
            differ from the grid, or a rank that is absent, came twice, or has another configuration
            or version.
    """
    initialised_before = dist.is_initialized()
    join.announce(run)
    try:
        device = _prepare(run, RankEnv.here())
    except BaseException as error:
        join.give_up(error)
        raise
    world = _join(run, RankEnv.here(), device)
    if run.resilience.in_process:
        abandon.enter(world.store)
    check_groups(world.rank, world.grid, world.embedding_stages)
    # Not in a `finally`: after an error, the barrier would wait for ranks that may be gone.
    yield world
    dist.barrier()
    from mtrain.mcore import api as mcore

    mcore.parallel_state.destroy_model_parallel()
    if not initialised_before:
        dist.destroy_process_group()


def _insist_on_determinism() -> None:
    """Refuse algorithms whose bits depend on timing."""
    torch.use_deterministic_algorithms(True)


def _prepare(run: RunConfig, env: RankEnv) -> Device:
    """Import and set up everything that this rank needs before it meets the others."""
    if run.trainer.deterministic:
        _insist_on_determinism()
    grid = RankGrid.of(run)
    if env.size != grid.world:
        raise BadEnvironment(
            f"the layout has {grid.world} ranks ({grid}), but {env.size} were started"
        )
    device = registry.get(run.cluster.device)
    adapter.install(device)
    device.set_index(env.device_index(device.count()))
    if facts_of(device.name).on_host:
        on_this_machine = int(os.environ.get("LOCAL_WORLD_SIZE", env.size))
        # OMP_NUM_THREADS may be a list, one number for each level of nesting.
        requested = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
        threads = int(requested) if requested.isdigit() else cpu_cores() // on_this_machine
        # By default torch takes all cores, and the ranks of a machine would slow each other down.
        torch.set_num_threads(max(1, threads))
    return device


def _join(run: RunConfig, env: RankEnv, device: Device) -> World:
    store = join.together(run)
    grid = RankGrid.of(run)
    timeout = timedelta(seconds=run.trainer.timeout_s + GROUP_SLACK_S)
    store.set_timeout(timeout)
    torch_device = device.device(env.device_index(device.count()))
    if not dist.is_initialized():
        # A barrier then needs no guess about the device.
        dist.init_process_group(
            device.backend,
            rank=env.rank,
            world_size=env.size,
            store=store,
            timeout=timeout,
            device_id=torch_device if device.is_indexed else None,
        )
    with_embeddings = embedding_stages(run)
    make_groups(grid, run, with_embeddings, timeout)
    coords = grid.coords(env.rank)
    seed_generators(run.trainer.seed, coords, tracker=tracker_of(run))
    return World(
        env.rank, env.local_rank, grid, device, torch_device, coords, with_embeddings, store
    )
