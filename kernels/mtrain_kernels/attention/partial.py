"""Attention over a subset of the keys, and the merge of such parts, as in ring attention."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

HIDDEN = -1e30
"""The logit of a masked key, and the log-sum-exp of a query without visible keys; finite, so that
gradients are finite as well.
"""


def partial_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor,
    scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return softmax attention over these keys only, and the log of the softmax's denominator.

    `q` [b, n, s, d], `k` [b, g, t, d], `v` [b, g, t, e] with n a multiple of g; `mask` [s, t] is
    True where a query sees a key; `scale` and `softcap` are as in `reference.attention`. The
    output is [b, n, s, e] and the log-sum-exp [b, n, s], both fp32; a query that sees none of the
    keys gets zeros and a log-sum-exp of about `HIDDEN`. Source: Liu et al. 2023, arXiv:2310.01889
    (ring attention); Milakov and Gimelshein 2018, arXiv:1805.02867 (the softmax in parts).
    """
    repeat = q.shape[1] // k.shape[1]
    if repeat > 1:
        k = k.repeat_interleave(repeat, dim=1)
        v = v.repeat_interleave(repeat, dim=1)
    logits = torch.matmul(q.float(), k.float().transpose(-1, -2)) * (
        q.shape[-1] ** -0.5 if scale is None else scale
    )
    if softcap > 0:
        logits = softcap * (logits / softcap).tanh()
    logits = logits.masked_fill(~mask, float("-inf"))
    # The maximum cancels out of the result and needs no gradient. The clamp avoids -inf - -inf,
    # which is NaN, in rows that see nothing.
    top = logits.amax(-1, keepdim=True).detach().clamp_min(HIDDEN)
    weights = (logits - top).exp()
    # The sum of a row that sees nothing is 0: its shares stay 0, and its logarithm stays finite.
    total = weights.sum(-1, keepdim=True).clamp_min(1e-30)
    shares = F.dropout(weights / total, dropout_p) if dropout_p else weights / total
    return torch.matmul(shares, v.float()), (top + total.log()).squeeze(-1)


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two results of `partial_attention` over disjoint keys.

    Outputs are [..., e], and log-sum-exps are [...].
    """
    both = torch.logaddexp(lse, more_lse)
    # Both factors are shares of a common denominator and at most 1, so nothing overflows.
    merged = out * (lse - both).exp().unsqueeze(-1) + more * (more_lse - both).exp().unsqueeze(-1)
    return merged, both


def with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Return the output [b, n, s, e] after one more key per head, with value zero and logit
    `sink` [n].
    """
    column = sink.float().view(1, -1, 1)
    return out * (lse - torch.logaddexp(lse, column)).exp().unsqueeze(-1)
