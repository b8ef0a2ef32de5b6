"""Initial weights that do not depend on the layout: every element is a function of the seed, its tensor's name
and its place in the whole tensor.

megatron-core draws from a generator per rank, so another layout starts from other weights. Here its initialisers
only mark a parameter with its distribution; afterwards each block of a whole tensor is drawn from a generator
seeded with the tensor's name, and each rank keeps its part.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from mtrain.mcore.sharding import Slot, model_slots
from mtrain.world.beats import tick

BLOCK_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Normal:
    """An initialiser for megatron-core that marks a parameter as normal with standard deviation `std`."""

    std: float

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor.mtrain_init_std = self.std  # type: ignore[attr-defined]
        return tensor


def initialize(chunks: list[Any], seed: int) -> None:
    """Fill every marked parameter of this rank's model chunks from `seed`.

    Unmarked parameters (norms, biases, router biases) keep the constants that their modules gave them.

    Raises:
        RuntimeError: a matrix was neither marked nor constant, so its start would depend on the layout.
    """
    for slot in model_slots(chunks, trainable=True):
        assert slot.param is not None
        std = getattr(slot.param, "mtrain_init_std", None)
        if std is not None:
            _fill(slot, std, seed)
        elif slot.tensor.ndim > 1 and slot.tensor.numel() and not (slot.tensor == slot.tensor.flatten()[0]).all():
            raise RuntimeError(f"{slot.key} was initialised by something that mtrain does not control")


@torch.no_grad()
def _fill(slot: Slot, std: float, seed: int) -> None:
    """Draw the blocks of leading rows that meet this slot, and keep what belongs to it."""
    lead = len(slot.offset) - slot.tensor.ndim  # axes that count layers or experts: one index each
    shape, offset = slot.global_shape[lead:], slot.offset[lead:]
    tensor = slot.tensor
    name = f"{seed}/{slot.key}/{'.'.join(map(str, slot.offset[:lead]))}"
    rows = max(1, BLOCK_ELEMENTS // max(1, prod(shape[1:])))
    columns = tuple(slice(o, o + n) for o, n in zip(offset[1:], tensor.shape[1:], strict=True))
    first, last = offset[0], offset[0] + tensor.shape[0]
    for block in range(first // rows, -(-last // rows)):
        tick()
        start, stop = block * rows, min((block + 1) * rows, shape[0])
        generator = torch.Generator(tensor.device)
        digest = hashlib.sha256(f"{name}/{block}".encode()).digest()
        generator.manual_seed(int.from_bytes(digest[:7], "big"))
        drawn = torch.empty((stop - start, *shape[1:]), device=tensor.device, dtype=torch.float32)
        drawn.normal_(0.0, std, generator=generator)
        lo, hi = max(first, start), min(last, stop)
        tensor[lo - first : hi - first].copy_(drawn[(slice(lo - start, hi - start), *columns)])
