"""Finds the family of a model: those that ship, then the plug-ins that are installed."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any

from mtrain.config.machine import installed
from mtrain.config.schema.model import ModelConfig
from mtrain.errors import ConfigError, Problem
from mtrain.models.base import Family
from mtrain.models.bert import BERT
from mtrain.models.gpt import GPT
from mtrain.models.hybrid import HYBRID
from mtrain.models.llava import LLAVA
from mtrain.models.t5 import T5

GROUP = "mtrain.models"
"""Entry point group of families; the entry point's value is a `Family`."""

_SHIPPED = {family.name: family for family in (GPT, BERT, T5, LLAVA, HYBRID)}


def names() -> tuple[str, ...]:
    """Return every family that can be asked for, shipped ones first."""
    return (*_SHIPPED, *sorted(installed.found(GROUP).keys() - _SHIPPED.keys()))


def family_of(model: ModelConfig) -> Family:
    """Return the family that `model.family` names.

    Raises `ConfigError` for a name that nothing provides, or without the section that the family
    needs; `BadEnvironment` for a plug-in that does not load.
    """
    family = _SHIPPED.get(model.family) or _load(model.family)
    if family.section is not None and getattr(model, family.section, None) is None:
        path = f"model.{family.section}"
        rule = f"the family {family.name} is described there"
        raise ConfigError(
            [Problem("MT246", path, None, rule, f"{path}={{...}}, or model.family={GPT.name}")]
        )
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
    """Return token ids to ask a model with, and what a chunk of ours and the model of transformers
    read beside them.
    """
    probe = family_of(model).probe
    asked: tuple[list[int], dict[str, Any], dict[str, Any]] = (list(ids), {}, {})
    return imported(probe)(model, ids) if probe else asked


@cache
def _load(name: str) -> Family:
    entry = installed.found(GROUP).get(name)
    if entry is None:
        raise ConfigError([_unknown(name)])
    return installed.load(entry, f"model family {name!r}", Family)


def _unknown(name: str) -> Problem:
    known = names()
    near = difflib.get_close_matches(name, known, n=1)
    rule = f"there is no such family here; families: {', '.join(known)} (a plug-in adds one)"
    return Problem(
        "MT245", "model.family", name, rule, f"model.family={near[0] if near else GPT.name}"
    )
