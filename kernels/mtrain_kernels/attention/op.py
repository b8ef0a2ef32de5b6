"""Softmax attention over the kernels of others: contract, choice with its reasons, registration."""

from __future__ import annotations

import functools
import logging
import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtrain_kernels.attention import backends, cpu, flash, reference, roundings
from mtrain_kernels.attention.backends import RULES, Call, device_of_call
from mtrain_kernels.attention.seen import Seen
from mtrain_kernels.registry import Case, Cost, Implementation, Model, Op, Unavailable
from mtrain_kernels.runtime import GRID

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Explanation:
    """The backend that a call takes (`chosen`), why (`reason`), and the obstacles of those before
    it (`rejected`).
    """

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
    """Compute `softmax(scale * q k^T) v` over the keys that each query sees, by the backend that
    `impl` names or `auto`.

    `q` [b, n, s, d], `k` [b, g, t, d], `v` [b, g, t, e] with n a multiple of g, `sink` [n],
    `softcap`, `scale` and `mask` as in `reference.attention`; the result is [b, n, s, e]. `window`
    (left, right) hides keys more than left before or right after the query, negative numbers
    nothing. `cu_seqlens` [m + 1] are the edges of m sequences that lie one behind the other in a
    batch of one and do not see each other; `max_seqlen` is the longest one's length, as a number on
    the host (without it kernels reckon with t). `causal`, `window` and packed sequences need s ==
    t, and `mask` stands alone.

    Raises `ValueError` where arguments do not fit, `Unavailable` where the named backend cannot
    run. `auto` takes the first of flash3, cudnn, cpu, flash, triton, efficient, math and reference
    that can, and efficient before triton where it needs no mask; `explain` says which and why.
    """
    call = _call(q, k, v, causal, window, mask, sink, softcap, dropout_p, cu_seqlens)
    name = _backend(tuple(call), impl, _refusals(q, k, v, call))
    if name == "flash3":
        return backends.by_flash3(q, k, v, call, cu_seqlens, max_seqlen, scale)
    if name == "flash" and call.device == "cuda" and not call.dense:
        return backends.by_varlen(q, k, v, call, cu_seqlens, max_seqlen, scale)
    if name == "cpu":
        return cpu.attention(q, k, v, scale)
    if name == "triton":
        seen = Seen.of(call.keys, call.window, cu_seqlens)
        return flash.attention(q, k, v, seen=seen, sink=sink, softcap=softcap, scale=scale)
    # A mask of all pairs, which takes longer than a small attention, only for those that need it.
    if name == "reference" or call.window != (-1, 0) or not call.dense:
        mask = backends.seen(call, mask, cu_seqlens, q.device)
    if name == "reference":
        return reference.attention(
            q, k, v, mask=mask, sink=sink, scale=scale, softcap=softcap, dropout_p=dropout_p
        )
    return backends.by_torch(name, q, k, v, call, mask, sink, scale)


def fuses_parts(q: Tensor, v: Tensor, *, dropout_p: float = 0.0, impl: str = "auto") -> bool:
    """Return whether `flash` attends to parts of the keys, or of queries, for ranks that share a
    sequence.

    That is where `impl` is `triton`, or `auto` may take it. Raises `Unavailable` where it is named
    and cannot run.
    """
    if impl not in ("auto", "triton"):
        return False
    call = backends.describe(q, v, v, (-1, -1), False, False, 0.0, dropout_p, False)
    why = "; ".join((*RULES["triton"](call), *_too_many(q)))
    if why and impl == "triton":
        raise Unavailable(f"attention: triton cannot run: {why}")
    return not (why or (impl == "auto" and backends.unwanted("triton", call)))


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
    """Return the backend that `attention` takes for the same arguments, and the reason for each one
    it passes over.

    Raises the errors of `attention`.
    """
    call = _call(q, k, v, causal, window, mask, sink, softcap, dropout_p, cu_seqlens)
    return _decide(call, impl, _refusals(q, k, v, call))


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
    if window is not None and len(window) != 2:
        raise ValueError(
            f"window {window} must be how many keys are seen to the left and to the right"
        )
    # All negative limits mean the same and become -1, since decisions are cached by the call.
    left, right = (-1, -1) if window is None else (max(window[0], -1), max(window[1], -1))
    limits = (left, 0 if causal else right)
    if mask is not None and (limits != (-1, -1) or cu_seqlens is not None):
        raise ValueError(
            "a mask says all that is seen: give no window and no packed sequences with it"
        )
    if (limits != (-1, -1) or cu_seqlens is not None) and q.shape[2] != k.shape[2]:
        raise ValueError(
            f"windows and packed sequences need as many queries as keys, not {q.shape[2]} and"
            f" {k.shape[2]}"
        )
    if cu_seqlens is not None and (
        q.shape[0] != 1 or cu_seqlens.ndim != 1 or cu_seqlens.is_floating_point()
    ):
        raise ValueError(
            f"packed sequences need a batch of one, not {q.shape[0]}, and integers as their edges"
        )
    if any(
        other is not None and other.device != q.device for other in (k, v, mask, sink, cu_seqlens)
    ):
        raise ValueError(f"all tensors must be on {q.device}, as q")
    if q.dtype != k.dtype or q.dtype != v.dtype or not q.is_floating_point():
        raise ValueError(
            f"q {q.dtype}, k {k.dtype} and v {v.dtype} must have one dtype, a floating one"
        )
    if sink is not None and sink.shape != q.shape[1:2]:
        raise ValueError(
            f"sink {tuple(sink.shape)} must be ({q.shape[1]},), one logit for each head"
        )
    if not (softcap >= 0 and math.isfinite(softcap)):
        raise ValueError(f"softcap {softcap} must not be negative, infinite or no number")
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p {dropout_p} must lie in [0, 1]")
    packed = cu_seqlens is not None
    return backends.describe(
        q, k, v, limits, mask is not None, sink is not None, softcap, dropout_p, packed
    )


