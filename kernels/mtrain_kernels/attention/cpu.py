"""Causal attention on a CPU for short sequences in half precision, with materialised scores.

torch's fused kernel splits a sequence into blocks and widens each operand once per block: for some
hundred tokens that takes twice as long as batched GEMMs by oneDNN. Both keep scores in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

MOST_SCORES = 1 << 23  # 32 MiB of them at a time; longer sequences are the fused kernel's


def fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether `q` [b, n, s, d], `k` and `v` [b, g, s, d] are short and in half precision."""
    b, n, s, _ = q.shape
    half = q.dtype in (torch.bfloat16, torch.float16) and q.dtype == k.dtype == v.dtype
    return q.device.type == "cpu" and half and k.shape[2] == s and 0 < b * n * s * s <= MOST_SCORES


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Return causal `softmax(scale q k^T) v`, as `reference.attention`, no dropout or sinks."""
    b, n, s, d = q.shape
    g = k.shape[1]
    # the heads that share keys lie behind each other
    rows = q.reshape(b, g, n // g * s, d).flatten(0, 1)
    scale = d**-0.5 if scale is None else scale
    out: Tensor = _Short.apply(rows, k.flatten(0, 1), v.flatten(0, 1), scale)
    return out.view(b, n, s, v.shape[-1])


class _Short(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        batch = q.shape[0]
        rows = q.shape[1]
        s = k.shape[1]
        # Repeated, since the rows of heads that share keys follow each other.
        later = torch.full((s, s), float("-inf")).triu_(1).repeat(rows // s, 1)
        # baddbmm adds the mask inside the product, which saves a pass over the scores.
        scores = torch.baddbmm(later.expand(batch, rows, s), q.float(), k.float().mT, alpha=scale)
        # In place: the scores are the largest tensor here, and nobody needs them again.
        p = torch.softmax(scores, -1, out=scores).to(q.dtype)
        ctx.save_for_backward(q, k, v, p)
        ctx.scale = scale
        return torch.bmm(p, v)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, p = ctx.saved_tensors
        d_out = d_out.contiguous()
        # The softmax's gradient subtracts numbers that nearly cancel, hence fp32.
        d_p = torch.bmm(d_out, v.mT).float()
        d_scores = (
            torch._softmax_backward_data(d_p, p.float(), -1, torch.float32)
            .mul_(ctx.scale)
            .to(q.dtype)
        )
        return torch.bmm(d_scores, k), torch.bmm(d_scores.mT, q), torch.bmm(p.mT, d_out), None
