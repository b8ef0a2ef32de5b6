"""Limits of attention in half precision: what fused kernels round stays within them, and what is
wrong does not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from mtrain_kernels import parity
from mtrain_kernels.attention import op
from mtrain_kernels.attention.roundings import _mask, limits
from torch import Tensor

TOKENS = 320
HEADS = 4
GROUPS = 2
WIDTH = 64
FEATURES: dict[str, dict[str, Any]] = {
    "causal": {},
    "all of it": {"window": (100, 0), "softcap": 5.0, "sink": True, "cu_seqlens": [0, 130, 320]},
}
PARTS = ("output 0", *(f"gradient of {name}" for name in ("q", "k", "v", "sink")))


def inputs(name: str, loud: float = 1.0) -> dict[str, Any]:
    """Draw inputs with two query heads for each key head; the first four values are `loud` times
    the others.
    """
    torch.manual_seed(0)
    shapes = {"q": HEADS, "k": GROUPS, "v": GROUPS}
    found: dict[str, Any] = {n: torch.randn(1, heads, TOKENS, WIDTH) for n, heads in shapes.items()}
    found["v"][:, :, :4] *= loud
    found = {n: x.bfloat16().requires_grad_() for n, x in found.items()}
    found |= {"causal": True, **FEATURES[name]}
    if "sink" in found:
        found["sink"] = torch.linspace(-1, 2, HEADS).bfloat16().requires_grad_()
        found["cu_seqlens"] = torch.tensor(found["cu_seqlens"], dtype=torch.int32)
    return found


class _Fused(torch.autograd.Function):
    """The arithmetic of a fused kernel on a GPU, ours or torch's: bf16 in products,
    fp32 in sums.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, given: Any, fault: Any
    ) -> Tensor:
        q, k, v = (x.float() for x in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
        z = WIDTH**-0.5 * (q @ k.mT)
        ctx.slope = torch.ones(())
        if cap := given.get("softcap"):
            bent = (z / cap).tanh()
            z = cap * bent
            ctx.slope = 1 - bent * bent
        z = z.masked_fill(~_mask(given, TOKENS), float("-inf"))
        if sink is None:
            logit = z.new_full((1, HEADS, 1, 1), float("-inf"))
        else:
            logit = sink.float().view(1, -1, 1, 1)
        top = torch.maximum(z.amax(-1, keepdim=True), logit)
        p = (z - top).exp()
        total = p.sum(-1, keepdim=True) + (logit - top).exp()
        out = (_rounded(p) @ v / total).bfloat16()
        lse = top + total.log()
        ctx.saved = (q, k, v, (z - lse).exp(), out.float(), (logit - lse).exp())
        ctx.fault = fault
        ctx.sinks = sink
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        q, k, v, p, out, seen = ctx.saved
        d_out = d_out.float()
        delta = (out * d_out).sum(-1, keepdim=True)
        if ctx.fault == "delta":
            delta = 1.03 * delta
        d_z = p * (d_out @ v.mT - delta) * (1 if ctx.fault == "slope" else ctx.slope)
        if ctx.fault == "scale":
            d_z = 1.01 * d_z
        if ctx.fault == "a tile":
            d_z[..., 304:] = 0
        d_z = _rounded(d_z)
        d_q = WIDTH**-0.5 * (d_z @ k)
        d_k = WIDTH**-0.5 * (d_z.mT @ q)
        d_v = _rounded(p).mT @ d_out
        d_k, d_v = (x.view(1, GROUPS, 2, TOKENS, WIDTH).sum(2).bfloat16() for x in (d_k, d_v))
        d_sink = None if ctx.sinks is None else -(seen * delta).sum((0, 2, 3)).bfloat16()
        return d_q.bfloat16(), d_k, d_v, d_sink, None, None


def _rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def fused(fault: str = "", **given: Any) -> Tensor:
    out: Tensor = _Fused.apply(*(given.get(name) for name in ("q", "k", "v", "sink")), given, fault)
    return out


definition: Callable[..., Any] = partial(op.attention, impl="reference")


@pytest.mark.parametrize("loud", [1.0, 16.0])
@pytest.mark.parametrize("name", FEATURES)
def test_roundings_of_fused_kernels_stay_within_limits(name: str, loud: float) -> None:
    parity.check(fused, definition, inputs(name, loud), tolerance=limits)


def test_roundings_of_torch_kernel_stay_within_limits() -> None:
    """Run torch's kernel on a CPU in blocks of 32 queries, between which it rounds gradients of
    keys: a single block is fused.
    """
    found = inputs("causal")
    short = {
        name: found[name].detach()[:, :, :32].clone().requires_grad_() for name in ("q", "k", "v")
    }
    parity.check(definition, definition, {**short, "causal": True}, tolerance=limits)


def test_roundings_whole_tensor_tolerance_is_no_bound() -> None:
    """Show rows that attend to few keys: their gradients, and errors, are many times those of the
    others.
    """
    with pytest.raises(AssertionError, match="gradient of q"):
        parity.check(fused, definition, inputs("causal", 16.0), tolerance=3e-2)


@pytest.mark.parametrize(
    ("fault", "name"),
    [("delta", "causal"), ("scale", "causal"), ("a tile", "causal"), ("slope", "all of it")],
)
def test_roundings_fault_exceeds_limits(fault: str, name: str) -> None:
    with pytest.raises(AssertionError, match=r"gradient of [qk]"):
        parity.check(partial(fused, fault), definition, inputs(name), tolerance=limits)


def test_roundings_whole_tensor_tolerance_misses_a_hundredth() -> None:
    parity.check(partial(fused, "scale"), definition, inputs("causal"), tolerance=3e-2)
