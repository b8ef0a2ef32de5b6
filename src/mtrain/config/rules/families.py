"""Rules of families of models: a key that a family does not have, and the sections of others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mtrain.config.families import ONLY, SECTIONS
from mtrain.config.rules.finding import Change, Finding
from mtrain.config.rules.rule import Code, Rule, rule
from mtrain.config.run import RunConfig

ABSENT = Code(
    "MT248",
    "A key says something that the family of the model does not have.",
    "Take the key away, or set it to what the family has.",
    example="model=bert_tiny model.window_size=16",
)


def family_has_it(family: str) -> Rule:
    """The rule that a model of a family keeps to what the family has."""
    limits = ONLY[family]

    @rule(ABSENT, reads=" ".join(("model.family", *(only.key for only in limits))))
    def has_it(run: RunConfig) -> Iterator[Finding]:
        if run.model.family != family:
            return
        for only in limits:
            node: Any = run
            for name in only.key.split("."):
                node = getattr(node, name)
            if not any(node == value and type(node) is type(value) for value in only.values):
                fixes: tuple[Change, ...] = tuple({only.key: value} for value in only.values)
                fixes = (*({**fix, **dict(only.also)} for fix in fixes if only.also), *fixes)
                yield Finding("MT248", only.key, only.why, fixes, also=("model.family",))

    return has_it


@rule(
    Code("MT249", example="model.bert={}"),
    reads=" ".join(("model.family", *SECTIONS.values())),
)
def sections_of_other_families_are_absent(run: RunConfig) -> Iterator[Finding]:
    """The section of a family's own keys is there for that family alone."""
    for family, path in SECTIONS.items():
        if run.model.family in (ONLY.keys() - {family}) and getattr(run.model, path.partition(".")[2]) is not None:
            rule = f"has no effect without model.family={family}"
            yield Finding("MT249", path, rule, ({path: None},), also=("model.family",))


RULES = (*map(family_has_it, ONLY), sections_of_other_families_are_absent)
