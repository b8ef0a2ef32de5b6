"""Steps whose gradients do not depend on the layout: what an optimizer makes of them can be
compared to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mtrain.config.schema.run import RunConfig


def train_on_given(
    run: RunConfig, folder: Path, steps: int, *, spoil: Callable[[Any], None] | None = None
) -> None:
    """A job for `run_ranks`: steps whose gradients are numbers by weight, place and step alone, and
    a checkpoint.

    `spoil` changes the optimizer of rank 1 before each update: a fault for tests to find.
    """
    from mtrain.ckpt import state as ckpt_state
    from mtrain.mcore.state import sharding
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.world.init import joined

    with joined(run) as world:
        parts = assemble(run, world, splits_of(run))
        optimizer = parts.state.optimizer
        step = optimizer.step

        def given() -> Any:
            for shard in sharding.gradient_shards(parts.state.chunks, optimizer):
                seed = sum(map(ord, shard.key)) + parts.state.step
                whole = torch.randn(
                    shard.global_shape, generator=torch.Generator().manual_seed(seed)
                )
                box = whole[
                    tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.shape, strict=True))
                ]
                if shard.flat is None:
                    flat = box.reshape(-1)
                else:
                    flat = box.reshape(-1)[shard.flat[0] : shard.flat[1]]
                shard.tensor.copy_(flat.view(shard.tensor.shape))
            if spoil is not None and world.rank == 1:
                spoil(optimizer)
            return step()

        optimizer.step = given
        for _ in range(steps):
            train_step(parts, stop_requested=False)
        ckpt_state.save(folder, run, world, parts.state, {})
