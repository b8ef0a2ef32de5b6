"""Mixture-of-experts rules: shards of experts, the exchange of tokens, and routing."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mtrain.config.engine.kernels import NO_COUNTS
from mtrain.config.machine.devices import facts_of, with_cuda_kernels
from mtrain.config.resolve.resolution import smallest_world
from mtrain.config.rules.finding import (
    DP,
    Change,
    Finding,
    divisors,
    each,
    listed,
    multiples,
    nearest,
)
from mtrain.config.rules.rule import Code, rule
from mtrain.config.rules.sharding import DYNAMIC, NO_DYNAMIC
from mtrain.config.schema.moe import MoEConfig
from mtrain.config.schema.run import RunConfig

TINY = "model=mixtral_tiny"
DISPATCHER = "model.moe.token_dispatcher_type"
BALANCE = "model.moe.router_load_balancing_type"
CAPACITY = "model.moe.expert_capacity_factor"
PAD_CAPACITY = "model.moe.pad_expert_input_to_capacity"
PAD_ROUTER = "model.moe.router_padding_for_quantization"
SHARED = "model.moe.shared_expert_intermediate_size"
OVERLAP = "model.moe.shared_expert_overlap"
BIAS = "model.moe.router_enable_expert_bias"
TOPK = "model.moe.router_topk"
GROUPS = "model.moe.router_num_groups"
GROUP_TOPK = "model.moe.router_group_topk"
GROUP_SCORE = "model.moe.router_group_score_topk"
ALLTOALL: Change = {DISPATCHER: "alltoall"}
AUX: Change = {BALANCE: "aux_loss"}
DROPLESS: Change = {CAPACITY: None, "model.moe.token_drop_policy": None, PAD_CAPACITY: False}
NO_GROUPS: Change = {GROUPS: None, GROUP_TOPK: None}
JITTER = "model.moe.input_jitter_eps"
JITTER_ABOVE = {"fp32": 2**-25, "bf16": 2**-9, "fp16": 2**-12}
"""Format -> half of the distance of 1 to the number below it: 1 less so much is 1 again."""
PUBLISHED_GROUP_SCORES = {"deepseek_v2": 1, "deepseek_v3": 2}
"""Model -> how many of its best scores a group is worth in the report on it."""
_GROUPED = f"{TINY} model.moe.num_experts=8 {TOPK}=4"


def _ep_fixes(run: RunConfig, legal: list[int]) -> list[Change]:
    fixes: list[Change] = []
    for ep in nearest(run.parallel.ep, [n for n in legal if n != run.parallel.ep]):
        # A number of ranks that was set may not be a multiple of another ep.
        fixes += [{"parallel.ep": ep}, {"parallel.ep": ep, "parallel.ranks": None}]
    return fixes


@rule(
    Code(
        "MT234",
        example=f"{TINY} {SHARED}=64 {OVERLAP}=true {DISPATCHER}=allgather",
    ),
    Code(
        "MT244",
        "Cannot overlap shared experts because the overlap ignores the offset and the clamp of"
        " gates.",
        example=f"{TINY} model.activation_func_clamp_value=7.0 {SHARED}=64 {OVERLAP}=true",
    ),
    reads=f"{OVERLAP} model.glu_linear_offset {DISPATCHER} model.activation_func_clamp_value",
)
def shared_expert_overlap(run: RunConfig) -> Iterator[Finding]:
    """Cannot overlap shared experts because only the alltoall dispatcher does."""
    m = run.model
    if m.moe is None or not m.moe.shared_expert_overlap:
        return
    off: Change = {OVERLAP: False}
    if m.moe.token_dispatcher_type != "alltoall":
        detail = f"token_dispatcher_type is {m.moe.token_dispatcher_type}"
        yield Finding("MT234", OVERLAP, detail, [ALLTOALL, off])
    # megatron-core's overlapped path has its own activation, without these two.
    if m.glu_linear_offset or m.activation_func_clamp_value is not None:
        detail = "glu_linear_offset or activation_func_clamp_value is set"
        yield Finding("MT244", OVERLAP, detail, [off])


@rule(
    Code("MT235", example=f"{TINY} parallel=ep2 {DISPATCHER}=flex"),
    Code(
        "MT236",
        "Cannot use the flex dispatcher because all experts are on one rank.",
        example=f"{TINY} parallel=single {DISPATCHER}=flex",
    ),
    Code(
        "MT237",
        "Cannot pad experts to their capacity because DeepEP does not.",
        example=f"{TINY} {DISPATCHER}=flex {CAPACITY}=1.0 {PAD_CAPACITY}=true parallel.ep=2",
    ),
    reads=(
        f"{DISPATCHER} cluster.device model.moe.flex_dispatcher_backend {PAD_CAPACITY} parallel.ep"
        " parallel.etp parallel.tp"
    ),
)
def flex_dispatcher(run: RunConfig) -> Iterator[Finding]:
    """Cannot use the flex dispatcher because its kernels run on GPUs."""
    moe = run.model.moe
    p = run.parallel
    if moe is None or moe.token_dispatcher_type != "flex":
        return
    backend = "model.moe.flex_dispatcher_backend"
    alltoall: Change = {**ALLTOALL, backend: None}
    if not facts_of(run.cluster.device).cuda_kernels:
        packages = {"hybridep": "HybridEP", "ncclep": "NCCL EP"}
        package = packages.get(moe.flex_dispatcher_backend or "", "DeepEP")
        detail = f"{package} on {with_cuda_kernels()}, and the device is {run.cluster.device}"
        yield Finding("MT235", DISPATCHER, detail, [alltoall])
    # Its kernels only move tokens between ranks, and with one rank none move.
    if p.ep * (p.etp or p.tp) == 1:
        yield Finding("MT236", DISPATCHER, "ep 1 * etp 1", [alltoall])
    # DeepEP is the default backend of the flex dispatcher.
    if moe.pad_expert_input_to_capacity and moe.flex_dispatcher_backend in (None, "deepep"):
        fixes = [{PAD_CAPACITY: False}, alltoall]
        detail = f"{DISPATCHER} is flex"
        yield Finding("MT237", PAD_CAPACITY, detail, fixes, also=(DISPATCHER, backend))


@rule(
    Code(
        "MT215",
        help=f"If experts have a capacity, {PAD_CAPACITY}=true gives one shape.",
        example=f"{TINY} parallel=ep2 model.moe.pad_alltoall=true {CAPACITY}=1.0",
    ),
    Code(
        "MT216",
        "Cannot save time by a padded exchange because reference experts wait for counts of rows.",
        severity="warning",
        example=(
            f"{TINY} parallel=ep2 cluster=h100x8 kernels.experts=reference "
            "model.moe.pad_alltoall=true"
        ),
    ),
    reads=(
        f"model.moe.pad_alltoall {DISPATCHER} {CAPACITY} {PAD_ROUTER} {BALANCE} {DYNAMIC}"
        " kernels.experts kernels.default cluster.device trainer.cuda_graph_modules"
    ),
)
def padded_exchange(run: RunConfig) -> Iterator[Finding]:
    """Cannot use a padded exchange because it sends lists of as many tokens from each rank, and
    drops none.
    """
    moe = run.model.moe
    k = run.kernels
    key = "model.moe.pad_alltoall"
    if moe is None or not moe.padded:
        return
    off: Change = {key: False, "model.moe.alltoall_capacity_factor": None}
    for name, why, other in _unpadded(run, moe):
        yield Finding("MT215", name, why, [other, off], also=(key,))
    # A padded exchange saves waiting for the host, which reference experts bring back.
    if (k.experts or k.default) == "reference" and not facts_of(run.cluster.device).on_host:
        fixes = [{"kernels.experts": "auto"}, off]
        yield Finding("MT216", "kernels.experts", f"{key} is true", fixes, also=(key,))


def _unpadded(run: RunConfig, moe: MoEConfig) -> Iterator[tuple[str, str, Change]]:
    """Yield keys that exclude a padded exchange, the reason, and the value that each would need."""
    # A padded exchange sends lists of token numbers. What routes by a map of tokens and experts has
    # none.
    if moe.expert_capacity_factor is not None:
        yield CAPACITY, "experts with a capacity are routed to by maps", DROPLESS
    if moe.router_padding_for_quantization:
        yield PAD_ROUTER, "a router that pads gives maps", {PAD_ROUTER: False}
    if moe.router_load_balancing_type == "sinkhorn":
        yield BALANCE, "sinkhorn gives maps", AUX
    if run.parallel.hybrid_context_parallel:
        yield DYNAMIC, "ranks have parts of documents of different lengths", NO_DYNAMIC
    if "moe_router" in (run.trainer.cuda_graph_modules or ()):
        key = "trainer.cuda_graph_modules"
        yield key, "a router that is captured by itself passes on maps", {key: None}
    if run.kernels.experts == "te":
        yield "kernels.experts", NO_COUNTS, {"kernels.experts": "auto"}


@rule(
    Code("MT120", example="parallel=ep2"),
    Code(
        "MT121",
        "Cannot split experts over etp ranks because the model is dense.",
        example="parallel=single parallel.etp=2",
    ),
    reads="model.moe parallel.ep parallel.etp parallel.tp",
)
def expert_axes(run: RunConfig) -> Iterator[Finding]:
    """Cannot shard experts over ep ranks because the model is dense."""
    p = run.parallel
    if run.model.moe is not None:
        return
    if p.ep > 1:
        one = {"parallel.ep": 1}
        fixes: list[Change] = [one, {**one, "parallel.ranks": None}]
        yield Finding("MT120", "parallel.ep", f"ep {p.ep}, model.moe is null", fixes)
    # etp follows tp by default, regardless of experts.
    if p.etp is not None and p.etp != p.tp:
        detail = f"etp {p.etp}, model.moe is null"
        yield Finding("MT121", "parallel.etp", detail, [{"parallel.etp": None}])


@rule(
    Code("MT122", example=f"{TINY} model.moe.num_experts=3 parallel=ep2"),
    Code(
        "MT123",
        "Cannot split each expert over etp ranks because etp does not divide its width.",
        example=f"{TINY} parallel=tp3",
    ),
    reads="model.moe.ffn_hidden_size model.moe.num_experts parallel.ep parallel.etp parallel.tp",
)
def expert_divisibility(run: RunConfig) -> Iterator[Finding]:
    """Cannot shard the experts equally because ep does not divide their number."""
    moe = run.model.moe
    p = run.parallel
    if moe is None:
        return
    etp = p.etp or p.tp
    if moe.num_experts % p.ep:
        legal = divisors(moe.num_experts)
        grow = each("model.moe.num_experts", multiples(moe.num_experts, p.ep))
        detail = f"{moe.num_experts} experts, ep {p.ep}; ep that divide: {listed(legal)}"
        yield Finding("MT122", "parallel.ep", detail, [*_ep_fixes(run, legal), *grow])
    if moe.ffn_hidden_size % etp:
        key = "model.moe.ffn_hidden_size"
        # etp 1 keeps every expert whole, and is legal for any width.
        wide = each(key, multiples(moe.ffn_hidden_size, etp))
        detail = f"{moe.ffn_hidden_size} wide, etp {etp}"
        yield Finding("MT123", key, detail, [{"parallel.etp": 1}, *wide])


@rule(
    Code("MT124", example=f"{TINY} parallel=ep2 parallel.ranks=3"),
    reads=f"{DP} parallel.etp parallel.ep model.moe.num_experts parallel.hsdp_replicas",
)
def expert_grid(run: RunConfig) -> Iterator[Finding]:
    """Cannot form whole grids of experts because a stage's ranks are not a multiple of ep * etp."""
    p = run.parallel
    etp = p.etp or p.tp
    # Experts form a grid of their own over the same ranks of a stage: ep * etp of them, repeated.
    inner = p.dp * p.cp * p.tp
    ranks = p.ranks
    if run.model.moe is None or ranks % p.model_ranks or inner % (p.ep * etp) == 0:
        return
    shared = divisors(math.gcd(inner, run.model.moe.num_experts))
    legal = [ep for ep in shared if inner % (ep * etp) == 0]
    fixes = [
        *_ep_fixes(run, legal),
        *each("parallel.etp", [n for n in divisors(etp) if inner % (p.ep * n) == 0]),
        *each("parallel.ranks", [None, *multiples(ranks, smallest_world(p))]),
    ]
    detail = f"dp {p.dp} * cp {p.cp} * tp {p.tp} = {inner}, ep {p.ep} * etp {etp} = {p.ep * etp}"
    yield Finding("MT124", "parallel.ep", detail, fixes)


