"""`parallel`: the sharding of model and batch over ranks, and activations kept in host memory. The
data-parallel size is always derived.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mtrain.config.schema.base import (
    SAME,
    Degree,
    Effect,
    Flag,
    Key,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)

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
            flag=Flag(SAME, absent=1 << 20),
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
            flag=Flag(SAME, absent=None),
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
            flag=Flag(SAME, absent=None),
            aka="delta_offload_bytes_across_pp_ranks",
            unit="bytes",
        ),
    ] = None
    """Bytes that each pipeline stage copies less than the previous one; null: 0. Needs
    megatron-core 0.19.
    """


RecomputeModule = Literal[
    "core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"
]


class RecomputeConfig(Section):
    """`parallel.recompute`: activations that the backward recomputes instead of keeping. Changes no
    number.
    """

    core_prefix = "recompute_"

    granularity: Literal["none", "selective", "full", "auto"] | None = None
    """selective: the named modules of every layer; full: whole layers, of which only the inputs are
    kept; auto: none where a step fits the device or `budget_gib` by the plan, else the modules or
    layers that cost the least time of those with which it fits. null: auto where the memory of the
    device or a budget is known, else none. A resolved run holds the choice.
    """
    budget_gib: Annotated[
        PositiveFloat | None,
        Key(effect=Effect.RUNTIME, unit="GiB"),
    ] = None
    """The memory of a rank within which recomputation and micro-batch are chosen where they are
    open; null: that of the device. 4% of it stays free, for errors of the plan.
    """
    modules: Annotated[
        tuple[RecomputeModule, ...] | None,
        Key(feeds=SAME, when="parallel.recompute.granularity=selective", null=("core_attn",)),
    ] = Field(default=None, strict=False)
    """selective: the modules to recompute; null: core_attn."""
    method: Annotated[
        Literal["uniform", "block"] | None,
        Key(feeds=SAME, when="parallel.recompute.granularity=full", null="uniform"),
    ] = None
    """full: uniform keeps the input of every group of num_layers layers; block recomputes the first
    num_layers layers of each (virtual) stage, one by one; null: uniform.
    """
    num_layers: Annotated[
        PositiveInt | None, Key(feeds=SAME, when="parallel.recompute.granularity=full", null=1)
    ] = None
    """full: the layers of a group (uniform) or of a stage (block); null: 1."""
    distribute_saved_activations: Annotated[
        bool,
        Key(
            feeds="distribute_saved_activations",
            when=(
                "parallel.recompute.granularity=full and parallel.tp>1 and"
                " parallel.sequence_parallel=false"
            ),
            flag=SAME,
        ),
    ] = False
    """full, tp without sequence_parallel: shard the kept inputs over the tp ranks."""


class UnresolvedParallel(Section):
    """`parallel`: degrees of each axis. `dp` = ranks / (tp * pp * cp)."""

    auto: bool | None = False
    """Choose unset parts of the layout, the micro-batch and the offload as `tune` does: the fastest
    by the plan that fits the device. null, which `parallel=default` sets: so on GPUs, and tensor
    parallel 2 on a CPU. A resolved run holds the choice, and false here.
    """
    tp: Annotated[
        Degree,
        Key(
            feeds="tensor_model_parallel_size",
            flag=Flag(SAME, always=True),
            aka="tensor_parallel tensor_parallel_size",
        ),
    ] = 1
    """Tensor parallel: each layer's matrices are sharded over this many ranks."""
    pp: Annotated[
        Degree,
        Key(
            feeds="pipeline_model_parallel_size",
            flag=Flag(SAME, always=True),
            aka="pipeline_parallel pipeline_parallel_size",
        ),
    ] = 1
    """Pipeline parallel: stages of consecutive layers."""
    vpp: Annotated[
        Degree, Key(aka="virtual_pipeline_model_parallel_size num_virtual_stages_per_pipeline_rank")
    ] = 1
    """Virtual stages per rank (interleaved schedule)."""
    cp: Annotated[Degree, Key(feeds="context_parallel_size", flag=SAME, aka="context_parallel")] = 1
    """Context parallel: the sequence is sharded over this many ranks."""
    ep: Annotated[
        Degree, Key(feeds="expert_model_parallel_size", flag=SAME, aka="expert_parallel")
    ] = 1
    """Expert parallel: the experts are sharded over this many ranks."""
    expert_imbalance: Annotated[
        float, Field(ge=1, le=1024), Key(when="parallel.ep>1", effect=Effect.RUNTIME)
    ] = 1.0
    """The tokens of the busiest rank of experts relative to the average that a plan assumes; 1: an
    even load, as in published benchmarks. It changes nothing in a run.
    """
    etp: Annotated[Degree | None, Key(flag="--expert-tensor-parallel-size")] = None
    """Tensor parallel inside experts; null: as `tp`."""
    sequence_parallel: Annotated[bool | None, Key(feeds=SAME)] = None
    """Shard norms and residuals over the tp ranks along the sequence; null: true if tp is above 1
    on GPUs and the sequence divides. On a CPU only with experts, which need it with a tp above 1.
    """
    ranks: Annotated[Degree | None, Key(aka="world_size num_gpus", unit="processes")] = None
    """The number of processes; null: every device of the cluster, or the fewest that the degrees
    need on a CPU.
    """
    cp_comm_type: Annotated[
        Literal["all_gather", "p2p", "a2a", "a2a+p2p"] | None, Key(feeds=SAME)
    ] = None
    """The exchange by which attention sees the whole sequence under `cp`: all_gather gathers keys
    and values, p2p passes them around a ring, a2a exchanges the sequence for heads (Ulysses),
    a2a+p2p does the second inside groups and the first between them; null: p2p with
    TransformerEngine's attention, else all_gather.
    """
    hierarchical_cp_sizes: Annotated[
        tuple[PositiveInt, PositiveInt] | None,
        Key(
            feeds="hierarchical_context_parallel_sizes",
            when="parallel.cp>1 and parallel.cp_comm_type=a2a+p2p",
        ),
    ] = Field(default=None, strict=False)
    """a2a+p2p: ranks of an inner group (a2a) and number of such groups (p2p); their product is
    `cp`.
    """
    hybrid_context_parallel: Annotated[bool, Key(feeds=SAME, flag=SAME)] = False
    """Dynamic context parallelism: each packed document of a batch is sharded over as many
    data-parallel ranks (1, 2, 4, ...) as its length needs, so that documents of very different
    lengths train together; `cp` stays 1.
    """
    max_seqlen_per_dp_cp_rank: Annotated[
        PositiveInt | None,
        Key(feeds=SAME, when="parallel.hybrid_context_parallel=true", flag=SAME, unit="tokens"),
    ] = None
    """hybrid_context_parallel: the tokens of a document per rank; null: data.seq_length / dp."""
    pipeline_layout: str | None = None
    """The contents of each stage, as `Et*3|(tt|)*29,m|L`: E embedding, t layer, m multi-token
    prediction, L loss, | between the pp * vpp stages; null: equal stages.
    """
    layers_per_stage: tuple[int, ...] | None = Field(default=None, strict=False)
    """The layers of each of the pp * vpp stages, in the order of the model; null: equal stages."""
    account_for_embedding_in_pipeline_split: Annotated[bool, Key(flag=SAME)] = False
    """The embedding counts as a layer: the first stage holds one layer fewer than the others."""
    account_for_loss_in_pipeline_split: Annotated[bool, Key(flag=SAME)] = False
    """The output layer and loss count as a layer: the last stage holds one layer fewer than the
    others.
    """
    distributed_optimizer: Annotated[
        bool | None, Key(feeds="ddp.use_distributed_optimizer", aka="zero_stage")
    ] = None
    """Optimizer state and main weights are sharded over the data-parallel ranks (ZeRO-1); null:
    true on GPUs with data or context parallelism, for optimizers that can, without fsdp.
    """
    microbatch_group_size_per_vp_stage: Annotated[
        PositiveInt | None, Key(feeds=SAME, when="parallel.vpp>1")
    ] = None
    """vpp: the micro-batches that a virtual stage runs before the next one starts; null: pp."""
    overlap_p2p_comm_warmup_flush: Annotated[
        bool,
        Key(feeds=SAME, when="parallel.vpp>1", flag="--overlap-p2p-communication-warmup-flush"),
    ] = False
    """vpp: overlap the sends between stages with computation also while the pipeline fills and
    drains.
    """
    overlap_grad_reduce: Annotated[bool | None, Key(feeds="ddp.")] = None
    """Reduce gradients while the backward still runs; null: true on GPUs with data or context
    parallelism, without fsdp and hybrid_context_parallel.
    """
    overlap_param_gather: Annotated[
        bool | None, Key(feeds="ddp.overlap_param_gather optimizer.overlap_param_gather")
    ] = None
    """Gather weights while the forward already runs; needs `distributed_optimizer`; null: true on
    GPUs with that and overlap_grad_reduce.
    """
    ddp_bucket_size: Annotated[
        PositiveInt | None,
        Key(
            feeds="ddp.bucket_size",
            when="parallel.overlap_grad_reduce=true and parallel.fsdp=none",
            flag="--ddp-bucket-size",
            unit="elements",
        ),
    ] = None
    """overlap_grad_reduce: the gradients, counted in elements, of one reduction; null: the larger
    of 40 million and a million per data-parallel rank.
    """
    ddp_pad_buckets_for_high_nccl_busbw: Annotated[
        bool,
        Key(
            feeds="ddp.pad_buckets_for_high_nccl_busbw",
            when="parallel.distributed_optimizer=true",
            flag="--ddp-pad-buckets-for-high-nccl-busbw",
        ),
    ] = False
    """distributed_optimizer: pad each reduction to a multiple of 65,536 elements per rank."""
    ddp_reduce_scatter_with_fp32_accumulation: Annotated[
        bool, Key(feeds="ddp.reduce_scatter_with_fp32_accumulation", effect=Effect.NUMERICS)
    ] = False
    """distributed_optimizer, overlap_grad_reduce, grad_reduce_in_fp32=false: send gradients in half
    precision and accumulate them in fp32.
    """
    fsdp: Literal["none", "fsdp2", "megatron"] = "none"
    """Shard the weights themselves over the data-parallel ranks and gather them layer by layer: by
    torch's FSDP2, or by megatron-core's own FSDP.
    """
    fsdp_sharding: Annotated[
        Literal["optim", "optim_grads", "optim_grads_params"] | None,
        Key(
            feeds="fsdp.data_parallel_sharding_strategy",
            when="parallel.fsdp=megatron",
            null="optim_grads_params",
        ),
    ] = None
    """megatron: what is sharded (ZeRO-1, 2, 3); null: optim_grads_params. FSDP2 always shards all
    three.
    """
    hsdp_replicas: Annotated[
        Degree, Key(feeds="wrap.num_distributed_optimizer_instances", flag=SAME)
    ] = 1
    """fsdp, distributed_optimizer: groups of data-parallel ranks that each hold one whole sharded
    copy (HSDP); gradients are reduced inside a group and then between groups.
    """
    recompute: RecomputeConfig = Field(default_factory=RecomputeConfig)
    """Activations that the backward recomputes."""
    activation_offload: ActivationOffloadConfig = Field(default_factory=ActivationOffloadConfig)
    """Activations that are kept in host memory until the backward."""

    @property
    def model_ranks(self) -> int:
        """Return the ranks that hold one copy of the model: tp * pp * cp."""
        return self.tp * self.pp * self.cp

    @property
    def frees_weights(self) -> bool:
        """Return whether the weights of a layer are freed between its forward and its backward."""
        whole = self.fsdp == "megatron" and self.fsdp_sharding in ("optim", "optim_grads")
        return self.fsdp != "none" and not whole


class ParallelConfig(UnresolvedParallel):
    """`parallel` of a resolved run: the keys below are never null."""

    sequence_parallel: bool
    ranks: int
    distributed_optimizer: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    recompute: RecomputeConfig = Field(default_factory=lambda: RecomputeConfig(granularity="none"))

    @property
    def dp(self) -> int:
        """Return the data-parallel size, at least 1 so that rules can continue if the layout is
        broken.
        """
        return max(1, self.ranks // self.model_ranks)
