"""The residual stream's sum made together with the norm that reads it, in one pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mtrain_kernels.norm.op import layer_norm_residual, rms_norm_residual
from torch import Tensor

from mtrain.mcore.layers.operands import normed
from mtrain.mcore.layers.portable import Norm


class ResidualNorm(Norm):
    """A norm that makes the sum before it, too: `norm(x, residual)` gives the sum, and `norm(sum)`
    then its norm.

    Both are calls of this module, so that whoever gathers its weight does so in time. One gradient
    leaves the kernel, to which that of the residual stream has been added.
    """

    _ahead: tuple[Tensor, Any, Tensor] | None = None
    """The sum, its node in autograd's graph, and its norm."""

    def forward(self, x: Tensor | None, residual: Tensor | None = None) -> Tensor:
        """Normalise `x` [..., hidden_size], or its sum with `residual`, in shape and dtype."""
        if x is None or residual is None:
            ahead = self._ahead
            # Attributes of a module are set through a method of torch's that looks for weights.
            self.__dict__["_ahead"] = None
            # A replayed CUDA graph returns the same tensor with a new node of autograd. A norm made
            # ahead then belongs to the capture, whose backward has run.
            if ahead is not None and ahead[0] is x and ahead[1] is x.grad_fn:
                return ahead[2]
            return super().forward(x)
        options: dict[str, Any] = {"zero_centered": self.zero_centered, "impl": self.impl}
        if self.feeds is not None:
            y, total = normed(self, x, residual)
        elif self._rms:
            y, total = rms_norm_residual(x, residual, self.weight, self.eps, **options)
        else:
            y, total = layer_norm_residual(x, residual, self.weight, self.bias, self.eps, **options)
        self.__dict__["_ahead"] = total, total.grad_fn, y
        return total


def added_by(norm: Any, add: Callable[..., Any], training: bool, fused: bool) -> Callable[..., Any]:
    """Return megatron-core's sum of output, bias and residual, computed by the next norm."""

    def summed(output_with_bias: Any, residual: Any, dropout_p: float) -> Any:
        output, bias = output_with_bias
        # The kernels add; they neither drop out nor convert.
        if (training and dropout_p) or output.dtype != residual.dtype:
            return add(training, fused)(output_with_bias, residual, dropout_p)
        return norm(output if bias is None else output + bias, residual)

    return summed


def captured_parts(config: Any) -> set[str]:
    """Return the parts of a layer with separate CUDA graphs, full_iteration, or none (whole)."""
    named = (
        getattr(config, "cuda_graph_modules", None)
        or getattr(config, "cuda_graph_scope", None)
        or ()
    )
    return {part.name for part in named}


def one_graph(config: Any, *, layers: int) -> bool:
    """Return whether a part and the norm after it, in one layer or in two `layers`, share a CUDA
    graph or have none.

    A CUDA graph gives only what its layer or part returns. A norm that is made ahead in it and read
    in another graph, or by nobody, is made twice, and holds its memory and its part of autograd's
    graph.
    """
    captured = config.cuda_graph_impl in ("local", "transformer_engine")
    parts = captured_parts(config)
    return not captured or "full_iteration" in parts or (layers == 1 and not parts)


def join_layers(block: Any) -> None:
    """Let the first norm of each layer, or the last norm of all, make the sum that the layer before
    ends with.

    Nothing of the next layer is made ahead where whole layers are computed again, as each then
    begins with a tensor of its own; nor where only a norm is computed again; nor where each layer
    is captured in its own CUDA graph.
    """
    if block.config.recompute_granularity == "full" or not one_graph(block.config, layers=2):
        return
    for layer, after in zip(block.layers, [*block.layers, None][1:], strict=True):
        norm = block.final_layernorm if after is None else getattr(after, "input_layernorm", None)
        if isinstance(norm, ResidualNorm) and not getattr(
            after, "recompute_input_layernorm", False
        ):
            layer.let_add("mlp", norm)
