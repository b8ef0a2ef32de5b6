"""The activations' kernels against their definition: values, every gradient, strides, tails, seeded
bugs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")

from mtrain_kernels import parity
from mtrain_kernels.activation import op, reference
from mtrain_kernels.registry import Unavailable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = "mtrain_kernels.activation.triton"
SHAPES = [(2,), (1, 6), (5, 34), (2, 3, 64), (0, 8), (2, 0), (130, 66), (2, 10000)]


def inputs(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, weighted: bool = False
) -> dict[str, Any]:
    torch.manual_seed(0)
    found = {"x": (3 * torch.randn(shape, device=DEVICE)).to(dtype).requires_grad_()}
    if weighted:
        found["weight"] = torch.rand(shape[:-1], device=DEVICE).requires_grad_()
    return found


def compare(kind: str, found: dict[str, Any], **options: Any) -> None:
    options = {"kind": kind, "limit": 2.0, **options}
    parity.check(
        partial(op.activation, impl="triton", **options),
        partial(reference.activation, **options),
        found,
    )


@pytest.mark.sampled(5)
@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", reference.KINDS)
def test_activation_equals_definition_with_gradients(kind: str, dtype: torch.dtype) -> None:
    for i, shape in enumerate(SHAPES):
        compare(kind, inputs(shape, dtype, weighted=i % 2 == 0))
    compare(kind, inputs(SHAPES[-1], dtype, weighted=True))


def test_activation_definition_equals_papers() -> None:
    x = torch.randn(3, 10, dtype=torch.float64)
    gate, up = x.chunk(2, -1)
    below = gate.clamp(max=0.5)
    bounded = up.clamp(-0.5, 0.5)
    wanted = {
        "swiglu": gate / (1 + (-gate).exp()) * up,
        "geglu": gate * 0.5 * (1 + torch.erf(gate / 2**0.5)) * up,
        "geglu_tanh": F.gelu(gate, approximate="tanh") * up,
        "swiglu_clamped": (bounded + 1) * below / (1 + (-2 * below).exp()),
        "squared_relu": x.clamp(min=0) ** 2,
    }
    for kind in reference.KINDS:
        torch.testing.assert_close(
            reference.activation(x, kind, alpha=2.0, limit=0.5), wanted[kind]
        )
    weight = torch.rand(3, dtype=torch.float64)
    weighted = reference.activation(x, "swiglu", weight=weight)
    torch.testing.assert_close(weighted, wanted["swiglu"] * weight[:, None])


@pytest.mark.parametrize("kind", reference.KINDS)
def test_activation_strides_do_not_matter(kind: str) -> None:
    weights = parity.layouts(torch.rand(3, 4, device=DEVICE).requires_grad_())
    for (_, x), (_, weight) in zip(parity.layouts(inputs((3, 4, 40))["x"]), weights, strict=True):
        compare(kind, {"x": x, "weight": weight})


@pytest.mark.parametrize("kind", reference.KINDS)
def test_activation_huge_and_nan_are_treated_alike(kind: str) -> None:
    found = inputs((6, 40), weighted=True)
    # torch's gelu(inf) is inf or nan, by the place in a vector
    infinite = 1e18 if kind == "geglu" else float("inf")
    with torch.no_grad():
        found["x"][:, 3] = torch.tensor([float("nan"), infinite, -infinite, 1e18, -1e18, 100.0])
        found["x"][:, 30] = torch.tensor([float("nan"), infinite, -infinite, 1e18, -1e18, -100.0])
    compare(kind, found)


def test_activation_clamp_edge_has_torch_gradient() -> None:
    edge = torch.tensor(
        [[2.0, -2.0, 2.0, -2.0, 2.0, -2.0], [2.0, 1.0, 3.0, 2.0, -2.0, -3.0]], device=DEVICE
    )
    compare("swiglu_clamped", {"x": edge.requires_grad_()})


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        (
            "swiglu",
            "ceil_div(source.shape[0], rows), ceil_div",
            "source.shape[0] // rows, ceil_div",
        ),
        ("swiglu_clamped", "raw >= -limit", "raw >= -2 * limit"),
        ("swiglu", "ceil_div(width, columns))]", "width // columns)]"),
        ("swiglu", "ceil_div(source.shape[0], rows), stripes", "source.shape[0] // rows, stripes"),
        (
            "swiglu",
            "tl.where(inside, dy * value, 0.0)",
            "tl.where(row < rows, dy * value + 1.0, 0.0)",
        ),
        ("swiglu", "1 + x * (1 - share)", "1 - x * (1 - share)"),
        ("swiglu", "dup = dy * weight * value", "dup = dy * value"),
        ("swiglu", "dweight += tl.sum", "dweight = tl.sum"),
        ("swiglu", "value *= up", "value *= 1"),
        ("geglu", "share + x * 0.3989", "share + x * 0.4"),
        ("geglu_tanh", "0.134145", "0.044715"),
        ("squared_relu", "slope = 2 * positive", "slope = positive"),
        ("swiglu_clamped", "limit, -limit, u)) + 1", "limit, -limit, u))"),
        ("swiglu_clamped", "gate <= limit, dgate", "gate <= 2 * limit, dgate"),
    ],
)
def test_activation_seeded_bug_is_found(kind: str, old: str, new: str) -> None:
    with parity.caught(KERNELS, old, new):
        for shape in ((2, 2 * 5001), (130, 66)):
            compare(kind, inputs(shape, weighted=True))


@pytest.mark.full
def test_activation_passes_torch_registration() -> None:
    for kind, weighted in (("swiglu", True), ("squared_relu", False)):
        found = inputs((5, 18), weighted=weighted)
        arguments = (found["x"], found.get("weight"), kind, 1.0, 2.0)
        torch.library.opcheck(op._activation.op, arguments)
        backward = tuple(
            a.detach() if isinstance(a, Tensor) else a
            for a in (op._activation(*arguments), *arguments)
        )
        torch.library.opcheck(
            op._activation_backward.op, backward, test_utils=("test_schema", "test_faketensor")
        )


@pytest.mark.full
def test_activation_compiled_gradient_is_equal() -> None:
    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return op.activation(x, "geglu", weight=weight, impl="triton").square().sum()

    leaves = list(inputs((5, 18), weighted=True).values())
    plain = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.autograd.grad(
        torch.compile(loss, backend="aot_eager", fullgraph=True)(*leaves), leaves
    )
    torch.testing.assert_close(compiled, plain)


def test_activation_unfit_is_refused() -> None:
    x = torch.ones(3, 5)
    with pytest.raises(ValueError, match="choose one of swiglu, geglu"):
        op.activation(x, "swish")
    with pytest.raises(ValueError, match="two halves"):
        op.activation(x, "swiglu")
    with pytest.raises(ValueError, match="one number for each row"):
        op.activation(x, "squared_relu", weight=torch.ones(3, 1))
    with pytest.raises(ValueError, match=r"x must be floating point, not torch.int32"):
        op.activation(x.int(), "squared_relu")
    with pytest.raises(ValueError, match=r"weight must be floating point, not torch.int32"):
        op.activation(x, "squared_relu", weight=torch.ones(3, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"dy \(3, 4\) is no gradient of the swiglu of x \(3, 4\)"):
        op.activation_gradient(x[:, :4], x[:, :4], "swiglu")
    with pytest.raises(Unavailable, match="float64 is not fp32"):
        op.activation(x.double(), "squared_relu", impl="triton")
