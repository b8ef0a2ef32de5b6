"""Routing rules: how tokens choose experts, and how their load is balanced."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.rules.experts import ALLTOALL
from mtrain.config.rules.finding import Change, Finding, divisors, nearest
from mtrain.config.rules.rule import Code, rule
from mtrain.config.schema.run import RunConfig

_GROUPED = "model=mixtral_tiny model.moe.num_experts=8 model.moe.router_topk=4"


@rule(
    Code("MT220", example="model=mixtral_tiny model.moe.num_experts=1"),
    reads="model.moe.router_topk model.moe.num_experts",
)
def router_topk_range(run: RunConfig) -> Iterator[Finding]:
    """A token visits at most as many experts as there are."""
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


@rule(
    Code(
        "MT222",
        "The score of a single chosen expert has a gradient.",
        example="model=mixtral_tiny model.moe.router_topk=1",
    ),
    Code(
        "MT223",
        "The balancing bias works on sigmoid scores.",
        example="model=mixtral_tiny model.moe.router_enable_expert_bias=true",
    ),
    Code(
        "MT224",
        "Sinkhorn balances without a loss.",
        example="model=mixtral_tiny model.moe.router_load_balancing_type=sinkhorn",
    ),
    reads=(
        "model.moe.router_enable_expert_bias model.moe.router_load_balancing_type "
        "model.moe.router_score_function model.moe.router_topk model.moe.aux_loss_coeff "
        "model.moe.router_pre_softmax"
    ),
)
def router_scores(run: RunConfig) -> Iterator[Finding]:
    """Scores have a gradient, and load balancing uses the chosen ones."""
    moe = run.model.moe
    if moe is None:
        return
    softmax = (
        moe.router_score_function == "softmax" and moe.router_load_balancing_type != "sinkhorn"
    )
    if moe.router_topk == 1 and softmax and not moe.router_pre_softmax:
        rule = "a softmax over the one chosen expert is always 1 and has no gradient"
        pre: Change = {"model.moe.router_pre_softmax": True}
        yield Finding(
            "MT222", "model.moe.router_pre_softmax", rule, (pre, {"model.moe.router_topk": 2})
        )
    if moe.router_enable_expert_bias and moe.router_score_function != "sigmoid":
        rule = f"the balancing bias works on sigmoid scores, not on {moe.router_score_function}"
        sigmoid: Change = {"model.moe.router_score_function": "sigmoid"}
        off: Change = {"model.moe.router_enable_expert_bias": False}
        yield Finding("MT223", "model.moe.router_enable_expert_bias", rule, (sigmoid, off))
    if moe.router_load_balancing_type == "sinkhorn" and moe.aux_loss_coeff:
        rule = f"sinkhorn balances without a loss, and aux_loss_coeff is {moe.aux_loss_coeff}"
        yield Finding(
            "MT224", "model.moe.aux_loss_coeff", rule, ({"model.moe.aux_loss_coeff": 0.0},)
        )


@rule(
    Code(
        "MT225",
        "Group-limited routing has a number of groups and a number of chosen ones.",
        example=f"{_GROUPED} model.moe.router_num_groups=2",
    ),
    Code(
        "MT226",
        "Groups of experts are equal.",
        example=f"{_GROUPED} model.moe.router_num_groups=3 model.moe.router_group_topk=2",
    ),
    Code(
        "MT227",
        "A token cannot choose more groups than there are.",
        example=f"{_GROUPED} model.moe.router_num_groups=2 model.moe.router_group_topk=3",
    ),
    Code(
        "MT228",
        "The chosen groups hold as many experts as a token visits, and each is visited.",
        example=f"{_GROUPED} model.moe.router_num_groups=8 model.moe.router_group_topk=2",
    ),
    reads=(
        "model.moe.router_group_topk model.moe.router_num_groups model.moe.router_topk"
        " model.moe.num_experts"
    ),
)
def group_limited_routing(run: RunConfig) -> Iterator[Finding]:
    """Group-limited routing (DeepSeek-V3) has equal groups, and enough experts in the
    chosen ones.
    """
    moe = run.model.moe
    if moe is None:
        return
    groups = moe.router_num_groups
    chosen = moe.router_group_topk
    topk = moe.router_topk
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
        yield Finding(
            "MT227",
            "model.moe.router_group_topk",
            rule,
            ({"model.moe.router_group_topk": groups}, off),
        )
    elif not chosen <= topk <= chosen * (moe.num_experts // groups):
        size = moe.num_experts // groups
        rule = (
            f"{chosen} groups of {size} hold {chosen} to {chosen * size} choices, and router_topk"
            f" is {topk}"
        )
        legal = [c for c in range(1, groups + 1) if c <= topk <= c * size]
        fixes = tuple({"model.moe.router_group_topk": c} for c in nearest(chosen, legal))
        yield Finding("MT228", "model.moe.router_group_topk", rule, (*fixes, off))


PUBLISHED_GROUP_SCORES = {"deepseek_v2": 1, "deepseek_v3": 2}
"""Model -> how many of its best scores a group is worth in the report on it."""


@rule(
    Code(
        "MT242",
        "A group of experts is worth no more scores than it has experts.",
        example=(
            f"{_GROUPED} model.moe.router_num_groups=4 model.moe.router_group_topk=2 "
            "model.moe.router_group_score_topk=3"
        ),
    ),
    Code(
        "MT243",
        "A published model's groups are worth the scores of its report.",
        example=(
            f"{_GROUPED} model.moe.router_num_groups=4 model.moe.router_group_topk=2"
            " model.name=deepseek_v2"
        ),
    ),
    reads=(
        "model.moe.router_num_groups model.moe.num_experts model.moe.router_group_score_topk"
        " model.name"
    ),
)
def group_scores(run: RunConfig) -> Iterator[Finding]:
    """A group of experts sums at most its own scores, and a published model as many as its report
    states.
    """
    moe = run.model.moe
    key = "model.moe.router_group_score_topk"
    if moe is None or moe.router_num_groups is None or moe.num_experts % moe.router_num_groups:
        return
    size = moe.num_experts // moe.router_num_groups
    best = moe.group_score_topk or 1
    if best > size:
        rule = f"a group has {size} experts, and its score is the sum of {best}"
        yield Finding(
            "MT242", key, rule, ({key: size}, {key: None}), also=("model.moe.router_num_groups",)
        )
    for name, published in PUBLISHED_GROUP_SCORES.items():
        if run.model.name.startswith(name) and best != published:
            rule = (
                f"a group of {name} is worth the sum of its {published} best scores, and here of"
                f" {best}"
            )
            if published == 1:
                rule = f"a group of {name} is worth its best score, and here the sum of {best}"
            else:
                rule = rule
            yield Finding("MT243", key, rule, ({key: published}, {"model.name": "custom"}))


@rule(
    Code(
        "MT230",
        "Capacity works with a dispatcher that drops tokens, and not with sinkhorn.",
        example=(
            "model=mixtral_tiny model.moe.expert_capacity_factor=1.0"
            " model.moe.token_dispatcher_type=allgather"
        ),
    ),
    Code(
        "MT231",
        "Capacity is counted on each rank: other tokens are dropped than on one.",
        severity="warning",
        example="model=mixtral_tiny parallel=tp2sp model.moe.expert_capacity_factor=1.0",
    ),
    reads=(
        "model.moe.expert_capacity_factor model.moe.router_load_balancing_type "
        "model.moe.token_dispatcher_type parallel.cp parallel.sequence_parallel parallel.tp"
    ),
)
def capacity(run: RunConfig) -> Iterator[Finding]:
    """A limited capacity restricts load balancing and makes results depend on the layout."""
    moe = run.model.moe
    p = run.parallel
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
        yield Finding("MT230", "model.moe.expert_capacity_factor", rule, (dropless, ALLTOALL))
    if p.sequence_parallel or p.cp > 1:
        rule = (
            f"capacity is counted over the tokens of one rank: with tp {p.tp} * cp {p.cp} other"
            " tokens are dropped than on one rank"
        )
        yield Finding("MT231", "model.moe.expert_capacity_factor", rule, (dropless,))


@rule(
    Code(
        "MT232",
        "Sinkhorn chooses by itself, without groups and bias.",
        example=(
            "model=mixtral_tiny model.moe.router_load_balancing_type=sinkhorn "
            "model.moe.router_enable_expert_bias=true"
        ),
    ),
    Code(
        "MT233",
        "Sinkhorn balances the tokens that a rank has.",
        severity="warning",
        example="model=mixtral_tiny parallel=tp2sp model.moe.router_load_balancing_type=sinkhorn",
    ),
    reads=(
        "model.moe.router_load_balancing_type model.moe.router_num_groups parallel.cp "
        "parallel.sequence_parallel model.moe.router_enable_expert_bias parallel.tp"
    ),
)
def sinkhorn_scope(run: RunConfig) -> Iterator[Finding]:
    """Sinkhorn normalises over the tokens of one rank."""
    moe = run.model.moe
    p = run.parallel
    if moe is None or moe.router_load_balancing_type != "sinkhorn":
        return
    aux: Change = {"model.moe.router_load_balancing_type": "aux_loss"}
    if moe.router_num_groups is not None or moe.router_enable_expert_bias:
        rule = (
            "sinkhorn chooses by itself: group-limited routing and the balancing bias have no"
            " effect"
        )
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
        rule = (
            f"balances the tokens of one rank: with tp {p.tp} * cp {p.cp} it chooses otherwise than"
            " on one rank"
        )
        yield Finding("MT233", "model.moe.router_load_balancing_type", rule, (aux,))


@rule(
    Code(
        "MT239",
        severity="warning",
        example="model=mixtral_tiny model.moe.router_force_load_balancing=true",
    ),
    reads="model.moe.router_force_load_balancing",
)
def random_routing(run: RunConfig) -> Iterator[Finding]:
    """Random routing is for benchmarks and trains no model."""
    moe = run.model.moe
    if moe is not None and moe.router_force_load_balancing:
        rule = "tokens go to random experts: for measuring speed, not for a model"
        off: Change = {"model.moe.router_force_load_balancing": False}
        yield Finding("MT239", "model.moe.router_force_load_balancing", rule, (off,))


@rule(
    Code(
        "MT238",
        example=(
            "model=mixtral_tiny precision=fp8_tensorwise cluster=h100x8"
            " model.moe.token_dispatcher_type=allgather"
            " model.moe.router_padding_for_quantization=true"
        ),
    ),
    reads="model.moe.router_padding_for_quantization model.moe.token_dispatcher_type",
)
def router_padding(run: RunConfig) -> Iterator[Finding]:
    """The allgather dispatcher does not support a padded router."""
    moe = run.model.moe
    if (
        moe is not None
        and moe.router_padding_for_quantization
        and moe.token_dispatcher_type == "allgather"
    ):
        off: Change = {"model.moe.router_padding_for_quantization": False}
        rule = "the allgather dispatcher sends no padding of the router"
        yield Finding("MT238", "model.moe.router_padding_for_quantization", rule, (ALLTOALL, off))


RULES = (
    capacity,
    sinkhorn_scope,
    router_padding,
    random_routing,
    router_topk_range,
    router_scores,
    group_limited_routing,
    group_scores,
)
