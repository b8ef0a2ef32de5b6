"""The softmax of scores against torch's own, and its kernels against the definition."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from mtrain_kernels import parity
from mtrain_kernels.registry import Unavailable
from mtrain_kernels.softmax import op, reference
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = "mtrain_kernels.softmax.triton"
SMALL_TILES = ("COLUMNS = 4096  # keys in a tile\nELEMENTS = 4096", "COLUMNS = 16\nELEMENTS = 512")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scale": 0.3},
    "causal": {"causal": True},
    "masked": {"mask": True, "scale": -2.0},
    "sink": {"sink": True},
    "all of it": {"causal": True, "mask": True, "sink": True, "scale": 0.7},
}


def inputs(
    way: str, shape: tuple[int, ...] = (2, 3, 5, 5), dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    torch.manual_seed(0)
    found = {"x": torch.randn(shape, device=DEVICE).to(dtype).requires_grad_()} | WAYS[way]
    if "mask" in found:
        found["mask"] = torch.rand(shape[0], 1, *shape[2:], device=DEVICE) < 0.6
    if "sink" in found:
        found["sink"] = torch.linspace(-2, 3, shape[1], device=DEVICE).to(dtype).requires_grad_()
    return found


def compare(found: dict[str, Any]) -> None:
    parity.check(partial(op.softmax, impl="triton"), reference.softmax, found)


def test_softmax_definition_equals_torch_with_sink() -> None:
    x = torch.randn(2, 3, 4, 6, dtype=torch.float64)
    sink = torch.randn(3, dtype=torch.float64)
    torch.testing.assert_close(reference.softmax(x, scale=0.5), (x * 0.5).softmax(-1))
    column = sink.view(1, 3, 1, 1).expand(2, 3, 4, 1)
    torch.testing.assert_close(
        reference.softmax(x, sink=sink), torch.cat([x, column], -1).softmax(-1)[..., :-1]
    )
    mask = torch.rand(2, 1, 4, 6) < 0.5
    mask[..., 0] = True
    lower = torch.tensor([[j <= i + 2 for j in range(6)] for i in range(4)])
    wanted = x.masked_fill(~(mask & lower), float("-inf")).softmax(-1)
    torch.testing.assert_close(reference.softmax(x, causal=True, mask=mask), wanted)


def test_softmax_definition_gradient_equals_differences() -> None:
    x = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, s: reference.softmax(x, scale=0.7, causal=True, sink=s), (x, sink)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_softmax_equals_definition_with_gradients(way: str, dtype: torch.dtype) -> None:
    compare(inputs(way, (2, 2, 37, 37), dtype))


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (0, 2, 3, 3), (1, 2, 0, 3), (1, 2, 3, 0), (1, 1, 2, 9001), (1, 2, 7, 3)]
)
@pytest.mark.parametrize("way", ["plain", "all of it"])
def test_softmax_any_size(way: str, shape: tuple[int, ...]) -> None:
    compare(inputs(way, shape))


@pytest.mark.full
def test_softmax_mask_strides_and_shapes_do_not_matter() -> None:
    found = inputs("all of it", (2, 3, 4, 6))
    for _, x in parity.layouts(found["x"]):
        compare(found | {"x": x})
    for mask in (
        torch.rand(6) < 0.5,
        torch.rand(2, 3, 4, 1) < 0.5,
        torch.rand(6, 4).T < 0.5,
        torch.rand(3, 1, 6) < 0.5,
    ):
        compare(found | {"mask": mask.to(DEVICE)})


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_softmax_blind_query_gets_zeros(impl: str) -> None:
    x = torch.randn(1, 1, 3, 4, device=DEVICE)
    x[0, 0, 2] = float("-inf")
    mask = torch.tensor([[True], [False], [True]], device=DEVICE)
    x.requires_grad_()
    y = op.softmax(x, mask=mask, impl=impl)
    assert y[0, 0, 1:].count_nonzero() == 0
    torch.testing.assert_close(y[0, 0, 0].sum(), torch.ones((), device=DEVICE))
    assert torch.autograd.grad(y.square().sum(), x)[0].isfinite().all()


def test_softmax_nan_and_huge_stay_in_row() -> None:
    found = inputs("sink", (1, 2, 6, 5))
    with torch.no_grad():
        found["x"][0, 0, 1, 3] = float("nan")
        found["x"][0, 0, 2, 0] = float("inf")
        found["x"][0, 1, 3, 1] = float("-inf")
        found["x"][0, 1, 4] = 1e30
        found["x"][0, 1, 5] = -1e30
    parity.check(partial(op.softmax, impl="triton"), reference.softmax, found, upcast=False)
    compare(
        inputs("sink")
        | {"sink": torch.tensor([1e4, -1e4, float("-inf")], device=DEVICE).requires_grad_()}
    )


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("zeros_like(query) + t - 1", "zeros_like(query) + t + 1"),
        ("query + (t - s)", "query"),
        ("mask=inside, other=0) != 0", "mask=inside, other=0) >= 0"),
        ("total = total * exp2((top - safe) * LOG2E) +", "total = total +"),
        ('total = tl.where(top == -float("inf"), 0.0, 1.0)', "total = tl.zeros([S], tl.float32)"),
        (".to(tl.float32) * scale\n        z = tl.where", ".to(tl.float32)\n        z = tl.where"),
        (
            "tl.zeros([S, T], tl.float32)\n        if start < edge:\n            inside",
            "tl.full([S, T], 1e-2, tl.float32)\n        if start < edge:\n            inside",
        ),
        ("inner += tl.sum", "inner = tl.sum"),
        ("-sink * inner", "sink * inner"),
        ("scale * p * (d_y", "p * (d_y"),
        ("d_y - inner[:, None]", "d_y"),
        ("base = (head // heads)", "base = (head % heads)"),
        ("_edge(block, s, t, S, CAUSAL)", "_edge(block, s, t, 1, CAUSAL)"),
    ],
)
def test_softmax_seeded_bug_is_found(old: str, new: str) -> None:
    with parity.mutated(KERNELS, *SMALL_TILES), parity.caught(KERNELS, old, new):
        compare(inputs("all of it", (2, 1, 37, 69)))
        compare(inputs("plain", (1, 1, 9, 13)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", WAYS)
def test_softmax_rows_may_exceed_a_tile(way: str) -> None:
    with parity.mutated(KERNELS, *SMALL_TILES):
        compare(inputs(way, (1, 2, 37, 69)))
        compare(inputs(way, (1, 1, 37, 21)))


def test_softmax_passes_torch_registration() -> None:
    found = inputs("all of it")
    torch.library.opcheck(op._softmax, (found["x"], found["mask"], found["sink"], 0.5, True))


def test_softmax_compiled_gradient_is_equal() -> None:
    def loss(x: Tensor, sink: Tensor) -> Tensor:
        return op.softmax(x, sink=sink, causal=True, impl="triton").square().sum()

    found = inputs("sink")
    leaves = [found["x"], found["sink"]]
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        torch.autograd.grad(compiled(*leaves), leaves), torch.autograd.grad(loss(*leaves), leaves)
    )


def test_softmax_unfit_is_refused() -> None:
    x = torch.zeros(2, 3, 4, 5)
    for arguments, said in (
        ({"x": x[0]}, "floating"),
        ({"x": x, "mask": torch.ones(4, 4, dtype=torch.bool)}, "broadcast"),
        ({"x": x, "mask": torch.ones(4, 5)}, "boolean"),
        ({"x": x, "sink": torch.zeros(4)}, "one logit for each head"),
    ):
        with pytest.raises(ValueError, match=said):
            op.softmax(**arguments)
    with pytest.raises(Unavailable, match="float64"):
        op.softmax(x.double(), impl="triton")
