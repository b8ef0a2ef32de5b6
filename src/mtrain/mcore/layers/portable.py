"""Portable layers for megatron-core's specs: plain torch, so they run wherever torch does, at any
tensor parallelism.

They stand where TransformerEngine's layers stand on a GPU. What they compute is defined in
`mtrain_kernels`, whose kernels compute it where `chosen` says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from mtrain_kernels.activation.op import activation
from mtrain_kernels.fp8_linear.op import Recipe, Shares, fp8_linear
from mtrain_kernels.linear import linear
from mtrain_kernels.norm.op import layer_norm, rms_norm
from torch import Tensor, nn
from torch.nn import functional as F

from mtrain.config.engine.kernels import BY_TORCH, ON_CPU
from mtrain.mcore.layers.linear import add_in_place, add_whole, adds_to_main_grad
from mtrain.mcore.layers.operands import Feeds, greatest, normed, taken

Init = Callable[[Tensor], Any]


@functools.cache
def chosen(layer: type, impl: str, **options: Any) -> type:
    """Return the layer computed by the implementation of its op that `impl` names: a class that
    specs can name.

    `options` are other attributes of the class.
    """
    names = {"__doc__": layer.__doc__, "__module__": layer.__module__}
    return type(layer.__name__, (layer,), {"impl": impl, **options, **names})


class Norm(nn.Module):
    """RMSNorm or LayerNorm, as `config.normalization` says, over the last axis of [...,
    hidden_size].

    Under sequence parallelism each tensor-parallel rank sees part of the tokens, so the parameters
    are marked for the all-reduce of their gradients in megatron-core's `finalize_model_grads`.
    """

    impl = "reference"
    feeds: Feeds | None = None
    """The linear layers behind, if this norm quantises for them."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        if config.normalization not in ("RMSNorm", "LayerNorm"):
            raise ValueError(
                f"normalization {config.normalization!r} is neither RMSNorm nor LayerNorm"
            )
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        self.reset_parameters()
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._rms = self.bias is None

    def reset_parameters(self) -> None:
        """Set the identity scale and no shift."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor | None) -> Tensor:
        """Return the normalised input, in its shape and dtype; for None the weight, for a kernel
        that norms on its way.

        Who gathers a weight when its module is called does so then, too.
        """
        if x is None:
            return self.weight
        # One gradient leaves this layer for x, as from a fused kernel. Several would be added to
        # the residual's in another order than where the norm is computed again: recomputation
        # changes no bit.
        x = x.view_as(x)
        if self.feeds is not None:
            return normed(self, x, None)[0]
        if self._rms:
            return rms_norm(
                x, self.weight, self.eps, zero_centered=self.zero_centered, impl=self.impl
            )
        options: dict[str, Any] = {"zero_centered": self.zero_centered, "impl": self.impl}
        return layer_norm(x, self.weight, self.bias, self.eps, **options)


@functools.cache
def with_epsilon(norm: type[Norm], epsilon: float) -> type[Norm]:
    """Return the norm with its own epsilon, not megatron-core's, as a class for specs."""

    class Own(norm):  # type: ignore[misc,valid-type]
        def __init__(self, config: Any, hidden_size: int, eps: float, **more: Any) -> None:
            super().__init__(config, hidden_size, epsilon, **more)

    Own.__name__ = norm.__name__
    Own.__doc__ = norm.__doc__
    return Own


@functools.cache
def with_bias(linear: type) -> type:
    """Return the linear layer with a bias, not megatron-core's choice, as a class for specs."""

    class Biased(linear):  # type: ignore[misc]
        def __init__(self, *args: Any, bias: bool = True, **more: Any) -> None:
            super().__init__(*args, bias=True, **more)

    Biased.__name__ = linear.__name__
    Biased.__doc__ = linear.__doc__
    return Biased


class _NormAcrossHeads(Norm):
    """RMSNorm over all heads of queries or keys [s, b, n, d], of which a tensor-parallel rank has
    n.

    Every rank keeps the whole weight. It reads the part of its heads, so the gradients of the ranks
    are summed, as megatron-core does for the norms of queries and keys. A key/value head may be on
    several ranks.
    """

    heads_of: Callable[[Any], int]

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **more: Any) -> None:
        self.heads = type(self).heads_of(config)
        super().__init__(config, self.heads * hidden_size, eps, **more)
        self._tp = parallel_state.get_tensor_model_parallel_group()

    def forward(self, x: Tensor | None) -> Tensor:
        """Return the normalised heads, in their shape and dtype; for None the weight."""
        if x is None:
            return self.weight
        ranks = self._tp.size()
        n, d = x.shape[-2:]
        if ranks == 1:
            return super().forward(x.flatten(-2)).view_as(x)
        # A key/value head that several ranks hold counts once for each in the sum over ranks.
        copies = n * ranks // self.heads
        first = self._tp.rank() // copies * n * d
        weight = self.weight[first : first + n * d].view(n, d).float()
        wide = x.float()
        squares = wide.square().sum((-2, -1), keepdim=True)
        # Reduced in both directions: the loss of every rank depends on the sum.
        squares = copy_to_tensor_model_parallel_region(
            reduce_from_tensor_model_parallel_region(squares, group=self._tp), group=self._tp
        )
        scale = torch.rsqrt(squares / (copies * self.heads * d) + self.eps)
        return (wide * scale * (1 + weight if self.zero_centered else weight)).to(x.dtype)


