"""Pipeline rules: the layers of each stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mtrain.config.resolve.stages import MAX_STAGES, stages, uneven
from mtrain.config.rules.finding import Change, Finding, divisors, listed, multiples, nearest
from mtrain.config.rules.rule import Code, rule
from mtrain.config.schema.run import RunConfig

EQUAL: Change = {
    "parallel.pipeline_layout": None,
    "parallel.layers_per_stage": None,
    "parallel.account_for_embedding_in_pipeline_split": False,
    "parallel.account_for_loss_in_pipeline_split": False,
}
SPLIT = " ".join(EQUAL)
"""Keys that say how layers are split into stages."""


def single() -> Change:
    """Return the change that removes every axis, for one rank."""
    ones: dict[str, object] = {
        f"parallel.{axis}": 1 for axis in ("tp", "pp", "vpp", "cp", "ep", "hsdp_replicas")
    }
    off = {"parallel.etp": None, "parallel.sequence_parallel": None, "parallel.ranks": None}
    return {
        **ones,
        **off,
        **EQUAL,
        "parallel.cp_comm_type": None,
        "parallel.hierarchical_cp_sizes": None,
    }


@rule(
    Code("MT106", "Every pipeline stage holds a layer.", example="parallel=pp8"),
    Code(
        "MT107",
        "Every pipeline stage holds as many layers, unless a key splits them unevenly.",
        example="parallel=pp3",
    ),
    Code(
        "MT108",
        "Every virtual stage holds as many layers, unless a key splits them unevenly.",
        example="parallel=pp2vpp3",
    ),
    reads=f"model.num_layers {SPLIT} parallel.pp parallel.vpp",
)
def stage_divisibility(run: RunConfig) -> Iterator[Finding]:
    """Without explicit sizes, every pipeline and virtual stage holds the same number of layers."""
    layers = run.model.num_layers
    p = run.parallel
    if uneven(run):
        return
    blocks = p.pp * p.vpp
    legal_pp = [
        d for d in divisors(layers, 2 * p.pp) if layers % (d * p.vpp) == 0 and (d > 1 or p.vpp == 1)
    ]
    pp_fixes: list[Change] = []
    for pp in nearest(p.pp, [d for d in legal_pp if d != p.pp]):
        pp_fixes += [{"parallel.pp": pp}, {"parallel.pp": pp, "parallel.ranks": None}]
    if layers < p.pp:
        rule = (
            f"{layers} layer{'s' if layers > 1 else ''} on {p.pp} stages: at least one would be"
            " empty"
        )
        fixes = (*pp_fixes, {"model.num_layers": blocks}, single())
        yield Finding("MT106", "parallel.pp", rule, fixes)
    elif layers % p.pp:
        rule = (
            f"{layers} layers do not divide over {p.pp} stages; pp that divide:"
            f" {listed(divisors(layers))}"
        )
        grow: tuple[Change, ...] = tuple({"model.num_layers": n} for n in multiples(layers, blocks))
        if blocks <= MAX_STAGES:
            own: Change = {"parallel.layers_per_stage": _nearly_equal(layers, blocks)}
        else:
            own = EQUAL
        yield Finding("MT107", "parallel.pp", rule, (own, *pp_fixes, *grow, single()))
    elif p.vpp > 1 and p.pp > 1 and layers % blocks:
        per_stage = layers // p.pp
        legal = divisors(per_stage)
        rule = (
            f"{per_stage} layers of a stage do not divide into {p.vpp} virtual stages; legal:"
            f" {listed(legal)}"
        )
        yield Finding(
            "MT108", "parallel.vpp", rule, tuple({"parallel.vpp": v} for v in nearest(p.vpp, legal))
        )


def _nearly_equal(layers: int, blocks: int) -> list[int]:
    """Return sizes that differ by at most one, smallest for the first and last stage, which hold
    embedding and loss.
    """
    size, rest = divmod(layers, blocks)
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


def _written(sizes: Sequence[int], mtp: int) -> str:
    """Return the layout string of stages with given sizes."""
    return f"E{'|'.join('t' * size for size in sizes)}{'m' * mtp}L"


@rule(
    Code(
        "MT141",
        example=(
            "parallel=pp2 parallel.layers_per_stage=[2,2]"
            " parallel.account_for_loss_in_pipeline_split=true"
        ),
    ),
    reads=f"{SPLIT}",
)
def stage_definition(run: RunConfig) -> Iterator[Finding]:
    """One key defines the split into stages."""
    said = [k for k, off in EQUAL.items() if getattr(run.parallel, k.rpartition(".")[2]) != off]
    kinds = {"account" if "account" in k else k for k in said}
    if len(kinds) > 1:
        first = said[0]
        rest: Change = {k: EQUAL[k] for k in said[1:]}
        rule = f"the split into stages is set more than once: {' and '.join(said)}"
        yield Finding("MT141", first, rule, (rest, EQUAL), unset=True)


@rule(
    Code(
        "MT142",
        "What the stages are written to hold does not fit the layout or the model.",
        help=(
            "Write as many stages as pp * vpp, with all layers of the model, or leave the split to"
            " mtrain."
        ),
        example="parallel=pp2 parallel.layers_per_stage=[4]",
    ),
    Code(
        "MT143",
        "A written stage holds nothing.",
        example="parallel=pp4 parallel.pipeline_layout='Ett|tt||L'",
    ),
    reads=f"{SPLIT} model.num_layers parallel.pp parallel.vpp model.mtp_num_layers",
)
def stage_fit(run: RunConfig) -> Iterator[Finding]:
    """Explicit stages match the layout and hold the layers of the model."""
    p = run.parallel
    if not uneven(run):
        return
    path = next(k for k, off in EQUAL.items() if getattr(p, k.rpartition(".")[2]) != off)
    blocks = p.pp * p.vpp
    layers = run.model.num_layers
    fixes: list[Change] = [EQUAL]
    if layers >= blocks > 1 and blocks <= MAX_STAGES:
        sizes = p.layers_per_stage
        near = _nearest(sizes, layers) if sizes and len(sizes) == blocks else None
        own = near or _nearly_equal(layers, blocks)
        fixes = [{**EQUAL, "parallel.layers_per_stage": own}, *fixes]
        if p.pipeline_layout is not None:
            fixes = [
                {**EQUAL, "parallel.pipeline_layout": _written(own, run.model.mtp_num_layers or 0)}
            ]
    if p.layers_per_stage and len(p.layers_per_stage) <= min(layers, MAX_STAGES):
        degree, rest = divmod(len(p.layers_per_stage), p.vpp)
        near = _nearest(p.layers_per_stage, layers)
        if degree not in (1, p.pp) and not rest and near is not None:
            mended: dict[str, Any] = {"parallel.pp": degree}
            if near != list(p.layers_per_stage):
                mended["parallel.layers_per_stage"] = near
            fixes = [mended, {**mended, "parallel.ranks": None}, *fixes]
    if "account" in path:
        more = p.account_for_embedding_in_pipeline_split + p.account_for_loss_in_pipeline_split
        fixes = [
            {"model.num_layers": n - more} for n in multiples(layers + more, blocks) if n > more
        ] + fixes
    fixes.append(single())
    try:
        found = stages(run)
    except ValueError as error:
        yield Finding("MT142", path, str(error), tuple(fixes))
        return
    bare = [i for i, stage in enumerate(found) if stage.empty]
    if bare:
        yield Finding(
            "MT143",
            path,
            f"stages {listed(bare)} (counted from 0) would hold nothing",
            tuple(fixes),
        )


@rule(Code("MT109", example="parallel=single parallel.vpp=2"), reads="parallel.vpp parallel.pp")
def interleaving_requirements(run: RunConfig) -> Iterator[Finding]:
    """Interleaving needs a pipeline."""
    p = run.parallel
    if p.vpp > 1 and p.pp == 1:
        rule = f"{p.vpp} virtual stages need a pipeline: pp is 1"
        fixes: tuple[Change, ...] = (
            {"parallel.vpp": 1},
            {"parallel.pp": 2},
            {**EQUAL, "parallel.vpp": 1},
        )
        yield Finding("MT109", "parallel.vpp", rule, fixes)


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
    """megatron-core sums gradients of word embeddings over stages, but not of position
    embeddings.
    """
    m = run.model
    p = run.parallel
    if m.mtp_num_layers and p.pp > 1 and m.position_embedding_type == "learned_absolute":
        rule = (
            "multi-token prediction looks positions up in a stage of its own, and the gradient of"
            f" a learned table is not summed over the pp {p.pp} stages"
        )
        rope: Change = {"model.position_embedding_type": "rope"}
        none: Change = {"model.mtp_num_layers": None, "model.mtp_loss_scaling_factor": None}
        yield Finding(
            "MT144",
            "model.position_embedding_type",
            rule,
            (rope, {**none, **EQUAL}, none),
            also=("model.mtp_num_layers",),
        )


RULES = (
    prediction_positions,
    stage_divisibility,
    stage_definition,
    stage_fit,
    interleaving_requirements,
)
