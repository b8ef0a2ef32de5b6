"""`parallel`: how the model and the batch are cut over ranks. The data-parallel size is derived, never written."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mtrain.config.base import Degree, PositiveInt, Section

RecomputeModule = Literal["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]


class RecomputeConfig(Section):
    """`parallel.recompute`: activations that the backward computes again instead of keeping. Changes no number."""

    granularity: Literal["none", "selective", "full"] = "none"
    """selective: the named modules of every layer; full: whole layers, only their inputs are kept."""
    modules: tuple[RecomputeModule, ...] | None = Field(default=None, strict=False)
    """selective: what is computed again; null: core_attn."""
    method: Literal["uniform", "block"] | None = None
    """full: uniform keeps the input of every group of num_layers layers; block recomputes the first num_layers layers
    of each (virtual) stage, one by one; null: uniform."""
    num_layers: PositiveInt | None = None
    """full: layers of a group (uniform) or of a stage (block); null: 1."""
    distribute_saved_activations: bool = False
    """full, tp without sequence_parallel: the inputs that are kept are cut over the tp ranks."""


class ParallelConfig(Section):
    """`parallel`: degrees of each axis. `dp` = ranks / (tp * pp * cp)."""

    tp: Degree = 1
    """Tensor parallel: each layer's matrices are cut over this many ranks."""
    pp: Degree = 1
    """Pipeline parallel: stages of consecutive layers."""
    vpp: Degree = 1
    """Virtual stages per rank (interleaved schedule)."""
    cp: Degree = 1
    """Context parallel: the sequence is cut over this many ranks."""
    ep: Degree = 1
    """Expert parallel: the experts are spread over this many ranks."""
    etp: Degree | None = None
    """Tensor parallel inside experts; null: as `tp`."""
    sequence_parallel: bool | None = None
    """Norms and residuals are cut over the tp ranks along the sequence; null: true where tp is above 1 on GPUs and
    the sequence divides. On a CPU only with experts, which train with a tp above 1 only so."""
    ranks: Degree | None = None
    """Processes in all; null: every device of the cluster, or the fewest that the degrees need on a CPU."""
    cp_comm_type: Literal["all_gather", "p2p", "a2a", "a2a+p2p"] | None = None
    """How attention sees the whole sequence under `cp`: all_gather gathers keys and values, p2p passes them around a
    ring, a2a exchanges the sequence for heads (Ulysses), a2a+p2p does the second inside groups and the first between
    them; null: p2p with TransformerEngine's attention, else all_gather."""
    hierarchical_cp_sizes: tuple[PositiveInt, PositiveInt] | None = Field(default=None, strict=False)
    """a2a+p2p: ranks of an inner group (a2a) and number of such groups (p2p); their product is `cp`."""
    hybrid_context_parallel: bool = False
    """Dynamic context parallelism: each packed document of a batch is cut over as many data-parallel ranks (1, 2, 4,
    ...) as its length needs, so that documents of very different lengths train together; `cp` stays 1."""
    max_seqlen_per_dp_cp_rank: PositiveInt | None = None
    """hybrid_context_parallel: tokens of a document that one rank takes; null: data.seq_length / dp."""
    pipeline_layout: str | None = None
    """What each stage holds, as `Et*3|(tt|)*29,m|L`: E embedding, t layer, m multi-token prediction, L loss, |
    between the pp * vpp stages; null: equal stages."""
    layers_per_stage: tuple[int, ...] | None = Field(default=None, strict=False)
    """Layers of each of the pp * vpp stages, in the order of the model; null: equal stages."""
    account_for_embedding_in_pipeline_split: bool = False
    """The embedding counts as a layer: the first stage holds one layer fewer than the others."""
    account_for_loss_in_pipeline_split: bool = False
    """The output layer and loss count as a layer: the last stage holds one layer fewer than the others."""
    distributed_optimizer: bool | None = None
    """Optimizer state and main weights are spread over the data-parallel ranks (ZeRO-1); null: true on GPUs with data
    or context parallelism, for adamw without fsdp."""
    microbatch_group_size_per_vp_stage: PositiveInt | None = None
    """vpp: micro-batches that a virtual stage takes in turn before the next one does; null: pp."""
    overlap_p2p_comm_warmup_flush: bool = False
    """vpp: what stages send each other overlaps with work also while the pipeline fills and drains."""
    overlap_grad_reduce: bool | None = None
    """Gradients are reduced while the backward still runs; null: true on GPUs with data or context parallelism,
    without fsdp and hybrid_context_parallel."""
    overlap_param_gather: bool | None = None
    """Weights are gathered while the forward already runs; needs `distributed_optimizer`; null: true on GPUs where
    that and overlap_grad_reduce are."""
    ddp_bucket_size: PositiveInt | None = None
    """overlap_grad_reduce: gradients, counted in elements, that are reduced in one call; null: the larger of 40
    million and a million per data-parallel rank."""
    ddp_pad_buckets_for_high_nccl_busbw: bool = False
    """distributed_optimizer: what is reduced in one call is padded to a multiple of 65,536 elements per rank."""
    ddp_reduce_scatter_with_fp32_accumulation: bool = False
    """distributed_optimizer, overlap_grad_reduce, grad_reduce_in_fp32=false: gradients travel in half precision and
    are added up in fp32."""
    fsdp: Literal["none", "fsdp2", "megatron"] = "none"
    """Weights themselves are spread over the data-parallel ranks and gathered layer by layer: by torch's FSDP2, or by
    megatron-core's own FSDP."""
    fsdp_sharding: Literal["optim", "optim_grads", "optim_grads_params"] | None = None
    """megatron: what is spread (ZeRO-1, 2, 3); null: optim_grads_params. FSDP2 always spreads all three."""
    hsdp_replicas: Degree = 1
    """fsdp, distributed_optimizer: groups of data-parallel ranks that each hold one whole spread copy (HSDP);
    gradients are reduced inside a group and then between groups."""
    recompute: RecomputeConfig = Field(default_factory=RecomputeConfig)
    """Activations computed again in the backward."""

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model: tp * pp * cp."""
        return self.tp * self.pp * self.cp
