"""The Mamba-2 scan: contract, and the libraries that have kernels for it."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mtrain_kernels.registry import REFERENCE, Case, Cost, Implementation, Model, Op, choose
from mtrain_kernels.ssd import reference

HALF = (torch.float16, torch.bfloat16)


def ssd(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    d: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state: Tensor | None = None,
    segments: Tensor | None = None,
    chunk: int = 256,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return the scan `S_i = exp(dt_i a) S_(i-1) + dt_i x_i b_i^T`, `y_i = S_i c_i + d x_i`, and
    the last state.

    Arguments and results are those of `reference.ssd`: `x` [n, t, h, p], `dt` [n, t, h], `a` [h],
    `b` and `c` [n, t, g, s], `d` [h] or [h, p], `dt_bias` [h], `state` [n, h, p, s], `segments` [n,
    t]; y has x's shape and dtype, the state is fp32. Computed by chunks of `chunk` times. `impl` is
    `mamba_ssm` or `fla` (libraries, on CUDA), `reference` or `auto`. Raises `ValueError` where the
    shapes do not fit, `Unavailable` where the named one cannot run.
    """
    reference.require_ssd(x, dt, a, b, c, d, dt_bias, state, segments)
    against = tuple(
        _call_obstacle(name, x, chunk, state, segments) for name in ("mamba_ssm", "fla")
    )
    name = _pick(impl, x.device, *against)
    options: dict[str, Any] = {
        "d": d,
        "dt_bias": dt_bias,
        "dt_softplus": dt_softplus,
        "state": state,
    }
    if name == "mamba_ssm":
        return by_mamba_ssm(x, dt, a, b, c, segments=segments, chunk=chunk, **options)
    if name == "fla":
        return by_fla(x, dt, a, b, c, **options)
    return reference.ssd(x, dt, a, b, c, segments=segments, chunk=chunk, **options)


@torch.compiler.assume_constant_result
def _pick(impl: str, device: torch.device, mamba_ssm: str | None, fla: str | None) -> str:
    """Return the implementation to take; the obstacles are those that this very call puts in the
    way of a library.
    """
    if impl == "auto":
        for name, obstacle in (("mamba_ssm", mamba_ssm), ("fla", fla)):
            if obstacle is None and OPS[0].implementations[name].available(device) is None:
                return choose(OPS[0], name, device)[0]
        return choose(OPS[0], impl, device, "the libraries do not take this call")[0]
    return choose(OPS[0], impl, device, {"mamba_ssm": mamba_ssm, "fla": fla}.get(impl))[0]


def _call_obstacle(
    name: str, x: Tensor, chunk: int, state: Tensor | None, segments: Tensor | None
) -> str | None:
    """Return why a library cannot take this call, whatever the device."""
    if x.dtype not in (*HALF, torch.float32):
        return f"{x.dtype} is not fp32, fp16 or bf16"
    if name == "fla" and segments is not None:
        return "fla takes the edges of packed sequences, not a segment for each time"
    if name == "mamba_ssm" and chunk & (chunk - 1):
        return f"a chunk of {chunk} is no power of two"
    if name == "mamba_ssm" and segments is not None and state is not None:
        return "mamba_ssm does not say whose a first state is where there are segments"
    return None


def _library_obstacle(module: str, device: torch.device) -> str | None:
    if importlib.util.find_spec(module) is None:
        return f"{module} is not installed"
    if device.type == "cuda":
        return None
    return f"{module} runs on CUDA only, the tensors are on {device.type}"


def by_mamba_ssm(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    d: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    state: Tensor | None,
    segments: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Return the scan by mamba_ssm, whose arguments are these under other names."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    y, last = mamba_chunk_scan_combined(
        x,
        dt,
        a,
        b,
        c,
        chunk,
        D=d,
        dt_bias=dt_bias,
        initial_states=state,
        seq_idx=None if segments is None else reference.runs(segments),
        dt_softplus=dt_softplus,
        return_final_states=True,
    )
    return y, last.float()


def by_fla(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    d: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the scan as the gated linear attention of fla: c asks, b is the key, dt x the value,
    dt a the gate.

    fla keeps its state the other way round, [n, h, s, p], and knows no groups, so b and c are
    repeated.
    """
    from fla.ops.simple_gla import chunk_simple_gla

    # dt becomes an exponent that is summed over many times, hence fp32.
    dt = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    dt = F.softplus(dt) if dt_softplus else dt
    share = x.shape[2] // b.shape[2]
    y, last = chunk_simple_gla(
        q=c.to(x.dtype).repeat_interleave(share, 2),
        k=b.to(x.dtype).repeat_interleave(share, 2),
        v=(x.float() * dt[..., None]).to(x.dtype),
        g=dt * a.float(),
        scale=1.0,
        initial_state=None if state is None else state.float().mT.contiguous(),
        output_final_state=True,
    )
    if d is not None:
        y = (y.float() + x.float() * (d.float() if d.ndim == 2 else d.float()[:, None])).to(x.dtype)
    return y, last.float().mT


# of Mamba-2 layers as they are trained; heads are twice the width over HEAD
HEAD = 64
GROUPS = 8
STATE = 128


def _make(model: Model, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    heads = 2 * model.hidden // HEAD
    groups = min(GROUPS, 2 * model.hidden // HEAD)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(1, model.tokens, *shape, device=device, dtype=dtype).requires_grad_()

    return {
        "x": leaf(heads, HEAD),
        "dt": leaf(heads),
        "a": (-torch.rand(heads, device=device) - 0.5).requires_grad_(),
        "b": leaf(groups, STATE),
        "c": leaf(groups, STATE),
        "d": torch.ones(heads, device=device).requires_grad_(),
        "dt_softplus": True,
    }


def _cost(products: int, tensors: int, chunk: int = 256) -> Any:
    """Return bytes of x and y, b and c; products inside chunks (halved by causality) and with
    the states.
    """

    def cost(m: Model) -> Cost:
        heads = 2 * m.hidden // HEAD
        moved = 2 * m.tokens * (tensors * heads * HEAD + 2 * min(GROUPS, heads) * STATE)
        inside = m.tokens * chunk * (min(GROUPS, heads) * STATE + heads * HEAD)
        return Cost(bytes=moved, flops=products * (inside + 4 * m.tokens * heads * HEAD * STATE))

    return cost


OPS = (
    Op(
        "ssd",
        cases=(
            Case(
                "ssd",
                _make,
                lambda inputs, impl: ssd(**inputs, impl=impl),
                forward=_cost(1, 2),
                backward=_cost(2, 4),
            ),
        ),
        launch=lambda model: None,
        implementations={
            "mamba_ssm": Implementation(
                "mamba_ssm", functools.partial(_library_obstacle, "mamba_ssm")
            ),
            "fla": Implementation("fla", functools.partial(_library_obstacle, "fla")),
            "reference": REFERENCE,
        },
    ),
)
