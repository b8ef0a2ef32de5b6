"""Experts in FP8: Triton's operands to the bit and products near the definition, that near fp32,
seeded bugs.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from mtrain_kernels import parity
from mtrain_kernels.fp8_grouped import products, reference
from mtrain_kernels.fp8_grouped.op import grouped_fp8
from mtrain_kernels.fp8_linear.op import Recipe, fp8_linear, weights_leave, weights_stay

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PRODUCTS = "mtrain_kernels.fp8_grouped.triton"
QUANTIZE = "mtrain_kernels.fp8_grouped.quantize_triton"
RECIPES = [Recipe("tensorwise", backward="e5m2"), Recipe("blockwise")]
COUNTS = [[1], [130, 0, 1, 3]]


def inputs(
    counts: list[int],
    n: int = 130,
    k: int = 150,
    rest: int = 2,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.randn(sum(counts) + rest, k, device=DEVICE) * torch.logspace(1, -1, k, device=DEVICE)
    weight = torch.randn(len(counts), n, k, device=DEVICE) * torch.logspace(
        -1.5, 1, k, device=DEVICE
    )
    found = {"x": x.to(dtype).requires_grad_(), "weight": weight.to(dtype).requires_grad_()}
    return found | {"counts": torch.tensor(counts, device=DEVICE)}


def gated(counts: list[int], n: int = 40, k: int = 150) -> dict[str, Any]:
    found = inputs(counts, n, k)
    # codes would be 0 without a scale
    halves = torch.randn(found["x"].shape[0], 2 * k, device=DEVICE) * 2**-6
    return found | {
        "x": halves.bfloat16().requires_grad_(),
        "share": torch.rand(len(halves), device=DEVICE).requires_grad_(),
    }


def layer(impl: str, recipe: Recipe, swiglu: bool = False, **given: Any) -> Tensor:
    return grouped_fp8(**given, recipe=recipe, swiglu=impl if swiglu else None, impl=impl)


def operands(x: Tensor, counts: list[int], recipe: Recipe, impl: str, **more: Any) -> Any:
    ends = torch.tensor(counts, device=DEVICE).cumsum(0).int()
    return products.quantize_rows(
        x, ends, recipe.forward, recipe.kind == "tensorwise", impl, **more
    )


def assert_same_operands(x: Tensor, counts: list[int], recipe: Recipe, **options: Any) -> None:
    used = sum(-(-c // 128) for c in counts)
    held = sum(counts)
    with parity.poisoned():
        ours = operands(x, counts, recipe, "triton", **options)
    right = operands(x, counts, recipe, "reference", **options)
    cuts = (slice(held), slice(held) if recipe.kind == "blockwise" else slice(None))
    wide = (slice(None), slice(128 * used)), (slice(None), slice(used))
    cuts += wide if recipe.kind == "blockwise" else (wide[0], slice(None))
    for name, cut in zip(("data", "scale", "transposed", "transposed_scale"), cuts, strict=True):
        a = getattr(ours, name)
        b = getattr(right, name)
        assert a.shape == b.shape
        assert torch.equal(a[cut].float(), b[cut].float()), name


@pytest.mark.sampled
@pytest.mark.covering(1)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("counts", COUNTS)
def test_fp8_grouped_operands_equal_definition_bitwise(counts: list[int], recipe: Recipe) -> None:
    given = inputs(counts)
    for options in ({}, {"straight": False}, {"transposed": False}):
        assert_same_operands(given["x"], counts, recipe, **options)
    weights = [w.detach() for w in given["weight"]]
    with parity.poisoned():
        made = products.quantize_weights(weights, "e4m3", recipe.kind == "tensorwise", "triton")
    right = products.quantize_weights(weights, "e4m3", recipe.kind == "tensorwise", "reference")
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(made, right, strict=True))


@pytest.mark.sampled(9)
@pytest.mark.covering(1)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("counts", COUNTS)
def test_fp8_grouped_equals_definition_with_gradients(counts: list[int], recipe: Recipe) -> None:
    given = inputs(counts)
    parity.check(
        partial(layer, "triton", recipe), partial(layer, "reference", recipe), given, upcast=False
    )
    given = gated(counts)
    ours, right = (partial(layer, impl, recipe, True) for impl in ("triton", "reference"))
    # half a bit of a gate tips some codes
    parity.check(ours, right, given, upcast=False, tolerance=5e-2)


@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_grouped_errors_are_of_eight_bits(recipe: Recipe) -> None:
    given = inputs([70, 0, 9], 96, 256, 0, torch.float32)
    leaves = [given["x"], given["weight"]]
    step = torch.randn(79, 96, device=DEVICE)
    plain = torch.cat(
        [x @ w.T for x, w in zip(given["x"].split([70, 0, 9]), given["weight"], strict=True)]
    )
    ours = layer("reference", recipe, **given)
    pairs = [(ours, plain)]
    pairs += zip(
        torch.autograd.grad(ours, leaves, step),
        torch.autograd.grad(plain, leaves, step),
        strict=True,
    )
    errors = [float(((a - b).norm() / b.norm()).detach()) for a, b in pairs]
    assert all(0.005 < error < 0.09 for error in errors), errors  # see `test_fp8_linear`


def test_fp8_grouped_one_blockwise_group_equals_dense() -> None:
    given = inputs([150], rest=0)
    recipe = RECIPES[1]
    ours = layer("reference", recipe, **given)
    dense = fp8_linear(given["x"], given["weight"][0], recipe, impl="reference")
    leaves = [given["x"], given["weight"]]
    for a, b in zip(
        torch.autograd.grad(ours.sum(), leaves),
        torch.autograd.grad(dense.sum(), leaves),
        strict=True,
    ):
        assert torch.equal(a, b)
    assert torch.equal(ours, dense)


@pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=pytest.mark.full)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_grouped_recomputation_is_bitwise_without_operands(recipe: Recipe, impl: str) -> None:
    given = gated([130, 0, 1])
    leaves = [given[name] for name in ("x", "share", "weight")]
    kept = {}
    found = {}
    for again in (False, True):
        sizes: list[int] = []

        def note(t: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(t.numel() * t.element_size() if t.dtype == torch.float8_e4m3fn else 0)
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            y = layer(impl, recipe, True, again=again, **given)
        kept[again] = sum(sizes)
        found[again] = [y, *torch.autograd.grad(y.sum(), leaves)]
    assert all(torch.equal(a, b) for a, b in zip(found[False], found[True], strict=True))
    assert kept[False] - kept[True] == 150 * 128 * reference.blocks_of(given["x"].shape[0], 3)


@pytest.mark.sampled
@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_fp8_grouped_gradients_accumulate_weights_quantise_once(
    impl: str,
) -> None:
    given = inputs([3, 0, 5], 20, 36)
    recipe = RECIPES[0]
    whole = given.pop("weight").detach()
    weights = [w.clone().requires_grad_() for w in whole]
    (wanted,) = torch.autograd.grad(
        layer(impl, recipe, **given, weight=whole.requires_grad_()).float().sum(), whole
    )
    buffers = [torch.full((20, 36), 2.0, device=DEVICE) for _ in weights]
    with weights_stay():
        for _ in range(2):
            y = layer(impl, recipe, **given, weight=weights, main_grads=lambda: buffers)
            y.float().sum().backward()
            with torch.no_grad():  # which nobody notices before the step ends
                weights[0].zero_()
    found = torch.stack(buffers)
    torch.testing.assert_close(found, 2 + 2 * wanted.float(), rtol=1e-2, atol=1e-2)
    assert (found[1] == 2).all()


@pytest.mark.parametrize("recipe", RECIPES[:2])
def test_fp8_grouped_freed_weights_requantise_bitwise(recipe: Recipe) -> None:
    given = inputs([3, 0, 5], 20, 36)
    weight = given["weight"]
    found = {}
    for leaves, factor in ((False, 1), (True, 1), (True, 2)):
        before = weight.detach().clone()
        with weights_leave() if leaves else nullcontext():
            y = layer("reference", recipe, **given)
            weight.untyped_storage().copy_((factor * before).untyped_storage())
            found[leaves, factor] = torch.autograd.grad(y.float().sum(), [given["x"], weight])
        weight.untyped_storage().copy_(before.untyped_storage())
    right = found[False, 1]
    assert all(torch.equal(a, b) for a, b in zip(found[True, 1], right, strict=True))
    assert not torch.equal(found[True, 2][0], right[0])


@pytest.mark.full
def test_fp8_grouped_descriptors_equal_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    from mtrain_kernels.fp8_grouped import triton

    made: list[bool] = []
    described = triton.Tile.described

    def noted(*given: Any) -> Any:
        made.append(True)
        return described(*given)

    monkeypatch.setattr(triton, "capability", lambda device: 90)
    monkeypatch.setattr(triton.Tile, "described", staticmethod(noted))
    given = inputs([70, 0, 3], 80, 96, rest=1)
    for recipe in RECIPES:
        parity.check(
            partial(layer, "triton", recipe),
            partial(layer, "reference", recipe),
            given,
            upcast=False,
        )
    assert made


@pytest.mark.full
def test_fp8_grouped_nan_stays_in_row_and_group() -> None:
    found = inputs([3, 0, 4], 20, 36)
    with torch.no_grad():
        found["x"][1, 5] = float("nan")
        found["x"][8, 0] = float("nan")
    for impl, recipe in itertools.product(("triton", "reference"), RECIPES):
        y = layer(impl, recipe, **found)
        assert y.isnan().any(1).tolist() == [
            False,
            impl == "reference" or DEVICE == "cuda",
            *[False] * 7,
        ]
        # the interpreter's FP8 has no NaN
        gradient = torch.autograd.grad(y[3:7].sum(), found["weight"])[0]
        assert gradient[2].isfinite().all()
        assert gradient[1].count_nonzero() == 0


BUGS = [
    (
        PRODUCTS,
        "(g * tl.cdiv(n, K) + c // K) * blocks + block",
        "(g * tl.cdiv(n, K) + c // K) * blocks",
    ),
    (
        PRODUCTS,
        "x_scale_ptr + r.to(tl.int64) * blocks + block",
        "x_scale_ptr + r.to(tl.int64) * blocks",
    ),
    (PRODUCTS, "group == g - 1, upto", "group == g - 2, upto"),
    (PRODUCTS, "total += part", "total = part"),
    (PRODUCTS, "total += tl.load(to", "total = tl.load(to"),
    (PRODUCTS, "_clear(y_ptr, ends_ptr, rows, n, GROUPS, CLEARED)", "pass"),
    (
        PRODUCTS,
        "mask=(column < k)[None, :],\n",
        "mask=(column < k - 1)[None, :],\n",
    ),
    (QUANTIZE, "upto <= block", "upto < block"),
    (QUANTIZE, "share[:, None]", "share[:, None] * 0.5"),
    (
        QUANTIZE,
        "tl.atomic_max(amax_ptr + group, tl.max(greatest_finite(x, 1), 0), mask=group < GROUPS)",
        "pass",
    ),
    (QUANTIZE, "first + dealt(SIDE, RUN)", "first + tl.arange(0, SIDE)"),
    (QUANTIZE, "tl.trans(in_order(q, SIDE, RUN))", "tl.trans(q)"),
    (QUANTIZE, "in_order(x, SIDE, RUN), True", "x, True"),
    (
        QUANTIZE,
        "column[:, None].to(tl.int64) * (blocks * SIDE)",
        "column[:, None].to(tl.int64) * blocks",
    ),
    (QUANTIZE, "(group * across + wide) * down + high", "(group * across + wide) * down"),
]


@pytest.mark.full
@pytest.mark.parametrize(("module", "old", "new"), BUGS)
def test_fp8_grouped_seeded_bug_is_found(module: str, old: str, new: str) -> None:
    with parity.caught(module, old, new):
        for recipe in RECIPES:
            if (
                "SIDE, RUN" in old
            ):  # rows in another order than the definition's, in both operands, cancel
                assert_same_operands(inputs([130, 0, 3])["x"], [130, 0, 3], recipe)
            given = gated([130, 0, 3], 130, 150)
            weights = [w.detach().requires_grad_() for w in given.pop("weight")]
            found = {}
            for impl in ("triton", "reference"):
                buffers = [torch.full((130, 150), 2**-10, device=DEVICE) for _ in weights]
                with parity.poisoned():
                    y = layer(
                        impl, recipe, True, **given, weight=weights, main_grads=lambda b=buffers: b
                    )
                    found[impl] = [
                        y,
                        *torch.autograd.grad(y.sum(), [given["x"], given["share"], *weights])[:2],
                    ]
                found[impl] += buffers
            for a, b in zip(found["triton"], found["reference"], strict=True):
                parity.assert_near("found", a, b.double(), 5e-2)


@pytest.mark.full
def test_fp8_grouped_passes_registration_and_refuses_unfit() -> None:
    given = inputs([3, 0, 2], 8, 16)
    ends = given["counts"].cumsum(0).int()
    x = given["x"].detach()
    weights = [w.detach() for w in given["weight"]]
    checks = ("test_schema", "test_faketensor")
    for impl in ("triton", "reference"):
        arguments = (x, None, ends, None, "e4m3", True, True, True, False, impl)
        torch.library.opcheck(products._rows.op, arguments, test_utils=checks)
        torch.library.opcheck(
            products._weights.op, (weights, "e4m3", False, impl), test_utils=checks
        )
    for change, said in (
        ({"recipe": Recipe("mx")}, "no recipe"),
        ({"share": torch.ones(7)}, "swiglu names"),
        ({"swiglu": "reference", "share": torch.ones(3)}, "one number"),
        ({"x": x[:, 1:]}, "groups, n, k"),
        ({"x": x[:, 1:], "swiglu": "reference"}, "gate and up"),
        ({"main_grads": list}, "list of weights"),
    ):
        with pytest.raises(ValueError, match=said):
            grouped_fp8(**(given | {"recipe": RECIPES[0]} | change))
