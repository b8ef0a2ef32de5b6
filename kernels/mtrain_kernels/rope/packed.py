"""Queries, keys and values of one packed GEMM, normed and rotated as they are unpacked."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mtrain_kernels.operators import differentiable, operator
from mtrain_kernels.registry import pick
from mtrain_kernels.rope import reference
from mtrain_kernels.rope.op import _obstacle


def rotate_packed(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    heads: int,
    groups: int,
    grouped: bool = True,
    interleaved: bool = False,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered: bool = False,
    impl: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [s, b, n, d], keys and values [s, b, g, d] of packed rows; queries and keys as
    `reference.rotate`.

    `qkv` [s, b, (n + 2 g) d], with `heads` n of queries and `groups` g of keys. `grouped`: a row is
    the queries of one group, its key, its value, then the next group (Megatron); else all queries,
    all keys, all values (Hugging Face). Token t is rotated by entry t of the tables `cos` and `sin`
    [p, r/2], p >= s; `q_weight` and `k_weight` [d], both or neither, normalise each head before.
    `qkv` and the weights get gradients. `impl` is `reference`, `triton` or `auto`. Raises
    `ValueError` where shapes do not fit, `Unavailable` where the named implementation cannot run.
    """
    reference.require_packed(qkv, cos, sin, heads, groups, q_weight, k_weight)
    if cos.requires_grad or sin.requires_grad:
        raise ValueError("the tables of cosines and sines get no gradient; detach them")
    for other in (cos, sin, q_weight, k_weight):
        if other is not None and other.device != qkv.device:
            raise ValueError(f"qkv is on {qkv.device}, but a table or a weight on {other.device}")
    width = qkv.shape[-1] // (heads + 2 * groups)
    obstacle = _obstacle(qkv[..., :width], cos, sin, q_weight, k_weight)
    if pick("rope", impl, qkv.device, obstacle) != "triton":
        return reference.rotate_packed(
            qkv, cos, sin, heads=heads, groups=groups, grouped=grouped, interleaved=interleaved,
            q_weight=q_weight,
            k_weight=k_weight, eps=eps, zero_centered=zero_centered,
        )  # fmt: skip
    return _packed(
        qkv, q_weight, k_weight, cos, sin, heads, groups, grouped, interleaved, eps, zero_centered
    )


def _packed_shapes(qkv, heads, groups):
    width = qkv.shape[-1] // (heads + 2 * groups)
    q, k, v = (qkv.new_empty((*qkv.shape[:2], n, width)) for n in (heads, groups, groups))
    return q, k, v


@operator("rope_packed", shapes=_packed_shapes)
def _packed(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    groups: int,
    grouped: bool,
    interleaved: bool,
    eps: float,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from mtrain_kernels.rope import packed_triton

    how = packed_triton.Packing(heads, groups, grouped, interleaved, eps, zero_centered)
    return packed_triton.forward(qkv, q_weight, k_weight, cos, sin, how)


def _packed_backward_shapes(dq, q_weight, k_weight, heads, groups):
    dqkv = dq.new_empty((*dq.shape[:2], (heads + 2 * groups) * dq.shape[3]))
    return (
        dqkv,
        *(dq.new_empty(0) if w is None else w.new_empty(w.shape) for w in (q_weight, k_weight)),
    )


@operator("rope_packed_backward", shapes=_packed_backward_shapes)
def _packed_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    groups: int,
    grouped: bool,
    interleaved: bool,
    eps: float,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from mtrain_kernels.rope import packed_triton

    how = packed_triton.Packing(heads, groups, grouped, interleaved, eps, zero_centered)
    # Without a norm the packed rows are not read, and any tensor can stand for them.
    return packed_triton.backward(
        dq, dk, dv, dq if qkv is None else qkv, q_weight, k_weight, cos, sin, how
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    qkv, q_weight, k_weight, cos, sin, *ctx.options = inputs
    ctx.save_for_backward(None if q_weight is None else qkv, q_weight, k_weight, cos, sin)


def _gradients(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> dict[str, Any]:
    dqkv, dq_weight, dk_weight = _packed_backward(dq, dk, dv, *ctx.saved_tensors, *ctx.options)
    if ctx.saved_tensors[1] is None:
        return {"qkv": dqkv}
    return {"qkv": dqkv, "q_weight": dq_weight, "k_weight": dk_weight}


differentiable(_packed, save=_save, gradients=_gradients)
