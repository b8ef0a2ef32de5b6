"""Softmax attention over the kernels of others: contract, choice with its reasons, registration."""

from __future__ import annotations

import functools
import logging
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtrain_kernels.attention import backends, reference
from mtrain_kernels.attention.backends import RULES, Call
from mtrain_kernels.registry import Case, Cost, Implementation, Model, Op, Unavailable

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Explanation:
    """Which backend a call takes (`chosen`), why (`reason`), and what speaks against those before it (`rejected`)."""

    chosen: str
    reason: str
    rejected: dict[str, str]

    def __str__(self) -> str:
        refusals = [f"  not {name}: {why}" for name, why in self.rejected.items()]
        return "\n".join([f"attention by {self.chosen}: {self.reason}", *refusals])


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    mask: Tensor | None = None,
    sink: Tensor | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    dropout_p: float = 0.0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """`softmax(scale * q k^T) v` over the keys that each query sees, by the backend that `impl` names or `auto`.

    `q` [b, n, s, d], `k` [b, g, t, d], `v` [b, g, t, e] with n a multiple of g, `sink` [n], `softcap`, `scale` and
    `mask` as in `reference.attention`; the result is [b, n, s, e]. `window` (left, right) hides keys more than left
    before or right after the query, negative numbers nothing. `cu_seqlens` [m + 1] are the edges of m sequences that
    lie one behind the other in a batch of one and do not see each other; `max_seqlen` is the longest one's length,
    as a number on the host (without it kernels reckon with t). `causal`, `window` and packed sequences need s == t,
    and `mask` stands alone.

    Raises `ValueError` where arguments do not fit, `Unavailable` where the named backend cannot run. `auto` takes
    the first of flash3, cudnn, flash, efficient, math and reference that can; `explain` says which and why.
    """
    call = _call(q, k, v, causal, window, mask, sink, softcap, dropout_p, cu_seqlens)
    name = _backend(tuple(call), impl, _torch_refusals(q, k, v, call))
    if name == "flash3":
        return backends.by_flash3(q, k, v, call, cu_seqlens, max_seqlen, scale)
    if name == "flash" and call.device == "cuda" and not call.dense:
        return backends.by_varlen(q, k, v, call, cu_seqlens, max_seqlen, scale)
    seen = backends.seen(call, mask, cu_seqlens, q.device)
    if name == "reference":
        return reference.attention(q, k, v, mask=seen, sink=sink, scale=scale, softcap=softcap, dropout_p=dropout_p)
    return backends.by_torch(name, q, k, v, call, seen, sink, scale)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    mask: Tensor | None = None,
    sink: Tensor | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    dropout_p: float = 0.0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    impl: str = "auto",
) -> Explanation:
    """Which backend `attention` takes for the same arguments, and the reason for each one it passes over.

    Raises what `attention` would raise.
    """
    call = _call(q, k, v, causal, window, mask, sink, softcap, dropout_p, cu_seqlens)
    return _decide(call, impl, _torch_refusals(q, k, v, call))


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: tuple[int, int] | None,
    mask: Tensor | None,
    sink: Tensor | None,
    softcap: float,
    dropout_p: float,
    cu_seqlens: Tensor | None,
) -> Call:
    reference.require_shapes(q, k, v, causal, mask)
    left, right = (-1, -1) if window is None else (max(window[0], -1), max(window[1], -1))
    limits = (left, 0 if causal else right)
    if mask is not None and (limits != (-1, -1) or cu_seqlens is not None):
        raise ValueError("a mask says all that is seen: give no window and no packed sequences beside it")
    if (limits != (-1, -1) or cu_seqlens is not None) and q.shape[2] != k.shape[2]:
        raise ValueError(
            f"windows and packed sequences need as many queries as keys, not {q.shape[2]} and {k.shape[2]}"
        )
    if cu_seqlens is not None and (q.shape[0] != 1 or cu_seqlens.ndim != 1 or cu_seqlens.is_floating_point()):
        raise ValueError(f"packed sequences need a batch of one, not {q.shape[0]}, and integers as their edges")
    if any(other is not None and other.device != q.device for other in (k, v, mask, sink, cu_seqlens)):
        raise ValueError(f"all tensors must be on {q.device}, as q")
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise ValueError(f"q {q.dtype}, k {k.dtype} and v {v.dtype} must have one dtype")
    if sink is not None and sink.shape != q.shape[1:2]:
        raise ValueError(f"sink {tuple(sink.shape)} must be ({q.shape[1]},), one logit for each head")
    if softcap < 0:
        raise ValueError(f"softcap {softcap} must not be negative")
    packed = cu_seqlens is not None
    return backends.describe(q, k, v, limits, mask is not None, sink is not None, softcap, dropout_p, packed)


