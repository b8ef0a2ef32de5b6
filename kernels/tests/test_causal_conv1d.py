"""The causal convolution against sums written out, and its kernels against the definition."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from mtrain_kernels import parity
from mtrain_kernels.causal_conv1d import op, reference
from mtrain_kernels.registry import Unavailable
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = "mtrain_kernels.causal_conv1d.triton"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def inputs(
    sizes: tuple[int, ...] = (2, 3, 21, 4),
    dtype: torch.dtype = torch.float32,
    bias: bool = True,
    packed: bool = True,
) -> dict[str, Any]:
    torch.manual_seed(0)
    b, d, t, w = sizes
    found: dict[str, Any] = {
        name: torch.randn(shape, device=DEVICE).to(dtype).requires_grad_()
        for name, shape in {"x": (b, d, t), "weight": (d, w), "bias": (d,)}.items()
    }
    if not bias:
        found["bias"] = None
    if packed:
        found["segments"] = (torch.rand(b, t, device=DEVICE) < 0.2).int().cumsum(1)
    return found


def compare(found: dict[str, Any]) -> None:
    parity.check(partial(op.causal_conv1d, impl="triton"), reference.causal_conv1d, found)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_causal_conv1d_definition_equals_sum(activation: str, packed: bool) -> None:
    found = inputs((2, 3, 9, 4), packed=packed) | {"activation": activation}
    x, weight, bias = (found[n].detach().double() for n in ("x", "weight", "bias"))
    wanted = torch.zeros_like(x)
    for n in range(2):
        for t in range(9):
            earlier = [
                u
                for u in range(max(t - 3, 0), t + 1)
                if not packed or found["segments"][n, u] == found["segments"][n, t]
            ]
            wanted[n, :, t] = bias + sum(weight[:, 3 - (t - u)] * x[n, :, u] for u in earlier)
    if activation == "silu":
        wanted = wanted / (1 + (-wanted).exp())
    torch.testing.assert_close(
        reference.causal_conv1d(**found).double(), wanted, rtol=1e-5, atol=1e-5
    )


def test_causal_conv1d_packed_equal_separate() -> None:
    found = inputs((1, 3, 10, 4), packed=False)
    parts = [
        reference.causal_conv1d(**found | {"x": part}) for part in found["x"].split([4, 1, 5], -1)
    ]
    marks = torch.tensor([[7] * 4 + [3] + [9] * 5], device=DEVICE)
    torch.testing.assert_close(
        reference.causal_conv1d(**found, segments=marks), torch.cat(parts, -1)
    )


def test_causal_conv1d_definition_gradient_equals_differences() -> None:
    found = inputs((1, 2, 5, 3))
    leaves = tuple(found[n].detach().double().requires_grad_() for n in ("x", "weight", "bias"))
    function = partial(reference.causal_conv1d, segments=found["segments"])
    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_causal_conv1d_equals_definition_with_gradients(
    activation: str, packed: bool, bias: bool, dtype: torch.dtype
) -> None:
    compare(inputs(dtype=dtype, bias=bias, packed=packed) | {"activation": activation})


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1), (1, 2, 2, 4), (0, 2, 5, 4), (2, 0, 5, 4), (2, 3, 0, 4), (1, 9, 1030, 2)]
)
def test_causal_conv1d_any_size(sizes: tuple[int, ...]) -> None:
    compare(inputs(sizes))


def test_causal_conv1d_strides_do_not_matter() -> None:
    found = inputs()
    layouts = {n: dict(parity.layouts(found[n])) for n in ("x", "weight", "bias")}
    for name in layouts["x"]:
        compare(found | {n: other[name] for n, other in layouts.items()})


def test_causal_conv1d_nan_stays_in_taps_and_segment() -> None:
    found = inputs()
    with torch.no_grad():
        found["x"][0, 1, 4] = float("nan")
        found["x"][1, 2, 9] = float("inf")
    compare(found)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(time >= 0) & (time < times)", "(time >= 8) & (time < times)"),
        ("(time >= 0) & (time < times)", "(time < times)"),
        ("bias += tl.load(bias_ptr + channel, mask=live, other=0.0).to(tl.float32)", "bias += 0.0"),
        ("WIDTH + (WIDTH - 1 - j), mask=live, other", "WIDTH + j, mask=live, other"),
        ("z = z * sigmoid(z)", "z = sigmoid(z)"),
        ("s * (1 + z * (1 - s))", "s"),
        ("value = x[at - j]", "value = x[at]"),
        ("tl.where(segments[at - j] == segments[at], value, 0.0)", "value"),
        ("tl.join(x[1], x[5]), tl.join(x[3], x[7])", "tl.join(x[1], x[3]), tl.join(x[5], x[7])"),
        ("to + WIDTH, tl.sum(share, 1)", "to + WIDTH, tl.max(share, 1)"),
        ("tl.where(first + e < times, d * _slope(z), 0.0)", "d * _slope(z) + 1e-2"),
        ("tl.where(segments[8 + e] == segments[8 + e + ahead], d, 0.0)", "d"),
        ("total += weights[ahead] * d", "total = weights[ahead] * d"),
        ("_tap(x, segments, 8 + e, j, SEG", "_tap(x, segments, 8 + e, 0, SEG"),
        ("partial.sum(0)", "partial[0]"),
        (
            "(batch * ceil_div(channels, d) * ceil_div(times, t),)",
            "(batch * ceil_div(channels, d) * (times // t),)",
        ),
    ],
)
def test_causal_conv1d_seeded_bug_is_found(old: str, new: str) -> None:
    with parity.caught(KERNELS, old, new):
        compare(inputs())
        compare(inputs(packed=False))


@pytest.mark.full
def test_causal_conv1d_passes_torch_registration() -> None:
    found = inputs(bias=False)
    torch.library.opcheck(op._conv.op, (found["x"], found["weight"], None, found["segments"], True))


@pytest.mark.full
def test_causal_conv1d_compiled_gradient_is_equal() -> None:
    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return op.causal_conv1d(x, weight, bias, impl="triton").square().sum()

    found = inputs(packed=False)
    leaves = [found["x"], found["weight"], found["bias"]]
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        torch.autograd.grad(compiled(*leaves), leaves), torch.autograd.grad(loss(*leaves), leaves)
    )


def test_causal_conv1d_unfit_is_refused() -> None:
    found = inputs()
    for change, said in (
        ({"x": found["x"][0]}, "floating"),
        ({"weight": found["weight"][1:]}, "one row for each channel"),
        ({"bias": found["bias"][1:]}, "one for each channel"),
        ({"activation": "relu"}, "none of none, silu"),
        ({"segments": found["segments"][:, 1:]}, "integers"),
    ):
        with pytest.raises(ValueError, match=said):
            op.causal_conv1d(**found | change)
    with pytest.raises(Unavailable, match="width of 9"):
        op.causal_conv1d(found["x"], torch.zeros(3, 9, device=DEVICE), impl="triton")
