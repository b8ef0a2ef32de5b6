"""Rules of the family hybrid: a pattern that can be built, and mixers that tensor parallelism can
split.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from mtrain.config.machine.devices import facts_of
from mtrain.config.rules.families import of_family
from mtrain.config.rules.finding import Change, Finding, divisors, listed, multiples, nearest
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


@of_family(
    "hybrid",
    Code("MT285", example=f"{TINY} model.num_layers=4 model.hybrid.pattern=MX*-"),
    reads=PATTERN,
)
def every_letter_is_a_layer(run: RunConfig, h: HybridConfig) -> Iterator[Finding]:
    """Each letter of a pattern is one of the layers that there are."""
    wrong = sorted({kind for kind in h.pattern if kind not in KINDS})
    if not wrong:
        return
    known = ", ".join(f"{letter} {words}" for letter, words in KINDS.items())
    why = "; ".join(f"{letter}: {ABSENT.get(letter, 'no layer')}" for letter in wrong[:4])
    without = "".join(kind for kind in h.pattern if kind in KINDS)
    fixes: tuple[Change, ...] = ({PATTERN: without},) if without else ()
    fixes += ({PATTERN: without, "model.num_layers": len(without)},) if without else ()
    yield Finding("MT285", PATTERN, f"{why}; layers are {known}", fixes)


@of_family(
    "hybrid",
    Code("MT286", example=f"{TINY} model.num_layers=8"),
    reads=f"model.num_layers {PATTERN}",
)
def the_pattern_has_every_layer(run: RunConfig, h: HybridConfig) -> Iterator[Finding]:
    """The pattern has a letter for each layer."""
    layers = run.model.num_layers
    if len(h.pattern) != layers:
        rule = f"{len(h.pattern)} letters for model.num_layers {layers}"
        fixes: list[Change] = [{"model.num_layers": len(h.pattern)}]
        fixes += [{PATTERN: h.pattern[:layers]}] if len(h.pattern) > layers else []
        yield Finding("MT286", PATTERN, rule, tuple(fixes))


@of_family(
    "hybrid",
    Code("MT287", example=f"{TINY} model.num_layers=4 model.hybrid.pattern=ME*-"),
    Code(
        "MT288",
        "Experts that no layer has.",
        example=f"{TINY} model.moe={{num_experts:4,ffn_hidden_size:64}}",
    ),
    Code(
        "MT289",
        "Which layers of a hybrid have experts, its pattern says.",
        example=(
            f"{TINY} model.num_layers=4 model.hybrid.pattern=MEM* "
            "model.moe={num_experts:4,ffn_hidden_size:64,first_dense_layers:1}"
        ),
    ),
    reads=f"model.moe.first_dense_layers {PATTERN}",
)
def experts_are_where_the_pattern_has_them(run: RunConfig, h: HybridConfig) -> Iterator[Finding]:
    """Layers with experts need a section that describes them, and the section layers."""
    moe = run.model.moe
    has = EXPERTS in h.pattern
    if has and moe is None:
        dense: Change = {PATTERN: h.pattern.replace(EXPERTS, "-")}
        yield Finding(
            "MT287", PATTERN, "E is a layer with experts, and model.moe is null", (dense,)
        )
    if moe is not None and not has:
        yield Finding(
            "MT288", "model.moe", f"{PATTERN} {h.pattern} has no E", ({"model.moe": None},)
        )
    if moe is not None and moe.first_dense_layers:
        rule = f"{PATTERN} says which layers have experts, not how many first ones have none"
        yield Finding(
            "MT289", "model.moe.first_dense_layers", rule, ({"model.moe.first_dense_layers": 0},)
        )


SECTIONS_OF = {
    kind: [f"model.{section}" for section in sections]
    for kind, sections in DESCRIBED.items()
    if kind != EXPERTS
}
"""Letter of a pattern -> the sections that describe its layers, if they have attention."""
OF_ATTENTION = dict.fromkeys(path for paths in SECTIONS_OF.values() for path in paths)


@of_family(
    "hybrid",
    Code("MT269", example=f"{TINY} model.num_layers=4 model.hybrid.pattern=MG*-"),
    Code(
        "MT270",
        "The section of a kind of layer that the pattern does not have.",
        example=f"{TINY} model.linear_attention={{}}",
    ),
    Code(
        "MT259",
        "megatron-core builds one kind of softmax attention into a model.",
        example=f"{TINY} model.num_layers=4 model.hybrid.pattern=M+*- model.mla={{}}",
    ),
    reads=f"{PATTERN} {' '.join(OF_ATTENTION)}",
)
def attention_is_described(run: RunConfig, h: HybridConfig) -> Iterator[Finding]:
    """Layers of MLA and gated delta nets need a section that describes them, and the section
    layers.
    """
    described = {
        path: getattr(run.model, path.removeprefix("model.")) is not None for path in OF_ATTENTION
    }
    for kind, paths in SECTIONS_OF.items():
        missing = [path for path in paths if not described[path]]
        if missing and kind in h.pattern:
            rule = (
                f"{kind} is {KINDS[kind]}, and {' and '.join(missing)}"
                f" {'is' if len(missing) == 1 else 'are'} null"
            )
            others: Change = {PATTERN: h.pattern.replace(kind, ATTENTION)}
            yield Finding("MT269", PATTERN, rule, (others, {path: {} for path in missing}))
    for path in (path for path, there in described.items() if there):
        users = [kind for kind, paths in SECTIONS_OF.items() if path in paths]
        if not set(users) & set(h.pattern):
            yield Finding(
                "MT270",
                path,
                f"{PATTERN} {h.pattern} has no {' and no '.join(users)}",
                ({path: None},),
            )
    several = [kind for kind in SOFTMAX if kind in h.pattern]
    if len(several) > 1:
        rule = (
            f"{' and '.join(several)}: megatron-core builds no model with several kinds of"
            " softmax attention"
        )
        yield Finding(
            "MT259",
            PATTERN,
            rule,
            tuple(_with_one(h.pattern, several, kind) for kind in several[::-1]),
        )


def _with_one(pattern: str, several: list[str], kind: str) -> Change:
    """Return the change to one kind of softmax attention in place of several, without the sections
    of the others.
    """
    for other in several:
        pattern = pattern.replace(other, kind)
    unused = {path for other in several for path in SECTIONS_OF.get(other, ())} - {
        *SECTIONS_OF.get(kind, ())
    }
    return {PATTERN: pattern, **dict.fromkeys(sorted(unused))}


@of_family(
    "hybrid",
    Code("MT298", example=f"{TINY} model.hybrid.num_heads=18"),
    reads="model.hybrid.num_heads model.hybrid.num_groups",
)
def groups_divide_mamba_heads(run: RunConfig, h: HybridConfig) -> Iterator[Finding]:
    """Every group of a Mamba-2 mixer has as many heads."""
    if h.num_heads % h.num_groups:
        legal = divisors(h.num_heads)
        rule = f"{h.num_heads} heads do not divide into {h.num_groups} groups"
        rule = f"{rule} (model.hybrid.num_groups); groups that divide: {listed(legal)}"
        near: tuple[Change, ...] = tuple(
            {"model.hybrid.num_heads": n} for n in multiples(h.num_heads, h.num_groups)
        )
        fewer: tuple[Change, ...] = tuple(
            {"model.hybrid.num_groups": n} for n in nearest(h.num_groups, legal)
        )
        yield Finding("MT298", "model.hybrid.num_heads", rule, (*near, *fewer))


@of_family(
    "hybrid",
    Code("MT299", example=f"{TINY} parallel=tp8 parallel.ranks=8"),
    reads=(
        "parallel.tp model.hybrid.num_groups model.hybrid.num_heads parallel.ranks "
        "parallel.sequence_parallel"
    ),
)
def tp_divides_mamba_groups(run: RunConfig, h: HybridConfig) -> Iterator[Finding]:
    """Every tp rank has whole groups of a Mamba-2 mixer, with their heads: each is normed by
    itself.
    """
    tp = run.parallel.tp
    if not (h.num_groups % tp or h.num_heads % tp):
        return
    legal = divisors(math.gcd(h.num_groups, h.num_heads))
    rule = f"{h.num_groups} groups of {h.num_heads} heads do not divide by tp {tp}"
    fixes: list[Change] = []
    for degree in nearest(tp, legal):
        alone = {"parallel.sequence_parallel": False} if degree == 1 else {}
        fixes += [
            {"parallel.tp": degree, **alone},
            {"parallel.tp": degree, "parallel.ranks": None, **alone},
        ]
    yield Finding("MT299", "parallel.tp", f"{rule}; tp that divide: {listed(legal)}", tuple(fixes))


@of_family(
    "hybrid",
    Code("MT279", example=f"{TINY} parallel=cp3 data.seq_length=252"),
    reads=(f"parallel.cp parallel.tp model.hybrid.num_groups model.hybrid.num_heads {PATTERN}"),
)
def cp_divides_mamba_heads(run: RunConfig, h: HybridConfig) -> Iterator[Finding]:
    """Under context parallelism every rank scans some heads of a mixer, of whole groups or of a
    single one.
    """
    p = run.parallel
    if p.cp == 1 or MAMBA not in h.pattern or h.num_groups % p.tp or h.num_heads % p.tp:
        return
    heads = h.num_heads // p.tp
    groups = h.num_groups // p.tp
    if heads % math.lcm(groups, p.cp):
        rule = (
            f"cp {p.cp} shares out the {heads} heads, in {groups} groups, that a rank of tp {p.tp}"
            " has of a mixer"
        )
        legal = [degree for degree in divisors(heads) if heads % math.lcm(groups, degree) == 0]
        fixes: list[Change] = [
            {"parallel.cp": degree} for degree in nearest(p.cp, legal) if degree > 1
        ]
        yield Finding(
            "MT279", "parallel.cp", f"{rule}; cp that divide: {listed(legal)}", (*fixes, NO_CONTEXT)
        )


@rule(
    Code("MT449", example=f"{TINY} precision=fp8_tensorwise cluster=h100 kernels.linear=te"),
    reads="model.family precision.fp8 kernels.linear kernels.default cluster.device",
)
def products_in_8_bits_are_ours(run: RunConfig) -> Iterator[Finding]:
    """TransformerEngine wants a context around each layer in 8 bits, which recomputed ones would
    not have.
    """
    k = run.kernels
    word = k.linear or ("reference" if k.default == "reference" else "auto")
    cuda = facts_of(run.cluster.device).cuda_kernels
    if (
        run.model.family != "hybrid"
        or run.precision.fp8 is None
        or word not in ("te", "auto")
        or not cuda
    ):
        return
    rule = (
        "linear layers of hybrids multiply in 8 bits by kernels of ours, and kernels.linear is"
        f" {word}"
    )
    yield Finding(
        "MT449", "kernels.linear", rule, ({"kernels.linear": "triton"},), also=("precision.fp8",)
    )


RULES = (
    every_letter_is_a_layer,
    the_pattern_has_every_layer,
    attention_is_described,
    experts_are_where_the_pattern_has_them,
    groups_divide_mamba_heads,
    tp_divides_mamba_groups,
    cp_divides_mamba_heads,
    products_in_8_bits_are_ours,
)