@rule(
    Code("MT125", example=f"{TINY} parallel=tp2 parallel.sequence_parallel=false"),
    reads="model.moe parallel.tp parallel.sequence_parallel",
)
def expert_sequence_parallelism(run: RunConfig) -> Iterator[Finding]:
    """Cannot train experts with tensor parallelism because megatron-core's MoE layer needs sequence
    parallelism too.
    """
    p = run.parallel
    if run.model.moe is not None and p.tp > 1 and not p.sequence_parallel:
        # megatron-core refuses this as slow, and only in training.
        fixes: list[Change] = [
            {"parallel.sequence_parallel": True},
            {"parallel.tp": 1},
            {"parallel.tp": 1, "parallel.ranks": None},
        ]
        yield Finding("MT125", "parallel.sequence_parallel", f"tp {p.tp}", fixes)


@rule(
    Code("MT221", example=f"{TINY} model.moe.first_dense_layers=4"),
    reads="model.num_layers model.moe.first_dense_layers",
)
def dense_layer_count(run: RunConfig) -> Iterator[Finding]:
    """Cannot train experts because every layer is dense."""
    moe = run.model.moe
    layers = run.model.num_layers
    key = "model.moe.first_dense_layers"
    if moe is not None and moe.first_dense_layers >= layers:
        detail = f"{moe.first_dense_layers} dense layers of {layers}"
        fixes = [*each(key, [layers - 1, 0]), {"model.moe": None}]
        yield Finding("MT221", key, detail, fixes)


