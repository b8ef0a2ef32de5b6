"""Fused attention of our own against its definition: features and pairs of them, widths of heads,
parts of keys.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from mtrain_kernels import parity, tuning
from mtrain_kernels.attention import flash, op, reference, roundings, tiles
from mtrain_kernels.attention import partial as parts
from mtrain_kernels.attention.seen import Seen, table
from mtrain_kernels.attention.tiles import Tile, Widths
from torch import Tensor

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FEATURES: dict[str, dict[str, Any]] = {
    "window": {"window": (9, 0)},
    "sink": {"sink": True},
    "cap": {"softcap": 1.3},
    "packed": {"cu_seqlens": [0, 5, 5, 33]},
}
PAIRS = [(a, b) for a in FEATURES for b in FEATURES if a <= b]
BACKWARD = "mtrain_kernels.attention.backward_triton"
SMALL = {"forward": Tile(16, 16, 4, 1), "queries": Tile(16, 16, 4, 1), "keys": Tile(16, 16, 4, 1)}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tiles so small that a short sequence has fully, partly and never visible ones."""
    for pass_, width in tiles.TABLES:
        monkeypatch.setitem(tiles.TABLES, (pass_, width), (SMALL[pass_],))
    for pass_, tile in SMALL.items():
        monkeypatch.setitem(tiles.EXACT, pass_, tile)


def inputs(
    names: tuple[str, ...],
    dtype: torch.dtype = torch.float32,
    s: int = 41,
    sizes: tuple[int, int] = (16, 16),
    batch: int = 1,
    groups: int = 1,
) -> dict[str, Any]:
    """Return inputs with two query heads for each key head, an odd length, and the named
    features.
    """
    torch.manual_seed(0)
    heads = 2 * groups
    shapes = {
        "q": (batch, heads, s, sizes[0]),
        "k": (batch, groups, s, sizes[0]),
        "v": (batch, groups, s, sizes[1]),
    }
    found: dict[str, Any] = {
        n: torch.randn(x, device=DEVICE).to(dtype).requires_grad_() for n, x in shapes.items()
    }
    found["causal"] = True
    for name in names:
        found |= FEATURES[name]
    if "packed" in names:
        found["cu_seqlens"] = torch.tensor(found["cu_seqlens"], dtype=torch.int32, device=DEVICE)
    if "sink" in names:
        found["sink"] = torch.linspace(-1, 2, heads, device=DEVICE).to(dtype).requires_grad_()
    return found


ours = partial(op.attention, impl="triton")
definition = partial(op.attention, impl="reference")


@pytest.mark.sampled(12)
@pytest.mark.parametrize("names", PAIRS, ids="+".join)
def test_attention_triton_feature_pairs_equal_definition(names: tuple[str, str]) -> None:
    parity.check(ours, definition, inputs(names))


@pytest.mark.parametrize(
    ("dtype", "names"),
    [
        (torch.bfloat16, tuple(FEATURES)),
        *(pytest.param(torch.float16, pair, marks=pytest.mark.full) for pair in PAIRS),
        *(pytest.param(torch.bfloat16, pair, marks=pytest.mark.full) for pair in PAIRS),
    ],
)
def test_attention_triton_half_precision_features(
    dtype: torch.dtype, names: tuple[str, ...]
) -> None:
    parity.check(ours, definition, inputs(names, dtype), tolerance=roundings.limits)


@pytest.mark.full
@pytest.mark.parametrize("names", [(), ("window", "sink"), ("cap",)], ids="+".join)
def test_attention_triton_several_samples_and_key_heads(names: tuple[str, ...]) -> None:
    parity.check(ours, definition, inputs(names, batch=2, groups=3))


@pytest.mark.full
@pytest.mark.parametrize(
    "sizes", [(20, 20), (64, 64), (80, 80), (96, 96), (192, 128), (24, 16), (256, 256), (12, 40)]
)
@pytest.mark.parametrize("names", [(), tuple(FEATURES)], ids=["causal", "all"])
def test_attention_triton_any_head_width(sizes: tuple[int, int], names: tuple[str, ...]) -> None:
    parity.check(ours, definition, inputs(names, sizes=sizes))


@pytest.mark.sampled
@pytest.mark.parametrize("s", [1, 16, 17])
def test_attention_triton_lengths_around_a_tile(s: int) -> None:
    parity.check(ours, definition, inputs(("window", "sink"), s=s, sizes=(24, 8), batch=2 - s % 2))


@pytest.mark.full
@pytest.mark.parametrize("window", [(-1, -1), (3, 5), (0, 0), (-1, 4)])
def test_attention_triton_windows_to_both_sides(window: tuple[int, int]) -> None:
    """Add a sink, since a query that sees only one key has a gradient of 0."""
    parity.check(ours, definition, inputs(("sink",)) | {"causal": False, "window": window})


@pytest.mark.full
def test_attention_triton_strides_do_not_matter() -> None:
    found = inputs(("packed",))
    layouts = {n: dict(parity.layouts(found[n])) for n in ("q", "k", "v")}
    for name in layouts["q"]:
        parity.check(ours, definition, found | {n: other[name] for n, other in layouts.items()})


