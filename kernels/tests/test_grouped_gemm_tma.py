"""The grouped products by TMA descriptors, which sm_90 and later take, interpreted: no row, one,
odd places.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from mtrain_kernels import parity
from mtrain_kernels.grouped_gemm import op, reference, tiles
from torch import Tensor

SIZES = 32, 48  # n and k


@pytest.fixture(autouse=True)
def by_descriptors(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Use small tiles, all by descriptors; return a list with an entry for each descriptor that was
    made.
    """
    made: list[bool] = []
    described = tiles.Tile.described

    def noted(*given: Any) -> Any:
        made.append(True)
        return described(*given)

    monkeypatch.setattr(tiles, "capability", lambda device: 90)
    monkeypatch.setattr(tiles, "LEAST", 16)
    monkeypatch.setattr(
        tiles,
        "TABLES",
        {name: (tiles.Tile(16, 16, 16, tma=True), tiles.Tile(16, 16, 16)) for name in tiles.TABLES},
    )
    monkeypatch.setattr(tiles.Tile, "described", staticmethod(noted))
    return made


def inputs(counts: list[int], rest: int = 0) -> dict[str, Any]:
    torch.manual_seed(0)
    shapes = {"x": (sum(counts) + rest, SIZES[1]), "weight": (len(counts), *SIZES)}
    found: dict[str, Any] = {n: torch.randn(s).half().requires_grad_() for n, s in shapes.items()}
    return found | {"counts": torch.tensor(counts)}


def compare(found: dict[str, Any]) -> None:
    parity.check(partial(op.grouped_gemm, impl="triton"), reference.grouped_gemm, found)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("counts", [[0, 0], [1], [0, 1], [17, 0, 2]])
def test_grouped_gemm_tma_equals_definition_with_gradients(
    counts: list[int], by_descriptors: list[bool]
) -> None:
    compare(inputs(counts))
    compare(inputs(counts, rest=1))
    assert by_descriptors


def test_grouped_gemm_tma_fused_activation_equals_separate(by_descriptors: list[bool]) -> None:
    ways = (partial(op.grouped_gated, kind="swiglu", impl=impl) for impl in ("triton", "reference"))
    parity.check(*ways, inputs([3, 0, 18]))
    assert by_descriptors


def test_grouped_gemm_tma_single_row_may_be_a_slice() -> None:
    found = inputs([0, 1])
    row = torch.randn(1, SIZES[1] + 3).half()[:, : SIZES[1]]
    assert row.is_contiguous()
    compare(found | {"x": row.requires_grad_()})

    def summed(x: Tensor, weight: Tensor, counts: Tensor, impl: str) -> Tensor:
        # its gradient has a stride of 0
        return op.grouped_gemm(x, weight, counts, impl=impl).sum(0)

    parity.check(partial(summed, impl="triton"), partial(summed, impl="reference"), found)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_grouped_gemm_tma_gradient_may_begin_anywhere(rows: int) -> None:
    from mtrain_kernels.grouped_gemm import triton

    x = torch.randn(rows, SIZES[1]).half()
    ends = torch.tensor([0, rows], dtype=torch.int32)
    d_y = torch.randn(rows * SIZES[0] + 1).half()[1:].view(rows, SIZES[0])
    assert rows == 0 or d_y.data_ptr() % 16
    found = triton.weights_product(d_y, x, ends)
    assert found is not None
    parity.assert_near(
        "gradient", found, torch.stack([torch.zeros(SIZES), d_y.float().t() @ x.float()])
    )
