"""Family rules: keys that a family lacks, and the sections of other families."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from mtrain.config.families import BUILDER, ONLY, SECTIONS, Only
from mtrain.config.rules.finding import Change, Finding
from mtrain.config.rules.rule import Code, Rule, rule
from mtrain.config.schema.run import RunConfig

ABSENT = Code(
    "MT248",
    "A key says something that the family of the model does not have.",
    "Take the key away, or set it to what the family has.",
    example="model=bert_tiny model.window_size=16",
)


def family_has_it(family: str) -> Rule:
    """Return the rule that a model of a family sets only keys that the family has."""
    limits = ONLY[family]

    @rule(ABSENT, reads=" ".join(("model.family", *(only.key for only in limits))))
    def has_it(run: RunConfig) -> Iterator[Finding]:
        if run.model.family == family:
            for only, fixes in beyond(run, limits):
                yield Finding("MT248", only.key, only.why, fixes, also=("model.family",))

    return has_it


def beyond(run: RunConfig, limits: Iterable[Only]) -> Iterator[tuple[Only, tuple[Change, ...]]]:
    """Yield the keys whose values a family does not allow, with the change that corrects each."""
    for only in limits:
        node: Any = run
        for name in only.key.split("."):
            node = getattr(node, name)
        if not any(node == value and type(node) is type(value) for value in only.values):
            fixes: tuple[Change, ...] = tuple({only.key: value} for value in only.values)
            yield only, (*({**fix, **dict(only.also)} for fix in fixes if only.also), *fixes)


@rule(
    Code(
        "MT284",
        "A key says something that a decoder-only transformer built as a hybrid model does not"
        " have.",
        "Take the key away, or build a GPTModel: model.builder=gpt.",
        example="model.builder=hybrid model.parallel_residual=true",
    ),
    reads=" ".join(("model.family", "model.builder", *(only.key for only in BUILDER))),
)
def hybrid_builder_support(run: RunConfig) -> Iterator[Finding]:
    """A decoder-only transformer built as a hybrid model sets only keys that the hybrid builder
    has.
    """
    if run.model.family == "gpt" and run.model.builder == "hybrid":
        for only, fixes in beyond(run, BUILDER):
            rule = f"model.builder=hybrid: {only.why}"
            yield Finding(
                "MT284", only.key, rule, ({"model.builder": "gpt"}, *fixes), also=("model.builder",)
            )


@rule(
    Code("MT249", example="model.bert={}"),
    reads=" ".join(("model.family", *SECTIONS.values())),
)
def family_sections(run: RunConfig) -> Iterator[Finding]:
    """Only its own family sets a family's section."""
    for family, path in SECTIONS.items():
        if (
            run.model.family in (ONLY.keys() - {family})
            and getattr(run.model, path.partition(".")[2]) is not None
        ):
            rule = f"has no effect without model.family={family}"
            yield Finding("MT249", path, rule, ({path: None},), also=("model.family",))


RULES = (*map(family_has_it, ONLY), hybrid_builder_support, family_sections)
