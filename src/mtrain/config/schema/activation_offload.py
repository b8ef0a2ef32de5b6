"""`parallel.activation_offload`: activations kept in host memory until the backward."""

from typing import Annotated, Literal

from pydantic import Field

from mtrain.config.schema.base import Effect, Flag, Key, NonNegativeInt, Section

OffloadModule = Literal[
    "attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"
]
_THERE = "parallel.activation_offload.modules"


class ActivationOffloadConfig(Section):
    """`parallel.activation_offload`: inputs of modules that are kept in host memory until the
    backward. On GPUs, with TransformerEngine's layers; mtrain validates it and passes it to
    megatron-core. Tests on a CPU compare numbers and lifetimes; it has run on no GPU yet.
    """

    modules: Annotated[
        tuple[OffloadModule, ...] | None, Key(effect=Effect.PARALLELISM, aka="offload_modules")
    ] = Field(default=None, strict=False)
    """The modules whose input is copied to the host in the forward, and back before its backward;
    null: none.
    """
    min_tensor_elements: Annotated[
        NonNegativeInt | None,
        Key(
            feeds="min_offloaded_tensor_size",
            when=_THERE,
            null=1 << 20,
            effect=Effect.RUNTIME,
            flag=Flag("--min-offloaded-tensor-size", absent=1 << 20),
            aka="min_offloaded_tensor_size",
            unit="elements",
        ),
    ] = None
    """Tensors with fewer elements stay on the device; null: 1048576."""
    fraction: Annotated[
        Annotated[float, Field(ge=0, le=1)] | None,
        Key(
            feeds="activation_offload_fraction",
            when=_THERE,
            effect=Effect.RUNTIME,
            flag=Flag("--activation-offload-fraction", absent=None),
            aka="activation_offload_fraction",
        ),
    ] = None
    """The share of eligible tensors that is copied; null: all. Needs megatron-core 0.19."""
    delta_bytes_across_stages: Annotated[
        NonNegativeInt | None,
        Key(
            feeds="delta_offload_bytes_across_pp_ranks",
            when=f"{_THERE} and parallel.pp>1",
            effect=Effect.RUNTIME,
            flag=Flag("--delta-offload-bytes-across-pp-ranks", absent=None),
            aka="delta_offload_bytes_across_pp_ranks",
            unit="bytes",
        ),
    ] = None
    """Bytes that each pipeline stage copies less than the previous one; null: 0. Needs
    megatron-core 0.19.
    """
