"""Pipeline rules: the layers of each stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mtrain.config.resolve.stages import MAX_STAGES, stages, uneven
from mtrain.config.rules.finding import Change, Finding, divisors, each, listed, multiples, nearest
from mtrain.config.rules.rule import Code, rule
from mtrain.config.schema.run import RunConfig
from mtrain.units import number_of

LAYERS = "parallel.layers_per_stage"
LAYOUT = "parallel.pipeline_layout"
EQUAL: Change = {
    LAYOUT: None,
    LAYERS: None,
    "parallel.account_for_embedding_in_pipeline_split": False,
    "parallel.account_for_loss_in_pipeline_split": False,
}
SPLIT = " ".join(EQUAL)
"""Keys that split layers into stages."""
NO_PREDICTIONS: Change = {"model.mtp_num_layers": None, "model.mtp_loss_scaling_factor": None}


def single() -> Change:
    """Return the change that removes every axis, for one rank."""
    ones = {f"parallel.{axis}": 1 for axis in ("tp", "pp", "vpp", "cp", "ep", "hsdp_replicas")}
    unset = ("etp", "sequence_parallel", "ranks", "cp_comm_type", "hierarchical_cp_sizes")
    return {**ones, **{f"parallel.{key}": None for key in unset}, **EQUAL}


def _set_splits(run: RunConfig) -> list[str]:
    """Return the keys of `EQUAL` that split the layers unevenly."""
    return [k for k, off in EQUAL.items() if getattr(run.parallel, k.rpartition(".")[2]) != off]


@rule(
    Code(
        "MT144",
        example=(
            "parallel=pp2 model.mtp_num_layers=1 model.position_embedding_type=learned_absolute"
        ),
    ),
    reads="model.mtp_num_layers parallel.pp model.position_embedding_type",
)
def prediction_positions(run: RunConfig) -> Iterator[Finding]:
    """Cannot train multi-token prediction with learned positions because its stage looks them up in
    a copy of the table, whose gradient megatron-core does not sum over the stages.
    """
    m = run.model
    # megatron-core sums the gradient of the shared word embedding over stages, but not that of a
    # table of positions.
    if m.mtp_num_layers and run.parallel.pp > 1 and m.position_embedding_type == "learned_absolute":
        path = "model.position_embedding_type"
        fixes = [{path: "rope"}, {**NO_PREDICTIONS, **EQUAL}, NO_PREDICTIONS]
        detail = f"{number_of(m.mtp_num_layers, 'MTP layer')}, pp {run.parallel.pp}"
        yield Finding("MT144", path, detail, fixes, also=("model.mtp_num_layers",))


@rule(
    Code(
        "MT106",
        "Cannot fill every pipeline stage because there are fewer layers than stages.",
        example="parallel=pp8",
    ),
    Code("MT107", example="parallel=pp3"),
    Code(
        "MT108",
        "Cannot split a stage into equal virtual stages because its layers do not divide.",
        example="parallel=pp2vpp3",
    ),
    reads=f"model.num_layers {SPLIT} parallel.pp parallel.vpp",
)
def stage_divisibility(run: RunConfig) -> Iterator[Finding]:
    """Cannot split the layers into equal stages because pp does not divide them."""
    layers = run.model.num_layers
    p = run.parallel
    # Stages of explicit sizes have their own rule (MT142).
    if uneven(run):
        return
    blocks = p.pp * p.vpp
    legal_pp = [
        d for d in divisors(layers, 2 * p.pp) if layers % (d * p.vpp) == 0 and (d > 1 or p.vpp == 1)
    ]
    pp_fixes: list[Change] = []
    # A number of ranks that was set may not be a multiple of another pp.
    for pp in nearest(p.pp, [d for d in legal_pp if d != p.pp]):
        pp_fixes += [{"parallel.pp": pp}, {"parallel.pp": pp, "parallel.ranks": None}]
    if layers < p.pp:
        fixes = [*pp_fixes, {"model.num_layers": blocks}, single()]
        detail = f"{number_of(layers, 'layer')} on {p.pp} stages"
        yield Finding("MT106", "parallel.pp", detail, fixes)
    elif layers % p.pp:
        own = {LAYERS: _nearly_equal(layers, blocks)} if blocks <= MAX_STAGES else EQUAL
        grow = each("model.num_layers", multiples(layers, blocks))
        detail = f"{layers} layers, {p.pp} stages; pp that divide: {listed(divisors(layers))}"
        yield Finding("MT107", "parallel.pp", detail, [own, *pp_fixes, *grow, single()])
    elif p.vpp > 1 and p.pp > 1 and layers % blocks:
        per_stage = layers // p.pp
        legal = divisors(per_stage)
        detail = (
            f"{per_stage} layers of a stage, {p.vpp} virtual stages; vpp that divide:"
            f" {listed(legal)}"
        )
        yield Finding("MT108", "parallel.vpp", detail, each("parallel.vpp", nearest(p.vpp, legal)))


def _nearly_equal(layers: int, blocks: int) -> list[int]:
    """Return sizes that differ by at most one, smallest for the first and last stage, which hold
    embedding and loss.
    """
    size, rest = divmod(layers, blocks)
    # Extra layers go to the middle first, then to the last stage, then to the first.
    larger = set([*range(1, blocks - 1), blocks - 1, 0][:rest])
    return [size + (i in larger) for i in range(blocks)]


def _nearest(sizes: Sequence[int], layers: int) -> list[int] | None:
    """Return the nearest sizes of at least one layer that sum to `layers`, or None if all are far.

    The largest sizes shrink, and the smallest grow.
    """
    out = [min(max(size, 1), layers) for size in sizes]
    if abs(sum(out) - layers) > len(out) + layers:
        return None
    while (excess := sum(out) - layers) != 0:
        sign = 1 if excess > 0 else -1
        out[out.index(max(out) if sign > 0 else min(out))] -= sign
    return out


@rule(
    Code(
        "MT141",
        example=(f"parallel=pp2 {LAYERS}=[2,2] parallel.account_for_loss_in_pipeline_split=true"),
    ),
    reads=SPLIT,
)
def stage_definition(run: RunConfig) -> Iterator[Finding]:
    """Cannot split the layers in two ways because each key defines all stages."""
    found = _set_splits(run)
    # The two keys that account for embedding and loss are one way, and go together.
    if len({"account" if "account" in key else key for key in found}) > 1:
        rest = {key: EQUAL[key] for key in found[1:]}
        yield Finding("MT141", found[0], " and ".join(found), [rest, EQUAL], unset=True)


@rule(
    Code(
        "MT142",
        help="Write pp * vpp stages with all layers of the model, or leave the split to mtrain.",
        example=f"parallel=pp2 {LAYERS}=[4]",
    ),
    Code(
        "MT143",
        "Cannot build a stage because it would hold nothing.",
        example=f"parallel=pp4 {LAYOUT}='Ett|tt||L'",
    ),
    reads=f"{SPLIT} model.num_layers parallel.pp parallel.vpp model.mtp_num_layers",
)
def stage_fit(run: RunConfig) -> Iterator[Finding]:
    """Cannot use these stages because they do not fit the layout or the model."""
    p = run.parallel
    if not uneven(run):
        return
    path = _set_splits(run)[0]
    blocks = p.pp * p.vpp
    layers = run.model.num_layers
    fixes: list[Change] = [EQUAL]
    if layers >= blocks > 1 and blocks <= MAX_STAGES:
        sizes = p.layers_per_stage
        near = _nearest(sizes, layers) if sizes and len(sizes) == blocks else None
        own = near or _nearly_equal(layers, blocks)
        fixes = [{**EQUAL, LAYERS: own}, *fixes]
        # The suggestion keeps the notation of the user; MTP layers follow the last of the others.
        if p.pipeline_layout is not None:
            text = "|".join("t" * size for size in own) + "m" * (run.model.mtp_num_layers or 0)
            fixes = [{**EQUAL, LAYOUT: f"E{text}L"}]
    if p.layers_per_stage and len(p.layers_per_stage) <= min(layers, MAX_STAGES):
        # As many sizes as another pp has stages: the user may have meant that pp.
        degree, rest = divmod(len(p.layers_per_stage), p.vpp)
        near = _nearest(p.layers_per_stage, layers)
        if degree not in (1, p.pp) and not rest and near is not None:
            mended: dict[str, Any] = {"parallel.pp": degree}
            if near != list(p.layers_per_stage):
                mended[LAYERS] = near
            fixes = [mended, {**mended, "parallel.ranks": None}, *fixes]
    if "account" in path:
        # Embedding and loss count as layers of their stages.
        more = p.account_for_embedding_in_pipeline_split + p.account_for_loss_in_pipeline_split
        counts = [n - more for n in multiples(layers + more, blocks) if n > more]
        fixes = [*each("model.num_layers", counts), *fixes]
    fixes.append(single())
    try:
        found = stages(run)
    except ValueError as error:
        yield Finding("MT142", path, str(error), fixes)
        return
    if bare := [i for i, stage in enumerate(found) if stage.empty]:
        yield Finding("MT143", path, f"stages {listed(bare)}, number_of from 0", fixes)


@rule(Code("MT109", example="parallel=single parallel.vpp=2"), reads="parallel.vpp parallel.pp")
def interleaving_requirements(run: RunConfig) -> Iterator[Finding]:
    """Cannot interleave virtual stages because there is no pipeline."""
    p = run.parallel
    if p.vpp > 1 and p.pp == 1:
        # An explicit split for several virtual stages has too many sizes once vpp is 1.
        fixes = [{"parallel.vpp": 1}, {"parallel.pp": 2}, {**EQUAL, "parallel.vpp": 1}]
        yield Finding("MT109", "parallel.vpp", f"{p.vpp} virtual stages, pp 1", fixes)