def _too_many(q: Tensor) -> tuple[str, ...]:
    """Return why the Triton kernels cannot take so many rows and heads, which are the second axis
    of a grid.
    """
    heads = q.shape[0] * q.shape[1]
    return (
        (f"takes up to {GRID} heads in all rows of a batch, not {heads}",) if heads > GRID else ()
    )


def _refusals(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[tuple[str, str], ...]:
    """Return (backend, reason) for obstacles that the description of a call does not show."""
    found = [*_torch_refusals(q, k, v, call), *(("triton", why) for why in _too_many(q))]
    if torch.compiler.is_compiling():
        found.append(("cpu", "a compiler fuses the definition better"))
    return tuple(found)


def _torch_refusals(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[tuple[str, str], ...]:
    """Return torch's own reasons against its fused kernels for these tensors, in a call that they
    know without a mask.
    """
    if call.device != "cuda" or not call.dense or call.sink or torch.compiler.is_compiling():
        return ()
    # torch decides by the same comparison. Asking it takes the host longer than attention takes a
    # GPU, because its reasons are warnings.
    key = (
        call,
        *(x.stride() for x in (q, k, v)),
        *(x.requires_grad for x in (q, k, v)),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
    )
    if key not in _torch_said:
        if len(_torch_said) >= MOST_CALLS:
            _torch_said.clear()
        _torch_said[key] = _asked_of_torch(q, k, v, call)
    return _torch_said[key]


MOST_CALLS = 1024
_torch_said: dict[tuple[Any, ...], tuple[tuple[str, str], ...]] = {}


def _asked_of_torch(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[tuple[str, str], ...]:
    causal = call.window[1] == 0
    grouped = call.heads != call.kv_heads
    params = torch.backends.cuda.SDPAParams(q, k, v, None, call.dropout_p, causal, grouped)
    found = []
    for name, takes in (
        ("cudnn", torch.backends.cuda.can_use_cudnn_attention),
        ("flash", torch.backends.cuda.can_use_flash_attention),
    ):
        # torch reports its reasons only as warnings, which the default filter shows once.
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if v.shape[-1] == q.shape[-1] and not takes(params, True):
                found.append(
                    (name, "torch says: " + ("; ".join(str(w.message) for w in said) or "no"))
                )
    return tuple(found)


# The decision depends on descriptions, not on values, and the compiler must not trace it.
@torch.compiler.assume_constant_result
def _backend(call: tuple[Any, ...], impl: str, refusals: tuple[tuple[str, str], ...]) -> str:
    return _decide(Call(*call), impl, refusals).chosen


@functools.lru_cache(maxsize=1024)
def _decide(call: Call, impl: str, refusals: tuple[tuple[str, str], ...] = ()) -> Explanation:
    """Return the backend for a call, the same for the same call; said once in the log for each kind
    of call.
    """
    if impl not in (*RULES, "auto"):
        raise ValueError(
            f"attention has no backend {impl!r}; choose one of auto, {', '.join(RULES)}"
        )
    against = {name: list(RULES[name](call)) for name in backends.order(call)}
    for name, reason in refusals:
        against[name].append(reason)
    reasons = {name: "; ".join(found) for name, found in against.items()}
    if impl != "auto":
        if reasons[impl]:
            raise Unavailable(f"attention: {impl} cannot run: {reasons[impl]}")
        return Explanation(impl, "named", {})
    reasons = {
        name: reason or backends.unwanted(name, call) or "" for name, reason in reasons.items()
    }
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

    return {
        "q": leaf(model.heads),
        "k": leaf(model.kv_heads),
        "v": leaf(model.kv_heads),
        "causal": True,
    }


def _launch(model: Model) -> None:
    from mtrain_kernels.attention import backward_triton, triton

    def empty(heads: int, width: int) -> Tensor:
        return triton.token_major(
            torch.empty(1, heads, model.tokens, 0, dtype=torch.bfloat16, device="meta"), width
        )

    edges = torch.empty(9, dtype=torch.int32, device="meta")
    causal = Seen(right=0)
    packed = Seen.of(model.tokens, (-1, 0), edges)
    n = model.heads
    g = model.kv_heads
    d = model.head_dim
    calls: list[tuple[int, int, Seen, bool, float]] = [(d, d, causal, False, 0.0)]
    if d == 192:  # MLA
        calls = [(d, 128, packed, False, 0.0)]
    elif d == 128:
        calls.append((64, 64, Seen(127, 0), True, 0.0))
    for d, e, seen, sinks, softcap in calls:
        q = empty(n, d)
        k = empty(g, d)
        v = empty(g, e)
        sink = torch.empty(n, device="meta") if sinks else None
        out, lse = triton.forward(q, k, v, sink, seen, d**-0.5, softcap, False)
        backward_triton.backward(out, None, q, k, v, out, lse, seen, d**-0.5, softcap)


def _make_capped(model: Model, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Make inputs with windows, sinks and caps at once, in packed documents, which no kernel of
    torch supports.
    """
    edges = torch.tensor(
        [0, model.tokens // 3, model.tokens // 2, model.tokens], dtype=torch.int32
    ).to(device)
    sink = torch.zeros(model.heads, device=device, dtype=dtype).requires_grad_()
    return _make(model, device, dtype) | {
        "window": (model.tokens // 4, 0),
        "softcap": 50.0,
        "sink": sink,
        "cu_seqlens": edges,
    }


def _cost(products: float, passes: int) -> Any:
    """Return the cost of `products` causal products of a forward pass, and `passes` over q, k, v
    and the output.
    """

    def cost(m: Model) -> Cost:
        rows = 2 * m.heads + 2 * m.kv_heads
        # one product is 2 s t d, of which half is seen
        flops = int(products * m.heads * m.tokens**2 * m.head_dim)
        return Cost(bytes=passes * 2 * m.tokens * m.head_dim * rows, flops=flops)

    return cost


def _capped_cost(products: float, passes: int) -> Any:
    """Return the cost of the pairs of `_make_capped` that are seen."""

    def cost(m: Model) -> Cost:
        t = m.tokens
        w = m.tokens // 4 + 1
        lengths = (t // 3, t // 2 - t // 3, t - t // 2)
        # Rows of a causal window see min(n, w) keys each, less the triangle that the first rows
        # lack.
        pairs = sum(n * min(n, w) - min(n, w) * (min(n, w) - 1) // 2 for n in lengths)
        whole = _cost(products, passes)(m)
        return Cost(bytes=whole.bytes, flops=int(products * 2 * m.heads * m.head_dim * pairs))

    return cost


def _device_obstacle(name: str) -> Any:
    """Return why a backend cannot run on a device, whatever the call."""

    def obstacle(device: torch.device) -> str | None:
        # The call that most backends take: they can only refuse the device.
        plain = Call(
            *device_of_call(device),
            torch.bfloat16,
            1,
            1,
            1,
            1,
            1,
            64,
            64,
            (-1, 0),
            False,
            False,
            0.0,
            0.0,
            False,
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
                tolerance=roundings.limits,
            ),
            Case(
                "attention_capped",
                _make_capped,
                lambda inputs, impl: attention(**inputs, impl=impl),
                forward=_capped_cost(2, 1),
                backward=_capped_cost(5, 2),
                tolerance=roundings.limits,
            ),
        ),
        launch=_launch,
        aot_models=("llama3_8b", "deepseek_v3"),
        implementations={name: Implementation(name, _device_obstacle(name)) for name in RULES},
    ),
)
