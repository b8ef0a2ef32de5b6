"""Mixture of experts: routing numbers, and how experts are spread over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mtrain.config.resolve import smallest_world
from mtrain.config.rules.finding import Change, Finding, divisors, dp_of, listed, multiples, nearest
from mtrain.config.run import RunConfig


def _ep_fixes(run: RunConfig, legal: list[int]) -> tuple[Change, ...]:
    fixes: list[Change] = []
    for ep in nearest(run.parallel.ep, [n for n in legal if n != run.parallel.ep]):
        fixes += [{"parallel.ep": ep}, {"parallel.ep": ep, "parallel.ranks": None}]
    return tuple(fixes)


def expert_axes_need_experts(run: RunConfig) -> Iterator[Finding]:
    """Axes of experts mean nothing in a dense model."""
    p = run.parallel
    if run.model.moe is not None:
        return
    if p.ep > 1:
        rule = f"ep {p.ep} spreads experts, and model.moe is null: the model is dense"
        yield Finding("MT120", "parallel.ep", rule, ({"parallel.ep": 1}, {"parallel.ep": 1, "parallel.ranks": None}))
    if p.etp is not None and p.etp != p.tp:
        rule = f"etp {p.etp} cuts experts, and model.moe is null: the model is dense"
        yield Finding("MT121", "parallel.etp", rule, ({"parallel.etp": None},))


def experts_divide(run: RunConfig) -> Iterator[Finding]:
    """Every ep rank holds as many experts, every etp rank as much of each."""
    moe, p = run.model.moe, run.parallel
    if moe is None:
        return
    etp = p.etp or p.tp
    if moe.num_experts % p.ep:
        legal = divisors(moe.num_experts)
        rule = f"{moe.num_experts} experts do not divide by ep {p.ep}; ep that divide: {listed(legal)}"
        grow: tuple[Change, ...] = tuple({"model.moe.num_experts": n} for n in multiples(moe.num_experts, p.ep))
        yield Finding("MT122", "parallel.ep", rule, (*_ep_fixes(run, legal), *grow))
    if moe.ffn_hidden_size % etp:
        rule = f"an expert's width {moe.ffn_hidden_size} does not divide by etp {etp}"
        wide: tuple[Change, ...] = tuple(
            {"model.moe.ffn_hidden_size": n} for n in multiples(moe.ffn_hidden_size, etp)
        )
        yield Finding("MT123", "model.moe.ffn_hidden_size", rule, ({"parallel.etp": 1}, *wide))


def expert_grid_is_whole(run: RunConfig) -> Iterator[Finding]:
    """A stage's ranks hold whole expert grids."""
    p = run.parallel
    etp = p.etp or p.tp
    inner = dp_of(run) * p.cp * p.tp
    ranks = p.ranks or 0
    if run.model.moe is None or ranks % p.model_ranks or inner % (p.ep * etp) == 0:
        return
    ranks_of_stage = f"dp {dp_of(run)} * cp {p.cp} * tp {p.tp} = {inner} ranks of a stage"
    rule = f"{ranks_of_stage} are no multiple of ep {p.ep} * etp {etp} = {p.ep * etp}"
    legal = [ep for ep in divisors(math.gcd(inner, run.model.moe.num_experts)) if inner % (ep * etp) == 0]
    more: list[Change] = [{"parallel.ranks": None}]
    more += [{"parallel.ranks": n} for n in multiples(ranks, smallest_world(p))]
    etp_fixes: list[Change] = [{"parallel.etp": n} for n in divisors(etp) if inner % (p.ep * n) == 0]
    yield Finding("MT124", "parallel.ep", rule, (*_ep_fixes(run, legal), *etp_fixes, *more))


def experts_with_tp_need_sequence_parallel(run: RunConfig) -> Iterator[Finding]:
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


def router_numbers(run: RunConfig) -> Iterator[Finding]:
    """A token can visit as many experts as it is told to."""
    moe = run.model.moe
    if moe is None:
        return
    if moe.router_topk > moe.num_experts:
        rule = f"a token cannot visit {moe.router_topk} of {moe.num_experts} experts"
        fixes: tuple[Change, ...] = (
            {"model.moe.router_topk": moe.num_experts},
            {"model.moe.router_topk": moe.num_experts, "model.moe.router_pre_softmax": True},
        )
        yield Finding("MT220", "model.moe.router_topk", rule, fixes)


