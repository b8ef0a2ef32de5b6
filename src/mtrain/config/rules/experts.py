"""Mixture-of-experts rules: how experts are sharded over ranks, and how tokens reach them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mtrain.config.engine.kernels import NO_COUNTS
from mtrain.config.machine.devices import facts_of, with_cuda_kernels
from mtrain.config.resolve.resolution import smallest_world
from mtrain.config.rules.finding import DP, Change, Finding, divisors, listed, multiples, nearest
from mtrain.config.rules.rule import Code, rule
from mtrain.config.schema.moe import MoEConfig
from mtrain.config.schema.run import RunConfig

ALLTOALL: Change = {"model.moe.token_dispatcher_type": "alltoall"}
DROPLESS: Change = {
    "model.moe.expert_capacity_factor": None,
    "model.moe.token_drop_policy": None,
    "model.moe.pad_expert_input_to_capacity": False,
}


def _ep_fixes(run: RunConfig, legal: list[int]) -> tuple[Change, ...]:
    fixes: list[Change] = []
    for ep in nearest(run.parallel.ep, [n for n in legal if n != run.parallel.ep]):
        fixes += [{"parallel.ep": ep}, {"parallel.ep": ep, "parallel.ranks": None}]
    return tuple(fixes)


@rule(
    Code("MT120", "ep shards experts, and a dense model has none.", example="parallel=ep2"),
    Code(
        "MT121",
        "etp splits experts, and a dense model has none.",
        example="parallel=single parallel.etp=2",
    ),
    reads="model.moe parallel.ep parallel.etp parallel.tp",
)
def expert_axes(run: RunConfig) -> Iterator[Finding]:
    """A dense model has no axes of experts."""
    p = run.parallel
    if run.model.moe is not None:
        return
    if p.ep > 1:
        rule = f"ep {p.ep} shards experts, and model.moe is null: the model is dense"
        yield Finding(
            "MT120",
            "parallel.ep",
            rule,
            ({"parallel.ep": 1}, {"parallel.ep": 1, "parallel.ranks": None}),
        )
    if p.etp is not None and p.etp != p.tp:
        rule = f"etp {p.etp} shards experts, and model.moe is null: the model is dense"
        yield Finding("MT121", "parallel.etp", rule, ({"parallel.etp": None},))


@rule(
    Code(
        "MT122",
        "Every ep rank holds as many experts.",
        example="model=mixtral_tiny model.moe.num_experts=3 parallel=ep2",
    ),
    Code(
        "MT123",
        "Every etp rank holds as much of each expert.",
        example="model=mixtral_tiny parallel=tp3",
    ),
    reads="model.moe.ffn_hidden_size model.moe.num_experts parallel.ep parallel.etp parallel.tp",
)
def expert_divisibility(run: RunConfig) -> Iterator[Finding]:
    """Every ep rank holds the same number of experts, and every etp rank an equal part of each."""
    moe = run.model.moe
    p = run.parallel
    if moe is None:
        return
    etp = p.etp or p.tp
    if moe.num_experts % p.ep:
        legal = divisors(moe.num_experts)
        rule = (
            f"{moe.num_experts} experts do not divide by ep {p.ep}; ep that divide: {listed(legal)}"
        )
        grow: tuple[Change, ...] = tuple(
            {"model.moe.num_experts": n} for n in multiples(moe.num_experts, p.ep)
        )
        yield Finding("MT122", "parallel.ep", rule, (*_ep_fixes(run, legal), *grow))
    if moe.ffn_hidden_size % etp:
        rule = f"an expert's width {moe.ffn_hidden_size} does not divide by etp {etp}"
        wide: tuple[Change, ...] = tuple(
            {"model.moe.ffn_hidden_size": n} for n in multiples(moe.ffn_hidden_size, etp)
        )
        yield Finding("MT123", "model.moe.ffn_hidden_size", rule, ({"parallel.etp": 1}, *wide))


@rule(
    Code("MT124", example="model=mixtral_tiny parallel=ep2 parallel.ranks=3"),
    reads=f"{DP} parallel.etp parallel.ep model.moe.num_experts parallel.hsdp_replicas",
)
def expert_grid(run: RunConfig) -> Iterator[Finding]:
    """The ranks of a stage form whole expert grids."""
    p = run.parallel
    etp = p.etp or p.tp
    inner = p.dp * p.cp * p.tp
    ranks = p.ranks
    if run.model.moe is None or ranks % p.model_ranks or inner % (p.ep * etp) == 0:
        return
    ranks_of_stage = f"dp {p.dp} * cp {p.cp} * tp {p.tp} = {inner} ranks of a stage"
    rule = f"{ranks_of_stage} are no multiple of ep {p.ep} * etp {etp} = {p.ep * etp}"
    legal = [
        ep for ep in divisors(math.gcd(inner, run.model.moe.num_experts)) if inner % (ep * etp) == 0
    ]
    more: list[Change] = [{"parallel.ranks": None}]
    more += [{"parallel.ranks": n} for n in multiples(ranks, smallest_world(p))]
    etp_fixes: list[Change] = [
        {"parallel.etp": n} for n in divisors(etp) if inner % (p.ep * n) == 0
    ]
    yield Finding("MT124", "parallel.ep", rule, (*_ep_fixes(run, legal), *etp_fixes, *more))


@rule(
    Code("MT125", example="model=mixtral_tiny parallel=tp2 parallel.sequence_parallel=false"),
    reads="model.moe parallel.tp parallel.sequence_parallel",
)
def expert_sequence_parallelism(run: RunConfig) -> Iterator[Finding]:
    """megatron-core's MoE layer refuses to train with tp and without sequence parallelism."""
    p = run.parallel
    if run.model.moe is not None and p.tp > 1 and not p.sequence_parallel:
        rule = f"experts with tp {p.tp} train only with sequence parallel"
        fixes: tuple[Change, ...] = (
            {"parallel.sequence_parallel": True},
            {"parallel.tp": 1},
            {"parallel.tp": 1, "parallel.ranks": None},
        )
        yield Finding("MT125", "parallel.sequence_parallel", rule, fixes)


