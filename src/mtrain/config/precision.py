"""`precision`: number formats of weights, activations and matrix products."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mtrain.config.base import NonNegativeInt, PositiveInt, Section
from mtrain.config.formats import ProductFormat, WeightFormat

LossScale = Annotated[float, Field(gt=0, le=2.0**127)]
"""A positive number that fp32 holds."""


class PrecisionConfig(Section):
    """`precision`: number formats."""

    dtype: WeightFormat | None = None
    """Format of weights and activations; with bf16 and fp16 the optimizer keeps fp32 main weights. null: bf16 on a
    GPU that has it, or beside fp8 and fp4; else fp32."""
    grad_reduce_in_fp32: bool = True
    """Gradients are accumulated and reduced in fp32."""
    initial_loss_scale: LossScale = 65536.0
    """First dynamic loss scale (fp16 only)."""
    loss_scale_window: PositiveInt = 1000
    """Steps without overflow before the loss scale doubles (fp16 only)."""
    min_loss_scale: LossScale = 1.0
    """Smallest loss scale (fp16 only)."""
    max_skipped_updates: PositiveInt = 20
    """Updates skipped in a row, or all of a shorter run, at which a run ends as a training fault where the loss scale
    cannot fall any more (fp16 only)."""
    fp8: Literal["e4m3", "hybrid"] | None = None
    """Linear layers multiply in 8 bits, through TransformerEngine: e4m3 for every tensor; hybrid: e4m3, and e5m2 for
    gradients of outputs; null: they multiply in `dtype`."""
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] | None = None
    """fp8: what has a scale, and when it is made. delayed: a tensor, from the largest values of past steps;
    tensorwise: a tensor, from its own; blockwise: 128 values, or 128 x 128 weights; mxfp8: 32 values, in hardware
    from Blackwell on; null: tensorwise."""
    fp8_margin: Annotated[int, Field(ge=0, le=15)] | None = None
    """fp8_recipe=delayed: powers of two that a scale leaves free above the largest value; null: 0."""
    fp8_amax_history_len: Annotated[int, Field(ge=1, le=65536)] | None = None
    """fp8_recipe=delayed: micro-batches whose largest values are remembered; null: 1024."""
    fp8_amax_compute_algo: Literal["most_recent", "max"] | None = None
    """fp8_recipe=delayed: which of the remembered values makes the scale; null: max."""
    fp8_wgrad: bool = True
    """fp8_recipe=delayed: false multiplies for the gradients of weights in `dtype`."""
    fp8_dot_product_attention: bool = False
    """fp8_recipe=delayed or tensorwise: the two products inside attention are in 8 bits too."""
    fp8_multi_head_attention: bool = False
    """fp8_dot_product_attention, delayed: what goes into and out of attention stays in 8 bits."""
    tp_only_amax_red: bool = False
    """fp8_recipe=delayed: largest values are shared by the tensor-parallel ranks alone, not by all that hold the
    weight."""
    fp4: Literal["e2m1"] | None = None
    """Linear layers multiply in 4 bits, through TransformerEngine; null: they do not."""
    fp4_recipe: Literal["nvfp4"] | None = None
    """fp4: nvfp4 scales 16 values in 8 bits and the tensor in 32, with a random Hadamard transform and stochastic
    rounding where gradients need them (NVIDIA 2025, arXiv 2509.25149); null: nvfp4."""
    num_layers_at_start_in_bf16: NonNegativeInt = 0
    """fp8 but for delayed, fp4: first layers of the model that keep `dtype`."""
    num_layers_at_end_in_bf16: NonNegativeInt = 0
    """fp8 but for delayed, fp4: last layers of the model that keep `dtype`."""

    @property
    def format(self) -> WeightFormat:
        """Format of weights and activations, once it is resolved."""
        return self.dtype or "fp32"

    @property
    def quantized(self) -> str | None:
        """What linear layers multiply in where that is not `dtype`: the name of a recipe, else None."""
        if self.fp8 is not None:
            return self.fp8_recipe or "tensorwise"
        return (self.fp4_recipe or "nvfp4") if self.fp4 is not None else None

    @property
    def multiplies_in(self) -> ProductFormat:
        """The format whose peak arithmetic of a device bounds the linear layers."""
        if self.fp8 is not None:
            return "fp8"
        return self.format if self.fp4 is None else "fp4"

    def unquantized(self, dtype: str) -> PrecisionConfig:
        """The same with every product in `dtype`: where there is no TransformerEngine."""
        scales = ("initial_loss_scale", "loss_scale_window", "min_loss_scale", "max_skipped_updates")
        kept = ("grad_reduce_in_fp32", *scales)
        return PrecisionConfig.model_validate({"dtype": dtype, **{key: getattr(self, key) for key in kept}})
