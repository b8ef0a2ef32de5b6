"""Initial weights by element index: a rank draws its part of a tensor as it is in the whole one,
and little else.
"""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch

from tests.support.forked import run_ranks
from tests.support.runs import tiny_run


def _filled(
    shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...], **more: Any
) -> torch.Tensor:
    from mtrain.assembly import philox, weights
    from mtrain.mcore.state.sharding import TensorShard

    start, stop = more.get("flat", (0, prod(size)))
    tensor = torch.full((stop - start,), torch.nan)
    weights._fill(
        TensorShard("model/w", shape, offset, size, tensor, **more),
        lambda bits: philox.normal(bits),
        7,
    )
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
def test_initial_weights_shard_equals_part_of_whole(
    shape: tuple[int, ...],
    offset: tuple[int, ...],
    size: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mtrain.assembly import weights

    whole = _filled(shape, (0,) * len(shape), shape).view(shape)
    monkeypatch.setattr(weights, "ON_HOST", 64)  # several blocks
    part = whole[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))].flatten()
    assert torch.equal(_filled(shape, offset, size), part)
    flat = (prod(size) // 3, prod(size) - 2)
    assert torch.equal(_filled(shape, offset, size, flat=flat), part[slice(*flat)])


def test_initial_weights_shard_draws_little_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from mtrain.assembly import philox

    drawn: list[int] = []
    real = philox.normal
    monkeypatch.setattr(philox, "normal", lambda bits: drawn.append(bits.numel()) or real(bits))
    _filled((512, 256), (0, 64), (512, 64))
    assert sum(drawn) == 512 * 64


def test_initial_weights_ignore_device_generator() -> None:
    """Begin with the same weights on a device whose generator draws other numbers."""

    def job() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        from mtrain.assembly.model import build_model
        from mtrain.world.init import joined

        def weights() -> dict[str, torch.Tensor]:
            return {
                name: p.detach().clone()
                for name, p in build_model(run, world)[0].named_parameters()
            }

        run = tiny_run()
        real = torch.Tensor.normal_
        with joined(run) as world:
            usual = weights()
            torch.Tensor.normal_ = lambda self, *args, **more: real(self, *args, **more).neg_()  # type: ignore[method-assign,assignment]
            return usual, weights()

    usual, others = run_ranks(1, job)[0]
    assert usual.keys() == others.keys()
    assert all(torch.equal(usual[name], others[name]) for name in usual)
