"""Zeros behind the last group of a product that is not ours."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from mtrain_kernels.grouped_gemm.triton import CLEARED, _clear
from mtrain_kernels.launch_triton import kernel
from mtrain_kernels.runtime import on_device_of, processors


@kernel
def clear_kernel(y_ptr, ends_ptr, rows, n, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """Call `_clear` after a product of another library."""
    _clear(y_ptr, ends_ptr, rows, n, GROUPS, SIZE)


def clear_behind(y: Tensor, ends: Tensor) -> Tensor:
    """Return `y` [r, n], dense, with zeros in the rows behind the last group, and nothing else
    written.
    """
    if y.numel():
        with on_device_of(y):
            clear_kernel[(processors(y.device),)](
                y, ends, *y.shape, GROUPS=ends.shape[0], SIZE=CLEARED, num_warps=4
            )
    return y
