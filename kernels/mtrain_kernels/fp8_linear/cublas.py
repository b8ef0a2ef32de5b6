"""Products of operands in FP8 by cuBLASLt: through torch, and directly where they are added to a
matrix, which torch's `scaled_mm` cannot do.

The names and numbers of the interface are those of cublasLt.h of CUDA 12.9 and 13.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mtrain_kernels.fp8_linear.reference import BLOCK, rows_of
from mtrain_kernels.runtime import cuda_capability, on_device_of

KINDS = (
    (0, 0),
    (1, 1),
    (1, BLOCK),
    (BLOCK, 1),
)
"""Pairs of `rows_of` that cuBLAS multiplies."""
_RECIPES = {1: "BlockWise1x128", BLOCK: "BlockWise128x128"}

# cudaDataType and cublasComputeType_t
_TYPES = {
    torch.float32: 0,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
    torch.float8_e5m2: 29,
}
_COMPUTE_32F = 68
# cublasLtMatmulDescAttributes_t
_TRANSA = 3
_A_SCALE_POINTER = 17
_B_SCALE_POINTER = 18
_A_SCALE_MODE = 31
_B_SCALE_MODE = 32
# cublasLtMatmulMatrixScale_t by `rows_of`: one fp32 number, or one for 128 of the inner dimension
_SCALE_MODES = {0: 0, 1: 4}
# cublasLtMatmulPreferenceAttributes_t
_MAX_WORKSPACE_BYTES = 1
_MIN_ALIGNMENT_C_BYTES = 7
_MIN_ALIGNMENT_D_BYTES = 8
WORKSPACE = 32 << 20
"""Bytes that an algorithm may use, as many as torch allows on sm_90."""


def refused(a: Tensor, b: Tensor, kinds: tuple[int, int]) -> str | None:
    """Return why cuBLAS does not take these operands, or None; `kinds` are their `rows_of`."""
    if any(kinds) and (why := refuses_blocks(a.device)):
        return why
    if kinds not in KINDS:
        return f"cuBLAS takes no scales for {kinds[0]} and {kinds[1]} rows of 128 columns"
    if any(kinds) and (a.shape[0] % 4 or b.shape[0] % 4):
        return f"cuBLAS reads scales by 4, and there are {a.shape[0]} and {b.shape[0]} rows"
    if a.shape[1] % 16 or b.shape[0] % 16:
        return f"cuBLAS takes widths by 16, not {a.shape[1]} and {b.shape[0]}"
    return (
        "cuBLAS takes no two operands in e5m2" if a.dtype == b.dtype == torch.float8_e5m2 else None
    )


@functools.cache
def refuses_blocks(device: torch.device) -> str | None:
    """Return why cuBLAS takes no scales for blocks of 128 on a device, or None."""
    if cuda_capability(device)[0] != 9:
        return "cuBLAS takes scales for blocks of 128 on sm_90 only"
    cuda = tuple(int(part) for part in str(torch.version.cuda).split(".")[:2])
    if not hasattr(functional, "scaled_mm") or cuda < (12, 9):
        return "scales for blocks of 128 need torch 2.10 and CUDA 12.9"
    return None


def scaled_product(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the product of operands with one scale or with scales for blocks; see
    `reference.scaled_product`.
    """
    kinds = rows_of(a, a_scale), rows_of(b, b_scale)
    if not any(kinds):
        return torch._scaled_mm(a, b.t(), a_scale.view(()), b_scale.view(()), out_dtype=dtype)
    recipes = [getattr(functional.ScalingType, _RECIPES[rows]) for rows in kinds]
    scales = [as_read(s, rows) for s, rows in zip((a_scale, b_scale), kinds, strict=True)]
    return functional.scaled_mm(
        a, b.t(), scales[0], recipes[0], scales[1], recipes[1], output_dtype=dtype
    )


def as_read(scale: Tensor, rows: int) -> Tensor:
    """Return scales as cuBLAS reads them: of single rows [m, k / 128] with the rows side by side in
    memory, of squares [k / 128, n / 128] with the columns side by side, by 4 of them.
    """
    if rows == 1:
        return scale.t().contiguous().t()
    missing_columns = -scale.shape[1] % 4
    # A padding of nothing would copy.
    return (functional.pad(scale, (0, missing_columns)) if missing_columns else scale).t()


def add_scaled_product(
    into: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor
) -> bool:
    """Add the product to `into` [m, n] as it is computed; return False, and do nothing, where
    cuBLASLt cannot.

    Operands have one scale, or one for each 128 elements of a row.
    """
    kinds = rows_of(a, a_scale), rows_of(b, b_scale)
    if kinds not in ((0, 0), (1, 1)) or into.dtype not in _TYPES:
        return False
    # The lowest set bit of an address is its alignment; cuBLASLt asks for no more than 256 bytes.
    address = into.data_ptr() | 256
    plan = _plan(
        a.device,
        tuple(a.shape),
        b.shape[0],
        into.stride(0),
        (a.dtype, b.dtype, into.dtype),
        kinds[0],
        address & -address,
    )
    if plan is None:
        return False
    if kinds[0]:
        a_scale = as_read(a_scale, 1)
        b_scale = as_read(b_scale, 1)
    plan(into, a, a_scale, b, b_scale)
    return True


