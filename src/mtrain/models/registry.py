"""Registry of the families of models: the shipped ones and the installed plug-ins."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any

from mtrain.config import families
from mtrain.config.machine import installed
from mtrain.config.messages.keys import section_in
from mtrain.config.rules.families import rules_of
from mtrain.config.schema.model import ModelConfig
from mtrain.errors import BadEnvironment, ConfigError, Problem
from mtrain.models.base import Family


def names() -> tuple[str, ...]:
    """Return every family that `model.family` may name, shipped ones first."""
    known = families.packages()
    return (*known, *sorted(installed.found(families.GROUP).keys() - known.keys()))


def family_of(model: ModelConfig) -> Family:
    """Return the family that `model.family` names.

    Raises:
        ConfigError: nothing provides the family, or the model lacks its section.
        BadEnvironment: a plug-in does not load.
    """
    family = _load(model.family)
    config = families.configs().get(family.name)
    own = family.name if config is not None and config.section is not None else None
    for section in (own, family.section):
        if section is not None and getattr(model, section, None) is None:
            path = f"model.{section}"
            rule = f"the family {family.name} is described there"
            fix = f"{path}={{...}}, or model.family={families.FIRST}"
            raise ConfigError([Problem("MT246", path, None, rule, fix)])
    return family


def problems(model: ModelConfig, origins: Mapping[str, str]) -> list[Problem]:
    """Return why a model has no family; empty where it has one."""
    try:
        family_of(model)
    except ConfigError as error:
        return [
            replace(problem, source=origins.get(problem.path, "")) for problem in error.problems
        ]
    return []


def imported(name: str) -> Any:
    """Return the function that a family names as `package.module:function`; imports torch."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)


def probed(
    model: ModelConfig, ids: Sequence[int]
) -> tuple[list[int], dict[str, Any], dict[str, Any]]:
    """Return token ids to probe a model, and further inputs of mtrain's model and transformers'."""
    probe = family_of(model).probe
    asked: tuple[list[int], dict[str, Any], dict[str, Any]] = (list(ids), {}, {})
    return imported(probe)(model, ids) if probe else asked


@cache
def _load(name: str) -> Family:
    if name in families.packages():
        section = families.config_of(name).section
        # Its section would replace that key for every other family.
        if section and section_in(ModelConfig.model_fields[name].annotation) is not section:
            raise BadEnvironment(
                f"model family {name!r}: model.{name} is a key of every model. Use another name"
            )
        # Broken rules are an error for a model that names the family, and for no other.
        rules_of(name)
        return families.part(name, "family", "FAMILY", Family)
    entry = installed.found(families.GROUP).get(name)
    if entry is None:
        raise ConfigError([_unknown(name)])
    return installed.load(entry, f"model family {name!r}", Family)


def _unknown(name: str) -> Problem:
    known = names()
    near = difflib.get_close_matches(name, known, n=1)
    rule = f"there is no such family here; families: {', '.join(known)} (a plug-in adds one)"
    return Problem(
        "MT245", "model.family", name, rule, f"model.family={near[0] if near else families.FIRST}"
    )