@rule(
    Code("MT221", example="model=mixtral_tiny model.moe.first_dense_layers=4"),
    reads="model.num_layers model.moe.first_dense_layers",
)
def dense_layer_count(run: RunConfig) -> Iterator[Finding]:
    """A mixture of experts has fewer dense layers than layers."""
    moe = run.model.moe
    layers = run.model.num_layers
    if moe is not None and moe.first_dense_layers >= layers:
        rule = f"{moe.first_dense_layers} dense layers of {layers} leave no layer with experts"
        less: tuple[Change, ...] = tuple(
            {"model.moe.first_dense_layers": n} for n in (layers - 1, 0)
        )
        yield Finding("MT221", "model.moe.first_dense_layers", rule, (*less, {"model.moe": None}))


@rule(
    Code(
        "MT229",
        "megatron-core adds an expert's bias once per etp rank, so it allows one.",
        example="model=mixtral_tiny parallel=tp2sp model.add_bias_linear=true",
    ),
    Code(
        "MT240",
        "megatron-core's shared experts have no biases.",
        example=(
            "model=mixtral_tiny model.moe.shared_expert_intermediate_size=64"
            " model.add_bias_linear=true"
        ),
    ),
    reads=(
        "model.add_bias_linear model.moe.shared_expert_intermediate_size parallel.etp parallel.tp"
    ),
)
def expert_biases(run: RunConfig) -> Iterator[Finding]:
    """megatron-core adds an expert's bias once per etp rank, so biases need etp 1."""
    p = run.parallel
    if run.model.moe is not None and run.model.add_bias_linear and (p.etp or p.tp) > 1:
        rule = f"biases in experts need etp 1, and it is {p.etp or p.tp}"
        fixes: tuple[Change, ...] = ({"parallel.etp": 1}, {"model.add_bias_linear": False})
        yield Finding("MT229", "model.add_bias_linear", rule, fixes)
    if (
        run.model.moe is not None
        and run.model.add_bias_linear
        and run.model.moe.shared_expert_intermediate_size
    ):
        rule = (
            "megatron-core's shared experts have no biases, and add_bias_linear gives one to every"
            " linear layer"
        )
        shared: Change = {
            "model.moe.shared_expert_intermediate_size": None,
            "model.moe.shared_expert_overlap": False,
        }
        yield Finding(
            "MT240",
            "model.add_bias_linear",
            rule,
            ({"model.add_bias_linear": False}, shared),
            also=("model.moe.shared_expert_intermediate_size",),
        )


