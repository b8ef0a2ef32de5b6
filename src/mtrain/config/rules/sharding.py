"""Rules of context parallelism, FSDP, replicas and recomputation."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.resolve.stages import stages, uneven
from mtrain.config.rules.finding import DP, Change, Finding, divisors, listed, multiples, nearest
from mtrain.config.rules.pipeline import SPLIT
from mtrain.config.rules.rule import Code, rule
from mtrain.config.rules.unused import UNUSED
from mtrain.config.schema.run import RunConfig
from mtrain.models.hybrid.config import MAMBA, MLP, SOFTMAX

NO_CONTEXT: Change = {
    "parallel.cp": 1,
    "parallel.cp_comm_type": None,
    "parallel.hierarchical_cp_sizes": None,
}


@rule(
    Code(
        "MT160",
        "a2a+p2p needs two sizes above 1 whose product is cp.",
        example="parallel=cp4 parallel.cp_comm_type=a2a+p2p",
    ),
    Code(
        "MT161",
        "All-to-all context parallelism gives each rank of a group some heads of the whole"
        " sequence.",
        example="parallel=cp4 parallel.cp_comm_type=a2a model.num_query_groups=2",
    ),
    reads=(
        "parallel.cp parallel.cp_comm_type parallel.hierarchical_cp_sizes model.num_attention_heads"
        " parallel.tp model.mla model.num_query_groups"
    ),
)
def exchanged_heads(run: RunConfig) -> Iterator[Finding]:
    """All-to-all context parallelism gives each rank of a group some heads of the whole
    sequence.
    """
    p = run.parallel
    m = run.model
    if p.cp == 1 or p.cp_comm_type not in ("a2a", "a2a+p2p"):
        return
    ranks = p.cp
    sizes = p.hierarchical_cp_sizes
    gather: Change = {"parallel.cp_comm_type": "all_gather", "parallel.hierarchical_cp_sizes": None}
    if p.cp_comm_type == "a2a+p2p":
        halves: list[Change] = [
            {"parallel.hierarchical_cp_sizes": [d, p.cp // d]}
            for d in divisors(p.cp)
            if 1 < d < p.cp
        ]
        if sizes is None or sizes[0] * sizes[1] != p.cp or 1 in sizes:
            given = "none are given" if sizes is None else f"{sizes[0]} * {sizes[1]} are given"
            rule = f"a2a+p2p needs two sizes above 1 whose product is cp {p.cp}, and {given}"
            yield Finding(
                "MT160", "parallel.hierarchical_cp_sizes", rule, (*halves, gather, NO_CONTEXT)
            )
            return
        ranks = sizes[0]
    heads = m.num_attention_heads // p.tp
    groups = heads if m.mla else max(1, m.query_groups // p.tp)
    if heads % ranks or groups % ranks:
        rule = (
            f"{ranks} ranks exchange the sequence for heads, and a rank of tp {p.tp} has {heads}"
            f" heads and {groups} key/value heads"
        )
        yield Finding("MT161", "parallel.cp_comm_type", rule, (gather, NO_CONTEXT))


@rule(
    Code("MT214", example="model=deepseek_tiny model.mla.rope_type=yarn parallel=cp3"),
    reads="model.mla.rope_type parallel.cp model.mla.original_max_position_embeddings",
)
def scaled_position_split(run: RunConfig) -> Iterator[Finding]:
    """megatron-core splits yarn's table of positions over the cp ranks, two chunks for each."""
    p = run.parallel
    mla = run.model.mla
    if (
        mla is None
        or mla.rope_type != "yarn"
        or p.cp == 1
        or mla.original_max_position_embeddings is None
    ):
        return
    table = mla.original_max_position_embeddings
    chunks = 2 * p.cp
    if table % chunks:
        near = multiples(table, chunks)
        rule = f"a table of {table} positions does not divide into 2 * cp {p.cp} = {chunks} chunks"
        fixes: tuple[Change, ...] = tuple(
            {"model.mla.original_max_position_embeddings": n} for n in near
        )
        yield Finding(
            "MT214", "model.mla.original_max_position_embeddings", rule, (NO_CONTEXT, *fixes)
        )