def some_layers_have_experts(run: RunConfig) -> Iterator[Finding]:
    """The dense layers are fewer than all."""
    moe, layers = run.model.moe, run.model.num_layers
    if moe is not None and moe.first_dense_layers >= layers:
        rule = f"{moe.first_dense_layers} dense layers of {layers} leave no layer with experts"
        less: tuple[Change, ...] = tuple({"model.moe.first_dense_layers": n} for n in (layers - 1, 0))
        yield Finding("MT221", "model.moe.first_dense_layers", rule, (*less, {"model.moe": None}))


def router_scores(run: RunConfig) -> Iterator[Finding]:
    """Scores have a gradient, and balancing works on those that are chosen."""
    moe = run.model.moe
    if moe is None:
        return
    softmax = moe.router_score_function == "softmax" and moe.router_load_balancing_type != "sinkhorn"
    if moe.router_topk == 1 and softmax and not moe.router_pre_softmax:
        rule = "a softmax over the one chosen expert is always 1 and has no gradient"
        pre: Change = {"model.moe.router_pre_softmax": True}
        yield Finding("MT222", "model.moe.router_pre_softmax", rule, (pre, {"model.moe.router_topk": 2}))
    if moe.router_enable_expert_bias and moe.router_score_function != "sigmoid":
        rule = f"the balancing bias works on sigmoid scores, not on {moe.router_score_function}"
        sigmoid: Change = {"model.moe.router_score_function": "sigmoid"}
        off: Change = {"model.moe.router_enable_expert_bias": False}
        yield Finding("MT223", "model.moe.router_enable_expert_bias", rule, (sigmoid, off))
    if moe.router_load_balancing_type == "sinkhorn" and moe.aux_loss_coeff:
        rule = f"sinkhorn balances without a loss, and aux_loss_coeff is {moe.aux_loss_coeff}"
        yield Finding("MT224", "model.moe.aux_loss_coeff", rule, ({"model.moe.aux_loss_coeff": 0.0},))


