"""Packed queries, keys and values against their definition: both orders, groups, tails, strides,
seeded bugs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from mtrain_kernels import parity
from mtrain_kernels.rope import op, packed, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = "mtrain_kernels.rope.packed_triton"
# tokens, batch, heads, groups, width of a head, width that turns
SHAPES = [
    (1, 1, 1, 1, 2, 2),
    (7, 2, 6, 3, 10, 6),
    (33, 1, 8, 1, 16, 16),
    (5, 3, 5, 5, 24, 8),
    (70, 2, 9, 3, 12, 12),
]


def tables(length: int, turning: int) -> dict[str, torch.Tensor]:
    angles = torch.outer(torch.arange(length), 100.0 ** (-torch.arange(turning // 2) * 2 / turning))
    return {"cos": angles.cos().to(DEVICE), "sin": angles.sin().to(DEVICE)}


def inputs(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, norm: bool = True
) -> tuple[dict[str, Any], dict[str, int]]:
    tokens, batch, heads, groups, width, turning = shape
    torch.manual_seed(0)
    row = (heads + 2 * groups) * width
    found = {"qkv": torch.randn(tokens, batch, row, device=DEVICE).to(dtype).requires_grad_()}
    found |= tables(80, turning)
    for name in ("q_weight", "k_weight") if norm else ():
        found[name] = torch.randn(width, device=DEVICE).to(dtype).requires_grad_()
    return found, {"heads": heads, "groups": groups}


def compare(found: dict[str, Any], **options: Any) -> None:
    options["eps"] = 0.1
    ours = partial(packed.rotate_packed, impl="triton", **options)
    parity.check(ours, partial(reference.rotate_packed, **options), found)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_packed_equals_definition_with_gradients(
    interleaved: bool, grouped: bool, norm: bool, dtype: torch.dtype
) -> None:
    for i, shape in enumerate(SHAPES):
        found, sizes = inputs(shape, dtype, norm)
        compare(found, **sizes, grouped=grouped, interleaved=interleaved, zero_centered=i % 2 == 0)


def test_rope_packed_definition_equals_separate_qk() -> None:
    found, sizes = inputs((6, 2, 4, 2, 8, 6))
    weights = {"q_weight": found["q_weight"], "k_weight": found["k_weight"]}
    rows = found["qkv"].view(6, 2, 2, 4, 8)  # two groups of two queries, a key and a value
    q = rows[..., :2, :].flatten(2, 3)
    k = rows[..., 2, :]
    v = rows[..., 3, :]
    wanted = op.rope(
        q.transpose(0, 1),
        k.transpose(0, 1),
        found["cos"],
        found["sin"],
        **weights,
        impl="reference",
    )
    got = packed.rotate_packed(**found, **sizes, impl="reference")
    torch.testing.assert_close(got[:2], tuple(x.transpose(0, 1) for x in wanted))
    assert torch.equal(got[2], v)
    # of heads in rows: all queries, keys, values
    order = torch.tensor([0, 1, 4, 5, 2, 6, 3, 7], device=DEVICE)
    sections = found["qkv"].view(6, 2, 8, 8)[:, :, order].flatten(2)
    again = packed.rotate_packed(
        **(found | {"qkv": sections}), **sizes, grouped=False, impl="reference"
    )
    torch.testing.assert_close(again, got)


@pytest.mark.full
def test_rope_packed_strides_do_not_matter() -> None:
    found, sizes = inputs((5, 2, 4, 2, 10, 6))
    for _, x in parity.layouts(found["qkv"]):
        compare({**found, "qkv": x}, **sizes)

    def turned(impl: str, **given: Any) -> torch.Tensor:
        q, k, v = packed.rotate_packed(**given, **sizes, eps=0.1, impl=impl)
        return (q.permute(1, 2, 0, 3)[:, :2] * k.permute(1, 2, 0, 3)).sum() + v.transpose(
            0, 1
        ).square().sum()

    parity.check(partial(turned, "triton"), partial(turned, "reference"), found)


BUGS = {
    "(per + 2) + head % of_group": "(per + 2) + 0 * head",
    "0, per + kind - 1)": "0, per)",
    "live = (token < length) & (head < count)": "live = (token < length - 1) & (head < count)",
    "if kind < 2:": "if kind < 1:",
    "weight_ptr = k_weight_ptr": "weight_ptr = q_weight_ptr",
    "sum_a += da * a": "sum_a = da * a",
    "to_ptr = v_ptr": "to_ptr = k_ptr",
    "dy_token = v_token": "dy_token = v_batch",
    "da * cos + db * sin": "da * cos - db * sin",
    "ends[0] : ends[1]": "ends[1] :",
}
ALWAYS = ("weight_ptr = k_weight_ptr",)


@pytest.mark.full
@pytest.mark.parametrize(
    "old", [pytest.param(old, marks=() if old in ALWAYS else pytest.mark.full) for old in BUGS]
)
def test_rope_packed_seeded_bug_is_found(old: str) -> None:
    found, sizes = inputs((70, 2, 6, 3, 70, 60))
    with parity.caught(KERNELS, old, BUGS[old]):
        compare(found, **sizes)


@pytest.mark.full
def test_rope_packed_passes_torch_registration() -> None:
    found, sizes = inputs((5, 2, 4, 2, 10, 6))
    for weights in ((found["q_weight"], found["k_weight"]), (None, None)):
        given = (
            found["qkv"],
            *weights,
            found["cos"],
            found["sin"],
            *sizes.values(),
            True,
            False,
            1e-6,
            False,
        )
        torch.library.opcheck(packed._packed.op, given)


def test_rope_packed_unfit_is_refused() -> None:
    found, sizes = inputs((5, 2, 4, 2, 10, 6))
    with pytest.raises(ValueError, match="holds no 3 queries"):
        packed.rotate_packed(**found, heads=3, groups=2)
    with pytest.raises(ValueError, match="both, or neither"):
        packed.rotate_packed(**(found | {"k_weight": None}), **sizes)
    with pytest.raises(ValueError, match="a weight on meta"):
        packed.rotate_packed(**(found | {"k_weight": found["k_weight"].to("meta")}), **sizes)
    with pytest.raises(ValueError, match="end at position 4"):
        packed.rotate_packed(**(found | tables(4, 6)), **sizes)


@pytest.mark.parametrize("turning", [2, 64, 128, 256])
def test_rope_packed_tile_counts_unrotated_part(turning: int) -> None:
    """Count the unrotated part: otherwise a head of 256 of which a quarter is rotated needs four
    times the available registers.
    """
    from mtrain_kernels.rope import packed_triton, triton

    for most in (triton.ELEMENTS, triton.BACKWARD_ELEMENTS):
        tiles = [packed_triton._tiles(4096, 1, 16, 2, 256, turning // 2, most)[2]]
        tiles.append(
            triton._grid(torch.empty(1, 4096, 16, 256, device="meta"), turning // 2, most)[1]
        )
        for tile in tiles:
            assert tile["TOKENS"] * tile["HEADS"] * (2 * tile["HALF"] + tile["REST"]) <= most, tile