@rule(
    Code(
        "MT234",
        "Shared experts overlap with the all-to-all dispatcher only.",
        example=(
            "model=mixtral_tiny model.moe.shared_expert_intermediate_size=64 "
            "model.moe.shared_expert_overlap=true model.moe.token_dispatcher_type=allgather"
        ),
    ),
    Code(
        "MT244",
        "Overlapped shared experts add no offset to the gate and clamp nothing.",
        example=(
            "model=mixtral_tiny model.activation_func_clamp_value=7.0 "
            "model.moe.shared_expert_intermediate_size=64 model.moe.shared_expert_overlap=true"
        ),
    ),
    reads=(
        "model.moe.shared_expert_overlap model.glu_linear_offset model.moe.token_dispatcher_type "
        "model.activation_func_clamp_value"
    ),
)
def shared_expert_overlap(run: RunConfig) -> Iterator[Finding]:
    """Only the all-to-all dispatcher overlaps shared experts, which then have plain gates."""
    moe = run.model.moe
    m = run.model
    key = "model.moe.shared_expert_overlap"
    if moe is None or not moe.shared_expert_overlap:
        return
    off: Change = {key: False}
    if moe.token_dispatcher_type != "alltoall":
        rule = f"needs the alltoall dispatcher, and it is {moe.token_dispatcher_type}"
        yield Finding("MT234", key, rule, (ALLTOALL, off))
    if m.glu_linear_offset or m.activation_func_clamp_value is not None:
        rule = (
            "megatron-core's overlapped shared experts add no glu_linear_offset and bound nothing"
        )
        yield Finding("MT244", key, rule, (off,))


@rule(
    Code(
        "MT235",
        "The flex dispatcher runs on GPUs.",
        example="model=mixtral_tiny parallel=ep2 model.moe.token_dispatcher_type=flex",
    ),
    Code(
        "MT236",
        "The flex dispatcher sends tokens between ranks.",
        example="model=mixtral_tiny parallel=single model.moe.token_dispatcher_type=flex",
    ),
    Code(
        "MT237",
        "DeepEP pads no expert to its capacity.",
        example=(
            "model=mixtral_tiny model.moe.token_dispatcher_type=flex"
            " model.moe.expert_capacity_factor=1.0 model.moe.pad_expert_input_to_capacity=true"
            " parallel.ep=2"
        ),
    ),
    reads=(
        "model.moe.token_dispatcher_type cluster.device model.moe.flex_dispatcher_backend "
        "model.moe.pad_expert_input_to_capacity parallel.ep parallel.etp parallel.tp"
    ),
)
def flex_dispatcher(run: RunConfig) -> Iterator[Finding]:
    """Fused dispatch kernels run on GPUs, between ranks; only one of the two supports a
    capacity.
    """
    moe = run.model.moe
    p = run.parallel
    if moe is None or moe.token_dispatcher_type != "flex":
        return
    alltoall: Change = {**ALLTOALL, "model.moe.flex_dispatcher_backend": None}
    package = {"hybridep": "HybridEP", "ncclep": "NCCL EP"}.get(
        moe.flex_dispatcher_backend or "", "DeepEP"
    )
    if not facts_of(run.cluster.device).cuda_kernels:
        where = f"on {with_cuda_kernels()}, and the device is {run.cluster.device}"
        rule = f"the flex dispatcher is {package}'s kernels {where}"
        yield Finding("MT235", "model.moe.token_dispatcher_type", rule, (alltoall,))
    if p.ep * (p.etp or p.tp) == 1:
        rule = "the flex dispatcher sends tokens between ranks, and ep 1 * etp 1 keeps them"
        yield Finding("MT236", "model.moe.token_dispatcher_type", rule, (alltoall,))
    if moe.pad_expert_input_to_capacity and moe.flex_dispatcher_backend in (None, "deepep"):
        rule = "DeepEP's dispatcher pads no expert to its capacity"
        off: Change = {"model.moe.pad_expert_input_to_capacity": False}
        yield Finding(
            "MT237",
            "model.moe.pad_expert_input_to_capacity",
            rule,
            (off, alltoall),
            also=("model.moe.token_dispatcher_type", "model.moe.flex_dispatcher_backend"),
        )


