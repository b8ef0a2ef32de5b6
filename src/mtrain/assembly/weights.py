"""Initial weights that do not depend on the layout: every element is a function of the seed, its
tensor's name and its place in the whole tensor.

megatron-core draws from a generator per rank, so another layout starts from other weights. Here its
initialisers only mark a parameter with its distribution; afterwards each rank draws the elements
that it holds, by their numbers in the whole tensor (`mtrain.assembly.philox`), and every device
makes the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from mtrain.assembly import philox
from mtrain.assembly.philox import Stream
from mtrain.mcore.state.sharding import TensorShard, make_main_weights, model_shards
from mtrain.world.heartbeat import tick

ON_HOST = 1 << 17
"""Elements that the host draws at once: as many as a processor's cache holds."""
ELSEWHERE = 1 << 24
"""Elements that another device draws at once: enough to keep it busy."""


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
    """An initialiser for megatron-core that marks a parameter as normal with deviation `std`."""

    std: float

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor.mtrain_init_std = self.std  # type: ignore[attr-defined]
        if _deferred.get() and not isinstance(
            tensor, FakeTensor
        ):  # which has no memory to begin with
            empty = torch.nn.Parameter(
                torch.empty_like(tensor, device="meta"), requires_grad=tensor.requires_grad
            )
            vars(empty).update(vars(tensor))
            torch.utils.swap_tensors(tensor, empty)
        return tensor


def initialize(chunks: list[Any], seed: int) -> None:
    """Fill every marked parameter of this rank's model chunks from `seed`.

    `mtrain_init_scale` of a parameter gives a factor for each of its rows, from their numbers in
    the whole tensor; `mtrain_init_bound` marks one as uniform between the bound and its negative,
    `mtrain_init_of_share` as a function of a number that is uniform in [0, 1). Unmarked parameters
    (norms, biases, router biases) keep the constants that their modules gave them.

    Raises:
        RuntimeError: a matrix was neither marked nor constant, so its start would depend on the
            layout.
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
        elif (
            len(shard.shape) - shard.lead > 1
            and not (shard.tensor == shard.tensor.flatten()[0]).all()
        ):
            raise RuntimeError(
                f"{shard.weight} was initialised by something that mtrain does not control"
            )
    make_main_weights(chunks)


def _normal(std: float, bits: torch.Tensor) -> torch.Tensor:
    return philox.normal(bits) * std


def _uniform(bound: float, bits: torch.Tensor) -> torch.Tensor:
    return philox.uniform(bits) * (2 * bound) - bound


def _of_share(made: Callable[[torch.Tensor], torch.Tensor], bits: torch.Tensor) -> torch.Tensor:
    # on the host and in fp64: the last bits of a logarithm are each device's own
    return made(philox.uniform(bits).cpu().double()).float().to(bits.device)


@torch.no_grad()
def _fill(shard: TensorShard, draw: Callable[[torch.Tensor], torch.Tensor], seed: int) -> None:
    """Draw the rows of this shard, a block at a time, and keep its own columns."""
    # axes that count layers or experts are part of the name: they have one index each
    lead = shard.lead
    values = shard.tensor.view(-1)
    shape = shard.global_shape[lead:]
    offset = shard.offset[lead:]
    size = shard.shape[lead:]
    stream = Stream.of(f"{seed}/{shard.weight}/{'.'.join(map(str, shard.offset[:lead]))}")
    rows_scaled = getattr(shard.param, "mtrain_init_scale", None)
    start, stop = shard.flat or (0, prod(size))
    row = prod(size[1:])  # elements of the part's rows
    first = start // row
    last = -(-stop // row)
    device = None if values.is_cpu else values.device
    rows = max(1, (ON_HOST if device is None else ELSEWHERE) // max(1, row))
    for top in range(first, last, rows):
        tick()
        bottom = min(top + rows, last)
        drawn = draw(_bits(stream, shape, offset, size, (top, bottom), device))
        if rows_scaled is not None:
            numbers = torch.arange(offset[0] + top, offset[0] + bottom, device=values.device)
            drawn = drawn * rows_scaled(numbers).unsqueeze(1)
        part = drawn.reshape(-1)
        begin = top * row
        lo = max(start, begin)
        hi = min(stop, begin + part.numel())
        values[lo - start : hi - start].copy_(part[lo - begin : hi - begin])


def _bits(
    stream: Stream,
    shape: tuple[int, ...],
    offset: tuple[int, ...],
    size: tuple[int, ...],
    rows: tuple[int, int],
    device: torch.device | None,
) -> torch.Tensor:
    """Return random bits of rows of a part of a whole tensor: int32 [rows, elements]."""
    top = offset[0] + rows[0]
    bottom = offset[0] + rows[1]
    width = prod(shape[1:])
    if size[2:] == shape[2:]:  # a row of the part is one piece of the whole row
        inner = prod(shape[2:])
        left = offset[1] * inner if len(shape) > 1 else 0
        return stream.rows(top, bottom, width, (left, left + prod(size[1:])), device)
    whole = stream.rows(top, bottom, width, (0, width), device).view(-1, *shape[1:])
    columns = tuple(slice(o, o + n) for o, n in zip(offset[1:], size[1:], strict=True))
    return whole[(slice(None), *columns)].reshape(len(whole), -1)
