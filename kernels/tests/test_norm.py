"""The norms' kernels against their definition: values, every gradient, strides, tails,
seeded bugs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from mtrain_kernels import parity
from mtrain_kernels.norm import cpu, op, reference
from mtrain_kernels.registry import Unavailable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = "mtrain_kernels.norm.triton"
FUNCTIONS = ["rms_norm", "rms_norm_residual", "layer_norm", "layer_norm_residual"]
SHAPES = [(1,), (7,), (3, 1), (2, 3, 64), (0, 8), (2, 0), (33, 300), (3, 9000)]


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype).requires_grad_()


def inputs(
    name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, bias: bool = True
) -> dict[str, Any]:
    torch.manual_seed(0)
    found: dict[str, Any] = {"x": leaf(*shape, dtype=dtype)}
    if "residual" in name:
        found["residual"] = leaf(*shape, dtype=dtype)
    found["weight"] = leaf(shape[-1], dtype=dtype)
    if "layer" in name:
        found["bias"] = leaf(shape[-1], dtype=dtype) if bias else None
    return found


def compare(name: str, found: dict[str, Any], zero_centered: bool = False) -> None:
    options = {"eps": 0.1, "zero_centered": zero_centered}
    kernel = partial(getattr(op, name), impl="triton", **options)
    parity.check(kernel, partial(getattr(reference, name), **options), found)


@pytest.mark.sampled(3)
@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_norm_equals_definition_with_gradients(name: str, dtype: torch.dtype) -> None:
    for i, shape in enumerate(SHAPES):
        compare(name, inputs(name, shape, dtype, bias=i % 2 == 0), zero_centered=i % 3 == 0)


def test_norm_weight_gradient_sums_over_tiles() -> None:
    compare("layer_norm_residual", inputs("layer_norm_residual", (3000, 17)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_norm_strides_do_not_matter(name: str) -> None:
    found = inputs(name, (3, 4, 40))
    others = [dict(parity.layouts(value)) for value in found.values()]
    for layout in others[0]:
        compare(name, {n: other[layout] for n, other in zip(found, others, strict=True)})


def test_norm_gradient_strides_do_not_matter() -> None:
    x = leaf(6, 5)
    weight = leaf(5)
    for impl in ("triton", "reference"):
        op.rms_norm(x, weight, 1e-5, impl=impl).T[::2].sum().backward()
    doubled = x.grad
    x.grad = None
    op.rms_norm(x, weight, 1e-5, impl="reference").T[::2].sum().backward()
    torch.testing.assert_close(doubled, 2 * x.grad)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_norm_nan_stays_in_its_row(name: str) -> None:
    found = inputs(name, (6, 40))
    with torch.no_grad():
        found["x"][1, 3] = float("nan")
        found["x"][4, 0] = float("inf")
    compare(name, found)


def test_norm_residual_keeps_its_dtype() -> None:
    found = inputs("rms_norm_residual", (5, 24), torch.bfloat16) | {"residual": leaf(5, 24)}
    compare("rms_norm_residual", found)
    normed, total = op.rms_norm_residual(**found, eps=1e-3, impl="triton")
    assert (normed.dtype, total.dtype) == (torch.bfloat16, torch.float32)


def test_norm_weight_may_be_wider() -> None:
    for name in FUNCTIONS:
        compare(name, inputs(name, (5, 24), torch.bfloat16) | {"weight": leaf(24)})


@pytest.mark.parametrize("name", ["rms_norm_residual", "layer_norm_residual"])
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_norm_half_residual_keeps_fp32_input(impl: str, name: str) -> None:
    found = inputs(name, (5, 24))
    found["residual"] = found["residual"].detach().bfloat16()
    total = (found["x"].detach() + found["residual"]).bfloat16().float()
    fitting = {n: t.detach() for n, t in found.items() if n in ("weight", "bias")}
    wanted = getattr(reference, name.removesuffix("_residual"))(total, **fitting, eps=0.1)
    normed, _ = getattr(op, name)(**found, eps=0.1, impl=impl)
    torch.testing.assert_close(normed, wanted)


def test_norm_residual_only_use_gets_gradient() -> None:
    found = inputs("rms_norm_residual", (5, 24))
    _, total = op.rms_norm_residual(**found, eps=1e-3, impl="triton")
    gradients = torch.autograd.grad(total.sum(), list(found.values()), allow_unused=True)
    assert all(torch.equal(g, torch.ones_like(g)) for g in gradients[:2])
    assert gradients[2] is None


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("mask=inside, other=0.0)", "mask=inside, other=1.0)"),
        ("/ width + eps", "/ COLUMNS + eps"),
        ("x = tl.where(inside, x - mean[:, None], 0.0)", "x = x - mean[:, None]"),
        ("y = x * rstd[:, None] * weight", "y = x * rstd[:, None]"),
        ("weight += 1.0", "weight += 0.0"),
        ("programs = ceil_div(rows, tile_rows) if", "programs = rows // tile_rows if"),
        ("dweight += dy * normed", "dweight = dy * normed"),
        ("dbias += dy", "dbias -= dy"),
        ("dx -= middle", "dx -= 0 * middle"),
        ("normed * along", "0 * normed * along"),
        ("dx *= rstd", "dx *= 1.0"),
        ("dx += tl.load(dtotal_ptr", "dx += 0 * tl.load(dtotal_ptr"),
        ("row + step, column", "row, column"),
    ],
)
def test_norm_seeded_bug_is_found(old: str, new: str) -> None:
    with parity.caught(KERNELS, old, new):
        compare(
            "layer_norm_residual", inputs("layer_norm_residual", (1100, 33)), zero_centered=True
        )


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("along += dy", "along = dy"),
        ("middle += dy", "middle = dy"),
        ("dweight[i] + dy", "dweight[0] + dy"),
        ("i * PIECE + piece\n        tl.store", "piece\n        tl.store"),
        ("dtype=torch.float32) if has_bias", "dtype=torch.float32) * 0 if has_bias"),
    ],
)
def test_norm_seeded_bug_in_wide_rows_is_found(old: str, new: str) -> None:
    with parity.mutated(KERNELS, "WIDE = 8192", "WIDE = 8"), parity.caught(KERNELS, old, new):
        compare("layer_norm_residual", inputs("layer_norm_residual", (5, 5000)), zero_centered=True)


@pytest.mark.parametrize("full", [False, True])
def test_norm_passes_torch_registration(full: bool) -> None:
    found = inputs("layer_norm_residual" if full else "rms_norm", (5, 17))
    arguments = (
        found["x"],
        found.get("residual"),
        found["weight"],
        found.get("bias"),
        1e-5,
        False,
        full,
    )
    torch.library.opcheck(op._norm.op, arguments)
    _, total, mean, rstd = (t.detach() for t in op._norm(*arguments))
    x, dtotal = (total, total) if full else (found["x"].detach(), None)
    backward = (x, dtotal, x, found["weight"].detach(), mean, rstd, full, False, full)
    torch.library.opcheck(
        op._norm_backward.op, backward, test_utils=("test_schema", "test_faketensor")
    )


def test_norm_compiled_gradient_is_equal() -> None:
    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return op.rms_norm(x, weight, 1e-5, impl="triton").square().sum()

    x = leaf(5, 17)
    weight = leaf(17)
    plain = torch.autograd.grad(loss(x, weight), [x, weight])
    compiled = torch.autograd.grad(
        torch.compile(loss, backend="aot_eager", fullgraph=True)(x, weight), [x, weight]
    )
    torch.testing.assert_close(compiled, plain)


def test_norm_meta_tensors_have_shapes() -> None:
    x = torch.empty(4, 6, device="meta", dtype=torch.bfloat16)
    weight = torch.empty(6, device="meta")
    normed, total = op.rms_norm_residual(x, x.float(), weight, 1e-5, impl="triton")
    assert (normed.shape, normed.dtype, total.dtype) == (x.shape, torch.bfloat16, torch.float32)


def test_norm_unfit_is_refused() -> None:
    with pytest.raises(ValueError, match="last axis"):
        op.rms_norm(leaf(2, 4), leaf(3), 1e-5)
    with pytest.raises(ValueError, match="one shape"):
        op.layer_norm(leaf(2, 4), leaf(4), leaf(3), 1e-5)
    with pytest.raises(ValueError, match="one shape"):
        op.rms_norm_residual(leaf(2, 4), leaf(4), leaf(4), 1e-5)
    with pytest.raises(ValueError, match=r"floating point, not torch.int64"):
        op.rms_norm(leaf(2, 4).detach().long(), leaf(4), 1e-5)
    with pytest.raises(Unavailable, match="float64 is not fp32"):
        op.rms_norm(leaf(2, 4).double(), leaf(4), 1e-5, impl="triton")
    with pytest.raises(Unavailable, match="wider than"):
        op.rms_norm(leaf(1, 40000), leaf(40000), 1e-5, impl="triton")
    assert op.rms_norm(leaf(1, 40000), leaf(40000), 1e-5).shape == (1, 40000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_norm_cpu_form_equals_definition(zero_centered: bool, dtype: torch.dtype) -> None:
    for shape in ((1, 1), (5, 24), (3, 2, 40), (0, 8)):
        found = {
            name: t.detach().cpu().requires_grad_()
            for name, t in inputs("rms_norm", shape, dtype).items()
        }
        assert cpu.obstacle(found["x"]) is None or not found["x"].shape[-1]
        options = {"eps": 0.1, "zero_centered": zero_centered}
        definition = partial(reference.rms_norm, **options)
        fast = partial(op.rms_norm, impl="cpu", **options)
        parity.check(fast, definition, found)
        for _, x in parity.layouts(found["x"]):
            parity.check(fast, definition, found | {"x": x})


def test_norm_named_implementation_runs_on_cpu() -> None:
    x = leaf(5, 24).detach().cpu().requires_grad_()
    weight = leaf(24).detach().cpu()
    made = {
        impl: type(op.rms_norm(x, weight, 1e-5, impl=impl).grad_fn).__name__
        for impl in ("cpu", "reference")
    }
    assert made["cpu"] == "_RMSNormBackward"
    assert made["reference"] != made["cpu"], "the reference is the definition and nothing else"
    with pytest.raises(Unavailable, match=r"cpu cannot run: torch\.float64 is not fp32"):
        op.rms_norm(x.double(), weight.double(), 1e-5, impl="cpu")


@pytest.mark.parametrize("width", [40, 8200])
def test_norm_fp32_bias_with_half_weight_is_unrounded(width: int) -> None:
    x = leaf(3, width)
    bias = leaf(width)
    dy = leaf(3, width).detach()
    weight = leaf(width).detach().bfloat16().requires_grad_()
    (found,) = torch.autograd.grad(op.layer_norm(x, weight, bias, 1e-5, impl="triton"), bias, dy)
    wanted = dy.sum(0)
    torch.testing.assert_close(found, wanted)
    assert not torch.equal(wanted, wanted.bfloat16().float()), "rounded, it would be another"


def test_norm_empty_rows_have_empty_gradients() -> None:
    for shape in ((0,), (3, 0)):
        x = leaf(*shape)
        weight = leaf(0)
        op.rms_norm(x, weight, 1e-5).sum().backward()
        assert x.grad is not None
        assert x.grad.shape == shape
