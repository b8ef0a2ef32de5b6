"""Rules of every family: its limits, and its section; and the decorator of a family's own rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

from mtrain.config import families
from mtrain.config.families import Limit
from mtrain.config.rules.finding import Change, Finding, each
from mtrain.config.rules.rule import Code, Rule, rule
from mtrain.config.schema.run import RunConfig
from mtrain.errors import BadEnvironment

ABSENT = Code(
    "MT248",
    "Cannot use this value because the family of the model does not have it.",
    "Remove the key, or set it to what the family has.",
    example="model=bert_tiny model.window_size=16",
)


OfFamily = Callable[[RunConfig, Any], Iterator[Finding]]
"""A rule of one family: it is given the run and the family's section."""


def of_family(
    name: str, *codes: Code, reads: str, disk: bool = False
) -> Callable[[OfFamily], Rule]:
    """Make a rule of a function that is called only for models of the family `name`.

    `reads` are the keys that it reads, as in `rule`, except for `model.family`.
    """

    def made(ask: OfFamily) -> Rule:
        @wraps(ask)
        def of_its_models(run: RunConfig) -> Iterator[Finding]:
            if run.model.family == name:
                section = getattr(run.model, name)
                if section is not None:
                    yield from ask(run, section)

        return rule(*codes, reads=f"{reads} model.family", disk=disk)(of_its_models)

    return made


def limits_of(family: str) -> Rule:
    """Return the rule that models of a family keep to its limits."""
    limits = families.limits(family)

    @rule(ABSENT, reads=" ".join(("model.family", *(limit.key for limit in limits))))
    def has_it(run: RunConfig) -> Iterator[Finding]:
        if run.model.family == family:
            for limit, fixes in beyond(run, limits):
                yield Finding("MT248", limit.key, limit.why, fixes, also=("model.family",))

    return has_it


def beyond(run: RunConfig, limits: Iterable[Limit]) -> Iterator[tuple[Limit, list[Change]]]:
    """Yield each limit that a key breaks, with the changes that would keep it."""
    for limit in limits:
        node: Any = run
        for name in limit.key.split("."):
            node = getattr(node, name)
        # `False == 0` in Python, so compare types as well.
        if any(node == value and type(node) is type(value) for value in limit.values):
            continue
        fixes = each(limit.key, limit.values)
        if limit.also:
            # Some keys only make sense together, so offer their change first.
            fixes = [*({**fix, **dict(limit.also)} for fix in fixes), *fixes]
        yield limit, fixes


_SECTIONS = dict(families.sections())


@rule(Code("MT249", example="model.bert={}"), reads=" ".join(("model.family", *_SECTIONS.values())))
def sections_of_other_families(run: RunConfig) -> Iterator[Finding]:
    """Cannot use the section of a family because the model is of another family."""
    family = run.model.family
    for name, path in _SECTIONS.items():
        # A plug-in family may read the section of a family that ships.
        known = family == name or not families.ships(family)
        if not known and getattr(run.model, name) is not None:
            detail = f"it needs model.family={name}"
            yield Finding("MT249", path, detail, [{path: None}], also=("model.family",))


def rules_of(name: str) -> tuple[Rule, ...]:
    """Return the rules of one family: its limits, and those of its module `rules`.

    Raises:
        BadEnvironment: the module of a plug-in does not load, or a code of it does not begin with
            the name of its family.
    """
    own: tuple[Rule, ...] = ()
    if families.has(name, "rules"):
        own = families.part(name, "rules", "RULES", tuple)
    if not families.ships(name):
        # A separate prefix distinguishes a plug-in's codes from other plug-ins' and from MT codes.
        begin = code_prefix(name)
        for code in (code.code for each in own for code in each.codes):
            if not code.removeprefix(begin).isdecimal() or not code.startswith(begin):
                raise BadEnvironment(
                    f"model family {name!r}: code {code} of its rules is not {begin} and a number"
                )
    return (limits_of(name), *own)


def code_prefix(family: str) -> str:
    """Return the beginning of the codes of a plug-in: the family's name in capitals."""
    return family.replace("_", "").upper()


def rules_of_families() -> tuple[Rule, ...]:
    """Return the rules of every family; a plug-in whose rules do not load has none here.

    A model that names such a family is refused by the registry, with the reason.
    """
    found: list[Rule] = []
    for name in families.configs():
        try:
            found += rules_of(name)
        except BadEnvironment:
            continue
    return (*found, *RULES)


RULES = (sections_of_other_families,)
