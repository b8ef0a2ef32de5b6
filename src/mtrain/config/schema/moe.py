"""`model.moe`: a mixture of experts. Keys carry megatron-core's names without `moe_`."""

import math
from typing import Annotated, Literal

from pydantic import Field

from mtrain.config.schema.base import (
    SAME,
    Effect,
    Flag,
    Key,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    SquareWeight,
    Width,
)


class MoEConfig(Section):
    """`model.moe`: a mixture of experts in place of the dense MLP."""

    core_prefix = "moe_"

    num_experts: Annotated[
        Width,
        Key(
            feeds="num_moe_experts",
            flag=Flag("--num-experts", none=(0,)),
            hf="num_local_experts n_routed_experts",
        ),
    ]
    """Routed experts per layer."""
    router_topk: Annotated[Width, Key(feeds=SAME, flag=SAME, hf="num_experts_per_tok")] = 2
    """The number of experts that each token visits."""
    ffn_hidden_size: Annotated[Width, Key(feeds=SAME, hf="moe_intermediate_size", unit="channels")]
    """Width of one expert's MLP."""
    shared_expert_intermediate_size: Annotated[
        Width | None, Key(feeds=SAME, flag=Flag(SAME, none=(0,)), unit="channels")
    ] = None
    """The total width of the shared experts that every token visits; null: none."""
    first_dense_layers: Annotated[NonNegativeInt, Key(hf="first_k_dense_replace")] = 0
    """The number of first layers that keep the dense MLP of `model.ffn_hidden_size`."""
    router_score_function: Annotated[Literal["softmax", "sigmoid"], Key(feeds=SAME, flag=SAME)] = (
        "softmax"
    )
    """The function from router logits to scores."""
    router_pre_softmax: Annotated[bool, Key(feeds=SAME, flag=SAME)] = False
    """Softmax before the top-k choice instead of over the chosen logits."""
    router_load_balancing_type: Annotated[
        Literal["none", "aux_loss", "seq_aux_loss", "sinkhorn"], Key(feeds=SAME)
    ] = "aux_loss"
    """The method that balances the load of the experts."""
    aux_loss_coeff: Annotated[
        NonNegativeFloat,
        Key(effect=Effect.NUMERICS, hf="router_aux_loss_coef", aka="moe_aux_loss_coeff"),
    ] = 0.01
    """The weight of the balancing loss of each layer with experts. The loss is E sum_i f_i P_i,
    summed over the layers: E experts, f_i the share of choices of expert i (by scores only, without
    groups and bias; the shares add up to 1), P_i the mean of its normalised scores; over a
    micro-batch, for seq_aux_loss over each sample. Padding does not count, and a step averages over
    tokens. It is megatron-core's loss, and alpha_1 of DeepSeek-V2. transformers'
    router_aux_loss_coef weighs one loss of f and P averaged over L layers, with f adding up to
    router_topk: the coefficient here is theirs times router_topk / L.
    """
    z_loss_coeff: Annotated[
        SquareWeight | None, Key(feeds=SAME, effect=Effect.NUMERICS, flag=SAME)
    ] = None
    """Weight of the router's z-loss, a mean over tokens without padding; null: off."""
    router_enable_expert_bias: Annotated[bool, Key(feeds=SAME, flag=SAME)] = False
    """Balance by a bias on the scores that each step adjusts (DeepSeek-V3), not by a loss."""
    router_num_groups: Annotated[Width | None, Key(feeds=SAME, flag=SAME, hf="n_group")] = None
    """Groups of experts for group-limited routing; null: off."""
    router_group_topk: Annotated[Width | None, Key(feeds=SAME, flag=SAME, hf="topk_group")] = None
    """The number of groups that a token may choose from."""
    router_group_score_topk: Annotated[
        PositiveInt | None, Key(when="model.moe.router_num_groups")
    ] = None
    """router_num_groups: the score of a group is the sum of its so many best scores: 1 in
    DeepSeek-V2, 2 in DeepSeek-V3; null: 2, or 1 if a group is one expert. Megatron-LM uses
    router_topk // router_group_topk.
    """
    router_topk_scaling_factor: Annotated[
        Annotated[float, Field(gt=0, le=100)] | None,
        Key(feeds=SAME, flag=SAME, hf="routed_scaling_factor"),
    ] = None
    """Factor on the chosen scores."""
    router_bias_update_rate: Annotated[
        NonNegativeFloat | None,
        Key(
            feeds=SAME,
            when="model.moe.router_enable_expert_bias=true",
            null=0.001,
            effect=Effect.NUMERICS,
            flag=Flag(SAME, absent=0.001),
        ),
    ] = None
    """router_enable_expert_bias: the step size of an expert's bias; 0: biases are frozen, null:
    0.001.
    """
    router_padding_for_quantization: Annotated[
        bool, Key(feeds=SAME, effect=Effect.NUMERICS, aka="moe_router_padding_for_fp8")
    ] = False
    """precision.fp8, fp4: the router pads the tokens of an expert to the multiple that its GEMMs
    need, which saves TransformerEngine's experts a copy; our kernels need neither.
    """
    router_force_load_balancing: Annotated[
        bool, Key(feeds=SAME, effect=Effect.NUMERICS, flag=SAME)
    ] = False
    """Random routing with equal load for benchmarks: the model learns no routing."""
    input_jitter_eps: Annotated[
        Annotated[float, Field(gt=0, lt=1)] | None,
        Key(feeds=SAME, effect=Effect.NUMERICS, flag=SAME),
    ] = None
    """The router's input is multiplied by a random number between 1 - this and 1 + this; null: it
    is not. As with dropout, other layouts draw other numbers.
    """
    apply_probs_on_input: Annotated[
        bool, Key(feeds=SAME, when="model.moe.router_topk=1", flag=SAME)
    ] = False
    """router_topk=1: weigh the input of an expert instead of its output (Llama 4)."""
    shared_expert_gate: Annotated[
        bool, Key(feeds=SAME, when="model.moe.shared_expert_intermediate_size", flag=SAME)
    ] = False
    """Weigh the output of the shared experts by a learned gate for each token (Qwen2-MoE)."""
    token_dispatcher_type: Annotated[
        Literal["alltoall", "allgather", "flex"],
        Key(feeds=SAME, effect=Effect.PARALLELISM, flag=Flag(SAME, absent="allgather")),
    ] = "alltoall"
    """The exchange of tokens between expert-parallel ranks; flex: by the kernels of
    `flex_dispatcher_backend`, on GPUs. With triton for kernels.moe_router and moe_permute, alltoall
    tells the host the row counts once per layer, unless `pad_alltoall` makes them equal, and
    allgather tells it nothing, with room for the most rows that a rank can get.
    """
    flex_dispatcher_backend: Annotated[
        Literal["deepep", "hybridep", "ncclep"] | None,
        Key(
            feeds=SAME,
            when="model.moe.token_dispatcher_type=flex",
            null="deepep",
            effect=Effect.PARALLELISM,
        ),
    ] = None
    """token_dispatcher_type=flex: the library; null: deepep. ncclep: NCCL's, through
    TransformerEngine, with megatron-core 0.19.
    """
    expert_capacity_factor: Annotated[
        PositiveFloat | None, Key(feeds=SAME, effect=Effect.NUMERICS, flag=SAME)
    ] = None
    """The tokens that an expert accepts of a rank's micro-batch, relative to the even share without
    padding; others are dropped; null: none is dropped.
    """
    pad_expert_input_to_capacity: Annotated[
        bool,
        Key(
            feeds=SAME,
            when="model.moe.expert_capacity_factor",
            effect=Effect.PARALLELISM,
            flag=SAME,
        ),
    ] = False
    """Experts always compute their whole capacity: one shape in every step."""
    token_drop_policy: Annotated[
        Literal["probs", "position"] | None,
        Key(
            feeds=SAME,
            when="model.moe.expert_capacity_factor",
            null="probs",
            effect=Effect.NUMERICS,
            flag=Flag(SAME, absent="probs"),
        ),
    ] = None
    """expert_capacity_factor: which tokens stay, the most probable or the first; null: probs."""
    pad_alltoall: Annotated[
        bool, Key(when="model.moe.token_dispatcher_type=alltoall", effect=Effect.PARALLELISM)
    ] = False
    """token_dispatcher_type=alltoall: ranks exchange buffers of one size, with room for the largest
    possible number of rows or for that of `alltoall_capacity_factor`: no layer tells the host
    anything, and shapes are the same in every step, as CUDA graphs need. No token is dropped;
    experts are not TransformerEngine's.
    """
    alltoall_capacity_factor: Annotated[
        PositiveFloat | None, Key(when="model.moe.pad_alltoall=true", effect=Effect.PARALLELISM)
    ] = None
    """pad_alltoall: the row capacity of each pair of ranks relative to the even share; a training
    step that exceeds it ends the run. null: all rows that one rank's experts can get. Without
    training, rows are not padded; a graph of whole steps has room for all.
    """
    shared_expert_overlap: Annotated[
        bool,
        Key(
            feeds=SAME,
            when="model.moe.shared_expert_intermediate_size",
            effect=Effect.PARALLELISM,
            flag=SAME,
        ),
    ] = False
    """Shared experts compute while tokens travel; needs the alltoall dispatcher."""

    @property
    def padded(self) -> bool:
        """Return whether expert-parallel ranks exchange equal numbers of rows in every step, and
        routing uses lists.
        """
        return self.pad_alltoall and self.token_dispatcher_type == "alltoall"

    @property
    def group_score_topk(self) -> int | None:
        """Return the number of best scores that count for a group of experts; None: there are no
        groups.
        """
        if self.router_num_groups is None:
            return None
        # DeepSeek-V3 scores a group by its two best experts; a group of one has no second.
        return self.router_group_score_topk or min(
            2, max(1, self.num_experts // self.router_num_groups)
        )


def room_of(tokens: int, topk: int, local: int, ranks: int, factor: float | None) -> int:
    """Return the rows from one rank to each of `ranks` in padded exchanges
    (`model.moe.pad_alltoall`).

    `tokens` of the sender visit `topk` experts each, of which a rank holds `local`; `factor` is
    relative to the even share.
    """
    # A token sends at most one row to each expert of a rank.
    most = tokens * min(topk, local)
    return most if factor is None else min(most, math.ceil(factor * tokens * topk / ranks))