class QueryNorm(_NormAcrossHeads):
    """One norm over the queries of all heads."""

    heads_of = staticmethod(lambda config: config.num_attention_heads)


class KeyNorm(_NormAcrossHeads):
    """One norm over all keys."""

    heads_of = staticmethod(lambda config: config.num_query_groups)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return gelu's tanh approximation, elementwise (Hendrycks, Gimpel 2016, arXiv:1606.08415)."""
    return F.gelu(x, approximate="tanh")


class Activation(MegatronModule):
    """The activation within an MLP or an expert, gated or not: one pass over its input."""

    impl = "triton"
    left_to_linear = False
    """True if the next linear layer computes the activation while it converts to FP8."""
    _GATED = ((F.silu, "swiglu"), (F.gelu, "geglu"), (gelu_tanh, "geglu_tanh"))

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        if config.gated_linear_unit:
            self.kind = dict(self._GATED)[config.activation_func]
        else:
            self.kind = "squared_relu"

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` [..., 2f] to [..., f] if it is gated, else [..., f] to [..., f]; or return `x`
        itself, if it is left to the next layer.
        """
        return x if self.left_to_linear else activation(x, self.kind, impl=self.impl)


class DuplicatedLinear(nn.Module):
    """A linear layer whose whole weight is on every tensor-parallel rank: MLA's down projections.

    megatron-core's own local layers split this weight and gather the output; the gather's backward
    then keeps only this rank's part of the gradient of the key's position half, which all heads
    share (a relative error of 1e-3 at tp 2). Here the output is whole from the start and that
    half's gradient is summed over the ranks.
    """

    fp8: Recipe | None = None
    impl = "reference"
    takes_operands = False
    """True if the producer of this layer's input may quantise for it."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Init,
        bias: bool = False,
        tp_group: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        if bias:
            raise ValueError("MLA's down projections have no bias")
        self._init_method = init_method
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        if config.perform_initialization and not self.weight.is_meta:
            self.reset_parameters()
        position_size = config.qk_pos_emb_head_dim
        shares_keys = output_size == config.kv_lora_rank + position_size
        # Under sequence parallelism MLA gathers the position half behind this layer, and that
        # gather's backward sums.
        split = tp_group is not None and tp_group.size() > 1 and not config.sequence_parallel
        self.config = config
        self.input_size = input_size
        self.tp_group = (
            parallel_state.get_tensor_model_parallel_group() if tp_group is None else tp_group
        )
        self.sequence_parallel = config.sequence_parallel
        self._summed = position_size if shares_keys and split else 0
        self.gives_partial_gradients = bool(self._summed)

    def reset_parameters(self) -> None:
        """Draw the weight; every rank must draw from the same random state."""
        self._init_method(self.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Map `x` [..., input_size] to [..., output_size], and no bias."""
        y = self._product(x)
        if self._summed:
            # The compressed half needs no sum: the up projection that reads it sums the gradient of
            # its own input.
            compressed, position = y.split([y.shape[-1] - self._summed, self._summed], dim=-1)
            position = copy_to_tensor_model_parallel_region(position, group=self.tp_group)
            y = torch.cat([compressed, position], dim=-1)
        return y, None

    def _product(self, x: Tensor) -> Tensor:
        """Return the product; in FP8 all ranks with some of a tensor's tokens share its scale."""
        fuses = (
            self.config.gradient_accumulation_fusion
            and torch.is_grad_enabled()
            and self.weight.requires_grad
            and adds_to_main_grad(self.weight)
        )
        if self.fp8 is None:
            if self.impl == BY_TORCH and fuses:
                return linear(x, self.weight, gradient=add_in_place)
            product = linear if self.impl == ON_CPU else F.linear
            return product(x, self.weight)
        context = [parallel_state.get_context_parallel_group()]
        tokens = greatest([*context, self.tp_group] if self.sequence_parallel else context)
        operand = taken(x) if self.takes_operands else None
        shares = Shares(tokens, None, tokens)
        return fp8_linear(
            x,
            self.weight,
            self.fp8,
            shares=shares,
            gradient=add_whole if fuses else None,
            operand=operand,
            impl=self.impl,
        )
