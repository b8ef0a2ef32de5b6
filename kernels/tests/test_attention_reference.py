"""Attention against loops over queries and keys in fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from mtrain_kernels.attention.partial import merge, partial_attention
from mtrain_kernels.attention.reference import attention, visible
from torch import Tensor

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 4e-2}


def _by_hand(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, sink: Tensor | None = None
) -> Tensor:
    """Compute one softmax per batch, head and query, over the keys it attends to."""
    q = q.double()
    k = k.double()
    v = v.double()
    share = q.shape[1] // k.shape[1]
    rows = []
    for b in range(q.shape[0]):
        for n in range(q.shape[1]):
            for i in range(q.shape[2]):
                keys = [j for j in range(k.shape[2]) if seen[i, j]]
                logits = torch.stack(
                    [scale * (q[b, n, i] * k[b, n // share, j]).sum() for j in keys]
                )
                weights = logits.exp()
                total = weights.sum() + (0 if sink is None else sink[n].double().exp())
                rows.append(
                    sum(w / total * v[b, n // share, j] for w, j in zip(weights, keys, strict=True))
                )
    return torch.stack(rows).view(*q.shape[:3], v.shape[3])


def _inputs(sizes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    b, n, g, s, t, d, e = sizes
    shapes = ((b, n, s, d), (b, g, t, d), (b, g, t, e))
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def _naive_visible(s: int, t: int, causal: bool, window: tuple[int, int]) -> Tensor:
    """Follow the sentence: key j is seen unless it is ahead, too far behind or too far ahead."""
    seen = torch.zeros(s, t, dtype=torch.bool)
    for i in range(s):
        for j in range(t):
            behind = i - j
            ahead = j - i
            hidden = (causal and ahead > 0) or (0 <= window[0] < behind) or (0 <= window[1] < ahead)
            seen[i, j] = not hidden
    return seen


CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "one token": ((1, 1, 1, 1, 1, 4, 4), {"causal": True}),
    "causal": ((2, 3, 3, 7, 7, 5, 5), {"causal": True}),
    "full, other key count": ((2, 2, 2, 3, 5, 8, 8), {}),
    "grouped queries": ((1, 6, 2, 5, 5, 8, 8), {"causal": True}),
    "one key head": ((2, 4, 1, 5, 5, 8, 8), {"causal": True}),
    "narrow values": ((2, 4, 2, 5, 5, 12, 7), {"causal": True, "scale": 0.3}),
    "wide values": ((1, 2, 2, 5, 5, 4, 9), {"causal": True}),
    "sliding window": ((1, 2, 1, 9, 9, 8, 8), {"causal": True, "window": (2, 0)}),
    "window to both sides": ((1, 2, 2, 9, 9, 8, 8), {"window": (3, 1)}),
    "sink": ((2, 4, 2, 5, 5, 8, 8), {"causal": True, "sink": True}),
    "sink and window": ((1, 2, 2, 9, 9, 8, 6), {"causal": True, "window": (2, -1), "sink": True}),
    "sink over all keys": ((1, 2, 2, 3, 4, 8, 8), {"sink": True}),
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", CASES)
def test_attention_reference_equals_loops_with_gradients(name: str, dtype: torch.dtype) -> None:
    sizes, case = CASES[name]
    q, k, v = _inputs(sizes, dtype)
    causal = case.get("causal", False)
    window = case.get("window")
    scale = case.get("scale", 1 / math.sqrt(sizes[5]))
    sink = torch.linspace(-1, 2, sizes[1]).to(dtype).requires_grad_() if case.get("sink") else None
    s, t = sizes[3:5]
    if window is None:
        mask = None
    else:
        mask = visible(torch.arange(s), torch.arange(t), causal=causal, window=window)
    out = attention(
        q, k, v, causal=causal and mask is None, mask=mask, sink=sink, scale=case.get("scale")
    )
    expected = _by_hand(q, k, v, _naive_visible(s, t, causal, window or (-1, -1)), scale, sink)
    assert out.dtype == dtype
    leaves = [q, k, v, *([sink] if sink is not None else [])]
    direction = torch.randn(out.shape, dtype=torch.float64)
    found = torch.autograd.grad((out.double() * direction).sum(), leaves)
    wanted = torch.autograd.grad((expected * direction).sum(), leaves)
    for a, b in zip((out, *found), (expected, *wanted), strict=True):
        torch.testing.assert_close(
            a.double(), b.double(), rtol=TOLERANCE[dtype], atol=4 * TOLERANCE[dtype]
        )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(0, 0), (2, 0), (3, 2), (-1, 1), (2, -1), (-1, -1)])
@pytest.mark.parametrize(("s", "t"), [(1, 1), (5, 5), (4, 9)])
def test_attention_reference_visibility_equals_loop(
    s: int, t: int, window: tuple[int, int], causal: bool
) -> None:
    found = visible(torch.arange(s), torch.arange(t), causal=causal, window=window)
    assert torch.equal(found, _naive_visible(s, t, causal, window))


def test_attention_reference_positions_may_be_unordered() -> None:
    order = torch.tensor([3, 0, 2, 1])
    whole = visible(torch.arange(4), torch.arange(4), causal=True)
    assert torch.equal(visible(order, torch.arange(4), causal=True), whole[order])


def test_attention_reference_segments_are_isolated() -> None:
    at = torch.arange(4)
    segments = torch.tensor([0, 0, 1, 1])
    seen = visible(at, at, causal=True, q_segments=segments, k_segments=segments)
    assert seen.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    with pytest.raises(ValueError, match="neither"):
        visible(at, at, q_segments=segments)


def test_attention_reference_strides_and_empty_batch_work() -> None:
    q, k, v = (x.transpose(1, 2) for x in _inputs((2, 4, 4, 6, 6, 8, 8), torch.float32))
    plain = attention(q.contiguous(), k.contiguous(), v.contiguous(), causal=True)
    torch.testing.assert_close(attention(q, k, v, causal=True), plain)
    assert attention(q[:0], k[:0], v[:0]).shape == (0, 6, 4, 8)


@pytest.mark.parametrize(
    ("shapes", "arguments", "said"),
    [
        (((1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4)), {}, "must be"),
        (((1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 3, 4)), {}, "do not belong together"),
        (((1, 3, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)), {}, "no multiple"),
        (((1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4)), {"causal": True}, "needs a mask"),
        (
            ((1, 2, 3, 4),) * 3,
            {"causal": True, "mask": torch.ones(3, 3, dtype=torch.bool)},
            "not both",
        ),
    ],
)
def test_attention_reference_unfit_shapes_are_refused(
    shapes: Any, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        attention(*(torch.zeros(s) for s in shapes), **arguments)


@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize("scale", [None, 0.9])
def test_attention_reference_partial_keys_merge_to_all(softcap: float, scale: float | None) -> None:
    whole = _inputs((2, 4, 2, 9, 9, 8, 5), torch.float64)
    parts = _inputs((2, 4, 2, 9, 9, 8, 5), torch.float64)
    seen = visible(torch.arange(9), torch.arange(9), causal=True)
    options: dict[str, Any] = {"scale": scale, "softcap": softcap}
    expected = attention(*whole, mask=seen, **options)
    q, k, v = parts
    first, second = (
        partial_attention(q, k[:, :, at], v[:, :, at], mask=seen[:, at], **options)
        for at in (slice(0, 4), slice(4, 9))
    )
    out, _ = merge(*first, *second)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    for loss in (expected.square().sum(), out.square().sum()):
        loss.backward()
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-5)
