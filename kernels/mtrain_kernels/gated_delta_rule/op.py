"""The gated delta rule: contract, gradients that keep only the inputs, and the library that has
kernels for it.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from mtrain_kernels.gated_delta_rule import reference
from mtrain_kernels.registry import REFERENCE, Case, Cost, Implementation, Model, Op, pick

HALF = (torch.float16, torch.bfloat16)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    l2norm: bool = False,
    scale: float | None = None,
    state: Tensor | None = None,
    segments: Tensor | None = None,
    edges: Tensor | None = None,
    chunk: int = 64,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return the recurrence `S = exp(g_i) S`, `S_i = S + beta_i k_i (v_i - k_i^T S)^T`, `y_i =
    scale S_i^T q_i`.

    Arguments and results are those of `reference.gated_delta_rule`: `q` and `k` [n, t, h, d], `v`
    [n, t, w, e], `g` and `beta` [n, t, w], `state` [n, w, d, e], `segments` [n, t]; y has v's shape
    and dtype, the last state is fp32. `edges` may say of one row of `segments` where its runs
    begin, none empty, and that the last ends at t: integers that are worked out otherwise for fla,
    which waits for the device. The same tensor in all layers is best. `impl` is `fla` (a library,
    on CUDA), `reference`, which computes chunks of `chunk` times and keeps nothing but its inputs
    for the backward, or `auto`. Raises `ValueError` where the shapes do not fit, `Unavailable`
    where the named one cannot run.
    """
    reference.require_gated_delta_rule(q, k, v, g, beta, state, segments)
    if edges is not None and (segments is None or edges.ndim != 1 or edges.is_floating_point()):
        raise ValueError("edges are integers in a row, given with the segments that they bound")
    if pick("gated_delta_rule", impl, v.device, _call_obstacle(v, segments)) == "fla":
        if edges is None and segments is not None:
            edges = _edges(segments[0])
        return by_fla(q, k, v, g, beta, l2norm=l2norm, scale=scale, state=state, edges=edges)
    options: dict[str, Any] = {"l2norm": l2norm, "scale": scale, "chunk": chunk}
    if not v.shape[1]:  # the last state is the first one
        return reference.gated_delta_rule(
            q, k, v, g, beta, state=state, segments=segments, **options
        )
    found: tuple[Tensor, Tensor] = _Chunked.apply(q, k, v, g, beta, state, segments, options)
    return found


class _Chunked(torch.autograd.Function):
    """`reference.gated_delta_rule`, computed once more in the backward: autograd would keep every
    chunk's squares.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        *inputs, state, segments, options = given
        ctx.save_for_backward(*inputs, state, segments)
        ctx.options = options
        return reference.gated_delta_rule(*inputs, state=state, segments=segments, **options)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_y: Tensor, d_state: Tensor) -> tuple[Any, ...]:
        *inputs, segments = ctx.saved_tensors
        needed = ctx.needs_input_grad[: len(inputs)]
        leaves = [
            None if x is None else x.detach().requires_grad_(wanted)
            for x, wanted in zip(inputs, needed, strict=True)
        ]
        with torch.enable_grad():
            out = reference.gated_delta_rule(
                *leaves[:-1],  # type: ignore[arg-type]
                state=leaves[-1],
                segments=segments,
                **ctx.options,
            )
            wanted = [x for x in leaves if x is not None and x.requires_grad]
            # a state knows no query
            ends = [(x, d) for x, d in zip(out, (d_y, d_state), strict=True) if x.requires_grad]
            found = iter(torch.autograd.grad([x for x, _ in ends], wanted, [d for _, d in ends]))
        made = (next(found) if x is not None and x.requires_grad else None for x in leaves)
        return (*made, None, None)


def _call_obstacle(v: Tensor, segments: Tensor | None) -> str | None:
    """Return why the library cannot take this call, whatever the device."""
    if v.dtype not in HALF:
        return f"fla takes fp16 and bf16, not {v.dtype}"
    if segments is not None and v.shape[0] > 1:
        return "fla takes the edges of sequences packed into one row, and there are several rows"
    return None


def _library_obstacle(device: torch.device) -> str | None:
    if importlib.util.find_spec("fla") is None:
        return "fla (flash-linear-attention) is not installed"
    if device.type == "cuda":
        return None
    return f"fla runs on CUDA only, the tensors are on {device.type}"


def by_fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    l2norm: bool,
    scale: float | None,
    state: Tensor | None,
    edges: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the rule by fla, with a query and a key for each head of v; of packed sequences it is
    told the edges.

    Its states are one for each sequence: a first one belongs to the first of them, and the last is
    that of the last.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    share = v.shape[2] // q.shape[2]
    if state is not None and edges is not None:
        rest = state.new_zeros(len(edges) - 2, *state.shape[1:])
        state = torch.cat([state, rest])
    y, last = chunk_gated_delta_rule(
        q.to(v.dtype).repeat_interleave(share, 2),
        k.to(v.dtype).repeat_interleave(share, 2),
        v,
        g=g.float(),
        beta=beta.to(v.dtype),
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        initial_state=None if state is None else state.float(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=l2norm,
        cu_seqlens=edges,
    )
    return y, last.float()[-v.shape[0] :]


def _edges(segments: Tensor) -> Tensor:
    """Return the starts of the runs of equal marks [t], and the end of the last: int64."""
    # `nonzero` waits for the device, which callers avoid by giving `edges`.
    begins = torch.nonzero(segments[1:] != segments[:-1]).flatten() + 1
    ends = segments.new_tensor([segments.shape[0]], dtype=torch.int64)
    return torch.cat([torch.zeros_like(ends), begins, ends])


# of Qwen3-Next, whose hidden size is 2048
HEAD = 128
KEY_HEADS = 16
VALUE_HEADS = 32


def _heads(model: Model) -> tuple[int, int]:
    return max(1, KEY_HEADS * model.hidden // 2048), max(2, VALUE_HEADS * model.hidden // 2048)


def _make(model: Model, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    keys, values = _heads(model)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(1, model.tokens, *shape, device=device, dtype=dtype).requires_grad_()

    return {
        "q": leaf(keys, HEAD),
        "k": leaf(keys, HEAD),
        "v": leaf(values, HEAD),
        "g": (-torch.rand(1, model.tokens, values, device=device)).requires_grad_(),
        "beta": torch.rand(1, model.tokens, values, device=device).to(dtype).requires_grad_(),
        "l2norm": True,
    }


def _cost(products: int, tensors: int, chunk: int = 64) -> Any:
    """Return bytes of q, k, v and y; products inside chunks and with the states."""

    def cost(m: Model) -> Cost:
        keys, values = _heads(m)
        moved = 2 * m.tokens * HEAD * (2 * keys + tensors * values)
        each = 2 * HEAD * (4 * chunk + 3 * HEAD)
        return Cost(bytes=moved, flops=products * m.tokens * values * each)

    return cost


OPS = (
    Op(
        "gated_delta_rule",
        cases=(
            Case(
                "gated_delta_rule",
                _make,
                lambda inputs, impl: gated_delta_rule(**inputs, impl=impl),
                forward=_cost(1, 2),
                backward=_cost(2, 4),
            ),
        ),
        launch=lambda model: None,
        implementations={
            "fla": Implementation("fla", _library_obstacle),
            "reference": REFERENCE,
        },
    ),
)