def written_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_at: Tensor,
    k_at: Tensor,
    window: tuple[int, int],
    edges: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Define a part: `partial_attention` through a mask of positions, in the dtype of its
    inputs.
    """
    owners = [
        None if edges is None else torch.searchsorted(edges.long(), at, right=True)
        for at in (q_at, k_at)
    ]
    mask = reference.visible(q_at, k_at, window=window, q_segments=owners[0], k_segments=owners[1])
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    z = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, float("-inf"))
    lse = torch.where(mask.any(-1), z.logsumexp(-1), parts.HIDDEN)
    return (z - lse.unsqueeze(-1)).exp().masked_fill(~mask, 0) @ v, lse


@pytest.mark.sampled
@pytest.mark.parametrize("packed", [False, True])
def test_attention_triton_partial_keys_have_lse_and_gradients(packed: bool) -> None:
    torch.manual_seed(0)
    # two chunks, as ranks of a ring hold
    q_at = torch.cat([torch.arange(8, 20), torch.arange(60, 73)]).to(DEVICE)
    k_at = torch.cat([torch.arange(0, 9), torch.arange(50, 70), torch.arange(90, 99)]).to(DEVICE)
    edges = torch.tensor([0, 12, 55, 80], device=DEVICE) if packed else None
    shapes = {"q": (1, 2, len(q_at), 16), "k": (1, 1, len(k_at), 16), "v": (1, 1, len(k_at), 8)}
    leaves = {n: torch.randn(x, device=DEVICE).requires_grad_() for n, x in shapes.items()}
    seen = Seen(table=table(q_at, k_at, (30, 0), edges))
    parity.check(
        partial(flash.partial_attention, seen=seen),
        partial(written_out, q_at=q_at, k_at=k_at, window=(30, 0), edges=edges),
        leaves,
    )


def test_attention_triton_partial_keys_merge() -> None:
    found = inputs(("sink",))
    q, k, v, sink = (found[n] for n in ("q", "k", "v", "sink"))
    at = torch.arange(41, device=DEVICE)
    halves = [
        flash.partial_attention(
            q, k[:, :, part], v[:, :, part], seen=Seen(table=table(at, at[part], (-1, 0)))
        )
        for part in (slice(0, 20), slice(20, 41))
    ]
    out, lse = parts.merge(*halves[0], *halves[1])
    torch.testing.assert_close(parts.with_sink(out, lse, sink), definition(**found))


@pytest.mark.full
def test_attention_triton_is_deterministic() -> None:
    found = inputs(("window", "sink"), torch.bfloat16, s=20)
    leaves = [found[n] for n in ("q", "k", "v", "sink")]
    first, second = (torch.autograd.grad(ours(**found).square().sum(), leaves) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("module", "old", "new", "names"),
    [
        ("triton", "- left", "- left + 1", ()),
        ("triton", "total = tl.exp2(sink - top)", "total = tl.exp2(sink - top) * 0", ("sink",)),
        ("triton", "x * (1 + xx * (-1 / 3", "x * (1 + xx * (-1 / 2", ("cap",)),
        ("backward_triton", "d_z *= 1 - bent * bent", "d_z *= 1", ("cap",)),
        ("backward_triton", "(i + M > end)", "(i + M > end + M)", ("window",)),
        ("backward_triton", "half += 2 * s", "half += 0", ("packed",)),
        ("backward_triton", "r * q_head", "0 * q_head", ()),
    ],
)
@pytest.mark.full
def test_attention_triton_seeded_bug_is_found(
    module: str, old: str, new: str, names: tuple[str, ...]
) -> None:
    if old == "- left":
        old = "left - shift"
        new = "left - shift - 1"
        names = ("window",)
    with parity.caught(f"mtrain_kernels.attention.{module}", old, new):
        parity.check(ours, definition, inputs(names))


def test_attention_triton_hidden_tiles_are_skipped() -> None:
    """Put not-a-number into hidden keys and values: it must not show, not even as zero times it."""
    found = inputs(("packed", "window"))
    with torch.no_grad():
        clean = ours(**found)
        k = found["k"].clone()
        v = found["v"].clone()
        # a document of its own behind the last edge
        k[:, :, 33:] = float("nan")
        v[:, :, 33:] = float("nan")
        torch.testing.assert_close(
            ours(**found | {"k": k, "v": v})[:, :, :32], clean[:, :, :32], rtol=0, atol=0
        )


def test_attention_triton_fake_tensors_have_shapes_and_gradients() -> None:
    found = inputs(("window", "sink"), s=5)
    q, k, v, sink = (found[n] for n in ("q", "k", "v", "sink"))
    for wide in (False, True):
        arguments = (q, k, v, sink, None, 3, 0, 0, 0.25, 0.0, wide)
        torch.library.opcheck(
            torch.ops.mtrain.attention, arguments, test_utils=("test_schema", "test_faketensor")
        )
    with torch.device("meta"):
        out = flash.attention(
            torch.empty(2, 4, 5, 16), torch.empty(2, 2, 5, 16), torch.empty(2, 2, 5, 8), seen=Seen()
        )
    assert (out.shape, out.permute(2, 0, 1, 3).is_contiguous()) == ((2, 4, 5, 8), True)


def test_attention_triton_split_heads_use_measured_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert [Widths.of(d, e) for d, e in ((128, 128), (192, 128), (80, 80))] == [
        Widths(128, 0, 128, True, True),
        Widths(128, 64, 128, True, True),
        Widths(64, 16, 128, True, False),
    ]
    q = torch.empty(1, 4, 4000, 128, dtype=torch.bfloat16, device="meta")
    monkeypatch.setitem(tiles.TABLES, ("keys", 128), (SMALL["keys"], Tile(32, 64)))
    assert tiles.tile_for("keys", q, q, True) == SMALL["keys"]
    monkeypatch.setattr(
        tuning, "_used", {"attention.keys": {"bfloat16 d128 e128 s4096 window": "32x64 w4 s2"}}
    )
    assert tiles.tile_for("keys", q, q, True) == Tile(32, 64)
    assert tiles.tile_for("keys", q, q, False) == SMALL["keys"]
