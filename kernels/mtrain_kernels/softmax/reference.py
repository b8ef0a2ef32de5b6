"""Definition of the softmax of attention scores, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def softmax(
    x: Tensor,
    *,
    scale: float = 1.0,
    causal: bool = False,
    mask: Tensor | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """`exp(scale x) / (exp(sink) + sum exp(scale x))` over the last axis, among the keys that each
    query sees.

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
        top = z.detach().amax(-1, keepdim=True)
    else:
        top = z.new_full((*z.shape[:-1], 1), float("-inf"))
    offset = None if sink is None else sink.to(wide).view(1, -1, 1, 1)
    if offset is not None:
        top = torch.maximum(top, offset.detach())
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