@rule(
    Code("MT229", example=f"{TINY} parallel=tp2sp model.add_bias_linear=true"),
    Code(
        "MT240",
        "Cannot add a bias to every linear layer because megatron-core's shared experts have none.",
        example=f"{TINY} {SHARED}=64 model.add_bias_linear=true",
    ),
    reads=f"model.add_bias_linear {SHARED} parallel.etp parallel.tp",
)
def expert_biases(run: RunConfig) -> Iterator[Finding]:
    """Cannot split experts with biases because megatron-core would add a bias once per etp rank."""
    etp = run.parallel.etp or run.parallel.tp
    moe = run.model.moe
    key = "model.add_bias_linear"
    if moe is None or not run.model.add_bias_linear:
        return
    # The outputs of etp ranks are summed, and with them etp copies of the bias.
    if etp > 1:
        yield Finding("MT229", key, f"etp {etp}", [{"parallel.etp": 1}, {key: False}])
    if width := moe.shared_expert_intermediate_size:
        fixes: list[Change] = [{key: False}, {SHARED: None, OVERLAP: False}]
        yield Finding("MT240", key, f"shared experts {width} wide", fixes, also=(SHARED,))


@rule(
    Code("MT230", example=f"{TINY} {CAPACITY}=1.0 {DISPATCHER}=allgather"),
    Code(
        "MT231",
        "Cannot drop the same tokens as one rank would because each rank counts its own.",
        severity="warning",
        example=f"{TINY} parallel=tp2sp {CAPACITY}=1.0",
    ),
    reads=f"{CAPACITY} {BALANCE} {DISPATCHER} parallel.cp parallel.sequence_parallel parallel.tp",
)
def capacity(run: RunConfig) -> Iterator[Finding]:
    """Cannot limit the tokens of an expert because this balance or dispatcher drops none."""
    moe = run.model.moe
    p = run.parallel
    if moe is None or moe.expert_capacity_factor is None:
        return
    if moe.router_load_balancing_type == "sinkhorn":
        detail = "sinkhorn; aux_loss, seq_aux_loss and none do"
        yield Finding("MT230", CAPACITY, detail, [DROPLESS, AUX])
    if moe.token_dispatcher_type == "allgather":
        yield Finding("MT230", CAPACITY, "the allgather dispatcher", [DROPLESS, ALLTOALL])
    # A rank's share of the tokens depends on the layout, as do the tokens beyond a capacity.
    if p.sequence_parallel or p.cp > 1:
        yield Finding("MT231", CAPACITY, f"tp {p.tp} * cp {p.cp}", [DROPLESS])


