"""Initial weights by element index: a rank draws its part of a tensor as it is in the whole one, and little else."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch

from mtrain.build import philox


def _filled(shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...], **more: Any) -> torch.Tensor:
    from mtrain.build import weights
    from mtrain.mcore.sharding import TensorShard

    start, stop = more.get("flat", (0, prod(size)))
    tensor = torch.full((stop - start,), torch.nan)
    weights._fill(TensorShard("model/w", shape, offset, size, tensor, **more), lambda bits: philox.normal(bits), 7)
    return tensor


@pytest.mark.parametrize(
    ("shape", "offset", "size"),
    [
        ((50,), (10,), (7,)),
        ((64, 96), (16, 24), (16, 24)),
        ((24, 10, 6), (3, 2, 0), (9, 5, 6)),
        ((9, 4, 6), (1, 0, 2), (5, 4, 3)),
    ],
)
def test_a_shard_draws_its_part_of_the_whole_tensor(
    shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtrain.build import weights

    whole = _filled(shape, (0,) * len(shape), shape).view(shape)
    monkeypatch.setattr(weights, "ON_HOST", 64)  # several blocks
    part = whole[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))].flatten()
    assert torch.equal(_filled(shape, offset, size), part)
    flat = (prod(size) // 3, prod(size) - 2)
    assert torch.equal(_filled(shape, offset, size, flat=flat), part[slice(*flat)])


def test_a_shard_draws_little_that_it_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    real = philox.normal
    monkeypatch.setattr(philox, "normal", lambda bits: drawn.append(bits.numel()) or real(bits))
    _filled((512, 256), (0, 64), (512, 64))
    assert sum(drawn) == 512 * 64
