"""Rotary position embedding with optional normalisation of each head: contract, gradients,
registration.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mtrain_kernels.operators import differentiable, float_obstacle, operator
from mtrain_kernels.registry import WITH_CPU, Case, Cost, Model, Op, pick
from mtrain_kernels.rope import cpu, reference
from mtrain_kernels.runtime import GRID

WIDEST = 1024
PLAIN: dict[str, Any] = {"cpu": cpu, "reference": reference}
"""Implementations in plain torch."""


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
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Apply `rotate` to queries and to keys, each head RMS-normalised before if there are weights.

    `q` [..., s, n, d] and `k` [..., s, g, d]; `q_weight` and `k_weight` [d], both or neither. See
    `rotate`.
    """
    options: dict[str, Any] = {"positions": positions, "interleaved": interleaved, "eps": eps}
    options |= {"zero_centered": zero_centered, "impl": impl}
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
    impl: str = "auto",
) -> Tensor:
    """Turn pair i of the first r elements of each head by the angle of table entry i of the
    token's position.

    `x` [s, n, d] or [b, s, n, d] in any strides, which a dense x hands to the result; `cos` and
    `sin` [p, r/2]; `positions` int [s] or [b, s]; `weight` [d] normalises each head first; all as
    in `reference.rotate`, in fp32, fp16 or bf16 each. x and weight get gradients, the tables do
    not. A position outside of the table is an error of the reference and gives no number under
    triton. `impl` is `reference`, `cpu`, `triton` or `auto`. Raises `ValueError` where shapes do
    not fit or a table wants a gradient, `Unavailable` where the named implementation cannot run.
    """
    reference.require(x, cos, sin, positions, weight)
    if cos.requires_grad or sin.requires_grad:
        raise ValueError("the tables of cosines and sines get no gradient; detach them")
    for other in (cos, sin, positions, weight):
        if other is not None and other.device != x.device:
            raise ValueError(
                f"x is on {x.device}, but a table, the positions or the weight on {other.device}"
            )
    name = pick("rope", impl, x.device, _obstacle(x, cos, sin, weight))
    if name != "triton":
        return PLAIN[name].rotate(
            x, cos, sin, positions=positions, interleaved=interleaved, weight=weight, eps=eps,
            zero_centered=zero_centered,
        )  # fmt: skip
    batched = x if x.ndim == 4 else x[None]
    numbers = None if positions is None else positions.expand(batched.shape[:2])
    y = _rope(batched, weight, cos, sin, numbers, interleaved, eps, zero_centered, False)
    return y if x.ndim == 4 else y[0]


def _obstacle(x: Tensor, *others: Tensor | None) -> str | None:
    if x.shape[-1] > WIDEST:
        return f"a head of {x.shape[-1]} elements is wider than {WIDEST}"
    if x.ndim == 4 and x.shape[0] > GRID:
        return f"a batch of {x.shape[0]} is larger than {GRID}"
    return float_obstacle(x, *others)


@operator("rope", shapes=lambda x: torch.empty_like(x))
def _rope(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    interleaved: bool,
    eps: float,
    zero_centered: bool,
    backward: bool,
) -> Tensor:
    from mtrain_kernels.rope import triton

    return triton.forward(x, weight, cos, sin, positions, interleaved, eps, zero_centered, backward)


@operator(
    "rope_norm_backward",
    shapes=lambda x, weight: (torch.empty_like(x), weight.new_empty(weight.shape)),
)
def _rope_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    interleaved: bool,
    eps: float,
    zero_centered: bool,
) -> tuple[Tensor, Tensor]:
    from mtrain_kernels.rope import triton

    return triton.backward(dy, x, weight, cos, sin, positions, interleaved, eps, zero_centered)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, cos, sin, positions, *ctx.options = inputs
    # A rotation is linear: its gradient needs the angles, and x only where a norm precedes it.
    ctx.save_for_backward(None if weight is None else x, weight, cos, sin, positions)


def _gradients(ctx: Any, dy: Tensor) -> dict[str, Any]:
    x, weight, cos, sin, positions = ctx.saved_tensors
    interleaved, eps, zero_centered, backward = ctx.options
    if weight is None:
        # The gradient of the backward turns forward again.
        dx = _rope(dy, None, cos, sin, positions, interleaved, eps, zero_centered, not backward)
        return {"x": dx}
    dx, dweight = _rope_norm_backward(
        dy, x, weight, cos, sin, positions, interleaved, eps, zero_centered
    )
    return {"x": dx, "weight": dweight}


differentiable(_rope, save=_save, gradients=_gradients)


# heads, groups and width of Qwen3-Next's attention, of which a quarter turns
PARTIAL = (16, 2, 256)