@rule(
    Code("MT232", example=f"{TINY} {BALANCE}=sinkhorn {BIAS}=true"),
    Code(
        "MT233",
        "Cannot balance as one rank would because sinkhorn normalises over the tokens of each"
        " rank.",
        severity="warning",
        example=f"{TINY} parallel=tp2sp {BALANCE}=sinkhorn",
    ),
    reads=f"{BALANCE} {GROUPS} parallel.cp parallel.sequence_parallel {BIAS} parallel.tp",
)
def sinkhorn_scope(run: RunConfig) -> Iterator[Finding]:
    """Cannot add groups or a balancing bias to sinkhorn because it chooses experts by itself."""
    moe = run.model.moe
    p = run.parallel
    if moe is None or moe.router_load_balancing_type != "sinkhorn":
        return
    if moe.router_num_groups is not None or moe.router_enable_expert_bias:
        off: Change = {**NO_GROUPS, BIAS: False, "model.moe.router_bias_update_rate": None}
        names = {
            "router_num_groups": moe.router_num_groups is not None,
            "router_enable_expert_bias": moe.router_enable_expert_bias,
        }
        detail = " and ".join(name for name, is_set in names.items() if is_set)
        yield Finding("MT232", BALANCE, detail, [off, AUX], also=(GROUPS, BIAS))
    # These axes split one micro-batch over ranks; data parallelism splits the batch anyway.
    if p.sequence_parallel or p.cp > 1:
        yield Finding("MT233", BALANCE, f"tp {p.tp} * cp {p.cp}", [AUX])


