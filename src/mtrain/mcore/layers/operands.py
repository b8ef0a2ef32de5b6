"""Inputs of linear layers in FP8 that leave their norm or activation in FP8: no kernel of its own
quantises them.

A norm hands its operand over on the tensor that it gives, which holds the same numbers in full.
Where that tensor does not reach the linear layer as it is, as when only an MLP is computed again,
the layer quantises it, to the same bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import reduce_scatter_to_sequence_parallel_region
from mtrain_kernels.fp8_linear.op import Recipe
from mtrain_kernels.norm.operand import norm_quantized
from mtrain_kernels.quantize.op import Operand
from torch import Tensor

BLOCK = 128
"""Tokens that share a scale in an operand transposed."""


ATTENTION = ("linear_qkv", "in_proj", "linear_q_proj", "linear_q_down_proj", "linear_kv_down_proj")
"""Layers of an attention that read the norm in front of it."""
LATENT = {"q_layernorm": "linear_q_up_proj", "kv_layernorm": "linear_kv_up_proj"}
"""Norms within MLA, and the layers that read them."""


class Feeds(NamedTuple):
    """The linear layers that a norm quantises for."""

    recipe: Recipe
    """Recipe of low precision in which they multiply."""
    groups: list[Any]
    """The ranks that have parts of the tokens, apart from context parallelism."""
    readers: int
    """Number of these layers."""


def taken(x: Tensor) -> Operand | None:
    """Return the operand that a norm made of its result `x`, if it did, for the next of the layers
    that read it.

    When all have taken it, who keeps `x` keeps no more. `x` may be a view of that result, row for
    row.
    """
    # Reshapes between the norm and its reader make views; the operand hangs on the norm's result.
    whole = x._base
    if (
        whole is None
        or x.numel() != whole.numel()
        or x.shape[-1] != whole.shape[-1]
        or not x.is_contiguous()
    ):
        whole = x
    # There is an entry for each reader, so the last one takes the operand off the tensor.
    waiting: list[Operand] = whole.__dict__.get("fp8_operands", [])
    return waiting.pop() if waiting else None


def feed(layer: Any) -> None:
    """Let the norms of a decoder layer, and the activation of its MLP, quantise for the linear
    layers behind them.

    That is where these take operands (`takes_operands`) and the kernels are Triton's. What a norm
    makes again by itself stays as it is.
    """
    attention = layer.self_attention
    if not layer.recompute_input_layernorm:
        feed_norm(
            layer.input_layernorm,
            *(getattr(attention, name) for name in ATTENTION if hasattr(attention, name)),
        )
    for norm, reader in LATENT.items():
        if hasattr(attention, reader):
            feed_norm(getattr(attention, norm), getattr(attention, reader))
    if not layer.recompute_pre_mlp_layernorm and hasattr(layer.mlp, "linear_fc1"):
        feed_norm(layer.pre_mlp_layernorm, layer.mlp.linear_fc1)
    activation: Any = getattr(layer.mlp, "activation_func", None)
    last: Any = getattr(layer.mlp, "linear_fc2", None)
    swiglu = getattr(activation, "kind", None) == "swiglu" and activation.impl == "triton"
    if swiglu and _takes(last) and activation.config.use_te_activation_func:
        activation.left_to_linear = True
        last.swiglu = activation.impl


def feed_norm(norm: Any, *linears: Any) -> None:
    """Let a norm quantise for all linear layers after it, which share a tensor-parallel group."""
    if hasattr(norm, "feeds") and norm.impl == "triton" and linears and all(map(_takes, linears)):
        first = linears[0]
        groups = [first.tp_group] if first.sequence_parallel else []
        norm.feeds = Feeds(first.fp8, groups, len(linears))


def _takes(linear: Any) -> bool:
    return getattr(linear, "takes_operands", False) and linear.fp8 is not None


def normed(norm: Any, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return a norm that feeds linear layers, of `x` or its sum with `residual` [..., h], and that
    sum.

    One scale for a tensor is that of all ranks that have a part of its tokens.
    """
    recipe, groups, readers = norm.feeds
    share = greatest([*groups, parallel_state.get_context_parallel_group()])
    more: dict[str, Any] = {
        "subtract_mean": norm.bias is not None,
        "zero_centered": norm.zero_centered,
    }
    more |= {"format": recipe.forward, "layout": recipe.layout, "share": share, "impl": norm.impl}
    y, total, operand = norm_quantized(x, residual, norm.weight, norm.bias, norm.eps, **more)
    y.fp8_operands = [operand] * readers  # type: ignore[attr-defined]
    return y, total


def greatest(groups: list[Any]) -> Any:
    """Return a function that reduces a maximum over these groups; None if each has one rank."""
    several = [group for group in groups if group.size() > 1]
    if not several:
        return None

    def of_all(amax: Tensor) -> Tensor:
        for group in several:
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=group)
        return amax

    return of_all


def may_gather(operand: Operand | None, recipe: Recipe) -> bool:
    """Return whether parts of an operand of several ranks are the operand of the whole.

    They are with one scale, and where no block of tokens is of two ranks.
    """
    return operand is not None and (recipe.layout is None or operand.data.shape[0] % BLOCK == 0)


def gathered(x: Tensor, operand: Operand, group: Any) -> tuple[Tensor, Operand]:
    """Return a stand-in for `x` [s / ranks, ...] of all ranks in the graph, without numbers, and
    the gathered operand.

    Forward and backward send eight bits an element and the scales.
    """
    # The closure holds nothing of the operand: the backward keeps only the norm's saved tensors.
    ranks = group.size()
    one = operand.scale.ndim == 1
    # The weight gradient needs the transposed operand, which the backward gathers when it asks.
    again = operand.transposed

    def transposed(*kept: Tensor | None) -> tuple[Tensor, Tensor]:
        data, scale = again(*kept)
        if not one:
            scale = _side_by_side(scale, group, ranks)
        return _side_by_side(data, group, ranks), scale

    scale = operand.scale if one else _all(operand.scale, group)
    whole = operand._replace(data=_all(operand.data, group), scale=scale, transposed=transposed)
    return _Whole.apply(x, group), whole


def _all(x: Tensor, group: Any) -> Tensor:
    """Gather `x` [m, ...] of all ranks, one after the other."""
    # Not every backend knows FP8; bytes do for a gather.
    flat = x.contiguous().view(torch.uint8)
    found = flat.new_empty((group.size() * flat.shape[0], *flat.shape[1:]))
    torch.distributed.all_gather_into_tensor(found, flat, group=group)
    return found.view(x.dtype)


def _side_by_side(x: Tensor, group: Any, ranks: int) -> Tensor:
    """Gather `x` [k, m] of all ranks as [k, ranks m]."""
    found = _all(x, group).view(torch.uint8)
    return found.view(ranks, x.shape[0], -1).transpose(0, 1).reshape(x.shape[0], -1).view(x.dtype)


class _Whole(torch.autograd.Function):
    """A tensor's place in a graph on all ranks: each gets its part of their gradients' sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        # The product reads the operand. Autograd only needs the shape, which an expanded zero has
        # without memory.
        return x.new_zeros(()).expand(group.size() * x.shape[0], *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_to_sequence_parallel_region(grad.contiguous(), group=ctx.group), None
