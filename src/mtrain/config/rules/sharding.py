"""Rules of context parallelism, FSDP, replicas and recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mtrain.config.resolve.stages import stages, uneven
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
from mtrain.config.rules.pipeline import SPLIT
from mtrain.config.rules.rule import Code, rule
from mtrain.config.rules.unused import UNUSED
from mtrain.config.schema.parallel import RecomputeModule
from mtrain.config.schema.run import RunConfig
from mtrain.models.hybrid.config import MAMBA, MLP, SOFTMAX
from mtrain.units import number_of

CP_COMM = "parallel.cp_comm_type"
CP_SIZES = "parallel.hierarchical_cp_sizes"
NO_CONTEXT: Change = {"parallel.cp": 1, CP_COMM: None, CP_SIZES: None}
DYNAMIC = "parallel.hybrid_context_parallel"
RANK_TOKENS = "parallel.max_seqlen_per_dp_cp_rank"
NO_DYNAMIC: Change = {DYNAMIC: False, RANK_TOKENS: None}
UNSHARDED: Change = {"parallel.fsdp": "none", "parallel.fsdp_sharding": None}
NO_FSDP: Change = {**UNSHARDED, "parallel.hsdp_replicas": 1}
TORCH_FSDP: Change = {"parallel.fsdp": "fsdp2", "parallel.fsdp_sharding": None}
ZERO: Change = {"parallel.distributed_optimizer": True}
MODULES = "parallel.recompute.modules"
GRANULARITY = "parallel.recompute.granularity"
GROUP = "parallel.recompute.num_layers"
NO_RECOMPUTE: Change = {GRANULARITY: "none", MODULES: None}


@rule(
    Code("MT214", example="model=deepseek_tiny model.mla.rope_type=yarn parallel=cp3"),
    reads="model.mla.rope_type parallel.cp model.mla.original_max_position_embeddings",
)
def scaled_position_split(run: RunConfig) -> Iterator[Finding]:
    """Cannot split yarn's table of positions over the cp ranks because megatron-core gives each two
    equal chunks.
    """
    cp = run.parallel.cp
    mla = run.model.mla
    key = "model.mla.original_max_position_embeddings"
    if mla is None or mla.rope_type != "yarn" or cp == 1:
        return
    table = mla.original_max_position_embeddings
    if table is not None and table % (2 * cp):
        fixes = [NO_CONTEXT, *each(key, multiples(table, 2 * cp))]
        yield Finding("MT214", key, f"{table} positions, 2 * cp {cp} = {2 * cp} chunks", fixes)


@rule(
    Code("MT169", example=f"parallel=dp2 {DYNAMIC}=true"),
    Code(
        "MT170",
        "Cannot read the longest document because all ranks together hold fewer tokens.",
        example=f"parallel=dp2 {DYNAMIC}=true data.packed=true {RANK_TOKENS}=100",
    ),
    reads=(
        f"{DYNAMIC} data.packed data.seq_length {DP} {CP_COMM} {RANK_TOKENS}"
        " parallel.overlap_grad_reduce parallel.fsdp model.moe model.mla model.mtp_num_layers"
    ),
)
def dynamic_context(run: RunConfig) -> Iterator[Finding]:
    """Cannot schedule documents over ranks because megatron-core's scheduler excludes this."""
    p = run.parallel
    m = run.model
    d = run.data
    if not p.hybrid_context_parallel:
        return

    def refuse(detail: str, *fixes: Change) -> Finding:
        return Finding("MT169", DYNAMIC, detail, [*fixes, NO_DYNAMIC])

    if not d.packed:
        detail = "it splits the documents of packed samples, and data.packed is false"
        yield refuse(detail, {"data.packed": True})
    if p.cp > 1 or p.pp > 1:
        flat = {"parallel.cp": 1, "parallel.pp": 1, "parallel.vpp": 1, CP_COMM: None}
        yield refuse(f"cp {p.cp}, pp {p.pp}; it takes cp 1, pp 1", flat)
    # The size of a group follows from the length of its document, and heads divide only some.
    if p.cp_comm_type in ("a2a", "a2a+p2p"):
        detail = "heads cannot be exchanged in groups of every size; all_gather and p2p can"
        yield refuse(detail, {CP_COMM: "all_gather"})
    # A power of two has a single bit, which `dp - 1` does not share.
    if p.dp < 2 or p.dp & (p.dp - 1):
        yield refuse(f"dp {p.dp}; groups of ranks are powers of two")
    # From here on: ranks run different numbers of documents, and would wait for each other.
    if m.moe is not None or m.mla is not None or m.mtp_num_layers is not None:
        yield refuse("experts, MLA or MTP layers")
    if p.overlap_grad_reduce or p.fsdp != "none":
        keys = ("parallel.overlap_grad_reduce", "parallel.overlap_param_gather")
        off = dict.fromkeys(keys, False)
        yield refuse("gradients that are reduced during the backward", off, {**off, **UNSHARDED})
    if (p.max_seqlen_per_dp_cp_rank or 1) * p.dp < d.length:
        detail = f"{p.dp} ranks of {p.max_seqlen_per_dp_cp_rank} tokens, a document of {d.length}"
        fixes = [{RANK_TOKENS: -(-d.length // p.dp)}, NO_DYNAMIC]
        yield Finding("MT170", RANK_TOKENS, detail, fixes)


@rule(
    Code(
        "MT160",
        "Cannot exchange heads in two levels because a2a+p2p needs two sizes above 1 whose product"
        " is cp.",
        example=f"parallel=cp4 {CP_COMM}=a2a+p2p",
    ),
    Code("MT161", example=f"parallel=cp4 {CP_COMM}=a2a model.num_query_groups=2"),
    reads=(
        f"parallel.cp {CP_COMM} {CP_SIZES} model.num_attention_heads"
        " parallel.tp model.mla model.num_query_groups"
    ),
)
def exchanged_heads(run: RunConfig) -> Iterator[Finding]:
    """Cannot exchange the sequence for heads because the ranks of a group do not divide the
    heads.
    """
    p = run.parallel
    m = run.model
    if p.cp == 1 or p.cp_comm_type not in ("a2a", "a2a+p2p"):
        return
    ranks = p.cp
    sizes = p.hierarchical_cp_sizes
    gather: Change = {CP_COMM: "all_gather", CP_SIZES: None}
    if p.cp_comm_type == "a2a+p2p":
        if sizes is None or sizes[0] * sizes[1] != p.cp or 1 in sizes:
            # Both levels need two ranks at least: one level by itself is a2a or p2p.
            halves = [[d, p.cp // d] for d in divisors(p.cp) if 1 < d < p.cp]
            given = "none are given" if sizes is None else f"{sizes[0]} * {sizes[1]} are given"
            fixes = [*each(CP_SIZES, halves), gather, NO_CONTEXT]
            yield Finding("MT160", CP_SIZES, f"cp {p.cp}, {given}", fixes)
            return
        # Heads are exchanged within the inner level only; the outer one passes keys and values on.
        ranks = sizes[0]
    heads = m.num_attention_heads // p.tp
    # MLA expands its latent vectors to a key and a value for each query head.
    groups = heads if m.mla else max(1, m.query_groups // p.tp)
    if heads % ranks or groups % ranks:
        detail = f"{ranks} ranks; a rank of tp {p.tp} has {heads} heads, {groups} key/value heads"
        yield Finding("MT161", CP_COMM, detail, [gather, NO_CONTEXT])


@rule(
    Code("MT162", example="parallel=dp2 parallel.fsdp=fsdp2 parallel.distributed_optimizer=true"),
    Code(
        "MT164",
        "Cannot replicate experts because megatron's FSDP sums their gradients over the ranks of"
        " dense weights, which hold other experts.",
        example="model=mixtral_tiny parallel=ep2 parallel.fsdp=megatron parallel.hsdp_replicas=2",
    ),
    reads=(
        "parallel.fsdp parallel.distributed_optimizer parallel.overlap_grad_reduce "
        "parallel.overlap_param_gather parallel.hsdp_replicas parallel.ep parallel.etp parallel.tp"
    ),
)
def fully_sharded(run: RunConfig) -> Iterator[Finding]:
    """Cannot add this to FSDP because it shards and overlaps by itself."""
    p = run.parallel
    if p.fsdp == "none":
        return
    keys = ("distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
    if set_keys := [key for key in keys if getattr(p, key)]:
        off = {f"parallel.{key}": False for key in set_keys}
        detail = f"{' and '.join(set_keys)} must be false"
        yield Finding("MT162", "parallel.fsdp", detail, [off, NO_FSDP])
    etp = p.etp or p.tp
    # With replicas megatron-core reduces gradients of experts over the ranks of dense weights; ep
    # and etp keep other experts there.
    if p.fsdp == "megatron" and p.hsdp_replicas > 1 and (p.ep > 1 or etp != p.tp):
        detail = f"{p.hsdp_replicas} replicas, ep {p.ep}, etp {etp}"
        fixes = [{"parallel.hsdp_replicas": 1}, TORCH_FSDP, NO_FSDP]
        yield Finding("MT164", "parallel.fsdp", detail, fixes)


@rule(
    Code(
        "MT163",
        example=(
            "model=mixtral_tiny parallel=pp2 parallel.fsdp=megatron"
            " model.moe.shared_expert_intermediate_size=64"
        ),
    ),
    reads=(
        "parallel.fsdp parallel.fsdp_sharding parallel.pp model.moe.shared_expert_intermediate_size"
    ),
)
def fsdp_shared_experts(run: RunConfig) -> Iterator[Finding]:
    """Cannot train shared experts in a pipeline with megatron's FSDP because it ends a micro-batch
    before all gradients exist.
    """
    p = run.parallel
    moe = run.model.moe
    # Sharding of the optimizer's state only keeps whole gradients, and is not affected.
    if p.fsdp != "megatron" or p.fsdp_sharding == "optim" or p.pp == 1 or moe is None:
        return
    if moe.shared_expert_intermediate_size:
        fixes = [{"parallel.fsdp_sharding": "optim"}, TORCH_FSDP, {"parallel.pp": 1}]
        also = ("model.moe.shared_expert_intermediate_size",)
        yield Finding("MT163", "parallel.fsdp", f"pp {p.pp}", fixes, also=also)


@rule(
    UNUSED,
    Code("MT167", example="parallel=dp4 parallel.fsdp=fsdp2 parallel.hsdp_replicas=3"),
    reads=(
        f"parallel.hsdp_replicas {DP} parallel.ep parallel.etp parallel.fsdp"
        " parallel.distributed_optimizer"
    ),
)
def replica_divisibility(run: RunConfig) -> Iterator[Finding]:
    """Cannot form this number of copies because the ranks do not divide into as many equal groups
    of the same experts and at least two ranks.
    """
    p = run.parallel
    key = "parallel.hsdp_replicas"
    copies = p.hsdp_replicas
    if copies == 1:
        return
    if p.fsdp == "none" and not p.distributed_optimizer:
        detail = "without parallel.fsdp or parallel.distributed_optimizer"
        yield Finding("MT150", key, detail, [{key: 1}, ZERO])
    ranks = p.dp * p.cp
    etp = p.etp or p.tp
    # Ranks with the same experts reduce their gradients together.
    same_experts = ranks * p.tp // (p.ep * etp)
    # A copy on a single rank would not be sharded at all.
    legal = [d for d in divisors(ranks) if d < ranks and same_experts % d == 0]
    if ranks % copies or ranks == copies:
        detail = f"{copies} copies over {ranks} ranks, dp {p.dp} * cp {p.cp}"
    elif same_experts % copies:
        detail = f"{copies} copies over {same_experts} ranks with the same experts, "
        detail += f"ep {p.ep}, etp {etp}"
    else:
        return
    fixes = each(key, [*nearest(copies, legal), 1])
    yield Finding("MT167", key, f"{detail}; possible: {listed(legal)}", fixes)


def recomputable(run: RunConfig) -> list[RecomputeModule]:
    """Return the modules of a model's layers that can be recomputed by themselves."""
    m = run.model
    kinds = m.hybrid.pattern if m.hybrid is not None else ""
    # A hybrid lists its layers; others have dense MLPs unless every layer has experts.
    dense = MLP in kinds if kinds else m.moe is None or m.moe.first_dense_layers > 0
    shared = bool(m.moe and m.moe.shared_expert_intermediate_size)
    there: dict[RecomputeModule, bool] = {
        "core_attn": bool(set(SOFTMAX) & set(kinds)) if kinds else True,
        # A mixer keeps the output of its norm.
        "layernorm": kinds.strip(MAMBA) != "" if kinds else True,
        "mlp": dense,
        "mla_up_proj": m.mla is not None,
        "moe": m.moe is not None,
        "moe_act": m.moe is not None,
        # Overlapped shared experts run on a stream of their own, outside of a recomputed region.
        "shared_experts": shared and not (m.moe and m.moe.shared_expert_overlap),
    }
    return [name for name, exists in there.items() if exists]


@rule(
    Code("MT168", example=f"{GRANULARITY}=selective {MODULES}=[moe]"),
    reads=(
        f"{GRANULARITY} {MODULES} model.mla"
        " model.moe.first_dense_layers model.moe.shared_expert_intermediate_size"
        " model.moe.shared_expert_overlap model.hybrid.pattern"
    ),
)
def recomputed_modules(run: RunConfig) -> Iterator[Finding]:
    """Cannot recompute these modules."""
    r = run.parallel.recompute
    if r.granularity != "selective" or r.modules is None:
        return
    there = recomputable(run)
    usable = list(dict.fromkeys(name for name in r.modules if name in there))
    wrong = [name for name in r.modules if name not in there]
    shared = bool(run.model.moe and run.model.moe.shared_expert_intermediate_size)
    fixes = [{MODULES: usable}, NO_RECOMPUTE] if usable else [NO_RECOMPUTE]
    if not r.modules:
        yield Finding("MT168", MODULES, "the list is empty", fixes, unset=True)
    elif wrong:
        detail = f"the model has no {' and no '.join(wrong)}"
        if shared and wrong == ["shared_experts"]:
            detail = "overlapped shared_experts run on a stream of their own"
        yield Finding("MT168", MODULES, detail, fixes, unset=not usable)
    elif len(usable) < len(r.modules):
        yield Finding("MT168", MODULES, "one is named twice", fixes[:1])


@rule(
    Code("MT171", example=f"{GRANULARITY}=full {GROUP}=5"),
    reads=(
        f"{GRANULARITY} {SPLIT} parallel.pp {GROUP} parallel.vpp model.num_layers"
        " model.mtp_num_layers parallel.recompute.method"
    ),
)
def recomputed_layer_groups(run: RunConfig) -> Iterator[Finding]:
    """Cannot recompute layers in groups of this size because a group must lie in one stage and hold
    no MTP layer.
    """
    r = run.parallel.recompute
    p = run.parallel
    if r.granularity != "full" or r.num_layers is None:
        return
    # megatron-core recomputes each MTP layer by itself, and takes no group there.
    if run.model.mtp_num_layers and r.method != "block" and r.num_layers > 1:
        fixes: list[dict[str, Any]] = [{GROUP: 1}, {"parallel.recompute.method": "block"}]
        predicting = number_of(run.model.mtp_num_layers, "MTP layer")
        detail = f"groups of {r.num_layers} layers, {predicting}"
        yield Finding("MT171", GROUP, detail, fixes, also=("model.mtp_num_layers",))
        return
    try:
        if uneven(run):
            held = max(len(stage.layers) for stage in stages(run))
        else:
            held = run.model.num_layers // (p.pp * p.vpp)
    except ValueError:  # another rule reports stages that do not fit
        return
    if r.num_layers > held > 0:
        virtual = f", vpp {p.vpp}" if p.vpp > 1 else ""
        detail = f"{number_of(r.num_layers, 'layer')}, at most {held} in a stage{virtual}"
        yield Finding("MT171", GROUP, detail, each(GROUP, [held, 1]))


@rule(
    Code(
        "MT404",
        example="kernels.gradient_accumulation_fusion=true parallel=dp2 parallel.fsdp=fsdp2",
    ),
    reads="kernels.gradient_accumulation_fusion parallel.fsdp",
)
def fused_accumulation(run: RunConfig) -> Iterator[Finding]:
    """Cannot fuse gradient accumulation because FSDP frees a weight after use, together with the
    buffer of its gradient.
    """
    key = "kernels.gradient_accumulation_fusion"
    if run.kernels.gradient_accumulation_fusion and run.parallel.fsdp != "none":
        yield Finding("MT404", key, f"parallel.fsdp is {run.parallel.fsdp}", [{key: False}])


@rule(
    Code("MT428", example="parallel=dp2 parallel.fsdp=fsdp2 optim.cpu_offload=1.0"),
    reads="optim.cpu_offload parallel.fsdp",
)
def offloaded_optimizer(run: RunConfig) -> Iterator[Finding]:
    """Cannot keep the state of the optimizer in host memory because only plain tensors are copied,
    and FSDP shards them.
    """
    if run.optim.cpu_offload and run.parallel.fsdp != "none":
        # The distributed optimizer also shards the state, so offer it before giving up sharding.
        fixes = [{"optim.cpu_offload": 0.0}, {**UNSHARDED, **ZERO}, UNSHARDED]
        yield Finding("MT428", "optim.cpu_offload", f"parallel.fsdp is {run.parallel.fsdp}", fixes)