@rule(
    Code(
        "MT238",
        example=(
            f"{TINY} precision=fp8_tensorwise cluster=h100x8 {DISPATCHER}=allgather"
            f" {PAD_ROUTER}=true"
        ),
    ),
    reads=f"{PAD_ROUTER} {DISPATCHER}",
)
def router_padding(run: RunConfig) -> Iterator[Finding]:
    """Cannot pad the router's output because the allgather dispatcher sends no padding."""
    moe = run.model.moe
    padded = moe is not None and moe.router_padding_for_quantization
    if moe is not None and padded and moe.token_dispatcher_type == "allgather":
        detail = f"{DISPATCHER} is allgather"
        yield Finding("MT238", PAD_ROUTER, detail, [ALLTOALL, {PAD_ROUTER: False}])


@rule(
    Code(
        "MT239",
        severity="warning",
        example=f"{TINY} model.moe.router_force_load_balancing=true",
    ),
    reads="model.moe.router_force_load_balancing",
)
def random_routing(run: RunConfig) -> Iterator[Finding]:
    """Cannot train a model because tokens go to random experts, which only measures speed."""
    moe = run.model.moe
    key = "model.moe.router_force_load_balancing"
    if moe is not None and moe.router_force_load_balancing:
        yield Finding("MT239", key, fixes=[{key: False}])


@rule(
    Code("MT540", example=f"{TINY} precision=bf16 {JITTER}=0.001"),
    reads=f"{JITTER} precision.dtype",
)
def router_jitter(run: RunConfig) -> Iterator[Finding]:
    """Cannot jitter the router's input because 1 - this is 1 in its format."""
    moe = run.model.moe
    if moe is None or moe.input_jitter_eps is None:
        return
    dtype = run.precision.dtype
    least = JITTER_ABOVE[dtype]
    if moe.input_jitter_eps <= least:
        detail = f"{moe.input_jitter_eps:g} with precision.dtype {dtype}, more than {least:.2g} is"
        yield Finding("MT540", JITTER, f"{detail} needed", each(JITTER, [0.01, None]))


@rule(
    Code("MT220", example=f"{TINY} model.moe.num_experts=1"),
    reads=f"{TOPK} model.moe.num_experts",
)
def router_topk_range(run: RunConfig) -> Iterator[Finding]:
    """Cannot route a token to so many experts because there are fewer."""
    moe = run.model.moe
    if moe is not None and moe.router_topk > moe.num_experts:
        fewer = {TOPK: moe.num_experts}
        # A softmax over one chosen expert has no gradient.
        fixes = [fewer, {**fewer, "model.moe.router_pre_softmax": True}]
        yield Finding("MT220", TOPK, f"{moe.router_topk} of {moe.num_experts} experts", fixes)


@rule(
    Code("MT222", example=f"{TINY} {TOPK}=1"),
    Code(
        "MT223",
        "Cannot balance experts by a bias because it needs sigmoid scores.",
        example=f"{TINY} {BIAS}=true",
    ),
    Code(
        "MT224",
        "Cannot add a balancing loss because sinkhorn balances without one.",
        example=f"{TINY} {BALANCE}=sinkhorn",
    ),
    reads=(
        f"{BIAS} {BALANCE} model.moe.router_score_function {TOPK} model.moe.aux_loss_coeff"
        " model.moe.router_pre_softmax"
    ),
)
def router_scores(run: RunConfig) -> Iterator[Finding]:
    """Cannot train the router because a softmax over one chosen expert is always 1, without
    gradient.
    """
    moe = run.model.moe
    if moe is None:
        return
    # With sinkhorn megatron-core scores a single choice by a sigmoid, which has a gradient.
    sinkhorn = moe.router_load_balancing_type == "sinkhorn"
    softmax = moe.router_score_function == "softmax" and not sinkhorn
    if moe.router_topk == 1 and softmax and not moe.router_pre_softmax:
        key = "model.moe.router_pre_softmax"
        yield Finding("MT222", key, "router_topk 1", [{key: True}, {TOPK: 2}])
    if moe.router_enable_expert_bias and moe.router_score_function != "sigmoid":
        fixes: list[Change] = [{"model.moe.router_score_function": "sigmoid"}, {BIAS: False}]
        yield Finding("MT223", BIAS, f"not on {moe.router_score_function}", fixes)
    if sinkhorn and moe.aux_loss_coeff:
        key = "model.moe.aux_loss_coeff"
        yield Finding("MT224", key, f"aux_loss_coeff {moe.aux_loss_coeff}", [{key: 0.0}])


