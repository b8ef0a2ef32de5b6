"""Definition of softmax attention, in plain torch; which key a query sees is a question of
positions.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
) -> Tensor:
    """Compute `softmax(scale * q k^T) v` over the keys that each query sees; `scale` is 1/sqrt(d)
    unless given.

    `q` [b, n, s, d], `k` [b, g, t, d], `v` [b, g, t, e] with n a multiple of g: query head i reads
    key head i // (n/g). `causal` lets query i see keys 0..i and needs s == t; `mask` is boolean,
    broadcasts to [b, n, s, t], True where a query sees a key, and replaces `causal`. `sink` [n] is
    the logit of one more key per head whose value is zero. The result is [b, n, s, e]; a query that
    sees nothing gives zero with a sink and is undefined without. A positive `softcap` c bends the
    scaled scores z to c tanh(z/c). Dropout acts on the probabilities.

    Raises `ValueError` where the shapes do not fit or both `causal` and `mask` are given. Source:
    Vaswani et al. 2017, arXiv:1706.03762; grouped queries: arXiv:2305.13245; sinks:
    arXiv:2309.17453; caps: arXiv:2408.00118.
    """
    require_shapes(q, k, v, causal, mask)
    if softcap > 0:
        return _capped(q, k, v, causal, mask, sink, scale, softcap, dropout_p)
    width = v.shape[-1]
    # fused kernels know one head size; zero columns change nothing and are cut off again
    if width < q.shape[-1]:
        v = F.pad(v, (0, q.shape[-1] - width))
    if sink is not None:
        k, v, mask, causal = _with_sink(q, k, v, causal, mask, sink)
    out = F.scaled_dot_product_attention(
        q, k, v, mask, dropout_p, causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out[..., :width] if out.shape[-1] != width else out


def visible(
    q_positions: Tensor,
    k_positions: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    q_segments: Tensor | None = None,
    k_segments: Tensor | None = None,
) -> Tensor:
    """Return the boolean mask [s, t] of which key position each query position sees.

    Positions are integers [s] and [t] in any order. `causal`: no key after the query. `window`
    (left, right): no key more than `left` before or `right` after the query; a negative number is
    no limit. Segments [s], [t]: only keys of the query's own segment. Raises `ValueError` if only
    one of the segments is given.
    """
    if (q_segments is None) != (k_segments is None):
        raise ValueError("segments are needed for queries and keys, or for neither")
    ahead = k_positions[None, :] - q_positions[:, None]
    seen = ahead <= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
    if window is not None:
        left, right = window
        if left >= 0:
            seen &= ahead >= -left
        if right >= 0:
            seen &= ahead <= right
    if q_segments is not None and k_segments is not None:
        seen &= q_segments[:, None] == k_segments[None, :]
    return seen


def _with_sink(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, sink: Tensor
) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Return keys, values and an additive mask with one zero key more, whose logit is `sink`."""
    s = q.shape[2]
    t = k.shape[2]
    if causal:
        positions = torch.arange(s, device=q.device)
        mask = visible(positions, positions, causal=True)
    # a CPU adds an fp32 bias in fp32; kernels of GPUs want it in the dtype of the query
    wide = torch.promote_types(q.dtype, torch.float32) if q.device.type == "cpu" else q.dtype
    bias = torch.zeros((s, t), dtype=wide, device=q.device)
    if mask is not None:
        bias = bias.masked_fill(~mask, float("-inf"))
    bias = bias.expand(*torch.broadcast_shapes(bias.shape, (1, q.shape[1], s, t)))
    column = sink.to(wide).view(1, -1, 1, 1).expand(*bias.shape[:-1], 1)
    return F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1)), torch.cat([bias, column], dim=-1), False


