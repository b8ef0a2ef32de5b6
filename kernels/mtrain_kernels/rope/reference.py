"""Definition of the rotary position embedding, in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    interleaved: bool = False,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """Apply `rotate` to queries and to keys, each head RMS-normalised before if there are weights.

    `q` [..., s, n, d] and `k` [..., s, g, d]; `q_weight` and `k_weight` [d], both or neither. See
    `rotate`.
    """
    options: dict[str, Any] = {
        "positions": positions,
        "interleaved": interleaved,
        "eps": eps,
        "zero_centered": zero_centered,
    }
    return rotate(q, cos, sin, weight=q_weight, **options), rotate(
        k, cos, sin, weight=k_weight, **options
    )


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    interleaved: bool = False,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered: bool = False,
) -> Tensor:
    """Turn pair i of the first r elements of each head by the angle of table entry i of the
    token's position.

    (a, b) becomes (a cos - b sin, b cos + a sin). The pairs are elements (i, i + r/2), or (2i, 2i +
    1) if interleaved. `x` [s, n, d] or [b, s, n, d]; `cos` and `sin` [p, r/2] with r <= d, the
    other d - r elements stay. `positions` [s] or [b, s] are integers that say which entry each
    token reads, 0 .. s-1 unless given. With `weight` [d] each head is first normalised, `x /
    sqrt(mean(x^2) + eps) * w` with `w = weight`, or `1 + weight` if zero-centered. Computed in fp32
    for half precision; the result has x's dtype. Raises `ValueError` where shapes do not fit.
    Source: Su et al. 2021, arXiv:2104.09864; normalised heads: arXiv:2302.05442.
    """
    require(x, cos, sin, positions, weight)
    inner = torch.promote_types(x.dtype, torch.float32)
    head = x.to(inner)
    if weight is not None:
        scale = weight.to(inner) + 1 if zero_centered else weight.to(inner)
        head = head * torch.rsqrt(head.square().mean(-1, keepdim=True) + eps) * scale
    c, s = (_entries(t.to(inner), positions, x.shape[-3]) for t in (cos, sin))
    c = c.unsqueeze(-2)
    s = s.unsqueeze(-2)
    half = cos.shape[-1]
    turned = head[..., : 2 * half]
    rest = head[..., 2 * half :]
    if interleaved:
        a = turned[..., ::2]
        b = turned[..., 1::2]
    else:
        a = turned[..., :half]
        b = turned[..., half:]
    first = a * c - b * s
    second = b * c + a * s
    if interleaved:
        turned = torch.stack((first, second), dim=-1).flatten(-2)
    else:
        turned = torch.cat((first, second), dim=-1)
    return torch.cat((turned, rest), dim=-1).to(x.dtype)


def _entries(table: Tensor, positions: Tensor | None, tokens: int) -> Tensor:
    """Return the table's entry of each token; a negative position is an error, and not counted from
    the end.
    """
    if positions is None:
        return table[:tokens]
    return table.index_select(0, positions.reshape(-1)).view(*positions.shape, table.shape[1])


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [s, b, n, d], keys and values [s, b, g, d] of `qkv` [s, b, (n + 2 g) d], the
    first two by `rotate`.

    `grouped`: a row is the queries of one group, its key, its value, then the next group; else all
    queries, all keys, all values. Token t is turned by entry t of the tables.
    """
    require_packed(qkv, cos, sin, heads, groups, q_weight, k_weight)
    width = qkv.shape[-1] // (heads + 2 * groups)
    per = heads // groups
    if grouped:
        q, k, v = qkv.unflatten(-1, (groups, per + 2, width)).split((per, 1, 1), dim=-2)
        q, k, v = (x.flatten(-3, -2) for x in (q, k, v))
    else:
        q, k, v = qkv.unflatten(-1, (heads + 2 * groups, width)).split(
            (heads, groups, groups), dim=-2
        )
    options: dict[str, Any] = {
        "interleaved": interleaved,
        "eps": eps,
        "zero_centered": zero_centered,
    }
    q, k = (
        rotate(x.transpose(0, 1), cos, sin, weight=w, **options).transpose(0, 1)
        for x, w in ((q, q_weight), (k, k_weight))
    )
    return q, k, v


def require_packed(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    groups: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
) -> None:
    """Raise `ValueError` where packed rows, tables, numbers of heads and weights do not belong
    together.
    """
    if (
        groups < 1
        or heads < 1
        or heads % groups
        or qkv.ndim != 3
        or qkv.shape[-1] % (heads + 2 * groups)
    ):
        raise ValueError(
            f"qkv {tuple(qkv.shape)} holds no {heads} queries, {groups} keys and {groups} values"
        )
    if (q_weight is None) != (k_weight is None):
        raise ValueError("queries and keys are normalised both, or neither")
    width = qkv.shape[-1] // (heads + 2 * groups)
    for weight in (q_weight, k_weight):
        require(qkv[..., :width], cos, sin, None, weight)


def require(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, weight: Tensor | None
) -> None:
    """Raise `ValueError` where x, tables, positions and weight do not belong together."""
    if x.ndim not in (3, 4):
        raise ValueError(
            f"x {tuple(x.shape)} must be [tokens, heads, head size] or have a batch before"
        )
    if cos.ndim != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(
            f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} are no tables for x"
            f" {tuple(x.shape)}"
        )
    if positions is None and cos.shape[0] < x.shape[-3]:
        raise ValueError(f"the tables end at position {cos.shape[0]}, x has {x.shape[-3]} tokens")
    if positions is not None:
        if positions.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"positions are {positions.dtype}, not int32 or int64")
        if positions.shape not in (x.shape[-3:-2], x.shape[:-2]):
            raise ValueError(
                f"positions {tuple(positions.shape)} do not number the tokens of x {tuple(x.shape)}"
            )
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(
            f"weight {tuple(weight.shape)} must be the last axis of x {tuple(x.shape)}"
        )
