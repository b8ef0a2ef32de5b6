"""Definition of a product of operands in FP8, in plain torch: what they stand for is multiplied in
fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtrain_kernels.runtime import ceil_div

BLOCK = 128


def scaled_product(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return `(a_scale a) (b_scale b)^T` [m, n] in `dtype`, added up in fp32: `a` [m, k] and `b`
    [n, k] in FP8.

    A scale is [1], or one for each 128 elements of a row [m, ceil(k / 128)], or of 128 rows and as
    many columns.
    """
    return (decoded(a, a_scale) @ decoded(b, b_scale).T).to(dtype)


def decoded(x: Tensor, scale: Tensor) -> Tensor:
    """Return `scale x` [m, k] in fp32."""
    if scale.numel() == 1 and scale.ndim == 1:
        return x.float() * scale
    spread = scale.repeat_interleave(BLOCK, 1)[:, : x.shape[1]]
    if rows_of(x, scale) == BLOCK:
        spread = spread.repeat_interleave(BLOCK, 0)[: x.shape[0]]
    return x.float() * spread


def rows_of(x: Tensor, scale: Tensor) -> int:
    """Return how many rows of `x` [m, k] share a scale, 1 or 128; 0 where one is for all.

    Raises `ValueError` else.
    """
    if scale.ndim == 1 and scale.numel() == 1:
        return 0
    columns = ceil_div(x.shape[1], BLOCK)
    if scale.shape == (x.shape[0], columns):
        return 1
    if scale.shape == (ceil_div(x.shape[0], BLOCK), columns):
        return BLOCK
    raise ValueError(f"scale {tuple(scale.shape)} belongs to no blocks of {tuple(x.shape)}")
