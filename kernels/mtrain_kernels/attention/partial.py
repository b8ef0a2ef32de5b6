"""Attention over some of the keys, and putting such parts together: what ring attention
computes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

HIDDEN = -1e30
"""The logit of a key that is not seen, and the log-sum-exp of a query that sees none: finite, for
the gradients.
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
    """Softmax attention over only these keys, and the logarithm of the softmax's denominator.

    `q` [b, n, s, d], `k` [b, g, t, d], `v` [b, g, t, e] with n a multiple of g; `mask` [s, t] is
    True where a query sees a key; `scale` and `softcap` are as in `reference.attention`. Returns
    the output [b, n, s, e] and the log-sum-exp [b, n, s], both fp32; a query that sees none of the
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
    """Return two parts of `partial_attention` over different keys as one; outputs [..., e] with
    log-sum-exps [...].
    """
    both = torch.logaddexp(lse, more_lse)
    # Both factors are shares of a common denominator and at most 1, so nothing overflows.
    merged = out * (lse - both).exp().unsqueeze(-1) + more * (more_lse - both).exp().unsqueeze(-1)
    return merged, both


def with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Return the output [b, n, s, e] of all parts where each head has one more key of value zero,
    with logit `sink` [n].
    """
    column = sink.float().view(1, -1, 1)
    return out * (lse - torch.logaddexp(lse, column)).exp().unsqueeze(-1)