@rule(
    Code("MT225", example=f"{_GROUPED} {GROUPS}=2"),
    Code(
        "MT226",
        "Cannot form equal groups because they do not divide the experts.",
        example=f"{_GROUPED} {GROUPS}=3 {GROUP_TOPK}=2",
    ),
    Code(
        "MT227",
        "Cannot choose so many groups because there are fewer.",
        example=f"{_GROUPED} {GROUPS}=2 {GROUP_TOPK}=3",
    ),
    Code(
        "MT228",
        "Cannot choose this number of groups because a token visits each of them, and they must"
        " hold all experts of a token.",
        example=f"{_GROUPED} {GROUPS}=8 {GROUP_TOPK}=2",
    ),
    reads=f"{GROUP_TOPK} {GROUPS} {TOPK} model.moe.num_experts",
)
def group_limited_routing(run: RunConfig) -> Iterator[Finding]:
    """Cannot limit routing to groups because that takes the number of groups and of chosen ones."""
    moe = run.model.moe
    if moe is None:
        return
    groups = moe.router_num_groups
    chosen = moe.router_group_topk
    if (groups is None) != (chosen is None):
        path = GROUP_TOPK if chosen is None else GROUPS
        yield Finding("MT225", path, "both router_num_groups and router_group_topk", [NO_GROUPS])
    if groups is None or chosen is None:
        return
    topk = moe.router_topk
    size = moe.num_experts // groups
    if moe.num_experts % groups:
        # Fewer groups than chosen ones would only exchange MT226 for MT227.
        legal = nearest(groups, [d for d in divisors(moe.num_experts) if d >= chosen])
        detail = f"{moe.num_experts} experts, {groups} groups"
        yield Finding("MT226", GROUPS, detail, [*each(GROUPS, legal), NO_GROUPS])
    if chosen > groups:
        fixes = [{GROUP_TOPK: groups}, NO_GROUPS]
        yield Finding("MT227", GROUP_TOPK, f"{chosen} of {groups} groups", fixes)
    # Each chosen group gives one expert at least, and all of its experts at most.
    elif not chosen <= topk <= chosen * size:
        legal = [c for c in range(1, groups + 1) if c <= topk <= c * size]
        fixes = [*each(GROUP_TOPK, nearest(chosen, legal)), NO_GROUPS]
        detail = f"{chosen} groups of {size} experts, router_topk {topk}"
        yield Finding("MT228", GROUP_TOPK, detail, fixes)


@rule(
    Code("MT242", example=f"{_GROUPED} {GROUPS}=4 {GROUP_TOPK}=2 {GROUP_SCORE}=3"),
    Code(
        "MT243",
        "Cannot score groups like this because the published model of this name sums another number"
        " of scores.",
        example=f"{_GROUPED} {GROUPS}=4 {GROUP_TOPK}=2 model.name=deepseek_v2",
    ),
    reads=f"{GROUPS} model.moe.num_experts {GROUP_SCORE} model.name",
)
def group_scores(run: RunConfig) -> Iterator[Finding]:
    """Cannot sum so many scores of a group because a group has fewer experts."""
    moe = run.model.moe
    if moe is None or moe.router_num_groups is None or moe.num_experts % moe.router_num_groups:
        return
    size = moe.num_experts // moe.router_num_groups
    # By default a group is worth its best score.
    best = moe.group_score_topk or 1
    if best > size:
        fixes = each(GROUP_SCORE, [size, None])
        yield Finding("MT242", GROUP_SCORE, f"{best} scores of {size}", fixes, also=(GROUPS,))
    # A checkpoint of such a model was trained with the published score, and would route otherwise.
    for name, published in PUBLISHED_GROUP_SCORES.items():
        if run.model.name.startswith(name) and best != published:
            fixes = [{GROUP_SCORE: published}, {"model.name": "custom"}]
            detail = f"{name}: {published}, here {best}"
            yield Finding("MT243", GROUP_SCORE, detail, fixes)