def _torch_refusals(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[tuple[str, str], ...]:
    """What torch itself says against its fused kernels for these tensors, in a call that they know without a mask."""
    if call.device != "cuda" or not call.dense or call.sink or torch.compiler.is_compiling():
        return ()
    causal, grouped = call.window[1] == 0, call.heads != call.kv_heads
    params = torch.backends.cuda.SDPAParams(q, k, v, None, call.dropout_p, causal, grouped)
    found = []
    for name, takes in (
        ("cudnn", torch.backends.cuda.can_use_cudnn_attention),
        ("flash", torch.backends.cuda.can_use_flash_attention),
    ):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if v.shape[-1] == q.shape[-1] and not takes(params, True):
                found.append((name, "torch says: " + ("; ".join(str(w.message) for w in said) or "no")))
    return tuple(found)


@torch.compiler.assume_constant_result
def _backend(call: tuple[Any, ...], impl: str, refusals: tuple[tuple[str, str], ...]) -> str:
    return _decide(Call(*call), impl, refusals).chosen


@functools.lru_cache(maxsize=1024)
def _decide(call: Call, impl: str, refusals: tuple[tuple[str, str], ...] = ()) -> Explanation:
    """The backend for a call, the same for the same call; said once in the log for each kind of call."""
    if impl not in (*RULES, "auto"):
        raise ValueError(f"attention has no backend {impl!r}; choose one of auto, {', '.join(RULES)}")
    against = {name: list(rules(call)) for name, rules in RULES.items()}
    for name, reason in refusals:
        against[name].append(reason)
    reasons = {name: "; ".join(found) for name, found in against.items()}
    if impl != "auto":
        if reasons[impl]:
            raise Unavailable(f"attention: {impl} cannot run: {reasons[impl]}")
        return Explanation(impl, "named", {})
    chosen = next(name for name, reason in reasons.items() if not reason)
    before = list(reasons)[: list(reasons).index(chosen)]
    why = "the first that can, of " + ", ".join(reasons)
    found = Explanation(chosen, why, {name: reasons[name] for name in before})
    log.info("%s", found)
    return found


def _make(model: Model, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    def leaf(heads: int) -> Tensor:
        shape = (1, heads, model.tokens, model.head_dim)
        return torch.randn(shape, device=device, dtype=dtype).requires_grad_()

    return {"q": leaf(model.heads), "k": leaf(model.kv_heads), "v": leaf(model.kv_heads), "causal": True}


def _cost(products: float, passes: int) -> Any:
    """So many of the two products of a forward pass, causal, and so many passes over q, k, v and the output."""

    def cost(m: Model) -> Cost:
        rows = 2 * m.heads + 2 * m.kv_heads
        flops = int(products * m.heads * m.tokens**2 * m.head_dim)  # one product is 2 s t d, of which half is seen
        return Cost(bytes=passes * 2 * m.tokens * m.head_dim * rows, flops=flops)

    return cost


def _device_obstacle(name: str) -> Any:
    """Why a backend cannot run on a device, whatever the call."""

    def obstacle(device: torch.device) -> str | None:
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        plain = Call(
            device.type, capability, torch.bfloat16, 1, 1, 1, 1, 64, 64, (-1, 0), False, False, 0.0, 0.0, False
        )
        return "; ".join(RULES[name](plain)) or None

    return obstacle


OPS = (
    Op(
        "attention",
        cases=(
            Case(
                "attention",
                _make,
                lambda inputs, impl: attention(**inputs, impl=impl),
                forward=_cost(2, 1),
                backward=_cost(5, 2),
            ),
        ),
        launch=lambda model: None,
        implementations={name: Implementation(name, _device_obstacle(name)) for name in RULES},
    ),
)
