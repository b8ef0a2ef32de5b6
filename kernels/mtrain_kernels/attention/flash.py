"""Fused attention of our own, with gradients: windows, sinks, caps, packed sequences and parts of
the keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mtrain_kernels.attention.seen import Seen
from mtrain_kernels.operators import differentiable, operator


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    seen: Seen,
    sink: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Compute `op.attention` by the Triton kernels: queries [b, n, s, d] attend to the keys, of any
    number, that `seen` marks.

    The result [b, n, s, e] lies in memory as [s, b, n, e]. A query that sees nothing gets zeros.
    """
    return _run(q, k, v, sink, seen, scale, softcap, False)[0]


def partial_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    seen: Seen,
    sink: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Compute the attention of queries to only these keys, of any number, and the logarithm of the
    softmax's denominator.

    `q` [b, n, s, d], `k` [b, g, t, d], `v` [b, g, t, e] with n a multiple of g; which keys a query
    sees, `seen` says. Returns the output [b, n, s, e] and the log-sum-exp [b, n, s], both fp32,
    with gradients through both, for `partial.merge`; a query that sees nothing gets zeros and
    -1e30.
    """
    return _run(q, k, v, sink, seen, scale, softcap, True)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    seen: Seen,
    scale: float | None,
    softcap: float,
    wide: bool,
) -> tuple[Tensor, Tensor]:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    # The schema of an operator knows tensors and numbers, so `seen` is passed in parts.
    found: tuple[Tensor, Tensor] = _attention(
        q,
        k,
        v,
        sink,
        seen.table,
        seen.left,
        seen.right,
        seen.shift,
        float(scale),
        float(softcap),
        wide,
    )
    return found


def _attention_shapes(q, v, wide):
    dtype = torch.float32 if wide else q.dtype
    return _like(q, v.shape[-1], dtype), q.new_empty(q.shape[:3], dtype=torch.float32)


@operator("attention", shapes=_attention_shapes)
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    table: Tensor | None,
    left: int,
    right: int,
    shift: int,
    scale: float,
    softcap: float,
    wide: bool,
) -> tuple[Tensor, Tensor]:
    from mtrain_kernels.attention import triton

    return triton.forward(q, k, v, sink, Seen(left, right, shift, table), scale, softcap, wide)


def _like(x: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
    b, n, s, _ = x.shape
    # The strides that the kernels allocate: torch.compile plans views by those of the fake.
    return x.new_empty((s, b, n, width), dtype=dtype or x.dtype).permute(1, 2, 0, 3)


def _attention_backward_shapes(q, k, v, lse):
    return (
        _like(q, q.shape[-1]),
        _like(k, k.shape[-1]),
        _like(v, v.shape[-1]),
        torch.empty_like(lse),
    )


@operator("attention_backward", shapes=_attention_backward_shapes)
def _attention_backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    table: Tensor | None,
    left: int,
    right: int,
    shift: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from mtrain_kernels.attention import backward_triton

    seen = Seen(left, right, shift, table)
    return backward_triton.backward(d_out, d_lse, q, k, v, out, lse, seen, scale, softcap)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sink, table, *ctx.numbers, ctx.wide = inputs
    # Mostly only one output has a gradient; None is cheaper than zeros.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, sink, table, *output)


def _gradients(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> dict[str, Any]:
    q, k, v, sink, table, out, lse = ctx.saved_tensors
    d_out = torch.zeros_like(out) if d_out is None else d_out
    d_q, d_k, d_v, delta = _attention_backward(d_out, d_lse, q, k, v, out, lse, table, *ctx.numbers)
    d_sink = None
    if sink is not None:  # one more key, of value zero
        share = (sink.float().view(1, -1, 1) - lse).exp()
        d_sink = -(share * delta).sum((0, 2)).to(sink.dtype)
    return {"q": d_q, "k": d_k, "v": d_v, "sink": d_sink}


differentiable(_attention, save=_save, gradients=_gradients)
