"""The grouped product of weights that lie apart, with an activation inside, and gradients added to
buffers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from mtrain_kernels import parity
from mtrain_kernels.activation.reference import activation
from mtrain_kernels.grouped_gemm import op, reference
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = "mtrain_kernels.grouped_gemm.triton"
TILES = (
    "mtrain_kernels.grouped_gemm.tiles",
    "return min(max(power_of_two(size), 16), most)",
    "return 16",
)
COUNTS = [[5], [3, 0, 2], [0, 0], [40, 1, 17, 0], [0, 30, 9]]


def inputs(
    counts: list[int], sizes: tuple[int, int], dtype: torch.dtype = torch.float32, rest: int = 3
) -> dict[str, Any]:
    """Return inputs; `sizes` are n and k, and `rest` rows follow the last group."""
    torch.manual_seed(0)
    shapes = {"x": (sum(counts) + rest, sizes[1]), "weight": (len(counts), *sizes)}
    found: dict[str, Any] = {
        n: torch.randn(s, device=DEVICE).to(dtype).requires_grad_() for n, s in shapes.items()
    }
    return found | {"counts": torch.tensor(counts, device=DEVICE)}


def apart(found: dict[str, Any], even: bool) -> dict[str, Any]:
    """Return the same with a weight for each group, from the last to the first in memory, or at
    uneven distances.
    """
    weights = found.pop("weight").detach()
    groups, n, k = weights.shape
    block = torch.zeros(2 * groups * n * k + 64, dtype=weights.dtype, device=DEVICE)
    starts = [
        (groups - 1 - g) * n * k * (1 if even else 2) + (16 if g == 1 and not even else 0)
        for g in range(groups)
    ]
    for g, start in enumerate(starts):
        found[f"w{g}"] = block[start : start + n * k].view(n, k)
        found[f"w{g}"].copy_(weights[g]).requires_grad_()
    return found


def listing(function: Callable[..., Tensor], **more: Any) -> Callable[..., Tensor]:
    """Return a function of a list of weights as one of w0, w1 and so on, which parity can
    differentiate.
    """

    def called(x: Tensor, counts: Tensor, **rest: Any) -> Tensor:
        weights = [rest.pop(name) for name in sorted(n for n in rest if n[0] == "w")]
        return function(x, weights, counts, **rest, **more)

    return called


def gated(
    x: Tensor, weight: Any, counts: Tensor, share: Tensor | None = None, kind: str = "swiglu"
) -> Tensor:
    return activation(reference.grouped_gemm(x, weight, counts), kind, weight=share)


@pytest.mark.sampled
@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("counts", [[40, 1, 17, 0], [0, 30, 9], [5]])
def test_grouped_gemm_weights_are_read_in_place(counts: list[int], even: bool) -> None:
    found = apart(inputs(counts, (24, 40)), even)
    parity.check(listing(op.grouped_gemm, impl="triton"), listing(reference.grouped_gemm), found)
    half = apart(inputs(counts, (24, 40), torch.bfloat16), even)
    parity.check(listing(op.grouped_gemm, impl="torch"), listing(reference.grouped_gemm), half)


def test_grouped_gemm_weights_list_is_not_copied() -> None:
    def kept(weight: Any) -> int:
        found: dict[int, int] = {}

        def note(t: Tensor) -> Tensor:
            found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            op.grouped_gemm(x, weight, counts, impl="triton")
        own = {w.untyped_storage().data_ptr() for w in weights}
        return sum(size for at, size in found.items() if at not in own)

    x = torch.randn(5, 16)
    counts = torch.tensor([3, 0, 2])
    weights = [torch.randn(32, 16, requires_grad=True) for _ in range(3)]
    small = kept(weights)
    assert small < weights[0].nbytes
    assert kept(torch.stack(weights)) == small + sum(w.nbytes for w in weights)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("kind", ["swiglu", "geglu", "geglu_tanh"])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_grouped_gemm_weights_fused_activation_equals_separate(
    counts: list[int], kind: str, dtype: torch.dtype
) -> None:
    found = inputs(counts, (38, 37), dtype)
    ours = partial(op.grouped_gated, kind=kind, impl="triton")
    definition = partial(gated, kind=kind)
    # in between, too
    rounded = {"tolerance": parity.TOLERANCE[dtype] * (1 if dtype == torch.float32 else 2)}
    parity.check(ours, definition, found, **rounded)
    share = torch.rand(found["x"].shape[0], device=DEVICE).requires_grad_()
    listed = apart(found | {"share": share}, even=False)
    parity.check(listing(ours), listing(definition), listed, **rounded)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("up = dot(x, w, up, EXACT)", "up = dot(x, w, up * 0, EXACT)"),
        ("tl.store(to + width, up, mask=inside)", "tl.store(to + width, gate, mask=inside)"),
        ("lower = place + tl.cast(width, tl.int64) * k", "lower = place"),
        ("value *= tl.load(share_ptr + r", "value += tl.load(share_ptr + r"),
        ("_clear(y_ptr, ends_ptr, rows, width, GROUPS, CLEARED)", "pass"),
        ("_clear(h_ptr, ends_ptr, rows, 2 * width, GROUPS, CLEARED)", "pass"),
    ],
)
def test_grouped_gemm_weights_seeded_gate_bug_is_found(old: str, new: str) -> None:
    found = inputs([17, 0, 2], (22, 19))
    share = torch.rand(found["x"].shape[0], device=DEVICE).requires_grad_()
    with parity.mutated(*TILES), parity.caught(KERNELS, old, new):
        parity.check(
            partial(op.grouped_gated, kind="swiglu", impl="triton"), gated, found | {"share": share}
        )


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("with_gate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_gemm_weights_gradients_add_to_buffers(
    dtype: torch.dtype, with_gate: bool, impl: str
) -> None:
    found = apart(inputs([17, 0, 5], (38, 37), dtype), even=True)
    weights = [found[f"w{g}"] for g in range(3)]
    before = [torch.randn(38, 37, device=DEVICE) for _ in weights]
    buffers = [b.clone() for b in before]  # in fp32, also where the weights are not
    function = partial(op.grouped_gated, kind="swiglu") if with_gate else op.grouped_gemm
    y = function(found["x"], weights, found["counts"], impl=impl, main_grads=lambda: buffers)
    wide = {n: t.detach().double().requires_grad_() for n, t in found.items() if n != "counts"}
    right = listing(gated if with_gate else reference.grouped_gemm)(counts=found["counts"], **wide)
    direction = torch.randn(y.shape, device=DEVICE).to(dtype)
    d_x, *_ = torch.autograd.grad(y, [found["x"], *weights], direction)
    right_x, *wanted = torch.autograd.grad(right, list(wide.values()), direction.double())
    parity.assert_near("values", y, right)
    parity.assert_near("gradient of x", d_x, right_x, 5 * parity.TOLERANCE[dtype])
    for buffer, start, gradient in zip(buffers, before, wanted, strict=True):
        parity.assert_near("buffer", buffer, start + gradient, 2 * parity.TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("total += tl.load(to, mask=inside", "total = tl.load(to, mask=inside"),
        (
            "TABLE=places.table is not None,\n            ALIGNED",
            "TABLE=False,\n            ALIGNED",
        ),
    ],
)
def test_grouped_gemm_weights_seeded_buffer_bug_is_found(old: str, new: str) -> None:
    weights = [torch.ones(8, 16, requires_grad=True) for _ in range(3)]
    block = torch.ones(1024)
    buffers = [block[at : at + 128].view(8, 16) for at in (512, 0, 256)]
    x = torch.ones(6, 16)
    counts = torch.tensor([3, 1, 2])

    def add() -> None:
        block.fill_(1.0)
        y = op.grouped_gemm(x, weights, counts, impl="triton", main_grads=lambda: buffers)
        torch.autograd.grad(y.sum(), weights)
        assert [b.unique().tolist() for b in buffers] == [[4.0], [2.0], [3.0]]
        assert block.sum() == 1024 + 128 * 6

    add()
    with parity.caught(KERNELS, old, new):
        add()


def test_grouped_gemm_weights_strided_buffer_is_refused() -> None:
    weights = [torch.ones(8, 16, requires_grad=True)]
    buffer = torch.ones(16, 8).t()
    y = op.grouped_gemm(
        torch.ones(2, 16), weights, torch.tensor([2]), impl="triton", main_grads=lambda: [buffer]
    )
    with pytest.raises(ValueError, match="dense"):
        torch.autograd.grad(y.sum(), weights)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_grouped_gemm_weights_buffers_skip_frozen(impl: str) -> None:
    x = torch.ones(3, 16, requires_grad=True)
    counts = torch.tensor([2, 1])
    weights = [torch.ones(8, 16, requires_grad=True) for _ in range(2)]
    buffers: list[torch.Tensor] = []

    def backward() -> None:
        op.grouped_gemm(x, weights, counts, impl=impl, main_grads=lambda: buffers).sum().backward()

    for shapes in ([(8, 16)], [(8, 16), (16, 8)], [(8, 16)] * 3):
        buffers[:] = [torch.zeros(shape) for shape in shapes]
        with pytest.raises(ValueError, match=r"gradients of 2 weights \(8, 16\)"):
            backward()
    buffers[:] = [torch.zeros(8, 16) for _ in range(2)]
    backward()
    assert [float(b.sum()) for b in buffers] == [2.0 * 128, 128.0]
    for weight in weights:
        weight.requires_grad_(False)
    backward()
    assert [float(b.sum()) for b in buffers] == [2.0 * 128, 128.0]


def test_grouped_gemm_weights_frozen_costs_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    kernels = importlib.import_module(KERNELS)

    def noted(name: str) -> Callable[..., Any]:
        original = getattr(kernels, name)
        return lambda *a, **k: made.append(name) or original(*a, **k)  # type: ignore[func-returns-value]

    for name in ("rows_product", "weights_product"):
        monkeypatch.setattr(kernels, name, noted(name))
    found = inputs([3, 2], (8, 16))
    op.grouped_gemm(
        found["x"], found["weight"].detach(), found["counts"], impl="triton"
    ).sum().backward()
    assert made == ["rows_product", "rows_product"]
    made.clear()
    op.grouped_gemm(
        found["x"].detach(), found["weight"], found["counts"], impl="triton"
    ).sum().backward()
    assert made == ["rows_product", "weights_product"]


def test_grouped_gemm_weights_only_unassigned_rows_are_cleared() -> None:
    y = torch.full((700, 9), float("nan"), device=DEVICE)
    ends = torch.tensor([3, 3, 5], dtype=torch.int32, device=DEVICE)
    importlib.import_module("mtrain_kernels.grouped_gemm.clear_triton").clear_behind(y, ends)
    assert y[:5].isnan().all()
    assert y[5:].count_nonzero() == 0


def test_grouped_gemm_weights_unlike_list_is_refused() -> None:
    x = torch.ones(2, 4)
    counts = torch.tensor([1, 1])
    for weights in ([torch.ones(3, 4), torch.ones(2, 4)], [], [torch.ones(3, 4)] * 3):
        with pytest.raises(ValueError, match=r"alike|integers"):
            op.grouped_gemm(x, weights, counts)
    with pytest.raises(ValueError, match="none of swiglu"):
        op.grouped_gated(x, torch.ones(2, 6, 4), counts, "squared_relu")
    with pytest.raises(ValueError, match="one number for each row"):
        op.grouped_gated(x, torch.ones(2, 6, 4), counts, "swiglu", torch.ones(3))


@pytest.mark.parametrize("counts", COUNTS)
def test_grouped_gemm_weights_row_has_bias_of_its_group(counts: list[int]) -> None:
    bias = torch.randn(len(counts), 7, device=DEVICE).requires_grad_()
    found = {"bias": bias, "counts": torch.tensor(counts, device=DEVICE), "rows": sum(counts) + 3}
    parity.check(partial(op.rows_of, impl="triton"), partial(op.rows_of, impl="reference"), found)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_grouped_gemm_weights_buffers_follow_the_list(impl: str) -> None:
    found = inputs([2, 3], (16, 24), rest=0)
    with pytest.raises(ValueError, match="a list of weights"):
        op.grouped_gemm(**found, impl=impl, main_grads=list)
    with pytest.raises(ValueError, match="a list of weights"):
        op.grouped_gated(**found, kind="swiglu", impl=impl, main_grads=list)
