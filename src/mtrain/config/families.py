"""The registry of model families, as far as a configuration needs it: sections, limits and rules.

A family is a package with a module `config`, which gives its `FamilyConfig`, and a module `family`,
which gives the rest (`mtrain.models.base.Family`). Where it has them, its module `rules` gives
`RULES`, and its module `hf_config` gives `KINDS`, which read and write its `config.json`. The
packages below `mtrain.models` ship; a plug-in names its package by an entry point in the group
`mtrain.models`.

The schema imports this module, and `config` of every family, so neither imports the schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from pydantic import Field, create_model

from mtrain.config.machine import installed
from mtrain.config.schema.base import Section
from mtrain.errors import BadEnvironment

# Entry point group of families. A value is a package, or `module:NAME` of a `Family` that adds no
# keys.
GROUP = "mtrain.models"
# The family of a model that names none.
FIRST = "gpt"

Model = TypeVar("Model", bound=Section)


class FamilySection(Section):
    """The keys that a family adds, as `model.NAME`."""

    FAMILY: ClassVar[str]
    """Its name."""

    @classmethod
    def of(cls, model: Section) -> Self:
        """Return the section of a model of the family, which always has it."""
        section: Self | None = getattr(model, cls.FAMILY)
        assert section is not None, f"a model of the family {cls.FAMILY} has its section"
        return section


@dataclass(frozen=True)
class Limit:
    """The values that a key may have."""

    key: str
    values: tuple[Any, ...]
    """The first one is offered in place of another."""
    why: str
    """The reason, as it stands after the value in a message."""
    also: tuple[tuple[str, Any], ...] = ()
    """Other keys to change with it, and their values."""


NO_ADAPTERS = Limit(
    "peft.kind",
    (None,),
    "adapters are of decoder-only transformers",
    tuple((f"peft.{key}", None) for key in ("r", "alpha", "target")),
)
NO_NORMS_ON_SUMS = Limit(
    "model.norm_placement",
    ("pre", "post", "pre_and_post"),
    "norms on the sum are of the family bert",
)


def absent(off: Any, keys: str, why: str) -> tuple[Limit, ...]:
    """Return a limit to `off` for each of some keys of `model`."""
    return tuple(Limit(f"model.{key}", (off,), why) for key in keys.split())


@dataclass(frozen=True, kw_only=True)
class FamilyConfig:
    """The configuration of a family: its own section, and limits on the keys of every model."""

    section: type[Section] | None = None
    """The schema of `model.NAME`, by the family's name."""
    about: str = ""
    """Description of the section, for `explain` and the page of all keys."""
    limits: tuple[Limit, ...] = ()
    """Keys that the family does not read, or whose other values it cannot build."""


@cache
def packages() -> Mapping[str, str]:
    """Return the package of each family: the shipped ones, then those of plug-ins."""
    folder = Path(__file__).parents[1] / "models"
    shipped = sorted(
        (file.parent.name for file in folder.glob("*/config.py")),
        # gpt first: messages list it before the others.
        key=lambda name: (name != FIRST, name),
    )
    known = {name: f"mtrain.models.{name}" for name in shipped}
    added = {
        name: entry.module
        for name, entry in sorted(installed.found(GROUP).items())
        # A plug-in cannot replace a family that ships.
        if not entry.attr and name not in known
    }
    return known | added


def ships(name: str) -> bool:
    """Return whether a family is part of mtrain."""
    return packages().get(name, "").startswith("mtrain.models.")


@cache
def configs() -> Mapping[str, FamilyConfig]:
    """Return the configuration of every family that loads.

    A plug-in that does not load is left out here, and refused when a model names it (`load`).
    """
    found: dict[str, FamilyConfig] = {}
    for name in packages():
        try:
            found[name] = config_of(name)
        except BadEnvironment:
            continue
    return found


def config_of(name: str) -> FamilyConfig:
    """Return the configuration of one family.

    Raises:
        BadEnvironment: the plug-in does not load, or provides something else.
    """
    return part(name, "config", "CONFIG", FamilyConfig)


Part = TypeVar("Part")


def part(name: str, module: str, attribute: str, kind: type[Part]) -> Part:
    """Return one object of a family's package.

    Raises:
        BadEnvironment: the module does not load, or the object is of another class.
    """
    place = f"{packages()[name]}.{module}"
    try:
        value = getattr(import_module(place), attribute)
    except Exception as error:
        # A fault of mtrain itself: its traceback is more useful than a message about plug-ins.
        if ships(name):
            raise
        raise BadEnvironment(
            f"model family {name!r}: {place}.{attribute} does not load: {error}"
        ) from error
    if not isinstance(value, kind):
        raise BadEnvironment(
            f"model family {name!r}: {place}.{attribute} is no {kind.__module__}.{kind.__name__}"
        )
    return value


def has(name: str, module: str) -> bool:
    """Return whether a family's package has a module, as `rules`."""
    return find_spec(f"{packages()[name]}.{module}") is not None


def sections() -> Iterator[tuple[str, str]]:
    """Yield each family that has a section, with the section's path."""
    for name, config in configs().items():
        if config.section is not None:
            yield name, f"model.{name}"


def with_sections(model: type[Model]) -> type[Model]:
    """Add the section of every family to the schema of a model, as a key that may be null."""
    fields: dict[str, Any] = {
        name: (config.section | None, Field(default=None, description=config.about))
        for name, config in configs().items()
        if config.section is not None and name not in model.model_fields
    }
    return create_model(
        model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **fields
    )


def limits(family: str) -> tuple[Limit, ...]:
    """Return the limits of a family; a plug-in may have none."""
    config = configs().get(family)
    return config.limits if config is not None else ()


def limited(family: str, key: str) -> Limit | None:
    """Return the limit of a key in a family, if there is one."""
    return next((limit for limit in limits(family) if limit.key == key), None)
