"""`precision`: number formats of weights, activations and GEMMs."""

from typing import Annotated, Literal

from pydantic import Field

from mtrain.config.engine.formats import ProductFormat, WeightFormat
from mtrain.config.schema.base import SAME, Effect, Flag, Key, NonNegativeInt, PositiveInt, Section

# A positive number that fp32 holds.
LossScale = Annotated[float, Field(gt=0, le=2.0**127)]
# The prefixes of the keys of low-precision GEMMs.
LOW_PRECISION = ("fp8", "fp4", "tp_only_amax_red", "num_layers_at_")


class UnresolvedPrecision(Section):
    """`precision`: number formats."""

    dtype: Annotated[
        WeightFormat | None,
        Key(
            feeds="params_dtype pipeline_dtype optimizer.params_dtype",
            effect=Effect.ARCHITECTURE,
            hf="torch_dtype",
        ),
    ] = None
    """The format of weights and activations; with bf16 and fp16 the optimizer keeps fp32 main
    weights. null: bf16 on a GPU that has it, or with fp8 and fp4; else fp32.
    """
    grad_reduce_in_fp32: Annotated[
        bool, Key(feeds="wrap.", aka="accumulate_allreduce_grads_in_fp32")
    ] = True
    """Accumulate and reduce gradients in fp32."""
    initial_loss_scale: Annotated[
        LossScale,
        Key(feeds="optimizer.", when="precision.dtype=fp16", flag=Flag(SAME, absent=4294967296.0)),
    ] = 65536.0
    """The first dynamic loss scale (fp16 only)."""
    loss_scale_window: Annotated[
        PositiveInt,
        Key(
            feeds="optimizer.",
            when="precision.dtype=fp16",
            flag=Flag(SAME, absent=1000),
            unit="steps",
        ),
    ] = 1000
    """The number of steps without overflow after which the loss scale doubles (fp16 only)."""
    min_loss_scale: Annotated[
        LossScale,
        Key(
            feeds="optimizer.",
            when="precision.dtype=fp16",
            flag=Flag(SAME, absent=1.0),
            aka="min_scale",
        ),
    ] = 1.0
    """The smallest loss scale (fp16 only)."""
    loss_scale_hysteresis: Annotated[
        int,
        Field(ge=1, le=1000),
        Key(feeds="optimizer.hysteresis", when="precision.dtype=fp16", flag=Flag(SAME, absent=2)),
    ] = 2
    """The number of skipped updates after which the loss scale starts to fall; it rises after a
    window without any (fp16 only).
    """
    max_skipped_updates: Annotated[
        PositiveInt, Key(when="precision.dtype=fp16", effect=Effect.RUNTIME, unit="updates")
    ] = 20
    """The number of updates skipped in a row, or all of a shorter run, that ends a run as a
    training fault once the loss scale cannot fall further (fp16 only).
    """
    fp8: Annotated[Literal["e4m3", "hybrid"] | None, Key(feeds=SAME, flag="--fp8-format")] = None
    """Linear layers and experts multiply in 8 bits, through TransformerEngine or, with the recipes
    tensorwise and blockwise, our kernels, which a CPU emulates: e4m3 for every tensor; hybrid:
    e4m3, and e5m2 for gradients of outputs; null: they multiply in `dtype`.
    """
    fp8_recipe: Annotated[
        Literal["delayed", "tensorwise", "blockwise", "mxfp8"] | None,
        Key(feeds=SAME, when="precision.fp8", null="tensorwise", flag=Flag(SAME, absent="delayed")),
    ] = None
    """fp8: the extent of a scale, and when it is computed. delayed: a tensor, from the largest
    values of past steps; tensorwise: a tensor, from its own; blockwise: 128 values, or 128 x 128
    weights; mxfp8: 32 values, in hardware from Blackwell on; null: tensorwise.
    """
    fp8_margin: Annotated[
        Annotated[int, Field(ge=0, le=15)] | None,
        Key(feeds=SAME, when="precision.fp8_recipe=delayed", null=0, flag=Flag(SAME, absent=0)),
    ] = None
    """fp8_recipe=delayed: the powers of two between the largest value and the scale's limit; null:
    0.
    """
    fp8_amax_history_len: Annotated[
        Annotated[int, Field(ge=1, le=65536)] | None,
        Key(feeds=SAME, when="precision.fp8_recipe=delayed", null=1024, flag=Flag(SAME, absent=1)),
    ] = None
    """fp8_recipe=delayed: the number of micro-batches whose largest values are remembered; null:
    1024.
    """
    fp8_amax_compute_algo: Annotated[
        Literal["most_recent", "max"] | None,
        Key(
            feeds=SAME,
            when="precision.fp8_recipe=delayed",
            null="max",
            flag=Flag(SAME, absent="most_recent"),
        ),
    ] = None
    """fp8_recipe=delayed: the remembered value that sets the scale; null: max."""
    fp8_wgrad: Annotated[
        bool,
        Key(feeds=SAME, when="precision.fp8_recipe=delayed", flag=Flag("--no-fp8-wgrad", off=True)),
    ] = True
    """fp8_recipe=delayed: false computes the gradients of weights in `dtype`."""
    fp8_dot_product_attention: Annotated[
        bool, Key(feeds=SAME, when="precision.fp8_recipe=delayed|tensorwise", flag=SAME)
    ] = False
    """fp8_recipe=delayed or tensorwise: run the two GEMMs of attention in 8 bits too."""
    fp8_multi_head_attention: Annotated[
        bool,
        Key(
            feeds=SAME,
            when="precision.fp8_dot_product_attention=true and precision.fp8_recipe=delayed",
            flag=SAME,
        ),
    ] = False
    """fp8_dot_product_attention, delayed: keep the inputs and outputs of attention in 8 bits."""
    tp_only_amax_red: Annotated[
        bool, Key(feeds=SAME, when="precision.fp8_recipe=delayed", flag=SAME)
    ] = False
    """fp8_recipe=delayed: share the largest values only among the tensor-parallel ranks, not among
    all that hold the weight.
    """
    fp4: Annotated[Literal["e2m1"] | None, Key(feeds=SAME, flag="--fp4-format")] = None
    """Linear layers multiply in 4 bits, through TransformerEngine; null: they do not."""
    fp4_recipe: Annotated[
        Literal["nvfp4"] | None,
        Key(feeds=SAME, when="precision.fp4", null="nvfp4", flag=Flag(SAME, absent="nvfp4")),
    ] = None
    """fp4: nvfp4 scales 16 values in 8 bits and the tensor in 32, with a random Hadamard transform
    and stochastic rounding where gradients need them (NVIDIA 2025, arXiv 2509.25149); null: nvfp4.
    """
    num_layers_at_start_in_bf16: Annotated[NonNegativeInt, Key(feeds=SAME)] = 0
    """fp8 except delayed, fp4: the number of first layers that keep `dtype`."""
    num_layers_at_end_in_bf16: Annotated[NonNegativeInt, Key(feeds=SAME)] = 0
    """fp8 except delayed, fp4: the number of last layers that keep `dtype`."""

    @property
    def quantized(self) -> str | None:
        """Return the recipe of linear layers that do not multiply in `dtype`, else None."""
        if self.fp8 is not None:
            return self.fp8_recipe or "tensorwise"
        return (self.fp4_recipe or "nvfp4") if self.fp4 is not None else None

    def leaves(self, index: int, layers: int) -> bool:
        """Return whether layer `index` of so many, counted from 0, is one of the first or last that
        multiply in `dtype`.
        """
        return (
            not self.num_layers_at_start_in_bf16 <= index < layers - self.num_layers_at_end_in_bf16
        )


class PrecisionConfig(UnresolvedPrecision):
    """`precision` of a resolved run: the keys below are never null."""

    dtype: WeightFormat

    @property
    def format(self) -> WeightFormat:
        """Return the format of weights and activations."""
        return self.dtype

    @property
    def multiplies_in(self) -> ProductFormat:
        """Return the format whose peak bounds the linear layers."""
        if self.fp8 is not None:
            return "fp8"
        return self.dtype if self.fp4 is None else "fp4"

    @property
    def words(self) -> str:
        """Return the format of weights, and that of GEMMs if linear layers have another."""
        if self.quantized is None:
            return self.dtype
        return f"{self.dtype} with products in {self.multiplies_in} ({self.quantized})"

    def unquantized(self, dtype: str) -> "PrecisionConfig":
        """Return the same with every GEMM in `dtype`, for machines without TransformerEngine."""
        kept = {key: value for key, value in self if not key.startswith(LOW_PRECISION)}
        return PrecisionConfig.model_validate({**kept, "dtype": dtype})
