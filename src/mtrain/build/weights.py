"""Initial weights that do not depend on the layout: every element is a function of the seed, its tensor's name
and its place in the whole tensor.

megatron-core draws from a generator per rank, so another layout starts from other weights. Here its initialisers
only mark a parameter with its distribution; afterwards each block of a whole tensor is drawn from a generator
seeded with the tensor's name, and each rank keeps its part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from mtrain.mcore.sharding import TensorShard, make_main_weights, model_shards
from mtrain.world.heartbeat import tick

BLOCK_ELEMENTS = 1 << 24


_deferred = ContextVar("deferred", default=False)


@contextmanager
def deferred() -> Iterator[None]:
    """Leave the parameters that a `Normal` marks without memory, on torch's meta device."""
    token = _deferred.set(True)
    try:
        yield
    finally:
        _deferred.reset(token)


@dataclass(frozen=True)
class Normal:
    """An initialiser for megatron-core that marks a parameter as normal with standard deviation `std`."""

    std: float

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor.mtrain_init_std = self.std  # type: ignore[attr-defined]
        if _deferred.get() and not isinstance(tensor, FakeTensor):  # which has no memory to begin with
            empty = torch.nn.Parameter(torch.empty_like(tensor, device="meta"), requires_grad=tensor.requires_grad)
            vars(empty).update(vars(tensor))
            torch.utils.swap_tensors(tensor, empty)
        return tensor


def initialize(chunks: list[Any], seed: int) -> None:
    """Fill every marked parameter of this rank's model chunks from `seed`.

    `mtrain_init_scale` of a parameter gives a factor for each of its rows, from their numbers in the whole tensor;
    `mtrain_init_bound` marks one as uniform between the bound and its negative, `mtrain_init_of_share` as a function
    of what is uniform in [0, 1).
    Unmarked parameters (norms, biases, router biases) keep the constants that their modules gave them.

    Raises:
        RuntimeError: a matrix was neither marked nor constant, so its start would depend on the layout.
    """
    for shard in model_shards(chunks, trainable=True):
        assert shard.param is not None
        marks = ("std", "bound", "of_share")
        std, bound, of_share = (getattr(shard.param, f"mtrain_init_{what}", None) for what in marks)
        if std is not None:
            _fill(shard, partial(_normal, std), seed)
        elif bound is not None:
            _fill(shard, partial(_uniform, bound), seed)
        elif of_share is not None:
            _fill(shard, partial(_of_share, of_share), seed)
        elif len(shard.shape) - shard.lead > 1 and not (shard.tensor == shard.tensor.flatten()[0]).all():
            raise RuntimeError(f"{shard.weight} was initialised by something that mtrain does not control")
    make_main_weights(chunks)


def _normal(std: float, drawn: torch.Tensor, generator: torch.Generator) -> None:
    drawn.normal_(0.0, std, generator=generator)


def _uniform(bound: float, drawn: torch.Tensor, generator: torch.Generator) -> None:
    drawn.uniform_(-bound, bound, generator=generator)


def _of_share(made: Callable[[torch.Tensor], torch.Tensor], drawn: torch.Tensor, generator: torch.Generator) -> None:
    drawn.copy_(made(drawn.uniform_(0.0, 1.0, generator=generator)))


@torch.no_grad()
def _fill(shard: TensorShard, draw: Callable[[torch.Tensor, torch.Generator], Any], seed: int) -> None:
    """Draw the blocks of leading rows that meet this shard, and keep what belongs to it."""
    # axes that count layers or experts are part of the name: they have one index each
    lead, values = shard.lead, shard.tensor.view(-1)
    shape, offset, size = shard.global_shape[lead:], shard.offset[lead:], shard.shape[lead:]
    name = f"{seed}/{shard.weight}/{'.'.join(map(str, shard.offset[:lead]))}"
    rows_scaled = getattr(shard.param, "mtrain_init_scale", None)
    rows = max(1, BLOCK_ELEMENTS // max(1, prod(shape[1:])))
    columns = tuple(slice(o, o + n) for o, n in zip(offset[1:], size[1:], strict=True))
    start, stop = shard.flat or (0, prod(size))
    row = prod(size[1:])  # elements of the part's rows
    first, last = offset[0] + start // row, offset[0] - (-stop // row)
    for block in range(first // rows, -(-last // rows)):
        tick()
        top, bottom = block * rows, min((block + 1) * rows, shape[0])
        generator = torch.Generator(values.device)
        digest = hashlib.sha256(f"{name}/{block}".encode()).digest()
        generator.manual_seed(int.from_bytes(digest[:7], "big"))
        drawn = torch.empty((bottom - top, *shape[1:]), device=values.device, dtype=torch.float32)
        draw(drawn, generator)
        if rows_scaled is not None:
            drawn *= rows_scaled(torch.arange(top, bottom, device=values.device)).view(-1, *[1] * (drawn.ndim - 1))
        upper, lower = max(first, top), min(last, bottom)
        part = drawn[(slice(upper - top, lower - top), *columns)].reshape(-1)
        begin = (upper - offset[0]) * row  # where the flat range lies in the part
        lo, hi = max(start, begin), min(stop, begin + part.numel())
        values[lo - start : hi - start].copy_(part[lo - begin : hi - begin])
