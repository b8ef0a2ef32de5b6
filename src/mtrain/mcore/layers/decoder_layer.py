"""megatron-core's transformer layer with the norms and positions that only some families have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.utils import is_layer_window_attention

from mtrain.mcore.layers import direct
from mtrain.mcore.layers.operands import feed
from mtrain.mcore.layers.residual import ResidualNorm, added_by, captured_parts, one_graph


@dataclass
class DecoderLayerSubmodules(TransformerLayerSubmodules):
    """Submodules of megatron-core's layer, with norms of the outputs of attention and MLP, or of
    the residual stream after their sum.
    """

    post_self_attn_layernorm: Any = IdentityOp
    post_mlp_layernorm: Any = IdentityOp
    norms_the_sum: bool = False
    """True if they norm the residual stream and the output added to it together (BERT)."""


class DecoderLayer(TransformerLayer):
    """A layer that may have norms behind attention and MLP, and other rotary positions where it has
    a window.

    Rotary angles [2, s, 1, 1, r] are those of layers with a window, and of all others. Sums are
    made by the norm that reads them where that can do it.
    """

    # Where CUDA graphs hold MLPs only, 0.16.1 reads the attribute before its constructor sets it.
    is_moe_layer = False
    _plain: bool | None = None
    """True if `direct` computes what this layer does; None before the first call."""
    _mlp_reads_the_sum = True
    """True if the MLP reads the residual stream after attention has been added to it."""

    def __init__(
        self, config: Any, submodules: DecoderLayerSubmodules, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        # `let_add` may replace the sum after it has been wrapped, so it is kept unwrapped.
        self._adds = {part: getattr(self, f"{part}_bda") for part in ("self_attn", "mlp")}
        self._places: dict[str, Any] = {}
        for part in self._adds:
            name = f"post_{part}_layernorm"
            # No norm is built unless it is called: with a module that is never called,
            # megatron-core's FSDP leaves the gradient of tied stages undefined.
            if getattr(submodules, name) is not IdentityOp:
                options = {
                    "config": config,
                    "hidden_size": config.hidden_size,
                    "eps": config.layernorm_epsilon,
                }
                norm = build_module(getattr(submodules, name), **options)
                setattr(self, name, norm)
                self._places[part] = partial(
                    _sum_normed if submodules.norms_the_sum else _normed, norm
                )
                setattr(self, f"{part}_bda", partial(self._places[part], self._adds[part]))
                if submodules.norms_the_sum and isinstance(norm, ResidualNorm):
                    self.let_add(part, norm)
        norm = self.pre_mlp_layernorm
        direct = isinstance(self.pre_cross_attn_layernorm, IdentityOp)
        again = self.recompute_pre_mlp_layernorm or not (direct and self._mlp_reads_the_sum)
        if isinstance(norm, ResidualNorm) and not again and one_graph(config, layers=1):
            self.let_add("self_attn", norm)
        # 0.16.1 numbers MTP layers after the decoder's, 0.19 numbers them from 1.
        if not (getattr(self, "is_mtp_layer", False) or self.layer_number > config.num_layers):
            leave_in_bf16(self)
        feed(self)
        skipped = config.window_attn_skip_freq
        self._has_window = is_layer_window_attention(
            config.window_size, skipped, max(1, self.layer_number)
        )

    def create_mcore_cudagraph_manager(self, config: Any) -> None:
        """Capture the parts that are named, each in a graph of its own; without names the layer.

        megatron-core would capture a whole layer if it has one of those parts.
        """
        parts = captured_parts(config)
        if not parts:
            super().create_mcore_cudagraph_manager(config)
            return
        has_attention = self.submodules_config.self_attention is not IdentityOp
        mlp = self.submodules_config.mlp
        word = "moe" if _has_experts(mlp) else "mlp"
        if "attn" in parts and has_attention:
            self._capture_part(config, "_forward_attention")
        if word in parts and mlp is not IdentityOp:
            self._capture_part(config, "_forward_mlp")

    def _capture_part(self, config: Any, name: str) -> None:
        """Replace a method by its CUDA graph, once that is captured."""
        manager = cuda_graphs.CudaGraphManager(config, self, function_name=name)
        setattr(self, f"graphs_of{name}", manager)
        replaced = getattr(self, name)

        def whole(*args: Any, **kwargs: Any) -> Any:
            out = replaced(*args, **kwargs)
            # 0.16.1 returns a replay's only tensor in a tuple.
            return out[0] if isinstance(out, tuple) and len(out) == 1 else out

        setattr(self, name, whole)

    def let_add(self, part: str, norm: ResidualNorm) -> None:
        """Let the norm that reads the sum behind a part, self_attn or mlp, make it."""
        add = partial(added_by, norm, self._adds[part])
        setattr(
            self, f"{part}_bda", partial(self._places[part], add) if part in self._places else add
        )

    def forward(self, *args: Any, rotary_pos_emb: Any = None, **kwargs: Any) -> Any:
        """Return hidden states [s, b, h], or this rank's [s / tp, b, h] under sequence parallelism,
        to the same.
        """
        if rotary_pos_emb is not None and rotary_pos_emb.dim() == 5:
            rotary_pos_emb = rotary_pos_emb[0 if self._has_window else 1]
        if self._plain is None:
            self._plain = direct.layer_is_plain(self)
        if self._plain and not args and direct.trains(kwargs):
            states = kwargs["hidden_states"], kwargs["attention_mask"]
            return direct.forward_layer(self, *states, rotary_pos_emb, kwargs.get("padding_mask"))
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb, **kwargs)


def _has_experts(mlp: Any) -> bool:
    module = getattr(mlp, "module", None)
    return isinstance(module, type) and issubclass(module, MoELayer)


def leave_in_bf16(layer: Any) -> None:
    """Let the products of a layer be in bf16 where it is one of the first or last that stay so."""
    config = layer.config
    first = config.num_layers_at_start_in_bf16
    last = config.num_layers - config.num_layers_at_end_in_bf16
    if not first < layer.layer_number <= last:
        for module in layer.modules():
            if getattr(module, "fp8", None) is not None:
                module.fp8 = None


def _normed(norm: Any, add: Callable[..., Any], training: bool, fused: bool) -> Callable[..., Any]:
    """Return megatron-core's sum of output, bias and residual, the first two normed first."""

    def summed(output_with_bias: Any, residual: Any, dropout_p: float) -> Any:
        output, bias = output_with_bias
        return add(training, fused)(
            (norm(output if bias is None else output + bias), None), residual, dropout_p
        )

    return summed


def _sum_normed(
    norm: Any, add: Callable[..., Any], training: bool, fused: bool
) -> Callable[..., Any]:
    """Return megatron-core's sum of a part's output, its bias and the residual, normed."""

    def normed(output_with_bias: Any, residual: Any, dropout_p: float) -> Any:
        return norm(add(training, fused)(output_with_bias, residual, dropout_p))

    return normed
