"""Rules of the family hybrid: a pattern that can be built, and mixers that tensor parallelism can
split.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from mtrain.config.machine.devices import facts_of
from mtrain.config.rules.families import of_family
from mtrain.config.rules.finding import Change, Finding, divisors, each, listed, multiples, nearest
from mtrain.config.rules.rule import Code, rule
from mtrain.config.rules.sharding import NO_CONTEXT
from mtrain.config.schema.run import RunConfig
from mtrain.models.hybrid.config import (
    ABSENT,
    ATTENTION,
    DESCRIBED,
    EXPERTS,
    KINDS,
    MAMBA,
    SOFTMAX,
    HybridConfig,
)

TINY = "model=nemotron_h_tiny"
PATTERN = "model.hybrid.pattern"
LAYERS = "model.num_layers"
HEADS = "model.hybrid.num_heads"
GROUPS = "model.hybrid.num_groups"
DENSE = "model.moe.first_dense_layers"
SECTIONS_OF = {
    kind: [f"model.{section}" for section in sections]
    for kind, sections in DESCRIBED.items()
    if kind != EXPERTS
}
"""Letter of a pattern -> the sections that describe its layers, if they have attention."""
OF_ATTENTION = dict.fromkeys(path for paths in SECTIONS_OF.values() for path in paths)


@of_family("hybrid", Code("MT285", example=f"{TINY} {LAYERS}=4 {PATTERN}=MX*-"), reads=PATTERN)
def pattern_letters(run: RunConfig, h: HybridConfig) -> Iterator[Finding]:
    """Cannot build this pattern because it has a letter that names no layer."""
    wrong = sorted({kind for kind in h.pattern if kind not in KINDS})
    if not wrong:
        return
    known = ", ".join(f"{letter} {words}" for letter, words in KINDS.items())
    why = "; ".join(f"{letter}: {ABSENT.get(letter, 'no layer')}" for letter in wrong[:4])
    # A pattern without the unknown letters is shorter, so the number of layers must follow.
    without = "".join(kind for kind in h.pattern if kind in KINDS)
    fixes = each(PATTERN, [without] if without else [])
    fixes += [{**fix, LAYERS: len(without)} for fix in fixes]
    yield Finding("MT285", PATTERN, f"{why}; layers are {known}", fixes)


@of_family("hybrid", Code("MT286", example=f"{TINY} {LAYERS}=8"), reads=f"{LAYERS} {PATTERN}")
def pattern_length(run: RunConfig, h: HybridConfig) -> Iterator[Finding]:
    """Cannot build this pattern because it needs a letter for each layer."""
    layers = run.model.num_layers
    if len(h.pattern) != layers:
        cut = each(PATTERN, [h.pattern[:layers]] if len(h.pattern) > layers else [])
        detail = f"{len(h.pattern)} letters, {LAYERS} {layers}"
        yield Finding("MT286", PATTERN, detail, [{LAYERS: len(h.pattern)}, *cut])


@of_family(
    "hybrid",
    Code(
        "MT269",
        "Cannot build these layers because the sections that describe them are null.",
        example=f"{TINY} {LAYERS}=4 {PATTERN}=MG*-",
    ),
    Code(
        "MT270",
        "Cannot use this section because the pattern has no layer that it describes.",
        example=f"{TINY} model.linear_attention={{}}",
    ),
    Code("MT259", example=f"{TINY} {LAYERS}=4 {PATTERN}=M+*- model.mla={{}}"),
    reads=f"{PATTERN} {' '.join(OF_ATTENTION)}",
)
def attention_sections(run: RunConfig, h: HybridConfig) -> Iterator[Finding]:
    """Cannot build several kinds of softmax attention because megatron-core builds one kind per
    model.
    """
    described = {
        path: getattr(run.model, path.removeprefix("model.")) is not None for path in OF_ATTENTION
    }
    for kind, paths in SECTIONS_OF.items():
        missing = [path for path in paths if not described[path]]
        if missing and kind in h.pattern:
            # `*` is attention with key/value heads, which no section describes.
            others = {PATTERN: h.pattern.replace(kind, ATTENTION)}
            fixes: list[Change] = [others, {path: {} for path in missing}]
            detail = f"{kind} is {KINDS[kind]}: {' and '.join(missing)}"
            yield Finding("MT269", PATTERN, detail, fixes)
    for path in (path for path, there in described.items() if there):
        users = [kind for kind, paths in SECTIONS_OF.items() if path in paths]
        if not set(users) & set(h.pattern):
            detail = f"{PATTERN} {h.pattern}, no {' and no '.join(users)}"
            yield Finding("MT270", path, detail, [{path: None}])
    several = [kind for kind in SOFTMAX if kind in h.pattern]
    if len(several) > 1:
        # The last kind of the user's pattern comes first: the user added it to `*`.
        fixes = [_with_one(h.pattern, several, kind) for kind in reversed(several)]
        yield Finding("MT259", PATTERN, " and ".join(several), fixes)


def _with_one(pattern: str, several: list[str], kind: str) -> Change:
    """Return the change to one kind of softmax attention in place of several, without the sections
    of the others.
    """
    for other in several:
        pattern = pattern.replace(other, kind)
    unused = {path for other in several for path in SECTIONS_OF.get(other, ())}
    unused -= set(SECTIONS_OF.get(kind, ()))
    return {PATTERN: pattern, **dict.fromkeys(sorted(unused))}


@of_family(
    "hybrid",
    Code("MT287", example=f"{TINY} {LAYERS}=4 {PATTERN}=ME*-"),
    Code(
        "MT288",
        "Cannot use experts because the pattern has no layer with them.",
        example=f"{TINY} model.moe={{num_experts:4,ffn_hidden_size:64}}",
    ),
    Code(
        "MT289",
        "Cannot count dense layers because the pattern of a hybrid says which layers have experts.",
        example=(
            f"{TINY} {LAYERS}=4 {PATTERN}=MEM* "
            "model.moe={num_experts:4,ffn_hidden_size:64,first_dense_layers:1}"
        ),
    ),
    reads=f"{DENSE} {PATTERN}",
)
def expert_layers(run: RunConfig, h: HybridConfig) -> Iterator[Finding]:
    """Cannot build layers with experts because model.moe is null."""
    moe = run.model.moe
    has = EXPERTS in h.pattern
    if has and moe is None:
        yield Finding("MT287", PATTERN, "E", [{PATTERN: h.pattern.replace(EXPERTS, "-")}])
    if moe is not None and not has:
        yield Finding("MT288", "model.moe", f"{PATTERN} {h.pattern}", [{"model.moe": None}])
    # Both keys would name the layers with experts, and the pattern is exact.
    if moe is not None and moe.first_dense_layers:
        yield Finding("MT289", DENSE, f"{PATTERN} {h.pattern}", [{DENSE: 0}])


@of_family("hybrid", Code("MT298", example=f"{TINY} {HEADS}=18"), reads=f"{HEADS} {GROUPS}")
def mixer_groups(run: RunConfig, h: HybridConfig) -> Iterator[Finding]:
    """Cannot form equal groups of a Mamba-2 mixer because they do not divide its heads."""
    if h.num_heads % h.num_groups:
        legal = divisors(h.num_heads)
        near = each(HEADS, multiples(h.num_heads, h.num_groups))
        fewer = each(GROUPS, nearest(h.num_groups, legal))
        detail = f"{h.num_heads} heads, {GROUPS} {h.num_groups}; groups that divide:"
        yield Finding("MT298", HEADS, f"{detail} {listed(legal)}", [*near, *fewer])


@of_family(
    "hybrid",
    Code("MT299", example=f"{TINY} parallel=tp8 parallel.ranks=8"),
    reads=f"parallel.tp {GROUPS} {HEADS} parallel.ranks parallel.sequence_parallel",
)
def mixer_tensor_parallelism(run: RunConfig, h: HybridConfig) -> Iterator[Finding]:
    """Cannot split a Mamba-2 mixer over tensor-parallel ranks because each rank needs whole groups
    with their heads.
    """
    tp = run.parallel.tp
    # The norm of a mixer runs over each group, and a group on two ranks would need a reduction.
    if not (h.num_groups % tp or h.num_heads % tp):
        return
    legal = divisors(math.gcd(h.num_groups, h.num_heads))
    fixes: list[Change] = []
    for degree in nearest(tp, legal):
        change: dict[str, object] = {"parallel.tp": degree}
        if degree == 1:
            change["parallel.sequence_parallel"] = False
        fixes += [change, {**change, "parallel.ranks": None}]
    detail = f"{h.num_groups} groups of {h.num_heads} heads, tp {tp}; tp that divide:"
    yield Finding("MT299", "parallel.tp", f"{detail} {listed(legal)}", fixes)


@of_family(
    "hybrid",
    Code("MT279", example=f"{TINY} parallel=cp3 data.seq_length=252"),
    reads=f"parallel.cp parallel.tp {GROUPS} {HEADS} {PATTERN}",
)
def mixer_context_parallelism(run: RunConfig, h: HybridConfig) -> Iterator[Finding]:
    """Cannot split the heads of a mixer over cp ranks because each rank needs equally many, from
    whole groups or from one.
    """
    p = run.parallel
    # Groups that tp does not divide are reported by MT299.
    if p.cp == 1 or MAMBA not in h.pattern or h.num_groups % p.tp or h.num_heads % p.tp:
        return
    heads = h.num_heads // p.tp
    groups = h.num_groups // p.tp
    # A rank scans heads of whole groups, or a part of the heads of one.
    if heads % math.lcm(groups, p.cp):
        legal = [degree for degree in divisors(heads) if heads % math.lcm(groups, degree) == 0]
        near = [degree for degree in nearest(p.cp, legal) if degree > 1]
        detail = f"{heads} heads in {groups} groups on a rank of tp {p.tp}, cp {p.cp};"
        detail += f" cp that divide: {listed(legal)}"
        yield Finding("MT279", "parallel.cp", detail, [*each("parallel.cp", near), NO_CONTEXT])


@rule(
    Code("MT449", example=f"{TINY} precision=fp8_tensorwise cluster=h100 kernels.linear=te"),
    reads="model.family precision.fp8 kernels.linear kernels.default cluster.device",
)
def hybrid_fp8_layers(run: RunConfig) -> Iterator[Finding]:
    """Cannot multiply in 8 bits by TransformerEngine because it needs a context around each layer,
    which recomputed layers of hybrids do not have.
    """
    k = run.kernels
    if run.model.family != "hybrid" or run.precision.fp8 is None:
        return
    # A null kernel follows kernels.default, as everywhere.
    word = k.linear or ("reference" if k.default == "reference" else "auto")
    if word in ("te", "auto") and facts_of(run.cluster.device).cuda_kernels:
        fixes = [{"kernels.linear": "triton"}]
        detail = f"kernels.linear is {word}"
        yield Finding("MT449", "kernels.linear", detail, fixes, also=("precision.fp8",))


RULES = (
    pattern_letters,
    pattern_length,
    attention_sections,
    expert_layers,
    mixer_groups,
    mixer_tensor_parallelism,
    mixer_context_parallelism,
    hybrid_fp8_layers,
)