@functools.cache
def _library() -> Any:
    """Return the cuBLASLt that torch has loaded, or None."""
    major = str(torch.version.cuda).split(".")[0]
    try:
        # A second copy of the library would not know torch's handles.
        return ctypes.CDLL(f"libcublasLt.so.{major}", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


Plan = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""Product of (into, a, scales of a, b, scales of b)."""


@functools.cache
def _plan(
    device: torch.device,
    shape: tuple[int, int],
    n: int,
    stride: int,
    types: tuple[torch.dtype, torch.dtype, torch.dtype],
    rows: int,
    alignment: int,
) -> Plan | None:
    """Return the product of `a` of a shape [m, k] and `b` [n, k], added to rows `stride` apart.

    cuBLASLt's matrices have their columns in memory one after the other, so it computes the
    transpose: `b` is its A, read transposed, `a` its B.
    """
    library = _library()
    if library is None:
        return None
    m, k = shape
    a_type, b_type, into_type = (_TYPES[each] for each in types)
    descriptor = ctypes.c_void_p()
    _hold(library.cublasLtMatmulDescCreate(ctypes.byref(descriptor), _COMPUTE_32F, 0))
    for attribute, value in (
        (_TRANSA, 1),
        (_A_SCALE_MODE, _SCALE_MODES[rows]),
        (_B_SCALE_MODE, _SCALE_MODES[rows]),
    ):
        _set(library, descriptor, attribute, ctypes.c_int32(value))
    left = _layout(library, b_type, k, n, k)
    right = _layout(library, a_type, k, m, k)
    result = _layout(library, into_type, n, m, stride)
    chosen = _algorithm(library, device, (descriptor, left, right, result), alignment)
    if chosen is None:
        return None
    one = ctypes.byref(ctypes.c_float(1.0))
    algorithm = ctypes.byref(chosen)
    size = ctypes.c_size_t(chosen.workspace)

    def add(into: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> None:
        with on_device_of(a):
            _set(library, descriptor, _A_SCALE_POINTER, ctypes.c_void_p(b_scale.data_ptr()))
            _set(library, descriptor, _B_SCALE_POINTER, ctypes.c_void_p(a_scale.data_ptr()))
            # torch's allocator gives it to nobody else before this stream is done with it.
            workspace = torch.empty(chosen.workspace, dtype=torch.uint8, device=device)
            to = ctypes.c_void_p(into.data_ptr())
            _hold(
                library.cublasLtMatmul(
                    ctypes.c_void_p(torch.cuda.current_blas_handle()),
                    descriptor,
                    one,
                    ctypes.c_void_p(b.data_ptr()),
                    left,
                    ctypes.c_void_p(a.data_ptr()),
                    right,
                    one,
                    to,
                    result,
                    to,
                    result,
                    algorithm,
                    ctypes.c_void_p(workspace.data_ptr()),
                    size,
                    ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream),
                )
            )

    return add


def _algorithm(
    library: Any, device: torch.device, parts: tuple[Any, ...], alignment: int
) -> _Heuristic | None:
    """Return cuBLASLt's first choice for matrices of these layouts, or None without one."""
    preference = ctypes.c_void_p()
    _hold(library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
    for attribute, value in (
        (_MAX_WORKSPACE_BYTES, ctypes.c_size_t(WORKSPACE)),
        (_MIN_ALIGNMENT_C_BYTES, ctypes.c_uint32(alignment)),
        (_MIN_ALIGNMENT_D_BYTES, ctypes.c_uint32(alignment)),
    ):
        _hold(
            library.cublasLtMatmulPreferenceSetAttribute(
                preference, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))
            )
        )
    chosen = _Heuristic()
    number = ctypes.c_int()
    descriptor, left, right, result = parts
    with torch.cuda.device(device):
        handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
        status = library.cublasLtMatmulAlgoGetHeuristic(
            handle, descriptor, left, right, result, result, preference, 1,
            ctypes.byref(chosen), ctypes.byref(number),
        )  # fmt: skip
    _hold(library.cublasLtMatmulPreferenceDestroy(preference))
    return chosen if status == 0 and number.value and chosen.state == 0 else None


def _layout(library: Any, kind: int, rows: int, columns: int, stride: int) -> ctypes.c_void_p:
    layout = ctypes.c_void_p()
    _hold(
        library.cublasLtMatrixLayoutCreate(
            ctypes.byref(layout),
            kind,
            ctypes.c_uint64(rows),
            ctypes.c_uint64(columns),
            ctypes.c_int64(stride),
        )
    )
    return layout


def _set(library: Any, descriptor: ctypes.c_void_p, attribute: int, value: Any) -> None:
    _hold(
        library.cublasLtMatmulDescSetAttribute(
            descriptor, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))
        )
    )


def _hold(status: int) -> None:
    """Raise `RuntimeError` unless a call of cuBLASLt succeeded."""
    if status:
        raise RuntimeError(f"cuBLASLt failed with status {status}")
