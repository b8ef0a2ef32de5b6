"""The rotary embedding's kernels against their definition: values, gradients, layouts, tails,
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
from mtrain_kernels.registry import Unavailable
from mtrain_kernels.rope import cpu, op, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = "mtrain_kernels.rope.triton"
# tokens and heads of x, width of a head, width that turns
SHAPES = [
    ((1, 1), 2, 2),
    ((7, 3), 10, 6),
    ((2, 5, 4), 16, 16),
    ((0, 4), 8, 8),
    ((3, 33, 5), 24, 8),
    ((2, 2), 5, 0),
]


def tables(length: int, turning: int) -> dict[str, Tensor]:
    angles = torch.outer(
        torch.arange(length), 100.0 ** (-torch.arange(turning // 2) * 2 / max(turning, 1))
    )
    return {"cos": angles.cos().to(DEVICE), "sin": angles.sin().to(DEVICE)}


def inputs(
    shape: tuple[int, ...],
    width: int,
    turning: int,
    dtype: torch.dtype = torch.float32,
    norm: bool = False,
) -> dict[str, Any]:
    torch.manual_seed(0)
    found = {
        "x": torch.randn((*shape, width), device=DEVICE).to(dtype).requires_grad_(),
        **tables(50, turning),
    }
    if norm:
        found["weight"] = torch.randn(width, device=DEVICE).to(dtype).requires_grad_()
    return found


def compare(found: dict[str, Any], **options: Any) -> None:
    options["eps"] = 0.1
    parity.check(
        partial(op.rotate, impl="triton", **options), partial(reference.rotate, **options), found
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_equals_definition_with_gradients(
    interleaved: bool, norm: bool, dtype: torch.dtype
) -> None:
    for i, (shape, width, turning) in enumerate(SHAPES):
        found = inputs(shape, width, turning, dtype, norm)
        if i % 2:
            found["positions"] = torch.randint(0, 50, shape[:-1], device=DEVICE)
        compare(found, interleaved=interleaved, zero_centered=i % 3 == 0)


def test_rope_definition_is_complex_rotation() -> None:
    found = inputs((5, 2), 8, 6)
    turn = torch.complex(found["cos"], found["sin"])[:5, None]
    x = found["x"].detach()
    halves = torch.complex(x[..., :3].contiguous(), x[..., 3:6].contiguous()) * turn
    wanted = torch.cat((halves.real, halves.imag, x[..., 6:]), dim=-1)
    torch.testing.assert_close(reference.rotate(**found), wanted)
    pairs = torch.view_as_complex(x[..., :6].unflatten(-1, (3, 2)).contiguous()) * turn
    wanted = torch.cat((torch.view_as_real(pairs).flatten(-2), x[..., 6:]), dim=-1)
    torch.testing.assert_close(reference.rotate(**found, interleaved=True), wanted)


def test_rope_queries_and_keys_rotate_alike() -> None:
    found = inputs((9, 4), 16, 8)
    q = found["x"]
    k = torch.randn(9, 2, 16, device=DEVICE)
    weights = {"q_weight": torch.rand(16, device=DEVICE), "k_weight": torch.rand(16, device=DEVICE)}
    turned = [
        f(q, k, found["cos"], found["sin"], **weights)
        for f in (partial(op.rope, impl="triton"), reference.rope)
    ]
    torch.testing.assert_close(*turned)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_strides_do_not_matter(interleaved: bool, norm: bool) -> None:
    for _, x in parity.layouts(inputs((2, 5, 3), 10, 6)["x"]):
        compare({**inputs((2, 5, 3), 10, 6, norm=norm), "x": x}, interleaved=interleaved)


def test_rope_sequence_first_keeps_layout() -> None:
    x = torch.randn(6, 2, 3, 8, device=DEVICE).transpose(0, 1)
    assert op.rotate(x, **tables(6, 8), impl="triton").stride() == x.stride()


def test_rope_one_position_row_serves_batch() -> None:
    found = inputs((3, 5, 2), 8, 8) | {
        "positions": torch.tensor([4, 0, 49, 7, 7], dtype=torch.int32, device=DEVICE)
    }
    compare(found)


@pytest.mark.full
def test_rope_many_tokens_take_several_tiles() -> None:
    compare(inputs((50, 3), 130, 66, norm=True))
    compare(inputs((2, 90), 64, 64, norm=True))


def test_rope_nan_stays_in_its_head() -> None:
    for norm in (False, True):
        found = inputs((6, 3), 12, 8, norm=norm)
        with torch.no_grad():
            found["x"][1, 1, 3] = float("nan")
            found["x"][4, 0, 0] = float("inf")
            found["x"][5, 2, 11] = float("nan")
        compare(found)


def test_rope_position_beyond_table_gives_nan() -> None:
    found = inputs((3, 2), 6, 4) | {"positions": torch.tensor([1, 50, -1], device=DEVICE)}
    y = op.rotate(**found, impl="triton")
    assert y[0].isfinite().all()
    assert y[1:, :, :4].isnan().all()
    assert y[1:, :, 4:].isfinite().all()


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("old", "new", "norm"),
    [
        ("a * cos - b * sin, b * cos + a * sin", "a * cos + b * sin, b * cos + a * sin", False),
        ("sin = -sin", "sin = sin", False),
        ("batch * x_batch + token", "0 * x_batch + token", False),
        ("forward_kernel[grid]", "forward_kernel[(grid[0], max(1, grid[1] - 1), grid[2])]", False),
        (
            "mask=live & (column < width), other=0.0",
            "mask=live & (column < width), other=1.0",
            True,
        ),
        ("cast(rest, y_ptr", "cast(0 * rest, y_ptr", False),
        ("squares / width", "squares / (width + 9)", True),
        ("rstd * (da - a * along)", "rstd * da", True),
        ("sum_a += da * a", "sum_a = da * a", True),
        ("sum_rest += drest * rest", "sum_rest -= drest * rest", True),
        ("yb * cos - ya * sin", "yb * cos + ya * sin", True),
        ("w + 1.0", "w", True),
    ],
)
def test_rope_seeded_bug_is_found(old: str, new: str, norm: bool) -> None:
    with parity.caught(KERNELS, old, new):
        for shape in ((1, 2, 70), (2, 40, 3)):
            compare(inputs(shape, 70, 60, norm=norm), zero_centered=True)


@pytest.mark.full
def test_rope_passes_torch_registration() -> None:
    found = inputs((2, 5, 3), 10, 6, norm=True)
    for weight, positions in (
        (None, None),
        (found["weight"], torch.arange(10, device=DEVICE).view(2, 5)),
    ):
        arguments = (
            found["x"],
            weight,
            found["cos"],
            found["sin"],
            positions,
            False,
            1e-6,
            False,
            False,
        )
        torch.library.opcheck(op._rope.op, arguments)
    x, weight, *rest = arguments[:-1]
    backward = (x.detach(), x.detach(), weight.detach(), *rest)
    torch.library.opcheck(
        op._rope_norm_backward.op, backward, test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.full
def test_rope_compiled_gradient_is_equal() -> None:
    found = inputs((5, 3), 10, 6, norm=True)

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return (
            op.rotate(x, found["cos"], found["sin"], weight=weight, impl="triton")
            .square()
            .mul(weight)
            .sum()
        )

    leaves = [found["x"], found["weight"]]
    plain = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.autograd.grad(
        torch.compile(loss, backend="aot_eager", fullgraph=True)(*leaves), leaves
    )
    torch.testing.assert_close(compiled, plain)


def meta(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.to("meta") for name, t in found.items()}


def test_rope_unfit_is_refused() -> None:
    x = torch.ones(4, 2, 8)
    short = tables(3, 8)
    with pytest.raises(ValueError, match="end at position 3"):
        op.rotate(x, **short)
    with pytest.raises(ValueError, match="no tables"):
        op.rotate(x, **tables(9, 10))
    with pytest.raises(ValueError, match="do not number the tokens"):
        op.rotate(x, **short, positions=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="not int32 or int64"):
        op.rotate(x, **short, positions=torch.zeros(4))
    with pytest.raises(ValueError, match="last axis"):
        op.rotate(x, **tables(4, 8), weight=torch.ones(4))
    with pytest.raises(ValueError, match="get no gradient"):
        op.rotate(x, torch.ones(4, 4, requires_grad=True), torch.ones(4, 4))
    with pytest.raises((IndexError, RuntimeError), match="index"):
        op.rotate(x, **short, positions=torch.tensor([0, -1, 1, 2]), impl="reference")
    with pytest.raises(Unavailable, match="larger than 65535"):
        op.rotate(torch.empty(1 << 16, 1, 1, 8, device="meta"), **meta(tables(1, 8)), impl="triton")
    with pytest.raises(Unavailable, match="wider than"):
        op.rotate(torch.ones(1, 1, 2000), **tables(1, 8), impl="triton")


def on_cpu(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().cpu().requires_grad_(t.requires_grad) for name, t in found.items()}


def test_rope_cpu_form_equals_definition() -> None:
    for shape, width in (((1, 1), 2), ((7, 3), 10), ((2, 5, 4), 16), ((0, 4), 8)):
        found = on_cpu(inputs(shape, width, width))
        assert cpu.fits(found["x"], found["cos"])
        parity.check(partial(op.rotate, impl="cpu"), reference.rotate, found)
        for _, x in parity.layouts(found["x"]):
            parity.check(partial(op.rotate, impl="cpu"), reference.rotate, found | {"x": x})
        made = op.rotate(**found, impl="reference").grad_fn
        assert type(made).__name__ != "_RotateBackward", "the reference is the definition"
    narrow = on_cpu(inputs((7, 3), 10, 6))
    assert not cpu.fits(narrow["x"], narrow["cos"])
    parity.check(partial(op.rotate, impl="cpu"), reference.rotate, narrow)
