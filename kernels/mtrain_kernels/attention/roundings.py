"""Limits of the error of attention in half precision, derived from the roundings of fused kernels.

Every fused kernel, torch's and ours, multiplies in half precision and adds up in fp32. Beside the
results it rounds the probabilities before they meet values, or gradients of outputs, and the
gradients of the logits before they meet keys or queries. The part that a row's logits share, the
sum of output times its gradient, is of the rounded output. Gradients of key heads that several
query heads share may be rounded for each of these. Everything else is in fp32, whose roundings are
2^-16 of those.

A rounding to nearest is off by at most the unit roundoff u times the number, and in a long sum as
often up as down: errors of n terms do not grow with the sum of their sizes but with the root of the
sum of their squares (Higham and Mary 2019, doi:10.1137/18M1226312). An error that is uniform in
[-u, u] has the variance u^2 / 3, and no heavier tails than a normal one of that variance, so that
of `size` elements one is farther off than

    u |exact| + u sqrt(2 ln(2 size / CHANCE) / 3) sqrt(sum of squares of what was rounded)

in at most `CHANCE` of all draws. It is a bound of each element. A tolerance relative to the root
mean square of a whole tensor is none: a causal query that sees few keys has gradients, and errors,
many times those of one that sees many.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mtrain_kernels.attention.reference import visible

CHANCE = 1e-6


def limits(inputs: Mapping[str, Any], directions: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the largest error of each element of the output, and of the gradients of q, k, v and
    sink, by name, in fp64.

    `inputs` are arguments of `op.attention` without mask and dropout; `directions` has the gradient
    of the output under "output 0". Takes memory for a few numbers for each query and key of one
    head.
    """
    q, k, v = (inputs[name].detach().double() for name in ("q", "k", "v"))
    mask = _mask(inputs, q.shape[2])
    d_out = directions["output 0"].to(q.device, torch.float64)
    share = q.shape[1] // k.shape[1]
    names = {"output 0": d_out, "gradient of q": q, "gradient of k": k, "gradient of v": v}
    exact = {name: torch.zeros_like(of) for name, of in names.items()}
    squares = {name: torch.zeros_like(of) for name, of in names.items()}
    sink = inputs.get("sink")
    if sink is not None:
        exact["gradient of sink"] = sink.detach().double().new_zeros(sink.shape)
        squares["gradient of sink"] = torch.zeros_like(exact["gradient of sink"])
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            at = {"output 0": (b, h), "gradient of q": (b, h), "gradient of sink": (h,)}
            logit = None if sink is None else sink.detach().double()[h]
            head = _head(
                q[b, h], k[b, h // share], v[b, h // share], d_out[b, h], mask, logit, inputs
            )
            for name, (value, square) in head.items():
                place = at.get(name, (b, h // share))
                exact[name][place] += value
                squares[name][place] += square
    # torch's eps is the spacing of numbers at 1; rounding to nearest errs by half of it.
    unit = torch.finfo(inputs["q"].dtype).eps / 2
    return {
        name: unit * (value.abs() + _deviations(value.numel()) * (squares[name] / 3).sqrt())
        for name, value in exact.items()
    }


def _deviations(size: int) -> float:
    return math.sqrt(2 * math.log(2 * max(size, 1) / CHANCE))


def _mask(inputs: Mapping[str, Any], tokens: int) -> Tensor:
    at = torch.arange(tokens, device=inputs["q"].device)
    edges = inputs.get("cu_seqlens")
    of = None if edges is None else torch.searchsorted(edges.long(), at, right=True)
    return visible(
        at,
        at,
        causal=inputs.get("causal", False),
        window=inputs.get("window"),
        q_segments=of,
        k_segments=of,
    )


def _head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    mask: Tensor,
    sink: Tensor | None,
    inputs: Mapping[str, Any],
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return each exact result of a query head, and the sum of squares of the intermediate values
    that are rounded.
    """
    scale = inputs.get("scale") or q.shape[-1] ** -0.5
    cap = inputs.get("softcap", 0.0)
    z = scale * (q @ k.mT)
    slope = torch.ones_like(z)
    if cap:
        bent = (z / cap).tanh()
        z = cap * bent
        slope = 1 - bent.square()
    z = z.masked_fill(~mask, float("-inf"))
    if sink is None:
        lse = z.logsumexp(-1)
    else:
        lse = torch.cat([z, sink.expand(len(z), 1)], -1).logsumexp(-1)
    p = (z - lse[:, None]).exp()
    out = p @ v
    d_p = d_out @ v.mT
    delta = (out * d_out).sum(-1)
    d_z = p * (d_p - delta[:, None]) * slope
    # of the values rounded in delta
    shared = (out * d_out).square().sum(-1) + (p * d_p).square().sum(-1)
    through = p * slope  # by which an error of delta goes on
    d_q = scale * (d_z @ k)
    d_k = scale * (d_z.mT @ q)
    d_v = p.mT @ d_out
    found = {
        "output 0": (out, p.square() @ v.square()),
        "gradient of q": (
            d_q,
            scale**2 * (d_z.square() @ k.square() + shared[:, None] * (through @ k).square()),
        ),
        # The last term: gradients of shared key heads may be rounded once for each query head.
        "gradient of k": (
            d_k,
            scale**2
            * (d_z.square().mT @ q.square() + through.square().mT @ (shared[:, None] * q.square()))
            + d_k.square(),
        ),
        "gradient of v": (d_v, p.square().mT @ d_out.square() + d_v.square()),
    }
    if sink is not None:
        seen = (sink - lse).exp()
        found["gradient of sink"] = (
            -(seen * delta).sum(),
            (seen.square() * (shared + delta.square())).sum(),
        )
    return found