def _capped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    mask: Tensor | None,
    sink: Tensor | None,
    scale: float | None,
    softcap: float,
    dropout_p: float,
) -> Tensor:
    """Compute attention with unfused scores, since torch's own has no caps."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    share = q.shape[1] // k.shape[1]
    k = k.to(wide).repeat_interleave(share, 1)
    v = v.to(wide).repeat_interleave(share, 1)
    z = q.to(wide) @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    p = softmax(softcap * (z / softcap).tanh(), causal=causal, mask=mask, sink=sink)
    return (F.dropout(p, dropout_p) @ v).to(q.dtype)


def require_shapes(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None) -> None:
    """Raise `ValueError` unless queries, keys, values and mask belong together."""
    if any(x.ndim != 4 for x in (q, k, v)):
        raise ValueError("q, k and v must be [batch, heads, tokens, head size]")
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not belong together"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are no multiple of {k.shape[1]} key heads")
    if causal and mask is not None:
        raise ValueError("give a causal mask as `mask`, or say `causal`, not both")
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(
            f"causal attention of {q.shape[2]} queries over {k.shape[2]} keys needs a mask"
        )


def softmax(
    x: Tensor,
    *,
    scale: float = 1.0,
    causal: bool = False,
    mask: Tensor | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Compute `exp(scale x) / (exp(sink) + sum exp(scale x))` over the last axis, among the keys
    that each query sees.

    `x` [b, n, s, t] are the scores of n heads, s queries, t keys. `causal`: the last query sees all
    keys and each one before it one key less. `mask` is boolean, broadcasts to x's shape, True where
    a query sees a key, and adds to `causal`. `sink` [n] is the logit of one more key per head, of
    which nothing is returned. The result has x's shape and dtype; half input is computed in fp32.
    Keys that are not seen get zero, and a query that sees no key (or only scores of -inf) gets
    zeros. Raises `ValueError` where the shapes do not fit. Source of sinks: Xiao et al. 2023,
    arXiv:2309.17453.
    """
    require_softmax(x, mask, sink)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    z = x.to(wide) * scale
    seen = visible_keys(x, causal, mask)
    if seen is not None:
        z = z.masked_fill(~seen, float("-inf"))
    if x.shape[-1]:
        # Subtracted and divided out again: no gradient flows through the maximum.
        top = z.detach().amax(-1, keepdim=True)
    else:
        top = z.new_full((*z.shape[:-1], 1), float("-inf"))
    offset = None if sink is None else sink.to(wide).view(1, -1, 1, 1)
    if offset is not None:
        top = torch.maximum(top, offset.detach())
    # -inf minus -inf would be NaN in rows that see nothing.
    top = top.masked_fill(top == float("-inf"), 0.0)
    e = (z - top).exp()
    total = e.sum(-1, keepdim=True)
    if offset is not None:
        total = total + (offset - top).exp()
    return (e / total.masked_fill(total == 0, 1.0)).to(x.dtype)


def visible_keys(x: Tensor, causal: bool, mask: Tensor | None) -> Tensor | None:
    """Return the boolean mask of who sees whom, broadcastable to x [b, n, s, t], or None if
    everybody sees everything.
    """
    seen = mask
    if causal:
        s, t = x.shape[-2:]
        # Aligned at the end, so that the last query sees all keys.
        lower = torch.ones(s, t, dtype=torch.bool, device=x.device).tril(t - s)
        seen = lower if mask is None else mask & lower
    return seen


def require_softmax(x: Tensor, mask: Tensor | None, sink: Tensor | None) -> None:
    """Raise `ValueError` unless the arguments of `softmax` belong together."""
    if x.ndim != 4 or not x.is_floating_point():
        raise ValueError(
            f"x must be floating [batch, heads, queries, keys], not {x.dtype} {tuple(x.shape)}"
        )
    if any(other is not None and other.device != x.device for other in (mask, sink)):
        raise ValueError(f"mask and sink must be on {x.device}, as x")
    if mask is not None:
        wrong = mask.dtype != torch.bool or mask.ndim > 4
        pairs = zip(reversed(mask.shape), reversed(x.shape), strict=False)
        if wrong or any(m not in (1, n) for m, n in pairs):
            raise ValueError(
                f"mask must be boolean and broadcast to {tuple(x.shape)}: {mask.dtype}"
                f" {tuple(mask.shape)}"
            )
    if sink is not None and sink.shape != (x.shape[1],):
        raise ValueError(
            f"sink {tuple(sink.shape)} must be ({x.shape[1]},), one logit for each head"
        )
