"""The grouped product's kernels and torch's own against the definition."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from mtrain_kernels import linear, parity
from mtrain_kernels.grouped_gemm import op, products, reference
from mtrain_kernels.registry import Unavailable
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = "mtrain_kernels.grouped_gemm.triton"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
COUNTS = [[5], [3, 0, 2], [0, 0], [40, 1, 17, 0], [0, 30, 9]]
TILES = "mtrain_kernels.grouped_gemm.tiles"
SMALL_TILES = ("return min(max(power_of_two(size), 16), most)", "return 16")


def inputs(
    counts: list[int],
    sizes: tuple[int, int] = (19, 37),
    dtype: torch.dtype = torch.float32,
    rest: int = 0,
) -> dict[str, Any]:
    """Return inputs; `sizes` are n and k, and `rest` rows follow the last group."""
    torch.manual_seed(0)
    shapes = {
        "x": (sum(counts) + rest, sizes[1]),
        "weight": (len(counts), *sizes),
        "bias": (len(counts), sizes[0]),
    }
    found: dict[str, Any] = {
        n: torch.randn(s, device=DEVICE).to(dtype).requires_grad_() for n, s in shapes.items()
    }
    return found | {"counts": torch.tensor(counts, device=DEVICE)}


def compare(found: dict[str, Any], impl: str = "triton") -> None:
    parity.check(partial(op.grouped_gemm, impl=impl), reference.grouped_gemm, found)


@contextmanager
def small_tiles() -> Iterator[None]:
    """Use tiles of 16 by 16, so that few rows are many tiles; kernels are made anew with them."""
    with (
        parity.mutated(TILES, *SMALL_TILES),
        parity.mutated(KERNELS, "CLEARED = 4096", "CLEARED = 16"),
    ):
        yield


def test_grouped_gemm_definition_equals_layer_and_zeros() -> None:
    found = inputs([3, 0, 2], rest=2)
    y = reference.grouped_gemm(**found)
    layer = reference.grouped_linear(
        found["x"][:5], list(found["weight"]), [3, 0, 2], list(found["bias"])
    )
    assert torch.equal(y[:5], layer)
    assert y[5:].count_nonzero() == 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", COUNTS)
def test_grouped_gemm_equals_definition_with_gradients(
    counts: list[int], dtype: torch.dtype
) -> None:
    compare(inputs(counts, dtype=dtype, rest=3))
    compare(inputs(counts, dtype=dtype) | {"bias": None})


@pytest.mark.parametrize("counts", COUNTS)
def test_grouped_gemm_torch_product_is_equal(counts: list[int]) -> None:
    compare(inputs(counts, (24, 40), torch.bfloat16, rest=3), "torch")


@pytest.mark.sampled
@pytest.mark.parametrize("sizes", [(1, 1), (0, 4), (4, 0), (150, 20), (20, 150)])
def test_grouped_gemm_any_size(sizes: tuple[int, int]) -> None:
    compare(inputs([2, 0, 3], sizes))
    compare(inputs([0, 0], sizes))


@pytest.mark.full
def test_grouped_gemm_programs_walk_over_many_tiles() -> None:
    with small_tiles():
        compare(inputs([40, 0, 21], rest=18))


def test_grouped_gemm_strides_do_not_matter() -> None:
    found = inputs([3, 4])
    layouts = {n: dict(parity.layouts(found[n])) for n in ("x", "weight", "bias")}
    for name in layouts["x"]:
        compare(found | {n: other[name] for n, other in layouts.items()})
    for counts in ([3, 4], [1], [0]):
        half = inputs(counts, (8, 16), torch.bfloat16)
        for _, x in parity.layouts(half["x"]):
            compare(half | {"x": x}, "torch")


def test_grouped_gemm_nan_stays_in_row_and_group() -> None:
    found = inputs([3, 0, 4], rest=2)
    with torch.no_grad():
        found["x"][1, 5] = float("nan")
        found["x"][8, 0] = float("inf")
    y = op.grouped_gemm(**found, impl="triton")
    assert y.isnan().any(1).tolist() == [False, True, *[False] * 7]
    gradient = torch.autograd.grad(y[2:].sum(), found["weight"])[0]
    assert gradient[2].isfinite().all()
    assert gradient[1].count_nonzero() == 0


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("mask = mask & (inner < k)[None, :]", "mask = mask & (inner < k - 1)[None, :]"),
        ("mask = (column < n)[None, :]", "mask = (column < n - 1)[None, :]"),
        ("at = tl.cast(group, tl.int64) * step", "at = tl.cast(0, tl.int64) * step"),
        ("(upto <= high)", "(upto < high)"),
        ("base = start - (upto - tiles) * R", "base = start - (upto - tiles - 1) * R"),
        (
            "first = tl.minimum(tl.load(ends_ptr + GROUPS - 1), rows)",
            "first = tl.cast(rows, tl.int32)",
        ),
        ("for i in range(whole, end, R)", "for i in range(whole, end - 1, R)"),
        ("mask=(r < end)[:, None] & (column < k)", "mask=(r < rows)[:, None] & (column < k - 1)"),
        (
            "start = tl.minimum(tl.load(ends_ptr + g - 1), rows)",
            "start = tl.minimum(tl.load(ends_ptr + g), rows)",
        ),
        ("strides = (1, places.shape[1])", "strides = (places.shape[1], 1)"),
        ("total = dot(d_y, x, total, EXACT)", "total = dot(d_y, x, total * 0, EXACT)"),
        ("total = dot(x, w, total, EXACT)", "total = dot(x, w, total * 0, EXACT)"),
    ],
)
def test_grouped_gemm_seeded_bug_is_found(old: str, new: str) -> None:
    with small_tiles(), parity.caught(KERNELS, old, new):
        compare(inputs([17, 0, 2, 3], (19, 19), rest=2))


@pytest.mark.full
@pytest.mark.parametrize("implementation", ["triton", "torch"])
def test_grouped_gemm_passes_torch_registration(implementation: str) -> None:
    found = inputs([3, 0, 2], (8, 16), torch.bfloat16, rest=3)
    ends = found["counts"].cumsum(0).int()
    torch.library.opcheck(
        products._grouped.op,
        (found["x"], [found["weight"]], ends, implementation),
        rtol=1e-2,
        atol=1e-2,
    )


@pytest.mark.full
def test_grouped_gemm_compiled_gradient_is_equal() -> None:
    def loss(x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor) -> Tensor:
        return op.grouped_gemm(x, weight, counts, bias, impl="triton").square().sum()

    found = inputs([3, 0, 2])
    leaves = [found[n] for n in ("x", "weight", "bias")]
    plain = torch.autograd.grad(loss(**found), leaves)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(**found), leaves), plain)


def test_grouped_gemm_named_runs_or_states_reason() -> None:
    with pytest.raises(Unavailable, match="bfloat16"):
        op.grouped_gemm(**inputs([2]), impl="torch")
    with pytest.raises(Unavailable, match="16 bytes"):
        op.grouped_gemm(**inputs([2], dtype=torch.bfloat16), impl="torch")
    with pytest.raises(ValueError, match="no implementation 'cublas'"):
        op.grouped_gemm(**inputs([2]), impl="cublas")
    wide = inputs([2], dtype=torch.float64)
    with pytest.raises(Unavailable, match="float64"):
        op.grouped_gemm(**wide, impl="triton")
    assert op.grouped_gemm(**wide).dtype == torch.float64


def test_grouped_gemm_unfit_is_refused() -> None:
    found = inputs([2, 3])
    for change, said in (
        ({"x": found["x"][:, 1:]}, "groups, n, k"),
        ({"weight": found["weight"].half()}, "one dtype"),
        ({"counts": found["counts"][1:]}, "integers"),
        ({"counts": found["counts"].float()}, "integers"),
        ({"bias": found["bias"][1:]}, "bias"),
    ):
        with pytest.raises(ValueError, match=said):
            op.grouped_gemm(**found | change)
    with pytest.raises(ValueError, match="do not fit"):
        op.grouped_gemm(**found | {"counts": found["counts"] + 1}, impl="reference")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("impl", "dtype"),
    [(c, d) for c in ("reference", "triton") for d in (torch.bfloat16, torch.float16)]
    + [("torch", torch.bfloat16)],
    ids=str,
)
def test_grouped_gemm_bias_gradient_sums_in_fp32(impl, dtype):
    bias = torch.zeros(3, 8, dtype=dtype, requires_grad=True)
    x = torch.zeros(4104, 16, dtype=dtype)
    weight = torch.zeros(3, 8, 16, dtype=dtype)
    # five rows of nobody
    y = op.grouped_gemm(x, weight, torch.tensor([4096, 0, 3]), bias, impl=impl)
    (found,) = torch.autograd.grad(y, bias, torch.ones_like(y))
    assert found.tolist() == [[4096.0] * 8, [0.0] * 8, [3.0] * 8]


@pytest.mark.parametrize("library", ["blas", "onednn"])
def test_grouped_gemm_on_a_cpu_equals_the_reference(library: Any) -> None:
    if library == "onednn" and not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no oneDNN")
    found = inputs([40, 0, 9], (512, 1024), rest=3)
    found = {n: t.detach().cpu().requires_grad_(t.requires_grad) for n, t in found.items()}
    linear.use(library)
    try:
        compare(found, "cpu")
        y = op.grouped_gemm(**found, impl="reference")
        assert "_LinearBackward" not in str(y.grad_fn.next_functions), (
            "the definition has no library"
        )
    finally:
        linear.use("blas")
