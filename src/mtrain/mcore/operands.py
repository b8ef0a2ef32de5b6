"""Inputs of linear layers in FP8 that leave their norm or activation in FP8: no kernel of its own quantises them.

A norm hands its operand over on the tensor that it gives, which holds the same numbers in full. Where that tensor
does not reach the linear layer as it is, as when an MLP alone is computed again, the layer quantises it, to
the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import reduce_scatter_to_sequence_parallel_region
from mtrain_kernels.fp8_linear.op import Recipe
from mtrain_kernels.norm.operand import norm_quantized
from mtrain_kernels.quantize.op import Operand
from torch import Tensor

BLOCK = 128
"""Tokens that share a scale in an operand transposed."""


def taken(x: Tensor) -> Operand | None:
    """What a norm made of its result `x`, if it did, for the one linear layer behind: who keeps `x` keeps no more."""
    found: Operand | None = x.__dict__.pop("fp8_operand", None)
    return found


def feed(layer: Any) -> None:
    """Let the norms of a decoder layer, and the activation of its MLP, quantise for the linear layers behind them.

    That is where these take operands (`takes_operands`) and the kernels are Triton's. What a norm alone makes again
    stays as it is.
    """
    attention = layer.self_attention
    first = getattr(attention, "linear_qkv", None) or getattr(attention, "in_proj", None)
    _feed(layer.input_layernorm, first, layer.recompute_input_layernorm)
    _feed(layer.pre_mlp_layernorm, getattr(layer.mlp, "linear_fc1", None), layer.recompute_pre_mlp_layernorm)
    activation: Any = getattr(layer.mlp, "activation_func", None)
    last: Any = getattr(layer.mlp, "linear_fc2", None)
    swiglu = getattr(activation, "kind", None) == "swiglu" and activation.impl == "triton"
    if swiglu and _takes(last) and activation.config.use_te_activation_func:
        activation.left_to_linear, last.swiglu = True, activation.impl


def _takes(linear: Any) -> bool:
    return getattr(linear, "takes_operands", False) and linear.fp8 is not None


def _feed(norm: Any, linear: Any, again: bool) -> None:
    if _takes(linear) and not again and hasattr(norm, "feeds") and norm.impl == "triton":
        norm.feeds = linear.fp8, [linear.tp_group] if linear.sequence_parallel else []


def normed(norm: Any, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """A norm that feeds a linear layer, of `x` or its sum with `residual` [..., h], and that sum.

    One scale for a tensor is that of all ranks that have a part of its tokens.
    """
    recipe, groups = norm.feeds
    share = greatest([*groups, parallel_state.get_context_parallel_group()])
    more: dict[str, Any] = {"subtract_mean": norm.bias is not None, "zero_centered": norm.zero_centered}
    more |= {"format": recipe.forward, "layout": recipe.layout, "share": share, "impl": norm.impl}
    y, total, operand = norm_quantized(x, residual, norm.weight, norm.bias, norm.eps, **more)
    y.fp8_operand = operand  # type: ignore[attr-defined]
    return y, total


def greatest(groups: list[Any]) -> Any:
    """What makes the greatest value of a part that of all ranks of these groups, or None where each has one rank."""
    several = [group for group in groups if group.size() > 1]
    if not several:
        return None

    def of_all(amax: Tensor) -> Tensor:
        for group in several:
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=group)
        return amax

    return of_all


def may_gather(operand: Operand | None, recipe: Recipe) -> bool:
    """Whether parts of an operand of several ranks are the operand of the whole.

    They are with one scale, and where no block of tokens is of two ranks.
    """
    return operand is not None and (recipe.layout is None or operand.data.shape[0] % BLOCK == 0)


def gathered(x: Tensor, operand: Operand, group: Any) -> tuple[Tensor, Operand]:
    """What stands for `x` [s / ranks, ...] of all ranks in a graph, without numbers, and the operand of all.

    Forward and backward send eight bits an element and the scales.
    """
    # of the operand itself nothing is held: what is kept for the backward is what the norm keeps
    ranks, one, again = group.size(), operand.scale.ndim == 1, operand.transposed

    def transposed(*kept: Tensor | None) -> tuple[Tensor, Tensor]:
        data, scale = again(*kept)
        return _side_by_side(data, group, ranks), scale if one else _side_by_side(scale, group, ranks)

    scale = operand.scale if one else _all(operand.scale, group)
    whole = operand._replace(data=_all(operand.data, group), scale=scale, transposed=transposed)
    return _Whole.apply(x, group), whole


def _all(x: Tensor, group: Any) -> Tensor:
    """`x` [m, ...] of all ranks, one behind the other."""
    flat = x.contiguous().view(torch.uint8)
    found = flat.new_empty((group.size() * flat.shape[0], *flat.shape[1:]))
    torch.distributed.all_gather_into_tensor(found, flat, group=group)
    return found.view(x.dtype)


def _side_by_side(x: Tensor, group: Any, ranks: int) -> Tensor:
    """`x` [k, m] of all ranks as [k, ranks m]."""
    found = _all(x, group).view(torch.uint8)
    return found.view(ranks, x.shape[0], -1).transpose(0, 1).reshape(x.shape[0], -1).view(x.dtype)


class _Whole(torch.autograd.Function):
    """The place of a tensor of all ranks in a graph: each gets its part of the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.new_zeros(()).expand(group.size() * x.shape[0], *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_to_sequence_parallel_region(grad.contiguous(), group=ctx.group), None