@rule(
    Code(
        "MT169",
        "megatron-core's scheduler of documents over ranks cannot be combined with this.",
        example="parallel=dp2 parallel.hybrid_context_parallel=true",
    ),
    Code(
        "MT170",
        "The longest document fits on all ranks together.",
        example=(
            "parallel=dp2 parallel.hybrid_context_parallel=true data.packed=true "
            "parallel.max_seqlen_per_dp_cp_rank=100"
        ),
    ),
    reads=(
        f"parallel.hybrid_context_parallel data.packed data.seq_length {DP} parallel.cp_comm_type"
        " parallel.max_seqlen_per_dp_cp_rank parallel.overlap_grad_reduce parallel.fsdp model.moe"
        " model.mla model.mtp_num_layers"
    ),
)
def dynamic_context(run: RunConfig) -> Iterator[Finding]:
    """megatron-core's scheduler of documents over ranks excludes some layouts."""
    p = run.parallel
    m = run.model
    d = run.data
    if not p.hybrid_context_parallel:
        return
    off: Change = {
        "parallel.hybrid_context_parallel": False,
        "parallel.max_seqlen_per_dp_cp_rank": None,
    }
    dp = p.dp

    def refuse(rule: str, *fixes: Change) -> Finding:
        return Finding("MT169", "parallel.hybrid_context_parallel", rule, (*fixes, off))

    if not d.packed:
        yield refuse(
            "splits the documents of packed samples, and data.packed is false",
            {"data.packed": True},
        )
    if p.cp > 1 or p.pp > 1:
        rule = (
            f"documents are sharded over data-parallel ranks, with cp 1 and pp 1; here cp {p.cp},"
            f" pp {p.pp}"
        )
        flat: Change = {
            "parallel.cp": 1,
            "parallel.pp": 1,
            "parallel.vpp": 1,
            "parallel.cp_comm_type": None,
        }
        yield refuse(rule, flat)
    if p.cp_comm_type in ("a2a", "a2a+p2p"):
        gather: Change = {"parallel.cp_comm_type": "all_gather"}
        yield refuse(
            "heads cannot be exchanged in groups of every size; all_gather and p2p can", gather
        )
    if dp < 2 or dp & (dp - 1):
        yield refuse(f"groups of ranks are powers of two, and dp is {dp}")
    if m.moe is not None or m.mla is not None or m.mtp_num_layers is not None:
        rule = "ranks run different numbers of documents: no experts, MLA or MTP layers"
        yield refuse(rule)
    if p.overlap_grad_reduce or p.fsdp != "none":
        rule = (
            "ranks run different numbers of documents: gradients cannot be reduced while the"
            " backward runs"
        )
        keys: Change = {
            "parallel.overlap_grad_reduce": False,
            "parallel.overlap_param_gather": False,
        }
        yield refuse(rule, keys, {**keys, "parallel.fsdp": "none", "parallel.fsdp_sharding": None})
    if (p.max_seqlen_per_dp_cp_rank or 1) * dp < d.length:
        rule = (
            f"{dp} ranks of {p.max_seqlen_per_dp_cp_rank} tokens cannot take a document of"
            f" {d.length}"
        )
        more: Change = {"parallel.max_seqlen_per_dp_cp_rank": -(-d.length // dp)}
        yield Finding("MT170", "parallel.max_seqlen_per_dp_cp_rank", rule, (more, off))


@rule(
    Code(
        "MT162",
        "FSDP shards and overlaps by itself.",
        example="parallel=dp2 parallel.fsdp=fsdp2 parallel.distributed_optimizer=true",
    ),
    Code(
        "MT164",
        "megatron's FSDP knows no replicas of experts.",
        example="model=mixtral_tiny parallel=ep2 parallel.fsdp=megatron parallel.hsdp_replicas=2",
    ),
    reads=(
        "parallel.fsdp parallel.distributed_optimizer parallel.overlap_grad_reduce "
        "parallel.overlap_param_gather parallel.hsdp_replicas parallel.ep parallel.etp parallel.tp"
    ),
)
def fully_sharded(run: RunConfig) -> Iterator[Finding]:
    """Each FSDP excludes some features."""
    p = run.parallel
    if p.fsdp == "none":
        return
    plain: Change = {
        "parallel.fsdp": "none",
        "parallel.fsdp_sharding": None,
        "parallel.hsdp_replicas": 1,
    }
    if p.distributed_optimizer or p.overlap_grad_reduce or p.overlap_param_gather:
        keys = ("distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
        set_keys = [k for k in keys if getattr(p, k)]
        rule = f"shards and overlaps by itself; {' and '.join(set_keys)} must be false"
        off: Change = {f"parallel.{k}": False for k in set_keys}
        yield Finding("MT162", "parallel.fsdp", rule, (off, plain))
    if p.fsdp != "megatron":
        return
    torch_fsdp: Change = {"parallel.fsdp": "fsdp2", "parallel.fsdp_sharding": None}
    if p.hsdp_replicas > 1 and (p.ep > 1 or (p.etp is not None and p.etp != p.tp)):
        rule = (
            f"megatron knows no replicas of experts: with {p.hsdp_replicas} of them it adds up"
            f" gradients of experts over the ranks of dense weights, and ep {p.ep}, etp"
            f" {p.etp or p.tp} keep other experts there"
        )
        yield Finding(
            "MT164", "parallel.fsdp", rule, ({"parallel.hsdp_replicas": 1}, torch_fsdp, plain)
        )


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
    """With shared experts, megatron-core's FSDP closes a micro-batch before all gradients exist."""
    p = run.parallel
    moe = run.model.moe
    if p.fsdp != "megatron" or p.fsdp_sharding == "optim" or p.pp == 1 or moe is None:
        return
    if moe.shared_expert_intermediate_size:
        rule = (
            "megatron's FSDP misses gradients of a stage that has shared experts, and parallel.pp"
            f" is {p.pp}"
        )
        optim: Change = {"parallel.fsdp_sharding": "optim"}
        other: Change = {"parallel.fsdp": "fsdp2", "parallel.fsdp_sharding": None}
        yield Finding(
            "MT163",
            "parallel.fsdp",
            rule,
            (optim, other, {"parallel.pp": 1}),
            also=("model.moe.shared_expert_intermediate_size",),
        )


@rule(
    UNUSED,
    Code(
        "MT167",
        "Groups that each hold one whole sharded copy are equal, and of two ranks at least.",
        example="parallel=dp4 parallel.fsdp=fsdp2 parallel.hsdp_replicas=3",
    ),
    reads=(
        f"parallel.hsdp_replicas {DP} parallel.ep parallel.etp parallel.fsdp"
        " parallel.distributed_optimizer"
    ),
)
def replica_divisibility(run: RunConfig) -> Iterator[Finding]:
    """Equal groups each hold one complete sharded copy."""
    p = run.parallel
    if p.hsdp_replicas == 1:
        return
    one: Change = {"parallel.hsdp_replicas": 1}
    if p.fsdp == "none" and not p.distributed_optimizer:
        rule = (
            "has no effect without parallel.fsdp or parallel.distributed_optimizer: every rank has"
            " a whole copy"
        )
        yield Finding(
            "MT150", "parallel.hsdp_replicas", rule, (one, {"parallel.distributed_optimizer": True})
        )
    ranks = p.dp * p.cp
    experts = ranks * p.tp // (p.ep * (p.etp or p.tp))  # ranks that hold the same experts
    legal = [d for d in divisors(ranks) if d < ranks and experts % d == 0]
    fixes: tuple[Change, ...] = (
        *({"parallel.hsdp_replicas": n} for n in nearest(p.hsdp_replicas, legal)),
        one,
    )
    if ranks % p.hsdp_replicas or ranks == p.hsdp_replicas:
        rule = (
            f"{p.hsdp_replicas} copies over {ranks} ranks (dp {p.dp} * cp {p.cp}), and a copy is"
            f" sharded over 2 at least; legal: {listed(legal)}"
        )
        yield Finding("MT167", "parallel.hsdp_replicas", rule, fixes)
    elif experts % p.hsdp_replicas:
        rule = (
            f"{experts} ranks hold the same experts (ep {p.ep}, etp {p.etp or p.tp}), which"
            f" {p.hsdp_replicas} copies do not divide; legal: {listed(legal)}"
        )
        yield Finding("MT167", "parallel.hsdp_replicas", rule, fixes)


@rule(
    Code(
        "MT168", example="parallel.recompute.granularity=selective parallel.recompute.modules=[moe]"
    ),
    reads=(
        "parallel.recompute.granularity parallel.recompute.modules model.mla"
        " model.moe.first_dense_layers model.moe.shared_expert_intermediate_size"
        " model.moe.shared_expert_overlap model.hybrid.pattern"
    ),
)
def recomputed_modules(run: RunConfig) -> Iterator[Finding]:
    """Recomputed modules exist in the model, and nothing needs their output earlier."""
    r = run.parallel.recompute
    m = run.model
    if r.granularity != "selective" or r.modules is None:
        return
    kinds = m.hybrid.pattern if m.hybrid is not None else ""
    dense = MLP in kinds if kinds else m.moe is None or m.moe.first_dense_layers > 0
    shared = bool(m.moe and m.moe.shared_expert_intermediate_size)
    there = {
        "core_attn": bool(set(SOFTMAX) & set(kinds)) if kinds else True,
        "layernorm": kinds.strip(MAMBA) != "" if kinds else True,  # that of a mixer is kept
        "mlp": dense,
        "mla_up_proj": m.mla is not None,
        "moe": m.moe is not None,
        "moe_act": m.moe is not None,
        "shared_experts": shared and not (m.moe and m.moe.shared_expert_overlap),
    }
    usable = [name for name in r.modules if there[name]]
    wrong = [name for name in r.modules if not there[name]]
    none: Change = {"parallel.recompute.granularity": "none", "parallel.recompute.modules": None}
    fixes: tuple[Change, ...] = (
        ({"parallel.recompute.modules": usable}, none) if usable else (none,)
    )
    if not r.modules:
        yield Finding(
            "MT168",
            "parallel.recompute.modules",
            "names no module to compute again",
            (none,),
            unset=True,
        )
    elif wrong:
        rule = f"{' and '.join(wrong)}: the model has no such part, or it cannot be computed again"
        yield Finding("MT168", "parallel.recompute.modules", rule, fixes, unset=not usable)
    elif len(set(r.modules)) < len(r.modules):
        once: Change = {"parallel.recompute.modules": list(dict.fromkeys(r.modules))}
        yield Finding("MT168", "parallel.recompute.modules", "a module is named twice", (once,))


@rule(
    Code("MT171", example="parallel.recompute.granularity=full parallel.recompute.num_layers=5"),
    reads=(
        f"parallel.recompute.granularity {SPLIT} parallel.pp parallel.recompute.num_layers"
        " parallel.vpp model.num_layers model.mtp_num_layers parallel.recompute.method"
    ),
)
def recomputed_layer_groups(run: RunConfig) -> Iterator[Finding]:
    """No group of recomputed layers exceeds a stage or contains MTP layers."""
    r = run.parallel.recompute
    p = run.parallel
    if r.granularity != "full" or r.num_layers is None:
        return
    one: Change = {"parallel.recompute.num_layers": 1}
    if run.model.mtp_num_layers and r.method != "block" and r.num_layers > 1:
        rule = f"an MTP layer is computed again by itself, and groups are of {r.num_layers} layers"
        block: Change = {"parallel.recompute.method": "block"}
        yield Finding(
            "MT171",
            "parallel.recompute.num_layers",
            rule,
            (one, block),
            also=("model.mtp_num_layers",),
        )
        return
    try:
        if uneven(run):
            held = max(len(s.layers) for s in stages(run))
        else:
            held = run.model.num_layers // (p.pp * p.vpp)
    except ValueError:  # the stages themselves are wrong, which another rule says
        return
    if r.num_layers > held > 0:
        rule = (
            f"{r.num_layers} layers are to be computed again of each stage, and none holds more"
            f" than {held}"
        )
        if p.vpp > 1:
            rule += f" (vpp {p.vpp})"
        fixes: tuple[Change, ...] = ({"parallel.recompute.num_layers": held}, one)
        yield Finding("MT171", "parallel.recompute.num_layers", rule, fixes)


@rule(
    Code(
        "MT404",
        example="kernels.gradient_accumulation_fusion=true parallel=dp2 parallel.fsdp=fsdp2",
    ),
    reads="kernels.gradient_accumulation_fusion parallel.fsdp",
)
def fused_accumulation(run: RunConfig) -> Iterator[Finding]:
    """A fused product adds to an existing gradient buffer."""
    if run.kernels.gradient_accumulation_fusion and run.parallel.fsdp != "none":
        off: Change = {"kernels.gradient_accumulation_fusion": False}
        rule = "the gradient of a weight that is freed after use has no place to be added to"
        yield Finding("MT404", "kernels.gradient_accumulation_fusion", rule, (off,))


@rule(
    Code("MT428", example="parallel=dp2 parallel.fsdp=fsdp2 optim.cpu_offload=1.0"),
    reads="optim.cpu_offload parallel.fsdp",
)
def offloaded_optimizer(run: RunConfig) -> Iterator[Finding]:
    """Host memory holds the state of unsharded weights, or of the distributed optimizer's
    shards.
    """
    p = run.parallel
    if run.optim.cpu_offload and p.fsdp != "none":
        rule = (
            f"copies to host memory are of plain tensors, and parallel.fsdp={p.fsdp} leaves parts"
            " of sharded ones"
        )
        plain: Change = {"parallel.fsdp": "none", "parallel.fsdp_sharding": None}
        zero: Change = {**plain, "parallel.distributed_optimizer": True}
        yield Finding("MT428", "optim.cpu_offload", rule, ({"optim.cpu_offload": 0.0}, zero, plain))


RULES = (
    scaled_position_split,
    dynamic_context,
    exchanged_heads,
    fully_sharded,
    fsdp_shared_experts,
    replica_divisibility,
    recomputed_modules,
    recomputed_layer_groups,
    fused_accumulation,
    offloaded_optimizer,
)
