"""The section `kernels`."""

from typing import Annotated, Literal

from mtrain.config.schema.base import SAME, Key, PositiveInt, Section


class KernelsConfig(Section):
    """`kernels`: the implementation of each operation. A named one that cannot run is an error."""

    default: Literal["auto", "reference", "cpu", "triton", "te"] = "auto"
    """The implementation of operations whose key is null; an operation without it uses auto. auto:
    the first that can run, with the reasons in `plan.json` of a run; reference: the definitions, in
    plain torch; cpu: the same results on a CPU in less time, from the definition where there is no
    faster way.
    """
    norm: Literal["auto", "reference", "cpu", "triton", "te"] | None = None
    """RMSNorm and LayerNorm; null: kernels.default."""
    rope: Literal["auto", "reference", "cpu", "triton"] | None = None
    """Rotary position embedding; null: kernels.default."""
    attention: Annotated[
        Literal["auto", "reference", "cpu", "torch", "triton", "te"] | None,
        Key(aka="attention_backend"),
    ] = None
    """Core attention; cpu: writes out the scores of short causal sequences in half precision;
    torch: the fastest of FlashAttention-3 and torch's kernels that needs no mask of all pairs for
    the call, else Triton's; triton: ours, with windows, sinks, caps and packed documents, which
    auto chooses for sinks and caps; null: kernels.default.
    """
    linear: Annotated[
        Literal["auto", "reference", "cpu", "triton", "torch", "te"] | None,
        Key(aka="transformer_impl"),
    ] = None
    """Row- and column-parallel linear layers; torch: by cuBLAS; cpu: by kernels.cpu_matmul; triton:
    for precision.fp8, with cuBLAS where it takes the scales; reference: megatron-core's own, in fp8
    the same rounding in plain torch; null: kernels.default.
    """
    activation: Literal["auto", "reference", "triton"] | None = None
    """Gated and squared activations of MLPs and experts; null: kernels.default."""
    experts: Literal["auto", "reference", "cpu", "triton", "torch", "te"] | None = None
    """Linear layers of experts, as one grouped GEMM; reference: expert by expert; torch: its
    grouped GEMM, bf16 only, which concatenates all weights; null: kernels.default. In precision.fp8
    it follows kernels.linear: TransformerEngine, or triton and reference, each expert with scales
    of its own. With triton for moe_router and moe_permute, no layer waits for the device except for
    the row counts that expert-parallel ranks exchange.
    """
    moe_router: Literal["auto", "reference", "triton"] | None = None
    """The choice of experts and their weights from the router's logits; null: kernels.default."""
    moe_permute: Literal["auto", "reference", "triton"] | None = None
    """The permutation of tokens to rows sorted by expert, and back; null: kernels.default."""
    loss: Literal["auto", "reference", "cpu", "triton", "megatron"] | None = None
    """Output layer and cross entropy; reference, cpu and triton fuse them, for a part of the tokens
    at a time, and never hold all logits; megatron: megatron-core's own, from all logits; null:
    kernels.default.
    """
    loss_logits_mib: Annotated[
        PositiveInt | None,
        Key(when="kernels.loss=null|auto|reference|cpu|triton", unit="MiB", aka="loss_chunk_size"),
    ] = None
    """The largest memory of the logits of a chunked loss, at least those of 64 tokens. More logits
    mean fewer passes over the output layer and its gradient; plan counts them. null: a 128th of
    cluster.device_memory_gib, at least 256; if that is unknown 2^27 logits (256 MiB in bf16), on a
    CPU 2^22.
    """
    optimizer: Literal["auto", "torch", "reference", "triton", "te"] | None = None
    """The optimizer's update. torch: torch.optim; reference and triton: ours, for optimizers that
    torch lacks and for state in low precision; null: kernels.default if that can run it.
    """
    cpu_matmul: Literal["auto", "blas", "onednn"] | None = None
    """fp32 GEMMs if linear, experts or loss is cpu: by the BLAS of torch, mostly MKL, or by oneDNN;
    null, auto: the faster of both as measured once per machine, the same on all ranks.
    """
    gradient_accumulation_fusion: Annotated[bool | None, Key(feeds=SAME)] = None
    """Accumulate weight gradients of linear layers and of the output layer in the GEMM that
    computes them, in fp32 and unrounded, instead of in a separate pass; null: on a GPU without
    parallel.fsdp.
    """