def _launch(model: Model) -> None:
    from mtrain_kernels.rope import packed_triton, triton

    x = torch.empty(
        (1, model.tokens, model.heads, model.head_dim), dtype=torch.bfloat16, device="meta"
    )
    table = torch.empty((model.tokens, model.rope_dim // 2), dtype=torch.float32, device="meta")
    positions = torch.empty((1, model.tokens), dtype=torch.int64, device="meta")
    triton.forward(x, None, table, table, positions, True, 0.0, False, False)
    for at, interleaved in ((None, False), (positions, True)):
        triton.forward(x, x[0, 0, 0], table, table, at, interleaved, 1e-6, False, False)
        triton.backward(x, x, x[0, 0, 0], table, table, at, interleaved, 1e-6, False)
    sizes = (model.heads, model.kv_heads, model.head_dim)
    part = table.new_empty(model.tokens, PARTIAL[2] // 8)
    weight = x.new_empty(PARTIAL[2])
    for (heads, groups, width), angles, w in (
        (sizes, table, None),
        (sizes, table, x[0, 0, 0]),
        (PARTIAL, part, weight),
    ):
        packed = x.new_empty(model.tokens, 1, (heads + 2 * groups) * width)
        given = (
            w,
            w,
            angles,
            angles,
            packed_triton.Packing(heads, groups, True, False, 1e-6, False),
        )
        q, k, v = packed_triton.forward(packed, *given)
        packed_triton.backward(q, k, v, packed, *given)
    triton.backward(q[None, :, 0], q[None, :, 0], weight, part, part, None, False, 1e-6, False)


def _keys(model: Model) -> int:
    """Return MLA turns a part that is split off each query, and one key for all heads."""
    return model.kv_heads if model.rope_dim == model.head_dim else 1


def _case(name: str, norm: bool) -> Case:
    def make(model: Model, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        def leaf(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=dtype).requires_grad_()

        angles = torch.outer(
            torch.arange(model.tokens, device=device),
            5e5 ** (-torch.arange(model.rope_dim // 2, device=device) * 2 / model.rope_dim),
        )
        inputs = {
            "q": leaf(1, model.tokens, model.heads, model.rope_dim),
            "k": leaf(1, model.tokens, _keys(model), model.rope_dim),
            "cos": angles.cos(),
            "sin": angles.sin(),
        }
        if norm:
            inputs |= {"q_weight": leaf(model.rope_dim), "k_weight": leaf(model.rope_dim)}
        return inputs

    def moves(times: int) -> Any:
        def cost(model: Model) -> Cost:
            heads = model.tokens * (model.heads + _keys(model)) * model.rope_dim
            return Cost(bytes=2 * times * heads + 4 * model.tokens * model.rope_dim)

        return cost

    return Case(
        name,
        make,
        lambda inputs, impl: rope(**inputs, impl=impl),
        forward=moves(2),
        backward=moves(3 if norm else 2),
        applies=lambda model: not norm or model.rope_dim == model.head_dim,
        rivals={} if norm else {"liger": _liger},
    )


def _liger(inputs: dict[str, Any]) -> Any:
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    q, k = (inputs[name].detach().transpose(1, 2).requires_grad_() for name in ("q", "k"))
    cos, sin = (torch.cat((inputs[name],) * 2, dim=-1)[None].to(q.dtype) for name in ("cos", "sin"))
    return lambda: liger_rotary_pos_emb(q, k, cos, sin)


def _packed_case() -> Case:
    def make(model: Model, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        row = (model.heads + 2 * model.kv_heads) * model.head_dim
        found = _CASES[0].make(model, device, dtype)
        weights = [
            torch.randn(model.head_dim, device=device, dtype=dtype).requires_grad_()
            for _ in range(2)
        ]
        given: dict[str, Any] = {
            "qkv": torch.randn((model.tokens, 1, row), device=device, dtype=dtype).requires_grad_()
        }
        given |= {
            "cos": found["cos"],
            "sin": found["sin"],
            "heads": model.heads,
            "groups": model.kv_heads,
        }
        return given | {"q_weight": weights[0], "k_weight": weights[1]}

    def call(inputs: dict[str, Any], impl: str) -> Any:
        from mtrain_kernels.rope.packed import rotate_packed

        return rotate_packed(**inputs, impl=impl)

    def moves(times: int) -> Any:
        def cost(model: Model) -> Cost:
            row = (model.heads + 2 * model.kv_heads) * model.head_dim
            return Cost(bytes=2 * times * model.tokens * row + 4 * model.tokens * model.rope_dim)

        return cost

    return Case(
        "rope_packed",
        make,
        call,
        forward=moves(2),
        backward=moves(3),
        applies=lambda model: model.rope_dim == model.head_dim,
    )


_CASES = (_case("rope", False), _case("rope_qk_norm", True))
OPS = (Op("rope", cases=(*_CASES, _packed_case()), launch=_launch, implementations=WITH_CPU),)
