"""The keys of the group `kernels`."""

from typing import Annotated, Literal

from mtrain.config.schema.base import Key, PositiveInt, Section


class KernelsConfig(Section):
    """`kernels`: which implementation each operation uses.

    A named one that cannot run is an error.
    """

    default: Literal["auto", "reference", "cpu", "triton", "te"] = "auto"
    """Implementation of the operations below that are null; one that has no such implementation
    takes what auto would. auto: the first that can run, see `plan.json` of a run for the reasons;
    reference: the definitions, in plain torch; cpu: the same results on a CPU in less time, from
    the definition where it has no faster way.
    """
    norm: Literal["auto", "reference", "cpu", "triton", "te"] | None = None
    """RMSNorm and LayerNorm; null: kernels.default."""
    rope: Literal["auto", "reference", "cpu", "triton"] | None = None
    """Rotary position embedding; null: kernels.default."""
    attention: Annotated[
        Literal["auto", "reference", "cpu", "torch", "triton", "te"] | None,
        Key(aka="attention_backend"),
    ] = None
    """Core attention; cpu: short causal sequences in half precision with their scores written out;
    torch: the fastest of FlashAttention-3 and torch's kernels that takes a call
    without a mask of all pairs, and Triton's where none does; triton: ours, with windows, sinks,
    caps and packed documents, which auto takes for sinks and caps; null: kernels.default.
    """
    linear: Annotated[
        Literal["auto", "reference", "cpu", "triton", "te"] | None, Key(aka="transformer_impl")
    ] = None
    """Row- and column-parallel linear layers; cpu: products by kernels.cpu_matmul; triton: for
    precision.fp8, with cuBLAS where a tensor has one scale; reference: in fp8 the same rounding in
    plain torch; null: kernels.default.
    """
    activation: Literal["auto", "reference", "triton"] | None = None
    """Gated and squared activations of MLPs and experts; null: kernels.default."""
    experts: Literal["auto", "reference", "cpu", "triton", "torch", "te"] | None = None
    """Linear layers of experts, in one grouped call; reference: expert by expert; torch: its
    grouped product, bf16 only, which copies all weights behind each other; null: kernels.default.
    In precision.fp8 by whom kernels.linear is: TransformerEngine, or triton and reference, each
    expert with scales of its own. With triton for moe_router and moe_permute, no layer waits for
    the device but for the rows that expert-parallel ranks exchange.
    """
    moe_router: Literal["auto", "reference", "triton"] | None = None
    """Choice of experts and their weights from the router's logits; null: kernels.default."""
    moe_permute: Literal["auto", "reference", "triton"] | None = None
    """Tokens to rows sorted by expert, and back; null: kernels.default."""
    loss: Literal["auto", "reference", "cpu", "triton", "megatron"] | None = None
    """Output layer and cross entropy; reference, cpu and triton make both at once, for a part of
    the tokens at a time, and never hold all logits; megatron: megatron-core's own, from all logits;
    null: kernels.default.
    """
    loss_logits_mib: Annotated[
        PositiveInt | None,
        Key(when="kernels.loss=null|auto|reference|cpu|triton", unit="MiB", aka="loss_chunk_size"),
    ] = None
    """A loss in parts: the most memory for the logits that are there at once, of 64 tokens at
    least. More of them are fewer passes over the output layer and its gradient; plan counts them.
    null: a 128th of cluster.device_memory_gib, at least 256; where that is not known 2^27 logits
    (256 MiB in bf16), on a CPU 2^22.
    """
    optimizer: Literal["auto", "torch", "reference", "triton", "te"] | None = None
    """Who updates. torch: torch.optim; reference and triton: ours, for
    optimizers that torch has not and for state in low precision; null: kernels.default where it can
    do it.
    """
    cpu_matmul: Literal["auto", "blas", "onednn"] | None = None
    """fp32 products where linear, experts or loss is cpu: by the BLAS of torch, mostly MKL, or by
    oneDNN; null, auto: the faster one as measured, once per machine, the same on all ranks.
    """
    gradient_accumulation_fusion: Annotated[bool, Key(feeds="gradient_accumulation_fusion")] = False
    """Weight gradients of linear layers and of the output layer are added up in the product that
    makes them, in fp32 and unrounded, instead of in a pass of their own.
    """