def group_limited_routing(run: RunConfig) -> Iterator[Finding]:
    """Group-limited routing (DeepSeek-V3): experts in equal groups, and enough of them in the chosen groups."""
    moe = run.model.moe
    if moe is None:
        return
    groups, chosen, topk = moe.router_num_groups, moe.router_group_topk, moe.router_topk
    off: Change = {"model.moe.router_num_groups": None, "model.moe.router_group_topk": None}
    if (groups is None) != (chosen is None):
        rule = "router_num_groups and router_group_topk go together: both or neither"
        path = "model.moe.router_group_topk" if chosen is None else "model.moe.router_num_groups"
        yield Finding("MT225", path, rule, (off,))
    if groups is None or chosen is None:
        return
    if moe.num_experts % groups:
        rule = f"{moe.num_experts} experts do not divide into {groups} groups"
        legal = nearest(groups, [d for d in divisors(moe.num_experts) if d >= chosen])
        fixes: tuple[Change, ...] = tuple({"model.moe.router_num_groups": n} for n in legal)
        yield Finding("MT226", "model.moe.router_num_groups", rule, (*fixes, off))
    if chosen > groups:
        rule = f"a token cannot choose {chosen} of {groups} groups"
        yield Finding("MT227", "model.moe.router_group_topk", rule, ({"model.moe.router_group_topk": groups}, off))
    elif not chosen <= topk <= chosen * (moe.num_experts // groups):
        size = moe.num_experts // groups
        rule = f"{chosen} groups of {size} hold {chosen} to {chosen * size} choices, and router_topk is {topk}"
        legal = [c for c in range(1, groups + 1) if c <= topk <= c * size]
        fixes = tuple({"model.moe.router_group_topk": c} for c in nearest(chosen, legal))
        yield Finding("MT228", "model.moe.router_group_topk", rule, (*fixes, off))


PUBLISHED_GROUP_SCORES = {"deepseek_v2": 1, "deepseek_v3": 2}
"""Model -> how many of its best scores a group is worth in the report on it."""


def group_scores(run: RunConfig) -> Iterator[Finding]:
    """A group of experts has as many scores as it is worth, and a published model the ones of its report."""
    moe, key = run.model.moe, "model.moe.router_group_score_topk"
    if moe is None or moe.router_num_groups is None or moe.num_experts % moe.router_num_groups:
        return
    size, best = moe.num_experts // moe.router_num_groups, moe.group_score_topk or 1
    if best > size:
        rule = f"a group has {size} experts, and its score is the sum of {best}"
        yield Finding("MT242", key, rule, ({key: size}, {key: None}), also=("model.moe.router_num_groups",))
    for name, published in PUBLISHED_GROUP_SCORES.items():
        if run.model.name.startswith(name) and best != published:
            rule = f"a group of {name} is worth the sum of its {published} best scores, and here of {best}"
            rule = (
                f"a group of {name} is worth its best score, and here the sum of {best}" if published == 1 else rule
            )
            yield Finding("MT243", key, rule, ({key: published}, {"model.name": "custom"}))


def biases_in_experts(run: RunConfig) -> Iterator[Finding]:
    """megatron-core adds an expert's bias once per etp rank, so it allows one."""
    p = run.parallel
    if run.model.moe is not None and run.model.add_bias_linear and (p.etp or p.tp) > 1:
        rule = f"biases in experts need etp 1, and it is {p.etp or p.tp}"
        fixes: tuple[Change, ...] = ({"parallel.etp": 1}, {"model.add_bias_linear": False})
        yield Finding("MT229", "model.add_bias_linear", rule, fixes)
    if run.model.moe is not None and run.model.add_bias_linear and run.model.moe.shared_expert_intermediate_size:
        rule = "megatron-core's shared experts have no biases, and add_bias_linear gives one to every linear layer"
        shared: Change = {"model.moe.shared_expert_intermediate_size": None, "model.moe.shared_expert_overlap": False}
        yield Finding(
            "MT240",
            "model.add_bias_linear",
            rule,
            ({"model.add_bias_linear": False}, shared),
            also=("model.moe.shared_expert_intermediate_size",),
        )


def capacity(run: RunConfig) -> Iterator[Finding]:
    """Experts of limited capacity: which balancing allows it, and what it makes of a layout."""
    moe, p = run.model.moe, run.parallel
    if moe is None or moe.expert_capacity_factor is None:
        return
    dropless: Change = {
        "model.moe.expert_capacity_factor": None,
        "model.moe.token_drop_policy": None,
        "model.moe.pad_expert_input_to_capacity": False,
    }
    if moe.router_load_balancing_type == "sinkhorn":
        rule = "sinkhorn has its own balance; capacity works with aux_loss, seq_aux_loss or none"
        aux: Change = {"model.moe.router_load_balancing_type": "aux_loss"}
        yield Finding("MT230", "model.moe.expert_capacity_factor", rule, (dropless, aux))
    if moe.token_dispatcher_type == "allgather":
        rule = "the allgather dispatcher is dropless"
        yield Finding("MT230", "model.moe.expert_capacity_factor", rule, (dropless, _ALLTOALL))
    if p.sequence_parallel or p.cp > 1:
        rule = (
            f"capacity is counted over the tokens of one rank: with tp {p.tp} * cp {p.cp} other tokens are dropped "
            "than on one rank"
        )
        yield Finding("MT231", "model.moe.expert_capacity_factor", rule, (dropless,), "warning")


def sinkhorn_sees_one_rank(run: RunConfig) -> Iterator[Finding]:
    """Sinkhorn normalises over the tokens that a rank has."""
    moe, p = run.model.moe, run.parallel
    if moe is None or moe.router_load_balancing_type != "sinkhorn":
        return
    aux: Change = {"model.moe.router_load_balancing_type": "aux_loss"}
    if moe.router_num_groups is not None or moe.router_enable_expert_bias:
        rule = "sinkhorn chooses by itself: group-limited routing and the balancing bias reach nothing"
        off: Change = {
            "model.moe.router_num_groups": None,
            "model.moe.router_group_topk": None,
            "model.moe.router_enable_expert_bias": False,
            "model.moe.router_bias_update_rate": None,
        }
        yield Finding(
            "MT232",
            "model.moe.router_load_balancing_type",
            rule,
            (off, aux),
            also=("model.moe.router_num_groups", "model.moe.router_enable_expert_bias"),
        )
    if p.sequence_parallel or p.cp > 1:
        rule = f"balances the tokens of one rank: with tp {p.tp} * cp {p.cp} it chooses otherwise than on one rank"
        yield Finding("MT233", "model.moe.router_load_balancing_type", rule, (aux,), "warning")


def overlapped_shared_experts(run: RunConfig) -> Iterator[Finding]:
    """Only the all-to-all dispatcher leaves time for the shared experts, and their gates are then plain ones."""
    moe, m, key = run.model.moe, run.model, "model.moe.shared_expert_overlap"
    if moe is None or not moe.shared_expert_overlap:
        return
    off: Change = {key: False}
    if moe.token_dispatcher_type != "alltoall":
        rule = f"needs the alltoall dispatcher, and it is {moe.token_dispatcher_type}"
        yield Finding("MT234", key, rule, (_ALLTOALL, off))
    if m.glu_linear_offset or m.activation_func_clamp_value is not None:
        rule = "megatron-core's overlapped shared experts add no glu_linear_offset and bound nothing"
        yield Finding("MT244", key, rule, (off,))


def flex_dispatcher(run: RunConfig) -> Iterator[Finding]:
    """Kernels that send tokens themselves run on GPUs, between ranks, and know capacity in one of two."""
    moe, p = run.model.moe, run.parallel
    if moe is None or moe.token_dispatcher_type != "flex":
        return
    alltoall: Change = {**_ALLTOALL, "model.moe.flex_dispatcher_backend": None}
    package = {"hybridep": "HybridEP"}.get(moe.flex_dispatcher_backend or "", "DeepEP")
    if run.cluster.device != "cuda":
        rule = f"the flex dispatcher is {package}'s kernels on cuda, and the device is {run.cluster.device}"
        yield Finding("MT235", "model.moe.token_dispatcher_type", rule, (alltoall,))
    if p.ep * (p.etp or p.tp) == 1:
        rule = "the flex dispatcher sends tokens between ranks, and ep 1 * etp 1 keeps them"
        yield Finding("MT236", "model.moe.token_dispatcher_type", rule, (alltoall,))
    if moe.pad_expert_input_to_capacity and moe.flex_dispatcher_backend != "hybridep":
        rule = "DeepEP's dispatcher pads no expert to its capacity"
        off: Change = {"model.moe.pad_expert_input_to_capacity": False}
        yield Finding(
            "MT237",
            "model.moe.pad_expert_input_to_capacity",
            rule,
            (off, alltoall),
            also=("model.moe.token_dispatcher_type", "model.moe.flex_dispatcher_backend"),
        )


def padding_router(run: RunConfig) -> Iterator[Finding]:
    """The allgather dispatcher has no place for a router's padding."""
    moe = run.model.moe
    if moe is not None and moe.router_padding_for_quantization and moe.token_dispatcher_type == "allgather":
        off: Change = {"model.moe.router_padding_for_quantization": False}
        rule = "the allgather dispatcher sends no padding of the router"
        yield Finding("MT238", "model.moe.router_padding_for_quantization", rule, (_ALLTOALL, off))


def benchmarks_only(run: RunConfig) -> Iterator[Finding]:
    """Random routing measures speed and trains no model."""
    moe = run.model.moe
    if moe is not None and moe.router_force_load_balancing:
        rule = "tokens go to random experts: for measuring speed, not for a model"
        off: Change = {"model.moe.router_force_load_balancing": False}
        yield Finding("MT239", "model.moe.router_force_load_balancing", rule, (off,), "warning")


_ALLTOALL: Change = {"model.moe.token_dispatcher_type": "alltoall"}

RULES = (
    capacity,
    sinkhorn_sees_one_rank,
    overlapped_shared_experts,
    flex_dispatcher,
    padding_router,
    benchmarks_only,
    expert_axes_need_experts,
    experts_divide,
    expert_grid_is_whole,
    experts_with_tp_need_sequence_parallel,
    router_numbers,
    some_layers_have_experts,
    router_scores,
    group_limited_routing,
    group_scores,
    biases_in_experts,
)