@rule(
    Code(
        "MT215",
        "A padded exchange sends lists of tokens, of as many on each rank, and drops none.",
        "Where experts have a capacity, model.moe.pad_expert_input_to_capacity gives one shape.",
        example=(
            "model=mixtral_tiny parallel=ep2 model.moe.pad_alltoall=true"
            " model.moe.expert_capacity_factor=1.0"
        ),
    ),
    Code(
        "MT216",
        "Experts of the reference read counts of rows on the host.",
        severity="warning",
        example=(
            "model=mixtral_tiny parallel=ep2 cluster=h100x8 kernels.experts=reference "
            "model.moe.pad_alltoall=true"
        ),
    ),
    reads=(
        "model.moe.pad_alltoall model.moe.token_dispatcher_type model.moe.expert_capacity_factor"
        " model.moe.router_padding_for_quantization model.moe.router_load_balancing_type"
        " parallel.hybrid_context_parallel kernels.experts kernels.default cluster.device"
        " trainer.cuda_graph_modules"
    ),
)
def padded_exchange(run: RunConfig) -> Iterator[Finding]:
    """Expert-parallel ranks exchange equal numbers of rows only if tokens are dispatched
    by lists.
    """
    moe = run.model.moe
    k = run.kernels
    key = "model.moe.pad_alltoall"
    if moe is None or not moe.padded:
        return
    off: Change = {key: False, "model.moe.alltoall_capacity_factor": None}
    for name, why, other in _unpadded(run, moe):
        yield Finding("MT215", name, why, (other, off), also=(key,))
    if (k.experts or k.default) == "reference" and not facts_of(run.cluster.device).on_host:
        why = (
            "experts of the reference wait for counts of rows, and a padded exchange is there to"
            " wait for nothing"
        )
        yield Finding(
            "MT216", "kernels.experts", why, ({"kernels.experts": "auto"}, off), also=(key,)
        )


def _unpadded(run: RunConfig, moe: MoEConfig) -> Iterator[tuple[str, str, Change]]:
    """Yield keys that exclude a padded exchange, the reason, and the value that each would need."""
    lists = "and a padded exchange is one of lists"
    if moe.expert_capacity_factor is not None:
        why = f"experts with a capacity are routed to by maps, {lists}"
        yield "model.moe.expert_capacity_factor", why, DROPLESS
    if moe.router_padding_for_quantization:
        key = "model.moe.router_padding_for_quantization"
        yield key, f"a router that pads gives maps, {lists}", {key: False}
    if moe.router_load_balancing_type == "sinkhorn":
        key = "model.moe.router_load_balancing_type"
        yield key, f"sinkhorn gives maps, {lists}", {key: "aux_loss"}
    if run.parallel.hybrid_context_parallel:
        why = (
            "ranks have parts of documents of different lengths, and a padded exchange sends as"
            " many rows from each"
        )
        one: Change = {
            "parallel.hybrid_context_parallel": False,
            "parallel.max_seqlen_per_dp_cp_rank": None,
        }
        yield "parallel.hybrid_context_parallel", why, one
    if "moe_router" in (run.trainer.cuda_graph_modules or ()):
        why = f"a router that is captured by itself passes on maps, {lists}"
        yield "trainer.cuda_graph_modules", why, {"trainer.cuda_graph_modules": None}
    if run.kernels.experts == "te":
        yield "kernels.experts", NO_COUNTS, {"kernels.experts": "auto"}


RULES = (
    shared_expert_overlap,
    flex_dispatcher,
    padded_exchange,
    expert_axes,
    expert_divisibility,
    expert_grid,
    expert_sequence_parallelism,
    dense_layer_count,
    expert_biases,
)
