"""Products that cuBLASLt adds to a matrix: the calls, made of a stand-in that computes what
cublasLt.h says of its arguments.
"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mtrain_kernels.fp8_linear import cublas
from mtrain_kernels.fp8_linear.reference import decoded, scaled_product
from mtrain_kernels.quantize.op import quantize_blocks, quantize_tensorwise
from torch import Tensor

TYPES = {number: dtype for dtype, number in cublas._TYPES.items()}
CPU = torch.device("cpu")


def _at(address: int, dtype: torch.dtype, shape: tuple[int, ...], stride: Any) -> Tensor:
    """Return memory of this process as a tensor."""
    size = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    held = (ctypes.c_char * (size * dtype.itemsize)).from_address(address)
    return torch.frombuffer(held, dtype=dtype).as_strided(shape, stride)


class Library:
    """cuBLASLt on a CPU: descriptors are entries of a list, and matrices have their columns one
    after the other.
    """

    def __init__(self) -> None:
        self.held: list[Any] = [None]
        self.algorithms = 1
        self.transposes = True
        self.alignments = set[int]()

    def _make(self, to: Any, value: Any) -> int:
        self.held.append(value)
        to._obj.value = len(self.held) - 1
        return 0

    def _of(self, at: Any) -> Any:
        return self.held[at.value]

    def cublasLtMatmulDescCreate(self, to: Any, compute: int, scale: int) -> int:
        assert (compute, scale) == (68, 0)
        return self._make(to, {})

    def cublasLtMatmulPreferenceCreate(self, to: Any) -> int:
        return self._make(to, {})

    def cublasLtMatrixLayoutCreate(
        self, to: Any, kind: int, rows: Any, columns: Any, stride: Any
    ) -> int:
        shape = rows.value, columns.value
        return self._make(to, (TYPES[kind], shape, (1, stride.value)))

    def cublasLtMatmulDescSetAttribute(self, at: Any, name: int, value: Any, size: Any) -> int:
        assert size.value == ctypes.sizeof(value._obj)
        self._of(at)[name] = value._obj.value
        return 0

    cublasLtMatmulPreferenceSetAttribute = cublasLtMatmulDescSetAttribute

    def cublasLtMatmulPreferenceDestroy(self, at: Any) -> int:
        self.alignments |= {self._of(at)[7], self._of(at)[8]}
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *given: Any) -> int:
        given[9]._obj.value = self.algorithms
        given[8]._obj.workspace = 64
        return 0

    def cublasLtMatmul(self, *given: Any) -> int:
        _, at, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, *_ = given
        options = self._of(at)
        assert options[3] == 1
        matrices = []
        for address, layout, place in ((a, a_layout, 0), (b, b_layout, 1)):
            dtype, shape, stride = self._of(layout)
            x = _at(address.value, dtype, shape, stride)
            # What the header calls the innermost dimension is that of columns, here k.
            scales = (1,) if options[31 + place] == 0 else (shape[1], -(-shape[0] // 128))
            strides = (1,) if len(scales) == 1 else (1, scales[0])
            scale = _at(options[17 + place], torch.float32, scales, strides)
            matrices.append(decoded(x.t(), scale))
        dtype, shape, stride = self._of(c_layout)
        assert c_layout is d_layout
        assert c.value == d.value
        result = _at(d.value, dtype, shape, stride)
        added = alpha._obj.value * (matrices[0] @ matrices[1].t())
        result.copy_(added + beta._obj.value * result.float())
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    monkeypatch.setattr(cublas, "_library", lambda: found)
    monkeypatch.setattr(cublas, "on_device_of", lambda x: nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    cublas._plan.cache_clear()
    return found


def _operands(m: int, n: int, k: int, blocks: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    found = {}
    for name, rows in (("a", m), ("b", n)):
        x = torch.randn(rows, k) * torch.logspace(-1, 1, rows)[:, None]
        if blocks:
            made = quantize_blocks(x, layout="1x128_power_of_two", impl="reference")
        else:
            made = quantize_tensorwise(x, impl="reference")
        found |= {name: made.data, f"{name}_scale": made.scale}
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blocks", [False, True])
def test_fp8_cublas_adds_product_in_place(
    library: Library, blocks: bool, dtype: torch.dtype
) -> None:
    given = _operands(32, 48, 272, blocks)
    product = scaled_product(**given, dtype=torch.float32)
    before = torch.randn(32, 64).to(dtype)
    # Rows of a wider buffer, whose other columns stay.
    into = before.clone()
    # The second product takes the first one's plan with scales of its own.
    for factor in (1, 2):
        into.copy_(before)
        more = given | {"a_scale": given["a_scale"] * factor}
        assert cublas.add_scaled_product(into[:, :48], **more)
        wanted = before.float()
        wanted[:, :48] += factor * product
        torch.testing.assert_close(into, wanted.to(dtype), rtol=1e-2, atol=1e-3)
    assert len(library.held) == 6


def test_fp8_cublas_without_algorithm_or_layout_adds_nothing(library: Library) -> None:
    library.algorithms = 0
    into = torch.zeros(32, 48)
    assert not cublas.add_scaled_product(into, **_operands(32, 48, 256, False))
    assert not cublas.add_scaled_product(into.half(), **_operands(32, 48, 256, False))
    assert not into.any()


def test_fp8_cublas_alignment_is_that_of_the_buffer(library: Library) -> None:
    storage = torch.zeros(64 * 64 + 64)
    start = -storage.data_ptr() // 4 % 64
    for offset, alignment in ((0, 256), (4, 16)):
        library.alignments.clear()
        into = storage[start + offset :][: 32 * 48].view(32, 48)
        assert cublas.add_scaled_product(into, **_operands(32, 48, 256, False))
        assert library.alignments == {alignment}


def test_fp8_cublas_failure_is_reported(library: Library) -> None:
    library.cublasLtMatmul = lambda *given: 7  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="status 7"):
        cublas.add_scaled_product(torch.zeros(32, 48), **_operands(32, 48, 256, False))
