"""FP8 products and linear layers: Triton's against the definition, the definition against fp64,
seeded bugs.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from mtrain_kernels import parity
from mtrain_kernels.fp8_linear import cublas, op, reference
from mtrain_kernels.fp8_linear.op import Recipe, Shares, fp8_linear
from mtrain_kernels.quantize.op import quantize_blocks, quantize_tensorwise
from mtrain_kernels.registry import Unavailable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = "mtrain_kernels.fp8_linear.triton"
RECIPES = [Recipe("tensorwise", backward="e5m2"), Recipe("tensorwise"), Recipe("blockwise")]
SIZES = [(1, 1, 1), (3, 130, 257), (129, 48, 160), (200, 300, 384)]


def operands(m: int, n: int, k: int, kinds: tuple[str, str]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    found = {}
    for name, rows, kind in (("a", m, kinds[0]), ("b", n, kinds[1])):
        x = (
            torch.randn(rows, k, device=DEVICE)
            * torch.logspace(-2, 2, rows, device=DEVICE)[:, None]
        )
        q = quantize_tensorwise(x, impl="reference") if kind == "one" else None
        q = quantize_blocks(x, layout=kind, impl="reference") if q is None else q
        found |= {name: q.data, f"{name}_scale": q.scale}
    return found


@pytest.mark.sampled
@pytest.mark.parametrize(
    "kinds", [("one", "one"), ("1x128", "128x128"), ("1x128", "1x128"), ("128x128", "1x128")]
)
@pytest.mark.parametrize("sizes", SIZES)
def test_fp8_linear_products_equal_dequantised_operands(
    sizes: tuple[int, int, int], kinds: tuple[str, str]
) -> None:
    given = operands(*sizes, kinds)
    if sizes == (1, 1, 1) and kinds[0] != kinds[1]:
        return
    exact = reference.decoded(given["a"], given["a_scale"]).double()
    exact = exact @ reference.decoded(given["b"], given["b_scale"]).double().T
    for impl in ("reference", "triton"):
        with parity.poisoned():
            found = op.scaled_product(**given, dtype=torch.float32, impl=impl)
        parity.assert_near(impl, found, exact, 1e-5)


def layer(recipe: Recipe, impl: str, x: Tensor, weight: Tensor) -> Tensor:
    return fp8_linear(x, weight, recipe, impl=impl)


def inputs(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, m, k, device=DEVICE)
    weight = torch.randn(n, k, device=DEVICE)
    return {"x": x.to(dtype).requires_grad_(), "weight": weight.to(dtype).requires_grad_()}


@pytest.mark.sampled(9)
@pytest.mark.covering(1)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_linear_equals_definition_with_gradients(recipe: Recipe, dtype: torch.dtype) -> None:
    for m, n, k in SIZES[1:]:
        given = inputs(m, n, k, dtype)
        parity.check(
            partial(layer, recipe, "triton"),
            partial(layer, recipe, "reference"),
            given,
            upcast=False,
        )


@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_linear_errors_are_of_eight_bits(recipe: Recipe) -> None:
    given = inputs(64, 96, 256, torch.float32)
    step = torch.randn(2, 64, 96, device=DEVICE)
    leaves = list(given.values())
    ours = layer(recipe, "reference", **given)
    plain = given["x"] @ given["weight"].T
    pairs = [(ours, plain)]
    pairs += zip(
        torch.autograd.grad(ours, leaves, step),
        torch.autograd.grad(plain, leaves, step),
        strict=True,
    )
    errors = [float(((a - b).norm() / b.norm()).detach()) for a, b in pairs]
    # e4m3 rounds by at most 2^-4, e5m2 by 2^-3; of a sum of random signs the mean error remains
    assert all(0.005 < error < 0.09 for error in errors), errors


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "a_scale_ptr + rows // A_ROWS * a_blocks + block",
            "a_scale_ptr + rows // A_ROWS * a_blocks",
        ),
        ("columns // B_ROWS * b_blocks", "0 * columns // B_ROWS"),
        ("(at[None, :] < k)", "(at[None, :] < k - 1)"),
        ("total += part", "total = part"),
        ("inside // size * ACROSS", "0 * inside // size * ACROSS"),
    ],
)
def test_fp8_linear_seeded_bug_is_found(old: str, new: str) -> None:
    given = operands(200, 300, 384, ("1x128", "128x128"))
    wanted = op.scaled_product(**given, dtype=torch.float32, impl="reference")
    with parity.caught(KERNELS, old, new), parity.poisoned():
        parity.assert_near(
            "y", op.scaled_product(**given, dtype=torch.float32, impl="triton"), wanted
        )


def test_fp8_linear_equal_amax_parts_multiply_as_whole() -> None:
    recipe = RECIPES[0]
    given = inputs(8, 12, 32)
    x = given["x"].detach()
    weight = given["weight"].detach()
    whole = fp8_linear(x, weight, recipe, impl="reference")

    def parts(shares: Shares) -> Tensor:
        return torch.cat(
            [fp8_linear(x, w, recipe, shares=shares, impl="reference") for w in weight.chunk(2)], -1
        )

    amax = weight.float().abs().amax().view(1)
    assert torch.equal(parts(Shares(weight=lambda part: amax)), whole)
    assert not torch.equal(parts(Shares()), whole)


@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_linear_freed_weight_requantises_bitwise(recipe: Recipe) -> None:
    given = inputs(64, 96, 256)
    found = {}
    for leaves, faulty in ((False, False), (True, False), (True, True)):
        weight = given["weight"]
        held = list[int]()

        def pack(x: Tensor, weight: Tensor = weight, held: list[int] = held) -> Tensor:
            held += [x.numel()] * (x.data_ptr() != weight.data_ptr())
            return x

        with (
            op.weights_leave() if leaves else nullcontext(),
            torch.autograd.graph.saved_tensors_hooks(pack, _same),
        ):
            y = layer(recipe, "reference", **given)
            before = weight.detach().clone()
            size = weight.untyped_storage().nbytes()
            if leaves:
                weight.untyped_storage().resize_(0)
                weight.untyped_storage().resize_(size)
                weight.untyped_storage().copy_((2 * before if faulty else before).untyped_storage())
            got = torch.autograd.grad(y, list(given.values()), torch.ones_like(y))
        assert (weight.numel() in held) != leaves
        weight.untyped_storage().copy_(before.untyped_storage())
        found[leaves, faulty] = got
    right = found[False, False]
    assert all(torch.equal(a, b) for a, b in zip(found[True, False], right, strict=True))
    assert not torch.equal(found[True, True][0], right[0])


def _same(x: Tensor) -> Tensor:
    return x


def test_fp8_linear_gradient_goes_to_its_fp32_buffer() -> None:
    into = torch.zeros(12, 32)

    def keep(weight: Tensor, add: op.AddProduct) -> Tensor:
        add(into)
        return torch.zeros_like(weight)

    given = inputs(8, 12, 32)
    plain = fp8_linear(**given, recipe=RECIPES[2], impl="reference").sum()
    (wanted,) = torch.autograd.grad(plain, given["weight"])
    fp8_linear(**given, recipe=RECIPES[2], gradient=keep, impl="reference").sum().backward()
    assert torch.equal(into.bfloat16(), wanted)
    assert not given["weight"].grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kinds", [("one", "one"), ("1x128", "1x128")])
def test_fp8_linear_added_product_equals_separate_sum(
    kinds: tuple[str, str], dtype: torch.dtype
) -> None:
    given = operands(130, 70, 200, kinds)
    # A buffer between others: rows that are not contiguous, and neighbours that stay.
    whole = torch.randn(130, 80).to(dtype)
    for impl in ("triton", "reference"):
        product = op.scaled_product(**given, dtype=torch.float32, impl=impl)
        wanted = whole.clone()
        wanted[:, :70] += product
        into = whole.clone()
        op.add_scaled_product(into[:, :70], **given, impl=impl)
        assert torch.equal(into, wanted), impl
    with parity.caught(KERNELS, "if ADD:", "if ADD and m > 200:"):
        into = whole.clone()
        op.add_scaled_product(into[:, :70], **given, impl="triton")
        assert torch.equal(into, wanted)


def test_fp8_linear_cublas_limits_are_refused_or_rerouted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[str] = []
    monkeypatch.setattr(op, "pick", lambda name, impl, *_: "torch")
    monkeypatch.setattr(op, "_product", lambda *given: taken.append(given[-1]))
    monkeypatch.setattr(cublas, "refuses_blocks", lambda device: None)
    plain = operands(16, 32, 48, ("one", "one"))
    blocks = operands(16, 32, 48, ("1x128", "1x128"))
    both = plain | {name: plain[name].to(torch.float8_e5m2) for name in "ab"}
    for given, said in (
        (operands(3, 32, 48, ("1x128", "1x128")), "by 4"),
        (operands(256, 256, 256, ("128x128", "128x128")), "no scales for 128 and 128"),
        (operands(3, 32, 47, ("one", "one")), "by 16"),
        (operands(3, 31, 48, ("one", "one")), "by 16"),
        (both, "e5m2"),
    ):
        with pytest.raises(Unavailable, match=said):
            op.scaled_product(**given, impl="torch")
        op.scaled_product(**given)
        with monkeypatch.context() as without:
            without.setattr("mtrain_kernels.runtime.HAS_TRITON", False)
            op.scaled_product(**given)
    assert taken == ["triton", "reference"] * 5
    op.scaled_product(**plain, impl="torch")
    op.scaled_product(**plain | {"b": both["b"]})
    op.scaled_product(**blocks, impl="torch")
    assert taken[10:] == ["torch"] * 3
    monkeypatch.setattr(cublas, "refuses_blocks", lambda device: "sm_90 only")
    with pytest.raises(Unavailable, match="sm_90 only"):
        op.scaled_product(**blocks, impl="torch")


@pytest.mark.parametrize(("rows", "columns"), [(1, 3), (128, 5), (128, 8)])
def test_fp8_linear_scales_lie_as_cublas_reads(rows: int, columns: int) -> None:
    scale = torch.rand(6, columns)
    found = cublas.as_read(scale, rows)
    if rows == 1:
        assert torch.equal(found, scale)
        assert found.stride() == (1, 6)
    else:
        padded = 8
        assert torch.equal(found[:columns], scale.t())
        assert (found.shape, found.stride()) == ((padded, 6), (1, padded))


def test_fp8_linear_passes_registration_and_refuses_unfit() -> None:
    given: dict[str, Any] = operands(5, 6, 130, ("1x128", "128x128"))
    arguments = (*given.values(), torch.bfloat16, "triton")
    # others multiply what FP8 has not
    torch.library.opcheck(op._product.op, arguments, test_utils="test_faketensor")
    with pytest.raises(ValueError, match="must be"):
        op.scaled_product(given["a"], given["a_scale"], given["b"][:, :9], given["b_scale"])
    with pytest.raises(ValueError, match="belongs to no blocks"):
        op.scaled_product(given["a"], given["a_scale"][:2], given["b"], given["b_scale"])
    with pytest.raises(ValueError, match="a must be e4m3 or e5m2"):
        op.scaled_product(given["a"].float(), given["a_scale"], given["b"], given["b_scale"])
    with pytest.raises(ValueError, match=r"b must be .*float64"):
        op.scaled_product(given["a"], given["a_scale"], given["b"], given["b_scale"].double())
    with pytest.raises(ValueError, match=r"torch.int8 must be floating"):
        op.scaled_product(**given, dtype=torch.int8)
    with pytest.raises(ValueError, match="must be floating point"):
        op.add_scaled_product(torch.zeros(3, 5), **given)
    with pytest.raises(ValueError, match="unit strides"):
        op.add_scaled_product(torch.zeros(6, 5).t(), **given)
    with pytest.raises(ValueError, match=r"x \(2, 3\) and weight \(4, 5\)"):
        fp8_linear(torch.ones(2, 3), torch.ones(4, 5), Recipe("blockwise"))
    with pytest.raises(ValueError, match="no recipe"):
        fp8_linear(torch.ones(2, 3), torch.ones(4, 3), Recipe("mx"))
    if DEVICE == "cpu":
        with pytest.raises(Unavailable, match="NVIDIA"):
            op.scaled_product(*given.values(), impl="torch")
